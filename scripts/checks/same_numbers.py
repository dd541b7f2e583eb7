"""Shows that a change of the code changed no number.

It runs some hundred small training runs, by public names only: every method and setting with
simulated ranks, and every face for PyTorch with real ones. For each run it takes digests, to the
bit, of parameters and residues on every rank, of everything else that is saved, and of the bytes
sent.

    python scripts/checks/same_numbers.py --output numbers.json    of this checkout
    python scripts/checks/same_numbers.py --against ../old         of both, and what differs
    python scripts/checks/same_numbers.py --against numbers.json   of this, and what differs now
    python scripts/checks/same_numbers.py --against ../old --only GTopK

`--against` ends with exit code 1 if a case differs. Cases are always those of this checkout. All of
them give every setting with a default that may change. A case that fails is shown, and also makes
the exit code 1, because it compares nothing. Each checkout needs its own native kernel, built from
its own sources (`python setup.py build_ext --inplace`).

A run of one checkout takes two and a half minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch
from same_numbers_digests import Parts, of_text, together

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHARES = 3  # processes for simulated ranks
LAUNCHES = [("mpirun", 4), ("torchrun", 4), ("mpirun", 2), ("torchrun", 2)]
LIMIT = 280  # seconds of each process
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # Without this, waiting ranks of Open MPI keep other processes from the cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # What Horovod fuses depends on time, and the order of a sum depends on what is fused.
    "HOROVOD_FUSION_THRESHOLD": "0",
    "HOROVOD_CYCLE_TIME": "1",
}

Numbers = dict[str, Parts]
"""{case: its result}."""


def environment(checkout: Path) -> dict[str, str]:
    """Variables that make Python import this checkout's package.

    They contain no settings of that package.
    """
    variables = launch.environment(PYTHONPATH=str(checkout), **SETTINGS)
    return {name: v for name, v in variables.items() if not name.startswith("SCALECOM_")}


def run(command: Sequence[str], checkout: Path) -> str:
    """Run a command with the package of a checkout.

    Returns:
        What went wrong, with the end of its output; empty if nothing did.
    """
    line = shlex.join(command)
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env=environment(checkout),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        # mpirun ends its ranks if it is asked to, but not if it is killed.
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"{checkout}, not done after {LIMIT} s: {line}\n{output[-3000:]}"
    if process.returncode:
        return f"{checkout}, exit code {process.returncode}: {line}\n{output[-3000:]}"
    return ""


def single(checkout: Path, folder: Path, share: int, pattern: str) -> tuple[Numbers, str]:
    """One share of the cases of simulated ranks, and what went wrong."""
    file = folder / f"single.{share}"
    program = HERE / "same_numbers_single.py"
    command = [sys.executable, program, file, share, SHARES, pattern]
    complaint = run([str(word) for word in command], checkout)
    return read(file), complaint


def on_ranks(
    checkout: Path, folder: Path, launcher: str, ranks: int, pattern: str
) -> tuple[Numbers, str]:
    """The cases of one launch, and what went wrong."""
    own = folder / f"{launcher}.{ranks}"
    own.mkdir()
    program = [str(HERE / "same_numbers_ranks.py"), str(own), pattern]
    complaint = run(launch.command(launcher, ranks, program), checkout)
    everyone = [read(own / f"rank.{rank}") for rank in range(ranks)]
    # A case is missing if not all ranks ended it. The launch has failed then.
    ended = [name for name in everyone[0] if all(name in one for one in everyone)]
    return {name: together([one[name] for one in everyone]) for name in ended}, complaint


def read(file: Path) -> Numbers:
    """What a process wrote: a line for each case that it ended."""
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


def numbers_of(checkout: Path, pattern: str) -> tuple[Numbers, list[str]]:
    """The results of all cases with the package of a checkout, and what went wrong."""
    if not any((checkout / "scalecom_hvd").rglob("*.so")):
        return {}, [f"{checkout} has no native kernel: run `python setup.py build_ext --inplace`"]
    numbers: Numbers = {}
    folder = Path(tempfile.mkdtemp(prefix="same_numbers."))
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            waiting = [
                pool.submit(on_ranks, checkout, folder, launcher, ranks, pattern)
                for launcher, ranks in LAUNCHES
            ]
            waiting += [
                pool.submit(single, checkout, folder, share, pattern) for share in range(SHARES)
            ]
            ended = [one.result() for one in waiting]
    finally:
        shutil.rmtree(folder)
    for own, _ in ended:
        numbers |= own
    return dict(sorted(numbers.items())), [complaint for _, complaint in ended if complaint]


def numbers_against(other: Path, pattern: str) -> tuple[Numbers, list[str]]:
    """The same for another checkout, or for a file that `--output` wrote."""
    if other.is_dir():
        return numbers_of(other, pattern)
    saved = json.loads(other.read_text())
    return {name: parts for name, parts in saved.items() if pattern in name}, []


def line_of(name: str, parts: Parts) -> str:
    """A case in one line: its digest or its error, and its name."""
    return f"{parts.get('failed') or of_text(json.dumps(parts, sort_keys=True))}  {name}"


def differences(ours: Numbers, theirs: Numbers) -> list[str]:
    """A line for each case that is not the same in both, saying what differs."""
    lines = []
    for name in sorted(ours.keys() | theirs.keys()):
        own, other = ours.get(name, {}), theirs.get(name, {})
        parts = [p for p in (own | other) if own.get(p) != other.get(p)]
        if not own or not other:
            lines.append(f"{name}: only in {'this' if own else 'the other'} checkout")
        elif "failed" in parts:
            lines.append(f"{name}: it {ending(own)} here, and {ending(other)} there")
        elif parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def ending(parts: Mapping[str, str]) -> str:
    """How a case ended, in words."""
    return f"failed ({parts['failed']})" if "failed" in parts else "ended well"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the digests of this checkout")
    parser.add_argument("--against", type=Path, help="another checkout, or what --output wrote")
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    arguments = parser.parse_args()

    ours, complaints = numbers_of(ROOT, arguments.only)
    if arguments.output:
        arguments.output.write_text(json.dumps(ours, indent=1) + "\n")
    failed = [line_of(name, parts) for name, parts in ours.items() if "failed" in parts]
    different: list[str] = []
    if arguments.against:
        theirs, more = numbers_against(arguments.against.resolve(), arguments.only)
        complaints += more
        different = differences(ours, theirs)
        for line in different:
            print(f"differs: {line}")
    elif not arguments.output:
        print("\n".join(line_of(*one) for one in ours.items()))
    for line in [*failed, *complaints]:
        print(f"failed: {line}")
    compared = f", {len(different)} of them differ" if arguments.against else ""
    print(f"{len(ours)} cases{compared}, {len(failed)} failed")
    return 1 if different or failed or complaints or not ours else 0


if __name__ == "__main__":
    sys.exit(main())
