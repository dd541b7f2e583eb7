"""What travels for a choice: narrow offsets two to a byte. bucket_layout.py says where they lie.

Called by bucket.py. Imports the framework-free rooms only.
"""

from __future__ import annotations

import tensorflow as tf

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout


def pack_choice(choice: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The bytes that travel for a choice; none for none.

    The arithmetic is that of bucket_layout.pack_halves.
    """
    if not layout.narrow_bytes:
        return choice
    cut = layout.offsets_bytes - layout.narrow_bytes
    rows, half = choice[cut:], -(-layout.narrow_bytes // 2)
    low, high = rows[:half], rows[half:]
    high = tf.pad(high, [[0, tf.size(low) - tf.size(high)]])
    packed = tf.bitwise.bitwise_or(low, tf.bitwise.left_shift(high, tf.constant(4, tf.uint8)))
    return tf.concat([choice[:cut], packed], 0)


def unpack_choice(message: tf.Tensor, layout: Layout) -> tf.Tensor:
    """The inverse of `pack_choice`, of what exactly one leader sent.

    Raises:
        InvalidArgumentError: in the graph: none did, or several.
    """
    whole = tf.debugging.assert_equal(tf.size(message), layout.message_bytes, native.WRONG_OFFSETS)
    with tf.control_dependencies([whole]):
        message = tf.identity(message)
    if not layout.narrow_bytes:
        return message
    packed = message[layout.offsets_bytes - layout.narrow_bytes :]
    low = tf.bitwise.bitwise_and(packed, tf.constant(15, tf.uint8))
    high = tf.bitwise.right_shift(packed, tf.constant(4, tf.uint8))
    rows = tf.concat([low, high], 0)[: layout.narrow_bytes]
    return tf.concat([message[: layout.offsets_bytes - layout.narrow_bytes], rows], 0)
