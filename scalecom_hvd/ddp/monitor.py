"""Monitor with torch.distributed's ranks. Imports diagnostics_sampler of exchange/."""

from __future__ import annotations

import torch.distributed as dist

from scalecom_hvd import monitoring
from scalecom_hvd.exchange.diagnostics_sampler import open_tensorboard


class Monitor(monitoring.Monitor):  # noqa: D101 (it is that one's)
    __doc__ = monitoring.Monitor.__doc__

    _rank = staticmethod(lambda: dist.get_rank() if dist.is_initialized() else 0)
    _open_tensorboard = staticmethod(open_tensorboard)
