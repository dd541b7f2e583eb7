"""Few-bit integers as fields of float32 words, for Horovod's own optimizer.

Horovod's optimizer averages or sums floats. Before that it multiplies them by what the script asks
for, and it says neither by which factor nor when. So a word holds whole numbers: the sum over f of
q_f * 2**(b f), with b bits per field. This is as in integers.py, except that a field holds q
itself, with its sign. A one goes before the words: its value in the result tells what the words
were multiplied by. Each multiplication and addition rounds, by 2**-24 of the sum. A word has so few
fields that all this rounding together stays below a quarter. The nearest whole numbers are then the
right ones.
"""

from __future__ import annotations

import math

import torch

from scalecom_hvd.integers import field_bits

_MANTISSA = 24


def fields_per_word(levels: int, ranks: int) -> int:
    """How many fields a word has.

    Raises:
        ValueError: there are too many ranks for even one field.
    """
    # Numbers are rounded n times before the sum, n - 1 times in it, and twice after it. Each sum is
    # at most half of 2**bits.
    bits = _MANTISSA - 1 - math.ceil(math.log2(2 * ranks + 1))
    fields = bits // field_bits(levels, ranks)
    if fields == 0:
        raise ValueError(
            f"{ranks} ranks are too many to sum integers of {levels} levels in Horovod's own "
            "optimizer: give bits=32, or use scalecom_hvd.torch's DistributedOptimizer"
        )
    return fields


def pack(integers: torch.Tensor, levels: int, ranks: int) -> torch.Tensor:
    """[1 | words], float32, of integers (k,) int8 from -levels to levels."""
    fields, bits = fields_per_word(levels, ranks), field_bits(levels, ranks)
    padded = torch.nn.functional.pad(integers.int(), (0, -integers.numel() % fields))
    words = padded.new_ones(1 + padded.numel() // fields)
    words[1:] = sum(part << (bits * f) for f, part in enumerate(padded.view(fields, -1)))
    return words.float()


def unpack(result: torch.Tensor, k: int, levels: int, ranks: int) -> tuple[torch.Tensor, float]:
    """The sums (k,), int32, of all ranks' integers, and the factor that Horovod multiplied them by.

    result: Horovod's result for what `pack` gave; finite.
    """
    fields, bits = fields_per_word(levels, ranks), field_bits(levels, ranks)
    share = float(result[0]) / ranks
    most = levels * ranks
    words = (result[1:].double() / share).round().int()
    words += sum(most << (bits * f) for f in range(fields))  # no field is negative then
    parts = [((words >> (bits * f)) & (2**bits - 1)) - most for f in range(fields)]
    return torch.cat(parts)[:k], share
