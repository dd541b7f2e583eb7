"""`make bench`: how long a step takes over slow and fast networks, dense and compressed.

It measures every way of compressing, and writes a table, JSON and CSV. The workers run
on hosts of their own (hosts.py): real libraries talk over a real network of the speed asked for.
Horovod's methods run under horovodrun, those of DistributedDataParallel under torchrun. Methods are
compared with the dense steps of their own job; ratios are of medians. Needs root, for the hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where code_version.py is

import code_version
import hosts
from bench_worker import ALONE, DDP, LOCAL, METHODS, RUNGS, UNDER_TORCHRUN

SCRIPTS = Path(__file__).resolve().parent
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One start of the workers: a case on so many hosts, with these methods at these speeds."""

    case: str
    n_hosts: int
    mbit: tuple[float, ...]
    methods: tuple[str, ...]
    seconds: float

    @property
    def launcher(self) -> str:
        return "torchrun" if {*self.methods} <= {*UNDER_TORCHRUN} else "horovodrun --gloo"

    @property
    def runs(self) -> int:
        return len(self.mbit) * len(self.methods)

    def run(self, output: Path, timeout: float) -> None:
        program = [SCRIPTS / "bench_worker.py", "--case", self.case, "--output", output]
        program += ["--seconds", self.seconds, "--mbit", *self.mbit, "--methods", *self.methods]
        with hosts.Hosts(self.n_hosts) as cluster:
            done = cluster.run(
                self.launcher,
                program,
                timeout=timeout,
                environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "e0"},
                stdout=subprocess.PIPE,
            )
        if done.returncode != 0:
            raise RuntimeError(
                f"the workers failed on {self.n_hosts} hosts:\n{done.stdout[-3000:]}"
            )


# The seconds are those of a round of 16 steps at the slower speed.
LOCAL_STEPS = Job("transformer", 2, (100, 1000), (ALONE, "dense", *LOCAL), 4.0)
HOROVOD = (ALONE, "dense", "ScaleCom cyclic", "ScaleCom look-ahead")
# DistributedDataParallel with PyTorch's hooks and ours, and Horovod next to it.
SPEEDS = (100, 1000, 10_000, 0)
DDP_JOBS = [
    Job("transformer", n_hosts, SPEEDS, methods, 2.0)
    for n_hosts in (2, 4)
    for methods in ((ALONE, *DDP), HOROVOD)
]
# Every rung of the ladder, and the one that rate="auto" takes.
RUNG_JOBS = [
    Job("transformer", n_hosts, SPEEDS, (ALONE, "DDP dense", *RUNGS), 3.0) for n_hosts in (2, 4)
]
SOME = {"local-steps": [LOCAL_STEPS], "ddp": DDP_JOBS, "rungs": RUNG_JOBS}


def jobs(quick: bool) -> Iterator[Job]:
    """What is measured. quick: the smallest part that exercises everything."""
    if quick:
        few = ("dense", "local top-k", "ScaleCom look-ahead", "ScaleCom, H = 4")
        yield Job("transformer", 2, (1000,), (ALONE, *few), 1.0)
        under_ddp = ("DDP dense", "DDP PowerSGD, rank 4", "DDP ScaleCom look-ahead")
        yield Job("transformer", 2, (1000,), (ALONE, *under_ddp), 1.0)
        return
    yield Job("transformer", 2, SPEEDS, tuple(METHODS), 3.0)
    yield Job("transformer", 4, SPEEDS, tuple(m for m in METHODS if m != "fp16"), 2.0)
    # Bytes and latency with more workers than this machine has cores for.
    many = ("dense", "local top-k", "ScaleCom staggered", "ScaleCom look-ahead")
    yield Job("transformer", 8, (1000,), (ALONE, *many), 2.0)
    yield LOCAL_STEPS
    yield from DDP_JOBS


def run_all(todo: list[Job], folder: Path, timeout: float) -> list[Result]:
    """The results of all jobs, in the order in which they were measured.

    folder: keeps what each job measured, so that a run that was stopped goes on with the next job.
        Each file's name tells by which code, and on which machine. Once the results have been
        written, call `forget`.
    """
    results: list[Result] = []
    folder.mkdir(parents=True, exist_ok=True)
    code = code_version.of(sorted(SCRIPTS.glob("*.py")))
    for number, job in enumerate(todo, start=1):
        digest = hashlib.sha256(f"{job} {code} {machine()}".encode()).hexdigest()[:16]
        output = folder / f"{digest}.jsonl"
        if not output.exists() or output.read_text().count("\n") < job.runs:
            output.unlink(missing_ok=True)
            what = f"{job.case}, {job.n_hosts} hosts: {len(job.methods)} methods"
            print(f"[{number}/{len(todo)}] {what}", file=sys.stderr, flush=True)
            job.run(output, timeout)
        own = [json.loads(line) for line in output.read_text().splitlines()]
        results += with_ratios([r | {"launcher": job.launcher} for r in own])
    return results


def forget(folder: Path) -> None:
    """Remove what run_all kept in its folder."""
    for kept in folder.glob("*.jsonl"):
        kept.unlink()
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def with_ratios(results: list[Result]) -> list[Result]:
    """A job's results, compared with each other: with exposed time, and ratios to dense."""
    found = {(r["case"], r["hosts"], r["mbit"], r["method"]): r for r in results}
    for result in results:
        beside = (result["case"], result["hosts"], result["mbit"])
        alone = found[*beside, ALONE]
        dense = found.get((*beside, "dense")) or found[*beside, "DDP dense"]
        result["compute_ms"] = alone["step_ms"]
        result["exposed_ms"] = result["step_ms"] - alone["step_ms"]
        result["exchange_cpu_ms"] = result["cpu_ms"] - alone["cpu_ms"]
        result["speedup"] = dense["step_ms"] / result["step_ms"]
    return results


def speed(mbit: float) -> str:
    return (
        "unshaped" if not mbit else f"{mbit:g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:g} Gbit/s"
    )


def table(results: list[Result]) -> str:
    """One block per case, number of hosts, speed and launcher."""

    def block_of(r: Result) -> tuple[Any, ...]:
        return r["case"], r["hosts"], r["mbit"] or math.inf, r["launcher"]

    lines, block = [], None
    for r in sorted(results, key=block_of):
        if block != (block := block_of(r)):
            lines += [
                "",
                f"{r['case']}, {r['hosts']} hosts, {speed(r['mbit'])}, {r['launcher']}: a step "
                f"without communication takes {r['compute_ms']:.0f} ms",
            ]
            lines += [
                f"  {'method':38s} {'step ms':>8s} {'exposed ms':>10s} {'MB sent':>8s} "
                f"{'CPU ms':>7s} {'longest ms':>10s} {'vs dense':>9s}"
            ]
        if r["method"] != ALONE:
            numbers = (
                f"{r['step_ms']:8.0f} {r['exposed_ms']:10.1f} {r['bytes'] / 1e6:8.2f} "
                f"{r['exchange_cpu_ms']:7.0f} {r['longest_ms']:10.0f}"
            )
            settled_on = f"  {r['stage']}" if "stage" in r else ""
            lines += [f"  {r['method']:38s} {numbers} {r['speedup']:8.1f}x{settled_on}"]
    return "\n".join(lines[1:])


def once(results: list[Result]) -> list[Result]:
    """Results without "no communication". If several jobs measured the same, the first counts."""
    found: dict[tuple[Any, ...], Result] = {}
    for r in results:
        if r["method"] != ALONE:
            found.setdefault((r["case"], r["hosts"], r["mbit"], r["method"]), r)
    return list(found.values())


def write_csv(results: list[Result], path: Path) -> None:
    """The Transformer's steps; docs/bench.csv is such a file."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["method", "hosts", "mbit", "step_ms", "exposed_ms", "megabytes"])
        for r in once(results):
            if r["case"] == "transformer":
                mbit = f"{r['mbit']:g}" if r["mbit"] else ""
                times = f"{r['step_ms']:.0f}", f"{r['exposed_ms']:.0f}"
                rows.writerow([r["method"], r["hosts"], mbit, *times, f"{r['bytes'] / 1e6:.4g}"])


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {"cores": os.cpu_count(), "processor": model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one job of a minute")
    for name, some in SOME.items():
        only = "only these jobs; see docs/speed.md"
        add(f"--{name}", dest="some", action="append_const", const=some, help=only)
    folder = "folder for results.json and steps.csv (default: %(default)s)"
    add("--output", type=Path, default=Path("bench"), help=folder)
    add("--timeout", type=float, default=900, help="seconds for one job (default: %(default)s)")
    arguments = parser.parse_args()
    if os.geteuid() == 0:
        hosts.install()
    todo = itertools.chain(*arguments.some or [jobs(arguments.quick)])
    try:
        results = run_all([*todo], arguments.output / "jobs", arguments.timeout)
    except (PermissionError, FileNotFoundError, RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(f"make bench: {error}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "results.json").write_text(
        json.dumps({"machine": machine(), "results": results}, indent=1)
    )
    forget(arguments.output / "jobs")
    write_csv(results, arguments.output / "steps.csv")
    print(table(results))
    print(f"\nwritten to {arguments.output}: results.json, steps.csv")


if __name__ == "__main__":
    main()
