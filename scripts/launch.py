"""How the project's own scripts and tests start ranks on this machine.

It has the command line and the environment of each launcher.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


# The environment with PyTorch but without Horovod.
TORCH_ALONE = Path(__file__).resolve().parents[1] / ".venv-torch" / "bin" / "python"


def command(
    launcher: str,
    ranks: int,
    program: list[str],
    tagged: bool = False,
    interpreter: Path = Path(sys.executable),
) -> list[str]:
    """The command line that runs `python program...` on `ranks` ranks of this machine.

    launcher: "mpirun", "horovodrun" (over MPI), "horovodrun --gloo", or "torchrun". There may be
        more ranks than cores.
    tagged: whether mpirun puts the rank before every line of output, as horovodrun always does.
    interpreter: the Python, such as TORCH_ALONE.
    """
    python = [str(interpreter), *program]
    if launcher == "mpirun":
        options = ["--oversubscribe", "--bind-to", "none", *["--tag-output"] * tagged]
        return [find("mpirun"), *options, "-np", str(ranks), *python]
    if launcher in ("horovodrun", "horovodrun --gloo"):
        over = ["--mpi", "--mpi-args=--oversubscribe"] if launcher == "horovodrun" else ["--gloo"]
        where = ["-np", str(ranks), "-H", f"localhost:{ranks}"]
        return [find("horovodrun"), *over, *where, *python]
    if launcher == "torchrun":
        torchrun = [str(interpreter), "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(ranks), *program]
    raise ValueError(f"unknown launcher {launcher!r}")


def environment(**more: str) -> dict[str, str]:
    """The environment that the launchers need.

    This Python's programs come first, root is allowed, and there are no banners.
    """
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def find(program: str) -> str:
    """A program of this environment, or else one on the PATH."""
    return str(BIN / program) if (BIN / program).exists() else program
