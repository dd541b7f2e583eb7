"""ScaleCom over torch.distributed: for scripts that torchrun launches. No Horovod, and no MPI.

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

model = DistributedDataParallel(model)
state = ScaleComState(model)
model.register_comm_hook(state, scalecom_hook)
"""

from scalecom_hvd.missing import explained as _explained

try:
    import torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise _explained(_error, "scalecom_hvd.ddp") from _error

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.ddp.checkpoint import PerRank
from scalecom_hvd.ddp.hook import ScaleComState, scalecom_hook
from scalecom_hvd.ddp.monitor import Monitor
from scalecom_hvd.ddp.optimizer import DistributedOptimizer, broadcast_parameters
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.exchange import (
    ECQSGD,
    QSGD,
    BinMeans,
    BucketCollectives,
    GlobalTopK,
    GTopK,
    LocalTopK,
    Method,
    Quantiser,
    RandomK,
    ScaleCom,
    Sign,
    State,
    diloco,
    rates_from_flops,
    sparseloco,
)

__all__ = [
    "ECQSGD",
    "QSGD",
    "BinMeans",
    "BucketCollectives",
    "Diagnostics",
    "DistributedOptimizer",
    "GTopK",
    "GlobalTopK",
    "LocalTopK",
    "Method",
    "Monitor",
    "PerRank",
    "Quantiser",
    "RandomK",
    "ScaleCom",
    "ScaleComConfig",
    "ScaleComState",
    "Sign",
    "State",
    "broadcast_parameters",
    "diloco",
    "rates_from_flops",
    "scalecom_hook",
    "sparseloco",
]
