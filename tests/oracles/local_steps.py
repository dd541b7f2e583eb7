"""The oracle of local steps in plain NumPy: algorithm 1 of Qsparse-local-SGD.

From Basu et al., 2019, arXiv 1906.02367. x: the common parameters. x_i: the parameters of worker i.
start_i: x at worker i's last synchronisation, `starts[i]`.

    every step:  x_i <- update_i(x_i, gradient_i)
    when the schedule says so:  change_i = start_i - x_i
    they average:  x <- outer(x, (1/n) * sum_i sent_i), with error compensation as in methods.py;
        without an outer optimizer the average is subtracted
    then:  x_i <- x, start_i <- x

With an overlap, the averages are applied some steps later, and x_i <- x + the change of x_i in
these steps. With fragments, only some of the parameters are synchronised at a time. If changes are
clipped, a change longer than `clip` times the median length is scaled down to that length. The
median is over the workers that have changed something; for an even number of them it is the lower
of the two middle lengths.

Imports NumPy, schedule and the oracle of the methods only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from oracles.methods import MethodReference

from scalecom_hvd.schedule import Schedule

Arrays = dict[str, np.ndarray]


class LocalStepsReference:
    """n workers with parameters of their own.

    Args:
        method: averages changes, with a residue for each worker.
        parameters: {name: array}, the initial parameters of all workers.
        schedule: when workers synchronise.
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
        parameters: Arrays,
        schedule: Schedule,
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
        for i, grad in enumerate(grads):
            self.workers[i] = self.update(i, self.workers[i], grad)
        self.taken += 1
        if self.travelling is not None and self.taken == self.travelling[0]:
            self._arrive()
        if fragments := self.schedule.fragments_due(self.taken):
            names = [name for fragment in fragments for name in self.fragments[fragment]]
            changes = [
                {name: start[name] - worker[name] for name in names}
                for start, worker in zip(self.starts, self.workers, strict=True)
            ]
            if self.clip is not None:
                changes = self._clipped(changes)
            sent_from = [dict(worker) for worker in self.workers]
            self.travelling = self.taken + self.overlap, fragments, changes, sent_from
            if not self.overlap:
                self._arrive()

    def _arrive(self) -> None:
        """Move the common parameters, and add to them what each worker has changed meanwhile."""
        _, fragments, changes, sent_from = self.travelling
        self.travelling, number = None, self.method.step_number
        averages = self.method.step(changes)
        if fragments[-1] < len(self.fragments) - 1:
            self.method.step_number = number  # the round goes on
        self.common |= self.outer({name: self.common[name] for name in averages}, averages)
        for worker, start, then in zip(self.workers, self.starts, sent_from, strict=True):
            for name in averages:
                x = self.common[name]
                worker[name], start[name] = x + (worker[name] - then[name]), x

    def _clipped(self, changes: list[Arrays]) -> list[Arrays]:
        lengths = [
            np.sqrt(sum(np.square(one.astype(np.float64)).sum() for one in change.values()))
            for change in changes
        ]
        counted = sorted(length for length in lengths if length > 0)
        limit = self.clip * counted[(len(counted) - 1) // 2] if counted else 1.0
        return [
            {name: one * one.dtype.type(min(1, limit / (length or 1))) for name, one in own.items()}
            for own, length in zip(changes, lengths, strict=True)
        ]


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
