"""The drop-in DistributedOptimizer and tapes.

They are Horovod's own objects. Only the attribute through which they reduce is replaced, and the
method by which a Keras optimizer updates variables is wrapped (momentum.py). Hooks, aggregation
over several passes, local variables, casts and configurations stay Horovod's.
Imports compressor, exchange, momentum, reduction and transport.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import horovod.tensorflow as horovod
import horovod.tensorflow.keras as horovod_keras
import tensorflow as tf
from horovod.tensorflow.compression import Compression, Compressor

from scalecom_hvd.agreement import check_arguments, check_compression
from scalecom_hvd.tensorflow.compressor import ScaleCom, is_scalecom, shared
from scalecom_hvd.tensorflow.exchange import Arguments
from scalecom_hvd.tensorflow.momentum import mix_momentum
from scalecom_hvd.tensorflow.reduction import Reduction, reduction
from scalecom_hvd.tensorflow.transport import TENSORFLOW_1

_LOSS_SCALE_INSIDE = (
    "Horovod cannot wrap a LossScaleOptimizer. Wrap its inner optimizer, and give ScaleCom the "
    "scale: optimizer = LossScaleOptimizer(hvd.DistributedOptimizer(inner, "
    "compression=hvd.ScaleCom(loss_scale=lambda: optimizer.loss_scale)))"
)
_LOSS_SCALE_UNKNOWN = (
    "an optimizer inside a LossScaleOptimizer receives scaled gradients. The scale changes while "
    "residues wait, so ScaleCom must know the scale. Give "
    "compression=hvd.ScaleCom(loss_scale=lambda: optimizer.loss_scale), or, if model.compile wraps "
    "the optimizer (the policy mixed_float16), lambda: model.optimizer.loss_scale"
)

KerasOptimizer = TypeVar(
    "KerasOptimizer", bound=tf.keras.optimizers.Optimizer | tf.keras.optimizers.legacy.Optimizer
)
AnyOptimizer = TypeVar(
    "AnyOptimizer",
    bound=tf.keras.optimizers.Optimizer
    | tf.keras.optimizers.legacy.Optimizer
    | tf.compat.v1.train.Optimizer,
)


@tf.autograph.experimental.do_not_convert
def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: AnyOptimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: horovod.ProcessSet = horovod.global_process_set,
    scale_local_gradients: bool = True,
) -> AnyOptimizer:
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
        TypeError: ScaleCom does not support optimizers of TensorFlow 1.
        ValueError: ScaleCom does not support an argument (Adasum, operations other than Average and
            Sum).
    """
    given = dict(locals())
    check_optimizer(optimizer, compression)
    if not is_scalecom(compression):
        return horovod.DistributedOptimizer(**given)
    del given["use_locking"]  # of TensorFlow 1
    return keras_optimizer(**given)


def keras_optimizer(optimizer: KerasOptimizer, **given: Any) -> KerasOptimizer:
    """horovod.tensorflow.keras.DistributedOptimizer with ScaleCom.

    Args:
        optimizer: Keras's.
        given: Horovod's arguments, by name.

    Raises:
        TypeError: the optimizer is a LossScaleOptimizer. Also raised later, if a LossScaleOptimizer
            is put around it and the ScaleCom does not know the scale.
        ValueError: ScaleCom does not support an argument.
    """
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise TypeError(_LOSS_SCALE_INSIDE)
    compressor = _object_of(given["compression"])
    arguments, stock = _arguments(given)
    wrapped = horovod_keras.DistributedOptimizer(optimizer, **stock)
    reduce = reduction(compressor, arguments, wrapped._name)
    # Horovod makes a class for every optimizer it wraps, so this changes no other optimizer. Keras
    # makes new objects of the class (from_config).
    made, init = type(wrapped), type(wrapped).__init__
    compressor.serve_optimizer()
    if compressor.config.nu != 1:
        mix_momentum(made, compressor)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _replace_reduction(self, reduce)

    made.__init__ = __init__
    # This is a property because an attribute would become a part of checkpoints and saved models,
    # which hold one rank's state for all ranks.
    made.compression = property(
        lambda self: compressor, doc="The ScaleCom of this optimizer: stats(), state_dict()."
    )

    # Keras sets this when it puts a LossScaleOptimizer around the optimizer.
    def is_scaled(self: Any, value: bool) -> None:
        if value and not compressor.knows_loss_scale:
            raise TypeError(_LOSS_SCALE_UNKNOWN)
        self.__dict__["_is_wrapped_by_loss_scale_optimizer"] = value

    made._is_wrapped_by_loss_scale_optimizer = property(
        lambda self: self.__dict__.get("_is_wrapped_by_loss_scale_optimizer", False), is_scaled
    )
    _replace_reduction(wrapped, reduce)
    return wrapped


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: horovod.ProcessSet = horovod.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Horovod's DistributedGradientTape, which also takes `ScaleCom`.

    Tapes are made anew for every step, and the ScaleCom keeps the residues. Make one ScaleCom
    outside the step, and pass it to every tape. A persistent tape may be asked for several
    gradients of the same variables in a step. The second, third, ... gradient of every step then
    has residues of its own.

    Args:
        compression: ScaleCom, the class or an instance. If it is the class, all tapes of the
            process share one object. With any other compression, this calls Horovod's own function
            unchanged.
        groups: which variables share a bucket.

    All other arguments work as in Horovod.

    Raises:
        ValueError: ScaleCom does not support an argument (Adasum, operations other than Average and
            Sum).
    """
    return _tape(horovod.DistributedGradientTape, dict(locals()))


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[tf.Variable]] | None = None,
    process_set: horovod.ProcessSet = horovod.global_process_set,
    local_layers: tf.keras.layers.Layer | Iterable[tf.keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Horovod's PartialDistributedGradientTape, which also takes `ScaleCom`.

    Args:
        local_layers: layers whose gradients stay on their rank.

    All other arguments work as in DistributedGradientTape.

    Raises:
        ValueError: ScaleCom does not support an argument (Adasum, operations other than Average and
            Sum).
    """
    return _tape(horovod.PartialDistributedGradientTape, dict(locals()))


def check_optimizer(optimizer: object, compression: object) -> None:
    """Raise TypeError unless given an optimizer that the compression supports."""
    of_tensorflow_1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    has = "get_name" if of_tensorflow_1 else "get_config"
    check_arguments(optimizer, has, "Keras and TensorFlow", compression)
    if of_tensorflow_1 and is_scalecom(compression):
        raise TypeError(TENSORFLOW_1)


def _tape(make: Callable[..., tf.GradientTape], given: dict[str, Any]) -> tf.GradientTape:
    compression = given["compression"]
    check_compression(compression)
    if not is_scalecom(compression):
        return make(**given)
    compressor = compression if isinstance(compression, ScaleCom) else shared()
    gradtape = given.pop("gradtape")
    arguments, stock = _arguments(given)
    compressor.serve_tape()
    tape = make(gradtape, **stock)
    calls: dict[Hashable, int] = {}
    tape._allreduce_grads = reduction(compressor, arguments, "DistributedGradientTape", calls)
    return tape


def _arguments(given: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
    """The exchange's arguments, and Horovod's arguments by name, for all the rest."""
    given = {
        name: value for name, value in given.items() if name not in ("optimizer", "compression")
    }
    num_groups = given.pop("num_groups")
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=4)
        given["groups"] = num_groups if given["groups"] is None else given["groups"]
    arguments = Arguments(**{name: given[name] for name in inspect.signature(Arguments).parameters})
    arguments.check()
    # Groups are this exchange's buckets.
    return arguments, {name: value for name, value in given.items() if name != "groups"}


def _object_of(compression: type[ScaleCom] | ScaleCom) -> ScaleCom:
    # mypy does not know ScaleCom's bases, so it cannot tell an object from the class.
    if isinstance(compression, ScaleCom):
        return compression  # type: ignore[return-value]
    return compression()


def _replace_reduction(optimizer: Any, reduce: Reduction) -> None:
    optimizer._allreduce_grads = reduce
    helper = optimizer._agg_helper
    if helper is not None:
        helper.allreduce_grads = reduce  # it sums over several passes and calls this itself
