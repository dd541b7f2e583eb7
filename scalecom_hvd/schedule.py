"""Whose turn it is: which rank leads a bucket's step, and when workers with local steps meet.

Framework-free. All this depends on the step's number only, so every rank knows it without asking.
Imports nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeGuard

_FORMS = (
    "local_steps must be a number of steps (4), the number in force from each step on "
    "({0: 1, 500: 4, 2000: 16}), or one number for each rank ([4, 8])"
)


def leader(
    step: int, bucket: int, size: int, staggered: bool, senders: Sequence[int] | None = None
) -> int:
    """The position of the rank that chooses for a bucket at a step.

    Args:
        step: the step; a tensor where a graph computes it.
        bucket: the bucket's number.
        size: how many ranks there are; a tensor where their number may change.
        staggered: whether every bucket has another leader (config.leader).
        senders: the positions of those who have something to send, where not all have.
    """
    turn = step + (bucket if staggered else 0)
    if senders is None:
        return turn % size
    # Drawn, the same on all ranks: where the same ones send every other time, some would never
    # have their turn.
    return senders[random.Random(turn).randrange(len(senders))]


class Schedule:
    """When workers that take local steps synchronise.

    With one H, every worker synchronises after steps H, 2H, ... Where H changes, the next
    synchronisation is H steps after the last, H being what was in force then. With an H for each
    rank, every rank has its own synchronisation points (Basu et al., 2019, arXiv 1906.02367,
    algorithm 2), and those that have none at a step contribute nothing to it.

    A model in P fragments synchronises one after the other: fragment p, of 0 to P - 1, after the
    share (p + 1) / P of each round's steps (Streaming DiLoCo, arXiv 2501.18512). The last one ends
    the round.

    Args:
        local_steps: H, {first step: H}, or [H of rank 0, H of rank 1, ...].
        fragments: P.

    Attributes:
        ranks: every rank's own H; None where all have one.
        fragments: P.

    Raises:
        TypeError: local_steps, or a number in it, or fragments has another type.
        ValueError: a number is less than one step, or something is missing; fragments where every
            rank has an H of its own.
    """

    def __init__(
        self, local_steps: int | Mapping[int, int] | Sequence[int], fragments: int = 1
    ) -> None:
        if not _is_whole(fragments):
            raise TypeError(f"fragments must be a whole number, not {fragments!r}")
        if fragments < 1:
            raise ValueError(f"fragments must be 1 (the whole model) or more, not {fragments}")
        self.fragments = fragments
        self.ranks: list[int] | None = None
        self._changes: list[tuple[int, int]] = []
        if isinstance(local_steps, Mapping):
            if not all(_is_whole(step) and step >= 0 for step in local_steps):
                raise ValueError(
                    f"{_FORMS}: steps are whole numbers from 0 on, not {list(local_steps)!r}"
                )
            if 0 not in local_steps:
                raise ValueError(
                    f"{_FORMS}: {dict(local_steps)!r} does not say what is in force from step 0 on"
                )
            self._changes = [(step, _steps(local_steps[step])) for step in sorted(local_steps)]
        elif isinstance(local_steps, Sequence) and not isinstance(local_steps, str):
            if not local_steps:
                raise ValueError(_FORMS)
            self.ranks = [_steps(steps) for steps in local_steps]
            if fragments > 1:
                raise ValueError(
                    "fragments have all ranks synchronise at the same steps: give all ranks the "
                    "same local_steps, or leave fragments out"
                )
        else:
            self._changes = [(0, _steps(local_steps))]

    @property
    def asynchronous(self) -> bool:
        """Whether ranks have synchronisation points of their own."""
        return self.ranks is not None

    def check_overlap(self, overlap: int) -> None:
        """Check how many steps may be taken while an average travels.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is below 0, or averages would still travel when the next are due.
        """
        if not _is_whole(overlap):
            raise TypeError(f"overlap must be a whole number of steps, not {overlap!r}")
        least = min(self.ranks or [steps for _, steps in self._changes])
        between = max(least // self.fragments, 1)
        if not 0 <= overlap < between:
            several = len(self.ranks or self._changes) > 1
            what = "the least of local_steps" if several else "local_steps"
            share = " // fragments" if self.fragments > 1 else ""
            allowed = f"from 0 to {between - 1}" if between > 1 else "0"
            raise ValueError(
                f"overlap must be {allowed}, less than {what}{share}, not {overlap}: "
                "averages must have arrived before the next are sent"
            )

    def check_ranks(self, size: int) -> None:
        """Check that this is a schedule for so many ranks.

        Args:
            size: how many there are.

        Raises:
            ValueError: it is one for another number of ranks.
        """
        if self.ranks is not None and len(self.ranks) != size:
            raise ValueError(
                f"local_steps names {len(self.ranks)} ranks, and there are {size}: give one number "
                "for each, or one for all"
            )

    def due(self, step: int, size: int) -> list[int]:
        """The positions of the ranks that synchronise after a step.

        Args:
            step: its number: 1, 2, ...
            size: how many ranks there are.
        """
        if self.ranks is not None:
            return [rank for rank, steps in enumerate(self.ranks) if step % steps == 0]
        return list(range(size)) if self.fragments_due(step) else []

    def fragments_due(self, step: int) -> range:
        """The numbers of the fragments that synchronise after a step: 1, 2, ...

        Where ranks have synchronisation points of their own that is the whole model, 0.
        """
        if self.ranks is not None:
            return range(1)
        _, begin, steps = self._round_of(step)
        done = step - begin
        return range(self.fragments * (done - 1) // steps, self.fragments * done // steps)

    def synchronisations(self, steps: int) -> int:
        """After how many of the first `steps` steps some rank synchronises, or a round ends."""
        if self.ranks is not None:
            return sum(bool(self.due(step, 0)) for step in range(1, steps + 1))
        if steps == 0:
            return 0
        count, begin, length = self._round_of(steps)
        return count + (steps == begin + length)

    def _round_of(self, step: int) -> tuple[int, int, int]:
        """How many rounds there are before that of a step; after which it begins; its length."""
        count = last = 0
        ends = [*(change for change, _ in self._changes[1:]), step]
        for (_, steps), end in zip(self._changes, ends, strict=True):
            # These steps were in force at every synchronisation before `end`. The last of those
            # decides when the first after it comes.
            further = max(-(-(end - last) // steps), 0)
            if last + further * steps >= step:
                before = (step - last - 1) // steps
                return count + before, last + before * steps, steps
            last, count = last + further * steps, count + further
        raise AssertionError("the last number is in force for ever")

    def describe(self) -> list[int] | list[list[int]]:
        """What ranks compare of local_steps; a JSON value."""
        return self.ranks or [list(change) for change in self._changes]


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _steps(value: object) -> int:
    if not _is_whole(value):
        raise TypeError(f"{_FORMS}, not {value!r}")
    if value < 1:
        raise ValueError(f"{_FORMS}: {value} is less than one step")
    return value
