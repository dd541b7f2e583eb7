"""The self-test: two ranks on this machine with each launcher that is installed.

The ranks' programs are torch_rank.py and tensorflow_rank.py.
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
    launchers = ("mpirun", "horovodrun")
    on_torch = [_on_horovod(facts, "torch", launcher, "horovod") for launcher in launchers]
    on_tensorflow = [_on_horovod(facts, "tensorflow", launcher) for launcher in launchers]
    # Half of TensorFlow's test is its start, so one launcher is enough.
    once = next((test for test in on_tensorflow if not test.left_out), on_tensorflow[0])
    torchrun = "PyTorch on torch.distributed, torchrun"
    return [*on_torch, Test(torchrun, _torchrun(), _why_not(facts, "torch")), once]


def gpu_tests(facts: Facts) -> list[Test]:
    """The tests of `doctor --gpu`: steps to the bit, and training with each transport."""
    none = _why_not(facts, "torch") or "PyTorch sees no GPU" * (not facts.says("torch", "gpus"))
    steps = [sys.executable, "-m", "scalecom_hvd.doctor.gpu_steps"]
    gloo, nccl = (_torchrun("cuda", f"cpu:gloo,cuda:{backend}") for backend in ("gloo", "nccl"))
    horovod = _on_horovod(facts, "torch", "mpirun", "horovod", "cuda")
    return [
        Test("GPU: steps of simulated ranks", steps, none, ranks=1),
        Test("GPU: torchrun, gloo", gloo, none),
        Test("GPU: torchrun, nccl", nccl, none),
        Test(f"GPU: {horovod.name}", horovod.command, none or horovod.left_out),
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
    ok = outcome.code == 0 and len(passed) == test.ranks
    says = passed[0].partition(PASSED)[2] if ok else _words_of(outcome)
    return Result(test.name, ok, seconds, says, command)


def _words_of(outcome: children.Outcome) -> str:
    """The first error in the output, and its last lines, which may be the launcher's own."""
    written = [line for line in outcome.output.splitlines() if line.strip()]
    earlier, last = written[:-SHOWN], written[-SHOWN:]
    errors = (i for i, line in enumerate(earlier) if ERROR.search(line))
    cause = next(([*earlier[i : i + 3], "..."] for i in errors), [])
    why = [] if outcome.why in map(str.strip, last[-1:]) else [outcome.why]
    return "\n".join([*cause, *last, *why])


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
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {RANKS}".split()
    return [sys.executable, *torchrun, "-m", "scalecom_hvd.doctor.torch_rank", "hook", *device]


def _on_horovod(facts: Facts, framework: str, launcher: str, *face: str) -> Test:
    """The test of a framework on Horovod whose ranks mpirun or horovodrun starts."""
    name, more = launcher, ["--oversubscribe", "--bind-to", "none"]
    if launcher == "horovodrun":
        name, more = "horovodrun --gloo", ["--gloo", "-H", f"localhost:{RANKS}"]
    start = [facts.programs.get(launcher, launcher), "-np", str(RANKS), *more]
    rank = [sys.executable, "-m", f"scalecom_hvd.doctor.{framework}_rank", *face]
    name = f"{FRAMEWORKS[framework]} on Horovod, {name}"
    return Test(name, [*start, *rank], _why_not(facts, framework, launcher))


def _why_not(facts: Facts, framework: str, launcher: str = "") -> str:
    """Why a framework cannot train on Horovod (no launcher: under torchrun); empty: it can."""
    parts = [framework, f"horovod.{framework}"] if launcher else [framework]
    for name in parts[-1].split(".")[::-1]:
        if not facts.installed.get(name):
            return f"{FRAMEWORKS.get(name, 'Horovod')} is not installed"
    for part in parts:
        if not facts.works(part):
            return f"{part} cannot be imported"
    if not launcher:
        return "" if facts.says("torch", "gloo") else "PyTorch was built without Gloo"
    transport = {"mpirun": "MPI", "horovodrun": "Gloo"}[launcher]
    if not facts.horovod_parts.get(transport.lower()):
        return f"Horovod was built without {transport}"
    return "" if launcher in facts.programs else f"there is no {launcher}"
