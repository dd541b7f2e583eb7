"""Which rung of the ladder (stages.py) a run takes: the densest that costs no time.

A controller is told how long each step took, and how much of that was exposed: waited for averages,
behind no computation. It tells the rung for the next step. It looks at windows of steps, by their
medians, and climbs from rung to rung:

- to a sparser one, if much is exposed there, as long as that exposes less (see `_is_worth_it`);
- otherwise to a denser one, as long as steps do not become longer;
- then to *whole*, unless what the rungs so far tell of the network makes that hopeless. Kernels and
  small messages may cost more than they save, and without them all of that is gone.

Then it stays on the densest rung that is hardly slower than the fastest, and tries no other before
the time of a step has changed. In a run's first steps, sending less costs most accuracy
(docs/results.md). So a new run prefers denser rungs there, unless that costs much, and searches
once more after some 250 steps. Framework-free, and fed by numbers: tests bring their own networks.
"""

from __future__ import annotations

import logging
import math
import statistics

from scalecom_hvd.stages import LADDER, START, WHOLE

log = logging.getLogger("scalecom_hvd")

# Steps in a window, of which the first are not counted: they make buffers, compile and warm up.
WINDOW, SETTLED_WINDOW, SKIPPED = 16, 200, 3
# A rung that is this much slower, or has this share of a step exposed, is left after so few steps.
HOPELESS, MOSTLY_EXPOSED, FEW = 1.5, 0.5, 3
# What counts as no slower. The times of equal steps differ by less on a machine that is not idle.
SAME = 1.03
# Rungs after FREE cost accuracy in runs of some hundred steps (docs/results.md), and those after
# START in a run's first steps. So each must expose less than the rung before it, by this share.
FREE, SAVED = 4, 0.1
# Shares of a step. Less exposed time is not worth a sparser rung, and more is.
MUCH_EXPOSED = 0.1
# Whole steps are tried if they are not expected to take more times as long as the fastest.
WORTH_A_TRY = 2.5
FROM_BYTES = 3
# A settled controller searches again if the time of a step has changed by this share.
CHANGED = 0.2


class RateController:
    """Finds the rung for one run.

    Args:
        ranks, rung: how many ranks there are, and the rung of the first step.
        is_new: whether the run's first steps are to come.

    Attributes:
        rung: the one of the coming step.
        reason: why, for a user; "" at the start.
        is_settled: whether no other rung is tried for now.

    Example:
        >>> controller = RateController(ranks=4)
        >>> controller.note(seconds=0.25, exposed=0.03)
        4
    """

    def __init__(self, ranks: int, rung: int = START, is_new: bool = False) -> None:
        self._ranks, self.rung, self.reason = ranks, rung, ""
        self._free = START if is_new else FREE
        self.is_settled = False
        self._times: dict[int, float] = {}  # the median seconds of a step on each rung
        self._exposed: dict[int, float] = {}  # the median share of it on each rung
        self._window: list[tuple[float, float]] = []

    def note(self, seconds: float, exposed: float) -> int:
        """Take in one step on the present rung. Returns the rung for the next one.

        Args:
            seconds: from the end of the last step's averages to the end of this step's.
            exposed: how many of them nothing was done but to wait for averages.
        """
        self._window.append((seconds, exposed / seconds))
        counted = self._window[SKIPPED:]
        size = SETTLED_WINDOW if self.is_settled else WINDOW
        is_hopeless = min(self._window)[0] > HOPELESS * min(self._times.values(), default=math.inf)
        is_slow = len(counted) == FEW and min(share for _, share in counted) > MOSTLY_EXPOSED
        is_over = is_slow or (len(self._window) == FEW and is_hopeless)
        if len(self._window) >= size or (is_over and not self.is_settled):
            counted = counted or self._window
            self._window = []
            self._decide(*(statistics.median(each) for each in zip(*counted, strict=True)))
        return self.rung

    def _decide(self, time: float, share: float) -> None:
        if self.is_settled:
            if self._free == FREE and abs(time / self._times[self.rung] - 1) < CHANGED:
                return
            self._times, self.is_settled, self._free = {}, False, FREE
        self._times[self.rung], self._exposed[self.rung] = time, share
        rung, why = self._next()
        self.is_settled = rung in self._times
        self.reason = f"{why} ({time:.3g} s a step, {share:.0%} of it exposed)"
        if rung != self.rung:
            old, new = LADDER[self.rung], LADDER[rung]
            log.info("rate='auto' goes from %s to %s: %s", old, new, self.reason)
        self.rung = rung

    def _next(self) -> tuple[int, str]:
        rung = self.rung
        sparsest, densest = max(self._times), min(self._times.keys() - {WHOLE}, default=rung)
        times = {rung: time for rung, time in self._times.items() if self._is_worth_it(rung)}
        fastest = min(times.values())
        much = self._exposed[rung] > MUCH_EXPOSED and rung in times
        if rung == sparsest < len(LADDER) - 1 and much:
            return rung + 1, "much is exposed"
        if densest > WHOLE + 1 and self._times[densest] <= SAME * fastest:
            return densest - 1, "denser steps may cost nothing"
        if WHOLE not in times and self._expected_whole() <= WORTH_A_TRY * fastest:
            return WHOLE, "whole steps may cost nothing"
        best = (rung for rung, time in times.items() if time <= SAME * fastest)
        return min(best), "the densest that is not slower"

    def _is_worth_it(self, rung: int) -> bool:
        if rung <= self._free or rung - 1 not in self._times:
            return True
        # Whole steps do not tell: what is computed may have become faster meanwhile.
        before, now = (self._exposed[each] * self._times[each] for each in (rung - 1, rung))
        return before - now >= SAVED * self._times[rung - 1]

    def _expected_whole(self) -> float:
        """The time of a whole step, by what bytes cost on the rungs so far."""
        # Denser rungs than these are mostly slower because of their kernels.
        known = [rung for rung in self._times if rung >= FROM_BYTES]
        dense, sparse = min(known, default=0), max(known, default=0)
        if dense == sparse:
            return 0.0  # nobody knows
        sent = {rung: LADDER[rung].bytes_of(self._ranks) for rung in (WHOLE, dense, sparse)}
        slower = max(self._times[dense] - SAME * self._times[sparse], 0.0)
        share = (sent[WHOLE] - sent[dense]) / (sent[dense] - sent[sparse])
        return self._times[dense] + slower * share
