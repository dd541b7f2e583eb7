"""`import scalecom_hvd.tensorflow.keras as hvd`: everything in horovod.tensorflow.keras, with ScaleCom and optimizers that know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module as _import_module
from typing import Any

import horovod._keras as _implementation
import horovod.tensorflow as _horovod_tensorflow
import horovod.tensorflow.keras as _horovod
import tensorflow as tf
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras import *  # noqa: F403

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.tensorflow.compressor import ScaleCom
from scalecom_hvd.tensorflow.compressor import is_scalecom as _is_scalecom
from scalecom_hvd.tensorflow.optimizer import keras_optimizer as _keras_optimizer

# Over Horovod's, which the star brought.
elastic = _import_module("scalecom_hvd.tensorflow.keras.elastic")


@tf.autograph.experimental.do_not_convert
def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = _horovod_tensorflow.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: Any = _horovod_tensorflow.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """horovod.tensorflow.keras.DistributedOptimizer, which besides Horovod's compressors takes `ScaleCom`, the class or an instance.

    With any other compression this is Horovod's own function, untouched. All arguments mean what they mean there; `groups` says which
    variables share a bucket. The returned optimizer has one attribute more, `compression`: the ScaleCom with this rank's residues.

    Raises ValueError for what ScaleCom cannot do (operations other than Average and Sum).
    """
    given = dict(locals())
    return _keras_optimizer(**given) if _is_scalecom(compression) else _horovod.DistributedOptimizer(**given)


def PartialDistributedOptimizer(  # noqa: N802 (the name in horovod.keras; horovod.tensorflow.keras lacks it)
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """DistributedOptimizer, whose `local_layers` (one or several tf.keras.layers.Layer, built) keep their gradients to their rank."""
    layers = [] if local_layers is None else [local_layers] if isinstance(local_layers, tf.keras.layers.Layer) else list(local_layers)
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
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> tf.keras.Model:
    """horovod.tensorflow.keras.load_model, which besides Horovod's compressors takes `ScaleCom`: the model comes with its optimizer
    wrapped, and with that optimizer's state; residues are loaded apart (ScaleCom.load_state_dict, tf.train.Checkpoint)."""

    def wrap(optimizer_class: type) -> Any:
        return lambda **kwargs: DistributedOptimizer(optimizer_class(**kwargs), compression=compression)

    return _implementation.load_model(tf.keras, wrap, filepath, custom_optimizers, custom_objects, legacy_opts)


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)


__all__ = [name for name in dir(_horovod) if not name.startswith("_")] + ["PartialDistributedOptimizer", "ScaleCom", "ScaleComConfig"]
