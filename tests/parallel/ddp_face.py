"""scalecom_hvd.ddp, plus those names of Horovod's that the tests of both faces use."""

from ddp_stock import *  # noqa: F403
from ddp_stock import Compression

from scalecom_hvd.ddp import *  # noqa: F403
from scalecom_hvd.ddp import DistributedOptimizer as _DistributedOptimizer


def DistributedOptimizer(optimizer, *args, compression=Compression.none, **more):  # noqa: N802
    return _DistributedOptimizer(optimizer, *args, compression=compression, **more)
