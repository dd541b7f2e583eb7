"""Monitor with Horovod's ranks."""

from __future__ import annotations

import horovod.torch as horovod

from scalecom_hvd import monitoring


class Monitor(monitoring.Monitor):  # noqa: D101 (it is that one's)
    __doc__ = monitoring.Monitor.__doc__

    _rank = staticmethod(horovod.rank)
