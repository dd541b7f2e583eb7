"""FSDPModule.set_gradient_divide_factor() means what it means in plain FSDP2."""

import pytest
import torch
from devices import DEVICE
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom


def gradients(mesh, plain, early, late):
    """Gradients of three steps. early, late: factors, before and after the optimizer is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    for layer in model:
        fully_shard(layer, mesh=mesh if plain else mesh["shard"])
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
        model(torch.randn(4, 30, generator=random)).square().mean().backward()
        seen += [parameter.grad.full_tensor() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("factors", [(None, None), (1.0, None), (None, 3.0), (1.0, 1.0)])
def test_gradients_are_divided_as_in_plain_fsdp2(factors):
    size = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    stock, ours = (gradients(mesh, plain, *factors) for plain in (True, False))
    for one, other in zip(stock, ours, strict=True):
        torch.testing.assert_close(one, other)
