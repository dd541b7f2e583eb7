"""What `make test` and `make test-long` run. CI runs both, one after the other.

    python scripts/checks/run_tests.py                       ruff, mypy and the tests: ten minutes
    python scripts/checks/run_tests.py --long                the others: faults, hosts, fuzz, study
    python scripts/checks/run_tests.py --gpu                 those of a machine with a GPU
    python scripts/checks/run_tests.py "torch, mpirun"       parts that begin so
    python scripts/checks/run_tests.py single --test tests/single/test_pages.py

A part has a time limit. After that it is ended with all its ranks. If a part fails, its output is
shown, with the command that runs the failed test again. Parts that compute all the time run at the
same time, on separate cores. Then come the parts that start launchers and wait for them.

Tests marked `long` belong to --long. Each of the other tests runs once with each face: on 2 ranks
(on 4 if it is about nodes), on Horovod under mpirun, and with torch.distributed under torchrun.

With --long, PyTorch's tests on Horovod run again on 4 ranks and under Gloo. Those of
torch.distributed's face run again without Horovod, and on a device whose streams run late
(tests/delayed). Of TensorFlow's only some run again, because tracing takes long.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch
from diary import failed_tests

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ["-m", "pytest", "-q", "--color=no"]
# Tests run at the same time, the longest first: see tests/integration/conftest.py.
SHARED = [
    "-n",
    str(min(4, len(os.sched_getaffinity(0)))),
    "--dist",
    "loadgroup",
    "--no-loadscope-reorder",
]
# Without this, waiting ranks of Open MPI keep other processes from the cores.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# torchrun sets this too, with a warning.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LATE = ONE_THREAD | {"TESTS_DEVICE": "delayed"}


@dataclass(frozen=True)
class Part:
    """A command of --long, or of the other tests.

    Attributes:
        command: what is run. pytest's command takes files, or tests, at its end.
        limit: seconds.
        environment: variables that it also needs.
        alone: whether it has all cores to itself.
    """

    command: tuple[str, ...]
    limit: int = 1200
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alone: bool = False

    def of(self, tests: list[str]) -> Part:
        """The same part with only these tests."""
        options = (word for word in self.command if not word.startswith("tests/"))
        options = ("" if word in ("long", "not long") else word for word in options)
        return dataclasses.replace(self, command=(*options, *tests))


def of_pytest(*files: str, options: Sequence[str], wanted: str = "not long") -> list[str]:
    """Arguments of Python that run these files or folders. `wanted` chooses by marks."""
    return [*PYTEST, "-m", wanted, *options, *(f"tests/{file}" for file in files)]


def on_ranks(
    launcher: str,
    ranks: int,
    files: list[str],
    *options: str,
    interpreter: Path = Path(sys.executable),
    **more: Any,
) -> Part:
    """Tests of tests/parallel, on every rank.

    A rank that waits for ever is ended, with a traceback of where it waits.
    """
    options = ("-x", "--timeout=100", "--timeout-method=thread", *options)
    program = of_pytest(*files, options=options)
    tagged = launcher == "mpirun"
    return Part(tuple(launch.command(launcher, ranks, program, tagged, interpreter)), **more)


def parallel(pattern: str) -> list[str]:
    """Files of tests/parallel, by the part of their names between test_ and .py."""
    found = sorted((ROOT / "tests" / "parallel").glob(f"test_{pattern}.py"))
    return [f"parallel/{file.name}" for file in found]


def named(*names: str) -> list[str]:
    """Files of tests/parallel, by exact names."""
    return [f"parallel/test_{name}.py" for name in names]


TORCH = [*named("join", "local_topk"), *parallel("torch_*")]  # join() comes first: see there
# What each rank computes by itself, and how pages describe it. No launcher changes that.
OF_ONE_RANK = named("torch_pages", "torch_profile", "torch_simulator", "torch_momentum")
OF_MANY = [file for file in TORCH if file not in OF_ONE_RANK]
PROGRAMS = named("torch_differential", "torch_local_differential")
TAPES = "parallel/test_tensorflow_tape.py::test_"
# What Gloo and more than two ranks may change for TensorFlow.
UNLIKE = [
    f"{TAPES}{name}"
    for name in ("gradients_that_come_later_on_one_rank_alone", "float16_values_keep_what_is_tiny")
]
SETS = f"{TAPES}process_sets_have_leaders_of_their_own"  # they need 4 ranks
GLOO = "horovodrun --gloo"
# The tests of torch.distributed's face: its own, and those of both faces.
# Two nodes of two ranks.
NODES = named("ddp_nodes", "ddp_sharded", "ddp_sharded_differential", "ddp_tensor_parallel")
OF_DEVICES, PAGES = named("ddp_devices"), named("ddp_pages")
DDP = [
    *[file for file in parallel("ddp_*") if file not in NODES + OF_DEVICES],
    *named("torch_amp", "torch_orders", "torch_parity", "torch_state", "torch_stateful_method"),
    *named("torch_changed_gradients", "torch_one_rank_loads", "torch_thrown_away"),
    *named("torch_unlike_ranks"),
]
# What Gloo has added up before all ranks have come. It needs three ranks.
SUMS = "parallel/test_torch_unlike_ranks.py::test_one_rank_loads_its_residues_and_nothing_is_lost"
DDP_LONG = [
    *named("torch_diagnostics", "torch_local_steps", "torch_methods", "torch_parity"),
    *named("torch_simulator"),
]
RUFF = (sys.executable, "-m", "ruff")

SHORT = {
    "ruff check": Part((*RUFF, "check", "."), 60),
    "ruff format": Part((*RUFF, "format", "--check", "."), 60),
    "mypy": Part((sys.executable, "-m", "mypy"), 300),
    # The longest come first.
    "torch, mpirun -np 2": on_ranks("mpirun", 2, TORCH),
    "tensorflow, mpirun -np 2": on_ranks("mpirun", 2, parallel("tensorflow_*")),
    "single": Part((sys.executable, *of_pytest("single", options=["--timeout=200"]))),
    "ddp, torchrun -np 2": on_ranks("torchrun", 2, DDP, environment=ONE_THREAD),
    "ddp nodes, torchrun -np 4": on_ranks("torchrun", 4, NODES, environment=ONE_THREAD),
    "device, torchrun -np 2": on_ranks("torchrun", 2, OF_DEVICES, environment=LATE),
    "device, one process": Part((sys.executable, *of_pytest("delayed", options=["--timeout=200"]))),
    "integration": Part(
        (sys.executable, *of_pytest("integration", options=[*SHARED, "--timeout=300"])), alone=True
    ),
}
ALL = ("-m", "")
FUZZ = ("-k", "test_random_programs")
MINUTE = {"FUZZ_SECONDS": "60"}
LONG = {
    "torch, mpirun -np 4": on_ranks("mpirun", 4, OF_MANY, *ALL),
    "torch, horovodrun --gloo -np 2": on_ranks(GLOO, 2, OF_MANY, *ALL),
    "ddp, torchrun -np 3": on_ranks("torchrun", 3, [SUMS], environment=ONE_THREAD),
    "ddp, torch alone, torchrun -np 2": on_ranks(
        "torchrun", 2, DDP_LONG, *ALL, interpreter=launch.TORCH_ALONE, environment=ONE_THREAD
    ),
    "device, torchrun -np 2, the rest": on_ranks(
        "torchrun",
        2,
        [file for file in DDP if file not in PAGES],  # the pages' scripts say where they run
        "--timeout=200",
        environment=LATE,
        limit=2400,
    ),
    "device, one process, the rest": Part(
        (sys.executable, *of_pytest("delayed", wanted="long", options=["--timeout=200"]))
    ),
    # Plain FSDP2 frees what other streams read, so there it is no oracle for random programs.
    "device nodes, torchrun -np 4": on_ranks(
        "torchrun",
        4,
        named("ddp_nodes", "ddp_sharded", "ddp_tensor_parallel"),
        "--timeout=200",
        environment=LATE,
    ),
    "ddp, torch alone, torchrun -np 4": on_ranks(
        "torchrun",
        4,
        [file for file in parallel("ddp_*") if file not in OF_DEVICES],
        *ALL,
        interpreter=launch.TORCH_ALONE,
        environment=ONE_THREAD | MINUTE,
    ),
    "tensorflow, mpirun -np 4": on_ranks(
        "mpirun",
        4,
        [*named("tensorflow_differential", "tensorflow_parity"), SETS, *UNLIKE],
        *ALL,
        "-k",
        "not plain_operations",  # no launcher changes them
    ),
    "tensorflow, horovodrun --gloo -np 2": on_ranks(
        GLOO, 2, [*named("tensorflow_differential", "tensorflow_state"), *UNLIKE], *ALL
    ),
    "tensorflow, mpirun -np 2, the rest": on_ranks(
        "mpirun", 2, parallel("tensorflow_*"), "-m", "long"
    ),
    "programs, mpirun -np 3": on_ranks("mpirun", 3, PROGRAMS, *FUZZ, environment=MINUTE),
    "programs, horovodrun --gloo -np 4": on_ranks(GLOO, 4, PROGRAMS, *FUZZ, environment=MINUTE),
    "long tests of one process": Part(
        (sys.executable, *of_pytest("single", wanted="long", options=["--timeout=300"]))
    ),
    "long integration": Part(
        (
            sys.executable,
            *of_pytest("integration", wanted="long", options=[*SHARED, "--timeout=1000"]),
        ),
        2400,
        alone=True,
    ),
}
CUDA = ONE_THREAD | {"TESTS_DEVICE": "cuda"}
PATIENT = "--timeout=300"  # NCCL's ranks that share a GPU take turns on it
GPU = {
    "GPU, doctor": Part((sys.executable, "-m", "scalecom_hvd", "doctor", "--gpu"), alone=True),
    "GPU, kernel": Part(
        (sys.executable, *of_pytest("single/test_triton.py", options=[], wanted=""))
    ),
    "GPU, Gloo, torchrun -np 2": on_ranks(
        "torchrun",
        2,
        [*OF_DEVICES, *[file for file in DDP if file not in PAGES], *named("torch_methods")],
        environment=CUDA | {"TESTS_BACKEND": "gloo"},
    ),
    "GPU, NCCL, torchrun -np 2": on_ranks(
        "torchrun",
        2,
        [*OF_DEVICES, *named("ddp_hook", "ddp_optimizer", "ddp_momentum", "torch_amp")],
        PATIENT,
        environment=CUDA,
    ),
    # Not over Gloo, because FSDP2 ends the process there (PyTorch 2.11).
    "GPU, NCCL, nodes, torchrun -np 4": on_ranks("torchrun", 4, NODES, PATIENT, environment=CUDA),
}
PARTS = SHORT | LONG | GPU


class Running:
    """A running part, on some cores only, and everything that it starts."""

    def __init__(self, name: str, part: Part, cores: list[int], show: bool) -> None:
        self.name, self.part, self.cores = name, part, cores
        self.begun = time.time()
        self._folder = tempfile.TemporaryDirectory(prefix="run_tests.")
        self.diary = Path(self._folder.name) / "diary"
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=launch.environment(TEST_DIARY=str(self.diary), **YIELD, **part.environment),
            stdin=subprocess.DEVNULL,
            stdout=None if show else self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def goes_on(self) -> bool:
        return self._process.poll() is None and time.time() < self.begun + self.part.limit

    def end(self, gently: bool = True) -> tuple[int | None, str]:
        """The exit code (None: out of time), and the output. Nothing that it started is left."""
        code = self._process.poll()
        if code is None and gently:
            os.killpg(self._process.pid, signal.SIGTERM)
            time.sleep(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._output:
            self._output.seek(0)
            return code, self._output.read()


def run(
    parts: Mapping[str, Part], shares: list[list[int]], show: bool
) -> Iterator[tuple[Running, int | None, str]]:
    """Run parts at the same time, one on each share of the cores.

    Yield each part when it ends, with its exit code (None: out of time) and output.
    """
    waiting, free, running = list(parts.items()), list(shares), []
    try:
        while waiting or running:
            while waiting and free:
                running.append(Running(*waiting.pop(0), free.pop(0), show))
            time.sleep(0.1)
            for one in [one for one in running if not one.goes_on()]:
                running.remove(one)
                free.append(one.cores)
                yield one, *one.end()
    finally:
        for one in running:
            one.end(gently=False)


def without_frames_of_launchers(output: str) -> str:
    """An output without pytest's own stack frames, and without torchrun's report of a failed rank.

    CI keeps the end of an output. If a rank has waited for too long, this end must say where.
    """
    of_torchrun = r"Traceback .*\n(?: {2}.*\n)+torch\.\S+\.ChildFailedError: *\n=+\n(?:.*\n)*?=+\n"
    frame_of_pytest = r".*File \"[^\"]*/(?:_pytest|pluggy|xdist)/.*\n(?: {4}.*\n)?"
    return re.sub(f"{of_torchrun}|{frame_of_pytest}", "", output)


def tell(one: Running, code: int | None, output: str) -> int:
    """Print a line about a part that ended, and all output if it failed. Return how many passed."""
    # Ranks run the same tests, so the smallest count is the number of tests that passed on all of
    # them.
    counts = [int(n) for n in re.findall(r"(\d+) passed", output)]
    verdict = "ok" if code == 0 else f"FAILED: exit code {code}"
    if code is None:
        verdict = f"FAILED: not done after {one.part.limit} s"
    took, count = time.time() - one.begun, f"{min(counts)} tests" if counts else ""
    print(f"{one.name:42s} {verdict:8s} {count:12s} {took:5.0f} s", flush=True)
    if code != 0:
        print(f"--- output of: {' '.join(one.part.command)}\n{without_frames_of_launchers(output)}")
        print(f"--- end of the output of {one.name}")
        for test in failed_tests(one.diary):
            again = [".venv/bin/python", "scripts/checks/run_tests.py", one.name, "--test", test]
            print(f"--- run it again: {shlex.join(again)}", flush=True)
    return min(counts, default=1 if code == 0 else 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "; ".join(PARTS)
    parser.add_argument("parts", nargs="*", help=f"beginnings of some of: {names}; default: all")
    parser.add_argument("--long", action="store_true", help="the tests that take long")
    parser.add_argument("--gpu", action="store_true", help="what a machine with a GPU can show")
    parser.add_argument("--test", action="append", help="of the part: this file, or test, alone")
    parser.add_argument("--show", action="store_true", help="show all output, at once")
    arguments = parser.parse_args()
    among = LONG if arguments.long else GPU if arguments.gpu else SHORT
    among = PARTS if arguments.parts else among
    wanted = {
        name: part.of(arguments.test) if arguments.test else part
        for name, part in among.items()
        if not arguments.parts or name.startswith(tuple(arguments.parts))
    }
    if arguments.test:  # a part asked for by its whole name
        wanted = {name: part for name, part in wanted.items() if name in arguments.parts} or wanted
    if not wanted:
        parser.error(f"no part begins so; there are: {names}")

    failed, passed, started = [], 0, time.time()
    # A part takes little longer on one core than on two: between two cores its ranks would wake
    # each other all the time.
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[first::4] for first in range(min(len(cores), 4))]
    together, alone = (
        {name: part for name, part in wanted.items() if part.alone == apart}
        for apart in (False, True)
    )
    for one, code, output in itertools.chain(
        run(together, shares, arguments.show), run(alone, [cores], arguments.show)
    ):
        passed += tell(one, code, output)
        failed += [one.name] * (code != 0)
    took = f"all of it took {time.time() - started:.0f} s"
    print(f"{took}{'; failed: ' + ', '.join(failed) if failed else ''}")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
