"""What the training scripts of all frameworks share.

That is options, learning rate, the dealing of batches, checkpoints' names, and metrics. Everything
random is a function of (seed, step, rank) and nothing else, so a resumed run sees what an
uninterrupted one would have seen. `hvd` is always the caller's module: scalecom_hvd.torch,
scalecom_hvd.tensorflow, or training_ddp. This module needs neither framework; training_torch.py has
PyTorch's part, and train_keras.py has Keras's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# options


ADAMW_LR = 0.001


class WrongInput(Exception):
    """The user asked for something that cannot be done; the message says what to do instead.

    All ranks raise it.
    """


def add_training_options(
    parser: argparse.ArgumentParser,
    *,
    lr: float,
    steps: int,
    batch_size: int,
    weight_decay: float,
    clip_norm: float | None = None,
) -> None:
    """The options of any training script; the keywords are this script's defaults.

    lr: SGD's; AdamW's is ADAMW_LR.
    """
    parser.set_defaults(default_lr={"sgd": lr, "adamw": ADAMW_LR})
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=int, default=steps, help="optimizer steps (default: %(default)s)"
    )
    length.add_argument(
        "--epochs", type=float, help="instead of --steps: passes over the training data"
    )
    group.add_argument(
        "--batch-size", type=int, default=batch_size, help="per rank (default: %(default)s)"
    )
    group.add_argument(
        "--optimizer", choices=("sgd", "adamw"), default="sgd", help="default: %(default)s"
    )
    group.add_argument(
        "--lr",
        type=float,
        help="learning rate of one rank; multiplied by the number of ranks (default: "
        f"{lr:g} for SGD, {ADAMW_LR:g} for AdamW)",
    )
    group.add_argument(
        "--no-scale-lr",
        action="store_true",
        help="take --lr as it is, whatever the number of ranks",
    )
    group.add_argument(
        "--lr-warmup-steps",
        type=int,
        default=0,
        help="grow linearly from 1 / ranks of the learning rate (default: %(default)s)",
    )
    group.add_argument(
        "--lr-schedule",
        choices=("constant", "cosine"),
        default="cosine",
        help="after the warm-up (default: %(default)s)",
    )
    group.add_argument("--momentum", type=float, default=0.9, help="SGD's (default: %(default)s)")
    group.add_argument(
        "--weight-decay", type=float, default=weight_decay, help="default: %(default)s"
    )
    group.add_argument(
        "--clip-norm",
        type=float,
        default=clip_norm,
        help="clip the averaged gradient to this norm (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=1)

    group = parser.add_argument_group("compression")
    group.add_argument(
        "--compression",
        choices=("none", "fp16", "scalecom"),
        default="scalecom",
        help="default: %(default)s",
    )
    group.add_argument("--rate", type=float, help="ScaleCom: one gradient element in RATE is sent")
    group.add_argument("--bits", type=int, help="ScaleCom: of a value that is sent")
    group.add_argument(
        "--beta",
        type=float,
        help="ScaleCom: low-pass filter on the residue; 1 is classic error feedback",
    )
    group.add_argument(
        "--dense",
        action="append",
        metavar="GLOBS",
        help=(
            "ScaleCom: parameters sent whole, globs separated by commas, repeatable; 'none' "
            "for no tensor"
        ),
    )
    group.add_argument(
        "--leader",
        choices=("cyclic", "staggered"),
        help="ScaleCom: one leader for all buckets, or one for each",
    )
    group.add_argument(
        "--lookahead",
        action="store_true",
        default=None,
        help="ScaleCom: the leader chooses one step ahead",
    )
    group.add_argument(
        "--selection",
        choices=("lanes", "exact"),
        help="ScaleCom: the largest of each lane, or the true top-k",
    )
    group.add_argument("--min-numel", type=int, help="ScaleCom: smaller tensors are sent whole")

    group = parser.add_argument_group("output")
    group.add_argument("--checkpoint-dir", type=Path, help="a folder that every rank can reach")
    group.add_argument(
        "--checkpoint-every", type=int, default=100, metavar="STEPS", help="default: %(default)s"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --checkpoint-dir, if there is one",
    )
    group.add_argument(
        "--stop-at",
        type=int,
        metavar="STEP",
        help="write a checkpoint after this step and leave, for time-limited queues",
    )
    group.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write JSON lines: losses, evaluations, and a summary last",
    )
    group.add_argument(
        "--evaluate-every", type=int, default=100, metavar="STEPS", help="default: %(default)s"
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    group.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="ScaleCom: write what is sent and what waits, for TensorBoard",
    )


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse combinations of options that argparse itself cannot see.

    It prints the parser's usage and exits with a non-zero status.
    """
    for name in ("steps", "batch_size", "checkpoint_every", "evaluate_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if (args.resume or args.stop_at) and not args.checkpoint_dir:
        parser.error("--resume and --stop-at need --checkpoint-dir")


def main(
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace], dict[str, Any]],
    start: Callable[[], None],
    hvd: ModuleType,
    argv: list[str] | None = None,
) -> None:
    """Parse, start Horovod, train, print the summary on rank 0.

    Wrong input ends in a message and a non-zero exit.
    """
    args = parser.parse_args(argv)
    check_options(parser, args)
    start()
    try:
        summary = train(args)
    except WrongInput as error:
        if hvd.rank() == 0:
            sys.exit(f"{parser.prog}: {error}")
        # The launcher ends all ranks as soon as one fails, so rank 0 must speak first.
        time.sleep(1)
        sys.exit(1)
    if hvd.rank() == 0:
        print(json.dumps(summary))
    hvd.shutdown()


def compression_from(
    args: argparse.Namespace,
    shapes: Mapping[str, tuple[int, ...]],
    hvd: ModuleType,
) -> Any:
    """The compression that the options ask for.

    Pass it to hvd.DistributedOptimizer or DistributedGradientTape. For options that are not given,
    the library's defaults and SCALECOM_* variables hold.

    shapes: of all parameters, by name.
    """
    if args.compression != "scalecom":
        return getattr(hvd.Compression, args.compression)
    names = ("rate", "bits", "beta", "leader", "lookahead", "selection", "min_numel")
    fields = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.dense is not None:
        fields["dense"] = _globs(args.dense)
    try:
        compression = hvd.ScaleCom(**fields)
        compression.config.rates_for(shapes)  # finds globs that match no parameter
    except ValueError as error:
        raise WrongInput(str(error)) from error
    return compression


def monitor_from(args: argparse.Namespace, compression: Any, hvd: ModuleType) -> Any:
    """A monitor for the progress bar and for --tensorboard; None: nothing is compressed."""
    if args.compression != "scalecom":
        return None
    return hvd.Monitor(compression, every=50, tensorboard=args.tensorboard)


def _globs(options: list[str]) -> list[str]:
    return [
        glob.strip()
        for option in options
        for glob in option.split(",")
        if glob.strip() not in ("", "none")
    ]


def total_steps(args: argparse.Namespace, examples: int, ranks: int) -> int:
    """--steps, or the steps that --epochs passes over `examples` take on all ranks together."""
    if args.epochs is None:
        return args.steps
    return max(1, round(args.epochs * examples / (args.batch_size * ranks)))


def learning_rate(args: argparse.Namespace, step: int, steps: int, ranks: int) -> float:
    """The learning rate of `step`.

    It is scaled by the number of ranks and warmed up. Then it is constant, or falls to zero along a
    half cosine.
    """
    rate = args.default_lr[args.optimizer] if args.lr is None else args.lr
    peak = rate if args.no_scale_lr else rate * ranks
    if step < args.lr_warmup_steps:
        return peak / ranks * (1 + (ranks - 1) * step / args.lr_warmup_steps)
    if args.lr_schedule == "constant":
        return peak
    done = (step - args.lr_warmup_steps) / max(1, steps - args.lr_warmup_steps)
    return peak * (1 + math.cos(math.pi * done)) / 2


# --------------------------------------------------------------------------------------------------
# data


def seed_from(*numbers: int) -> int:
    """A random generator's seed that depends only on these numbers, such as (seed, step, rank)."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return seed


def deal(args: argparse.Namespace, examples: int, step: int, hvd: ModuleType) -> tuple[int, slice]:
    """The epoch of `step`, and this rank's places in that epoch's permutation of all examples.

    A permutation is dealt out to the ranks as torch's DistributedSampler does. It is a function of
    the step, so it needs no state in a checkpoint. A remainder that is too small for a batch on
    every rank is left for the next epoch's permutation.
    """
    together = args.batch_size * hvd.size()
    per_epoch = examples // together
    if per_epoch == 0:
        raise WrongInput(
            f"{hvd.size()} ranks times --batch-size {args.batch_size} is more than the {examples} "
            "training examples"
        )
    epoch, position = divmod(step, per_epoch)
    return epoch, slice(position * together + hvd.rank(), (position + 1) * together, hvd.size())


def my_share(count: int, hvd: ModuleType) -> range:
    """Which of `count` test examples this rank evaluates."""
    return range(hvd.rank(), count, hvd.size())


# --------------------------------------------------------------------------------------------------
# checkpoints


def model_name(step: int) -> str:
    """The name of rank 0's file of the model and the optimizer, without its ending."""
    return f"step-{step:06d}"


def residues_name(step: int, rank: int) -> str:
    """The name of each rank's own file, without its ending."""
    return f"step-{step:06d}.residues-{rank}"


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` write a file that is there whole or not at all.

    This holds whenever the program or the machine goes down. An older file of this name stays until
    the new one is on the disk.
    """
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        write(file)
    keep([part])
    os.replace(part, path)
    keep_names(path.parent)


def keep(paths: Iterable[Path]) -> None:
    """Return once the contents of these files are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def keep_names(folder: Path) -> None:
    """Return once a folder's list of files is on the disk.

    Some network file systems cannot tell.
    """
    with contextlib.suppress(OSError):
        keep([folder])


def commit_checkpoint(folder: Path, step: int, hvd: ModuleType) -> None:
    """Make the files of `step` the newest checkpoint, and remove older ones.

    Call it when all ranks have written their files. `latest.json` is replaced only then, so a run
    that dies while it writes resumes from the checkpoint before.
    """
    if hvd.rank() == 0:
        latest = json.dumps({"step": step, "ranks": hvd.size()})
        write_whole(folder / "latest.json", lambda file: file.write(latest.encode()))
        for old in folder.glob("step-*"):
            if old.is_dir():  # TensorFlow's, of a run that was killed while it wrote
                shutil.rmtree(old)
            elif not old.name.startswith(f"{model_name(step)}."):
                old.unlink()


def latest_checkpoint(folder: Path, hvd: ModuleType) -> tuple[int, int] | None:
    """The newest checkpoint's step and the number of ranks that wrote it; None if there is none.

    All ranks must call it.
    """
    latest = folder / "latest.json"
    found = json.loads(latest.read_text()) if hvd.rank() == 0 and latest.exists() else None
    found = hvd.broadcast_object(found, root_rank=0, name="checkpoint")
    if found is None:
        return None
    if found["ranks"] != hvd.size() and hvd.rank() == 0:
        print(
            f"the checkpoint is of {found['ranks']} ranks, this run has {hvd.size()}: batches "
            "differ, new ranks' residues are zero",
            file=sys.stderr,
        )
    return found["step"], found["ranks"]


# --------------------------------------------------------------------------------------------------
# progress, metrics


def traffic_per_step(args: argparse.Namespace, parameters: int, scalecom: Any, ranks: int) -> int:
    """Bytes that one rank sends per step on a ring.

    ScaleCom counted them in its last step. Without ScaleCom, they are those of an all-reduce of
    everything.
    """
    if args.compression == "scalecom":
        return scalecom.stats()["bytes_traffic"]
    return round(2 * (ranks - 1) / ranks * parameters * (2 if args.compression == "fp16" else 4))


class RunLog:
    """Progress bar and metrics of one run; on ranks other than 0 it only takes part in averaging.

    The file holds one JSON object per line, each with an "event": start, train, test or end.
    mean_over_ranks: averages a loss. monitor: from `monitor_from`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        title: str,
        first_step: int,
        steps: int,
        hvd: ModuleType,
        mean_over_ranks: Callable[[Any], float],
        monitor: Any = None,
        loss_every: int = 10,
    ) -> None:
        self._mine = hvd.rank() == 0
        self._mean_over_ranks = mean_over_ranks
        self._monitor, self._loss_every = monitor, loss_every
        self._steps = steps
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=title,
            unit="step",
            mininterval=0.5,
            disable=not self._mine or args.no_progress,
        )
        self._file = None
        if self._mine and args.metrics:
            args.metrics.parent.mkdir(parents=True, exist_ok=True)
            self._file = args.metrics.open("a" if first_step else "w")
        self._durations: list[float] = []
        self._shown: dict[str, str] = {}
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
        }
        self.write("start", step=first_step, steps=steps, ranks=hvd.size(), options=options)

    def timed_steps(self, first: int, last: int) -> Iterator[int]:
        """The step numbers first, ..., last - 1.

        A step's time is the time that the loop's body takes until `step_done`.
        """
        for step in range(first, last):
            self._began = time.perf_counter()
            yield step

    def step_done(self, step: int, loss: Any, **numbers: float) -> None:
        """End a step's time, show progress; every few steps write the loss, averaged over ranks."""
        self._durations.append(time.perf_counter() - self._began)
        self._bar.update()
        if self._monitor is not None:
            self._monitor.step()
            if self._monitor.line:
                self._show(sent=self._monitor.line)
        if (step + 1) % self._loss_every == 0 or step + 1 == self._steps:
            mean = self._mean_over_ranks(loss)
            self._show(loss=f"{mean:.3f}")
            self.write("train", step=step + 1, loss=mean, **numbers)

    def test(self, step: int, **numbers: float) -> None:
        """Record an evaluation after `step` steps."""
        self._show(**{name: f"{value:.3f}" for name, value in numbers.items()})
        self.write("test", step=step, **numbers)

    def end(self, **numbers: Any) -> dict[str, Any]:
        """Close the bar and the file; returns the summary, which is also the file's last line.

        ms_per_step: the median over the last half of the steps, which excludes the start.
        """
        recent = self._durations[len(self._durations) // 2 :]
        summary = {
            "ms_per_step": round(1000 * statistics.median(recent), 3) if recent else None,
            **numbers,
        }
        self.write("end", **summary)
        self._bar.close()
        if self._file:
            self._file.close()
        return summary

    def write(self, event: str, **numbers: Any) -> None:
        if self._file:
            self._file.write(json.dumps({"event": event, **numbers}) + "\n")
            self._file.flush()

    def _show(self, **numbers: str) -> None:
        self._shown |= numbers
        self._bar.set_postfix(self._shown, refresh=False)
