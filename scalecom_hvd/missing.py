"""What to say if a framework is missing, or lacks what was asked for. Imports no framework."""

from __future__ import annotations

from types import ModuleType
from typing import Any

HOROVOD = (
    "Horovod, which pip does not install along with scalecom_hvd, because it is compiled for the "
    "installed frameworks (https://horovod.readthedocs.io/en/stable/install.html; `make setup` in "
    "this package's sources does it for PyTorch and TensorFlow). Without Horovod, use "
    "scalecom_hvd.ddp, for torch.distributed, or scalecom_hvd.reference, in NumPy"
)
WHAT_IT_NEEDS = {
    "horovod": HOROVOD,
    "torch": 'PyTorch: pip install "scalecom_hvd[torch]"',
    "tensorflow": 'TensorFlow 2.15 (Python 3.11 at most): pip install "scalecom_hvd[tensorflow]"',
}


def explained(error: ModuleNotFoundError, face: str) -> ModuleNotFoundError:
    """Say what to install for a face (such as scalecom_hvd.ddp) after its import failed.

    Returns:
        The error to raise. If no framework is missing, it is the error given.
    """
    if error.name not in WHAT_IT_NEEDS:
        return error
    return ModuleNotFoundError(f"{face} needs {WHAT_IT_NEEDS[error.name]}", name=error.name)


TORCHS_ALONE = ("BinMeans", "LocalTopK", "Method", "RandomK", "diloco", "sparseloco")


def attribute(horovod: ModuleType, name: str, face: str) -> Any:
    """An attribute of Horovod's module, for a face of TensorFlow that was asked for it.

    Raises:
        AttributeError: Horovod does not have it either.
    """
    if name in TORCHS_ALONE:
        raise AttributeError(
            f"{face} has no {name}, because TensorFlow has only ScaleCom. For PyTorch, "
            f"scalecom_hvd.torch has {name}"
        )
    return getattr(horovod, name)
