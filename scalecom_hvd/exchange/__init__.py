"""Compressed gradient exchange for PyTorch, over any collectives: no Horovod is imported here.

`Exchange` averages an optimizer's gradients by a `Method` over `Collectives`. The faces that users
import, such as scalecom_hvd.torch, put it into optimizers.
"""

from scalecom_hvd.missing import explained as _explained

try:
    import torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise _explained(_error, "scalecom_hvd.exchange") from _error

from scalecom_hvd.agreement import Numbers
from scalecom_hvd.exchange.collectives import CollectiveError, Collectives, Wait, Work
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Face, Options
from scalecom_hvd.exchange.flops import rates_from_flops
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.local.recipes import diloco, sparseloco
from scalecom_hvd.exchange.methods import (
    ECQSGD,
    BucketCollectives,
    GlobalTopK,
    GTopK,
    LocalTopK,
    Method,
    RandomK,
    ScaleCom,
    State,
)
from scalecom_hvd.exchange.quantisers import QSGD, BinMeans, Quantiser, Sign
from scalecom_hvd.exchange.simulator import Simulation

__all__ = [
    "ECQSGD",
    "QSGD",
    "BinMeans",
    "BucketCollectives",
    "CollectiveError",
    "Collectives",
    "Exchange",
    "Face",
    "GTopK",
    "GlobalTopK",
    "LocalSteps",
    "LocalTopK",
    "Method",
    "Numbers",
    "Options",
    "Quantiser",
    "RandomK",
    "ScaleCom",
    "Sign",
    "Simulation",
    "State",
    "Wait",
    "Work",
    "diloco",
    "rates_from_flops",
    "sparseloco",
]
