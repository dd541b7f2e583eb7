"""DDP's hook with gradients sent whole inside a node, and compressed between two nodes.

Run under torchrun. The oracle is plain DDP. test_torch_nodes.py has what holds on every face.
"""

import time

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from faces import hvd
from models import OPTIMIZERS, SETTINGS, assert_close, same_on_all_ranks
from test_ddp_sharded import NAMES, fail, local, loss, make_mesh, take
from test_ddp_sharded import Net as _Net
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives


def Net(seed=1):  # noqa: N802
    return _Net(seed).double()


def make(optimizer="adamw", model=None, mesh=None, of_ddp=None, **settings):
    model = DistributedDataParallel(
        Net() if model is None else model, **{"bucket_cap_mb": 0.002, **(of_ddp or {})}
    )
    state = ScaleComState(model, mesh=mesh or make_mesh(), **{**SETTINGS, **settings})
    model.register_comm_hook(state, scalecom_hook)
    return model, OPTIMIZERS[optimizer](model.parameters()), state


def plain(optimizer="adamw", model=None, of_ddp=None):
    model = DistributedDataParallel(Net() if model is None else model, **(of_ddp or {}))
    return model, OPTIMIZERS[optimizer](model.parameters())


@pytest.mark.parametrize(
    "of_ddp",
    [
        {},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_with_everything_chosen_it_is_plain_ddp(of_ddp):
    model, stepped, state = make(rate=1, of_ddp=of_ddp)
    other, optimizer = plain(of_ddp=of_ddp)
    for step in range(4):
        how = {"extra": step % 2 == 0} if "find_unused_parameters" in of_ddp else {}
        for m, o in ((model, stepped), (other, optimizer)):
            o.zero_grad()
            with m.no_sync() if step == 1 and not of_ddp else torch.enable_grad():
                loss(m, dist.get_rank(), 10 + step, **how).backward()
            loss(m, dist.get_rank(), step, **how).backward()
            o.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
    assert_close(model.module, getattr(other, "module", other))
    assert state.stats()["step"] == (8 if of_ddp else 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    model, stepped, _ = make("sgd", model=_Net().to(dtype), rate=1)
    other, optimizer = plain("sgd", model=_Net().to(dtype))
    for step in range(3):
        take(model, stepped, step)
        take(other, optimizer, step)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.01)
    assert same_on_all_ranks(model.parameters())


def test_channels_last():
    def net():
        torch.manual_seed(1)
        layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 4)]
        return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)

    model, stepped, _ = make("sgd", model=net(), rate=1)
    other, optimizer = plain("sgd", model=net())
    for step in range(3):
        for m, o in ((model, stepped), (other, optimizer)):
            torch.manual_seed(10 * step + dist.get_rank())
            o.zero_grad()
            images = torch.randn(5, 3, 6, 6).to(memory_format=torch.channels_last)
            m(images).square().mean().backward()
            o.step()
    assert_close(model.module, getattr(other, "module", other), 1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="Gloo's collectives wait for no others")
@pytest.mark.parametrize("kind", ["", "scaled", "find_unused_parameters", "static_graph"])
def test_ranks_submit_everything_in_one_order(kind, monkeypatch):
    """What NCCL sends in a node and between nodes waits for each other, in a rank's order.

    If orders differed, ranks would wait for each other for ever.
    """
    order, slow = [], dist.get_rank() in (0, 3)
    for name in ("broadcast", "all_reduce", "gather"):
        method = getattr(ProcessGroupCollectives, name)

        def noted(self, buffer, *rest, method=method):
            if buffer.device.type == DEVICE:
                order.append("node" if self.share == 1 else "peers")
            return method(self, buffer, *rest)

        monkeypatch.setattr(ProcessGroupCollectives, name, noted)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, enabled=kind == "scaled")
    more = {"loss_scale": scaler} if kind == "scaled" else {}
    of_ddp = {"bucket_cap_mb": 3e-4} | ({kind: True} if "_" in kind else {})
    model, stepped, _ = make("sgd", model=_Net(), of_ddp=of_ddp, bucket_bytes=400, **more)
    for p in model.parameters():
        p.register_hook(lambda grad: time.sleep(0.02) if slow and step > 2 else None)
    for step in range(6):
        stepped.zero_grad()
        scaler.scale(loss(model, dist.get_rank(), step)).backward()
        scaler.step(stepped)
        scaler.update()
    assert order.count("peers") > 12 < order.count("node")
    assert all(other == order for other in hvd.allgather_object(order))
    assert same_on_all_ranks(model.parameters())


def test_one_node_averages_whole():
    mesh = init_device_mesh(
        DEVICE, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")
    )
    model, stepped, state = make("sgd", mesh=mesh)
    other, optimizer = plain("sgd")
    for step in range(3):
        take(model, stepped, step)
        take(other, optimizer, step)
    assert_close(model.module, getattr(other, "module", other))


def test_a_backward_that_failed_leaves_nothing():
    """The backward fails on all ranks, when some buckets have come."""
    net, sent = Net(), set()
    model, stepped, state = make("sgd", model=net, rate=1)
    other, optimizer = plain("sgd")
    for step in range(6):
        if step == 3:
            hook = net.first.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                loss(model, dist.get_rank(), 50).backward()
            hook.remove()
            model = DistributedDataParallel(net, bucket_cap_mb=0.002)
            model.register_comm_hook(state, scalecom_hook)
        take(model, stepped, step)
        take(other, optimizer, step)
        sent.add(state.stats()["bytes_in_node"])
    assert_close(net, other.module)
    assert len(sent) == 1


def test_what_cannot_work_is_refused():
    mesh = make_mesh()
    for dimension in (0, 1) if local() > 1 else (0,):
        falling = DeviceMesh(DEVICE, mesh.mesh.flip(dimension), mesh_dim_names=NAMES)
        with pytest.raises(ValueError, match="ranks must rise along all dimensions"):
            ScaleComState(Net(), mesh=falling)
    some = DeviceMesh(DEVICE, mesh.mesh[:, :1] if local() > 1 else [[0]], mesh_dim_names=NAMES)
    with pytest.raises(ValueError, match="give both the same"):
        ScaleComState(DistributedDataParallel(Net()), mesh=some)
    with pytest.raises(ValueError, match="leave process_group and collectives out"):
        ScaleComState(Net(), mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"dimensions .*, not \('shard',\)"):
        ScaleComState(Net(), mesh=mesh["shard"])
    if local() > 1:
        group = mesh.get_group("shard")
        wrapped = DistributedDataParallel(Net(), process_group=group)
        with pytest.raises(ValueError, match="give both the same"):
            ScaleComState(wrapped, mesh=mesh)
    model, stepped, state = make()
    take(model, stepped, 0)
    saved = state.state_dict()
    flat = ScaleComState(Net(), **SETTINGS)
    if local() > 1:
        with pytest.raises(ValueError, match=f"of shard {mesh.get_local_rank('shard')} of 2"):
            flat.load_state_dict(saved)
