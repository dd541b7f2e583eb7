"""Waves: in which order buckets begin, go on and are waited for, and on which channels.

Why ranks that wait for each other cannot deadlock: a rank waits only in `Waves.complete`, which
goes through the buckets wave by wave. A wave holds one bucket of each channel, so all its buckets
can begin at once. Inside a wave, a rank goes round by round. Take two buckets in ScaleCom's cyclic
form. In round 1 the rank waits for both buckets' offsets, in the order of buckets. As soon as a
bucket's offsets arrive, the bucket submits its values. In the last round the rank waits for both
buckets' values. A rank that waits in one round has submitted all collectives of this round and of
all earlier waves. It waits for no collective of a later round or wave. The same holds for every
other rank, so each collective is completed.

Why there are waves: if a rank got far while gradients arrived, some of its channels, not the same
as on other ranks, have begun their second bucket. If it waited for such a bucket before it ended
the first wave, it could wait for a rank that waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import LAST, Collectives, Step, Wait
from scalecom_hvd.exchange.methods.state import State

# For the buckets of one exchange. Each channel may cost a transport threads, and connections to all
# other ranks.
MOST_CHANNELS = 8


class Progress:
    """The progress of a bucket from step to step.

    Attributes:
        step: the step in progress, once all its gradients are here. None: there is none.
        waiting: names of the bucket's gradients that have not arrived yet.
        new_state, state_arrives: the method's state if the step counts, and what it waits for.
        waits: what the generator waits for now. None: the generator has not begun, or has ended.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.step: BucketStep | None = None
        self.waiting = set(bucket.names)
        self.new_state: State | None = None
        self.state_arrives: Wait[torch.Tensor] | None = None
        self._generator: Step[None] | None = None
        self.waits: Wait[Any] | None = None

    def start(self, generator: Step[None]) -> None:
        """Begin the step, unless it has begun, and go on as far as possible without waiting."""
        if self._generator is None:
            self._generator = generator
            self.waits = next(generator, None)
            self.advance()

    def advance(self, up_to_round: int = -1) -> None:
        """Go on as far as possible. Wait only for collectives up to this round."""
        while self.waits is not None:
            patient = self.waits.round <= up_to_round
            if not patient and (self.waits.round == LAST or not self.waits.work.done()):
                return
            if patient:
                with record_function(f"scalecom.wait for {self.waits.what}"):
                    self.waits.work.wait()
            self.waits = next(self._generator, None)

    @property
    def has_begun(self) -> bool:
        """Whether the step has begun, and has not ended."""
        return self._generator is not None

    @property
    def has_more(self) -> bool:
        """Whether more than the step's end follows what the step waits for now."""
        return self.waits is not None and self.waits.round < LAST

    def keep_state(self) -> State:
        """Keep and return the new state, because the step counts."""
        self.state_arrives = self.new_state.arrives
        return self.new_state

    def complete_state(self) -> None:
        """Wait until the method's state can be used."""
        if self.state_arrives is not None:
            self.state_arrives.now()
            self.state_arrives = None

    def roll_back(self) -> None:
        """Undo the step as if it never happened. The method's next state is dropped."""
        self.step.roll_back()
        if self.new_state is not None and self.new_state.arrives is not None:
            self.new_state.arrives.work.wait()  # its name will be used again

    def give_up(self) -> None:
        """Undo the step, if there is one, without waiting for other ranks."""
        if self.step is not None:
            self.step.roll_back()
            self.step.release()
            self.step = None

    def end(self) -> dict[str, torch.Tensor]:
        """Close the step. Returns {name: average (N,)}."""
        averages = self.step.grads
        self.step.release()
        self.waiting = set(self.bucket.names)
        self.step = self.new_state = self._generator = self.waits = None
        return averages


class Waves:
    """The steps of all buckets (`all`, and `of` {name of a tensor: step}) on these channels.

    On one channel, steps begin in the order of buckets, each when the one before has submitted
    everything, so a transport need not look at names there. `begin` makes the generator of a step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        channels: Sequence[Collectives],
        begin: Callable[[Progress, Collectives], Step[None]],
    ) -> None:
        self.all = [Progress(bucket) for bucket in buckets]
        self.of = {name: step for step in self.all for name in step.bucket.names}
        self._channels, self._begin = channels, begin

    def advance(self, steps: Sequence[Progress]) -> None:
        """Let all steps go on, then begin those of `steps` that can, without waiting."""
        for step in self.all:
            step.advance()
        self.begin(steps)

    def begin(self, steps: Sequence[Progress], all_are_here: bool = False) -> None:
        """Begin the steps whose gradients are here, or count as zeros, if their channel is free."""
        taken: set[int] = set()
        for step in steps:
            channel = step.bucket.number % len(self._channels)
            if channel not in taken and (all_are_here or not step.waiting):
                step.start(self._begin(step, self._channels[channel]))
            if step.has_more or not step.has_begun:
                taken.add(channel)

    def complete(self, steps: Sequence[Progress]) -> None:
        """Begin these steps, and wait for everything.

        All buckets of a wave wait for one round before any waits for the next. So what follows is
        submitted early, and in the same order on every rank. A wave is over when all is submitted.
        """
        channels = len(self._channels)
        for _, group in itertools.groupby(steps, lambda step: step.bucket.number // channels):
            self.begin(steps, all_are_here=True)
            wave, up_to_round = list(group), 0
            while any(step.has_more for step in wave):
                for step in wave:
                    step.advance(up_to_round)
                up_to_round += 1
        for step in steps:
            step.advance(LAST)
