"""One task of real size: a Transformer of 4.8 million parameters on the standard library's source,
on real ranks, dense and with ScaleCom, with SGD and with AdamW.

    python scripts/study/real_size.py                 everything: two hours on two cores
    python scripts/study/real_size.py --steps 200     shorter

It starts scripts/examples/train_char_lm.py under mpirun, once per method. Runs that were cut off go
on from their last checkpoint; what is finished is not done again. In --output are metrics of every
run, curves.csv (loss over steps, bytes and modelled time), and curves.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch
import matplotlib
import study_results

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen first

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_char_lm.py"
TASK = ("--model", "transformer-large", "--batch-size", "16", "--clip-norm", "1", "--no-scale-lr")
SGD = ("--optimizer", "sgd", "--lr", "0.2")
ADAMW = ("--optimizer", "adamw", "--lr", "0.001", "--weight-decay", "0.01")
SCALECOM = ("--compression", "scalecom", "--rate", "100")
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
    """A place on a method's curve; bytes are a worker's so far, seconds those of the model."""

    step: int
    loss: float
    bytes: float
    seconds: float


def main() -> None:
    args = argument_parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for method, options in METHODS.items():
        metrics = args.output / f"{method.replace(', ', '-')}.jsonl"
        if finished(metrics, args.steps) is None:
            print(method, file=sys.stderr, flush=True)
            train(args, method, [*TASK, *options], metrics)
        results[method] = finished(metrics, args.steps)
    write_curves(results, args.output / "curves.csv")
    draw(results, args.output / "curves.png")
    print(table(results))
    print(f"\nwritten to {args.output}: curves.csv, curves.png")


def finished(metrics: Path, steps: int) -> list[dict[str, Any]] | None:
    """The lines of a run that came to its end; None: it did not, or had other steps."""
    lines = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    ended = lines and lines[-1]["event"] == "end" and lines[-1]["step"] == steps
    return lines if ended else None


def train(args: argparse.Namespace, method: str, options: Sequence[str], metrics: Path) -> None:
    """Start, or go on with, one run; it ends this script if it fails."""
    folder = metrics.with_suffix("")
    own = ["--steps", str(args.steps), "--seed", str(args.seed), "--metrics", str(metrics)]
    own += ["--checkpoint-dir", str(folder), "--checkpoint-every", "200", "--resume"]
    own += ["--evaluate-every", "200"]
    command = launch.command("mpirun", args.ranks, [str(SCRIPT), *options, *own])
    returncode = subprocess.run(command, env=launch.environment()).returncode
    if returncode != 0:
        sys.exit(f"{method} ended with exit status {returncode}: a second call goes on from there")


def curve(lines: Sequence[dict[str, Any]]) -> Iterator[Point]:
    """The points of a run's curve, POINTS of them or fewer.

    Losses are means of the lines since the last point. What a step sends is known of the last
    one. The first tenth is sent whole, by ScaleCom too.
    """
    start, end = next(line for line in lines if line["event"] == "start"), lines[-1]
    ranks, scalecom = start["ranks"], start["options"]["compression"] == "scalecom"
    whole = 2 * (ranks - 1) / ranks * 4 * end["parameters"]
    warmup = start["steps"] // 10 if scalecom else start["steps"]
    losses = {line["step"]: line["loss"] for line in lines if line["event"] == "train"}
    steps = sorted(losses)
    lines_per_point = max(len(steps) // POINTS, 1)
    for at in range(lines_per_point, len(steps) + 1, lines_per_point):
        step = steps[at - 1]
        loss = statistics.mean(losses[s] for s in steps[at - lines_per_point : at])
        sent = min(step, warmup) * whole + max(step - warmup, 0) * end["bytes_per_step"]
        share = sent / step / (4 * end["parameters"])
        yield Point(step, loss, sent, study_results.seconds(share, step, GBIT))


def write_curves(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One row per method and point."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["method", "step", "loss", "bytes", f"seconds at {GBIT} Gbit/s"])
        for method, lines in results.items():
            for p in curve(lines):
                rows.writerow([method, p.step, p.loss, p.bytes, p.seconds])


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Loss over steps, over bytes, and over modelled time."""
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4), layout="constrained", sharey=True)
    for method, lines in results.items():
        points = list(curve(lines))
        style = {"linestyle": "--" if "dense" in method else "-", "label": method}
        style["color"] = "C0" if "SGD" in method else "C1"
        losses = [p.loss for p in points]
        axes[0].plot([p.step for p in points], losses, **style)
        axes[1].plot([p.bytes / 1e9 for p in points], losses, **style)
        axes[2].plot([p.seconds for p in points], losses, **style)
    axes[0].set(xlabel="steps", ylabel="training loss, nats")
    axes[1].set(xlabel="GB sent by a worker", xscale="log")
    axes[2].set(xlabel=f"s, modelled at {GBIT} Gbit/s")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The ends of all runs in Markdown."""
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
