"""Does ScaleCom keep accuracy, when does it not, and how do other methods compare?

The study trains every method on several tasks, and writes the results as tables.

    python scripts/study/study.py                      everything: hours on two cores
    python scripts/study/study.py --quick              the same questions, smaller
    python scripts/study/study.py --task my_task.py    with a model of your own (see study_tasks.py)
    python scripts/study/study.py --only defaults      one experiment

Every finished run leaves a file in --output/runs, and a second call makes only the missing runs.
--output holds results.csv (a row per case), scores.csv (a row per run) and tables.md.
docs/results.md says what they mean. The n workers are simulated in one process, by the same
exchange that real ranks run. There is one process per core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where code_version.py is

import code_version
import study_cases
import study_results
import study_run
import study_tasks
import training
from study_cases import Case
from study_run import Run
from tqdm import tqdm

STANDARD_TASKS = ("resnet", "mobilenet", "lstm", "transformer")
LONG = 30_000  # in the units of Run.cost
EXPERIMENTS = ("defaults", "momentum", "rivals", "local", "synchronisations", "rungs")
# What must be trained before an experiment.
BEFORE = {"trials": "rivals"}


def main() -> None:
    args = argument_parser().parse_args()
    try:
        study(args)
    except training.WrongInput as error:
        sys.exit(f"study.py: {error}")


def study(args: argparse.Namespace) -> None:
    tasks = tuple(args.task or (("resnet", "lstm") if args.quick else STANDARD_TASKS))
    for task in tasks:
        study_tasks.find(task)
    cases = [
        case
        for case in study_cases.cases(tasks, args.seeds, args.quick)
        if not args.only or BEFORE.get(case.experiment, case.experiment) in args.only
    ]
    if not cases:
        raise training.WrongInput(
            f"there is nothing to ask about {', '.join(tasks)} in {', '.join(args.only)}: leave "
            "--only out"
        )
    folder = args.output / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    results = trained(cases, folder, args.processes)
    best = study_results.Study(cases, results).best("trials")
    cases += study_cases.rivals(best, args.seeds, args.quick)
    results = trained(cases, folder, args.processes)
    codes = {folder / f"{name}.json": result.get("code") for name, result in results.items()}
    code_version.tell_stale(codes, study_run.fingerprint())
    found = study_results.Study(cases, results)
    study_results.write_csv(found, args.output / "results.csv")
    study_results.write_scores(found, args.output / "scores.csv")
    study_results.write_tables(found, args.output / "tables.md")
    print((args.output / "tables.md").read_text())
    print(f"written to {args.output}: results.csv, scores.csv and tables.md")


def trained(cases: Sequence[Case], folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    """The results of all runs of these cases, by their names. Missing runs are made."""
    runs = {run.name: run for case in cases for run in case.runs}
    train_missing(runs.values(), folder, processes)
    return {name: load(run, folder) for name, run in runs.items()}


def train_missing(runs: Iterable[Run], folder: Path, processes: int) -> None:
    """Make the runs that have left no file yet, `processes` at a time.

    An error ends all. Finished runs are kept.
    """
    # Runs go in order. But runs come first if they would keep one core busy while the others have
    # nothing left to do.
    missing = sorted(
        (run for run in runs if load(run, folder) is None),
        key=lambda run: -run.cost if run.cost > LONG else 0,
    )
    if not missing:
        return
    began = time.monotonic()
    total = sum(run.cost for run in missing)
    with (
        concurrent.futures.ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), study_run.start_process
        ) as pool,
        tqdm(
            total=round(total),
            unit="",
            desc=f"{len(missing)} runs",
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        ) as bar,
    ):
        jobs = {pool.submit(study_run.train, run): run for run in missing}
        try:
            for number, job in enumerate(concurrent.futures.as_completed(jobs), start=1):
                run = jobs[job]
                result = json.dumps(job.result()) + "\n"
                training.write_whole(
                    folder / f"{run.name}.json",
                    lambda file, result=result: file.write(result.encode()),
                )
                bar.set_postfix_str(f" {number} done, last: {run.task} {run.method}")
                bar.update(round(run.cost))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(
        f"{len(missing)} runs in {(time.monotonic() - began) / 60:.1f} minutes on {processes} "
        "processes",
        file=sys.stderr,
    )


def load(run: Run, folder: Path) -> dict[str, Any] | None:
    path = folder / f"{run.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def argument_parser() -> argparse.ArgumentParser:
    def seeds(text: str) -> tuple[int, ...]:
        return tuple(int(seed) for seed in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, cores = parser.add_argument, os.cpu_count() or 1
    add("--output", type=Path, default=Path("study"), help="folder (default: %(default)s)")
    add("--quick", action="store_true", help="one seed, shorter runs")
    known = f"repeatable: {', '.join(study_tasks.TASKS)}, or a file"
    add("--task", action="append", help=f"{known} (default: {', '.join(STANDARD_TASKS)})")
    add("--only", action="append", choices=EXPERIMENTS, help="repeatable; default: all")
    where = "where methods are compared; elsewhere the first of them (default: 1,2,3,4,5)"
    add("--seeds", type=seeds, default=(1, 2, 3, 4, 5), help=where)
    add("--processes", type=int, default=cores, help="runs at a time (default: one per core)")
    return parser


if __name__ == "__main__":
    main()
