"""`make demo`: train three models with Horovod, dense and with ScaleCom, and compare.

The models are a ResNet on handwritten digits, in PyTorch and in Keras, and an LSTM on source code.
The demo starts train_image.py, train_keras.py and train_char_lm.py by `horovodrun -np 2` over MPI,
and the first by torchrun too. It prints a table, and writes demo/results.json and demo/curves.png.
It needs no download. Run it with the Python of the environment that holds Horovod.

`make demo-torch` is --torch-alone: it trains the ResNet only, by torchrun, with the Python of an
environment that needs no Horovod.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch
import pictures

SCRIPTS = Path(__file__).resolve().parent
METHODS = {"none": "dense", "scalecom": "ScaleCom", "torchrun": "ScaleCom, torchrun"}
ACC9 = ("acc9", "accuracy over nine shifts, %", 100.0)
NOTE = """
{} ranks on this machine. The ratio is that of the whole model: tensors under 2048 elements are sent
whole, which is much of models this small and little of large ones. Ranks of one machine share its
memory: the time that less traffic saves shows on a network."""


@dataclass(frozen=True)
class Task:
    """One model to train.

    metric: its name in the metrics file. label: its name for readers. scale: from the one to the
        other.
    """

    key: str
    title: str
    script: str
    options: str
    steps: int
    metric: str
    label: str
    scale: float = 1.0
    methods: tuple[str, ...] = ("none", "scalecom")


RESNET = "--model resnet --lr 0.05"
TORCH_ALONE = Task("digits", "ResNet on digits", "train_image.py", RESNET, 600, *ACC9)
KERAS = Task(
    "keras", "Keras ResNet on digits", "train_keras.py", "--loop fit --lr 0.025", 600, *ACC9
)
LSTM = Task(
    "text",
    "LSTM on source code",
    *("train_char_lm.py", "--model lstm --lr 0.5", 1500),
    *("bits_per_character", "bits per held-out character"),
)
TASKS = (dataclasses.replace(TORCH_ALONE, methods=tuple(METHODS)), KERAS, LSTM)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train dense and with ScaleCom, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    folder = SCRIPTS.parents[1] / "demo"
    parser.add_argument("--output", type=Path, default=folder, help="folder for results")
    parser.add_argument("--ranks", type=int, default=2, help="workers")
    parser.add_argument("--length", type=float, default=1.0, help="train for a part of the steps")
    parser.add_argument("--torch-alone", action="store_true", help="one model, without Horovod")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tasks = (TORCH_ALONE,) if args.torch_alone else TASKS
    results = [run(task, method, args) for task in tasks for method in task.methods]
    print(f"\n{table(results, tasks)}\n{NOTE.format(args.ranks)}\n")
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, tasks, args.output / "curves.png", args.ranks)
    print(f"{args.output}: curves.png, results.json; {time.perf_counter() - began:.0f} s")


def run(task: Task, method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train once and return what the metrics file says.

    If training fails, this shows its output and exits with a non-zero status.
    """
    metrics = args.output.resolve() / f"{task.key}-{method}.jsonl"
    metrics.unlink(missing_ok=True)
    steps = max(10, round(task.steps * args.length))
    program = [str(SCRIPTS / task.script), *task.options.split()]
    program += ["--compression", "none" if method == "none" else "scalecom", "--no-progress"]
    program += ["--steps", str(steps), "--evaluate-every", str(max(1, steps // 15))]
    program += ["--metrics", str(metrics)]
    launcher = "torchrun" if args.torch_alone or method == "torchrun" else "horovodrun"
    command = launch.command(launcher, args.ranks, program)

    print(f"{task.title}, {METHODS[method]}: {steps} steps", flush=True)
    done = subprocess.run(
        command,
        env=launch.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        failed = f"this run failed with exit status {done.returncode}"
        sys.exit(f"\n{failed}: {' '.join(command)}")
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return result(task, method, steps, args.ranks, events)


def result(
    task: Task, method: str, steps: int, ranks: int, events: list[dict[str, Any]]
) -> dict[str, Any]:
    """One row of the table, with the curve.

    The curve has [step, metric, MB that a worker sent until then] for each evaluation.
    """
    summary = events[-1]
    sent, tests = summary["bytes_per_step"], [e for e in events if e["event"] == "test"]
    return {
        "task": task.key,
        "method": method,
        "steps": steps,
        "metric": task.metric,
        "value": summary[task.metric],
        "ms_per_step": summary["ms_per_step"],
        "mb_per_step": sent / 1e6,
        "ratio": 2 * (ranks - 1) / ranks * 4 * summary["parameters"] / sent,
        "parameters": summary["parameters"],
        "curve": [[e["step"], e[task.metric], e["step"] * sent / 1e6] for e in tests],
    }


def table(results: list[dict[str, Any]], tasks: Sequence[Task]) -> str:
    """The comparison as text."""
    by_key = {task.key: task for task in tasks}
    rows = [("task", "method", "result", "ms/step", "MB per worker and step", "ratio")]
    for row in results:
        task = by_key[row["task"]]
        value = row["value"] * task.scale
        shown = f"{value:.1f} % correct" if task.scale == 100 else f"{value:.3f} bits/char"
        numbers = f"{row['ms_per_step']:.1f}", f"{row['mb_per_step']:.4f}", f"{row['ratio']:.1f}x"
        name = f"{task.title}, {row['steps']} steps"
        rows.append((name, METHODS[row["method"]], shown, *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def plot(results: list[dict[str, Any]], tasks: Sequence[Task], path: Path, ranks: int) -> None:
    """Held-out metric over steps and over MB sent, one row for each task."""
    titles = [f"{task.title}, {ranks} workers" for task in tasks for _ in range(2)]
    figure, axes = pictures.panels(titles)
    marks = pictures.marks(METHODS.values())
    for i, task in enumerate(tasks):
        over_steps, over_bytes = axes[2 * i], axes[2 * i + 1]
        for row in (row for row in results if row["task"] == task.key):
            steps, values, sent = zip(*row["curve"], strict=True)
            values = [value * task.scale for value in values]
            method = METHODS[row["method"]]
            style = marks[method].curve(label=method)
            over_steps.plot(steps, values, **style)
            over_bytes.plot(sent, values, **style)
        over_steps.set(xlabel="step", ylabel=task.label)
        over_bytes.set(xlabel="MB that a worker sent until then", xlim=(0, None))
        over_steps.legend()
    pictures.save(figure, path)


if __name__ == "__main__":
    main()
