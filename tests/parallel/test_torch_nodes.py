"""Gradients are sent whole inside a node, and compressed between two nodes, on every face.

The faces are Horovod's optimizer, DDP's hook and FSDP2. The oracle is reference.py with each node
as one worker. All ranks are on one host, so the tests deal them to two nodes. At the end of this
file is what only Horovod has; the other faces have test_ddp_nodes.py and test_ddp_sharded.py.
"""

import gc

import models
import numpy as np
import pytest
import torch
from devices import DEVICE
from faces import UNDER_TORCHRUN, horovods_alone, hvd, stock
from made_up import came_in, gradients
from oracles import nodes as oracle
from rungs import Restless
from test_ddp_sharded import NODES, Net, local, loss, make_mesh, shard, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd import ddp
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.stages import LADDER


@pytest.fixture(autouse=True, scope="module")
def no_process_sets_are_left():
    """Other files make the same process sets, and Horovod can have only one of each."""
    yield
    if not UNDER_TORCHRUN:
        remove_process_sets()


def remove_process_sets():
    """Remove all process sets except the one of all ranks. All ranks must call this."""
    from scalecom_hvd.torch.horovod_nodes import process_sets

    gc.collect()
    for ranks, process_set in sorted(process_sets().items()):
        if len(ranks) < hvd.size():
            stock.remove_process_set(process_set)


class Horovod:
    """A network that Horovod's face trains.

    Attributes:
        model: what forward is called of.
        served: what saves the residues.
    """

    cut = staticmethod(oracle.flat_parts)

    def __init__(self, net, optimizer, method):
        self.net, self.method = net, method
        self.wrap(models.OPTIMIZERS[optimizer])

    def wrap(self, make_optimizer):
        self.model, self.served = self.net, self.method
        self.optimizer = hvd.DistributedOptimizer(
            make_optimizer(self.net.parameters()),
            self.net.named_parameters(),
            compression=self.method,
            nodes=NODES,
        )

    def synchronize(self):
        self.optimizer.synchronize()

    def step(self):
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def values(self):
        return {name: p.detach() for name, p in self.net.named_parameters()}

    def gradients(self):
        return [p.grad for p in self.net.parameters()]


class Hook(Horovod):
    def wrap(self, make_optimizer):
        unused = {"find_unused_parameters": isinstance(self.net, models.Given)}
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.002, **unused)
        self.served = ddp.ScaleComState(self.model, self.method, mesh=make_mesh())
        self.model.register_comm_hook(self.served, ddp.scalecom_hook)
        self.optimizer = make_optimizer(self.model.parameters())

    def synchronize(self):
        pass

    def step(self):
        self.optimizer.step()


class Sharded(Hook):
    cut = staticmethod(oracle.rows)

    def wrap(self, make_optimizer):
        self.model, self.served, mesh = self.net, self.method, make_mesh()
        shard(self.net) if isinstance(self.net, Net) else fully_shard(self.net, mesh=mesh["shard"])
        self.optimizer = ddp.DistributedOptimizer(
            make_optimizer(self.net.parameters()),
            self.net.named_parameters(),
            compression=self.method,
            mesh=mesh,
        )

    def values(self):
        return whole(self.net)


FACES = [Hook, Sharded] if UNDER_TORCHRUN else [Horovod]
on_every_face = pytest.mark.parametrize("face", FACES)


def make(face, optimizer="adamw", net=None, **settings):
    return face(net or Net().double(), optimizer, hvd.ScaleCom(**{**models.SETTINGS, **settings}))


def take(trained, step):
    trained.optimizer.zero_grad()
    loss(trained.model, hvd.rank(), step).backward()
    trained.optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("momentum", {}),
        ("adamw", {"lookahead": True}),
        ("momentum", {"beta": 0.3, "flush": False, "bucket_bytes": 400}),
        pytest.param("momentum", {"bits": 3, "rate": 8}, marks=pytest.mark.long),
        ("adamw", {"nu": 0.4, "bits": 3, "rate": 8}),
        pytest.param("momentum", {"nu": 0.6, "lookahead": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
@on_every_face
def test_a_node_is_one_worker_of_the_reference(face, optimizer, settings):
    # Other devices are slow, and what they may do wrong shows in any step.
    steps = 25 if optimizer == "adamw" and "bits" in settings and DEVICE == "cpu" else 9
    trained = make(face, optimizer, **settings)
    for step in range(steps):
        take(trained, step)
        assert models.same_on_all_ranks(trained.values().values())
    other = Net().double()
    references = oracle.train(
        other,
        models.OPTIMIZERS[optimizer](other.parameters()),
        ScaleComConfig(**{"nu": 1, **models.SETTINGS, **settings}),
        NODES,
        local(),
        steps,
        loss,
        face.cut,
    )
    expected = {name: p.detach() for name, p in other.named_parameters()}
    torch.testing.assert_close(trained.values(), expected, rtol=1e-9, atol=1e-12)
    node, place = divmod(hvd.rank(), local())
    own, tensors = references[place].residues[node], trained.method.residues.tensors
    assert own.keys() == tensors.keys()
    assert any(residue.any() for residue in own.values())
    for name, tensor in tensors.items():
        np.testing.assert_allclose(
            tensor.residue, own[name].ravel(), rtol=1e-4, atol=1e-6, err_msg=name
        )
    stats = trained.served.stats()
    if face is not Sharded:  # FSDP2 averages in a node by itself
        assert stats["ranks_per_node"] == local()
        elements = sum(p.numel() for p in other.parameters())  # of 8 bytes, added up twice
        assert stats["bytes_in_node"] == 2 * 2 * (local() - 1) * 8 * elements // local()


# Uneven in every way of cutting.
SHAPES = {"weight": (13, 12), "bias": (13,), "square": (13, 13), "last": (6, 13)}


def left_out(rank, step):
    """Nodes leave out other parameters."""
    node = rank // local()
    return ["square", "bias"] if (step + node) % 3 == 0 else []


@pytest.mark.parametrize(
    "method",
    [
        lambda: hvd.ScaleCom(rate=6, min_numel=20),
        lambda: hvd.ScaleCom(rate=6, min_numel=20, lookahead=True),
        lambda: hvd.LocalTopK(rate=6, min_numel=20),
        lambda: hvd.RandomK(rate=6, min_numel=20),
    ],
    ids=["ScaleCom", "look-ahead", "LocalTopK", "RandomK"],
)
@pytest.mark.parametrize("face", [face for face in FACES if face is not Sharded])
def test_nothing_is_lost(face, method):
    """What came in was sent, or waits in residues, even after skipped and refused steps.

    If a gradient is not finite, in one shard of one node only, all ranks skip the step.
    test_ddp_sharded.py shows the same of FSDP2.
    """
    trained = face(models.Given(models.parameters(SHAPES, torch.float64)), "sgd", method())
    (group,) = trained.optimizer.param_groups
    group["lr"], last = 1.0, hvd.size() - 1
    spoilt, refused = 4, 6 if face is Horovod else None
    for step in range(10):
        skip = left_out(hvd.rank(), step)
        grads = {n: g for n, g in gradients(SHAPES, hvd.rank(), step).items() if n not in skip}
        if step == spoilt and hvd.rank() == 0:
            grads["weight"][0, 0] = np.inf
        trained.optimizer.zero_grad()
        trained.model(grads).backward()
        if step == refused:  # the script changes a gradient on its way
            if hvd.rank() == last:
                trained.gradients()[0][0, 0] = float("nan")
            with pytest.raises(RuntimeError, match="were changed on some rank"):
                trained.optimizer.step()
            continue
        trained.synchronize()
        if step == spoilt:
            assert all(grad.isnan().all() for grad in trained.gradients())
            continue
        trained.step()
    stats = trained.served.stats()
    used = [step for step in range(10) if step not in (spoilt, refused)]
    assert (stats["step"], stats["skipped_steps"]) == (len(used), 1)
    came, tensors = came_in(range(hvd.size()), used, SHAPES, left_out), trained.method.residues
    for name, value in trained.values().items():
        waits, tensor = torch.zeros_like(value), tensors.tensors.get(name)
        if tensor is not None:
            own = face.cut(waits, local())[hvd.rank() % local()]
            own.copy_((tensor.residue / tensor.beta).view(own.shape))
        waits = hvd.allreduce(waits, op=hvd.Sum, name=f"waits.{name}") / NODES
        assert waits.any() == (tensor is not None)
        came_here = torch.as_tensor(came[name] / hvd.size())
        torch.testing.assert_close(waits - value, came_here, rtol=1e-4, atol=1e-5, msg=name)
    assert models.same_on_all_ranks(trained.values().values())


@on_every_face
def test_stopped_and_resumed(face):
    trained = make(face, nu=None, lookahead=True)
    for step in range(6):
        take(trained, step)
        if step == 2:
            parts = trained.net, trained.optimizer, trained.served
            states = [part.state_dict() for part in parts]
            saved = models.through_a_file(states, weights_only=face is not Sharded)
    again = make(face, net=Net(seed=5).double(), nu=None, lookahead=True)
    for part, state in zip((again.net, again.optimizer, again.served), saved, strict=True):
        part.load_state_dict(state)
    for step in range(3, 6):
        take(again, step)
    close = {"rtol": 1e-12, "atol": 1e-14} if face is Hook else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(again.values(), trained.values(), **close)


@pytest.mark.parametrize(
    "settings", [{"min_numel": 0}, {"min_numel": 10, "rates": {"2.*": 2}}], ids=str
)
@on_every_face
def test_all_ranks_of_a_node_compress_the_same(face, settings):
    """Some shards of a bias of 3 elements are smaller than others, or empty."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 6)).double()
    trained = make(face, net=net, nu=None, **settings)
    for step in range(5):
        take(trained, step)
        assert models.same_on_all_ranks(trained.values().values())
    rates = trained.method.residues.rates
    found = [rates] * hvd.size()
    assert hvd.allgather_object(rates, name="rates") == found
    assert rates["0.bias"] == (1 if "rates" in settings else None)
    assert rates["2.weight"] == (2 if "rates" in settings else None)


class Apart(Restless):
    """Wants another rung on each shard's first rank."""

    def note(self, seconds, exposed):
        self.rung = (super().note(seconds, exposed) + hvd.rank()) % len(LADDER)
        return self.rung


@on_every_face
def test_all_ranks_of_all_nodes_take_a_rung_together(face, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Apart)
    trained, rungs = make(face, rate="auto", bits=None, nu=None, beta=None), []
    for step in range(12):
        take(trained, step)
        assert models.same_on_all_ranks(trained.values().values())
        rungs.append(trained.method.residues.rung)
    assert hvd.allgather_object(rungs, name="rungs") == [rungs] * hvd.size()
    assert len(set(rungs)) > 3


@pytest.mark.parametrize("face", [face for face in FACES if face is not Hook])  # DDP has none
def test_a_frozen_parameter_stays_where_it_is(face):
    trained = make(face, "sgd")
    for step in range(4):
        take(trained, step)
    trained.net.last.weight.requires_grad_(False)
    before = trained.values()["last.weight"].clone()
    for step in range(4, 10):
        take(trained, step)
    assert torch.equal(trained.values()["last.weight"], before)
    assert models.same_on_all_ranks(trained.values().values())


# Horovod's face. test_torch_orders.py has orders of calls on two nodes.


@horovods_alone
def test_ranks_with_other_parameters_are_warned(caplog):
    """Stock Horovod trains on."""
    take(make(Horovod, rate=1, net=Net(seed=hvd.rank()).double()), 7)
    assert any("different parameters" in record.getMessage() for record in caplog.records)


@horovods_alone
def test_what_cannot_work_is_refused(monkeypatch):
    from scalecom_hvd.torch.horovod_collectives import HorovodCollectives

    def wrap(nodes=NODES, **more):
        net = Net()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        settings = {"compression": hvd.ScaleCom, "nodes": nodes} | more
        return hvd.DistributedOptimizer(sgd, net.named_parameters(), **settings)

    with pytest.raises(ValueError, match="all . ranks are one node.*give nodes=2"):
        wrap(nodes=True)
    with pytest.raises(ValueError, match="nodes=3 does not divide"):
        wrap(nodes=3)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match="nodes= does not work with elastic training"):
        wrap()
    monkeypatch.undo()
    if hvd.size() > 2:  # hosts with one rank and with all others
        monkeypatch.setattr(stock, "cross_rank", lambda: min(hvd.rank(), 1))
        with pytest.raises(ValueError, match=r"nodes have 1, \d ranks.*the same number of slots"):
            wrap(nodes=True)
        monkeypatch.undo()
    for settings in (
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"process_set": hvd.ProcessSet([0])},
        {"collectives": HorovodCollectives()},
    ):
        with pytest.raises(ValueError, match=f"{[*settings][0]} cannot be used with nodes="):
            wrap(**settings)
    trained = make(Horovod, "sgd")
    loss(trained.model, hvd.rank(), 0).backward()
    with pytest.raises(RuntimeError, match="between backward.* with nodes="):
        trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    trained.optimizer.step()
