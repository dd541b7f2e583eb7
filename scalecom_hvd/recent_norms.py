"""How long a tensor's gradients have been of late on one rank, so that outliers are noticed.

Clipping after the exchange does not protect a residue: what one batch with a huge loss leaves there
would be sent over many steps, each of them clipped, and nothing else would get through. So after
such a step the tensor's residue is scaled down (ScaleComConfig.outliers). Shares are powers of two,
so that all frameworks compute the same numbers. Framework-free. Imports nothing of this package.
"""

from __future__ import annotations

import math

SMALLEST = 2.0**-50
"""Shorter gradients count as none: single precision computes their norms as zero, or badly."""
LEAST = 10
"""How many gradients must have been seen before one can be an outlier."""
KEPT = 0.98
"""How much of the longest recent norm is left after one step."""


class RecentNorms:
    """The norms of one tensor's gradients on this rank: the longest, which fades, and counts."""

    def __init__(self, longest: float = 0.0, count: int = 0) -> None:
        self.longest, self.count, self.outliers = float(longest), int(count), 0

    def share(self, norm: float, times: float | None) -> float:
        """What the tensor's residue must be multiplied by. Notes the norm.

        Args:
            norm: of a gradient. It is not noted if it is less than SMALLEST.
            times: how many times as long as the longest recent one a gradient may be. None: any.

        Example:
            >>> norms = RecentNorms()
            >>> [norms.share(1.0, 4) for _ in range(10)][-1], norms.share(100.0, 4)
            (1.0, 0.03125)
        """
        if not SMALLEST <= norm < math.inf:
            return 1.0
        share = 1.0
        limit = math.inf if times is None or self.count < LEAST else times * self.longest
        if norm > limit:
            share = math.ldexp(1.0, math.frexp(limit / norm)[1] - 1)  # math.log2 would be rounded
            self.outliers += 1
        self.longest = max(norm * share, KEPT * self.longest)
        self.count += 1
        return share
