"""The buffer that ranks sum for a bucket: values, whole tensors, flags and a count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from scalecom_hvd.exchange.kernels.base import Count


class Values:
    """A buffer that is all-reduced: [values | tensors sent whole | flags | one count].

    Args:
        n_values, n_flags: how many values and flags there are.
        whole: {name: tensor} of the tensors that are sent whole.
        dtype, device: the buffer's.

    Attributes:
        compressed: (n_values,): this rank's values, which kernels write.
        averages: the view of the values in the buffer.
        whole: {name: view} of the tensors sent whole.
        flags: the view of the flags.
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
        self._all_whole, self.flags = self.buffer[n_values:-1].split([n_whole, n_flags])
        self.whole = dict(zip(whole, self._all_whole.split(sizes), strict=True))

    def fill(self, grads: Mapping[str, torch.Tensor]) -> Count:
        """Copy in the values and the tensors sent whole.

        Returns whether something in the latter is not finite.
        """
        self.averages.copy_(self.compressed)
        if not self.whole:
            return 0
        torch._foreach_copy_(list(self.whole.values()), [grads[name] for name in self.whole])
        # Looked at in the wire dtype, because what overflows there is not finite either.
        return ~self._all_whole.isfinite().all()


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
