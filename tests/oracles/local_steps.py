"""The oracle of local steps in plain NumPy: Qsparse-local-SGD, algorithms 1 and 2.

From Basu et al., 2019, arXiv 1906.02367. x: the common parameters. x_i: worker i's, started from x
at its last synchronisation, `starts[i]`.

    every step:  x_i <- update_i(x_i, gradient_i)
    workers that synchronise after it:  change_i = start_i - x_i; all others have no part
    they average:  x <- outer(x, (1/n) * sum_i sent_i), with error compensation as in methods.py;
        without an outer optimizer the average is subtracted
    those again:  x_i <- x, start_i <- x

With an overlap all this counts some steps later, and x_i <- x + what these steps changed of it.

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
        parameters: {name: array}, where all begin.
        schedule: when workers synchronise.
        update: gives worker i's new parameters from its old ones and its gradients, its own
            optimizer's step.
        outer: gives the new common parameters from the old ones and the averages.
        overlap: how many steps are taken while averages travel.

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
        schedule: Schedule,
        update: Callable[[int, Arrays, Arrays], Arrays],
        outer: Callable[[Arrays, Arrays], Arrays] | None = None,
        overlap: int = 0,
    ) -> None:
        n = method.n_workers
        self.method, self.schedule, self.update = method, schedule, update
        self.outer = outer or _subtract
        self.common: Arrays = {name: value.copy() for name, value in parameters.items()}
        self.workers: list[Arrays] = [dict(self.common) for _ in range(n)]
        self.starts: list[Arrays] = [dict(self.common) for _ in range(n)]
        self.taken = 0
        self.overlap = overlap
        # (when their average arrives, all changes, where every worker was when they were sent)
        self.travelling: tuple[int, list[Arrays], list[Arrays]] | None = None

    def step(self, grads: Sequence[Arrays]) -> None:
        """Every worker's own step, and the synchronisation, if one is due."""
        n = len(self.workers)
        self.workers = [self.update(i, self.workers[i], grads[i]) for i in range(n)]
        self.taken += 1
        if self.travelling is not None and self.taken == self.travelling[0]:
            self._arrive()
        due = self.schedule.due(self.taken, n)
        if not due:
            return
        self.method.senders = due if self.schedule.asynchronous else None
        changes = [self._change(i, i in due) for i in range(n)]
        if self.overlap:
            self.travelling = (self.taken + self.overlap, changes, list(self.workers))
            return
        averages = self.method.step(changes)
        self.common = self.outer(self.common, averages)
        for i in due:
            self.workers[i], self.starts[i] = dict(self.common), dict(self.common)

    def _arrive(self) -> None:
        """The common parameters move; what a worker did meanwhile, it did from there."""
        _, changes, sent_from = self.travelling
        self.travelling = None
        self.common = self.outer(self.common, self.method.step(changes))
        for i, (now, then) in enumerate(zip(self.workers, sent_from, strict=True)):
            self.workers[i] = {
                name: x + (now[name] - then[name]) for name, x in self.common.items()
            }
            self.starts[i] = dict(self.common)

    def _change(self, i: int, is_due: bool) -> Arrays:
        if not is_due:
            return {name: np.zeros_like(x) for name, x in self.common.items()}
        return {name: self.starts[i][name] - self.workers[i][name] for name in self.common}


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
