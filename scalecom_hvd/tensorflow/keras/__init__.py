"""`import scalecom_hvd.tensorflow.keras as hvd`: all of horovod.tensorflow.keras, and ScaleCom.

Its optimizers accept ScaleCom.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any

import horovod._keras as _implementation
import horovod.tensorflow.keras as _horovod
import tensorflow as tf
from horovod.tensorflow.keras import *  # noqa: F403

from scalecom_hvd import monitoring as _monitoring
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.missing import attribute as _attribute
from scalecom_hvd.tensorflow.compressor import ScaleCom
from scalecom_hvd.tensorflow.optimizer import called_as as _called_as
from scalecom_hvd.tensorflow.optimizer import wrap as _wrap

# This replaces Horovod's module, which the star imported.
elastic = _import_module("scalecom_hvd.tensorflow.keras.elastic")
Monitor = _monitoring.for_face(_horovod.rank)


@_called_as(_horovod.DistributedOptimizer)
def DistributedOptimizer(**given: Any) -> Any:  # noqa: N802 (Horovod's name)
    """Horovod's DistributedOptimizer, which also takes `ScaleCom`.

    The arguments `compression` and `groups`, the result and errors are those of
    scalecom_hvd.tensorflow.DistributedOptimizer. All other arguments work as in Horovod.
    """
    return _wrap(_horovod.DistributedOptimizer, given)


@_called_as(_horovod.load_model)
def load_model(compression: Any, **given: Any) -> tf.keras.Model:
    """Horovod's load_model, which also takes `ScaleCom`.

    The model's optimizer comes wrapped, with its state. Load the residues separately
    (ScaleCom.load_state_dict, tf.train.Checkpoint).
    """

    def wrap(make: type) -> Any:
        return lambda **fields: DistributedOptimizer(make(**fields), compression=compression)

    return _implementation.load_model(tf.keras, wrap, **given)


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
        self.monitor: _monitoring.Monitor | None = None
        self._compression, self._source = compression, None
        self._settings = {"every": every} | settings

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras. Unless the optimizer is another one, the monitor goes on."""
        optimizer = self.model.optimizer
        source = self._compression or getattr(optimizer, "inner_optimizer", optimizer)
        if self.monitor is None or source is not self._source:
            self._source, self.monitor = source, Monitor(source, **self._settings)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        assert self.monitor is not None, "training has begun"
        self.monitor.step()


def __getattr__(name: str) -> Any:
    return _attribute(_horovod, name, __name__)


__all__ = [name for name in dir(_horovod) if not name.startswith("_")]
__all__ += ["Monitor", "MonitorCallback", "ScaleCom", "ScaleComConfig"]
