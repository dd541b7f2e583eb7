"""One rank of the self-test in PyTorch, on Horovod or on torch.distributed, on a CPU or a GPU.

`python -m scalecom_hvd.doctor.torch_rank FACE [DEVICE BACKEND]`, started by self_test.py under a
launcher. FACE is "horovod" or "hook" (of DistributedDataParallel), DEVICE is "cpu" or "cuda", and
BACKEND is one of torch.distributed's.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from torch import nn

from scalecom_hvd.doctor import rank_check
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.lanes import Lanes


def make_model(device: torch.device) -> nn.Module:
    """A model that is the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20)).to(device)


def on_horovod(device: str) -> None:
    """Test the drop-in for Horovod."""
    import scalecom_hvd.torch as hvd

    hvd.init()
    rank_check.check_size(hvd.size())
    model = make_model(use_device(device, hvd.local_rank()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), rank_check.LEARNING_RATE),
        model.named_parameters(),
        compression=hvd.ScaleCom(config=rank_check.CONFIG),
    )
    rank_check.passed(trained(hvd.rank(), model, optimizer))
    hvd.shutdown()


def on_torch_distributed(device: str, backend: str) -> None:
    """Test DistributedDataParallel's communication hook."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scalecom_hvd.ddp import ScaleCom, ScaleComState, scalecom_hook
    from scalecom_hvd.ddp.nodes import check_averages

    own = use_device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    rank_check.check_size(dist.get_world_size())
    model = DistributedDataParallel(make_model(own))
    state = ScaleComState(model, ScaleCom(config=rank_check.CONFIG))
    model.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), rank_check.LEARNING_RATE)
    kernel = trained(dist.get_rank(), model, optimizer)
    try:  # only FSDP2 asks Gloo for averages
        check_averages(device=own)
        rank_check.passed(kernel, ", also for FSDP2")
    except RuntimeError as error:
        rank_check.passed(kernel, f", but not with FSDP2: {error}")
    # With torch 2.13, a process may abort if Python ends while a thread of Gloo's still drops
    # tensors, with a hook or without. Nothing is left to do here, so Python's own end is skipped.
    dist.barrier()
    os._exit(0)


def trained(rank: int, called: nn.Module, optimizer: torch.optim.Optimizer) -> type:
    """Train a model, in its wrapper if it has one, and check each step. Gives the kernel."""
    bare = getattr(called, "module", called)
    named = dict(bare.named_parameters())
    device = next(called.parameters()).device

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        rows = torch.from_numpy(rank_check.inputs(step, rank, 8, 30))
        return model(rows.to(device)).square().mean()

    def gradients(step: int, rank: int) -> rank_check.Arrays:
        grads = torch.autograd.grad(loss(bare, step, rank), list(named.values()))
        return {name: grad.cpu().numpy() for name, grad in zip(named, grads, strict=True)}

    def take_step(step: int) -> rank_check.Arrays:
        optimizer.zero_grad()
        loss(called, step, rank).backward()
        optimizer.step()
        return {name: p.grad.cpu().numpy().copy() for name, p in named.items()}

    rank_check.check({name: tuple(p.shape) for name, p in named.items()}, gradients, take_step)
    return kernel_for(device, torch.float32, torch.float32, Lanes(4, 2))


def use_device(device: str, local_rank: int, ranks: int = rank_check.RANKS) -> torch.device:
    """Have this rank use a device of its own, or share one if the machine has fewer than ranks.

    device: "cpu", or the type of an accelerator.
    """
    if device == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    own = torch.device(device, local_rank % count)
    torch.accelerator.set_device_index(own)
    if count < ranks:  # NCCL then wants each to say that it is on a machine of its own
        os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    return own


def main(face: str, device: str = "cpu", backend: str = "gloo") -> None:
    """Run the rank. The top of this file describes the arguments."""
    # With several threads, sums in another order could choose another element.
    torch.set_num_threads(1)
    np.seterr(all="raise", under="ignore")
    on_horovod(device) if face == "horovod" else on_torch_distributed(device, backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
