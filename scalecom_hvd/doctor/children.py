"""Starts the doctor's other processes, with a time limit and so that they find this package.

No process of a child outlives the time limit. Imports no other room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the package."""
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""The variables that must be 1 before mpirun runs for root."""
MARK = "scalecom_hvd.doctor.probe: "
"""The beginning of each line that probe.py writes for facts.py."""
# Seconds that a launcher has to end its ranks when it is asked to.
GRACE = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        code: its exit code; negative: minus the signal that ended it; None: it was still running at
            the time limit; 127: it could not be started.
        output: standard output and standard error.
    """

    code: int | None
    output: str

    @property
    def why(self) -> str:
        """Why it failed, in words."""
        if self.code is None:
            return "it did not finish within the time limit (--limit)"
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        return self.last_line or f"exit code {self.code}"

    @property
    def last_line(self) -> str:
        """The last line that is not empty. Python writes an error's own words there."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(command: Sequence[str], limit: float) -> Outcome:
    """Run a command to its end, or to the time limit.

    Args:
        command: the program and its arguments.
        limit: seconds.
    """
    with tempfile.TemporaryDirectory(prefix="scalecom_hvd.") as empty:
        try:
            process = subprocess.Popen(
                command,
                # The folder is empty because Python would take modules from it.
                cwd=empty,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(127, str(error))
        try:
            output, _ = process.communicate(timeout=limit)
            return Outcome(process.returncode, output)
        except subprocess.TimeoutExpired:
            return Outcome(None, _end(process))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> str:
    """Ask a launcher to end its ranks. Returns what they had written."""
    os.killpg(process.pid, signal.SIGTERM)
    for last in (False, True):
        try:
            return process.communicate(timeout=GRACE)[0]
        except subprocess.TimeoutExpired:
            if last:
                break
            os.killpg(process.pid, signal.SIGKILL)
    return ""


def environment() -> dict[str, str]:
    """The children's environment: this Python's programs first, no hyper-parameters of the user."""
    hyper_parameters = [
        name for name in os.environ if name.startswith("SCALECOM_") and name != "SCALECOM_KERNEL"
    ]
    mine = {
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
        # Ranks share cores, so a rank that waits must not take the other's.
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **dict.fromkeys(AS_ROOT, "1"),
    }
    if ROOT.name not in ("site-packages", "dist-packages"):  # run from a checkout
        paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        mine["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
    return {n: v for n, v in os.environ.items() if n not in hyper_parameters} | mine


def find(program: str) -> tuple[str | None, bool]:
    """Find a program in this Python's environment, or on the PATH.

    Returns:
        The program's path (None if there is none), and whether the PATH leads a user to the same.
    """
    on_path = shutil.which(program)
    beside = str(BIN / program)
    if os.access(beside, os.X_OK):
        same = on_path is not None and os.path.realpath(on_path) == os.path.realpath(beside)
        return beside, same
    return on_path, on_path is not None
