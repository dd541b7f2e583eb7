"""Values that travel as integers of few bits: how many levels, and how ranks' integers are summed.

At the leader's indices, every worker divides its values by a scale that all workers share, and
sends the nearest integer q, -L <= q <= L. What rounding leaves stays in its residue. The integers
themselves are summed over ranks, so no rank's integers are gathered, and the average is scale / n
times the sum.

Horovod 0.28.1 sums no integers narrower than 32 bits (it refuses int8 and uint8), so integers
travel as fields of 32-bit words. Each field holds q + L, which is never negative, in as many bits
as the sum over n ranks needs. So no field borrows from its neighbour, or carries into it, and one
ordinary int32 sum adds up all fields. Of W words, word l % W has value l in field l // W.

Framework-free; the arithmetic is in reference.py. Imports nothing.
"""

from __future__ import annotations

# Values that share a scale. A tensor's first value begins a block.
BLOCK = 512
# Smaller scales are sent as zero, and their values wait: products with them come near numbers that
# are not normal, which processors and GPUs may flush to zero.
SMALLEST_SCALE = 2.0**-100


def levels_of(bits: int) -> int:
    """L: of the 2**bits numbers that fit, those from -L to L are used; 0: values are no integers.

    Args:
        bits: of one value: 2 (-1, 0 and 1), 3 (-3 to 3), ... 8; 32: they travel as they are.
    """
    return 2 ** (bits - 1) - 1 if bits < 32 else 0


def scale_divisor(levels: int) -> float:
    """The divisor that makes the mean magnitude of a block its scale.

    The largest integer then stands for 1, 2, 3.5 and 7.5 to 8 times the mean with 2, 3, 4 and more
    bits. Values that are cut off come late, but large steps between integers round much away. With
    3 bits, a language model lost 0.15 nats if 3 stood for 1.5 times the mean, 0.04 at 2 times and
    0.02 at 3 times. An LSTM lost 0.03, 0.045 and 0.07 bits.
    """
    return max((levels + 1) / 8, min(2.0, (levels + 3) / 4))


def blocks_of(k: int) -> int:
    """How many scales k values of a tensor have."""
    return -(-k // BLOCK)


def field_bits(levels: int, ranks: int) -> int:
    """Bits of a field: those of the largest sum, 2 L n."""
    return (2 * levels * ranks).bit_length()


def fields_per_word(levels: int, ranks: int) -> int:
    """How many fields a word of 32 bits holds.

    Raises:
        ValueError: there are too many ranks for even one field.
    """
    fields = 32 // field_bits(levels, ranks)
    if fields == 0:
        raise ValueError(
            f"{ranks} ranks are too many to sum integers of {levels} levels in 32 bits: use fewer "
            "bits"
        )
    return fields


def words_of(k: int, levels: int, ranks: int) -> int:
    """W: how many words k values take."""
    return -(-k // fields_per_word(levels, ranks))
