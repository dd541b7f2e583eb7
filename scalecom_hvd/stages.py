"""What a step sends of a compressed tensor: a rate, and how many bits a value has.

A run has one stage, or several one after the other: a schedule's, or those that
rate_controller.py finds, which are rungs of `LADDER`. Framework-free. Imports integers.
"""

from __future__ import annotations

from typing import NamedTuple

from scalecom_hvd.integers import fields_per_word, levels_of


class Stage(NamedTuple):
    """One element in `rate` is sent, in so many bits."""

    rate: float
    bits: int

    @property
    def is_whole(self) -> bool:
        """Whether it sends everything as it is."""
        return self.rate == 1 and self.bits == 32

    def __str__(self) -> str:
        return "whole" if self.is_whole else f"rate {self.rate:g}, {self.bits} bits"

    def bytes_of(self, ranks: int) -> float:
        """How many bytes a rank sends on a ring for each element of a tensor."""
        share = (ranks - 1) / max(ranks, 1)
        if self.bits == 32:
            return 2 * share * 4 / self.rate
        value = 4 / fields_per_word(levels_of(self.bits), ranks)
        offset = 0 if self.rate == 1 else 0.5 if self.rate <= 16 else 1
        return share * (2 * value + offset) / self.rate


LADDER = (
    Stage(1, 32),
    Stage(1, 8),
    *(Stage(rate, 4) for rate in (2, 4, 8)),  # at rate 1, more is sent for less (docs/results.md)
    *(Stage(rate, 3) for rate in (16, 32, 64, 128)),
)
"""The rungs of rate="auto", from dense to sparse."""
WHOLE, START = 0, 2
