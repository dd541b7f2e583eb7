"""The script's loss scale, by which gradients are larger than what residues hold.

Imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

# A Keras LossScaleOptimizer, or a callable that gives the current scale.
LossScale: TypeAlias = (
    tf.keras.mixed_precision.LossScaleOptimizer | Callable[[], float | tf.Tensor | tf.Variable]
)


def scale_reader(loss_scale: LossScale | None) -> Callable[[], tf.Tensor | None]:
    """A function that gives the loss scale as a tensor, or None for 1."""
    if loss_scale is None:
        return lambda: None
    if hasattr(loss_scale, "loss_scale"):
        optimizer: Any = loss_scale
        return lambda: tf.convert_to_tensor(optimizer.loss_scale)
    if not callable(loss_scale):
        raise TypeError(
            "loss_scale must be a LossScaleOptimizer or a callable that gives the current scale, "
            f"not {loss_scale!r}"
        )

    def read() -> tf.Tensor:
        scale = loss_scale()
        if not tf.executing_eagerly() and not isinstance(scale, (tf.Tensor, tf.Variable)):
            raise TypeError(
                "in a traced function loss_scale must give a tf.Tensor or tf.Variable, such as "
                f"`lambda: optimizer.loss_scale`. With a number ({scale!r}), the scale would never "
                "change again"
            )
        return tf.cast(scale, tf.float64)

    return read
