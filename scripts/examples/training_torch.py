"""What train_image.py and train_char_lm.py share besides training.py: PyTorch's part.

`train` is all of a training. Compared with a script without Horovod, the lines that differ call
`hvd`. Compared with a script with Horovod, only `compression=` differs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
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


def train(
    args: argparse.Namespace,
    title: str,
    model: torch.nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    evaluate: Callable[[], dict[str, float]],
) -> dict[str, Any]:
    """Train a model as the options say; returns the run's summary.

    loss_of: returns the loss of this rank's batch of a step. evaluate: returns this rank's part of
        held-out scores, averaged over ranks.
    """
    try:
        optimizer = hvd.DistributedOptimizer(
            optimizer_from(args, model.parameters()),
            named_parameters=model.named_parameters(),
            compression=training.compression_from(args, hvd),
        )
    except ValueError as error:
        raise training.WrongInput(str(error)) from error
    compression = getattr(optimizer, "compression", None)
    first_step = begin(args, model, optimizer)
    log = training.RunLog(args, title, first_step, hvd, mean_over_ranks, compression)

    @torch.no_grad()
    def test() -> dict[str, float]:
        # Each rank gathers running statistics on its own. All ranks evaluate with rank 0's.
        if buffers := dict(model.named_buffers()):
            hvd.broadcast_parameters(buffers, root_rank=0)
        model.eval()
        return evaluate()

    for step in log.steps():
        model.train()
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        lr = apply_gradients(args, optimizer, step)
        log.step_done(
            step, loss, lr, test, lambda done: save_checkpoint(args, done, model, optimizer)
        )
    count = sum(p.numel() for p in model.parameters())
    sent = training.traffic_per_step(args, count, compression, hvd.size())
    return log.end(parameters=count, bytes_per_step=sent)


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


# checkpoints


def save_checkpoint(
    args: argparse.Namespace, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Save the state after `step` steps.

    Rank 0 saves the model and the optimizer, and every rank saves its own residues.
    """
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    common, own = files_of(args.checkpoint_dir, step)
    compression = getattr(optimizer, "compression", None)
    if compression is not None:
        write(own, compression.state_dict())
    if hvd.rank() == 0:
        write(common, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    hvd.barrier()
    training.commit_checkpoint(args.checkpoint_dir, step, hvd)


def begin(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Load the newest checkpoint, if --resume asks for it, and return its step; 0: there is none.

    All ranks begin with rank 0's model and optimizer.
    """
    step = training.latest_checkpoint(args, hvd)
    if step:
        common, own = files_of(args.checkpoint_dir, step)
        if hvd.rank() == 0:
            state = torch.load(common, map_location="cpu", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        if hasattr(optimizer, "compression"):
            state = torch.load(own, map_location="cpu", weights_only=True)
            optimizer.compression.load_state_dict(state)
    # The optimizer goes first: if its state is empty, Horovod makes it with a step of zero
    # gradients, and with weight decay that step moves the parameters.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return step


def files_of(folder: Path, step: int) -> tuple[Path, Path]:
    """Where a checkpoint's common part is, and this rank's residues."""
    names = training.model_name(step), training.residues_name(step, hvd.rank())
    return tuple(folder / f"{name}.pt" for name in names)


def write(path: Path, state: dict[str, Any]) -> None:
    training.write_whole(path, lambda file: torch.save(state, file))
