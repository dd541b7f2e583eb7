"""The oracle of local steps: Qsparse-local-SGD (Basu et al., 2019, arXiv 1906.02367), algorithms 1 and 2, in plain NumPy.

x: the common parameters, x_i: worker i's, started from x at its last synchronisation, `starts[i]`.

    every step:  x_i <- update_i(x_i, gradient_i)
    workers that synchronise after it:    change_i = start_i - x_i;  all others: no part in the exchange
    exchange:    x <- x - (1/n) * sum_i sent_i, with error compensation as in methods.py
    those again: x_i <- x, start_i <- x

Imports NumPy, schedule and the oracle of the methods alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from oracles.methods import MethodReference

from scalecom_hvd.schedule import Schedule

Arrays = dict[str, np.ndarray]


class LocalStepsReference:
    """n workers with parameters of their own.

    exchange: what averages changes, with a residue for each worker.  parameters: {name: array}, where all begin.
    update: gives worker i's new parameters from its old ones and its gradients, its own optimizer's step.
    """

    def __init__(
        self,
        exchange: MethodReference,
        parameters: Mapping[str, np.ndarray],
        schedule: Schedule,
        update: Callable[[int, Arrays, Arrays], Arrays],
    ) -> None:
        n = exchange.n_workers
        self.exchange, self.schedule, self.update = exchange, schedule, update
        self.common: Arrays = {name: value.copy() for name, value in parameters.items()}
        self.workers: list[Arrays] = [dict(self.common) for _ in range(n)]
        self.starts: list[Arrays] = [dict(self.common) for _ in range(n)]
        self.taken = 0

    def step(self, grads: Sequence[Arrays]) -> None:
        """Every worker's own step, and the exchange, if it is due."""
        n = len(self.workers)
        self.workers = [self.update(i, mine, grad) for i, (mine, grad) in enumerate(zip(self.workers, grads, strict=True))]
        self.taken += 1
        due = self.schedule.due(self.taken, n)
        if not due:
            return
        self.exchange.present = due if self.schedule.asynchronous else None
        changes = [
            {name: self.starts[i][name] - self.workers[i][name] if i in due else np.zeros_like(x) for name, x in self.common.items()}
            for i in range(n)
        ]
        averages = self.exchange.step(changes)
        self.common = {name: x - averages[name] for name, x in self.common.items()}
        for i in due:
            self.workers[i], self.starts[i] = dict(self.common), dict(self.common)
