"""What a rank keeps between steps: residues by name, and how far each exchange has come.

All of it is kept in TensorFlow variables, which are made outside of any function being traced. They
belong to no optimizer or model, because Horovod would broadcast rank 0's and Keras would save them.
tf.train.Checkpoint tracks them through ScaleCom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.lanes import geometry
from scalecom_hvd.recent_norms import KEPT, LEAST, SMALLEST
from scalecom_hvd.saved_state import norms_of

_EXPONENT = 0x7FF << 52
"""The bits of a float64's exponent. They alone are the largest power of two that is not larger."""


def make_variable(
    shape: tuple[int, ...], dtype: tf.DType, name: str, device: str = ""
) -> tf.Variable:
    """A variable of zeros."""

    def make() -> tf.Variable:
        with tf.device(device):
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

    # On another thread no function is being traced. A function that is being traced refuses
    # variables after its first trace, even in init_scope.
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(make).result()


def value_of(variable: tf.Variable) -> np.ndarray:
    """The value as an array, even while a function is traced."""
    with tf.init_scope():
        return variable.numpy()


def set_value(variable: tf.Variable, value: ArrayLike) -> None:
    """Make this the variable's value, even while a function is traced."""
    with tf.init_scope():
        variable.assign(np.asarray(value, variable.dtype.as_numpy_dtype).reshape(variable.shape))


class CompressedTensor:
    """One compressed variable on this rank. Its residue (N,) is zero at the start.

    Attributes:
        recent: (3,), what recent_norms.RecentNorms holds: longest, count and outliers.
    """

    def __init__(
        self, name: str, variable: tf.Variable, rate: float, config: ScaleComConfig
    ) -> None:
        self.name, self.shape = name, tuple(variable.shape)
        numel = math.prod(self.shape)
        self.lanes = geometry(numel, rate, config.selection)  # or positions
        # The residue's, float32 or float64.
        self.dtype = tf.as_dtype(config.residue_dtype_for(variable.dtype.name))
        self.wire_dtype = tf.int8 if config.levels else self.dtype  # before integers are packed
        self.residue = make_variable((numel,), self.dtype, f"scalecom/{name}", variable.device)
        self.recent = make_variable((3,), tf.float64, f"scalecom/{name}/recent")


def shares_of(norms: tf.Tensor, recent: tf.Tensor, times: float) -> tuple[tf.Tensor, tf.Tensor]:
    """What RecentNorms.share says of several tensors, to the bit: the shares, and what it notes.

    Args:
        norms: (n,), of the tensors' gradients.
        recent: (n, 3), the tensors' `recent`.
        times: as in RecentNorms.share.

    Returns:
        (n,), what the residues must be multiplied by, and (n, 3), the new `recent`.
    """
    longest, count, outliers = tf.unstack(recent, axis=1)
    counts = (norms >= SMALLEST) & tf.math.is_finite(norms)
    limit = tf.where(count >= LEAST, times * longest, math.inf)
    is_outlier = counts & (norms > limit)
    power = tf.bitwise.bitwise_and(tf.bitcast(limit / norms, tf.int64), _EXPONENT)
    shares = tf.where(is_outlier, tf.bitcast(power, norms.dtype), 1)
    longest = tf.where(counts, tf.maximum(norms * shares, KEPT * longest), longest)
    count += tf.cast(counts, count.dtype)
    return shares, tf.stack([longest, count, outliers + tf.cast(is_outlier, count.dtype)], 1)


# Checkpoints track it like a tf.Module. But if a model holds it as an attribute, its variables are
# not the model's: a model's variables are broadcast, and these are every rank's own.
Tracked: Any = tf.__internal__.tracking.AutoTrackable


class Progress(Tracked):
    """How far one exchange has come.

    Attributes:
        step, skipped: how many steps counted, and how many did not (a gradient was not finite).
        ranks: how many ranks there were.
        norms: (2, 3), the last three norms of residues, and of gradients.
        warned: whether the user has been warned about growing residues.
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        self.step, self.skipped, self.ranks = (
            make_variable((), tf.int64, f"scalecom/{label}/{what}")
            for what in ("step", "skipped", "ranks")
        )
        self.warned = make_variable((), tf.bool, f"scalecom/{label}/warned")
        self.norms = make_variable((2, 3), tf.float64, f"scalecom/{label}/norms")

    def as_dict(self) -> dict[str, Any]:
        """What `take_up` reads: plain numbers and an array."""
        step, ranks = int(value_of(self.step)), int(value_of(self.ranks))
        return {"step": step, "ranks": ranks, "norms": value_of(self.norms)}

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `as_dict` gave. Raises ValueError if its norms are damaged."""
        norms = norms_of(saved)
        set_value(self.step, saved["step"])
        set_value(self.ranks, saved.get("ranks", 0))
        set_value(self.norms, norms)
