"""The self-test: two ranks on this machine with each launcher that is installed.

The ranks' programs are torch_rank.py and tensorflow_rank.py. Imports children, facts, findings and
rank_check.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from scalecom_hvd.doctor import children
from scalecom_hvd.doctor.facts import Facts
from scalecom_hvd.doctor.findings import NAMES
from scalecom_hvd.doctor.rank_check import PASSED, RANKS

# A line that names an error: Python's, or C++'s when it ends the process.
ERROR = re.compile(r"(Error|Exception)\b.*: |terminate called|what\(\):|not enough slots")
# How many lines of a failed test's output are shown.
SHOWN = 12


@dataclass(frozen=True)
class Test:
    """A test, and how to start its ranks.

    Attributes:
        name: what is tested.
        command: the command that tests it.
        left_out: why the test is not run; empty if it is run.
        ranks: how many ranks must say that they passed.
    """

    name: str
    command: list[str]
    left_out: str = ""
    ranks: int = RANKS


@dataclass(frozen=True)
class Result:
    """The result of a test.

    Attributes:
        name: of the test.
        ok: whether it passed; None: it was left out.
        seconds: how long it took.
        says: what the ranks say, or why it was left out, or the last lines of its output.
        command: the command that runs it again.
    """

    name: str
    ok: bool | None
    seconds: float
    says: str
    command: str


def tests(facts: Facts) -> list[Test]:
    """All tests. A test of something that is missing or cannot work says why it is left out."""
    mpi = _why_not_mpirun(facts)
    gloo = _why_not_horovodrun(facts)
    mpirun, horovodrun = _mpirun(facts), _horovodrun(facts)
    torch, tensorflow = (
        _why_not_on_horovod(facts, "torch"),
        _why_not_on_horovod(facts, "tensorflow"),
    )
    horovod = [*_rank("torch"), "horovod"]
    # Half of TensorFlow's test is its start, so one launcher is enough.
    starts, why = (mpirun, "") if not mpi else (horovodrun, gloo)
    launcher = "mpirun" if not mpi else "horovodrun --gloo"
    torchrun = [*_torchrun(), "hook"]
    return [
        Test("PyTorch on Horovod, mpirun", [*mpirun, *horovod], torch or mpi),
        Test("PyTorch on Horovod, horovodrun --gloo", [*horovodrun, *horovod], torch or gloo),
        Test("PyTorch on torch.distributed, torchrun", torchrun, _why_not_torchrun(facts)),
        Test(
            f"TensorFlow on Horovod, {launcher}",
            [*starts, *_rank("tensorflow")],
            tensorflow or why,
        ),
    ]


def gpu_tests(facts: Facts) -> list[Test]:
    """The tests of `doctor --gpu`, for what a CPU cannot show."""
    gpus = facts.said.get("torch", {}).get("gpus", [])
    none = _why_not_torchrun(facts) or ("" if gpus else "PyTorch sees no GPU")
    horovod = none or _why_not_on_horovod(facts, "torch") or _why_not_mpirun(facts)
    steps = [sys.executable, "-m", "scalecom_hvd.doctor.gpu_steps"]
    tests = [Test("GPU: steps of simulated ranks", steps, none, ranks=1)]
    faces = ("hook", "optimizer", "amp")
    for backend, own in (("gloo", faces), ("nccl", (*faces, "overlap"))):
        for face in own:
            command = [*_torchrun(), face, "cuda", f"cpu:gloo,cuda:{backend}"]
            tests.append(Test(f"GPU: {face}, torchrun, {backend}", command, none))
    command = [*_mpirun(facts), *_rank("torch"), "horovod", "cuda"]
    return [*tests, Test("GPU: PyTorch on Horovod, mpirun", command, horovod)]


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
    earlier = written[:-SHOWN]
    first = next((i for i, line in enumerate(earlier) if ERROR.search(line)), len(earlier))
    cause = earlier[first : first + 3]
    ending = [] if outcome.why == outcome.last_line else [outcome.why]
    return [*cause, *["..."] * bool(cause), *written[-SHOWN:], *ending]


def lines(result: Result) -> Iterator[str]:
    """A result as lines of text."""
    if result.ok is None:
        yield f"  -      {result.name:40s} left out: {result.says}"
    elif result.ok:
        yield f"  ok     {result.name:40s} {result.seconds:4.1f} s, {result.says}"
    else:
        yield f"  FAILS  {result.name:40s} {result.seconds:4.1f} s"
        yield from (f"           {line}" for line in result.says.splitlines())


def _torchrun() -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(RANKS), *_rank("torch")[1:]]


def _rank(framework: str) -> list[str]:
    return [sys.executable, "-m", f"scalecom_hvd.doctor.{framework}_rank"]


def _mpirun(facts: Facts) -> list[str]:
    path = facts.programs["mpirun"].path if "mpirun" in facts.programs else "mpirun"
    return [path, "--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]


def _horovodrun(facts: Facts) -> list[str]:
    path = facts.programs["horovodrun"].path if "horovodrun" in facts.programs else "horovodrun"
    return [path, "--gloo", "-np", str(RANKS), "-H", f"localhost:{RANKS}"]


def _why_not_on_horovod(facts: Facts, framework: str) -> str:
    if not facts.installed.get(framework):
        return f"{NAMES[framework]} is not installed"
    if facts.horovod is None:
        return "Horovod is not installed"
    for part in (framework, f"horovod.{framework}"):
        if not facts.works(part):
            return f"{part} cannot be imported"
    return ""


def _why_not_mpirun(facts: Facts) -> str:
    if not facts.horovod_parts.get("mpi"):
        return "Horovod was built without MPI"
    return "" if "mpirun" in facts.programs else "there is no mpirun"


def _why_not_horovodrun(facts: Facts) -> str:
    if not facts.horovod_parts.get("gloo"):
        return "Horovod was built without Gloo"
    return "" if "horovodrun" in facts.programs else "there is no horovodrun"


def _why_not_torchrun(facts: Facts) -> str:
    if not facts.installed.get("torch"):
        return "PyTorch is not installed"
    if not facts.works("torch"):
        return "torch cannot be imported"
    return "" if facts.said["torch"].get("gloo") else "PyTorch was built without Gloo"
