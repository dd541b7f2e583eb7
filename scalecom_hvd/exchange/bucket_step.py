"""How far one bucket's step has come: the generator of its method, and what that waits for.

Used by exchange.py, which decides when a step begins, goes on and counts. Imports bucket,
collectives and methods/base.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import record_function

from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import LAST, Step, Wait
from scalecom_hvd.exchange.methods.base import State


class BucketStep:
    """How far one bucket's step has come.

    Attributes:
        waiting: names of its gradients that are not here yet.
        new_state: what the method's state becomes if the step counts.
        state_arrives: what must arrive before its state can be used.
        waits: what its generator waits for now; None: it has not begun, or is over.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.waiting = set(bucket.names)
        self.new_state: State | None = None
        self.state_arrives: Wait[torch.Tensor] | None = None
        self._generator: Step[None] | None = None
        self.waits: Wait[Any] | None = None

    def start(self, generator: Step[None]) -> None:
        """Begin, unless it has begun."""
        if self._generator is None:
            self._generator = generator
            self.waits = next(generator, None)

    def advance(self, up_to_round: int = -1) -> None:
        """Go on as far as no waiting is needed; wait for collectives up to this round."""
        while self.waits is not None:
            patient = self.waits.round <= up_to_round
            if not patient and (self.waits.round == LAST or not self.waits.work.done()):
                return
            if patient:
                with record_function(f"scalecom.wait for {self.waits.what}"):
                    self.waits.work.wait()
            self.waits = next(self._generator, None)

    @property
    def has_more(self) -> bool:
        """Whether something follows what it waits for."""
        return self.waits is not None and self.waits.round < LAST

    def keep_state(self) -> State:
        """The step counts: its new state."""
        self.state_arrives = self.new_state.arrives
        return self.new_state

    def complete_state(self) -> None:
        """Wait until its state can be used."""
        if self.state_arrives is not None:
            self.state_arrives.work.wait()
            self.state_arrives = None

    def end(self) -> dict[str, torch.Tensor]:
        """Close the step; gives {name: what p.grad must become}."""
        self.waiting = set(self.bucket.names)
        self.new_state = self._generator = self.waits = None
        return self.bucket.end()
