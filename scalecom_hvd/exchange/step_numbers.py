"""Numbers of an exchange's last step, for Method.stats()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalecom_hvd.bucket_layout import Stats, step_stats


class StepNumbers:
    """What the last finished step, or part of a step, has submitted.

    Attributes:
        submitted: {kind of collective: bytes}, and how many "collectives", of the step in progress.
    """

    def __init__(self, names: Sequence[str]) -> None:
        kinds = ("offsets", "values", "dense", "gathered", "collectives")
        self.submitted = dict.fromkeys(kinds, 0)
        self._last = dict(self.submitted)
        self._ended, self._chosen, self._names = True, dict[str, int](), list(names)

    def begin(self) -> None:
        """A step begins. Collectives of an earlier one may still count what they submit."""
        self.submitted = dict.fromkeys(self.submitted, 0)

    def end(self, ends: bool, chosen: Mapping[str, int], names: Sequence[str]) -> None:
        """A step, or part of one, is over.

        Args:
            ends: whether it ended the step.
            chosen: how many elements of each compressed tensor were chosen.
            names: the tensors that it was about.
        """
        self._ended, self._last = ends, dict(self.submitted)
        self._chosen, self._names = dict(chosen), list(names)

    def last(self, step: int) -> int:
        """The number of the last step, if `step` steps have counted."""
        return max(step - self._ended, 0)

    def stats(self, ranks: int, leader: int, dense: Mapping[str, int]) -> Stats:
        """See Method.stats. dense: {name: elements} of all tensors."""
        elements = {name: dense[name] for name in self._names if name in dense}
        return step_stats(ranks, leader, elements, self._chosen, **self._last)
