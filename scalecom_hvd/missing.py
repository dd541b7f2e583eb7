"""What to say if a framework is missing, or lacks what was asked for. Imports no framework."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

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
# Names that earlier releases had, and what to use now.
REMOVED = {
    "Diagnostics": "a number of steps: ScaleCom(diagnostics=50)",
    "ECQSGD": "ScaleCom(rate=1, bits=4)",
    "GTopK": "LocalTopK, which is faster and sends less",
    "rates_from_flops": 'ScaleCom(rate="auto"), which measures the network',
    "GlobalTopK": "diagnostics=..., whose contraction_top_k says what the true top-k would leave",
    "QSGD": "ScaleCom(bits=...), or LocalTopK(quantiser=BinMeans)",
    "Sign": "ScaleCom(bits=...), or LocalTopK(quantiser=BinMeans)",
}


def no_attribute(name: str) -> NoReturn:
    """Raise AttributeError for a name that no face for PyTorch has; see REMOVED."""
    hint = f". It was removed: use {REMOVED[name]}" if name in REMOVED else ""
    raise AttributeError(f"scalecom_hvd has no {name}{hint}")


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
