"""The self-test: two ranks on this machine with each launcher that is installed.

The ranks' programs are torch_rank.py and tensorflow_rank.py. Imports children, facts and
rank_check.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from scalecom_hvd.doctor import children
from scalecom_hvd.doctor.facts import FRAMEWORKS, Facts
from scalecom_hvd.doctor.rank_check import PASSED, RANKS

# A line that names an error: Python's, or C++'s when it ends the process.
ERROR = re.compile(r"(Error|Exception)\b.*: |terminate called|what\(\):|not enough slots")
# How many lines of a failed test's output are shown.
SHOWN = 12


class Test(NamedTuple):
    """A test, and how to start its ranks."""

    name: str
    command: list[str]
    left_out: str = ""  # why the test is not run; empty if it is run
    ranks: int = RANKS  # how many must say that they passed


class Result(NamedTuple):
    """The result of a test, with the command that runs it again."""

    name: str
    ok: bool | None  # None: it was left out
    seconds: float
    says: str  # what the ranks say, or why it was left out, or the last lines of its output
    command: str


def tests(facts: Facts) -> list[Test]:
    """All tests. A test of something that is missing or cannot work says why it is left out."""
    mpi, gloo = _why_not_horovod(facts, "mpirun"), _why_not_horovod(facts, "horovodrun")
    torch, tensorflow = (_why_not(facts, part, f"horovod.{part}") for part in FRAMEWORKS)
    # Half of TensorFlow's test is its start, so one launcher is enough.
    start = "horovodrun --gloo" if mpi else "mpirun"
    on_tensorflow = [*_by(start.split()[0], facts), *_rank("tensorflow")]
    on_torch = [*_rank("torch"), "horovod"]
    by_mpi, by_gloo = _by("mpirun", facts), _by("horovodrun", facts)
    return [
        Test("PyTorch on Horovod, mpirun", by_mpi + on_torch, torch or mpi),
        Test("PyTorch on Horovod, horovodrun --gloo", by_gloo + on_torch, torch or gloo),
        Test("PyTorch on torch.distributed, torchrun", _torchrun(), _why_not_torchrun(facts)),
        Test(f"TensorFlow on Horovod, {start}", on_tensorflow, tensorflow or (mpi and gloo)),
    ]


def gpu_tests(facts: Facts) -> list[Test]:
    """The tests of `doctor --gpu`: steps to the bit, and training with each transport."""
    none = _why_not_torchrun(facts)
    if not facts.says("torch", "gpus"):
        none = none or "PyTorch sees no GPU"
    horovod = _why_not(facts, "torch", "horovod.torch") or _why_not_horovod(facts, "mpirun")
    steps = [sys.executable, "-m", "scalecom_hvd.doctor.gpu_steps"]
    gloo, nccl = (_torchrun("cuda", f"cpu:gloo,cuda:{backend}") for backend in ("gloo", "nccl"))
    on_horovod = [*_by("mpirun", facts), *_rank("torch"), "horovod", "cuda"]
    return [
        Test("GPU: steps of simulated ranks", steps, none, ranks=1),
        Test("GPU: torchrun, gloo", gloo, none),
        Test("GPU: torchrun, nccl", nccl, none),
        Test("GPU: PyTorch on Horovod, mpirun", on_horovod, none or horovod),
    ]


def run(test: Test, limit: float) -> Result:
    """Run a test, unless it is left out. limit: in seconds."""
    command = shlex.join(test.command)
    if test.left_out:
        return Result(test.name, None, 0.0, test.left_out, command)
    start = time.monotonic()
    outcome = children.run(test.command, limit)
    seconds = time.monotonic() - start
    passed = [line for line in outcome.output.splitlines() if PASSED in line]
    if outcome.code == 0 and len(passed) == test.ranks:
        return Result(test.name, True, seconds, passed[0].partition(PASSED)[2], command)
    return Result(test.name, False, seconds, "\n".join(_words_of(outcome)), command)


def _words_of(outcome: children.Outcome) -> list[str]:
    """The first error in the output, and its last lines, which may be the launcher's own."""
    written = [line for line in outcome.output.splitlines() if line.strip()]
    earlier, last = written[:-SHOWN], written[-SHOWN:]
    errors = (i for i, line in enumerate(earlier) if ERROR.search(line))
    cause = next(([*earlier[i : i + 3], "..."] for i in errors), [])
    return [*cause, *last, *([] if outcome.why in map(str.strip, last[-1:]) else [outcome.why])]


def lines(result: Result) -> Iterator[str]:
    """A result as lines of text."""
    if result.ok is None:
        yield f"  -      {result.name:40s} left out: {result.says}"
    elif result.ok:
        yield f"  ok     {result.name:40s} {result.seconds:4.1f} s, {result.says}"
    else:
        yield f"  FAILS  {result.name:40s} {result.seconds:4.1f} s"
        yield from (f"           {line}" for line in result.says.splitlines())


def _torchrun(*device: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [sys.executable, *torchrun, str(RANKS), *_rank("torch")[1:], "hook", *device]


def _rank(framework: str) -> list[str]:
    return [sys.executable, "-m", f"scalecom_hvd.doctor.{framework}_rank"]


def _by(launcher: str, facts: Facts) -> list[str]:
    ranks = ["--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]
    if launcher == "horovodrun":
        ranks = ["--gloo", "-np", str(RANKS), "-H", f"localhost:{RANKS}"]
    return [facts.programs.get(launcher, launcher), *ranks]


def _why_not(facts: Facts, *parts: str) -> str:
    """Why parts of probe.py cannot be used; empty: they can."""
    for name in parts[-1].split(".")[::-1]:
        if not facts.installed.get(name):
            return f"{FRAMEWORKS.get(name, 'Horovod')} is not installed"
    return next((f"{part} cannot be imported" for part in parts if not facts.works(part)), "")


def _why_not_horovod(facts: Facts, launcher: str) -> str:
    part = {"mpirun": "MPI", "horovodrun": "Gloo"}[launcher]
    if not facts.horovod_parts.get(part.lower()):
        return f"Horovod was built without {part}"
    return "" if launcher in facts.programs else f"there is no {launcher}"


def _why_not_torchrun(facts: Facts) -> str:
    built = facts.says("torch", "gloo")
    return _why_not(facts, "torch") or ("" if built else "PyTorch was built without Gloo")
