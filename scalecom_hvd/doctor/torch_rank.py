"""One rank of the self-test in PyTorch, on Horovod or on torch.distributed, on a CPU or a GPU.

`python -m scalecom_hvd.doctor.torch_rank FACE [DEVICE BACKEND]`, started by self_test.py under a
launcher. FACE is "horovod", "hook", "optimizer", "amp" (the hook in mixed precision) or "overlap"
(a profile of the hook), DEVICE is "cpu" or "cuda", and BACKEND is one of torch.distributed's.
Imports rank_check, gpu_overlap, kernels of exchange/, and torch/ or ddp/, whichever is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from scalecom_hvd.doctor.gpu_overlap import overlap_of
from scalecom_hvd.doctor.rank_check import (
    CONFIG,
    LEARNING_RATE,
    PASSED,
    RANKS,
    STEPS,
    RankCheck,
    check_size,
    inputs,
)
from scalecom_hvd.exchange.kernel_choice import kernel_for
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.reference import Array

KERNELS = {
    "NativeKernel": "kernel in C",
    "TorchKernel": "plain PyTorch's kernel",
    "TritonKernel": "kernel in Triton",
}


AMP_STEPS = 30
# Sizes of the model that is profiled.
WIDTH, LAYERS, BATCH = 2048, 12, 8192


def make_model(device: torch.device) -> nn.Module:
    """A model that is the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20)).to(device)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A rank's loss in a step."""
    device = next(model.parameters()).device
    return model(torch.from_numpy(inputs(step, rank, 8, 30)).to(device)).square().mean()


def gradients(model: nn.Module, step: int, rank: int) -> dict[str, Array]:
    """The gradients of a rank's backward in a step."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss_of(model, step, rank), parameters)
    return {name: grad.cpu().numpy() for name, grad in zip(names, grads, strict=True)}


def received(model: nn.Module) -> dict[str, Array]:
    """What the exchange left in the parameters' gradients."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.cpu().numpy().copy() for name, grad in grads.items() if grad is not None}


def train(
    model: nn.Module, take_step: Callable[[int], None], average_residues: Callable[[str], Array]
) -> tuple[RankCheck, dict[str, Array]]:
    """Take the steps, and compare each with the reference.

    Args:
        model: the model that is trained.
        take_step: leaves the averages in p.grad, and steps the optimizer.
        average_residues: gives a parameter's residue, averaged over ranks.

    Returns:
        The check, and the residues for its `end`.
    """
    check = RankCheck({name: tuple(p.shape) for name, p in model.named_parameters()})
    for step in range(STEPS):
        everyones = [gradients(model, step, rank) for rank in range(RANKS)]
        take_step(step)
        check.step(everyones, received(model))
    return check, {name: average_residues(name) for name, _ in model.named_parameters()}


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one tensor."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_horovod(device: str) -> None:
    """Test the drop-in for Horovod."""
    import scalecom_hvd.torch as hvd

    hvd.init()
    check_size(hvd.size())
    own = use_device(device, hvd.local_rank())
    model = make_model(own)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = hvd.ScaleCom(config=CONFIG)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), LEARNING_RATE),
        model.named_parameters(),
        compression=compression,
    )

    def take_step(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()

    def average(name: str) -> Array:
        residues = compression.state_dict()["residues"]
        return hvd.allreduce(residues[name].cpu(), name=f"doctor.{name}").numpy()

    check, residues = train(model, take_step, average)
    everyones = hvd.allgather(flat(model).cpu()[None], name="doctor.parameters")
    check.end(residues, list(everyones.numpy()))
    check.passed(kernel(own))
    hvd.shutdown()


def on_torch_distributed(face: str, device: str, backend: str) -> None:
    """Test DistributedDataParallel's communication hook, or the optimizer without a wrapper."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, ScaleComState, scalecom_hook

    own = use_device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    check_size(dist.get_world_size())
    model: nn.Module = make_model(own)
    called: nn.Module = model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    compression = ScaleCom(config=CONFIG)
    if face == "hook":
        called = DistributedDataParallel(model)
        state = ScaleComState(called, compression)
        called.register_comm_hook(state, scalecom_hook)
    else:
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)

    def take_step(step: int) -> None:
        optimizer.zero_grad()
        loss_of(called, step, dist.get_rank()).backward()
        optimizer.step()

    def average(name: str) -> Array:
        residue = _residue(compression.state_dict()["residues"], name)
        dist.all_reduce(residue)
        return residue.cpu().numpy() / RANKS

    check, residues = train(model, take_step, average)
    everyones = [torch.empty_like(flat(model)) for _ in range(RANKS)]
    dist.all_gather(everyones, flat(model))
    check.end(residues, [parameters.cpu().numpy() for parameters in everyones])
    check.passed(f"{kernel(own)}, {_averages_for_fsdp(own)}")
    # With torch 2.13, a process may abort if Python ends while a thread of Gloo's still drops
    # tensors, with a hook or without. Nothing is left to do here, so Python's own end is skipped.
    dist.barrier()
    os._exit(0)


def in_mixed_precision(device: str, backend: str) -> None:
    """Test the hook with autocast and a GradScaler, in float16 (skipping a step) and in bfloat16.

    Raises:
        AssertionError: training does not go on as it should.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scalecom_hvd.ddp import ScaleComState, scalecom_hook

    own = use_device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    check_size(dist.get_world_size())
    for dtype in (torch.float16, torch.bfloat16):
        model = make_model(own)
        wrapped = DistributedDataParallel(model)
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
        state = ScaleComState(wrapped, loss_scale=scaler, total_steps=AMP_STEPS)
        wrapped.register_comm_hook(state, scalecom_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(AMP_STEPS):
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                loss = loss_of(wrapped, 0, dist.get_rank())
            if step == 3 and dist.get_rank() == 1 and scaler.is_enabled():
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        everyones = [torch.empty_like(flat(model)) for _ in range(RANKS)]
        dist.all_gather(everyones, flat(model))
        assert all(torch.equal(everyones[0], other) for other in everyones), (
            "parameters differ between ranks"
        )
        skipped = state.stats()["skipped_steps"]
        assert (skipped > 0) == scaler.is_enabled(), f"{skipped} steps were skipped in {dtype}"
        assert losses[-1] < losses[0] / 2, f"the loss went from {losses[0]} to {losses[-1]}"
    sys.stdout.write(f"{PASSED}{AMP_STEPS} steps each in float16 and bfloat16\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def profiled(device: str, backend: str) -> None:
    """Test whether the exchange overlaps with backward, with a model that keeps a GPU busy.

    Raises:
        AssertionError: the exchange does not begin before backward is over.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    from scalecom_hvd.ddp import ScaleComState, scalecom_hook

    own = use_device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    check_size(dist.get_world_size())
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(own)
    wrapped = DistributedDataParallel(model)
    state = ScaleComState(wrapped)
    wrapped.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, WIDTH, device=own)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            optimizer.step()
        torch.accelerator.synchronize()

    steps(4)  # DDP rebuilds its buckets, and Triton compiles
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with profile(activities=activities) as profiler:
        steps(3)
    told = overlap_of(profiler.events() or ())
    if told is None:
        raise AssertionError("the profile lacks kernels of the model, or of the exchange")
    assert told.beside > 0, "the exchange's kernels ran after backward's"
    sys.stdout.write(
        f"{PASSED}{told.milliseconds / 3:.1f} ms of the exchange's kernels a step, "
        f"{told.beside:.0%} of it at the same time as the model's\n"
    )
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def _averages_for_fsdp(device: torch.device) -> str:
    """Whether FSDP2's gradients would be right here; only FSDP2 asks Gloo for averages."""
    from scalecom_hvd.ddp.nodes import check_averages

    try:
        check_averages(device=device)
    except RuntimeError as error:
        return f"but not with FSDP2: {error}"
    return "also for FSDP2"


def _residue(residues: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A copy of a parameter's residue. Names may have the wrapper's prefix."""
    return residues[name if name in residues else f"module.{name}"].clone()


def use_device(device: str, local_rank: int, ranks: int = RANKS) -> torch.device:
    """Have this rank use a device of its own, or share one if there are fewer than ranks.

    NCCL accepts ranks that share a GPU only if each says that it is on a machine of its own.

    Args:
        device: "cpu", or the type of an accelerator.
        local_rank: this rank's number on its machine.
        ranks: how many ranks there are on the machine.
    """
    if device == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    own = torch.device(device, local_rank % count)
    torch.accelerator.set_device_index(own)
    if count < ranks:
        os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    return own


def kernel(device: torch.device) -> str:
    """The kernel that compressed, in words."""
    geometry = Lanes(4, 2)
    found = kernel_for(device, torch.float32, torch.float32, geometry).__name__
    return KERNELS.get(found, found)


def main(face: str, device: str = "cpu", backend: str = "gloo") -> None:
    """Run the rank. The top of this file describes the arguments."""
    # With several threads, sums in another order could choose another element.
    torch.set_num_threads(1)
    np.seterr(all="raise", under="ignore")
    if face == "horovod":
        on_horovod(device)
    elif face == "amp":
        in_mixed_precision(device, backend)
    elif face == "overlap":
        profiled(device, backend)
    else:
        on_torch_distributed(face, device, backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
