"""What train_image.py, train_char_lm.py and train_keras.py share, for any framework.

That is options, learning rate, the dealing of batches, checkpoints' names, and metrics. Everything
random is a function of (seed, step, rank) and nothing else, so a resumed run sees what an
uninterrupted one would have seen. `hvd` is always the caller's module: scalecom_hvd.torch,
scalecom_hvd.tensorflow, or training_ddp. PyTorch's part is in training_torch.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from tqdm import tqdm

ADAMW_LR = 0.001
LOSS_EVERY, SENT_EVERY = 10, 50  # steps


class WrongInput(Exception):
    """The user asked for something that cannot be done; the message says what to do instead.

    All ranks raise it.
    """


# options


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return super()._get_help_string(action) if action.default else str(action.help)


def add_training_options(parser: argparse.ArgumentParser, lr: float, **defaults: Any) -> None:
    """The options of any training script. lr: SGD's learning rate; AdamW's is ADAMW_LR."""
    parser.formatter_class = Help
    rates = f"{lr:g} for SGD, {ADAMW_LR:g} for AdamW"
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, help="optimizer steps")
    add("--batch-size", type=int, help="per rank")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="the optimizer")
    add("--lr", type=float, help=f"learning rate, times the number of ranks; or else {rates}")
    add("--no-scale-lr", action="store_true", help="take --lr as it is")
    add("--lr-schedule", choices=("constant", "cosine"), default="cosine", help="from then on")
    add("--momentum", type=float, default=0.9, help="SGD's")
    add("--weight-decay", type=float, default=0.0, help="of the optimizer")
    add("--clip-norm", type=float, help="clip the averaged gradient to this norm")
    add("--seed", type=int, default=1, help="of all that is random")

    add = parser.add_argument_group("compression").add_argument
    add("--compression", choices=("none", "fp16", "scalecom"), default="scalecom", help="how")
    add("--rate", type=rate, help="ScaleCom: one element in RATE is sent; auto: it finds itself")
    add("--bits", type=int, help="ScaleCom: of a value that is sent")
    add("--beta", type=float, help="ScaleCom: of the residues' filter; 1: error feedback")
    add("--dense", metavar="GLOBS", help="ScaleCom: sent whole, as 'head*,*.bias', or 'none'")
    add("--leader", choices=("cyclic", "staggered"), help="ScaleCom: one, or one for each bucket")
    ahead = "ScaleCom in PyTorch: the leader chooses one step ahead"
    add("--lookahead", action="store_true", default=None, help=ahead)

    add = parser.add_argument_group("output").add_argument
    add("--checkpoint-dir", type=Path, help="a folder that every rank can reach")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS", help="between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    stop = "write a checkpoint after this step and leave, for time-limited queues"
    add("--stop-at", type=int, metavar="STEP", help=stop)
    add("--metrics", type=Path, metavar="FILE", help="JSON lines: losses, and a summary last")
    add("--evaluate-every", type=int, default=100, metavar="STEPS", help="between evaluations")
    add("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(default_lr={"sgd": lr, "adamw": ADAMW_LR}, **defaults)


def main(
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace], dict[str, Any]],
    start: Callable[[], None],
    hvd: ModuleType,
) -> None:
    """Parse, start Horovod, train, print the summary on rank 0.

    Wrong input ends in a message and a non-zero exit.
    """
    args = parser.parse_args()
    for name in ("steps", "batch_size", "checkpoint_every", "evaluate_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if (args.resume or args.stop_at) and not args.checkpoint_dir:
        parser.error("--resume and --stop-at need --checkpoint-dir")
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


def rate(text: str) -> float | str:
    """The value of --rate."""
    return text if text == "auto" else float(text)


def compression_from(args: argparse.Namespace, hvd: ModuleType) -> Any:
    """The compression that the options ask for.

    For options that are not given, the library's defaults and SCALECOM_* variables hold.
    """
    if args.compression != "scalecom":
        return getattr(hvd.Compression, args.compression)
    names = ("rate", "bits", "beta", "leader", "lookahead")
    fields = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.dense is not None:
        fields["dense"] = [glob for glob in args.dense.split(",") if glob != "none"]
    try:
        return hvd.ScaleCom(**fields)
    except ValueError as error:
        raise WrongInput(str(error)) from error


def learning_rate(args: argparse.Namespace, step: int, ranks: int) -> float:
    """The learning rate of `step`, for all ranks: constant, or along a half cosine to zero."""
    rate = args.default_lr[args.optimizer] if args.lr is None else args.lr
    peak = rate if args.no_scale_lr else rate * ranks
    if args.lr_schedule == "constant":
        return peak
    return peak * (1 + math.cos(math.pi * step / args.steps)) / 2


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
        asked = f"{hvd.size()} ranks times --batch-size {args.batch_size}"
        raise WrongInput(f"{asked} is more than the {examples} training examples")
    epoch, position = divmod(step, per_epoch)
    return epoch, slice(position * together + hvd.rank(), (position + 1) * together, hvd.size())


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
    keep(part)
    os.replace(part, path)
    keep(path.parent)


def keep(*paths: Path) -> None:
    """Return once these files' contents, or folders' lists of files, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            if not path.is_dir():  # some network disks cannot tell of folders
                raise
        finally:
            os.close(descriptor)


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


def latest_checkpoint(args: argparse.Namespace, hvd: ModuleType) -> int:
    """The step of the newest checkpoint, if --resume asks for it; 0: there is none.

    All ranks must call it.
    """
    if not args.resume:
        return 0
    latest = args.checkpoint_dir / "latest.json"
    found = json.loads(latest.read_text()) if hvd.rank() == 0 and latest.exists() else {}
    found = hvd.broadcast_object(found, root_rank=0, name="checkpoint")
    if found and found["ranks"] != hvd.size():
        raise WrongInput(f"the checkpoint is of {found['ranks']} ranks, this run has {hvd.size()}")
    return found.get("step", 0)


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

    Args:
        mean: averages a loss over ranks.
        compression: of the run.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        title: str,
        first_step: int,
        hvd: ModuleType,
        mean: Callable[[Any], float],
        compression: Any,
    ) -> None:
        self._args, self._first, self._mean = args, first_step, mean
        self.last_step = min(args.steps, args.stop_at or args.steps)
        mine = hvd.rank() == 0
        self._monitor = None
        if args.compression == "scalecom":
            self._monitor = hvd.Monitor(compression, SENT_EVERY)
        hidden = not mine or args.no_progress
        self._bar = tqdm(desc=title, total=args.steps, initial=first_step, disable=hidden)
        self._file = None
        if mine and args.metrics:
            args.metrics.parent.mkdir(parents=True, exist_ok=True)
            self._file = args.metrics.open("a" if first_step else "w")
        self._durations: list[float] = []
        self._shown: dict[str, str] = {}
        self.scores: dict[str, float] = {}
        options = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()}
        self._write("start", step=first_step, steps=args.steps, ranks=hvd.size(), options=options)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps. A step's time is the loop's body's, until `step_done`."""
        for step in range(self._first, self.last_step):
            self._began = time.perf_counter()
            yield step

    def step_done(
        self,
        step: int,
        loss: Any,
        lr: float,
        evaluate: Callable[[], dict[str, float]],
        save: Callable[[int], None],
    ) -> None:
        """End a step's time, and show progress. At times evaluate, or save a checkpoint."""
        args, done = self._args, step + 1
        self._durations.append(time.perf_counter() - self._began)
        self._bar.update()
        if self._monitor is not None:
            self._monitor.step()
            if self._monitor.line:
                self._show(sent=self._monitor.line)
        if done % LOSS_EVERY == 0 or done == args.steps:
            mean = self._mean(loss)
            self._show(loss=f"{mean:.3f}")
            self._write("train", step=done, loss=mean, lr=lr)
        if done % args.evaluate_every == 0 or done == args.steps:
            self.scores = evaluate()
            self._show(**{name: f"{value:.3f}" for name, value in self.scores.items()})
            self._write("test", step=done, **self.scores)
        if args.checkpoint_dir and (done % args.checkpoint_every == 0 or done == self.last_step):
            save(done)

    def end(self, **numbers: Any) -> dict[str, Any]:
        """Close the bar and the file; returns the summary, which is also the file's last line.

        ms_per_step: the median over the last half of the steps, which excludes the start.
        """
        recent = self._durations[len(self._durations) // 2 :]
        median = round(1000 * statistics.median(recent), 3) if recent else None
        summary = {"ms_per_step": median, "step": self.last_step, **self.scores, **numbers}
        self._write("end", **summary)
        self._bar.close()
        if self._file:
            self._file.close()
        return summary

    def _write(self, event: str, **numbers: Any) -> None:
        if self._file:
            self._file.write(json.dumps({"event": event, **numbers}) + "\n")
            self._file.flush()

    def _show(self, **numbers: str) -> None:
        self._shown |= numbers
        self._bar.set_postfix(self._shown, refresh=False)
