"""All that `make test` and CI check: ruff, the tests on one process, on several ranks under every launcher, and end to end.

Each part has a time limit, after which it is ended with all its ranks; its output is shown when it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import launch

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-q", "--color=no"]
# Tests side by side: most of those that start launchers wait for them, or for imports.
SHARED = ["-n", "2", "--dist", "loadgroup"]


def parallel(*patterns: str) -> list[str]:
    """Files of tests/parallel, for pytest. A rank that waits for ever is ended with a traceback of where it waits."""
    files = sorted({file for pattern in patterns for file in (ROOT / "tests" / "parallel").glob(f"test_{pattern}.py")})
    return [*PYTEST, "-x", "--timeout=100", "--timeout-method=thread", *(str(file.relative_to(ROOT)) for file in files)]


# Frameworks apart: side by side in one process they run, but slowly. Tracing takes TensorFlow most of its time, so its files are shared out
# among the launchers; all of them pass under each.
TORCH, TENSORFLOW = ("torch_*", "local_topk"), "tensorflow_"
PARALLEL = {
    ("torch", "mpirun", 2): parallel(*TORCH),
    ("torch", "mpirun", 4): parallel(*TORCH),
    ("torch", "horovodrun --gloo", 2): parallel(*TORCH),
    ("tensorflow", "mpirun", 2): parallel(*(TENSORFLOW + name for name in ("keras", "refusals"))),
    ("tensorflow", "mpirun", 4): parallel(*(TENSORFLOW + name for name in ("parity", "tape"))),
    ("tensorflow", "horovodrun --gloo", 2): parallel(*(TENSORFLOW + name for name in ("amp", "state"))),
}

PARTS = {
    "ruff check": ([sys.executable, "-m", "ruff", "check", "."], 60),
    "ruff format": ([sys.executable, "-m", "ruff", "format", "--check", "."], 60),
    "single": ([sys.executable, *PYTEST, *SHARED, "--timeout=200", "tests/single"], 600),
    **{
        f"{framework}, {launcher} -np {ranks}": (launch.command(launcher, ranks, program, tagged=launcher == "mpirun"), 600)
        for (framework, launcher, ranks), program in PARALLEL.items()
    },
    "integration": ([sys.executable, *PYTEST, *SHARED, "--timeout=800", "tests/integration"], 1500),
}


def run(command: list[str], limit: int, show: bool) -> tuple[int | None, str]:
    """The exit code (None: out of time) and the output of a command and all it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=launch.environment(),
            stdin=subprocess.DEVNULL,
            stdout=None if show else output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if code is None:
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(PARTS)}; a beginning is enough; default: all")
    parser.add_argument("--show", action="store_true", help="show all output at once instead of that of failing parts")
    arguments = parser.parse_args()
    wanted = [name for name in PARTS if not arguments.parts or any(name.startswith(part) for part in arguments.parts)]
    if not wanted:
        parser.error(f"no part begins so; there are: {', '.join(PARTS)}")

    failed, passed, started = [], 0, time.time()
    for name in wanted:
        command, limit = PARTS[name]
        begun = time.time()
        code, output = run(command, limit, arguments.show)
        # Ranks run the same tests: the smallest count is the number of tests that passed on all of them.
        counts = [int(n) for n in re.findall(r"(\d+) passed", output)]
        passed += min(counts, default=1 if code == 0 else 0)
        verdict = "ok" if code == 0 else f"FAILED: exit code {code}" if code is not None else f"FAILED: not done after {limit} s"
        print(f"{name:36s} {verdict:8s} {f'{min(counts)} tests' if counts else '':12s} {time.time() - begun:5.0f} s", flush=True)
        if code != 0:
            failed.append(name)
            print(f"--- output of: {' '.join(command)}\n{output}\n--- end of the output of {name}", flush=True)
    print(f"all of it took {time.time() - started:.0f} s{'; failed: ' + ', '.join(failed) if failed else ''}")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
