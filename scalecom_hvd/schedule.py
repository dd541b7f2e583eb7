"""Which rank leads a bucket's step, and when workers with local steps synchronise.

Framework-free. Both depend only on the step's number, so every rank knows them without asking.
Imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

_FORMS = (
    "local_steps must be a number of steps (4), or a map from steps to the number that holds from "
    "each step on ({0: 1, 500: 4, 2000: 16})"
)


def leader(step: int, bucket: int, size: int, staggered: bool) -> int:
    """The position of the rank that chooses for a bucket at a step.

    In TensorFlow, `step` and `size`, the number of ranks, may be tensors. staggered: whether every
    bucket has a different leader (config.leader).
    """
    return (step + (bucket if staggered else 0)) % size


class Schedule:
    """When workers that take local steps synchronise.

    All do so after steps H, 2H, ... If H changes, the next synchronisation is H steps after the
    last one, with the H that was in force then.

    A model in P fragments synchronises them one after the other: fragment p, from 0 to P - 1, after
    the share (p + 1) / P of each round's steps (Streaming DiLoCo, arXiv 2501.18512). The last
    fragment ends the round.

    Args:
        local_steps: H, or {first step: H}.
        fragments: P.

    Raises:
        TypeError, ValueError: a number has another type, or is too small, or is missing.
    """

    def __init__(self, local_steps: int | Mapping[int, int], fragments: int = 1) -> None:
        if not _is_whole(fragments):
            raise TypeError(f"fragments must be a whole number, not {fragments!r}")
        if fragments < 1:
            raise ValueError(f"fragments must be 1 (the whole model) or more, not {fragments}")
        self.fragments = fragments
        given = local_steps if isinstance(local_steps, Mapping) else {0: local_steps}
        if not all(_is_whole(step) and step >= 0 for step in given):
            raise ValueError(
                f"{_FORMS}: steps must be whole numbers of at least 0, not {list(given)!r}"
            )
        if 0 not in given:
            raise ValueError(f"{_FORMS}: {dict(given)!r} has no number for step 0")
        for steps in given.values():
            if not _is_whole(steps):
                raise TypeError(f"{_FORMS}, not {steps!r}")
            if steps < 1:
                raise ValueError(f"{_FORMS}: {steps} is less than one step")
        self._changes = sorted(given.items())

    def check_overlap(self, overlap: int) -> None:
        """Raise TypeError or ValueError unless so many steps may be taken while averages travel."""
        if not _is_whole(overlap):
            raise TypeError(f"overlap must be a whole number of steps, not {overlap!r}")
        least = min(steps for _, steps in self._changes)
        between = max(least // self.fragments, 1)
        if not 0 <= overlap < between:
            several = len(self._changes) > 1
            what = "the smallest number in local_steps" if several else "local_steps"
            share = " // fragments" if self.fragments > 1 else ""
            allowed = f"from 0 to {between - 1}" if between > 1 else "0"
            raise ValueError(
                f"overlap must be {allowed}, less than {what}{share}, not {overlap}: averages must "
                "arrive before the next ones are sent"
            )

    def fragments_due(self, step: int) -> range:
        """The numbers of the fragments that synchronise after step 1, 2, ...; often none."""
        _, begin, steps = self._round_of(step)
        done = step - begin
        return range(self.fragments * (done - 1) // steps, self.fragments * done // steps)

    def synchronisations(self, steps: int) -> int:
        """How many rounds end within the first `steps` steps."""
        return self._round_of(steps + 1)[0]

    def _round_of(self, step: int) -> tuple[int, int, int]:
        """For a step's round: how many rounds precede it, the step it begins after, its length."""
        count = last = 0
        ends = [*(change for change, _ in self._changes[1:]), step]
        for (_, steps), end in zip(self._changes, ends, strict=True):
            # This number was in force at every synchronisation before `end`. The last of these
            # decides when the first one after it comes.
            further = max(-(-(end - last) // steps), 0)
            if last + further * steps >= step:
                before = (step - last - 1) // steps
                return count + before, last + before * steps, steps
            last, count = last + further * steps, count + further
        raise AssertionError("the last number is in force for ever")

    def describe(self) -> list[list[int]]:
        """What ranks compare of local_steps; a JSON value."""
        return [list(change) for change in self._changes]


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
