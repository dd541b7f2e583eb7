"""Monitor for Horovod's ranks, and a Keras callback for it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from scalecom_hvd import monitoring

Monitor = monitoring.for_face(horovod.rank)


class MonitorCallback(tf.keras.callbacks.Callback):
    """A Monitor for model.fit.

    Args:
        compression: the ScaleCom. Default: that of the model's optimizer.
        every, tensorboard, writer: as in Monitor.

    Attributes:
        monitor: the Monitor, once training has begun.

    Raises:
        ImportError, TypeError, ValueError: as in Monitor, when training begins.

    Example:
        >>> model.fit(..., callbacks=[hvd.MonitorCallback(tensorboard="runs/scalecom")])
    """

    def __init__(self, compression: Any = None, every: int = 50, **settings: Any) -> None:
        super().__init__()
        self.monitor: monitoring.Monitor | None = None
        self._compression = compression
        self._settings = {"every": every} | settings

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras. A second call of fit goes on with the same monitor."""
        if self.monitor is None:
            optimizer = self.model.optimizer
            source = self._compression or getattr(optimizer, "inner_optimizer", optimizer)
            self.monitor = Monitor(source, **self._settings)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        assert self.monitor is not None, "training has begun"
        self.monitor.step()
