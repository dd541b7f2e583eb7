"""All that `make test` and CI check: ruff, the tests on one process, on several ranks under every
launcher, and end to end.

Each part has a time limit, after which it is ended with all its ranks; its output is shown when it
fails. Parts that compute all the time run side by side, on cores of their own; then come those that
start launchers, and wait for them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ["-m", "pytest", "-q", "--color=no"]
# Tests side by side, the longest first: see tests/integration/conftest.py.
SHARED = [
    "-n",
    str(min(4, len(os.sched_getaffinity(0)))),
    "--dist",
    "loadgroup",
    "--no-loadscope-reorder",
]
# Ranks of Open MPI that wait would else keep other processes from the cores.
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def parallel(*patterns: str, without: tuple[str, ...] = ()) -> list[str]:
    """Files of tests/parallel, for pytest.

    A rank that waits for ever is ended with a traceback of where it waits.
    """
    found, left_out = (
        {
            file
            for pattern in some
            for file in (ROOT / "tests" / "parallel").glob(f"test_{pattern}.py")
        }
        for some in (patterns, without)
    )
    files = [str(file.relative_to(ROOT)) for file in sorted(found - left_out)]
    return [*PYTEST, "-x", "--timeout=100", "--timeout-method=thread", *files]


# Frameworks apart: side by side in one process they run, but slowly. All files pass under each
# launcher; those that take long do not run under every one. PyTorch's run on 4 ranks and under at
# least one other launcher; Gloo is held to the reference by
# tests/integration/test_frameworks_agree.py too. Tracing takes TensorFlow most of its time: its
# files are shared out among the launchers.
TORCH = ("torch_*", "local_topk")
TAPES = "tests/parallel/test_tensorflow_tape.py::test_"
SETS = f"{TAPES}process_sets_have_leaders_of_their_own"  # which need 4 ranks
UNLIKE = [
    f"{TAPES}{name}"
    for name in ("gradients_that_come_later_on_one_rank_alone", "float16_values_keep_what_is_tiny")
]
PARALLEL = {  # the longest first
    ("torch", "mpirun", 4): parallel(*TORCH),
    ("torch", "horovodrun --gloo", 2): parallel(*TORCH, without=("torch_parity",)),
    ("tensorflow", "mpirun", 2): parallel(
        "tensorflow_differential", "tensorflow_keras", "tensorflow_refusals", "tensorflow_tape"
    ),
    ("tensorflow", "mpirun", 4): [
        *parallel("tensorflow_differential", "tensorflow_parity"),
        SETS,
        *UNLIKE,
    ],
    ("tensorflow", "horovodrun --gloo", 2): [
        *parallel("tensorflow_amp", "tensorflow_differential", "tensorflow_state"),
        *UNLIKE,
    ],
    ("torch", "mpirun", 2): parallel(*TORCH, without=("torch_methods", "torch_fuzz")),
}

PARTS = {  # {name: (command, its limit in seconds)}
    "ruff check": ([sys.executable, "-m", "ruff", "check", "."], 60),
    "ruff format": ([sys.executable, "-m", "ruff", "format", "--check", "."], 60),
    "mypy": ([sys.executable, "-m", "mypy"], 300),
    "single": ([sys.executable, *PYTEST, "--timeout=200", "tests/single"], 1200),
    **{
        f"{framework}, {launcher} -np {ranks}": (
            launch.command(launcher, ranks, program, tagged=launcher == "mpirun"),
            1200,
        )
        for (framework, launcher, ranks), program in PARALLEL.items()
    },
    "integration": (
        [sys.executable, *PYTEST, *SHARED, "--timeout=1000", "tests/integration"],
        3000,
    ),
}
# Parts that have all cores to themselves.
ALONE = ["integration"]


class Part:
    """A part that runs, on some cores only, and all that it starts."""

    def __init__(self, name: str, cores: list[int], show: bool) -> None:
        self.name, self.cores = name, cores
        self.command, self.limit = PARTS[name]
        self.begun = time.time()
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=launch.environment(**YIELD),
            stdin=subprocess.DEVNULL,
            stdout=None if show else self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def goes_on(self) -> bool:
        return self._process.poll() is None and time.time() < self.begun + self.limit

    def end(self, gently: bool = True) -> tuple[int | None, str]:
        """The exit code (None: out of time), and the output; nothing that it started is left."""
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
    names: list[str], shares: list[list[int]], show: bool
) -> Iterator[tuple[Part, int | None, str]]:
    """Run parts side by side, one on each share of the cores; gives each with its exit code (None:
    out of time) and output when it ends.
    """
    waiting, free, running = list(names), list(shares), []
    try:
        while waiting or running:
            while waiting and free:
                running.append(Part(waiting.pop(0), free.pop(0), show))
            time.sleep(0.1)
            for part in [part for part in running if not part.goes_on()]:
                running.remove(part)
                free.append(part.cores)
                yield part, *part.end()
    finally:
        for part in running:
            part.end(gently=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", help=f"some of: {', '.join(PARTS)}; a beginning is enough; default: all"
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="show all output at once instead of that of failing parts",
    )
    arguments = parser.parse_args()
    wanted = [
        name
        for name in PARTS
        if not arguments.parts or any(name.startswith(part) for part in arguments.parts)
    ]
    if not wanted:
        parser.error(f"no part begins so; there are: {', '.join(PARTS)}")

    failed, passed, started = [], 0, time.time()
    # A part on one core takes little longer than on two, between which its ranks would wake each
    # other all the time.
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[first::4] for first in range(min(len(cores), 4))]
    together, alone = (
        [name for name in wanted if (name in ALONE) == apart] for apart in (False, True)
    )
    for part, code, output in itertools.chain(
        run(together, shares, arguments.show), run(alone, [cores], arguments.show)
    ):
        # Ranks run the same tests: the smallest count is the number of tests that passed on all of
        # them.
        counts = [int(n) for n in re.findall(r"(\d+) passed", output)]
        passed += min(counts, default=1 if code == 0 else 0)
        verdict = (
            "ok"
            if code == 0
            else f"FAILED: exit code {code}"
            if code is not None
            else f"FAILED: not done after {part.limit} s"
        )
        took = time.time() - part.begun
        print(
            f"{part.name:36s} {verdict:8s} {f'{min(counts)} tests' if counts else '':12s} "
            f"{took:5.0f} s",
            flush=True,
        )
        if code != 0:
            failed.append(part.name)
            print(
                f"--- output of: {' '.join(part.command)}\n{output}\n--- end of the output of "
                f"{part.name}",
                flush=True,
            )
    print(
        f"all of it took {time.time() - started:.0f} "
        f"s{'; failed: ' + ', '.join(failed) if failed else ''}"
    )
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
