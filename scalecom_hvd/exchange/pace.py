"""rate="auto" on one rank: how long its steps take, and on which rung all ranks go on.

The rank at position 0 decides (rate_controller.py). It tells the others by a number that travels
with the first bucket's values, so all ranks take a rung from the same step on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import torch

from scalecom_hvd.bucket_layout import Stats
from scalecom_hvd.exchange.devices import Timer
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.rate_controller import RateController
from scalecom_hvd.stages import LADDER


class Pace:
    """The rung of one exchange, which `residues` know."""

    def __init__(
        self, residues: Residues, ranks: int, position: int, devices: Iterable[torch.device]
    ) -> None:
        self._residues = residues
        decides = position == 0 and ranks > 1
        start = ranks, residues.rung, not residues.step
        self._controller = RateController(*start) if decides else None
        self._timer = Timer(devices)
        self._ended: float | None = None

    def vote(self) -> int:
        """What this rank tells the others: the rung that it decides for, plus 1; else 0."""
        return 0 if self._controller is None else self._controller.rung + 1

    def hear(self, votes: int) -> None:
        """Take the rung that the ranks' votes add up to, from the coming step on."""
        if votes:
            self._residues.take_rung(votes - 1)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Enclose a step's end, in which the caller has nothing to do but to wait for averages."""
        step, rung = self._residues.step, self._residues.rung
        self._timer.start()
        yield
        self._timer.stop()
        began, self._ended = self._ended, time.perf_counter()
        counts, controller = self._residues.step > step, self._controller
        # Until the others know of a change, steps are on the rung before.
        if counts and began and controller is not None and controller.rung == rung:
            controller.note(self._ended - began, self._timer.seconds())

    def stats(self) -> Stats:
        """See Method.stats."""
        rung, controller = self._residues.rung, self._controller
        reason = "see rank 0" if controller is None else controller.reason
        return {"rung": rung, "stage": str(LADDER[rung]), "rung_reason": reason}
