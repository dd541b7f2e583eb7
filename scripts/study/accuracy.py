"""The accuracy table of docs/results.md: ScaleCom, dense training and controls, on 4 ranks.

    python scripts/study/accuracy.py               everything: three seeds; minutes on two cores
    python scripts/study/accuracy.py --quick       one seed and shorter runs, a few minutes
    python scripts/study/accuracy.py --only group --seeds 1,2

Every finished run leaves a JSON file in --output, and a second call makes only the missing runs. A
run is one start of a training script (train_image.py, train_char_lm.py, train_keras.py).
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

RANKS = 4
# What all runs of an experiment share.
DIGITS = ("--lr", "0.0025", "--batch-size", "32", "--steps", "600")
# Here beta = 1 fails: the learning rate is large, batches are small, and there is no batch
# normalisation, which would hide the failure.
GROUP = (
    *("--norm", "group", "--lr", "0.15", "--no-scale-lr", "--lr-schedule", "constant"),
    *("--batch-size", "16", "--weight-decay", "0", "--steps", "300"),
)
TEXT = ("--lr", "0.5", "--clip-norm", "inf", "--batch-size", "16", "--steps", "500")
KERAS = ("--loop", "fit", "--lr", "0.01", "--batch-size", "32", "--steps", "600")
# Not much shorter: with few sends per element (steps / rate), nothing can be compared.
QUICK_STEPS = {"digits": 400, "group": 300, "lstm": 300, "keras": 400}
SCALECOM = ("--compression", "scalecom")
PAPER = (*SCALECOM, "--rate", "100", "--bits", "32")
DENSE = ("--compression", "none")
WITHOUT_RESIDUES = "--without-residues"


@dataclass(frozen=True)
class Way:
    """How a run trains. forget: whether residues are zeroed after each step."""

    options: tuple[str, ...]
    forget: bool = False
    launcher: str = "mpirun"


@dataclass(frozen=True)
class Experiment:
    """Runs to compare. methods: {the name in the table: how it trains}. dense comes first."""

    title: str
    script: str
    options: tuple[str, ...]
    metric: str
    methods: dict[str, Way]


BOTH = {"dense": Way(DENSE), "ScaleCom": Way(SCALECOM)}
WITH_PAPERS = BOTH | {"ScaleCom, 32 bits, 100x": Way(PAPER)}
RESNET = "digits, ResNet"
FORGETTING = WITH_PAPERS | {"residues thrown away": Way(SCALECOM, forget=True)}
TORCHRUN = WITH_PAPERS | {"ScaleCom, torchrun": Way(SCALECOM, launcher="torchrun")}
LSTM = ("source code, LSTM", "train_char_lm", TEXT, "bits_per_character", TORCHRUN)
EXPERIMENTS = {
    "digits": Experiment(f"{RESNET}, batch norm", "train_image", DIGITS, "acc9", FORGETTING),
    "group": Experiment(
        f"{RESNET}, group norm, large learning rate", "train_image", GROUP, "acc9", WITH_PAPERS
    ),
    "lstm": Experiment(*LSTM),
    "keras": Experiment(f"{RESNET} in Keras, batch norm", "train_keras", KERAS, "acc9", BOTH),
}


@dataclass(frozen=True)
class Run:
    """One training run. name: the name of its JSON file."""

    name: str
    experiment: Experiment
    method: str
    options: tuple[str, ...]

    @property
    def way(self) -> Way:
        return self.experiment.methods[self.method]


def main() -> None:
    args = argument_parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = planned_runs(args)
    missing = [run for run in runs if finished(run, args.output) is None]
    for number, run in enumerate(missing, start=1):
        print(f"[{number}/{len(missing)}] {run.name}; results in {args.output}", flush=True)
        train(run, args.output)
    print(table(runs, args.output))


def planned_runs(args: argparse.Namespace) -> list[Run]:
    runs = []
    for key in args.only or EXPERIMENTS:
        experiment = EXPERIMENTS[key]
        shorter = ("--steps", str(QUICK_STEPS[key])) if args.quick else ()
        for seed in args.seeds[:1] if args.quick else args.seeds:
            more = (*shorter, "--seed", str(seed), "--evaluate-every", "1000000")
            for method, way in experiment.methods.items():
                label = "".join(c if c.isalnum() or c == "." else "-" for c in method)
                name = f"{key}-{'quick-' if args.quick else ''}{label}-seed{seed}"
                runs.append(
                    Run(name, experiment, method, (*experiment.options, *way.options, *more))
                )
    return runs


def finished(run: Run, folder: Path) -> dict[str, Any] | None:
    """The stored result, if it exists and was made with the same options."""
    path = folder / f"{run.name}.json"
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return stored["result"] if stored["options"] == list(run.options) else None


def train(run: Run, folder: Path) -> None:
    """Make a run. The ranks' progress bar and errors go directly to the terminal."""
    script = Path(__file__).resolve().parents[1] / "examples" / f"{run.experiment.script}.py"
    metrics = folder / f"{run.name}.jsonl"
    metrics.unlink(missing_ok=True)
    program = [*[__file__, WITHOUT_RESIDUES] * run.way.forget, str(script), *run.options]
    command = launch.command(run.way.launcher, RANKS, [*program, "--metrics", str(metrics)])
    returncode = subprocess.run(command, env=launch.environment()).returncode
    if returncode != 0:
        failed = f"a run failed with exit status {returncode}"
        sys.exit(f"{failed}; finished runs are kept, and a second call goes on from there")
    result = json.loads(metrics.read_text().splitlines()[-1])
    found = json.dumps({"options": run.options, "result": result}, indent=1)
    (folder / f"{run.name}.json").write_text(f"{found}\n")


def train_without_residues(script: str) -> None:
    """As a control, lose what a step does not send, like a compressor without residues."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def forget(optimizer: Any, *_: Any) -> None:
        if hasattr(optimizer, "compression"):
            for tensor in optimizer.compression.residues.tensors.values():
                tensor.residue.zero_()

    register_optimizer_step_post_hook(forget)
    del sys.argv[:2]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def table(runs: list[Run], folder: Path) -> str:
    """Means and deviations over seeds, in Markdown; per cent, or bits."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        results.setdefault((run.experiment.title, run.method), []).append(finished(run, folder))
    metrics = {run.experiment.title: run.experiment.metric for run in runs}
    lines = [
        "| experiment | steps | seeds | method | result | against dense | MB per worker and step |",
        "|---|---|---|---|---|---|---|",
    ]
    dense: dict[str, float] = {}
    for (title, method), own in results.items():
        metric = metrics[title]
        scale, digits, unit = (
            (100, 1, "% acc9") if metric == "acc9" else (1, 3, "bits per character")
        )
        values = [scale * result[metric] for result in own]
        mean = statistics.mean(values)
        baseline = dense.setdefault(title, mean)
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        difference = "" if method == "dense" else f"{mean - baseline:+.{digits}f}"
        megabytes = f"{own[0]['bytes_per_step'] / 1e6:.3f}"
        shown = f"{mean:.{digits}f}{spread} {unit}"
        cells = (title, own[0]["step"], len(own), method, shown, difference, megabytes)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    nine = "acc9: accuracy over the nine one-pixel shifts of the 360 test images"
    return "\n".join([*lines, "", f"{nine}; ±: standard deviation over seeds."])


def argument_parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("build/accuracy"), help="default: %(default)s")
    add("--quick", action="store_true", help="one seed and shorter runs")
    add("--seeds", type=numbers, default=[1, 2, 3], help="default: 1,2,3")
    only = "repeatable; default: all"
    add("--only", action="append", choices=sorted(EXPERIMENTS), help=only)
    return parser


if __name__ == "__main__":
    if WITHOUT_RESIDUES in sys.argv[1:2]:
        train_without_residues(sys.argv[2])
    else:
        main()
