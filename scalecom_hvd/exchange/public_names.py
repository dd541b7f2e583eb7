"""What every face for PyTorch exports besides its own: methods, what they take, and recipes.

ScaleCom itself is not here, because Horovod's face has one of its own.
"""

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.local.recipes import diloco, sparseloco
from scalecom_hvd.exchange.methods import BucketCollectives, LocalTopK, Method, RandomK, State
from scalecom_hvd.exchange.quantisers import BinMeans, Quantiser

__all__ = ["LocalTopK", "RandomK"]
__all__ += ["BucketCollectives", "Method", "State"]
__all__ += ["BinMeans", "Quantiser"]
__all__ += ["ScaleComConfig", "diloco", "sparseloco"]
