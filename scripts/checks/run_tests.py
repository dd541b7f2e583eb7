"""What `make test`, `make test-long` and `make test-nightly` run. CI runs the first two.

    python scripts/checks/run_tests.py                       ruff, mypy and the tests: 6 minutes
    python scripts/checks/run_tests.py --long                nodes, faults, hosts, late streams
    python scripts/checks/run_tests.py --nightly             all others: fuzz, study, more launchers
    python scripts/checks/run_tests.py --gpu                 those of a machine with a GPU
    python scripts/checks/run_tests.py "torch, mpirun"       parts that begin so
    python scripts/checks/run_tests.py single --test tests/single/test_pages.py

A part has a time limit. Parts that compute all the time run at the same time, on separate cores.
Then come the parts that start launchers and wait for them. Tests marked `long` belong to --long or
--nightly, and those marked `nightly` to the latter alone. The others run with each face on 2 ranks:
on Horovod under mpirun, and with torch.distributed under torchrun. Some of them wait for --long:
nodes (on 4 ranks), some files of TensorFlow, methods, compiled models, scripts of pages. With
--long, some tests run without Horovod, and on a device whose streams run late (tests/delayed). With
--nightly, tests of PyTorch run again on 4 ranks and under Gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

ROOT = Path(__file__).resolve().parents[2]
CORES = sorted(os.sched_getaffinity(0))
LATE, CUDA, MINUTE = {"TESTS_DEVICE": "delayed"}, {"TESTS_DEVICE": "cuda"}, {"FUZZ_SECONDS": "60"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some tests, or a tool of another kind if there are no tests."""

    words: str  # what follows `python -m`
    tests: list[str] = dataclasses.field(default_factory=list)
    marks: str = "not long and not nightly"  # pytest's -m; "" for all tests
    limit: int = 1200  # seconds
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    alone: bool = False  # whether it has all cores to itself

    def line(self, name: str) -> list[str]:
        """The command. A part's name says on how many ranks it runs, and who launches them."""
        program = ["-m", *shlex.split(self.words)]
        program += ["-m", self.marks, *self.tests] if self.tests else []
        ranks = re.search(r", (mpirun|torchrun|horovodrun --gloo) -np (\d)", name)
        if not ranks:
            return [sys.executable, *program]
        interpreter = launch.TORCH_ALONE if "torch alone" in name else Path(sys.executable)
        return launch.command(ranks[1], int(ranks[2]), program, ranks[1] == "mpirun", interpreter)


def pytest(path: str, options: str = "--timeout=200", **more: Any) -> Part:
    return Part(f"pytest -q --color=no {options}", [f"tests/{path}"], **more)


def on_ranks(names: str, options: str = "", **more: Any) -> Part:
    """Tests of tests/parallel. A rank that waits for ever is ended, and tells where it waits."""
    waits = f"pytest -q --color=no -x --timeout=100 --timeout-method=thread {options}"
    return Part(waits, files(names), **more)


def files(names: str) -> list[str]:
    """Files of tests/parallel, or single tests, by patterns. A minus leaves some out again."""
    chosen: list[str] = []
    for name in names.split():
        pattern, _, test = name.removeprefix("-").partition("::")
        found = sorted(ROOT.glob(f"tests/parallel/test_{pattern}.py"))
        paths = [str(path.relative_to(ROOT)) + (f"::test_{test}" if test else "") for path in found]
        chosen = [path for path in chosen if path not in paths]
        chosen += [] if name.startswith("-") else paths
    return chosen


ALL_TORCH = "join torch_*"  # join() comes first: see there
TORCH = f"{ALL_TORCH} -torch_methods torch_methods::horovods_own_optimizer_is_refused"
# Without what each rank computes by itself, and how pages describe it. No launcher changes that.
OF_MANY = f"{ALL_TORCH} -torch_pages -torch_profile -torch_momentum"
# Two nodes of two ranks.
NODES = """
    ddp_fsdp_groups ddp_nodes ddp_sharded ddp_sharded_differential ddp_tensor_parallel torch_nodes
    torch_node_steps"""
TENSORFLOW = "tensorflow_parity tensorflow_tape"
# The tests of torch.distributed's face: its own, and those of both faces.
DDP = f"""
    ddp_* -ddp_devices -ddp_pages -ddp_wrapped_models -{" -".join(NODES.split())}
    torch_amp torch_orders torch_state torch_changed_gradients torch_thrown_away
    torch_unlike_ranks torch_momentum::a_step_that_fails_leaves_no_trace
    torch_methods::resuming_is_bit_identical[Momentum-{{}}-new_optimizer]
    torch_methods::resuming_is_bit_identical[Momentum-{{}}-mid_run]"""
# What depends most on which stream a tensor is in.
STREAMS = "ddp_devices ddp_differential ddp_hook::parity torch_amp"
PROGRAMS = "torch_differential torch_local_differential"
# They run at the same time, the longest first: see tests/integration/conftest.py.
AT_ONCE = f"-n {min(4, len(CORES))} --dist loadgroup --no-loadscope-reorder"
SLOW = f"{AT_ONCE} --timeout=1000"
# Half of the time of tests/single. What ranks do needs kernels too, and notices most of it.
KERNELS = [f"tests/single/test_{name}.py" for name in ("kernels", "torch_kernels", "triton")]

# The longest come first.
SHORT = {
    "ruff check": Part("ruff check .", limit=60),
    "ruff format": Part("ruff format --check .", limit=60),
    "mypy": Part("mypy", limit=300),
    "torch, mpirun -np 2": on_ranks(TORCH),
    "tensorflow, mpirun -np 2": on_ranks(TENSORFLOW),
    "single": pytest("single", f"--timeout=200 {' '.join(f'--ignore={file}' for file in KERNELS)}"),
    "ddp, torchrun -np 2": on_ranks(DDP),
    "integration": pytest("integration", f"{AT_ONCE} --timeout=300", alone=True),
}
LONG = {
    "device, torchrun -np 2": on_ranks(STREAMS, "--timeout=200", environment=LATE, limit=2400),
    "tensorflow, mpirun -np 2, other files": on_ranks(
        f"tensorflow_* -{' -'.join(TENSORFLOW.split())}"
    ),
    "ddp, torch alone, torchrun -np 2": on_ranks(
        "ddp_pages ddp_wrapped_models torch_local_states torch_methods torch_parity"
    ),
    "kernels": dataclasses.replace(pytest(""), tests=KERNELS),
    "ddp nodes, torchrun -np 4": on_ranks(NODES),
    # Nodes, and process sets, that have several ranks and do not begin at rank 0.
    "torch nodes, mpirun -np 4": on_ranks(
        "torch_optimizer::process_sets_have_leaders_of_their_own torch_nodes::nothing_is_lost"
        " torch_nodes::a_node_is_one_worker_of_the_reference torch_node_steps::a_node_is_one_worker"
        " torch_nodes::what_cannot_work_is_refused torch_node_steps::nothing_is_lost"
    ),
    "programs, mpirun -np 3": on_ranks(PROGRAMS, "-k test_random_programs", environment=MINUTE),
    # What Gloo has added up before all ranks have come, and groups that overlap, need three ranks.
    "ddp, torchrun -np 3": on_ranks(
        "torch_unlike_ranks::one_rank_loads_its_residues_and_nothing_is_lost"
        " ddp_optimizer::groups_that_overlap"
    ),
    "device, one process": pytest("delayed", marks=""),
    "long integration": pytest("integration", SLOW, marks="long and not nightly", alone=True),
}
NIGHTLY = {
    "torch, mpirun -np 4": on_ranks(OF_MANY, marks=""),
    "torch, horovodrun --gloo -np 2": on_ranks(OF_MANY, marks=""),
    "ddp, torch alone, torchrun -np 4": on_ranks(
        "ddp_* -ddp_devices torch_nodes torch_thrown_away torch_diagnostics torch_local_states"
        " torch_local_steps torch_methods torch_parity",
        marks="",
        environment=MINUTE,
    ),
    "device, torchrun -np 2, other files": on_ranks(
        f"{DDP} ddp_wrapped_models torch_parity -{' -'.join(STREAMS.split())}",
        "--timeout=200",
        environment=LATE,
        limit=2400,
    ),
    # Plain FSDP2 frees what other streams read, so there it is no oracle for random programs.
    "device nodes, torchrun -np 4": on_ranks(
        f"{NODES} -ddp_sharded_differential", "--timeout=200", environment=LATE
    ),
    # No launcher changes plain operations. Process sets need 4 ranks to have leaders of their own.
    "tensorflow, mpirun -np 4": on_ranks(
        "tensorflow_differential tensorflow_parity tensorflow_tape",
        "-k 'not plain_operations'",
        marks="",
    ),
    "tensorflow, horovodrun --gloo -np 2": on_ranks(
        "tensorflow_differential tensorflow_state tensorflow_tape", marks=""
    ),
    "tensorflow, mpirun -np 2, the rest": on_ranks("tensorflow_*", marks="long"),
    "programs, horovodrun --gloo -np 4": on_ranks(
        PROGRAMS, "-k test_random_programs", environment=MINUTE
    ),
    "long tests of one process": pytest("single", "--timeout=300", marks="long"),
    "nightly integration": pytest("integration", SLOW, marks="nightly", limit=2400, alone=True),
}
# NCCL's ranks that share a GPU take turns on it, which needs patience. FSDP2 is not tested over
# Gloo, because it ends the process there (PyTorch 2.11).
GPU = {
    "GPU, doctor": Part("scalecom_hvd doctor --gpu", alone=True),
    "GPU, kernel": pytest("single/test_triton.py", marks=""),
    "GPU, Gloo, torchrun -np 2": on_ranks(
        f"{DDP} ddp_devices ddp_wrapped_models torch_methods torch_parity",
        environment=CUDA | {"TESTS_BACKEND": "gloo"},
    ),
    "GPU, NCCL, torchrun -np 2": on_ranks(
        "ddp_devices ddp_hook ddp_optimizer ddp_momentum torch_amp",
        "--timeout=300",
        environment=CUDA,
    ),
    "GPU, NCCL, nodes, torchrun -np 4": on_ranks(NODES, "--timeout=300", environment=CUDA),
}
PARTS = SHORT | LONG | NIGHTLY | GPU
running: list[subprocess.Popen] = []


def run(name: str, part: Part) -> tuple[bool, int]:
    """Run a part on this thread's cores. Return whether it succeeded, and how many tests passed."""
    begun, line = time.time(), part.line(name)
    # torchrun sets the number of threads too, but with a warning. With the other variable, waiting
    # ranks of Open MPI leave the cores to other processes.
    more = {"OMP_NUM_THREADS": "1"} if "torchrun" in name else {}
    more |= {"OMPI_MCA_mpi_yield_when_idle": "1"} | part.environment
    line = ["timeout", "--kill-after=30", str(part.limit), *line]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(line, cwd=ROOT, env=launch.environment(**more), **options)
        running.append(process)
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        output = log.read()
    verdict = f"FAILED: exit code {code}" if code else "ok"
    # Ranks run the same tests, so the smallest count is the number of tests that passed on all.
    passed = min(map(int, re.findall(r"(\d+) passed", output)), default=int(not code))
    count = f"{passed} tests" if part.tests else ""
    print(f"{name:42s} {verdict:8s} {count:12s} {time.time() - begun:5.0f} s", flush=True)
    if code:
        print(f"--- output of: {shlex.join(line)}\n{output}\n--- end of the output of {name}")
        again = f".venv/bin/python scripts/checks/run_tests.py {shlex.quote(name)} --test"
        failed = re.findall(r"(?:FAILED|ERROR) (tests/.*?)(?: - |$)", output, re.MULTILINE)
        for test in dict.fromkeys(failed):
            print(f"--- run it again: {again} {shlex.quote(test)}", flush=True)
    return not code, passed


def run_all(parts: dict[str, Part], shares: list[list[int]]) -> list[tuple[bool, int]]:
    """Run parts at the same time, one on each share of the cores. Return what `run` does."""
    # What a thread starts has the cores of the thread.
    threads = ThreadPoolExecutor(
        len(shares), initializer=lambda: os.sched_setaffinity(0, shares.pop())
    )
    try:
        return list(threads.map(run, parts, parts.values()))
    finally:  # also if the user interrupts it
        threads.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "; ".join(PARTS)
    parser.add_argument("parts", nargs="*", help=f"beginnings of some of: {names}")
    for group, chosen in (("long", LONG), ("nightly", NIGHTLY), ("gpu", GPU)):
        parser.add_argument(f"--{group}", dest="group", action="store_const", const=chosen)
    parser.add_argument("--test", action="append", help="of the part: this file, or test, alone")
    arguments = parser.parse_args()
    among = arguments.group or SHORT
    if arguments.parts:
        among = {n: part for n, part in PARTS.items() if n.startswith(tuple(arguments.parts))}
    if arguments.test:  # of a part whose whole name is given, or else of all that begin so
        among = {n: part for n, part in among.items() if n in arguments.parts} or among
        changes = {"tests": arguments.test, "marks": ""}
        among = {n: dataclasses.replace(part, **changes) for n, part in among.items() if part.tests}
    if not among:
        parser.error(f"no part begins so; there are: {names}")

    # A part takes little longer on one core than on two: between two cores its ranks would wake
    # each other all the time. The parts that need all cores come last.
    started, ends = time.time(), {}
    for alone, shares in ((False, [CORES[n::4] for n in range(4)]), (True, [CORES])):
        parts = {name: part for name, part in among.items() if part.alone == alone}
        ends |= zip(parts, run_all(parts, [cores for cores in shares if cores]), strict=True)
    failed = [name for name, (succeeded, _) in ends.items() if not succeeded]
    took = f"all of it took {time.time() - started:.0f} s"
    print(f"{took}{'; failed: ' + ', '.join(failed) if failed else ''}")
    print(f"{sum(passed for _, passed in ends.values())} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
