"""Packs a choice, with narrow offsets two to a byte, and integers, as fields of words.

bucket_layout.py and integers.py define the layout. Called by bucket.py. Imports the framework-free
rooms only.
"""

from __future__ import annotations

import tensorflow as tf

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.integers import field_bits

# The graph of an elastic run has a table of what depends on the number of ranks, up to this number.
_MOST_ELASTIC_RANKS = 1024


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
    numbers = range(_MOST_ELASTIC_RANKS + 1)
    return tf.constant([field_bits(levels, max(n, 1)) for n in numbers], tf.int32)[size]


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
