"""How far a worker's sent values point in the direction of the other workers' values.

A residue holds two parts: what all workers want, and what only this worker wants (noise of its
batches, or classes that only it sees). Computing gradients a step ahead is better along the first
part, and worse along the second. The cosine between the worker's sent values and the others' tells
the parts apart. It needs no message, because a worker knows its own values and the sum over all
workers. Imports nothing of this package.
"""

from __future__ import annotations

import math

import torch

# How much of the moving average comes from earlier steps.
KEPT = 0.7
# If the others' squared norm is less than this fraction of the worker's own, it is only rounding
# error: the others sent nothing.
ROUNDING = 1e-10
# On a CPU, as many values as stay in a cache. Longer temporaries take six times as long.
PART = 1 << 16


def products(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(3,), on the values' device: own · others, own · own and others · others.

    Args:
        own: (k,) values that this rank sent.
        total: (k,) their sums over all ranks.
    """
    length = PART if own.is_cpu else max(own.numel(), 1)
    parts = zip(own.split(length), total.split(length), strict=True)
    return torch.stack([_products(a, b - a) for a, b in parts]).sum(0)


def _products(own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    pairs = (own, others), (own, own), (others, others)
    # torch.dot would call cuBLAS, which keeps 32 MiB for each stream on an H100 and an H200.
    return torch.stack([(a * b).sum() for a, b in pairs])


def nothing_sent() -> torch.Tensor:
    """The `products` of no values at all, on the CPU."""
    return torch.zeros(3, dtype=torch.float64, device="cpu")


class Alignment:
    """The moving average, over steps, of the cosine between a worker's and the others' values.

    Attributes:
        cosine: from -1 to 1; 1 at the start.

    Example:
        >>> alignment = Alignment()
        >>> alignment.note(products(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]) * 4))
        >>> alignment.end_step()
        >>> alignment.weight
        1.0
    """

    def __init__(self) -> None:
        self.cosine = 1.0
        self._step = nothing_sent()

    def note(self, products: torch.Tensor) -> None:
        """Add the products of some tensors, in a step that counts."""
        self._step += products.cpu()

    def end_step(self) -> None:
        """Update the average, unless nothing was sent or the squares overflow their dtype."""
        both, own, others = self._step.tolist()
        self._step.zero_()
        length = math.sqrt(own) * math.sqrt(others)
        if 0 < length < math.inf and others > ROUNDING * own:
            self.cosine = KEPT * self.cosine + (1 - KEPT) * max(-1.0, min(both / length, 1.0))

    @property
    def weight(self) -> float:
        """The weight of this worker's residue, from 0 to 1."""
        return max(self.cosine, 0.0)
