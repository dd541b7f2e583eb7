"""The drop-in DistributedOptimizer and tapes.

They are Horovod's own objects. Only the attribute through which they reduce is replaced, and the
method by which a Keras optimizer updates variables is wrapped (momentum.py). Hooks, aggregation
over several passes, local variables, casts and configurations stay Horovod's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import horovod.tensorflow as horovod
import horovod.tensorflow.keras as horovod_keras
import tensorflow as tf

from scalecom_hvd.agreement import check_arguments, check_compression, check_operation
from scalecom_hvd.tensorflow.compressor import ScaleCom, is_scalecom, shared
from scalecom_hvd.tensorflow.momentum import mix_momentum
from scalecom_hvd.tensorflow.reduction import Reduction, reduction
from scalecom_hvd.tensorflow.transport import TENSORFLOW_1, Arguments

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


def called_as(theirs: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function be called as Horovod's is. It gets all of Horovod's arguments, by name."""
    signature = inspect.signature(theirs)

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return ours(**given.arguments)

        call.__wrapped__ = theirs  # so this is the signature that help() shows
        return tf.autograph.experimental.do_not_convert(call)

    return decorate


@called_as(horovod.DistributedOptimizer)
def DistributedOptimizer(**given: Any) -> Any:  # noqa: N802 (Horovod's name)
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
    return wrap(horovod.DistributedOptimizer, given)


def wrap(theirs: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What a DistributedOptimizer returns. theirs: Horovod's own, for other compressions."""
    optimizer, compression = given["optimizer"], given["compression"]
    of_tensorflow_1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    has = "get_name" if of_tensorflow_1 else "get_config"
    check_arguments(optimizer, has, "Keras and TensorFlow", compression)
    if not is_scalecom(compression):
        return theirs(**given)
    if of_tensorflow_1:
        raise TypeError(TENSORFLOW_1)
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise TypeError(_LOSS_SCALE_INSIDE)
    compressor = compression if isinstance(compression, ScaleCom) else compression()
    # Only optimizers of TensorFlow 1 have locks.
    given = {what: given[what] for what in given.keys() - {"compression", "use_locking"}}
    arguments = _arguments_of(given)
    wrapped = horovod_keras.DistributedOptimizer(**given)
    reduce = reduction(compressor, arguments, wrapped._name)
    # Horovod makes a class for every optimizer it wraps, so this changes no other. Keras makes new
    # objects of the class (from_config).
    made, init = type(wrapped), type(wrapped).__init__
    compressor.serve(mixes_momentum=True)
    if compressor.config.nu != 1:
        mix_momentum(made, compressor)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _replace_reduction(self, reduce)

    made.__init__ = __init__
    # An attribute would become a part of checkpoints and saved models, which hold one rank's state
    # for all ranks.
    made.compression = property(
        lambda self: compressor, doc="The ScaleCom of this optimizer: stats(), state_dict()."
    )

    # Keras sets this when it puts a LossScaleOptimizer around the optimizer.
    attribute = "_is_wrapped_by_loss_scale_optimizer"

    def is_scaled(self: Any, value: bool) -> None:
        if value and not compressor.knows_loss_scale:
            raise TypeError(_LOSS_SCALE_UNKNOWN)
        self.__dict__[attribute] = value

    setattr(made, attribute, property(lambda self: self.__dict__.get(attribute, False), is_scaled))
    _replace_reduction(wrapped, reduce)
    return wrapped


@called_as(horovod.DistributedGradientTape)
def DistributedGradientTape(**given: Any) -> tf.GradientTape:  # noqa: N802 (Horovod's name)
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
    return _tape(horovod.DistributedGradientTape, **given)


@called_as(horovod.PartialDistributedGradientTape)
def PartialDistributedGradientTape(**given: Any) -> tf.GradientTape:  # noqa: N802 (Horovod's name)
    """Horovod's PartialDistributedGradientTape, which also takes `ScaleCom`.

    Args:
        local_layers: layers whose gradients stay on their rank.

    All other arguments, and the errors, are those of DistributedGradientTape.
    """
    return _tape(horovod.PartialDistributedGradientTape, **given)


def _tape(
    make: Callable[..., tf.GradientTape], gradtape: tf.GradientTape, compression: Any, **given: Any
) -> tf.GradientTape:
    check_compression(compression)
    if not is_scalecom(compression):
        return make(gradtape, compression=compression, **given)
    compressor = compression if isinstance(compression, ScaleCom) else shared()
    arguments = _arguments_of(given)
    compressor.serve(mixes_momentum=False)
    tape = make(gradtape, **given)
    calls: dict[Hashable, int] = {}
    tape._allreduce_grads = reduction(compressor, arguments, "DistributedGradientTape", calls)
    return tape


def _arguments_of(given: dict[str, Any]) -> Arguments:
    """The exchange's arguments. Horovod gets them, too, and checks the groups."""
    check_operation(given["op"], given["gradient_predivide_factor"], horovod)
    groups = given["num_groups"] or None if given["groups"] is None else given["groups"]
    if isinstance(groups, list):
        groups = tuple(tuple(variable.ref() for variable in group) for group in groups)
    fields = {name: given[name] for name in inspect.signature(Arguments).parameters}
    return Arguments(**fields | {"groups": groups})


def _replace_reduction(optimizer: Any, reduce: Reduction) -> None:
    optimizer._allreduce_grads = reduce
    helper = optimizer._agg_helper
    if helper is not None:
        helper.allreduce_grads = reduce  # it sums over several passes and calls this itself
