"""The C kernels for lanes (lanes.c), loaded through ctypes.

They take raw addresses, so any framework can call them, and the GIL is released. They know only
lanes: a tensor's `width` in TENSOR must never be 0, as with the positions of exact selection.
OPERATIONS is the file with the same kernel as TensorFlow operations (tensorflow_ops.c), which
tensorflow/kernels.py loads. Imports no framework.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import numpy as np

log = logging.getLogger("scalecom_hvd")

LIBRARY = Path(__file__).with_name("_lanes.so")
OPERATIONS = Path(__file__).with_name("_tensorflow_ops.so")

WRONG_OFFSETS = (
    "ScaleCom did not receive exactly one leader's offsets: ranks disagree about the step, and so "
    "about who chooses. Restore a checkpoint of the same step on every rank, and give every rank "
    "the same number of steps"
)

OFFSETS_OUTSIDE = (
    "ScaleCom was given offsets that lie outside of their lanes, by the leader or in the loaded "
    "state: the offsets are damaged, or belong to another model. Restore a checkpoint of this "
    "model on every rank, or go on without loading ScaleCom's state (residues start at zero)"
)

# The codes of lanes.h.
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
REFUSED = -1  # called OFFSETS_OUTSIDE in lanes.h

# One compressed tensor as lanes.c reads it (`tensor` in lanes.h says what the fields are). An array
# of these goes into every call.
_LONG_FIELDS = "grad residue numel k width rows offsets_at values_at scales_at"
_INT_FIELDS = "dtype offset_width frozen levels"
TENSOR = np.dtype(
    [(name, np.int64) for name in _LONG_FIELDS.split()]
    + [(name, np.int32) for name in _INT_FIELDS.split()]
    + [("squares", np.float64)]
)

_POINTER, _LONG, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_TENSORS = [_POINTER, _LONG]
_VALUES = [_POINTER, _POINTER]  # offsets, values
_SIGNATURES = {
    "scalecom_choose": [*_TENSORS, _REAL, _REAL, _POINTER],
    "scalecom_take_and_accumulate": [*_TENSORS, *[_REAL] * 3, *_VALUES, _POINTER],
    "scalecom_scatter": [*_TENSORS, _REAL, *_VALUES],
    "scalecom_roll_back": [*_TENSORS, _REAL, _REAL, *_VALUES, _INT],
    "scalecom_pack": [_POINTER, *[_LONG] * 4, _POINTER],
    "scalecom_unpack": [_POINTER, *[_LONG] * 5, _POINTER, _REAL, _INT, _POINTER],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of lanes.h. If the installation found no compiler: None, after one warning."""
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        warn_missing(LIBRARY, error, "the plain-torch kernel is")
        return None
    for name, signature in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = signature, _LONG
    return loaded


def checked(result: int) -> int:
    """The result of a move. Raises RuntimeError if the move refused its offsets."""
    if result == REFUSED:
        raise RuntimeError(OFFSETS_OUTSIDE)
    return result


def warn_missing(path: Path, error: Exception, instead: str) -> None:
    """Log a warning that a library of the kernel is missing or cannot be used.

    instead: what is used instead, with its verb.
    """
    missing = "was not built (no C compiler at installation?)"
    log.warning(
        "the native kernel %s, so %s used instead, which is several times slower. %s",
        f"cannot be loaded ({error})" if path.exists() else missing,
        instead,
        how_to_have(),
    )


def how_to_have() -> str:
    """A sentence: what to do if the native kernel is missing."""
    return f"To have the native kernel, {' '.join(repair(checkout()))}"


def checkout() -> str:
    """The checkout from which Python imports this package; empty: the package is installed."""
    folder = Path(__file__).parents[2]
    return str(folder) if (folder / "setup.py").exists() else ""


def repair(checkout: str) -> tuple[str, str]:
    """What to do if the native kernel is missing: in words, and the command that builds it."""
    words = "install a C compiler (Debian, Ubuntu: apt install gcc) and run"
    if not checkout:
        return words, "pip install --force-reinstall --no-deps scalecom_hvd"
    elsewhere = "start Python outside of the checkout, if the package is installed too, or "
    return elsewhere + words, f"pip install -e {checkout}"
