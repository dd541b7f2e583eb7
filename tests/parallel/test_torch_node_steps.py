"""Local steps of nodes: a node's ranks step together, and nodes average their changes.

The faces are Horovod's optimizer, DDP inside each node, and FSDP2. The oracle is two simulated
ranks, each with the batches of a node's ranks. All ranks are on one host, dealt to two nodes.
"""

import pytest
import torch
from devices import DEVICE
from faces import UNDER_TORCHRUN, hvd
from models import OPTIMIZERS, SETTINGS, same_on_all_ranks, through_a_file
from test_ddp_sharded import NODES, Net, local, loss, make_mesh, shard, whole
from test_torch_nodes import no_process_sets_are_left  # noqa: F401
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.exchange.simulator import Simulation

STEPS = 7


def sgd(common):
    return torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)


class Horovod:
    """A network that Horovod's face trains."""

    def __init__(self, net=None, optimizer="adamw", **settings):
        self.net = net or Net().double()
        self.model = self.begin()
        method = {"compression": hvd.ScaleCom(**{**SETTINGS, "rate": 1})} | settings
        made = OPTIMIZERS[optimizer](self.net.parameters())
        self.optimizer = hvd.DistributedOptimizer(made, self.net.named_parameters(), **method)

    def begin(self):
        return self.net

    def values(self):
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def take(self, step, spoilt=None):
        """Take a step. On the rank `spoilt`, an element of the first gradient is infinite."""
        self.optimizer.zero_grad()
        loss(self.model, hvd.rank(), step).backward()
        self.optimizer.synchronize()  # as a script does that clips
        if spoilt == hvd.rank():
            grad = next(self.net.parameters()).grad
            getattr(grad, "_local_tensor", grad).view(-1)[0] = float("inf")
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


class Whole(Horovod):
    """A network that DDP trains in each node."""

    def begin(self):
        return DistributedDataParallel(self.net, process_group=make_mesh().get_group("shard"))


class Sharded(Horovod):
    """A network that FSDP2 shards in each node."""

    dimensions = "shard"

    def begin(self):
        return shard(self.net, make_mesh()[self.dimensions])

    def values(self):
        return {name: value.clone() for name, value in whole(self.net).items()}


class Hybrid(Sharded):
    """A network that FSDP2 would also average between nodes."""

    dimensions = ("replicate", "shard")


if not UNDER_TORCHRUN:
    FACES = [Horovod]
else:
    # Plain FSDP2 frees what other streams read, so numbers on the late device may be NaN.
    FACES = [Whole] if DEVICE == "delayed" else [Whole, Sharded, Hybrid]
on_every_face = pytest.mark.parametrize("face", FACES)


def make(face, net=None, optimizer="adamw", **settings):
    where = {"nodes": NODES} if face is Horovod else {"mesh": make_mesh()}
    return face(net, optimizer, local_steps=3, **where, **settings)


def oracle(steps, optimizer="adamw", **settings):
    """The parameters after these steps of two simulated ranks, and a synchronisation."""
    nets = [Net().double() for _ in range(NODES)]
    optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    simulation = Simulation(
        NODES,
        lambda node: dict(nets[node].named_parameters()),
        local_steps=3,
        **{**SETTINGS, "rate": 1},
        **settings,
    )
    for step in range(steps):
        for node, (net, own) in enumerate(zip(nets, optimizers, strict=True)):
            own.zero_grad()
            for rank in range(node * local(), (node + 1) * local()):
                (loss(net, rank, step) / local()).backward()
        simulation.take_steps([own.step for own in optimizers])
    simulation.synchronise()
    return {name: p.detach() for name, p in nets[0].named_parameters()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outer": sgd, "fragments": 2},
        {"clip_changes": 1, "optimizer": "momentum"},
        {"overlap": 1, "outer": sgd},
    ],
    ids=str,
)
@on_every_face
def test_a_node_is_one_worker(face, settings):
    trained = make(face, **settings)
    for step in range(STEPS):
        trained.take(step)
    trained.optimizer.synchronize_parameters()
    found = trained.values()
    torch.testing.assert_close(found, oracle(STEPS, **settings), rtol=1e-9, atol=1e-12)
    assert same_on_all_ranks(found.values())
    stats = trained.optimizer.compression.stats()
    assert (stats["ranks_per_node"], stats["local_steps_taken"]) == (local(), STEPS)


class Line(torch.nn.Module):
    """Its gradients do not depend on its parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.extra = (torch.nn.Linear(12, n, bias=False).double() for n in (13, 6))

    def forward(self, x):
        return torch.cat([self.body(x), self.extra(x)], 1)


@pytest.mark.parametrize("method", [hvd.ScaleCom, hvd.LocalTopK])
@on_every_face
def test_nothing_is_lost(face, method):
    """What was sent, and what residues hold, is what gradients have changed."""

    def score(model, rank, step):
        torch.manual_seed(100 * step + rank)
        return (model(torch.randn(4, 12).double()) * torch.linspace(-1, 2, 19).double()).sum()

    compression = method(rate=5, bits=32, min_numel=20, beta=1)
    trained = make(face, Line(), optimizer="sgd", compression=compression)
    begun, one = trained.values(), Line()
    for step in range(9):
        trained.optimizer.zero_grad()
        score(trained.model, hvd.rank(), step).backward()
        trained.optimizer.step()
        for rank in range(hvd.size()):
            (score(one, rank, step) / hvd.size()).backward()
    residues = [tensor.residue.sum() for tensor in compression.residues.tensors.values()]
    waits = float(hvd.allreduce(sum(residues)[None], op=hvd.Sum, name="waits")) / NODES
    went = sum(float((begun[name] - value).sum()) for name, value in trained.values().items())
    came = 0.1 * sum(float(p.grad.sum()) for p in one.parameters())  # times the learning rate
    assert abs(waits) > 0.01 * abs(came)
    assert waits + went == pytest.approx(came, rel=1e-5)


@on_every_face
def test_a_bad_gradient_on_one_rank_is_a_step_left_out_in_its_node(face):
    trained = make(face, optimizer="sgd")
    trained.take(0)
    before = trained.values()
    trained.take(1, spoilt=0)
    in_node = hvd.rank() < local()
    after = trained.values()
    assert all(torch.equal(after[name], value) for name, value in before.items()) == in_node
    assert trained.optimizer.compression.stats()["local_steps_skipped"] == in_node
    trained.take(2)
    assert same_on_all_ranks(trained.values().values())


@on_every_face
def test_a_bad_change_sets_its_node_back_and_nothing_else(face):
    trained = make(face, optimizer="sgd")
    begun = trained.values()
    trained.take(0)
    trained.take(1)
    if hvd.rank() == 0:
        own = next(trained.net.parameters())
        getattr(own, "_local_tensor", own).data.view(-1)[0] = float("nan")
    if not issubclass(face, Sharded) and hvd.rank() < local():  # all ranks of the node have it
        next(trained.net.parameters()).data.view(-1)[0] = float("nan")
    trained.take(2)
    after = trained.values()
    in_node = hvd.rank() < local()
    assert all(torch.equal(after[name], value) for name, value in begun.items()) == in_node
    for step in range(3, 6):
        trained.take(step)
    assert same_on_all_ranks(trained.values().values())
    assert all(bool(value.isfinite().all()) for value in trained.values().values())


@on_every_face
def test_going_on_in_the_middle_of_a_round_is_bit_identical(face):
    settings = {"compression": hvd.ScaleCom(**SETTINGS), "outer": sgd}

    def states(trained):
        optimizer = trained.optimizer
        of_each = trained.net.state_dict(), optimizer.state_dict()
        return *of_each, through_a_file(optimizer.compression.state_dict())

    trained = make(face, **settings)
    for step in range(8):
        if step == 4:
            # Sharded tensors are a node's own.
            of_model, of_optimizer, of_rank = torch.utils._pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf,
                states(trained),
            )
        trained.take(step)
    other = make(face, **{**settings, "compression": hvd.ScaleCom(**SETTINGS)})
    other.net.load_state_dict(of_model)
    other.optimizer.load_state_dict(of_optimizer)
    other.optimizer.compression.load_state_dict(of_rank)
    for step in range(4, 8):
        other.take(step)
    found = other.values()
    assert all(torch.equal(found[name], value) for name, value in trained.values().items())


@pytest.mark.skipif(Whole not in FACES, reason="Horovod and FSDP2 average in a node by themselves")
def test_ranks_that_do_not_average_in_their_node_are_found():
    if hvd.size() < 4:
        pytest.skip("a node of one rank has nothing to average")
    trained = make(Whole)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel\(model, process_group="):
        for step in range(3):
            with trained.model.no_sync():
                trained.take(step)


@pytest.mark.skipif(Whole not in FACES, reason="DDP alone may average over all ranks")
@pytest.mark.parametrize("is_right", [True, False])
def test_a_warning_says_that_ddp_averages_over_all_nodes(is_right, caplog):
    trained = make(Whole)
    if not is_right:
        trained.model = DistributedDataParallel(trained.net)
    for step in range(6):
        trained.take(step)
    said = [one.getMessage() for one in caplog.records if "process_group=" in one.getMessage()]
    assert len(said) == (not is_right)


@on_every_face
def test_nodes_that_have_taken_different_numbers_of_steps_are_refused(face):
    trained = make(face, optimizer="sgd")
    states = []
    for step in range(2):
        trained.take(step)
        states.append(through_a_file(trained.optimizer.compression.state_dict()))
    trained.optimizer.compression.load_state_dict(states[hvd.rank() // local()])
    with pytest.raises(RuntimeError, match="different numbers of steps"):
        trained.take(2)


@pytest.mark.parametrize("face", [face for face in FACES if not issubclass(face, Sharded)])
def test_a_parameter_with_gaps_in_its_memory_is_refused(face):
    net = Line()
    net.extra.weight = torch.nn.Parameter(torch.zeros(6, 24).double()[:, ::2])
    with pytest.raises(ValueError, match="extra.weight has gaps in its memory"):
        make(face, net)


@pytest.mark.skipif(Horovod not in FACES, reason="of Horovod's face alone")
def test_a_closure_is_refused():
    with pytest.raises(ValueError, match="takes no closure"):
        make(Horovod).optimizer.step(lambda: None)
