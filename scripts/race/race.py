"""`make race`: how soon training over a slow network is done, with ScaleCom and in other ways.

    python scripts/race/race.py                        all ways; finished runs are not repeated
    python scripts/race/race.py --ways "ScaleCom" "DDP, dense" --seeds 1
    python scripts/race/race.py --task resnet --steps 300
    python scripts/race/race.py --quick                a small model: minutes

Losses over steps come from real runs under torchrun (race_worker.py): a language model of 5 million
parameters, trained by AdamW, or with --task resnet a ResNet as large, trained by SGD. The learning
rate of each way is the best of three or more, found with seed 0 on half the steps. The time of a
step is measured on hosts with a network between them (bench_worker.py), where its compute is a
pause. Together they give losses over time, from the first step to the last.

A way's score at a speed is the time that it takes to reach the loss with which dense training ends,
to 0.01. If a way ends above that loss, runs with a quarter and with half more steps are tried.
--output gets the runs, the steps' times, steps.csv and curves.csv. Needs root, for the hosts.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is
sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import bench
import code_version
import hosts
import launch
import race_tasks
from race_ways import DENSE, LOCAL_STEPS, OURS, WAYS, Way

SCRIPTS = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("race_worker.py")
FACTORS = (0.5, 1.0, 2.0)
TUNING = 0.5  # of the steps
SPEEDS = (100, 1000, 10_000)  # Mbit/s
# By how much a loss may be above dense training's and still count as the same.
NEAR = 0.01
Run = dict[str, Any]
Rungs = dict[int, int]
Steps = dict[tuple[str, float], bench.Result]
"""{(bench_worker.py's name of a step, Mbit/s): what it measured}."""
Curve = list[tuple[float, float]]
"""(seconds, loss): after each evaluation."""


class Race:
    """The runs of one number of workers, and the times of their steps.

    Args:
        folder: where runs and times are kept.
        name: of the task, in race_tasks.TASKS.
        workers: ranks, each on a host of its own.
        steps: of dense training.
        tiny: whether the model is a small one.
    """

    def __init__(self, folder: Path, name: str, workers: int, steps: int, tiny: bool) -> None:
        self.folder, self.name, self.workers = folder, name, workers
        self.steps, self.tiny = steps, tiny
        self.task = race_tasks.task(name, "tiny" if tiny else "full", folder)
        names = ("tasks", "language", "images", "ways", "worker")
        own = [SCRIPTS / "race" / f"race_{name}.py" for name in names]
        own += [SCRIPTS / "bench" / f"{n}.py" for n in ("bench_cases", "bench_worker", "hosts")]
        self.code = code_version.of(own)
        # The code that made each result in use.
        self.codes: dict[Path, str | None] = {}

    def run(
        self, way: str, seed: int, factor: float, share: float = 1.0, rungs: Rungs | None = None
    ) -> Run:
        """A run; it is done now unless it was done before. share: of the steps."""
        steps, lr = round(self.steps * share), self.task.lr * factor
        name = f"{way} of {steps} steps, {self.workers} workers, seed {seed}, lr {lr:g}"
        # A digest of what else determines a run.
        options = {} if rungs is None else {"rungs": rungs}
        others = (self.task.size, WAYS[way].trains_as, *options.values())
        kind = hashlib.sha256(repr(others).encode()).hexdigest()[:8]
        file = self.folder / "runs" / f"{name.replace(', ', ' ').replace(' ', '-')}-{kind}.json"
        if not file.exists():
            print(name, file=sys.stderr, flush=True)
            program: list[str] = [str(WORKER), "--way", way, "--steps", str(steps)]
            program += ["--seed", str(seed), "--lr", str(lr), "--output", str(file)]
            every = max(1, min(LOCAL_STEPS, steps // 10))
            program += ["--pieces", str(self.folder), "--every", str(every)]
            program += ["--size", "tiny"] * self.tiny + ["--code", self.code, "--task", self.name]
            program += ["--options", repr(options)]
            command = launch.command("torchrun", self.workers, program)
            environment = launch.environment(OMP_NUM_THREADS="1", PYTHONPATH=str(SCRIPTS.parent))
            if subprocess.run(command, env=environment).returncode:
                sys.exit(f"{name} failed: a second call goes on from there")
        run = json.loads(file.read_text())
        self.codes[file] = run.get("code")
        return run

    def factor(self, way: str, tunes: bool, rungs: Rungs | None) -> float:
        """The best of the learning rate's factors; more are tried while the best is at an end."""
        own = WAYS[way].rate
        if not tunes:
            return own
        ends: dict[float, float] = {}
        tried = [factor * own for factor in FACTORS]
        while tried:
            ends |= {each: final(self.run(way, 0, each, TUNING, rungs)) for each in tried}
            best = min(ends, key=lambda factor: ends[factor])
            lowest, highest = min(ends), max(ends)
            tried = [best / 2] * (best == lowest) + [best * 2] * (best == highest)
        return best

    def step_times(self, ways: Sequence[str]) -> Steps:
        """What was measured of these ways' steps, in one job.

        ways: dense training is among them.
        """
        timed = [name for way in ways for name in WAYS[way].timed]
        wanted = [*dict.fromkeys([bench.ALONE, *timed])]
        file = self.folder / f"steps-{self.workers}.json"
        found = json.loads(file.read_text()) if file.exists() else {"results": []}
        if not {result["method"] for result in found["results"]}.issuperset(wanted):
            seconds = 0.5 if self.tiny else 2.0
            job = bench.Job(self.task.case, self.workers, SPEEDS, tuple(wanted), seconds)
            results = bench.run_all([job], self.folder / "jobs", timeout=3600)
            found = {"code": self.code, "results": results}
            file.write_text(json.dumps(found, indent=1))
            bench.forget(self.folder / "jobs")
        self.codes[file] = found["code"]
        return {(r["method"], r["mbit"]): r for r in found["results"]}


def final(run: Run) -> float:
    """The loss at a run's end; infinite if the run diverged."""
    loss = list(run["losses"].values())[-1]
    return loss if math.isfinite(loss) else math.inf


def mean_end(runs: Sequence[Run]) -> float:
    """The mean of `final` over several seeds."""
    return statistics.mean(map(final, runs))


def curve(way: Way, runs: Sequence[Run], timed: Steps, mbit: float) -> Curve:
    """The mean loss of these runs over time."""
    step = timed[way.timed_as, mbit]["step_ms"]
    if way.microbatches > 1:
        step += (way.microbatches - 1) * timed["forward and backward", mbit]["step_ms"]
    steps = [int(n) for n in runs[0]["losses"]]
    first = timed[way.timed_as, mbit].get("search_ms", [])
    if way.begins:
        first = [timed["DDP dense, one bucket", mbit]["step_ms"]] * round(way.begins * steps[-1])
    found = []
    for n in steps:
        milliseconds = sum(first[:n]) + max(0, n - len(first)) * step
        losses = [run["losses"][str(n)] for run in runs]
        found.append((milliseconds / 1e3, statistics.mean(losses)))
    return found


def time_to(loss: float, points: Curve) -> float | None:
    """Seconds until a curve reaches a loss, interpolated linearly; None: it never does."""
    for (before, above), (after, below) in zip(points, points[1:], strict=False):
        if below <= loss:
            share = (above - loss) / (above - below) if above > below else 1.0
            return before + min(max(share, 0.0), 1.0) * (after - before)
    return None


def table(curves: Mapping[tuple[str, float], Curve], ways: Sequence[str]) -> Iterator[str]:
    """For each speed, how long each way takes to reach dense training's last loss."""
    for mbit in SPEEDS:
        dense = curves[DENSE, mbit]
        loss = dense[-1][1] + NEAR
        dense_reached = time_to(loss, dense) or dense[-1][0]
        yield ""
        yield f"{bench.speed(mbit)}: seconds to the loss with which dense training ends, {loss:.3f}"
        yield ""
        yield "| way | seconds | times as soon | whole run, s | last loss |"
        yield "|---|---|---|---|---|"
        for way in ways:
            points = curves[way, mbit]
            reached = time_to(loss, points)
            cells = (
                ("never", "")
                if reached is None
                else (f"{reached:.1f}", f"{dense_reached / reached:.1f}")
            )
            seconds, last = points[-1]
            yield f"| {way} | {cells[0]} | {cells[1]} | {seconds:.1f} | {last:.3f} |"


def write_csv(curves: Mapping[tuple[str, float], Curve], path: Path) -> None:
    """A row for each way, speed and evaluation."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["way", "mbit", "seconds", "loss"])
        for (way, mbit), points in curves.items():
            rows.writerows([way, mbit, f"{s:.2f}", f"{loss:.4f}"] for s, loss in points)


def write_steps(timed: Steps, hosts: int, path: Path) -> None:
    """A row for each step that was timed, as docs/race_steps.csv has them."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["method", "hosts", "mbit", "step_ms"])
        for (method, mbit), r in timed.items():
            rows.writerow([method, hosts, f"{mbit:g}", f"{r['step_ms']:.1f}"])


def main() -> None:
    args = argument_parser().parse_args()
    kind = "" if args.task == race_tasks.TASKS[0] else args.task
    folder = args.output or Path("race", kind, "quick" if args.quick else "")
    if os.geteuid():
        sys.exit("make race: hosts need root")
    hosts.install()
    folder.mkdir(parents=True, exist_ok=True)
    ways = list(dict.fromkeys([DENSE, OURS, *args.ways]))
    race = Race(folder, args.task, args.workers, args.steps, args.quick)
    try:
        # Do this first: if it fails, it fails soon. Time all ways, so that all are of one job.
        timed = race.step_times(ways if args.quick else list(WAYS))
    except (PermissionError, FileNotFoundError, RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(f"make race: {error}")
    runs: dict[tuple[str, float], list[Run]] = {}
    for way, mbit in itertools.product(ways, SPEEDS):
        found = timed[WAYS[way].timed_as, mbit].get("rungs", {})
        rungs = {int(step): rung for step, rung in found.items()} or None
        factor = race.factor(way, not args.untuned, rungs)
        for length in WAYS[way].lengths:
            own = [race.run(way, s, factor, length, rungs) for s in range(1, args.seeds + 1)]
            runs.setdefault((way, mbit), own)
            # This is as near as another seed might be.
            if mean_end(own) <= mean_end(runs[DENSE, mbit]) + NEAR:
                runs[way, mbit] = own
                break
    curves = {(way, mbit): curve(WAYS[way], own, timed, mbit) for (way, mbit), own in runs.items()}
    write_steps(timed, args.workers, folder / "steps.csv")
    write_csv(curves, folder / "curves.csv")
    told = {run["parameters"] for own in runs.values() for run in own}
    print(
        f"{args.workers} workers, {args.steps} steps, {args.seeds} seeds, {max(told):,} parameters"
    )
    print("\n".join(table(curves, ways)))
    code_version.tell_stale(race.codes, race.code)
    print(f"\nwritten to {folder}: steps.csv, curves.csv")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=race_tasks.TASKS, default=race_tasks.TASKS[0])
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=1000, help="dense; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--untuned", action="store_true", help="one learning rate for all")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--output", type=Path, help="default: race, or race/quick")
    return parser


if __name__ == "__main__":
    main()
