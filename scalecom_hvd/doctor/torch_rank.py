"""One rank of the self-test in PyTorch, on Horovod or on torch.distributed.

`python -m scalecom_hvd.doctor.torch_rank horovod`, or `ddp`, started by self_test.py under a
launcher. Imports rank_check, kernels of exchange/, and one of torch/ and ddp/, where it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from scalecom_hvd.doctor.rank_check import (
    CONFIG,
    LEARNING_RATE,
    RANKS,
    STEPS,
    RankCheck,
    check_size,
    inputs,
)
from scalecom_hvd.exchange.kernel_choice import kernel_for
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.reference import Array

KERNELS = {"NativeKernel": "kernel in C", "TorchKernel": "plain PyTorch's kernel"}


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A rank's loss of a step."""
    return model(torch.from_numpy(inputs(step, rank, 8, 30))).square().mean()


def gradients(model: nn.Module, step: int, rank: int) -> dict[str, Array]:
    """What a rank's backward gives in a step."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss_of(model, step, rank), parameters)
    return {name: grad.numpy() for name, grad in zip(names, grads, strict=True)}


def received(model: nn.Module) -> dict[str, Array]:
    """What lies in the parameters' gradients."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.numpy().copy() for name, grad in grads.items() if grad is not None}


def train(
    model: nn.Module, take_step: Callable[[int], None], average_residues: Callable[[str], Array]
) -> tuple[RankCheck, dict[str, Array]]:
    """Take the steps, each held to the reference.

    Args:
        model: the one that is trained.
        take_step: leaves the averages in p.grad, and steps the optimizer.
        average_residues: gives a parameter's residue, averaged over ranks.

    Returns:
        The check, and the residues that it is to end with.
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


def on_horovod() -> None:
    """Horovod's drop-in."""
    import scalecom_hvd.torch as hvd

    hvd.init()
    check_size(hvd.size())
    model = make_model()
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
        return hvd.allreduce(residues[name], name=f"doctor.{name}").numpy()

    check, residues = train(model, take_step, average)
    everyones = hvd.allgather(flat(model)[None], name="doctor.parameters")
    check.end(residues, list(everyones.numpy()))
    check.passed(kernel())
    hvd.shutdown()


def on_torch_distributed() -> None:
    """The communication hook of DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scalecom_hvd.ddp import ScaleComState, scalecom_hook

    dist.init_process_group("gloo")
    check_size(dist.get_world_size())
    model = make_model()
    wrapped = DistributedDataParallel(model)
    state = ScaleComState(wrapped, config=CONFIG)
    wrapped.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def take_step(step: int) -> None:
        optimizer.zero_grad()
        loss_of(wrapped, step, dist.get_rank()).backward()
        optimizer.step()

    def average(name: str) -> Array:
        residue = _residue(state.state_dict()["residues"], name)
        dist.all_reduce(residue)
        return residue.numpy() / RANKS

    check, residues = train(model, take_step, average)
    everyones = [torch.empty_like(flat(model)) for _ in range(RANKS)]
    dist.all_gather(everyones, flat(model))
    check.end(residues, [parameters.numpy() for parameters in everyones])
    check.passed(kernel())
    # With torch 2.13, a process whose Python ends while a thread of Gloo's still drops tensors may
    # abort, with a hook or without. Nothing is left to do here, so Python need not end.
    dist.barrier()
    os._exit(0)


def _residue(residues: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A copy of it. Names may have the wrapper's prefix."""
    return residues[name if name in residues else f"module.{name}"].clone()


def kernel() -> str:
    """Which one compressed."""
    geometry = Lanes(4, 2)
    found = kernel_for(torch.device("cpu"), torch.float32, torch.float32, geometry).__name__
    return KERNELS.get(found, found)


def main(face: str) -> None:
    """Run the rank. face: "horovod" or "ddp"."""
    # Sums in another order could choose another element.
    torch.set_num_threads(1)
    np.seterr(all="raise", under="ignore")
    {"horovod": on_horovod, "ddp": on_torch_distributed}[face]()


if __name__ == "__main__":
    main(sys.argv[1])
