"""Starts the doctor's other processes, so that they find this package.

No process of a child outlives the time limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the package."""
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""The variables that must be 1 before mpirun runs for root."""
# Seconds that a launcher has to end its ranks when it is asked to.
GRACE = 5.0


class Outcome(NamedTuple):
    """How a process ended."""

    # Its exit code; negative: minus the signal that ended it; None: it was still running at the
    # time limit; 127: it could not be started.
    code: int | None
    output: str  # standard output and standard error

    @property
    def why(self) -> str:
        """Why it failed: Python writes an error's own words last."""
        if self.code is None:
            return "it did not finish within the time limit (--limit)"
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        return (self.output.strip().splitlines() or [f"exit code {self.code}"])[-1].strip()


def run(command: Sequence[str], limit: float) -> Outcome:
    """Run a command to its end, or for `limit` seconds."""
    # The folder is empty because Python would take modules from it.
    with tempfile.TemporaryDirectory(prefix="scalecom_hvd.") as empty:
        try:
            process = subprocess.Popen(
                command,
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
            os.killpg(process.pid, signal.SIGTERM)  # a launcher then ends its ranks
            output = ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=GRACE)
            return Outcome(None, output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """The children's environment: this Python's programs first, no hyper-parameters of the user."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SCALECOM_") or name == "SCALECOM_KERNEL"
    }
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
    return kept | mine
