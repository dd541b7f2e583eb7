"""What train_image.py and train_char_lm.py share besides training.py.

This is PyTorch's part of set-up, batches, evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import training

# This option is read before there is a parser: it decides from which module `hvd` comes.
backend_option = argparse.ArgumentParser(add_help=False)
backend_option.add_argument(
    "--backend",
    choices=("horovod", "ddp"),
    default="ddp" if "TORCHELASTIC_RUN_ID" in os.environ else "horovod",
    help="ddp: torch.distributed, launched by torchrun (default: what it was launched by)",
)
if backend_option.parse_known_args()[0].backend == "ddp":
    import training_ddp as hvd
else:
    import scalecom_hvd.torch as hvd


def start() -> None:
    """Start Horovod, or torch.distributed; ranks share this machine's cores fairly."""
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))


def device() -> torch.device:
    """This rank's GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def optimizer_from(
    args: argparse.Namespace, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer that the options ask for; its learning rate is set at every step."""
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, weight_decay=args.weight_decay)
    return torch.optim.SGD(
        parameters, lr=0.0, momentum=args.momentum, weight_decay=args.weight_decay
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def apply_gradients(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    """Clip the averaged gradient if `clip_norm` is given, then call optimizer.step()."""
    if clip_norm is None:
        optimizer.step()
        return
    optimizer.synchronize()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    with optimizer.skip_synchronize():
        optimizer.step()


# --------------------------------------------------------------------------------------------------
# data


def generator(*numbers: int) -> torch.Generator:
    """A random generator that depends only on these numbers, such as (seed, step, rank)."""
    return torch.Generator().manual_seed(training.seed_from(*numbers))


def batch_indices(args: argparse.Namespace, examples: int, step: int) -> torch.Tensor:
    """The examples (batch_size,) that this rank trains on in `step`; see training.deal."""
    epoch, mine = training.deal(args, examples, step, hvd)
    return torch.randperm(examples, generator=generator(args.seed, epoch))[mine]


def mean_over_ranks(loss: torch.Tensor) -> float:
    return float(hvd.allreduce(loss.detach(), name="loss"))


def ratio_over_ranks(numerator: float, denominator: float, name: str) -> float:
    """Sum both over all ranks and divide. This is a metric's mean if each rank knows a part."""
    sums = hvd.allreduce(
        torch.tensor([numerator, denominator], dtype=torch.float64), op=hvd.Sum, name=name
    )
    return float(sums[0] / sums[1])


def share_buffers(model: torch.nn.Module) -> None:
    """Give every rank the running statistics of rank 0, so that all evaluate the same model.

    Each rank gathers running statistics on its own.
    """
    buffers = dict(model.named_buffers())
    if buffers:
        hvd.broadcast_parameters(buffers, root_rank=0)


# --------------------------------------------------------------------------------------------------
# checkpoints


def broadcast_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let all ranks begin with rank 0's model and optimizer.

    The optimizer goes first: if its state is empty, Horovod makes it with a step of zero gradients,
    and with weight decay that step moves the parameters.
    """
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def save_checkpoint(
    folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Save the state after `step` steps.

    Rank 0 saves the model and the optimizer, and every rank saves its own residues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compression = getattr(optimizer, "compression", None)
    if compression is not None:
        _write(_residues_file(folder, step, hvd.rank()), compression.state_dict())
    if hvd.rank() == 0:
        _write(
            _model_file(folder, step),
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )
    hvd.barrier()
    training.commit_checkpoint(folder, step, hvd)


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint and return its step; 0 if there is none.

    Call `broadcast_state` after it. If there are more ranks than before, the new ones start with
    residues of zero.
    """
    found = training.latest_checkpoint(folder, hvd)
    if found is None:
        return 0
    step, ranks = found
    if hvd.rank() == 0:
        state = torch.load(_model_file(folder, step), map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    compression = getattr(optimizer, "compression", None)
    if compression is not None:
        # A new rank takes rank 0's file for the step and the settings, which must be the same
        # everywhere, and empties its residues.
        source = hvd.rank() if hvd.rank() < ranks else 0
        file = _residues_file(folder, step, source)
        state = torch.load(file, map_location="cpu", weights_only=True)
        if source != hvd.rank():
            state["residues"] = {
                name: torch.zeros_like(residue) for name, residue in state["residues"].items()
            }
        compression.load_state_dict(state)
    return step


def _model_file(folder: Path, step: int) -> Path:
    return folder / f"{training.model_name(step)}.pt"


def _residues_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"{training.residues_name(step, rank)}.pt"


def _write(path: Path, state: dict[str, Any]) -> None:
    training.write_whole(path, lambda file: torch.save(state, file))


def traffic_per_step(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Bytes that one rank sends per step on a ring."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return training.traffic_per_step(
        args, trained, getattr(optimizer, "compression", None), hvd.size()
    )
