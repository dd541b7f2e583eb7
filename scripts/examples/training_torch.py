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
    decay = args.weight_decay
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=0.0, momentum=args.momentum, weight_decay=decay)


def apply_gradients(args: argparse.Namespace, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take the step, with its learning rate, which is returned. Clip before, if --clip-norm is."""
    lr = training.learning_rate(args, step, hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = lr
    if args.clip_norm is None:
        optimizer.step()
        return lr
    optimizer.synchronize()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, args.clip_norm)
    with optimizer.skip_synchronize():
        optimizer.step()
    return lr


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
    both = torch.tensor([numerator, denominator], dtype=torch.float64)
    sums = hvd.allreduce(both, op=hvd.Sum, name=name)
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
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        _write(_model_file(folder, step), state)
    hvd.barrier()
    training.commit_checkpoint(folder, step, hvd)


def begin(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Load the newest checkpoint, if --resume asks for it, and return its step; 0: there is none.

    All ranks begin with rank 0's model and optimizer. If there are more ranks than before, the new
    ones start with residues of zero.
    """
    step, ranks = training.latest_checkpoint(args, hvd)
    if step:
        _load(args.checkpoint_dir, step, ranks, model, optimizer)
    # The optimizer goes first: if its state is empty, Horovod makes it with a step of zero
    # gradients, and with weight decay that step moves the parameters.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return step


def _load(
    folder: Path, step: int, ranks: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
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
            state["residues"] = {n: torch.zeros_like(r) for n, r in state["residues"].items()}
        compression.load_state_dict(state)


def _model_file(folder: Path, step: int) -> Path:
    return folder / f"{training.model_name(step)}.pt"


def _residues_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"{training.residues_name(step, rank)}.pt"


def _write(path: Path, state: dict[str, Any]) -> None:
    training.write_whole(path, lambda file: torch.save(state, file))


def run_log(
    args: argparse.Namespace, title: str, first_step: int, optimizer: torch.optim.Optimizer
) -> training.RunLog:
    compression = getattr(optimizer, "compression", None)
    return training.RunLog(args, title, first_step, hvd, mean_over_ranks, compression)


def end(
    log: training.RunLog,
    args: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """End a run; returns its summary."""
    count = sum(p.numel() for p in model.parameters())
    compression = getattr(optimizer, "compression", None)
    sent = training.traffic_per_step(args, count, compression, hvd.size())
    return log.end(parameters=count, bytes_per_step=sent)
