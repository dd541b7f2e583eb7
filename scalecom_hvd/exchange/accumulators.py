"""Moves on accumulators, acc = m + g, for methods that send any values at any indices.

They are simple rather than fast, and use two tensors as large as the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scalecom_hvd.exchange.kernels.base import Count, Kernel, TensorSlot, add_usable
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.residue import CompressedTensor


class Accumulators:
    """The accumulators of a bucket's compressed tensors, one after the other.

    Attributes:
        flat: (N,) acc, minus what was sent.
        average: (N,) the average, zero where nothing was received.
        parts: `flat` as one view per tensor.
    """

    def __init__(self, tensors: Sequence[CompressedTensor], slots: Sequence[TensorSlot]) -> None:
        self._tensors, self._slots = tensors, slots
        sizes = [tensor.residue.numel() for tensor in tensors]
        self.flat = tensors[0].residue.new_empty(sum(sizes))
        self.average = torch.empty_like(self.flat)
        self.parts = list(self.flat.split(sizes))
        self.averages = list(self.average.split(sizes))
        self._chooser: Kernel | None = None

    def begin(self, grads: Sequence[torch.Tensor], scale: float, frozen: Sequence[bool]) -> Count:
        """acc <- m + scale*g, or 0 where frozen. Returns how many g are bad, and count as 0."""
        self.average.zero_()
        bad: Count = 0
        for tensor, grad, is_frozen, own in zip(
            self._tensors, grads, frozen, self.parts, strict=True
        ):
            if is_frozen:
                own.zero_()
            else:
                bad = bad + add_usable(grad, tensor.residue, scale, own)
        return bad

    def choose(self, buffer: torch.Tensor) -> None:
        """Write the offsets of the largest accumulators of each tensor to a buffer."""
        if self._chooser is None:
            slots = [
                TensorSlot(part, slot.geometry, slot.offsets_at, slot.values_at)
                for part, slot in zip(self.parts, self._slots, strict=True)
            ]
            dtype = self.flat.dtype
            kernel = kernel_for(self.flat.device, dtype, dtype, self._slots[0].geometry)
            self._chooser = kernel(slots, dtype)
        # Accumulators replace residues here, and zero times accumulators is added to them.
        self._chooser.begin(self.parts, [False] * len(self.parts), 0.0)
        self._chooser.choose(0.0, buffer)
        self._chooser.release()

    def commit(self, grads: Sequence[torch.Tensor], scale: float, stay: Sequence[bool]) -> None:
        """m <- (1 - beta)*m + beta*(acc - sent) unless it stays; g <- the average, in g's units."""
        for tensor, own, average, stays, grad in zip(
            self._tensors, self.parts, self.averages, stay, grads, strict=True
        ):
            if not stays and tensor.beta == 1:
                tensor.residue.copy_(own)
            elif not stays:
                # Each operation must be rounded separately. On some processors add_ with alpha
                # fuses both, and residues would then differ in bits.
                tensor.residue.mul_(1 - tensor.beta).add_(own.mul_(tensor.beta))
            grad.copy_(average if scale == 1 else average / scale)
