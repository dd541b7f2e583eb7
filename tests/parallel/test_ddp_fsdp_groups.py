"""FSDP2's own averages between nodes, and its settings, which only private names tell.

Run under torchrun, as two nodes. test_ddp_sharded.py compares all else with plain FSDP2.
"""

import gc
import weakref

import pytest
import test_ddp_sharded as sharded
import torch
from devices import DEVICE
from models import OPTIMIZERS
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom


def gradients(mesh, given, plain, early, late):
    """Gradients of three steps. early, late: factors, before and after the optimizer is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)).double()  # Gloo scales no floats
    for layer in model:
        fully_shard(layer, mesh=mesh if plain else given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if early is not None:
        model[0].set_gradient_divide_factor(early)
    if not plain:
        method = ScaleCom(rate=1, bits=32)
        named = model.named_parameters()
        optimizer = DistributedOptimizer(optimizer, named, compression=method, mesh=mesh)
    if late is not None:
        model[1].set_gradient_divide_factor(late)
    seen = []
    for step in range(3):
        random = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for _ in range(1 + step if mesh["shard"].size() > 1 else 1):  # each averages
            x = torch.randn(4, 30, generator=random, dtype=torch.float64)
            model(x).square().mean().backward()
        seen += [parameter.grad.full_tensor() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("dimensions", [("replicate", "shard"), "shard"], ids=["2-D", "1-D"])
@pytest.mark.parametrize("factors", [(None, None), (1.0, None), (None, 3.0), (1.0, 1.0)])
def test_gradients_are_divided_as_in_plain_fsdp2(factors, dimensions):
    size = dist.get_world_size()
    if DEVICE == "delayed" and size > 2:
        pytest.skip("plain FSDP2 frees shards that another stream reads, which CUDA reuses later")
    mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    stock, ours = (gradients(mesh, mesh[dimensions], plain, *factors) for plain in (True, False))
    torch.testing.assert_close(stock, ours)


def test_a_node_may_have_fewer_ranks_than_there_are_nodes():
    """So the factor is that of the nodes, and not of their ranks."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=sharded.NAMES)
    stock, ours = (gradients(mesh, mesh["shard"], plain, 1.0, None) for plain in (True, False))
    torch.testing.assert_close(stock, ours)


def test_fsdp2_averages_between_nodes_only_when_no_optimizer_does(monkeypatch):
    model, first = sharded.make("sgd", rate=1)
    other, optimizer = sharded.plain("sgd")
    sizes, reduce = set(), dist.all_reduce

    def watched(tensor, *args, group=None, **kwargs):
        sizes.add(group.size())
        return reduce(tensor, *args, group=group, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", watched)

    def go(step, own, size):
        sharded.take(other, optimizer, step)
        sizes.clear()
        sharded.take(model, own, step)
        assert sizes == {size}, step

    gc.disable()  # it comes at different times on different ranks
    try:
        go(0, first, 1)
        second = sharded.of_sgd(model)
        del first
        go(1, second, 1)
        third = sharded.of_sgd(model)
        del third
        go(2, second, sharded.NODES)
        del second
        go(3, OPTIMIZERS["sgd"](model.parameters()), sharded.NODES)
    finally:
        gc.enable()
    sharded.assert_close(model, sharded.whole(other))


@pytest.mark.on_cpus
def test_a_model_that_holds_its_optimizer_goes():
    model, model.optimizer = sharded.make("sgd")
    sharded.take(model, model.optimizer, 0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_several_optimizers_of_one_model():
    """The gradients of a fully_shard group are averaged between nodes by FSDP2, or by us."""
    model = sharded.shard(sharded.Net().double())
    other = sharded.shard(sharded.Net().double(), sharded.make_mesh())
    names = [name for name, _ in model.named_parameters()]
    one = sharded.of_sgd(model, names[::2])
    with pytest.raises(RuntimeError, match=f"{names[1]} shares .* give it to a DistributedOpt"):
        sharded.take(model, one, 0)
    model.zero_grad()
    others = sharded.of_sgd(model, names[1::2])
    optimizer = OPTIMIZERS["sgd"](other.parameters())
    for step in range(3):
        others.zero_grad()
        sharded.take(model, one, step)
        others.step()
        sharded.take(other, optimizer, step)
    sharded.assert_close(model, sharded.whole(other))


def test_a_mesh_whose_dimensions_have_other_names():
    names, shape = ("dp_replicate", "dp_shard"), (sharded.NODES, sharded.local())
    model, other = sharded.Net().double(), sharded.Net().double()
    for each in (model, other):
        sharded.shard(each, init_device_mesh(DEVICE, shape, mesh_dim_names=names))
    wrapped, optimizer = sharded.of_sgd(model), OPTIMIZERS["sgd"](other.parameters())
    for step in range(2):
        sharded.take(model, wrapped, step)
        sharded.take(other, optimizer, step)
    sharded.assert_close(model, sharded.whole(other))


def test_a_pytorch_without_the_private_names_is_refused(monkeypatch):
    model = sharded.shard(sharded.Net())
    one = sharded.shard(sharded.Net(), sharded.make_mesh()["shard"])
    monkeypatch.delattr(FSDPParamGroup, "_all_reduce_process_group")
    with pytest.raises(RuntimeError, match='mesh=mesh\\["shard"\\]'):
        sharded.of_sgd(model)
    sharded.of_sgd(one)
