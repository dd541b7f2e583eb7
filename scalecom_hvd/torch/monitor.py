"""Monitor with Horovod's ranks. Imports diagnostics_sampler of exchange/."""

from __future__ import annotations

import horovod.torch as horovod

from scalecom_hvd import monitoring
from scalecom_hvd.exchange.diagnostics_sampler import open_tensorboard


class Monitor(monitoring.Monitor):  # noqa: D101 (it is that one's)
    __doc__ = monitoring.Monitor.__doc__

    _rank = staticmethod(horovod.rank)
    _open_tensorboard = staticmethod(open_tensorboard)
