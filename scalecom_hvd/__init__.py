"""ScaleCom gradient compression for data-parallel training.

`import scalecom_hvd.torch as hvd` is what training scripts write. This package itself imports no
framework: only the hyper-parameters, which are the same for all of them.
"""

__version__ = "0.3.0"

from scalecom_hvd.config import ScaleComConfig  # rooms below ask for the version

__all__ = ["ScaleComConfig", "__version__"]
