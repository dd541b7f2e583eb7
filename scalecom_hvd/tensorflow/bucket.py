"""A bucket: variables whose gradients share one gather of offsets and one all-reduce.

This module builds a bucket's part of a step in the graph. Narrow offsets travel two to a byte, and
integers as fields of words, as bucket_layout.py and integers.py define it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import NamedTuple

import tensorflow as tf

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.integers import field_bits, words_of
from scalecom_hvd.schedule import leader
from scalecom_hvd.tensorflow import kernels
from scalecom_hvd.tensorflow.residues import CompressedTensor
from scalecom_hvd.tensorflow.transport import Transport


class Now(NamedTuple):
    """What all buckets need to know about a step.

    Attributes:
        step: its number.
        size, position: how many ranks there are, and which of them this one is.
        scale: 1 / loss scale, a scalar; None for 1.
        whole: whether it is sent whole; plain False if that is known when the graph is made.
    """

    step: tf.Tensor
    size: int | tf.Tensor
    position: int | tf.Tensor
    scale: tf.Tensor | None
    whole: bool | tf.Tensor


class BucketResult(NamedTuple):
    """What a bucket's part of a step gives."""

    averages: list[tf.Tensor]  # of the bucket's gradients
    sound: tf.Tensor  # whether the averages count
    updated: list[tf.Tensor]  # what residues become if the step counts


@dataclass(eq=False)
class Bucket:
    """Tensors that share their collectives.

    Values buffer: [values of all compressed tensors | dense tensors | one element that counts
    workers with non-finite gradients]. Integers are packed into words of int32; then the count is
    one more word, and nothing is dense.

    Attributes:
        compressed: the tensors whose offsets and values travel.
        layout: where these lie in the buffers.
    """

    number: int  # its position among the exchange's buckets
    names: list[str]  # of all its variables
    variables: InitVar[Mapping[str, tf.Variable]]
    tensors: InitVar[Mapping[str, CompressedTensor]]
    transport: Transport
    config: ScaleComConfig

    def __post_init__(
        self, variables: Mapping[str, tf.Variable], tensors: Mapping[str, CompressedTensor]
    ) -> None:
        names, config = self.names, self.config
        self.compressed = [tensors[name] for name in names if name in tensors]
        self._dense = [name for name in names if name not in tensors]
        self._elements = {name: math.prod(variables[name].shape) for name in names}
        self._dtype = variables[names[0]].dtype
        self._dense_dtype = tf.float64 if self._dtype == tf.float64 else tf.float32
        self._levels = config.levels if self.compressed else 0
        # If values travel as integers, nothing is dense (Exchange._kind_of).
        self._wire_dtype = self.compressed[0].wire_dtype if self.compressed else self._dense_dtype
        lanes = {tensor.name: tensor.lanes for tensor in self.compressed}
        self.layout = Layout(lanes, has_scales=self._levels > 0)
        self._sizes = [own.k for own in lanes.values()]
        if self.compressed:
            device = tf.DeviceSpec.from_string(self.compressed[0].residue.device).device_type
            same_width = (self.compressed[0].dtype == tf.float64) == (self._dtype == tf.float64)
            kernel = kernels.kernel_for(device or "CPU", config.selection, same_width)
            self._kernel = kernel(lanes, self.layout, self._levels, config.beta, config.extra)

    def bytes_sent(self, size: int, whole: bool) -> tuple[int, int]:
        """The bytes that each of `size` ranks sends in a step: of values, and of all else."""
        if whole:
            return 0, sum(self._elements.values()) * self._dense_dtype.size
        if self._levels:
            return 4 * words_of(self.layout.n_values, self._levels, size), 4
        others = sum(self._elements[name] for name in self._dense) + 1  # and the count
        return self.layout.n_values * self._wire_dtype.size, others * self._wire_dtype.size

    def average(self, grads: Mapping[str, tf.Tensor], now: Now) -> BucketResult:
        """This bucket's part of a step, from gradients (flat) to averages (flat, by `names`)."""
        if now.whole is False:
            return self._average_values(grads, now)
        moves = self._average_whole, self._average_values
        return BucketResult(*tf.cond(now.whole, *(partial(move, grads, now) for move in moves)))

    def _average_whole(self, grads: Mapping[str, tf.Tensor], now: Now) -> BucketResult:
        wide = [tf.cast(grads[name], self._dense_dtype) for name in self.names]
        averages = self.transport.average_each(wide, f"whole.{self.number}")
        # No count is needed: if a worker's gradient is not finite, the average is not either.
        averages = [tf.cast(average, self._dtype) for average in averages]
        residues = [tensor.residue.read_value() for tensor in self.compressed]
        return BucketResult(averages, all_finite(averages), residues)

    def _average_values(self, grads: Mapping[str, tf.Tensor], now: Now) -> BucketResult:
        own = [grads[tensor.name] for tensor in self.compressed]
        updated, parts, bad = [], [], tf.constant(0, tf.int64)
        if self.compressed:
            residues = [tensor.residue.read_value() for tensor in self.compressed]
            choice = self._choice(own, residues, now)
            after = self._kernel.take_and_accumulate(own, residues, now.scale, choice)
            updated, values, bad = list(after[0]), *after[1:]
            parts.append(tf.ensure_shape(values, [self.layout.n_values]))
        if self._dense:
            dense = tf.concat([tf.cast(grads[name], self._wire_dtype) for name in self._dense], 0)
            parts.append(dense)
            bad += tf.cast(~all_finite([dense]), tf.int64)
        # All that is sent must depend on the step's number, for two reasons. TensorFlow does not
        # know that Horovod's operations have effects. So it runs those of constants, such as zeros
        # for a gradient that this rank lacks, only once, when it optimizes the graph. And if one
        # function takes several steps, the next must not use these names before this one is done.
        is_bad = bad + tf.minimum(now.step, 0) > 0
        if self._levels:
            values, count = self._average_integers(values, is_bad, choice, now)
            dense = []
        else:
            parts.append(tf.cast(is_bad, self._wire_dtype)[None])
            averaged = self.transport.average(tf.concat(parts, 0), f"values.{self.number}")
            sizes = [self.layout.n_values, *(self._elements[name] for name in self._dense), 1]
            values, *dense, count = tf.split(averaged, sizes)
        narrow = [tf.cast(average, self._dtype) for average in dense]
        averages = dict(zip(self._dense, narrow, strict=True))
        if self.compressed:
            scattered = self._kernel.scatter(own, now.scale, choice, values)
            names = [tensor.name for tensor in self.compressed]
            averages |= dict(zip(names, scattered, strict=True))
        # The range of float16 is narrower than that of the dtype that was averaged.
        halves = averages.values() if self._dtype == tf.float16 else ()
        sound = all_finite([values, *dense, *halves]) & tf.equal(count[0], 0)
        return BucketResult([averages[name] for name in self.names], sound, updated)

    def _average_integers(
        self, integers: tf.Tensor, is_bad: tf.Tensor, choice: tf.Tensor, now: Now
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The averages (k,) of integers times scales, and how many workers had something bad."""
        k = self.layout.n_values
        packed = pack_integers(integers, k, self._levels, now.size)
        buffer = tf.concat([packed, tf.cast(is_bad, tf.int32)[None]], 0)
        summed = self.transport.sum(buffer, f"values.{self.number}")
        sums = unpack_integers(summed[:-1], k, self._levels, now.size)
        scaled = []
        for own, part in zip(self.compressed, tf.split(sums, self._sizes), strict=True):
            scales = kernels.scale_of_each(choice[self.layout.scales[own.name]], part, own.dtype)
            scaled.append(kernels.times_scales(part, scales))
        return self.transport.share_of(tf.concat(scaled, 0), now.size), summed[-1:]

    def _choice(
        self, grads: Sequence[tf.Tensor], residues: Sequence[tf.Tensor], now: Now
    ) -> tf.Tensor:
        """What this step's leader chooses: bytes, in the layout's order."""
        staggered = self.config.leader == "staggered"
        chooser = leader(now.step, self.number, tf.cast(now.size, tf.int64), staggered)
        chooses = tf.equal(chooser, tf.cast(now.position, tf.int64))
        offered = self._kernel.choose(grads, residues, now.scale, chooses)
        message = pack_choice(offered, self.layout)
        received = self.transport.from_leader(message, f"offsets.{self.number}")
        return unpack_choice(received, self.layout)

    def commit(self, result: BucketResult) -> None:
        """Make the step count: residues become what `average` gave."""
        for tensor, updated in zip(self.compressed, result.updated, strict=True):
            tensor.residue.assign(updated)


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all elements are finite."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors] or [True])


def pack_choice(choice: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The bytes that travel for a choice, as by bucket_layout.pack_halves. Empty stays empty."""
    if not layout.narrow_bytes:
        return choice
    cut = layout.offsets_bytes - layout.narrow_bytes
    rows, half = choice[cut:], -(-layout.narrow_bytes // 2)
    low, high = rows[:half], rows[half:]
    high = tf.pad(high, [[0, tf.size(low) - tf.size(high)]])
    packed = tf.bitwise.bitwise_or(low, tf.bitwise.left_shift(high, tf.constant(4, tf.uint8)))
    return tf.concat([choice[:cut], packed], 0)


def unpack_choice(message: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The inverse of `pack_choice`, for a message that exactly one leader sent.

    Raises:
        InvalidArgumentError: when the graph runs, if no leader sent one, or several did.
    """
    whole = tf.debugging.assert_equal(tf.size(message), layout.message_bytes, native.WRONG_OFFSETS)
    with tf.control_dependencies([whole]):
        message = tf.identity(message)
    if not layout.narrow_bytes:
        return message
    wide, packed = tf.split(message, [layout.offsets_bytes - layout.narrow_bytes, -1])
    low = tf.bitwise.bitwise_and(packed, tf.constant(15, tf.uint8))
    high = tf.bitwise.right_shift(packed, tf.constant(4, tf.uint8))
    return tf.concat([wide, tf.concat([low, high], 0)[: layout.narrow_bytes]], 0)


def _field_bits(levels: int, size: int | tf.Tensor) -> int | tf.Tensor:
    """integers.field_bits for the number of ranks: a number, or a scalar if that may change."""
    if isinstance(size, int):
        return field_bits(levels, size)
    shifted = tf.bitwise.right_shift(2 * levels * size, tf.range(31))
    return tf.math.count_nonzero(shifted, dtype=tf.int32)


def pack_integers(integers: tf.Tensor, k: int, levels: int, size: int | tf.Tensor) -> tf.Tensor:
    """The words that travel for integers (k,) of -levels to levels. Ranks' words can be summed."""
    bits = _field_bits(levels, size)
    fields = 32 // bits
    words = -(-k // fields)
    padded = tf.pad(tf.cast(integers, tf.int32), [[0, words * fields - k]])
    shifts = bits * tf.range(fields)[:, None]
    shifted = tf.bitwise.left_shift(tf.reshape(padded, [fields, words]) + levels, shifts)
    return tf.reduce_sum(shifted, 0)


def unpack_integers(words: tf.Tensor, k: int, levels: int, size: int | tf.Tensor) -> tf.Tensor:
    """The sums over ranks (k,), int32, of integers whose words were summed."""
    bits = _field_bits(levels, size)
    shifts = bits * tf.range(32 // bits)[:, None]
    mask = tf.bitwise.left_shift(1, bits) - 1
    fields = tf.bitwise.bitwise_and(tf.bitwise.right_shift(words[None], shifts), mask)
    return tf.reshape(fields, [-1])[:k] - levels * size
