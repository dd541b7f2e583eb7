"""How far what a worker sends points where the other workers' values do.

A residue holds what all workers want, and what this one alone does: noise of its batches, or
classes that only it sees. Gradients a step ahead along the first are better for it, along the
second worse. The cosine of what was sent and what the others sent tells them apart, and no message
is needed: a worker knows its own values, and their sum. Imports nothing of ours.
"""

from __future__ import annotations

import math

import torch

# So much of the average is that of the steps before.
KEPT = 0.7
# The others sent nothing where all that is left of them is rounding: their square is less than so
# much of a worker's own.
ROUNDING = 1e-10


def products(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(3,), on the values' device: own · others, own · own and others · others.

    Args:
        own: (k,) values that this rank sent.
        total: (k,) their sums over all ranks.
    """
    others = total - own
    pairs = (own, others), (own, own), (others, others)
    return torch.stack([torch.dot(a, b) for a, b in pairs])


def nothing_sent() -> torch.Tensor:
    """`products` of no values, on the CPU."""
    return torch.zeros(3, dtype=torch.float64, device="cpu")


class Alignment:
    """The moving average, over steps, of the cosine of what a worker and the others sent.

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
        """Of some tensors, in a step that counts."""
        self._step += products.cpu()

    def end_step(self) -> None:
        """Take up what was noted, unless nothing was sent, or squares are beyond the dtype."""
        both, own, others = self._step.tolist()
        self._step.zero_()
        length = math.sqrt(own) * math.sqrt(others)
        if 0 < length < math.inf and others > ROUNDING * own:
            self.cosine = KEPT * self.cosine + (1 - KEPT) * max(-1.0, min(both / length, 1.0))

    @property
    def weight(self) -> float:
        """What this worker's residue counts for, from 0 to 1."""
        return max(self.cosine, 0.0)
