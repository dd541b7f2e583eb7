"""Integers of few bits as fields of float32 words, for Horovod's own optimizer.

That averages floats, or sums them, after it has multiplied them by what the script asks for, and
says neither which nor when. So a word holds whole numbers: the sum over f of q_f * 2**(b f), b bits
to a field, as integers.py has it, but without a sign to be known beforehand. A one goes before the
words: what has become of it tells what they were multiplied by. Each multiplication and addition
rounds, by 2**-24 of the sum. As many fields are left out as keep the sum of all that below a
quarter, so that the nearest whole numbers are the right ones. Imports integers.
"""

from __future__ import annotations

import math

import torch

from scalecom_hvd.integers import field_bits

_MANTISSA = 24


def fields_per_word(levels: int, ranks: int) -> int:
    """How many fields a word has.

    Raises:
        ValueError: none, as there are too many ranks.
    """
    # Rounded: n times before the sum, n - 1 times in it, and twice behind it, each sum being at
    # most half of 2**bits.
    bits = _MANTISSA - 1 - math.ceil(math.log2(2 * ranks + 1))
    fields = bits // field_bits(levels, ranks)
    if fields == 0:
        raise ValueError(
            f"{ranks} ranks are too many for integers of {levels} levels in Horovod's own "
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
    """The sums (k,), int32, of all ranks' integers; and what a sum is multiplied by.

    Args:
        result: what Horovod made of `pack`; finite.
    """
    fields, bits = fields_per_word(levels, ranks), field_bits(levels, ranks)
    share = float(result[0]) / ranks
    most = levels * ranks
    words = (result[1:].double() / share).round().int()
    words += sum(most << (bits * f) for f in range(fields))  # no field is negative then
    parts = [((words >> (bits * f)) & (2**bits - 1)) - most for f in range(fields)]
    return torch.cat(parts)[:k], share
