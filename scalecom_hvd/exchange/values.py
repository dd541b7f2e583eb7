"""The buffer that ranks sum for a bucket: values, whole tensors, flags and a count.

Integers of few bits travel in words of fields, which integers.py explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.kernels.base import TensorSlot
from scalecom_hvd.exchange.kernels.choice import packs_in_c
from scalecom_hvd.integers import field_bits, fields_per_word, words_of


class Values:
    """A buffer that is all-reduced: [values | tensors sent whole | flags | one count].

    Kernels write this rank's values to `compressed` (n_values,). The others view the buffer:
    `averages` of the values, `whole` ({name: view}) of the tensors sent whole, and `flags`.
    """

    def __init__(
        self,
        n_values: int,
        n_flags: int,
        whole: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = [parameter.numel() for parameter in whole.values()]
        n_whole = sum(sizes)
        self.buffer = torch.zeros(n_values + n_whole + n_flags + 1, dtype=dtype, device=device)
        self.averages = self.buffer[:n_values]
        self.compressed = torch.zeros_like(self.averages)
        all_whole, self.flags = self.buffer[n_values:-1].split([n_whole, n_flags])
        self.whole = dict(zip(whole, all_whole.split(sizes), strict=True))

    def fill(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Copy in what travels, also what is not finite, and return the buffer."""
        self.averages.copy_(self.compressed)
        if self.whole:
            torch._foreach_copy_(list(self.whole.values()), [grads[name] for name in self.whole])
        return [self.buffer]


class ValuesInPlace(Values):
    """Gradients that are averaged in their own memory, which spares two copies of them.

    They lie side by side there, as in DDP's buckets. If they do not, they are copied. `buffer` is
    [flags | one count], which travels apart if there are flags. The count stays zero. `whole` has
    {name: (N,)} of the averages, where they travel.
    """

    def __init__(
        self,
        n_flags: int,
        whole: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(0, n_flags, {}, dtype, device)
        self.whole = dict(whole)

    def fill(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The memory in which the gradients are averaged, (N,), and the buffer."""
        own = [grads[name] for name in self.whole]
        joined = _joined(own)
        parts = joined.split([grad.numel() for grad in own])
        self.whole = dict(zip(self.whole, parts, strict=True))
        return [joined, self.buffer] if len(self.flags) else [joined]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors (N,) one after the other: a view of their memory if they are there in this order."""
    own, at = tensors[0].untyped_storage().data_ptr(), tensors[0].storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != own or tensor.storage_offset() != at:
            return torch.cat(list(tensors))
        at += tensor.numel()
    return tensors[0].as_strided((at - tensors[0].storage_offset(),), (1,))


class IntegerValues:
    """A buffer that is all-reduced: [words | flags | one count], int32. It replaces Values.

    Kernels write this rank's integers to `compressed` (n_values,), int8. `averages` views the
    words. `whole` is empty: tensors that are sent whole have their own buckets.
    """

    def __init__(
        self,
        n_values: int,
        n_flags: int,
        levels: int,
        ranks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
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
        self._library = native.library() if packs_in_c(device) else None
        in_c, elsewhere = (n_values, 0) if self._library else (0, len(self._padded))
        self._averages = torch.empty(in_c, dtype=dtype, device=device)
        self._sums = torch.empty(elsewhere, dtype=torch.int32, device=device)
        fields = torch.arange(self._fields, dtype=torch.int32, device=device)
        self._shifts = (self._bits * fields)[:, None]

    def fill(self, grads: object) -> list[torch.Tensor]:
        """Pack this rank's integers into words, and return the buffer."""
        if self._library is not None:
            layout = len(self.averages), self._fields, self._bits, self._levels
            own, words = self._padded.data_ptr(), self.averages.data_ptr()
            self._library.scalecom_pack(own, *layout, words)
            return [self.buffer]
        # All fields are packed in a few launches: on an accelerator, launches take the time.
        fields = self._sums.view(self._fields, -1).copy_(self._padded.view(self._fields, -1))
        fields.add_(self._levels).bitwise_left_shift_(self._shifts)
        torch.sum(fields, 0, dtype=torch.int32, out=self.averages)
        return [self.buffer]

    def averages_of(
        self, slots: Sequence[TensorSlot], offsets: torch.Tensor, share: float
    ) -> torch.Tensor | None:
        """(n_values,): sums times share and the scales in `offsets`. None: C does not do it."""
        if self._library is None:
            return None
        of_words = self.averages.data_ptr(), len(self.averages), self._bits
        is_double = self._averages.dtype == torch.float64
        # Addresses, because a view of each tensor would take longer than what C does.
        scales, own, width = offsets.data_ptr(), self._averages.data_ptr(), 4 + 4 * is_double
        for slot in slots:
            place = self._levels * self._ranks, slot.values_at, slot.geometry.k
            to = scales + slot.scales_at, share, is_double, own + width * slot.values_at
            self._library.scalecom_unpack(*of_words, *place, *to)
        return self._averages

    def sums(self) -> torch.Tensor:
        """(n_values,) int32: the sums of all ranks' integers, once the buffer was summed."""
        fields = self._sums.view(self._fields, -1)
        torch.bitwise_right_shift(self.averages[None], self._shifts, out=fields)
        fields.bitwise_and_(2**self._bits - 1).sub_(self._levels * self._ranks)
        return self._sums[: self.compressed.numel()]


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(number of tensors,): the norm of each. No host waits. Very large ones are infinite."""
    if not tensors:
        return torch.zeros(0, device="cpu")
    has_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    wide = torch.float64 if has_double else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide)).double()


def norm(tensors: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all tensors together. Computing it reads them all."""
    has_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    total = math.inf
    # Squares of what a residue may hold overflow float32, but float64 takes eight times as long.
    for wide in (torch.float64,) if has_double else (torch.float32, torch.float64):
        total = math.hypot(*map(float, torch._foreach_norm(list(tensors), 2, dtype=wide)))
        if math.isfinite(total):
            break
    return total
