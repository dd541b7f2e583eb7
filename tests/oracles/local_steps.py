"""The oracle of local steps in plain NumPy: Qsparse-local-SGD, algorithms 1 and 2.

From Basu et al., 2019, arXiv 1906.02367. In algorithm 2 every worker has an H of its own. x: the
common parameters. x_i: the parameters of worker i. start_i: x at worker i's last synchronisation,
`starts[i]`.

    every step:  x_i <- update_i(x_i, gradient_i)
    workers that synchronise after it:  change_i = start_i - x_i; all others have no part
    they average:  x <- outer(x, (1/n) * sum_i sent_i), with error compensation as in methods.py;
        without an outer optimizer the average is subtracted
    those again:  x_i <- x, start_i <- x

With an overlap, the averages are applied some steps later, and x_i <- x + the change of x_i in
these steps. With fragments, only some of the parameters are synchronised at a time. If changes are
clipped, a change longer than `clip` times the median length is scaled down to that length. The
median is over the workers that synchronise and have changed something; for an even number of them
it is the lower of the two middle lengths.

Imports NumPy, schedule and the oracle of the methods only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from oracles.methods import MethodReference

from scalecom_hvd.schedule import Schedule

Arrays = dict[str, np.ndarray]


class LocalStepsReference:
    """n workers with parameters of their own.

    Args:
        method: averages changes, with a residue for each worker.
        parameters: {name: array}, the initial parameters of all workers.
        schedule: when workers synchronise; for algorithm 2, the H of each worker.
        update: the step of worker i's own optimizer. It returns the worker's new parameters, given
            the old ones and the gradients.
        outer: returns the new common parameters, given the old ones and the averages.
        overlap: how many steps are taken while averages travel.
        fragments: the names of each fragment's parameters, if the schedule has several fragments.
        clip: how many times as long as the median length a change may be.

    Attributes:
        common: x.
        workers: every worker's x_i.
        starts: every worker's start_i.
        taken: how many steps were taken.
    """

    def __init__(
        self,
        method: MethodReference,
        parameters: Mapping[str, np.ndarray],
        schedule: Schedule | Sequence[int],
        update: Callable[[int, Arrays, Arrays], Arrays],
        outer: Callable[[Arrays, Arrays], Arrays] | None = None,
        overlap: int = 0,
        fragments: Sequence[Sequence[str]] | None = None,
        clip: float | None = None,
    ) -> None:
        n = method.n_workers
        self.method, self.schedule, self.update = method, schedule, update
        self.outer = outer or _subtract
        self.common: Arrays = {name: value.copy() for name, value in parameters.items()}
        self.workers: list[Arrays] = [dict(self.common) for _ in range(n)]
        self.starts: list[Arrays] = [dict(self.common) for _ in range(n)]
        self.taken = 0
        self.overlap, self.clip = overlap, clip
        self.fragments = [list(names) for names in fragments or [parameters]]
        # (step at which the averages arrive, fragments, changes, parameters of every worker when
        # the changes were sent)
        self.travelling: tuple[int, range, list[Arrays], list[Arrays]] | None = None

    def step(self, grads: Sequence[Arrays]) -> None:
        """Take every worker's own step, and synchronise if a synchronisation is due."""
        n = len(self.workers)
        self.workers = [self.update(i, self.workers[i], grads[i]) for i in range(n)]
        self.taken += 1
        if self.travelling is not None and self.taken == self.travelling[0]:
            self._arrive(range(n))
        due, fragments = self._due(n)
        if due:
            changes = [self._change(i, fragments, i in due) for i in range(n)]
            if self.clip is not None:
                changes = self._clipped(changes, due)
            sent_from = [dict(worker) for worker in self.workers]
            self.travelling = self.taken + self.overlap, fragments, changes, sent_from
            if not self.overlap:
                self._arrive(due)

    def _due(self, n: int) -> tuple[list[int], range]:
        """Which workers synchronise now, and which fragments."""
        if isinstance(self.schedule, Schedule):
            fragments = self.schedule.fragments_due(self.taken)
            return list(range(n)) if fragments else [], fragments
        due = [i for i, steps in enumerate(self.schedule) if self.taken % steps == 0]
        self.method.senders = due
        return due, range(1)

    def _arrive(self, due: Sequence[int]) -> None:
        """Move the common parameters, and add to them what each worker has changed meanwhile."""
        _, fragments, changes, sent_from = self.travelling
        self.travelling, number = None, self.method.step_number
        averages = self.method.step(changes)
        if fragments[-1] < len(self.fragments) - 1:
            self.method.step_number = number  # the round goes on
        self.common |= self.outer({name: self.common[name] for name in averages}, averages)
        for i in due:
            for name in averages:
                x, then = self.common[name], sent_from[i][name]
                self.workers[i][name] = x + (self.workers[i][name] - then)
                self.starts[i][name] = x

    def _clipped(self, changes: list[Arrays], due: Sequence[int]) -> list[Arrays]:
        lengths = [
            np.sqrt(sum(np.square(one.astype(np.float64)).sum() for one in change.values()))
            for change in changes
        ]
        counted = sorted(lengths[i] for i in due if lengths[i] > 0)
        limit = self.clip * counted[(len(counted) - 1) // 2] if counted else 1.0
        return [
            {name: one * one.dtype.type(min(1, limit / (length or 1))) for name, one in own.items()}
            for own, length in zip(changes, lengths, strict=True)
        ]

    def _change(self, i: int, fragments: range, is_due: bool) -> Arrays:
        names = [name for fragment in fragments for name in self.fragments[fragment]]
        if not is_due:
            return {name: np.zeros_like(self.common[name]) for name in names}
        return {name: self.starts[i][name] - self.workers[i][name] for name in names}


def _subtract(common: Arrays, averages: Arrays) -> Arrays:
    return {name: x - averages[name] for name, x in common.items()}


def nesterov(lr: float, momentum: float) -> Callable[[Arrays, Arrays], Arrays]:
    """DiLoCo's outer optimizer, as torch.optim.SGD(lr=, momentum=, nesterov=True) computes it."""
    buffers: Arrays = {}

    def outer(common: Arrays, averages: Arrays) -> Arrays:
        for name, average in averages.items():
            buffers[name] = momentum * buffers[name] + average if name in buffers else average
        return {
            name: x - lr * (averages[name] + momentum * buffers[name]) for name, x in common.items()
        }

    return outer
