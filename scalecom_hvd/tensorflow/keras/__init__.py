"""`import scalecom_hvd.tensorflow.keras as hvd`: all of horovod.tensorflow.keras, and ScaleCom.

Its optimizers accept ScaleCom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module as _import_module
from typing import Any

import horovod._keras as _implementation
import horovod.tensorflow as _horovod_tensorflow
import horovod.tensorflow.keras as _horovod
import tensorflow as tf
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.keras import *  # noqa: F403

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.missing import attribute as _attribute
from scalecom_hvd.tensorflow.compressor import ScaleCom
from scalecom_hvd.tensorflow.compressor import is_scalecom as _is_scalecom
from scalecom_hvd.tensorflow.monitor import Monitor, MonitorCallback
from scalecom_hvd.tensorflow.optimizer import KerasOptimizer as _KerasOptimizer
from scalecom_hvd.tensorflow.optimizer import check_optimizer as _check_optimizer
from scalecom_hvd.tensorflow.optimizer import keras_optimizer as _keras_optimizer

# This replaces Horovod's module, which the star imported.
elastic = _import_module("scalecom_hvd.tensorflow.keras.elastic")


@tf.autograph.experimental.do_not_convert
def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: _KerasOptimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = _horovod_tensorflow.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: _horovod_tensorflow.ProcessSet = _horovod_tensorflow.global_process_set,
    scale_local_gradients: bool = True,
) -> _KerasOptimizer:
    """Horovod's DistributedOptimizer, which also takes `ScaleCom`.

    Args:
        compression: ScaleCom, the class or an instance. With any other compression, this calls
            Horovod's own function unchanged.
        groups: which variables share a bucket.

    All other arguments work as in Horovod.

    Returns:
        Horovod's optimizer with one more attribute, `compression`: the ScaleCom with this rank's
        residues.

    Raises:
        ValueError: ScaleCom does not support an argument (operations other than Average and Sum).
    """
    given = dict(locals())
    _check_optimizer(optimizer, compression)
    make = _keras_optimizer if _is_scalecom(compression) else _horovod.DistributedOptimizer
    return make(**given)


def PartialDistributedOptimizer(  # noqa: N802 (of horovod.keras; horovod.tensorflow.keras lacks it)
    optimizer: _KerasOptimizer,
    *args: Any,
    local_layers: tf.keras.layers.Layer | Iterable[tf.keras.layers.Layer] | None = None,
    **kwargs: Any,
) -> _KerasOptimizer:
    """DistributedOptimizer, with some layers whose gradients stay on their rank.

    Args:
        optimizer, args, kwargs: as in DistributedOptimizer.
        local_layers: the layers whose gradients stay on their rank. They must be built.

    Raises:
        ValueError: `local_layers` are no layers; or as in DistributedOptimizer.
    """
    one = isinstance(local_layers, tf.keras.layers.Layer)
    layers: list[tf.keras.layers.Layer] = [local_layers] if one else list(local_layers or ())
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    legacy_opts: bool = False,
) -> tf.keras.Model:
    """Horovod's load_model, which also takes `ScaleCom`.

    The model's optimizer comes wrapped, with its state. Load the residues separately
    (ScaleCom.load_state_dict, tf.train.Checkpoint).
    """

    def wrap(optimizer_class: type) -> Any:
        return lambda **fields: DistributedOptimizer(
            optimizer_class(**fields), compression=compression
        )

    return _implementation.load_model(
        tf.keras, wrap, filepath, custom_optimizers, custom_objects, legacy_opts
    )


def __getattr__(name: str) -> Any:
    return _attribute(_horovod, name, __name__)


__all__ = [
    *(name for name in dir(_horovod) if not name.startswith("_")),
    "Monitor",
    "MonitorCallback",
    "PartialDistributedOptimizer",
    "ScaleCom",
    "ScaleComConfig",
]
