"""One task of real size: a Transformer of 4.8 million parameters, dense and with ScaleCom.

It learns the standard library's source on real ranks, with SGD and with AdamW.

    python scripts/study/real_size.py                 four runs of 2000 steps
    python scripts/study/real_size.py --steps 200     shorter

It starts scripts/examples/train_char_lm.py under mpirun, once per method. Interrupted runs go on
from their last checkpoint, and finished runs are not made again. --output holds the metrics of
every run, curves.csv (loss over steps, bytes and modelled time), and curves.png.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch
import pictures
import study_results

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_char_lm.py"
TASK = ("--model", "transformer-large", "--batch-size", "16", "--clip-norm", "1", "--no-scale-lr")
SGD = ("--optimizer", "sgd", "--lr", "0.2")
ADAMW = ("--optimizer", "adamw", "--lr", "0.001", "--weight-decay", "0.01")
SCALECOM = ("--compression", "scalecom")
METHODS = {
    "dense, SGD": (*SGD, "--compression", "none"),
    "ScaleCom, SGD": (*SGD, *SCALECOM),
    "dense, AdamW": (*ADAMW, "--compression", "none"),
    "ScaleCom, AdamW": (*ADAMW, *SCALECOM),
}
GBIT = 1
POINTS = 50


@dataclass(frozen=True)
class Point:
    """A point of a method's curve. bytes: what a worker has sent so far. seconds: modelled."""

    step: int
    loss: float
    bytes: float
    seconds: float


def main() -> None:
    args = argument_parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for method, options in METHODS.items():
        # Runs of other lengths have other schedules, so no run goes on from another one's
        # checkpoint.
        name = f"{method.replace(', ', '-')}-{args.steps}-ranks{args.ranks}-seed{args.seed}"
        metrics = args.output / f"{name}.jsonl"
        if finished(metrics) is None:
            print(method, file=sys.stderr, flush=True)
            train(args, method, [*TASK, *options], metrics)
        results[method] = finished(metrics)
    curves = {method: list(curve(lines)) for method, lines in results.items()}
    write_curves(curves, args.output / "curves.csv")
    pictures.save(drawn(curves), args.output / "curves.png")
    print(table(results))
    print(f"\nwritten to {args.output}: curves.csv, curves.png")


def finished(metrics: Path) -> list[dict[str, Any]] | None:
    """The lines of a run that reached its end, or None if it did not.

    If a run was interrupted between its last checkpoint and its end, no step is left to be timed.
    """
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    whole = lines and lines[-1]["event"] == "end" and lines[-1]["ms_per_step"] is not None
    return lines if whole else None


def train(args: argparse.Namespace, method: str, options: Sequence[str], metrics: Path) -> None:
    """Start one run, or go on with it. If it fails, this script ends."""
    folder = metrics.with_suffix("")
    own = ["--steps", str(args.steps), "--seed", str(args.seed), "--metrics", str(metrics)]
    own += ["--checkpoint-dir", str(folder), "--checkpoint-every", "200", "--resume"]
    own += ["--evaluate-every", "200"]
    command = launch.command("mpirun", args.ranks, [str(SCRIPT), *options, *own])
    returncode = subprocess.run(command, env=launch.environment()).returncode
    if returncode != 0:
        sys.exit(f"{method} ended with exit status {returncode}: a second call goes on from there")
    if finished(metrics) is None:
        sys.exit(f"{method} was cut after its last step: remove {folder} to train it anew")


def curve(lines: Sequence[dict[str, Any]]) -> Iterator[Point]:
    """The points of a run's curve: POINTS of them, or a few more.

    Losses are means over the lines since the last point. What a step sends is known only of the
    last step.
    """
    end = lines[-1]
    share = end["bytes_per_step"] / (4 * end["parameters"])
    losses = {line["step"]: line["loss"] for line in lines if line["event"] == "train"}
    steps = sorted(losses)
    lines_per_point = max(len(steps) // POINTS, 1)
    for at in range(lines_per_point, len(steps) + 1, lines_per_point):
        step = steps[at - 1]
        loss = statistics.mean(losses[s] for s in steps[at - lines_per_point : at])
        sent = step * end["bytes_per_step"]
        yield Point(step, loss, sent, study_results.seconds(share, step, GBIT))


def write_curves(curves: dict[str, list[Point]], path: Path) -> None:
    """Write one row per method and point."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["method", "step", "loss", "bytes", f"seconds at {GBIT} Gbit/s"])
        for method, points in curves.items():
            rows.writerows([method, *dataclasses.astuple(point)] for point in points)


def drawn(curves: dict[str, list[Point]]) -> Any:
    """A figure of the loss over steps, and over modelled time."""
    titles = ("steps", f"seconds, modelled at {GBIT} Gbit/s")
    figure, axes = pictures.panels([f"loss over {title}" for title in titles])
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xlabel=title, ylabel="training loss, bits per character")
    for method, points in curves.items():
        name, optimizer = method.split(", ")
        marker = "o" if optimizer == "SGD" else "^"
        style = pictures.MARKS[name].curve(marker=marker, markevery=0.12, label=method)
        losses = [point.loss / math.log(2) for point in points]
        axes[0].plot([point.step for point in points], losses, **style)
        axes[1].plot([point.seconds for point in points], losses, **style)
    axes[0].legend()
    return figure


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The final results of all runs, in Markdown."""
    lines = [
        "| method | bits per character | MB per worker and step | ms per step |",
        "|---|---|---|---|",
    ]
    for method, found in results.items():
        end = found[-1]
        cells = (f"{end['bits_per_character']:.3f}", f"{end['bytes_per_step'] / 1e6:.3f}")
        lines.append(f"| {method} | {' | '.join(cells)} | {end['ms_per_step']:.0f} |")
    return "\n".join(lines)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("study/real_size"), help="default: %(default)s"
    )
    return parser


if __name__ == "__main__":
    main()
