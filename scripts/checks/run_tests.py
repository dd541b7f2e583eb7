"""What `make test`, `make test-long` and `make test-nightly` run. CI runs the first two.

    python scripts/checks/run_tests.py                       ruff, mypy and the tests: 12 minutes
    python scripts/checks/run_tests.py --long                faults, hosts, elastic, late streams
    python scripts/checks/run_tests.py --nightly             all others: fuzz, study, more launchers
    python scripts/checks/run_tests.py --gpu                 those of a machine with a GPU
    python scripts/checks/run_tests.py "torch, mpirun"       parts that begin so
    python scripts/checks/run_tests.py single --test tests/single/test_pages.py

A part has a time limit. After that it is ended with all its ranks. If a part fails, its output is
shown, with the command that runs the failed test again. Parts that compute all the time run at the
same time, on separate cores. Then come the parts that start launchers and wait for them.

Tests marked `long` belong to --long or --nightly. Each of the other tests runs once with each face:
on 2 ranks (on 4 if it is about nodes), on Horovod under mpirun, and with torch.distributed under
torchrun.

With --long, tests of torch.distributed's face run again without Horovod, and on a device whose
streams run late (tests/delayed). With --nightly, PyTorch's tests run again on 4 ranks and under
Gloo. Of TensorFlow's only some run again, because tracing takes long.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import glob
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = "tests/parallel/test_"
EVERYDAY, LONG_ONES, ALL = "not long", "long", ""
CORES = sorted(os.sched_getaffinity(0))
# Without this, waiting ranks of Open MPI keep other processes from the cores.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
MINUTE = {"FUZZ_SECONDS": "60"}
LATE, CUDA = {"TESTS_DEVICE": "delayed"}, {"TESTS_DEVICE": "cuda"}


@dataclass(frozen=True)
class Part:
    """Some tests, or a tool of another kind if there are no tests.

    Attributes:
        words: what follows `python -m`.
        tests: pytest's files.
        marks: pytest's -m.
        limit: seconds.
        alone: whether it has all cores to itself.
    """

    words: Sequence[str]
    tests: Sequence[str] = ()
    marks: str = EVERYDAY
    limit: int = 1200
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    alone: bool = False

    def line(self, name: str) -> list[str]:
        """The command. A part's name says on how many ranks it runs, and who launches them."""
        program = ["-m", *self.words, *(["-m", self.marks, *self.tests] if self.tests else [])]
        ranks = re.search(r", (mpirun|torchrun|horovodrun --gloo) -np (\d)", name)
        if not ranks:
            return [sys.executable, *program]
        interpreter = launch.TORCH_ALONE if "torch alone" in name else Path(sys.executable)
        tagged = ranks[1] == "mpirun"
        return launch.command(ranks[1], int(ranks[2]), program, tagged, interpreter)


def pytest(folder: str, *options: str, **more: Any) -> Part:
    return Part(["pytest", "-q", "--color=no", *options], [f"tests/{folder}"], **more)


def on_ranks(tests: Sequence[str], *options: str, **more: Any) -> Part:
    """Tests of tests/parallel. A rank that waits for ever is ended, and tells where it waits."""
    waits = ["-x", "--timeout=100", "--timeout-method=thread"]
    return Part(["pytest", "-q", "--color=no", *waits, *options], tests, **more)


def named(names: str, of: str = "") -> list[str]:
    """Files of tests/parallel, by their names or patterns of them."""
    paths = [f"{PARALLEL}{of}{name}.py" for name in names.split()]
    return [file for path in paths for file in sorted(glob.glob(path, root_dir=ROOT)) or [path]]


def without(files: Sequence[str], others: Sequence[str]) -> list[str]:
    return [file for file in files if file not in others]


TORCH = named("join local_topk torch_*")  # join() comes first: see there
# Without what each rank computes by itself, and how pages describe it. No launcher changes that.
OF_MANY = without(TORCH, named("pages profile momentum", "torch_"))
PROGRAMS = named("torch_differential torch_local_differential")
TENSORFLOW = named("tensorflow_*")
TAPES = f"{PARALLEL}tensorflow_tape.py::test_"
# What Gloo and more than two ranks may change for TensorFlow.
UNLIKE = f"{TAPES}gradients_that_come_later_on_one_rank_alone"
SETS = f"{TAPES}process_sets_have_leaders_of_their_own"  # they need 4 ranks
# Two nodes of two ranks.
NODES = named("nodes sharded sharded_differential tensor_parallel", "ddp_")
NODES += named("nodes node_steps", "torch_")
OF_DEVICES, PAGES = named("ddp_devices"), named("ddp_pages")
# The tests of torch.distributed's face: its own, and those of both faces.
OWN = named("ddp_*")
DDP = without(OWN, NODES + OF_DEVICES)
DDP += named("amp orders parity state changed_gradients", "torch_")
DDP += named("thrown_away unlike_ranks", "torch_")
OF_METHODS = f"{PARALLEL}torch_methods.py::test_"
DDP += [f"{OF_METHODS}a_step_that_does_not_count_leaves_the_state"]
DDP += [
    f"{OF_METHODS}resuming_is_bit_identical[Momentum-{{}}-{x}]"
    for x in ("a new optimizer", "in mid-run")
]
DDP_LONG = named("diagnostics local_states local_steps methods parity", "torch_")
# What Gloo has added up before all ranks have come. It needs three ranks.
SUMS = [f"{PARALLEL}torch_unlike_ranks.py::test_one_rank_loads_its_residues_and_nothing_is_lost"]
# They run at the same time, the longest first: see tests/integration/conftest.py.
AT_ONCE = ("-n", str(min(4, len(CORES))), "--dist", "loadgroup", "--no-loadscope-reorder")
SLOW, PATIENT = "--timeout=200", "--timeout=300"

# The longest come first.
SHORT = {
    "ruff check": Part(["ruff", "check", "."], limit=60),
    "ruff format": Part(["ruff", "format", "--check", "."], limit=60),
    "mypy": Part(["mypy"], limit=300),
    "torch, mpirun -np 2": on_ranks(TORCH),
    "tensorflow, mpirun -np 2": on_ranks(TENSORFLOW),
    "single": pytest("single", SLOW),
    "ddp, torchrun -np 2": on_ranks(DDP),
    "ddp nodes, torchrun -np 4": on_ranks(NODES),
    "device, torchrun -np 2": on_ranks(OF_DEVICES, environment=LATE),
    "device, one process": pytest("delayed", SLOW),
    "integration": pytest("integration", *AT_ONCE, PATIENT, alone=True),
}
# Tests of tests/integration that kill ranks, or run on several hosts.
KILLING = (
    "hosts",
    "torch_elastic",
    "tensorflow_elastic",
    "faults",
    "soak",
    "doctor_ranks",
    "nodes",
)
HARMFUL = [f"tests/integration/test_{name}.py" for name in KILLING]
OTHERS = [f"--ignore={file}" for file in HARMFUL]
FUZZ = ("-k", "test_random_programs")
FEW_OF_TENSORFLOW = [*named("differential parity", "tensorflow_"), SETS, UNLIKE]
LONG = {
    # The pages' scripts say where they run.
    "device, torchrun -np 2, the rest": on_ranks(
        without(DDP, PAGES), SLOW, environment=LATE, limit=2400
    ),
    "ddp, torch alone, torchrun -np 2": on_ranks(DDP_LONG, marks=ALL),
    "programs, mpirun -np 3": on_ranks(PROGRAMS, *FUZZ, environment=MINUTE),
    "ddp, torchrun -np 3": on_ranks(SUMS),
    "device, one process, the rest": pytest("delayed", SLOW, marks=LONG_ONES),
    "long integration": Part(
        ["pytest", "-q", "--color=no", *AT_ONCE, "--timeout=1000"],
        HARMFUL,
        LONG_ONES,
        limit=2400,
        alone=True,
    ),
}
NIGHTLY = {
    "torch, mpirun -np 4": on_ranks(OF_MANY, marks=ALL),
    "torch, horovodrun --gloo -np 2": on_ranks(OF_MANY, marks=ALL),
    "ddp, torch alone, torchrun -np 4": on_ranks(
        without(OWN, OF_DEVICES) + named("nodes thrown_away", "torch_"),
        marks=ALL,
        environment=MINUTE,
    ),
    # Plain FSDP2 frees what other streams read, so there it is no oracle for random programs.
    "device nodes, torchrun -np 4": on_ranks(
        without(NODES, named("sharded_differential", "ddp_")), SLOW, environment=LATE
    ),
    # No launcher changes plain operations.
    "tensorflow, mpirun -np 4": on_ranks(
        FEW_OF_TENSORFLOW, "-k", "not plain_operations", marks=ALL
    ),
    "tensorflow, horovodrun --gloo -np 2": on_ranks(
        [*named("differential state", "tensorflow_"), UNLIKE], marks=ALL
    ),
    "tensorflow, mpirun -np 2, the rest": on_ranks(TENSORFLOW, marks=LONG_ONES),
    "programs, horovodrun --gloo -np 4": on_ranks(PROGRAMS, *FUZZ, environment=MINUTE),
    "long tests of one process": pytest("single", PATIENT, marks=LONG_ONES),
    "other long integration": pytest(
        "integration", *OTHERS, *AT_ONCE, "--timeout=1000", marks=LONG_ONES, limit=2400, alone=True
    ),
}
ON_GLOO = [*OF_DEVICES, *without(DDP, PAGES), *named("torch_methods")]
ON_NCCL = named("ddp_devices ddp_hook ddp_optimizer ddp_momentum torch_amp")
# NCCL's ranks that share a GPU take turns on it, which needs patience. FSDP2 is not tested over
# Gloo, because it ends the process there (PyTorch 2.11).
GPU = {
    "GPU, doctor": Part(["scalecom_hvd", "doctor", "--gpu"], alone=True),
    "GPU, kernel": pytest("single/test_triton.py", marks=ALL),
    "GPU, Gloo, torchrun -np 2": on_ranks(ON_GLOO, environment=CUDA | {"TESTS_BACKEND": "gloo"}),
    "GPU, NCCL, torchrun -np 2": on_ranks(ON_NCCL, PATIENT, environment=CUDA),
    "GPU, NCCL, nodes, torchrun -np 4": on_ranks(NODES, PATIENT, environment=CUDA),
}
PARTS = SHORT | LONG | NIGHTLY | GPU
running: set[subprocess.Popen] = set()


def run(name: str, part: Part) -> tuple[bool, int]:
    """Run a part on this thread's cores, and say how it went. Nothing that it starts is left.

    Return whether it succeeded, and how many tests passed.
    """
    begun, line = time.time(), part.line(name)
    with tempfile.TemporaryDirectory() as folder:
        diary, log = Path(folder, "diary"), Path(folder, "log")
        # torchrun sets the number of threads too, but with a warning.
        more = {"OMP_NUM_THREADS": "1"} if "torchrun" in name else {}
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=launch.environment(TEST_DIARY=str(diary), **YIELD, **more, **part.environment),
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process)
        verdict = f"FAILED: not done after {part.limit} s"
        try:
            code = process.wait(part.limit)
            verdict = f"FAILED: exit code {code}" if code else "ok"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(3)
        end(process)
        running.discard(process)
        output, failed = log.read_text(errors="replace"), failed_tests(diary)
    # Ranks run the same tests, so the smallest count is the number of tests that passed on all.
    passed = min(map(int, re.findall(r"(\d+) passed", output)), default=int(verdict == "ok"))
    count = f"{passed} tests" if part.tests else ""
    print(f"{name:42s} {verdict:8s} {count:12s} {time.time() - begun:5.0f} s", flush=True)
    if verdict != "ok":
        again = f".venv/bin/python scripts/checks/run_tests.py {shlex.quote(name)} --test"
        print(
            f"--- output of: {' '.join(line)}\n{without_frames_of_launchers(output)}",
            f"--- end of the output of {name}",
            *(f"--- run it again: {again} {shlex.quote(test)}" for test in failed),
            sep="\n",
            flush=True,
        )
    return verdict == "ok", passed


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed_tests(diary: Path) -> list[str]:
    """The ids of the failed tests. If none failed, of those that some rank began and none ended.

    diary: what tests/conftest.py wrote, if it did. Ranks that hang are killed before pytest can
        report, and what they do report is cut and mixed.
    """
    lines = diary.read_text().splitlines() if diary.exists() else []
    found = [line.partition(" ")[::2] for line in lines]
    failed = [test for word, test in found if word == "failed"]
    under_way = collections.Counter(test for word, test in found if word == "began")
    under_way.subtract(test for word, test in found if word == "ended")
    return list(dict.fromkeys(failed)) or [test for test, ranks in under_way.items() if ranks > 0]


def without_frames_of_launchers(output: str) -> str:
    """An output without pytest's own stack frames, and without torchrun's report of a failed rank.

    CI keeps the end of an output. If a rank has waited for too long, this end must say where.
    """
    of_torchrun = r"Traceback .*\n(?: {2}.*\n)+torch\.\S+\.ChildFailedError: *\n=+\n(?:.*\n)*?=+\n"
    frame_of_pytest = r".*File \"[^\"]*/(?:_pytest|pluggy|xdist)/.*\n(?: {4}.*\n)?"
    return re.sub(f"{of_torchrun}|{frame_of_pytest}", "", output)


def run_all(parts: dict[str, Part], shares: list[list[int]]) -> list[tuple[bool, int]]:
    """Run parts at the same time, one on each share of the cores. Return what `run` does."""
    # What a thread starts has the cores of the thread.
    threads = futures.ThreadPoolExecutor(
        len(shares), initializer=lambda: os.sched_setaffinity(0, shares.pop())
    )
    try:
        return list(threads.map(run, parts, parts.values()))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            end(process)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "; ".join(PARTS)
    parser.add_argument("parts", nargs="*", help=f"beginnings of some of: {names}; default: all")
    parser.add_argument("--long", action="store_true", help="the tests that take long")
    parser.add_argument("--nightly", action="store_true", help="all other tests")
    parser.add_argument("--gpu", action="store_true", help="what a machine with a GPU can show")
    parser.add_argument("--test", action="append", help="of the part: this file, or test, alone")
    arguments = parser.parse_args()
    of = arguments
    among = LONG if of.long else NIGHTLY if of.nightly else GPU if of.gpu else SHORT
    if arguments.parts:
        among = {n: part for n, part in PARTS.items() if n.startswith(tuple(arguments.parts))}
    if arguments.test:  # of a part whose whole name is given, or else of all that begin so
        among = {n: part for n, part in among.items() if n in arguments.parts} or among
        changes = {"tests": arguments.test, "marks": ALL}
        among = {n: dataclasses.replace(part, **changes) for n, part in among.items() if part.tests}
    if not among:
        parser.error(f"no part begins so; there are: {names}")

    started = time.time()
    # A part takes little longer on one core than on two: between two cores its ranks would wake
    # each other all the time. The parts that need all cores come last.
    shares = [CORES[first::4] for first in range(min(len(CORES), 4))]
    ends: dict[str, tuple[bool, int]] = {}
    for alone, cores in ((False, shares), (True, [CORES])):
        parts = {name: part for name, part in among.items() if part.alone == alone}
        ends |= zip(parts, run_all(parts, cores), strict=True)
    failed = [name for name, (succeeded, _) in ends.items() if not succeeded]
    took = f"all of it took {time.time() - started:.0f} s"
    print(f"{took}{'; failed: ' + ', '.join(failed) if failed else ''}")
    print(f"{sum(passed for _, passed in ends.values())} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
