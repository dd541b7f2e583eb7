"""The C lane kernel (lanes.c), loaded through ctypes: raw addresses in, so any framework can call it, and the GIL is released.

`library()` gives the functions, or None where the package was installed without a compiler. Imports no framework.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

log = logging.getLogger("scalecom_hvd")

# The codes of lanes.c.
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE = 0, 1, 2

_POINTER, _LONG, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_GEOMETRY = [_LONG, _LONG, _LONG, _LONG]
_SIGNATURES = {
    "scalecom_pass": [_INT, _POINTER, _POINTER, *_GEOMETRY, _REAL, _REAL, _INT, _POINTER, _INT],
    "scalecom_gather": [_INT, _POINTER, _POINTER, *_GEOMETRY, _REAL, _REAL, _REAL, _POINTER, _INT, _INT, _REAL, _POINTER],
    "scalecom_scatter": [_INT, _POINTER, *_GEOMETRY, _REAL, _POINTER, _INT, _INT, _POINTER],
    "scalecom_undo": [_INT, _POINTER, _POINTER, *_GEOMETRY, _REAL, _REAL, _POINTER, _INT, _INT, _POINTER],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None, with one warning, if it was not built."""
    path = Path(__file__).with_name("_lanes.so")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        reason = f"cannot be loaded ({error})" if path.exists() else "was not built (no C compiler at installation?)"
        log.warning(
            "the native kernel %s, so the plain-torch kernel is used, which is several times slower; to have it, install a C compiler "
            "and run pip install --force-reinstall --no-deps scalecom_hvd again",
            reason,
        )
        return None
    for name, signature in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = signature, _LONG
    return loaded
