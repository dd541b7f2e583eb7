"""Tensor parallelism inside a node, and pipelines: gradients are compressed between nodes.

Run under torchrun, as two nodes. The oracles are the same model without parallelism, and
reference.py with each node as one worker.
"""

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from faces import hvd
from models import SETTINGS, same_on_all_ranks
from oracles import nodes as oracle
from test_ddp_sharded import NODES, local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, parallel

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom

_meshes = {}


def make_mesh(*names):
    """Make each mesh only once: it makes process groups, which live until the end."""
    if names not in _meshes:
        shape = (NODES, *(1,) * (len(names) - 1), local())
        _meshes[names] = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", *names))
    return _meshes[names]


class Net(nn.Module):
    """A block of a Transformer without attention, between an embedding and an output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Embedding(12, 24)
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 32)
        self.down = nn.Linear(32, 24)
        self.last = nn.Linear(24, 6)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.down(torch.tanh(self.up(self.norm(x)))))


IN_TENSORS = {
    "first": parallel.RowwiseParallel(input_layouts=Replicate()),
    "up": parallel.ColwiseParallel(),
    "down": parallel.RowwiseParallel(),
}
# The ranks of a node share out the sequence too, so each has a part of the norm's gradient.
IN_SEQUENCES = {
    "first": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": parallel.SequenceParallel(),
    "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
    "down": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "last": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
BOTH = ("replicate", "shard")  # of the mesh that fully_shard is given
FORMS = {
    "tensors": (("tp",), IN_TENSORS),
    "sequences": (("tp",), IN_SEQUENCES),
    "tensors and FSDP2": (("shard", "tp"), IN_TENSORS),
    "tensors and both dimensions": (("shard", "tp"), IN_TENSORS, BOTH),
    "sequences and both dimensions": (("shard", "tp"), IN_SEQUENCES, BOTH),
}
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def adamw(model):
    # On GPUs, PyTorch's foreach refuses DTensors together with plain tensors.
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def make(names, plan, dimensions="shard", **settings):
    mesh, model = make_mesh(*names), Net().double()
    parallel.parallelize_module(model, mesh["tp"], plan)
    if "shard" in names:
        fully_shard(model, mesh=mesh[dimensions])
    method = ScaleCom(**{**SETTINGS, **settings})
    return model, DistributedOptimizer(adamw(model), model.named_parameters(), method, mesh=mesh)


def stages(model):
    first = nn.Sequential(model.first, model.norm, model.up)
    return first, nn.Sequential(model.down, model.last)


def batch(node, step):
    torch.manual_seed(100 * step + node)
    inputs = torch.randint(12, (8, 4))
    return inputs, torch.sin(inputs[..., None] + torch.arange(6.0).double()) + node * 0.1


def mean_square(found, wanted):
    return (found - wanted).square().mean()


def loss(model, node, step):
    inputs, wanted = batch(node, step)
    return mean_square(model(inputs), wanted)


def take(model, optimizer, step):
    optimizer.zero_grad()
    loss(model, dist.get_rank() // local(), step).backward()
    optimizer.step()


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train_alone(steps, model=None):
    """The same model on all nodes' batches, without parallelism."""
    model = Net().double() if model is None else model
    optimizer = adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, node, step) for node in range(NODES)) / NODES).backward()
        optimizer.step()
    return model


def assert_close(model, other, rtol=1e-9):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(full(p), q, rtol=rtol, atol=1e-12), (dist.get_rank(), name)


@all_forms
def test_all_ranks_have_the_same_tensors(form):
    """A tensor that all ranks of a node have whole is exchanged by each of them."""
    model, wrapped = make(*form, bits=3, nu=None)
    for step in range(8):
        take(model, wrapped, step)
        assert same_on_all_ranks(full(p) for p in model.parameters()), step
    residues = wrapped.compression.residues.tensors
    assert residues.keys() > {"first.weight", "up.weight", "down.weight", "last.weight"}
    assert all(tensor.residue.any() for tensor in residues.values())


@pytest.mark.parametrize(
    "settings", [{}, {"bits": 3, "rate": 8, "nu": 0.4}, {"lookahead": True}], ids=str
)
def test_a_node_is_one_worker_of_the_reference(settings):
    model, wrapped = make(("tp",), IN_TENSORS, **settings)
    for step in range(7):
        take(model, wrapped, step)
    other = Net().double()
    rows, columns = (other.first.weight, other.up.weight, other.up.bias), (other.down.weight,)
    dimensions = {p.shape: 0 for p in rows} | {p.shape: 1 for p in columns}

    def shards(tensor, local):
        if tensor.shape not in dimensions:
            return [tensor] * local
        return list(tensor.chunk(local, dimensions[tensor.shape]))

    oracle.train(
        other,
        adamw(other),
        ScaleComConfig(**{"nu": 1, **SETTINGS, **settings}),
        NODES,
        local(),
        7,
        lambda model, rank, step: loss(model, rank // local(), step),
        shards,
    )
    assert_close(model, other)


@all_forms
def test_two_optimizers_share_a_mesh(form):
    """With everything chosen, both train as without parallelism."""
    pairs = [make(*form, rate=1) for _ in range(2)]
    for step in range(3):
        for model, wrapped in pairs:
            take(model, wrapped, step)
    for model, _ in pairs:
        assert_close(model, train_alone(3))


def test_what_cannot_work_is_refused():
    mesh, model = make_mesh("tp"), Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="no parameter is a DTensor.*parallelize_module"):
        DistributedOptimizer(sgd, model.named_parameters(), mesh=mesh)
    parallel.parallelize_module(model, make_mesh("shard", "tp")["tp"], IN_TENSORS)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        (TypeError, ValueError), match='fully_shard.*mesh=mesh\\["replicate", "shard"\\]'
    ):
        DistributedOptimizer(sgd, model.named_parameters(), mesh=make_mesh("shard", "tp"))
    sgd = torch.optim.SGD(model.up.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="weight has the placements .* must be sharded over ranks"):
        DistributedOptimizer(sgd, model.up.named_parameters(), mesh=make_mesh("shard", "tp"))


@pytest.mark.skipif("local() == 1", reason="a pipeline has at least two stages")
@pytest.mark.skipif(DEVICE == "delayed", reason="delayedccl has no send and recv")
@pytest.mark.parametrize("settings", [{"rate": 1}, {"bits": 3}], ids=str)
def test_pipelines(settings):
    """The ranks that have the same stage average its gradients."""
    mesh, model = make_mesh("pp"), Net().double()
    place, passes = mesh.get_local_rank("pp"), 4
    layers = stages(model)
    stage = PipelineStage(layers[place], place, 2, torch.device(DEVICE), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(
        stage, passes, loss_fn=lambda *pair: mean_square(*pair) / passes, scale_grads=False
    )
    wrapped = DistributedOptimizer(
        adamw(layers[place]),
        layers[place].named_parameters(),
        compression=ScaleCom(**{**SETTINGS, "nu": None, **settings}),
        process_group=mesh.get_group("replicate"),
        backward_passes_per_step=passes,
    )
    for step in range(8):
        inputs, wanted = batch(mesh.get_local_rank("replicate"), step)
        wrapped.zero_grad()
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=wanted)
        wrapped.step()
    assert wrapped.compression.stats()["step"] == 8
    everyone = hvd.allgather_object([p.detach().cpu() for p in layers[place].parameters()])
    for p, q in zip(everyone[place], everyone[local() + place], strict=True):
        assert torch.equal(p, q)
    if settings == {"rate": 1}:
        alone = Net().double()
        train_alone(8, nn.Sequential(*stages(alone)))
        assert_close(layers[place], stages(alone)[place])
