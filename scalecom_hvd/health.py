"""What a user should hear about while there is time: a run too short for its rate, and residues that grow without bound.

Framework-free: exchanges bring the numbers, this says what they mean. Imports config alone.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable

from scalecom_hvd.config import ScaleComConfig

log = logging.getLogger("scalecom_hvd")

# Steps between two looks at the norms, which read all residues and gradients once more: a hundredth of what a step reads anyway.
LOOK_EVERY = 100
# Below so many sends per coordinate, every compressor loses accuracy.
SENDS_WANTED = 5


def growth_limit(rates: Iterable[float]) -> float:
    """|m| / |g| above which growing residues are worth a warning: a quarter of the highest rate.

    Gradients that are mostly noise keep residues at a few times sqrt(rate); ones that never change, where every coordinate of a lane waits
    its turn of `rate` steps, at rate / sqrt(3). So beyond a quarter of the rate what arrives is mostly old.
    """
    return max(rates, default=1.0) / 4


def check_length(config: ScaleComConfig, rates: Iterable[float]) -> None:
    """Log one warning if the planned run is too short for its rates, with what to change."""
    rate = max(rates, default=1.0)
    if config.planned_steps is None or rate <= 1:
        return
    steps = config.planned_steps - config.warmup_steps
    sends = max(steps, 0) / rate
    if sends < SENDS_WANTED:
        log.warning(
            "planned_steps=%d, of which %d are sent compressed at rate %g: %.1f sends per coordinate. Under about %d, accuracy suffers. "
            "Use a rate of at most %d, more steps, or no compression",
            config.planned_steps, max(steps, 0), rate, sends, SENDS_WANTED, max(math.floor(steps / SENDS_WANTED), 1),
        )  # fmt: skip


class Health:
    """Watches |m| / |g| over a run. ratio: what was last seen, None before."""

    def __init__(self) -> None:
        self.ratio: float | None = None
        self._residues: deque[float] = deque(maxlen=3)
        self._gradients: deque[float] = deque(maxlen=3)
        self._warned = False

    def look(self, step: int, residues: float, gradients: float, limit: float) -> None:
        """Take in the norms of all residues and of their gradients in one step. Logs a warning, once, if residues were larger each time of
        three than the time before, and are now more than `limit` times the largest of these gradients, as one may be near zero."""
        self._residues.append(residues)
        self._gradients.append(gradients)
        largest = max(self._gradients)
        self.ratio = residues / largest if largest > 0 else None
        grows = len(self._residues) == 3 and all(earlier < later for earlier, later in itertools.pairwise(self._residues))
        if self._warned or not grows or self.ratio is None or not self.ratio > limit:
            return
        self._warned = True
        log.warning(
            "step %d: residues keep growing, and hold as much as %.0f steps of gradients: what is sent is mostly old. Send more (a lower "
            "rate, a dense warm-up by warmup_steps, dense=['auto:output']), or take a lower learning rate or beta=0.1",
            step, self.ratio,
        )  # fmt: skip
