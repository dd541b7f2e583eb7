"""The communication hook, compared with the oracle and with DDP without a hook.

Scripts may call things in any order.
"""

import copy
import datetime
import gc
import inspect
import math
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from devices import DEVICE
from made_up import EVERYTHING, SOME, gradients
from models import (
    Given,
    assert_groups_go,
    assert_nothing_is_lost,
    same_on_all_ranks,
    through_a_file,
)
from parity import run_against_reference
from parity_cases import in_some_cases
from rungs import Restless, SendsWhole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from scalecom_hvd import ddp
from scalecom_hvd.ddp import ScaleComState, scalecom_hook
from scalecom_hvd.stages import WHOLE

ALL = {"dense": (), "warmup_steps": 0, "min_numel": 2}


def by_hook(model, compressor, _):
    wrapped = DistributedDataParallel(Given(model), bucket_cap_mb=0.02)
    wrapped.register_comm_hook(ScaleComState(wrapped, compressor), scalecom_hook)

    def step(grads):
        wrapped.zero_grad()
        wrapped(grads).backward()

    def end():
        with torch.no_grad():
            for parameter in model.values():
                parameter.sub_(parameter.grad, alpha=0.1)

    return step, end


@in_some_cases
def test_parity(settings):
    run_against_reference(make=by_hook, **settings)


def test_other_rungs(monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Restless)
    run_against_reference(make=by_hook, rate="auto", bucket_bytes=3000)


class Net(nn.Module):
    """A body with two heads. Forward goes through the body once or twice, checkpointed or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 40))
        self.heads = nn.ModuleList([nn.Linear(40, 10), nn.Linear(40, 10)])
        self.norm = nn.BatchNorm1d(40)

    def forward(self, x, head=0, twice=False, checkpointed=False):
        y = checkpoint(self.body, x, use_reentrant=False) if checkpointed else self.body(x)
        y = self.norm(y + self.body(-x) if twice else y)
        heads = self.heads if head == "both" else [self.heads[head]]
        return sum(one(y).square().mean() for one in heads)


def batch(step, micro=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    random = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(8, 20, generator=random)


def taken_by(method, sent):
    """Those of the settings EVERYTHING or SOME that the method has."""
    return sent if method is ddp.ScaleCom else {"rate": sent["rate"]}


def hooked(sent=SOME, model=None, compression=ddp.ScaleCom, settings=None, **of_ddp):
    """A model under DDP, and its state. If sent is None, there is no hook and no state."""
    model = DistributedDataParallel(model or Net(), **({"bucket_cap_mb": 0.003} | of_ddp))
    if sent is None:
        return model, None
    settings = ALL | taken_by(compression, sent) | (settings or {})
    state = ScaleComState(model, compression, **settings)
    model.register_comm_hook(state, scalecom_hook)
    return model, state


NEAR = {"rtol": 1e-4, "atol": 1e-5}


def compare(take, steps=6, compression=ddp.ScaleCom, settings=None, make=Net, near=NEAR, **of_ddp):
    """Train with DDP, with everything chosen, and at rate 10. Return the last run's state.

    With everything chosen, the result must be DDP's. At rate 10, ranks must stay alike.
    take(model, optimizer, step): takes a step. make: makes the model. near: how close to DDP.
    """
    found = []
    for sent in (None, EVERYTHING, SOME):
        model, state = hooked(sent, make(), compression, settings, **of_ddp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run(model, optimizer, range(steps), take)
        found.append([p.detach() for p in model.parameters()])
        assert same_on_all_ranks(found[-1])
    for one, other in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(one, other, **near)
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    return state


def plain_step(model, optimizer, step):
    optimizer.zero_grad()
    model(batch(step), head="both").backward()
    optimizer.step()


def run(model, optimizer, steps, take=plain_step):
    for step in steps:
        take(model, optimizer, step)


@pytest.mark.parametrize(
    ("of_ddp", "settings"),
    [
        ({}, {"leader": "staggered"}),
        ({"gradient_as_bucket_view": True}, {}),
        ({"static_graph": True}, {"lookahead": True}),
        ({"bucket_cap_mb": 25}, {"lookahead": True}),
    ],
    ids=str,
)
def test_ways_of_ddp(of_ddp, settings):
    def take(model, optimizer, step):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(batch(step), head="both", twice=True, checkpointed=True).backward()
        optimizer.step()

    state = compare(take, settings={"bucket_bytes": 8000} | settings, **of_ddp)
    assert state.stats()["step"] == 6
    assert len(state.compression.residues.buckets) > 1


class InDtype(nn.Module):
    """A layer with parameters of another dtype."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer, self.dtype = layer.to(dtype), dtype

    def forward(self, x):
        return self.layer(x.to(self.dtype)).float()


@pytest.mark.parametrize(
    "of_ddp",
    [
        {"bucket_cap_mb": 25},
        pytest.param({"bucket_cap_mb": 0.003}, marks=pytest.mark.long),
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("static_graph", [False, True], ids=["", "static_graph"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.timeout(45, method="thread")  # no timeout of Gloo ends the wait
def test_parameters_of_two_dtypes(dtype, static_graph, of_ddp):
    """In the first pass of a static graph, DDP hands out one bucket of each dtype.

    It numbers all of them 0, and marks none as the last.
    """

    def make():
        model = Net()
        model.body[2] = InDtype(model.body[2], dtype)
        return model

    near = NEAR if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.01}
    state = compare(plain_step, make=make, near=near, static_graph=static_graph, **of_ddp)
    assert state.stats()["step"] == 6


@pytest.mark.parametrize(
    ("of_ddp", "settings", "knows_ddp"),
    [
        ({"static_graph": True}, {}, True),
        ({"find_unused_parameters": True}, {}, False),
        ({"find_unused_parameters": True}, {}, True),
        ({"find_unused_parameters": True}, {"bits": 3}, True),
        ({"find_unused_parameters": True}, {"lookahead": True}, True),
        ({"find_unused_parameters": True}, {"compression": ddp.LocalTopK}, True),
        ({"find_unused_parameters": True}, {"compression": ddp.RandomK}, True),
    ],
    ids=str,
)
def test_what_no_rank_uses_waits(of_ddp, settings, knows_ddp):
    """DDP drops such a parameter's average, and would lose what its residue sent.

    Buckets first begin as if a step used what the step before used. When the head changes, they
    must begin again.
    """

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ParameterList([nn.Parameter(torch.zeros(1000)) for _ in range(2)])

        def forward(self, head, grad):
            return (self.heads[head] * grad).sum()

    model = DistributedDataParallel(Heads(), **of_ddp)
    served = model if knows_ddp else model.module  # a script may make the state first
    state = ScaleComState(served, **{"rate": 10, "beta": 1.0, **ALL, **settings})
    model.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    came_in = {f"heads.{head}": np.zeros(1000) for head in range(2)}
    for step in range(20):
        head = int(step in (8, 12) or step > 15) if "static_graph" not in of_ddp else 0
        ranks = range(dist.get_world_size())
        everyone = [gradients({"grad": (1000,)}, rank, step)["grad"] for rank in ranks]
        came_in[f"heads.{head}"] += sum(everyone)
        optimizer.zero_grad()
        model(head, torch.as_tensor(everyone[dist.get_rank()])).backward()
        optimizer.step()
    named = dict(model.module.named_parameters())
    assert_nothing_is_lost(named, state.compression, came_in, dist.get_world_size())
    for name, residue in state.state_dict()["residues"].items():
        assert residue.any() == came_in[name].any()


def test_two_models_in_one_backward():
    """The exchanges of both models agree at the same time, each on its own thread.

    Every rank has its own order.
    """
    models = []
    for width in (40, 41):
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
        settings = {"bucket_bytes": 4000}
        models.append((hooked(SOME, net, settings=settings)[0], width))
    for step in range(6):
        losses = [
            model(torch.randn(4, width)).square().mean() for model, width in models[:: (-1) ** step]
        ]
        sum(losses).backward()
    for model, _ in models:
        assert same_on_all_ranks([p.grad for p in model.parameters()])


def test_buckets_are_in_backwards_order():
    """In the first backward DDP hands out all gradients at once, in the model's order."""
    net = nn.Sequential(*[nn.Linear(30, 30) for _ in range(4)])
    model, state = hooked(SOME, net, settings={"bucket_bytes": 4000, "min_numel": 100})
    model(torch.randn(4, 30)).square().mean().backward()
    first = [bucket.names[0] for bucket in state.compression.run.averager.buckets]
    # The bucket of biases is complete when the first layer's bias comes.
    assert first == ["3.weight", "2.weight", "1.weight", "3.bias", "0.weight"]


def test_groups_go_with_their_model():
    def trained():
        model, state = hooked(settings={"bucket_bytes": 4000})
        run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        return model, state

    assert_groups_go(trained)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this PyTorch sorts all groups",
)
def test_ranks_of_a_group_in_another_order():
    ranks = list(reversed(range(dist.get_world_size())))
    group = dist.new_group(ranks, sort_ranks=False)
    compare(plain_step, compression=ddp.LocalTopK, process_group=group)


def test_the_scripts_time_limit_holds():
    group = dist.new_group(timeout=datetime.timedelta(seconds=77))
    collectives = ddp.hook.ProcessGroupCollectives(group)
    assert collectives.channel()._groups["gloo"].options._timeout == datetime.timedelta(seconds=77)
    dist.barrier()  # if one rank drops a group early, other ranks cannot connect to it


def test_names_are_the_models_own():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.weight = nn.Linear(60, 60), nn.Parameter(torch.ones(60, 60))

        def forward(self, x):
            return (self.module(x) @ self.weight).square().mean()

    model = DistributedDataParallel(Named())
    state = ScaleComState(torch.compile(model, backend="eager"), rate=10, **ALL)
    model.register_comm_hook(state, scalecom_hook)
    model(torch.randn(3, 60)).backward()
    assert state.state_dict()["residues"].keys() == {"module.weight", "module.bias", "weight"}


def test_ranks_with_fewer_batches_join():
    def take(model, optimizer, _):
        with warnings.catch_warnings(), model.join():
            warnings.simplefilter("ignore")
            run(model, optimizer, range(4 + dist.get_rank()))

    compare(take, steps=1)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_compiled_model(backend):
    def take(model, optimizer, _):
        run(torch.compile(model, backend=backend), optimizer, range(4))

    compare(take, steps=1, bucket_cap_mb=25)  # the least that the compiler takes


def test_gradients_that_come_one_by_one_are_refused():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model, _ = hooked()
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(TypeError, match="Leave it at its default"):
            compiled(batch(0), head="both").backward()


def assert_the_same(tensors, others):
    """To the bit. More than two ranks may add up in another order."""
    for one, other in zip(tensors, others, strict=True):
        assert torch.equal(one, other) or (
            dist.get_world_size() > 2 and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        )


@pytest.mark.parametrize("stop", [4, 5])
@pytest.mark.parametrize("settings", [{"lookahead": True, "flush": False}, {"bits": 4}], ids=str)
def test_resuming_is_bit_identical_where_the_use_changes(settings, stop):
    def take(model, optimizer, step):
        optimizer.zero_grad()
        model(batch(step), head=int(step in (4, 5, 7))).backward()
        optimizer.step()

    def fresh():
        model, state = hooked(settings=settings, find_unused_parameters=True)
        return model, state, torch.optim.SGD(model.parameters(), lr=0.1)

    model, state, optimizer = fresh()
    run(model, optimizer, range(stop), take)
    weights, own = copy.deepcopy(model.module.state_dict()), through_a_file(state.state_dict())
    run(model, optimizer, range(stop, 10), take)
    resumed, again, optimizer = fresh()
    again.load_state_dict(own)
    resumed.module.load_state_dict(weights)
    run(resumed, optimizer, range(stop, 10), take)
    assert_the_same(resumed.parameters(), model.parameters())
    residues = [one.state_dict()["residues"] for one in (again, state)]
    assert_the_same(residues[0].values(), residues[1].values())


@pytest.mark.parametrize("settings", [{}, {"lookahead": True, "nu": None}], ids=str)
@pytest.mark.parametrize("how", ["state_dict", "pickle", "optimizer", "distributed checkpoint"])
def test_resuming_is_bit_identical(settings, how, shared_folder):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, state = hooked(settings=settings)
    optimizer = sgd(model)
    run(model, optimizer, range(4))
    weights, own = copy.deepcopy(model.module.state_dict()), through_a_file(state.state_dict())
    momentum, pickled = copy.deepcopy(optimizer.state_dict()), pickle.dumps(state)
    if how == "distributed checkpoint":
        dcp.save({"scalecom": ddp.PerRank(state)}, checkpoint_id=shared_folder)
    run(model, optimizer, range(4, 8))

    if how == "optimizer":  # all faces share one format
        resumed = net = Net()
        method = ddp.ScaleCom(**(ALL | {"rate": 10} | settings))
        optimizer = ddp.DistributedOptimizer(
            sgd(resumed), resumed.named_parameters(), compression=method
        )
        method.load_state_dict(own)
    elif how == "pickle":
        resumed = DistributedDataParallel(Net(), bucket_cap_mb=0.003)
        state = pickle.loads(pickled)
        state.compression.loss_scale = torch.amp.GradScaler(DEVICE, enabled=False)
        resumed.register_comm_hook(state, scalecom_hook)
        with pytest.raises(RuntimeError, match=r"call state.attach\(model\)"):
            resumed(batch(0), head="both").backward()
        resumed = DistributedDataParallel(Net(), bucket_cap_mb=0.003)
        resumed.register_comm_hook(state, scalecom_hook)
        state.attach(resumed)
    else:
        resumed, state = hooked(settings=settings)
        if how == "state_dict":
            state.load_state_dict(own)
        else:
            dcp.load({"scalecom": ddp.PerRank(state)}, checkpoint_id=shared_folder)
    if how != "optimizer":
        net, optimizer = resumed.module, sgd(resumed)
    net.load_state_dict(weights)
    optimizer.load_state_dict(momentum)
    run(resumed, optimizer, range(4, 8))
    assert_the_same(resumed.parameters(), model.parameters())


@pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")
def test_forked_processes_collect_garbage():
    """DataLoader's workers do. A process group that a child deletes makes it crash."""
    gc.collect()
    gc.disable()
    try:
        model, state = hooked()
        run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        del model, state
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()


def test_a_part_of_the_ranks():
    n, rank = dist.get_world_size(), dist.get_rank()
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    groups = [dist.new_group(half) for half in halves]
    mine = groups[rank >= n // 2]
    model, state = hooked(process_group=mine)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(5))
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    parts = [torch.zeros_like(flat) for _ in range(dist.get_world_size(mine))]
    dist.all_gather(parts, flat, group=mine)
    assert all(torch.equal(part, flat) for part in parts)
    # A group of one has nothing to average.
    assert state.stats()["step"] == (5 if len(parts) > 1 else 0)


@pytest.mark.parametrize(
    ("keeps", "loads"),
    [(False, True), (True, False), (True, True)],
    ids=["a new state", "the same state", "the same state, loaded"],
)
def test_an_exception_in_backward_and_a_model_made_anew(keeps, loads):
    """If one rank or all ranks give up a step, what was under way is in the residues."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("in the middle of backward")

    net = Net()
    model, state = hooked(SOME, net)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    before = copy.deepcopy(state.state_dict())
    breaks = net.body.register_forward_hook(lambda module, given, result: Breaks.apply(result))
    with pytest.raises(ValueError, match="in the middle"):
        model(batch(3), head="both").backward()  # the heads' gradients have come
    breaks.remove()
    model = DistributedDataParallel(net, bucket_cap_mb=0.003)
    again = state if keeps else ScaleComState(model, rate=10, **ALL)
    if loads:
        again.load_state_dict(before if keeps else state.state_dict())
        for name, residue in before["residues"].items():
            assert torch.equal(again.state_dict()["residues"][name], residue)
    model.register_comm_hook(again, scalecom_hook)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3, 6))
    assert again.stats()["step"] == 6
    assert same_on_all_ranks(model.parameters())


def test_what_cannot_work_is_refused():
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, scalecom_hook)
    with pytest.raises(TypeError, match="needs a ScaleComState"):
        model(batch(0), head="both").backward()
    with pytest.raises(TypeError, match="Give the settings to the method"):
        ScaleComState(Net(), ddp.RandomK(rate=10), rate=5)
    with pytest.raises(ValueError, match="did you mean rate"):
        ScaleComState(Net(), rat=5)
    with pytest.raises(TypeError, match="FSDP"):
        scalecom_hook(None, torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        ScaleComState(Net().requires_grad_(False))
    skips = {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}
    if skips.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():
        with pytest.raises(ValueError, match="leave that argument out"):
            ScaleComState(DistributedDataParallel(Net(), **skips))
    method = ddp.ScaleCom(rate=10)
    ScaleComState(Net(), method)
    with pytest.raises(ValueError, match="already serves"):
        ScaleComState(Net(), method)


@pytest.mark.parametrize("settings", [{"warmup_steps": 99}, {"rate": "auto"}], ids=str)
def test_steps_sent_whole_are_ddps_own(settings, monkeypatch):
    """They average DDP's buckets where they are. Besides, only rank 0's rung travels."""
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", SendsWhole)
    came = []

    def hook(state, bucket):
        came.append(bucket.buffer().data_ptr())
        return scalecom_hook(state, bucket)

    stock, own = (DistributedDataParallel(Net(), bucket_cap_mb=0.003) for _ in range(2))
    state = ScaleComState(own, **ALL | settings)
    own.register_comm_hook(state, hook)
    for step in range(9):
        scale = math.nan if step == 7 and dist.get_rank() == 0 else 1
        for model in (stock, own):
            came.clear()
            model.zero_grad(set_to_none=step % 2 == 0)
            (model(batch(step), head="both") * scale).backward()
        if step > 4:  # with rate="auto", some steps are not whole before
            for one, other in zip(stock.parameters(), own.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, equal_nan=True)
    stats, votes = state.stats(), "rate" in settings
    assert stats["bytes_dense"] == 4 * sum(p.numel() for p in own.parameters()) + 4 * 2 * votes
    assert stats["collectives"] == len(came) + votes > 2
    assert (stats["step"], stats["skipped_steps"]) == (8, 1)


@pytest.mark.parametrize("settings", [{}, {"warmup_steps": 2}], ids=str)
def test_residues_are_in_the_models_order_whatever_its_memory_format(settings):
    def trained(layout):
        weights = {"w": nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=layout))}
        weights["gaps"] = nn.Parameter(torch.zeros(6, 10)[:, ::2])
        model, state = hooked({"rate": 10}, Given(weights), settings=settings, bucket_cap_mb=25)
        for step in range(4):
            model.zero_grad()
            shapes = {name: p.shape for name, p in weights.items()}
            model(gradients(shapes, dist.get_rank(), step)).backward()
        return state.state_dict()["residues"] | {f"{n}'s": p.grad for n, p in weights.items()}

    one, other = map(trained, (torch.contiguous_format, torch.channels_last))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_waited_is_not_lost_if_a_script_throws_it_away_before_whole_steps(monkeypatch):
    """The first step on this rung sends all that waits. Nobody uses it, so it comes back."""
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", SendsWhole)
    model, state = hooked({"rate": "auto"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while state.compression.residues.rung != WHOLE:
        plain_step(model, optimizer, step)
        step += 1
    waiting = copy.deepcopy(state.state_dict()["residues"])
    assert any(residue.any() for residue in waiting.values())
    for _ in range(2):  # the second backward sees that no step used the first one's averages
        optimizer.zero_grad()
        model(batch(step), head="both").backward()
    for name, residue in state.state_dict()["residues"].items():
        assert torch.equal(residue, waiting[name])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(100, 30, sparse=True)
    model, _ = hooked(SOME, nn.Sequential(embedding, nn.Linear(30, 2)))
    with pytest.raises(RuntimeError, match="sparse=False"):
        model(torch.arange(5)).sum().backward()


@pytest.mark.parametrize("several_buckets", [False, True])
def test_other_settings_on_some_rank_are_refused(several_buckets):
    """DDP waits for all its buckets. In the first backward it has several if any may be unused."""
    rate = 20 if dist.get_rank() else 30
    model, _ = hooked({"rate": rate}, find_unused_parameters=several_buckets)
    with pytest.raises(RuntimeError, match=r"rate is 30.0 on rank 0 and 20.0 on rank 1"):
        model(batch(0), head="both").backward()
