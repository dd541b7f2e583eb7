"""The buffer that ranks sum if a bucket's values are integers of few bits: words of fields.

integers.py explains fields.
"""

from __future__ import annotations

import torch

from scalecom_hvd.exchange.kernels.base import Count
from scalecom_hvd.integers import field_bits, fields_per_word, words_of


class IntegerValues:
    """A buffer that is all-reduced: [words | flags | one count], int32. It replaces Values.

    Args:
        n_values, n_flags: how many values and flags there are.
        levels: L.
        ranks: how many ranks there are.
        device: the buffer's device.

    Attributes:
        compressed: (n_values,) int8: this rank's integers, which kernels write.
        averages: the view of the words.
        flags: the view of the flags.
        whole: always empty, because tensors that are sent whole have their own buckets.
    """

    def __init__(
        self, n_values: int, n_flags: int, levels: int, ranks: int, device: torch.device
    ) -> None:
        self._levels, self._ranks = levels, ranks
        self._bits, self._fields = field_bits(levels, ranks), fields_per_word(levels, ranks)
        n_words = words_of(n_values, levels, ranks)
        self.buffer = torch.zeros(n_words + n_flags + 1, dtype=torch.int32, device=device)
        self.averages, self.flags = self.buffer[:-1].split([n_words, n_flags])
        # Elements after the last value are never written, so they stay zero.
        self._padded = torch.zeros(n_words * self._fields, dtype=torch.int8, device=device)
        self.compressed = self._padded[:n_values]
        self.whole: dict[str, torch.Tensor] = {}
        self._sums = torch.empty_like(self._padded, dtype=torch.int32)
        fields = torch.arange(self._fields, dtype=torch.int32, device=device)
        self._shifts = (self._bits * fields)[:, None]

    def fill(self, grads: object) -> Count:
        """Pack this rank's integers into words. None of them can be bad."""
        # All fields are packed in a few launches: on an accelerator, launches take the time.
        fields = self._sums.view(self._fields, -1).copy_(self._padded.view(self._fields, -1))
        fields.add_(self._levels).bitwise_left_shift_(self._shifts)
        torch.sum(fields, 0, dtype=torch.int32, out=self.averages)
        return 0

    def sums(self) -> torch.Tensor:
        """(n_values,) int32: the sums of all ranks' integers, once the buffer was summed."""
        fields = self._sums.view(self._fields, -1)
        torch.bitwise_right_shift(self.averages[None], self._shifts, out=fields)
        fields.bitwise_and_(2**self._bits - 1).sub_(self._levels * self._ranks)
        return self._sums[: self.compressed.numel()]
