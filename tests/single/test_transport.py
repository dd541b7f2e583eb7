"""Another transport, written entirely in this file with threads and queues.

It needs neither Horovod nor the simulator. Every rank is a thread with its own model and Exchange,
and all threads run at once. Collectives go through one queue to a thread. It waits until all ranks
have brought their part.
"""

import contextlib
import functools
import importlib
import queue
import random
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from parallel.made_up import came_in, gradients

from scalecom_hvd import ddp
from scalecom_hvd.agreement import Numbers
from scalecom_hvd.exchange import BinMeans, CollectiveError, Exchange, LocalTopK, ScaleCom
from scalecom_hvd.exchange.background_thread import alive
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.reference import ScaleComReference

SECONDS = 60  # the longest time that a rank waits for others

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("one_thread_per_rank")]


class Hub:
    """The meeting point of ranks. `stop` fails all present and future collectives."""

    def __init__(self, n):
        self.n = n
        self.queue = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, *what):
        future = Future()
        self.queue.put((what, future))
        return Waiting(future)

    def stop(self, reason="it is over"):
        self.queue.put((None, reason))

    def _serve(self):
        meetings, reason = {}, None
        while reason is None:
            what, future = self.queue.get()
            if what is None:
                reason = future
                break
            name, kind, rank, root, buffer = what
            brought = meetings.setdefault(name, {})
            assert rank not in brought, f"rank {rank} submitted {name} twice"
            brought[rank] = kind, root, buffer, future
            if len(brought) == self.n:
                self._meet(*zip(*(brought[rank] for rank in range(self.n)), strict=True))
                del meetings[name]
        for brought in meetings.values():
            for *_, future in brought.values():
                future.set_exception(CollectiveError(reason))
        while True:  # the daemon ends with the process
            what, future = self.queue.get()
            if what is not None:
                future.set_exception(CollectiveError(reason))

    @staticmethod
    def _meet(kinds, roots, buffers, futures):
        """Set the results of one collective, when every rank's part has arrived."""
        results = list(buffers)
        if kinds[0] == "gather":
            results = [torch.cat(buffers) for _ in futures]
        elif kinds[0] == "broadcast":
            for buffer in buffers:
                buffer.copy_(buffers[roots[0]].clone())
        else:
            total = buffers[0].clone()
            for buffer in buffers[1:]:
                total += buffer
            if total.dtype != torch.int32:
                total /= len(buffers)
            for buffer in buffers:
                buffer.copy_(total)
        for result, future in zip(results, futures, strict=True):
            future.set_result(result)


class Noting:
    """A hub's channel for one rank, with the names of all that the rank has submitted to it."""

    def __init__(self, hub):
        self.hub, self.n, self.names = hub, hub.n, []

    def submit(self, name, *what):
        self.names.append(name)
        return self.hub.submit(name, *what)


class Waiting:
    """The Work of this transport: a collective that one rank has submitted."""

    def __init__(self, future):
        self._future = future

    def done(self):
        return self._future.done()

    def wait(self):
        return self._future.result(SECONDS)


class ThreadCollectives:
    """The Collectives of one rank."""

    elastic = False
    spins = True
    is_ordered = False

    def __init__(self, hub, rank):
        self._hub, self.position = hub, rank
        self.size, self.share = hub.n, 1 / hub.n
        self.numbers = Numbers()

    def channel(self):
        return self

    def broadcast(self, buffer, root, name):
        return self._hub.submit(name, "broadcast", self.position, root, buffer)

    def all_reduce(self, buffer, name):
        return self._hub.submit(name, "average", self.position, None, buffer)

    def gather(self, tensor, name):
        return self._hub.submit(name, "gather", self.position, None, tensor)

    def restarts(self):
        return lambda: False


class Rank:
    """One rank: a model, an optimizer, and an exchange to which backward's hooks report."""

    def __init__(self, hub, rank, compression, node=None, **settings):
        generator = torch.Generator().manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 100), torch.nn.Tanh(), torch.nn.Linear(100, 30)
        )
        self.parameters = dict(self.model.named_parameters())
        for parameter in self.parameters.values():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.method = compression(**settings)
        transport = ThreadCollectives(hub, rank)
        self.exchange = Exchange(self.parameters, self.method, transport, node=node)
        self.data = torch.Generator().manual_seed(rank + 1)
        self.whims, self.late = random.Random(rank), []
        self.goal = torch.randn(64, 30, generator=generator) / 8
        self.came, self.averages, self.residues, self.losses = [], [], [], []
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.report(name, p))

    def report(self, name, parameter):
        """Report a gradient: sometimes slowly, sometimes late and in another order."""
        self.came[-1][name] = parameter.grad.numpy().copy()
        time.sleep(self.whims.choice((0, 0, 1e-4, 1e-3)))
        if len(self.came) > 1 and self.whims.random() < 0.3:
            self.late.append(name)
        else:
            self.exchange.ready(name, parameter.grad.view(-1))

    def step(self, spoilt=False):
        self.came.append({})
        self.optimizer.zero_grad()
        inputs = torch.randn(16, 64, generator=self.data)
        loss = (self.model(inputs) - inputs @ self.goal).square().mean()
        (loss * (float("nan") if spoilt else 1)).backward()
        self.whims.shuffle(self.late)
        while self.late:
            name = self.late.pop()
            self.exchange.ready(name, self.parameters[name].grad.view(-1))
        averages = self.exchange.finish()
        for name, parameter in self.parameters.items():
            parameter.grad = averages[name].view(parameter.shape)
        self.losses.append(loss.item())
        self.averages.append({n: p.grad.numpy().copy() for n, p in self.parameters.items()})
        self.residues.append(self.residues_now())
        if not any(p.grad.isnan().any() for p in self.parameters.values()):
            self.optimizer.step()

    def residues_now(self):
        tensors = self.method.residues.tensors
        return {n: t.residue.view(t.shape).numpy().copy() for n, t in tensors.items()}


def run(n, act):
    """Run act(rank) on n threads; return the results."""
    with ThreadPoolExecutor(n) as threads:
        return [job.result(2 * SECONDS) for job in [threads.submit(act, rank) for rank in range(n)]]


def train(n, act, compression=ScaleCom, nodes=1, **settings):
    """Run act(rank's number, Rank) on n threads; return the Ranks, and each one's error or None.

    nodes: if there are several, peers of all nodes exchange a shard.
    """
    local = n // nodes if nodes > 1 else 1
    hubs, of_nodes = [Hub(n // local) for _ in range(local)], [Hub(local) for _ in range(nodes)]
    settings = {"rate": 20, "min_numel": 200, "dense": (), "warmup_steps": 0} | settings
    ranks = []
    for rank in range(n):
        node, shard = divmod(rank, local)
        members = Node(ThreadCollectives(of_nodes[node], shard)) if nodes > 1 else None
        ranks.append(Rank(hubs[shard], node, compression, members, **settings))

    def live(rank):
        node, shard = divmod(rank, local)
        try:
            act(rank, ranks[rank])
        except Exception as error:
            if nodes == 1 or isinstance(error, OSError):  # this stands for the end of the process
                hubs[shard].stop(f"rank {rank} failed: {error}")
                of_nodes[node % nodes].stop(f"rank {rank} failed: {error}")
            if nodes == 1:
                ranks[rank].exchange.abort()
            return error

    errors = run(n, live)
    for hub in (*hubs, *of_nodes):
        hub.stop()
    return ranks, errors


def twenty_steps(rank, own):
    for step in range(20):
        own.step(spoilt=(step == 7 and rank == 1))


def check(ranks, errors, reference):
    """Check that ranks did what the reference does, to the bit, and skipped the step with the NaN.

    They also learned.
    """
    assert errors == [None] * len(ranks)
    buckets = ranks[0].method.residues.buckets
    reference.bucket_of = {name: b for b, names in enumerate(buckets) for name in names}
    reference.buckets = buckets
    for step in range(20):
        averages = reference.step([own.came[step] for own in ranks])
        for rank, own in enumerate(ranks):
            for name, average in own.averages[step].items():
                np.testing.assert_array_equal(average, ranks[0].averages[step][name])
                np.testing.assert_allclose(average, averages[name], rtol=1e-6, atol=1e-6)
                assert np.isnan(average).all() == (step == 7)
            for name, residue in own.residues[step].items():
                want = reference.residues[rank].get(name, np.zeros_like(residue))
                if step == 7:  # rolled back, to rounding; both go on with the same residues
                    np.testing.assert_allclose(residue, want, rtol=1e-5, atol=1e-5)
                    reference.residues[rank][name] = residue.copy()
                else:
                    np.testing.assert_array_equal(residue, want, err_msg=f"{name}, step {step}")
    for own in ranks:
        for name, parameter in own.parameters.items():
            assert torch.equal(parameter, ranks[0].parameters[name])
        assert own.losses[-1] < own.losses[0] / 2
        stats = own.method.stats()
        assert (stats["step"], stats["skipped_steps"]) == (19, 1)


def shapes_of(own):
    return {name: tuple(p.shape) for name, p in own.parameters.items()}


@pytest.mark.parametrize("on_threads", [False, True], ids=["kernels at once", "kernels on threads"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lookahead": True},
        {"leader": "staggered", "bucket_bytes": 5000},
        {"leader": "staggered", "bucket_bytes": 5000, "lookahead": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
def test_scalecom_is_that_of_the_reference(n, fields, on_threads, monkeypatch):
    if on_threads:
        monkeypatch.setattr("scalecom_hvd.exchange.bucket.WORTH_A_THREAD", 1)
    ranks, errors = train(n, twenty_steps, beta=0.3, **fields)
    check(ranks, errors, ScaleComReference(n, shapes_of(ranks[0]), ranks[0].method.config))
    # Integers share no bucket with tensors that are sent whole.
    assert len(ranks[0].method.residues.buckets) == (2 if "bucket_bytes" not in fields else 3)


@pytest.mark.parametrize(
    ("kind", "fields"), [(ScaleCom, {}), (LocalTopK, {"quantiser": BinMeans()})]
)
def test_many_buckets_share_few_channels(kind, fields, monkeypatch):
    """Ranks reach different buckets of a channel before they wait for any, and still finish.

    Gradients come in another order on each rank, but a channel has the same order on all ranks.
    """
    monkeypatch.setattr("scalecom_hvd.exchange.exchange.MOST_CHANNELS", 2)
    news = random.Random(0)  # ranks do not always see at once that a result has arrived
    is_here = Waiting.done
    monkeypatch.setattr(Waiting, "done", lambda self: news.random() < 0.5 and is_here(self))
    hub, layers = Hub(3), 7
    settings = {"rate": 20, "min_numel": 2, "dense": (), "warmup_steps": 0, "bucket_bytes": 800}

    def act(rank):
        parameters = {f"{i}": torch.nn.Parameter(torch.zeros(300)) for i in range(layers)}
        method = kind(**settings, **fields)
        transport, channels = ThreadCollectives(hub, rank), []

        def channel():
            channels.append(Noting(hub))
            return ThreadCollectives(channels[-1], rank)

        transport.channel = channel
        exchange = Exchange(parameters, method, transport)
        whims, generator = random.Random(rank), torch.Generator().manual_seed(rank)
        for _ in range(20):
            grads = {name: torch.randn(300, generator=generator) for name in parameters}
            for name in whims.sample(list(grads), layers):
                time.sleep(whims.choice((0, 0, 1e-3)))
                exchange.ready(name, grads[name])
            time.sleep(whims.choice((0, 1e-3)))
            exchange.finish()
        return method, [channel.names for channel in channels]

    methods, names = zip(*run(3, act), strict=True)
    hub.stop()
    assert names == (names[0],) * 3
    assert len(names[0]) == 3  # one is for what faces tell
    assert [method.stats()["step"] for method in methods] == [20] * 3
    assert all(len(method.residues.buckets) == layers for method in methods)


def assert_rolled_back(ranks, residues=Rank.residues_now, to=-1):
    """Check that these residues are those that ranks noted after a step."""
    for own in ranks:
        for name, residue in residues(own).items():
            np.testing.assert_allclose(residue, own.residues[to][name], rtol=1e-5, atol=1e-6)


some_methods = pytest.mark.parametrize(
    "fields", [{}, {"lookahead": True}, {"compression": LocalTopK}], ids=str
)


@some_methods
def test_a_rank_that_fails_ends_the_step_on_all(fields):
    """The step ends at once, and each rank rolls back its part."""

    def act(rank, own):
        for _ in range(4):
            own.step()
        if rank == 1:
            raise OSError("no route to host")
        own.step()

    ranks, errors = train(3, act, **fields)
    assert [type(error) for error in errors] == [CollectiveError, OSError, CollectiveError]
    assert str(errors[0]) == "rank 1 failed: no route to host"
    assert_rolled_back(ranks)


def test_a_failure_on_the_background_thread_fails_one_step(monkeypatch):
    """The step that was under way fails, and the next one is a step like any other."""
    hub, failed = Hub(2), [threading.Event(), threading.Event()]
    is_here = Waiting.done

    def done(self):
        on_background = threading.current_thread().name == "scalecom"
        if on_background and not failed[self.rank].is_set():
            failed[self.rank].set()
            raise CollectiveError("the network was away")
        return is_here(self)

    def submit(self, name, kind, rank, *what):
        waiting = Hub.submit(self, name, kind, rank, *what)
        waiting.rank = rank
        return waiting

    monkeypatch.setattr(Waiting, "done", done)
    monkeypatch.setattr(hub, "submit", functools.partial(submit, hub))

    def act(rank):
        method = ScaleCom(rate=20, min_numel=200, dense=(), warmup_steps=0)
        like = {"weight": torch.zeros(3000)}
        exchange = Exchange(like, method, ThreadCollectives(hub, rank))
        exchange.ready("weight", torch.ones(3000))
        exchange.send()
        assert failed[rank].wait(SECONDS)
        with pytest.raises(CollectiveError, match="the network was away"):
            exchange.finish()
        assert not method.residues.tensors["weight"].residue.any()
        exchange.ready("weight", torch.ones(3000))
        return exchange.finish()["weight"].count_nonzero()

    assert run(2, act) == [150, 150]
    hub.stop()


@some_methods
def test_a_step_counts_if_all_shards_of_a_node_are_sound(fields):
    """There are two nodes of two ranks, and peers exchange a shard.

    If one shard has a NaN, the step is skipped on all ranks. Nothing of the step is left on ranks
    whose own shard was sound.
    """

    def act(rank, own):
        for step in range(6):
            own.step(spoilt=step == 3 and rank == 1)

    ranks, errors = train(4, act, nodes=2, **fields)
    assert errors == [None] * 4
    for own in ranks:
        assert (own.method.stats()["step"], own.method.stats()["skipped_steps"]) == (5, 1)
        assert all(np.isnan(average).all() for average in own.averages[3].values())
    assert_rolled_back(ranks, lambda own: own.residues[3], to=2)


def test_a_rank_that_is_lost_ends_the_step_on_all_ranks_of_all_nodes():
    """Its peer notices through their shard, and its neighbour through their node.

    The last rank notices through its own neighbour.
    """

    def act(rank, own):
        for _ in range(3):
            own.step()
        if rank == 0:
            raise OSError("no route to host")
        own.step()

    ranks, errors = train(4, act, nodes=2)
    assert type(errors[0]) is OSError
    assert {type(error) for error in errors[1:]} == {CollectiveError}
    assert "could not end this step" in str(errors[3])
    assert_rolled_back(ranks)


def test_shards_that_are_at_different_steps_are_refused():
    def act(rank, own):
        if rank % 2:
            own.method.residues.step = 1
        own.step()

    _, errors = train(4, act, nodes=2)
    assert all(
        "ranks of this node are at different steps, [0, 1]" in str(error) for error in errors
    )


def test_a_rank_that_gives_up_a_step_is_heard_in_this_step_alone():
    hub = Hub(2)

    def act(rank):
        node, heard = Node(ThreadCollectives(hub, rank)), []
        for step in range(4):
            error = (OSError if rank == 0 else CollectiveError) if step % 2 else ()
            with contextlib.suppress(error), node.ending_a_step():
                if step % 2 and rank == 0:
                    raise OSError
                time.sleep(0.3 * rank)  # so the other rank goes on before this one has heard
                heard.append(node.counts(step != 2 or rank == 0, step, votes=rank))
        return heard

    assert run(2, act) == [[(True, 1), (False, 1)]] * 2
    hub.stop()


@pytest.mark.parametrize("face", ["ddp", "torch"])
def test_an_optimizer_takes_a_transport_where_nothing_else_is_started(face):
    """Like test_scalecom_is_that_of_the_reference, but with the optimizers that users make.

    Horovod is started, and has one rank.
    """
    face = importlib.import_module(f"scalecom_hvd.{face}")
    # A second init() would end Horovod's MPI before TensorFlow's half releases it at exit. The
    # process would then die at exit, after all tests have passed.
    if face is not ddp and not face.is_initialized():
        face.init()
    hub, shapes = Hub(2), {"weight": (50, 100)}

    def act(rank):
        weight = torch.nn.Parameter(torch.zeros(50, 100))
        optimizer = face.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            [("weight", weight)],
            compression=ScaleCom(rate=10, dense=(), warmup_steps=0, beta=1.0),
            collectives=ThreadCollectives(hub, rank),
        )
        for step in range(5):
            optimizer.zero_grad()
            (weight * torch.from_numpy(gradients(shapes, rank, step)["weight"])).sum().backward()
            optimizer.step()
        return weight.detach(), optimizer.compression.residues.tensors["weight"].residue

    (weight, waits), (same, others) = run(2, act)
    hub.stop()
    assert torch.equal(weight, same)
    assert weight.count_nonzero() > 500
    came = torch.from_numpy(came_in(range(2), range(5), shapes)["weight"]).float()
    torch.testing.assert_close(-2 * weight + (waits + others).view(50, 100), came)


def test_what_lives_is_listed_while_another_thread_adds_to_it():
    """Ranks of one process make their optimizers at the same time."""
    registry, everyone = weakref.WeakValueDictionary(), [Numbers() for _ in range(20_000)]
    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(lambda: registry.update((id(one), one) for one in everyone))
        while not adding.done():
            alive(registry)
    adding.result()
    assert alive(registry) == everyone


def test_a_transport_brings_its_ranks():
    model, transport = torch.nn.Linear(3, 3), ThreadCollectives(Hub(2), 0)
    group = object()  # nothing looks into it
    for setting in ({"op": torch.distributed.ReduceOp.SUM}, {"process_group": group}):
        with pytest.raises(ValueError, match="collectives= brings its own transport"):
            ddp.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0),
                model.named_parameters(),
                collectives=transport,
                **setting,
            )
    with pytest.raises(ValueError, match="leave process_group out"):
        ddp.ScaleComState(model, collectives=transport, process_group=group)
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group"):
        ddp.ScaleComState(model)
