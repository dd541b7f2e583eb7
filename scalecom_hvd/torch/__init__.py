"""`import scalecom_hvd.torch as hvd`: everything in horovod.torch, with ScaleCom and a DistributedOptimizer that knows it."""

from __future__ import annotations

from typing import Any

import horovod.torch as _horovod
from horovod.torch import *  # noqa: F403

import scalecom_hvd.torch.elastic  # noqa: F401  in place of Horovod's `elastic`; tells Horovod's elastic states of residues
from scalecom_hvd.agreement import JOIN_REFUSED as _JOIN_REFUSED
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.torch.compressor import ScaleCom
from scalecom_hvd.torch.flops import rates_from_flops
from scalecom_hvd.torch.local_steps import broadcast_parameters as broadcast_parameters  # over Horovod's
from scalecom_hvd.torch.methods import *  # noqa: F403
from scalecom_hvd.torch.methods import __all__ as _METHODS
from scalecom_hvd.torch.named import named_collectives as _named_collectives
from scalecom_hvd.torch.optimizer import DistributedOptimizer as DistributedOptimizer  # exported, over Horovod's
from scalecom_hvd.torch.quantisers import QSGD, Float16, Quantiser, Sign
from scalecom_hvd.torch.transport import exchanges_alive as _exchanges_alive

globals().update(_named_collectives(_horovod))


def join(device: int = -1) -> int:
    """Horovod's join. Raises RuntimeError where an optimizer of this process uses ScaleCom, whose broadcasts it would break."""
    if _exchanges_alive():
        raise RuntimeError(_JOIN_REFUSED)
    return _horovod.join(device)


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)


__all__ = [name for name in dir(_horovod) if not name.startswith("_")] + [
    "QSGD",
    "Diagnostics",
    "Float16",
    "Quantiser",
    "ScaleCom",
    "ScaleComConfig",
    "Sign",
    "rates_from_flops",
    *_METHODS,
]
