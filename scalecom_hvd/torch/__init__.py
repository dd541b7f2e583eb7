"""`import scalecom_hvd.torch as hvd`: everything in horovod.torch, plus what this package adds.

These replace Horovod's of the same name: DistributedOptimizer (which takes ScaleCom),
broadcast_parameters, elastic, join, and the collectives (their calls get names).
"""

from __future__ import annotations

from typing import Any

from scalecom_hvd import missing as _missing

try:
    import horovod.torch as _horovod
    from horovod.torch import *  # noqa: F403
except ModuleNotFoundError as _error:
    raise _missing.explained(_error, "scalecom_hvd.torch") from _error

import scalecom_hvd.torch.elastic  # noqa: F401  Over Horovod's: its states keep residues.
from scalecom_hvd import monitoring as _monitoring
from scalecom_hvd.agreement import JOIN_REFUSED as _JOIN_REFUSED
from scalecom_hvd.exchange import public_names as _public_names
from scalecom_hvd.exchange.background_thread import wait_for_kept as _wait_for_kept
from scalecom_hvd.exchange.public_names import *  # noqa: F403
from scalecom_hvd.torch.collective_names import named_collectives as _named_collectives
from scalecom_hvd.torch.compressor import ScaleCom
from scalecom_hvd.torch.horovod_collectives import exchanges_alive as _exchanges_alive
from scalecom_hvd.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from scalecom_hvd.torch.optimizer import broadcast_parameters as broadcast_parameters

globals().update(_named_collectives())
Monitor = _monitoring.for_face(_horovod.rank)


def join(device: int = -1) -> int:
    """Horovod's join, for processes in which no optimizer uses ScaleCom.

    Args:
        device: as in Horovod.

    Returns:
        The rank that joined last.

    Raises:
        RuntimeError: an optimizer uses ScaleCom, and join would break its broadcasts.
    """
    # Wait for averages that still travel for dropped optimizers: if only some ranks have submitted
    # a collective, Horovod 0.28.1's join() ends in a segmentation fault.
    _wait_for_kept()
    if _exchanges_alive():
        raise RuntimeError(_JOIN_REFUSED)
    return _horovod.join(device)


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)


__all__ = [name for name in dir(_horovod) if not name.startswith("_")] + ["Monitor", "ScaleCom"]
__all__ += _public_names.__all__
