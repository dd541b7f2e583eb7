"""`import scalecom_hvd.tensorflow as hvd`: everything in horovod.tensorflow, and ScaleCom.

Its optimizers and tapes accept ScaleCom.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any

from scalecom_hvd.missing import attribute as _attribute
from scalecom_hvd.missing import explained as _explained

try:
    import horovod.tensorflow as _horovod
    from horovod.tensorflow import *  # noqa: F403
except ModuleNotFoundError as _error:
    raise _explained(_error, "scalecom_hvd.tensorflow") from _error

from scalecom_hvd import monitoring as _monitoring
from scalecom_hvd.agreement import JOIN_REFUSED as _JOIN_REFUSED
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.tensorflow.compressor import ScaleCom
from scalecom_hvd.tensorflow.compressor import all_exchanges as _all_exchanges
from scalecom_hvd.tensorflow.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)

# These replace Horovod's modules, which the star may have imported under the same names. (`from
# scalecom_hvd.tensorflow import ...` would find Horovod's.)
elastic = _import_module("scalecom_hvd.tensorflow.elastic")
keras = _import_module("scalecom_hvd.tensorflow.keras")
Monitor = _monitoring.for_face(_horovod.rank)


def join() -> int:
    """Horovod's join.

    Raises:
        RuntimeError: this process uses ScaleCom, and join would break its gathers of offsets.
    """
    if _all_exchanges():
        raise RuntimeError(_JOIN_REFUSED)
    return _horovod.join()


def __getattr__(name: str) -> Any:
    return _attribute(_horovod, name, __name__)


__all__ = [name for name in dir(_horovod) if not name.startswith("_")]
__all__ += ["DistributedGradientTape", "DistributedOptimizer", "Monitor", "ScaleCom"]
__all__ += ["PartialDistributedGradientTape", "ScaleComConfig"]
