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
from scalecom_hvd.exchange import public_names
from scalecom_hvd.exchange.collectives import CollectiveError, Collectives, Wait, Work
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Face, Options
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.methods import ScaleCom
from scalecom_hvd.exchange.public_names import *  # noqa: F403
from scalecom_hvd.exchange.simulator import Simulation

__all__ = ["CollectiveError", "Collectives", "Numbers", "Wait", "Work"]
__all__ += ["Exchange", "Face", "LocalSteps", "Options", "ScaleCom", "Simulation"]
__all__ += public_names.__all__
