"""`make demo`: train three models with Horovod, dense and with ScaleCom, and compare.

The models are a ResNet on handwritten digits, in PyTorch and in Keras, and an LSTM on source code.
The demo starts train_image.py, train_keras.py and train_char_lm.py by `horovodrun -np 2` over MPI,
and the first by torchrun too. It shows their progress, prints a table, and writes demo/results.json
and demo/curves.png. It needs no download. Run it with the Python of the environment that holds
Horovod.

`make demo-torch` is --torch-alone: it trains the ResNet only, by torchrun, with the Python of an
environment that needs no Horovod.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch
import pictures

SCRIPTS = Path(__file__).resolve().parent
METHODS = {"none": "dense", "scalecom": "ScaleCom", "torchrun": "ScaleCom, torchrun"}


@dataclass(frozen=True)
class Task:
    """One model to train.

    metric: its name in the metrics file. label: its name on the axis. unit, scale: how its values
        are shown.
    """

    key: str
    title: str
    script: str
    options: tuple[str, ...]
    steps: int
    metric: str
    label: str
    unit: str
    scale: float = 1.0
    methods: tuple[str, ...] = ("none", "scalecom")


TASKS = (
    Task(
        "digits",
        "ResNet on digits",
        "train_image.py",
        ("--dataset", "digits", "--model", "resnet", "--lr", "0.05"),
        600,
        "acc9",
        "accuracy over nine shifts, %",
        "%",
        100.0,
        tuple(METHODS),
    ),
    Task(
        "keras",
        "Keras ResNet on digits",
        "train_keras.py",
        ("--loop", "fit", "--lr", "0.025"),
        600,
        "acc9",
        "accuracy over nine shifts, %",
        "%",
        100.0,
    ),
    Task(
        "text",
        "LSTM on source code",
        "train_char_lm.py",
        ("--model", "lstm", "--lr", "0.5"),
        1500,
        "bits_per_character",
        "bits per held-out character",
        "bits",
    ),
)
TORCH_ALONE = dataclasses.replace(TASKS[0], methods=("none", "scalecom"))


def main() -> None:
    args = argument_parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tasks = (TORCH_ALONE,) if args.torch_alone else TASKS
    results = [run(task, method, args) for task in tasks for method in task.methods]
    print("\n" + table(results, args.ranks) + "\n")
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, tasks, args.output / "curves.png", args.ranks)
    print(
        f"curves: {args.output / 'curves.png'}   numbers: {args.output / 'results.json'}   time: "
        f"{time.perf_counter() - began:.0f} s"
    )


# --------------------------------------------------------------------------------------------------
# training


def run(task: Task, method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train once and return what the metrics file says.

    If training fails, this shows its output and exits with a non-zero status.
    """
    metrics = args.output / f"{task.key}-{method}.jsonl"
    metrics.unlink(missing_ok=True)
    steps = max(10, round(task.steps * args.length))
    program = [
        *(str(SCRIPTS / task.script), *task.options),
        *("--compression", "none" if method == "none" else "scalecom"),
        *(
            "--steps",
            str(steps),
            "--evaluate-every",
            str(max(1, steps // 15)),
            "--metrics",
            str(metrics.resolve()),
            "--no-progress",
        ),
    ]
    launcher = "torchrun" if args.torch_alone or method == "torchrun" else "horovodrun"
    command = launch.command(launcher, args.ranks, program)

    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=launch.environment()
        )
        try:
            follow(process, metrics, f"{task.title}, {METHODS[method]}", steps)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            sys.exit(
                f"\nthis run failed with exit status {process.returncode}: {' '.join(command)}"
            )
    return result(task, method, steps, args.ranks, read_events(metrics))


def follow(process: subprocess.Popen, metrics: Path, title: str, steps: int) -> None:
    """Show a progress bar, fed by the metrics file, until the run ends."""
    with tqdm(
        total=steps,
        desc=f"{title:>36}",
        unit="step",
        bar_format="{desc} {percentage:3.0f}%|{bar:30}| {elapsed}{postfix}",
    ) as bar:
        while True:
            ended = process.poll() is not None
            trained = [event for event in read_events(metrics) if event["event"] == "train"]
            if trained:
                bar.set_postfix_str(f"loss {trained[-1]['loss']:.3f}", refresh=False)
                bar.n = trained[-1]["step"]
            bar.refresh()
            if ended:
                return
            time.sleep(0.5)


def read_events(metrics: Path) -> list[dict[str, Any]]:
    """The file's complete lines."""
    if not metrics.exists():
        return []
    return [
        json.loads(line)
        for line in metrics.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def result(
    task: Task, method: str, steps: int, ranks: int, events: list[dict[str, Any]]
) -> dict[str, Any]:
    """One row of the table, with the curve.

    The curve has [step, metric, MB that a worker sent until then] for each evaluation.
    """
    summary = events[-1]
    dense_bytes = 2 * (ranks - 1) / ranks * 4 * summary["parameters"]

    def sent(step: int) -> float:
        return step * summary["bytes_per_step"] / 1e6

    return {
        "task": task.key,
        "method": method,
        "steps": steps,
        "metric": task.metric,
        "value": summary[task.metric],
        "ms_per_step": summary["ms_per_step"],
        "mb_per_step": summary["bytes_per_step"] / 1e6,
        "ratio": dense_bytes / summary["bytes_per_step"],
        "parameters": summary["parameters"],
        "curve": [
            [event["step"], event[task.metric], sent(event["step"])]
            for event in events
            if event["event"] == "test"
        ],
    }


# --------------------------------------------------------------------------------------------------
# reporting


def table(results: list[dict[str, Any]], ranks: int) -> str:
    """The comparison as text."""
    tasks = {task.key: task for task in TASKS}
    rows = [("task", "method", "result", "ms/step", "MB per worker and step", "ratio")]
    for row in results:
        task = tasks[row["task"]]
        value = row["value"] * task.scale
        shown = f"{value:.1f} % correct" if task.unit == "%" else f"{value:.3f} bits/char"
        name = f"{task.title}, {row['steps']} steps"
        rows.append(
            (
                name,
                METHODS[row["method"]],
                shown,
                f"{row['ms_per_step']:.1f}",
                f"{row['mb_per_step']:.4f}",
                f"{row['ratio']:.1f}x",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = [
        [
            cell.ljust(w) if i < 3 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    lines = [
        "  ".join(cells) for cells in [aligned[0], ["-" * width for width in widths], *aligned[1:]]
    ]
    lines += [
        "",
        f"{ranks} ranks on this machine. The ratio is that of the whole model: tensors under 2048 "
        "elements are sent whole, which is",
        "much of models this small and little of large ones. Ranks of one machine share its "
        "memory: the time that less traffic",
        "saves shows on a network.",
    ]
    return "\n".join(lines)


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


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train dense and with ScaleCom, and compare.")
    parser.add_argument(
        "--output",
        type=Path,
        default=SCRIPTS.parents[1] / "demo",
        help="folder for results (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--length",
        type=float,
        default=1.0,
        help="train for this fraction of the steps (default: %(default)s)",
    )
    parser.add_argument(
        "--torch-alone", action="store_true", help="one model, by torchrun, without Horovod"
    )
    return parser


if __name__ == "__main__":
    main()
