"""ScaleCom gradient compression for Horovod.

`import scalecom_hvd.torch as hvd` is what training scripts write. This package itself imports no framework: only the
hyper-parameters, which are the same for all of them.
"""

from scalecom_hvd.config import ScaleComConfig

__version__ = "0.1.0"
__all__ = ["ScaleComConfig", "__version__"]
