"""ScaleCom over torch.distributed: for scripts that torchrun launches. No Horovod, and no MPI.

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

model = DistributedDataParallel(model)
state = ScaleComState(model)
model.register_comm_hook(state, scalecom_hook)
"""

from scalecom_hvd import missing as _missing

try:
    import torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise _missing.explained(_error, "scalecom_hvd.ddp") from _error

import torch.distributed as _dist

from scalecom_hvd import monitoring as _monitoring
from scalecom_hvd.ddp.checkpoint import PerRank
from scalecom_hvd.ddp.hook import ScaleComState, scalecom_hook
from scalecom_hvd.ddp.optimizer import DistributedOptimizer, broadcast_parameters
from scalecom_hvd.exchange import ScaleCom, public_names
from scalecom_hvd.exchange.public_names import *  # noqa: F403

Monitor = _monitoring.for_face(lambda: _dist.get_rank() if _dist.is_initialized() else 0)

__all__ = ["DistributedOptimizer", "Monitor", "PerRank", "broadcast_parameters"]
__all__ += ["ScaleCom", "ScaleComState", "scalecom_hook"]
__all__ += public_names.__all__
