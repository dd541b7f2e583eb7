"""DDP's hook with gradients sent whole inside a node, and compressed between two nodes.

Run under torchrun. The oracles are plain DDP, and reference.py with each node as one worker.
"""

import io
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from models import OPTIMIZERS, SETTINGS, assert_close, same_on_all_ranks
from oracles import nodes as oracle
from test_ddp_sharded import NODES, local, loss, make_mesh
from test_ddp_sharded import Net as _Net
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.ddp import LocalTopK, RandomK, ScaleComState, scalecom_hook
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives


def Net(seed=1):  # noqa: N802
    return _Net(seed).double()


def make(optimizer="adamw", model=None, mesh=None, of_ddp=None, compression=None, **settings):
    model = DistributedDataParallel(
        Net() if model is None else model, **{"bucket_cap_mb": 0.002, **(of_ddp or {})}
    )
    settings = {**SETTINGS, **settings}
    if compression:
        settings = {"compression": compression(rate=settings["rate"], min_numel=20)}
    state = ScaleComState(model, mesh=mesh or make_mesh(), **settings)
    model.register_comm_hook(state, scalecom_hook)
    return model, OPTIMIZERS[optimizer](model.parameters()), state


def plain(optimizer="adamw", model=None, of_ddp=None):
    model = DistributedDataParallel(Net() if model is None else model, **(of_ddp or {}))
    return model, OPTIMIZERS[optimizer](model.parameters())


def take(model, optimizer, step, **how):
    optimizer.zero_grad()
    loss(model, dist.get_rank(), step, **how).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("momentum", {}),
        ("adamw", {"lookahead": True}),
        ("momentum", {"beta": 0.3, "flush": False, "bucket_bytes": 400}),
        ("adamw", {"nu": 0.4, "bits": 3, "rate": 8}),
        ("momentum", {"nu": 0.6, "lookahead": True}),
    ],
    ids=str,
)
def test_a_node_is_one_worker_of_the_reference(optimizer, settings):
    # Other devices are slow, and what they may do wrong shows in any step.
    steps = 50 if optimizer == "adamw" and "bits" in settings and DEVICE == "cpu" else 12
    model, stepped, state = make(optimizer, **settings)
    for step in range(steps):
        take(model, stepped, step)
        assert same_on_all_ranks(model.parameters())
    other = Net()
    config = ScaleComConfig(**{"nu": 1, **SETTINGS, **settings})
    references = oracle.train(
        other,
        OPTIMIZERS[optimizer](other.parameters()),
        config,
        NODES,
        local(),
        steps,
        loss,
        oracle.flat_parts,
    )
    assert_close(model.module, getattr(other, "module", other))
    mesh = make_mesh()
    own = references[mesh.get_local_rank("shard")].residues[mesh.get_local_rank("replicate")]
    tensors = state.compression.residues.tensors
    assert own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor.residue, own[name].ravel(), rtol=1e-4, atol=1e-6)
    stats = state.stats()
    assert stats["ranks_per_node"] == local()
    assert (stats["bytes_in_node"] > 0) == (local() > 1)


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


@pytest.mark.parametrize("compression", [None, LocalTopK, RandomK])
def test_nothing_is_lost(compression):
    """What came into averages and did not come out is in residues, even after a skipped step."""
    model, stepped, state = make("sgd", rate=6, compression=compression)
    mesh, names = make_mesh(), dict(model.module.named_parameters())
    left = {name: torch.zeros_like(p) for name, p in names.items()}
    for step in range(10):
        spoilt = step == 4 and dist.get_rank() == 0
        stepped.zero_grad()
        with model.no_sync():
            (loss(model, dist.get_rank(), step) * (float("nan") if spoilt else 1)).backward()
        came = {name: p.grad.clone() for name, p in names.items()}
        stepped.zero_grad()
        (loss(model, dist.get_rank(), step) * (float("nan") if spoilt else 1)).backward()
        if step == 4:
            assert all(p.grad.isnan().all() for p in names.values())
            continue
        for name, p in names.items():
            left[name] += came[name] - p.grad
        stepped.step()
    assert (state.stats()["step"], state.stats()["skipped_steps"]) == (9, 1)
    for name, total in left.items():
        dist.all_reduce(total)
        total /= dist.get_world_size()
        tensor = state.compression.residues.tensors.get(name)
        if tensor is None:
            assert total.abs().max() < 1e-9
            continue
        assert total.any()
        waits = (tensor.residue / tensor.beta).double()
        dist.all_reduce(waits, group=mesh.get_group("replicate"))
        own = state._in_node.cut(name, total.view(-1))
        torch.testing.assert_close(own, waits / NODES, rtol=1e-4, atol=1e-6)


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
                order.append("node" if self._sums else "peers")
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
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, order)
    assert order.count("peers") > 12 < order.count("node")
    assert all(other == order for other in everyone)
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


def test_stopped_and_resumed():
    settings = {"nu": None, "lookahead": True}
    model, stepped, state = make(**settings)
    for step in range(6):
        take(model, stepped, step)
        if step == 2:
            file = io.BytesIO()
            parts = model.module.state_dict(), stepped.state_dict(), state.state_dict()
            torch.save(parts, file)
    file.seek(0)
    of_model, of_optimizer, of_residues = torch.load(file, weights_only=True)
    # DDP makes its buckets anew after its first step. Take that step first.
    net = Net(seed=5)
    again, second, own = make(model=net, **settings)
    net.load_state_dict(of_model)
    second.load_state_dict(of_optimizer)
    own.load_state_dict(of_residues)
    for step in range(3, 6):
        take(again, second, step)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_what_cannot_work_is_refused():
    mesh = make_mesh()
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
