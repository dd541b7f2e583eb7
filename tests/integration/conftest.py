"""Tests that start launchers, scripts and installations, as a user does.

Every command has a time limit and shows its output on failure.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(path) for path in ((ROOT / "scripts"), *(ROOT / "scripts").glob("*/"))]

import hosts  # noqa: E402
import launch  # noqa: E402

# The longest tests, and files of long tests. They start first, so that all pytest workers finish at
# about the same time.
LONGEST = (
    "test_all_jobs",
    "test_the_short_study",
    "test_hosts",
    "test_bench",
    "test_tensorflow_elastic",
    "test_a_model_of_ones_own",
    "test_both_loops_learn",
    "test_killed_at_any_moment",
    "test_keras_training",
    "test_ecosystem",
    "test_everything_that_is_here_works",
    "test_accuracy",
    "test_install",
    "test_stopped_and_resumed",
    "test_memory",
    "test_bytes",
    "test_faults",
)


def pytest_collection_modifyitems(items):
    """Put the longest tests first."""

    def place(item):
        return next(
            (number for number, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)
        )

    items.sort(key=place)


@pytest.fixture
def run(tmp_path):
    """run(command, limit=..., fails=False, **environment) -> the command's output.

    The command must succeed, or fail if `fails` is true.
    """

    def runner(command, limit=120, fails=False, cwd=tmp_path, **environment):
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=launch.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"not done after {limit} s: {command}\n{output}")
        finally:
            with contextlib.suppress(ProcessLookupError):  # pytest-timeout may have killed it
                os.killpg(process.pid, signal.SIGKILL)
        if (process.returncode != 0) != fails:
            pytest.fail(f"exit code {process.returncode}: {command}\n{output}")
        return output

    return runner


@pytest.fixture
def launched(run):
    """launched(launcher, ranks, program, ...) -> the output of a Python program.

    The program runs on that many ranks of this machine.
    """

    def runner(launcher, ranks, program, **options):
        return run(launch.command(launcher, ranks, [str(part) for part in program]), **options)

    return runner


@pytest.fixture(scope="session")
def machine():
    """Skip the test unless hosts can be made on this machine.

    Hosts need root and some programs. This fixture installs the programs if it can.
    """
    if os.geteuid() != 0:
        pytest.skip("hosts need root")
    if hosts.missing() and shutil.which("apt-get"):
        with contextlib.suppress(subprocess.CalledProcessError):
            hosts.install()
    if hosts.missing():
        pytest.skip(f"hosts need {', '.join(hosts.missing())}, and installing with apt-get failed")
