"""Warnings that a user should get while there is time, such as that residues keep growing.

Framework-free: exchanges bring the numbers, and this module says what they mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalecom_hvd.config import ScaleComConfig

log = logging.getLogger("scalecom_hvd")

# Steps between two looks at the norms. A look reads all residues and gradients once more. So looks
# add a hundredth to what steps read anyway.
LOOK_EVERY = 100
# How many steps in a row are skipped before a warning. Loss scaling skips fewer while it finds its
# scale.
SKIPS_IN_A_ROW = 20
# If elements are sent fewer times, every compressor loses accuracy.
SENDS_WANTED = 5
# A warning is logged from this many elements of a model, and this share of them sent whole. A
# twentieth is more than everything that few bits send.
MODEL_WORTH_A_WARNING = 1_000_000
WHOLE_WORTH_A_WARNING = 0.05
# At beta = 1 look-ahead lost 15 points with group norm, at 0.3 under 3.
LOOK_AHEAD_BETA = 0.5
# Residues grow if each look finds this many times what the look before found. Near the end of a
# run, gradients fall below what waits, and residues rise by a hundredth or two now and then.
GROWTH = 1.1
GROWTH_WARNING = (
    "step %d: residues keep growing, and hold as much as %.0f steps of gradients, so the values "
    "that are sent are mostly old. Send more (with a lower rate or more warmup_steps), or lower "
    "the learning rate or beta"
)
_BETA_IS_LARGE = (
    "look-ahead with beta=%g breaks training without batch norm: leave beta at its default, or "
    "give beta=0.1"
)
_SENT_WHOLE = (
    "%.0f %% of the model's elements are sent uncompressed, most of them in %s, so at least this "
    "share of dense training's traffic remains. To compress these tensors too, leave them out of "
    "dense= and of rates=, or lower min_numel"
)
_TOO_SHORT = (
    "total_steps: of %d exchanges, %d are compressed at rate %g, so each element is sent %.1f "
    "times. If it is sent fewer than about %d times, accuracy suffers. Use a rate of at most %d, "
    "more steps, or no compression"
)
_SKIPPED = (
    "step %d was skipped %d times in a row, because each time %s had a gradient that was not "
    "finite, or beyond 2**100. Look for NaN in the data and the loss of every rank, or lower the "
    "learning rate or the loss scale"
)


def growth_limit(rates: Iterable[float], config: ScaleComConfig) -> float:
    """The value of |waiting| / |g| above which to warn, by the highest rate.

    If gradients are mostly noise, they keep residues at about sqrt(rate). If gradients never
    change, every coordinate of a lane waits for its turn of `rate` steps, and residues stay at rate
    / sqrt(3). So beyond a quarter of the rate, and twice its root, what arrives is mostly old.
    Without flush, a turn sends beta of what waits, and 1 / beta times as much waits.
    """
    rate = max(rates, default=1.0)
    return max(rate / 4, 2 * math.sqrt(rate)) / (1 if config.flush else config.resolved().beta)


def check_run(
    config: ScaleComConfig,
    own_rates: Mapping[str, float | None],
    shapes: Mapping[str, Sequence[int]],
    exchanges_in: Callable[[int], int] = int,
) -> None:
    """Log a warning for each thing that is likely to cost a run its speed, or its accuracy.

    Args:
        config: the settings.
        own_rates: {name: own rate}; see config.own_rates_for.
        shapes: {name: shape} of all tensors.
        exchanges_in: how many exchanges there are in a number of steps.
    """
    first, stage = config.stages[-1]
    if config.total_steps is not None and config.rate != "auto":
        total, begun = map(exchanges_in, (config.total_steps, max(first, config.warmup_steps)))
        rates = [stage.rate if own is None else own for own in own_rates.values()]
        check_length(total, begun, rates)
    check_share_whole(own_rates, {name: math.prod(shape) for name, shape in shapes.items()})
    # If nu is None in resolved settings, the optimizer's momentum is made quasi-hyperbolic.
    if config.lookahead and config.beta > LOOK_AHEAD_BETA and config.nu == 1:
        log.warning(_BETA_IS_LARGE, config.beta)


def check_share_whole(rates: Mapping[str, float | None], numels: Mapping[str, int]) -> None:
    """Log one warning if tensors that are sent whole take most of the compression away.

    Small models get no warning, nor do models in which nothing is compressed.
    """
    total = sum(numels.values())
    whole = {name: numel for name, numel in numels.items() if rates[name] == 1}
    share = sum(whole.values()) / max(total, 1)
    compresses = len(whole) < len(numels)
    if total >= MODEL_WORTH_A_WARNING and compresses and share >= WHOLE_WORTH_A_WARNING:
        log.warning(_SENT_WHOLE, 100 * share, max(whole, key=whole.__getitem__))


def check_length(total: int, warmup: int, rates: Iterable[float]) -> None:
    """Log one warning if a run is too short for its rates, with what to change.

    total, warmup: how many exchanges there are, and how many before the last stage, which has
    these rates.
    """
    rate, steps = max(rates, default=1.0), max(total - warmup, 0)
    if rate > 1 and steps / rate < SENDS_WANTED:
        best = max(steps // SENDS_WANTED, 1)
        log.warning(_TOO_SHORT, total, steps, rate, steps / rate, SENDS_WANTED, best)


def keep_growing(residues: Sequence[Any], gradients: Sequence[Any], limit: float) -> Any:
    """Whether residues keep growing, and are large. Works on numbers and on tensors.

    They do if their three norms rise by more than noise, and the last is more than `limit` times
    each norm of the gradients. One norm of the gradients may be near zero, for a batch that the
    model fits, but not all.

    residues, gradients: norms at the last three looks, the latest last; 0 if there was no look.
    """
    earliest, earlier, now = residues
    rising = (earliest > 0) & (earlier > GROWTH * earliest) & (now > GROWTH * earlier)
    for gradient in gradients:
        rising = rising & (now > limit * gradient)
    return rising & (sum(gradients) > 0)


def ratio_of(norms: ArrayLike) -> float | None:
    """|waiting| at the last look by the largest |g| of three; None before any, or if all are zero.

    norms: of what waited at these looks, and of gradients (2, 3).
    """
    waiting, gradients = np.asarray(norms)
    return float(waiting[-1] / max(gradients)) if max(gradients) > 0 else None


class Health:
    """Compares what waits, m / beta, with gradients over a run, and watches for skipped steps."""

    def __init__(self) -> None:
        # Of what waited at the last three looks, and of gradients; 0 if there was no look. They are
        # saved with residues. With only one look, a batch that the model fits, with tiny gradients,
        # would be taken for residues that grew.
        self.norms = [[0.0] * 3, [0.0] * 3]
        self._warned = False
        self._skips = 0

    @property
    def ratio(self) -> float | None:
        """See ratio_of."""
        return ratio_of(self.norms)

    def skip(self, step: int, whose: str = "some rank") -> None:
        """Note that a step did not count. Warns if perhaps no step will ever count again."""
        self._skips += 1
        if self._skips == SKIPS_IN_A_ROW:
            log.warning(_SKIPPED, step, SKIPS_IN_A_ROW, whose)

    def take(self) -> None:
        """Note that a step counted."""
        self._skips = 0

    def look(self, step: int, residues: float, gradients: float, limit: float) -> None:
        """Take in the norms of one step. Logs a warning, once, if residues keep growing.

        Args:
            step: its number.
            residues, gradients: the norms of what waits (residues / beta), and of the gradients.
            limit: as growth_limit gives it.
        """
        self.norms = [[*self.norms[0][1:], residues], [*self.norms[1][1:], gradients]]
        waiting, own = self.norms
        if not self._warned and keep_growing(waiting, own, limit):
            self._warned = True
            log.warning(GROWTH_WARNING, step, self.ratio)
