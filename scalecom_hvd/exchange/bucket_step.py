"""How far one bucket's step has come: the generator of its method, and what that waits for.

Used by exchange.py, which decides when a step begins, goes on and counts.

Why ranks that wait for each other cannot deadlock: a rank waits only in `BucketSteps.complete`,
which goes through the buckets wave by wave. A wave holds one bucket of each channel, so that all
of the first wave can begin at once. Inside a wave, a rank goes round by round. Take two buckets in
ScaleCom's cyclic form: it waits for both buckets' offsets (round 1), in the order of buckets; as
each arrives, that bucket submits its values, and then it waits for both buckets' values (the last
round). A rank that waits in one round has submitted all collectives of this round and of all
earlier waves, and waits for none of a later round or wave; so has every other rank, and each
collective is completed.

Why waves: if a rank has got far while gradients arrived, some channels have begun their second
bucket, and which ones differs from rank to rank. If a rank waited for such a bucket before it ends
the first wave, it could wait for a rank that waits for it.

Imports bucket, collectives and methods/base.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import LAST, Collectives, Step, Wait
from scalecom_hvd.exchange.methods.base import State

# Of one exchange's buckets: each may cost a transport threads, and connections to all other ranks.
MOST_CHANNELS = 8


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
        """Begin, unless it has begun, and go on as far as no waiting is needed."""
        if self._generator is None:
            self._generator = generator
            self.waits = next(generator, None)
            self.advance()

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
    def has_begun(self) -> bool:
        """Whether the step has begun, and has not ended."""
        return self._generator is not None

    @property
    def may_begin(self) -> bool:
        """Whether all gradients are here, and the step has not begun."""
        return not (self.waiting or self.has_begun)

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


class BucketSteps:
    """The steps of all buckets, and the channels on which their collectives travel.

    Those of one channel begin in the order of buckets, each when the one before has submitted all:
    a transport need not look at names there.

    Args:
        buckets: in order.
        channels: what they share.
        begin: gives the generator of a bucket's step.

    Attributes:
        all: in order.
        of: {name of a tensor: the step of its bucket}.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        channels: Sequence[Collectives],
        begin: Callable[[BucketStep], Step[None]],
    ) -> None:
        self.all = [BucketStep(bucket) for bucket in buckets]
        self.of = {name: step for step in self.all for name in step.bucket.names}
        self._channels, self._begin = channels, begin

    def channel_of(self, bucket: Bucket) -> Collectives:
        """Where its collectives travel."""
        return self._channels[bucket.number % len(self._channels)]

    def advance(self, steps: Sequence[BucketStep]) -> None:
        """Let these begin whose gradients are here, and all go on, without waiting."""
        for step in self.all:
            step.advance()
        self.begin(steps)

    def begin(self, steps: Sequence[BucketStep], all_are_here: bool = False) -> None:
        """Begin those whose gradients are here, where their channel is free.

        Args:
            all_are_here: whether all gradients are, zeros for those that did not come.
        """
        taken: set[int] = set()
        for step in steps:
            channel = step.bucket.number % len(self._channels)
            if channel not in taken and (all_are_here or not step.waiting):
                step.start(self._begin(step))
            if step.has_more or not step.has_begun:
                taken.add(channel)

    def complete(self, steps: Sequence[BucketStep]) -> None:
        """Begin these, and wait for everything.

        All buckets of a wave wait for what comes in one round before any waits for the next: then
        what follows is submitted early, and by every rank in the same order.
        """
        for _, wave in itertools.groupby(steps, key=self._wave_of):
            self.begin(steps, all_are_here=True)
            self._complete_rounds(list(wave))
        for step in steps:
            step.advance(LAST)

    def _wave_of(self, step: BucketStep) -> int:
        """Which place its bucket has among those of its channel."""
        return step.bucket.number // len(self._channels)

    @staticmethod
    def _complete_rounds(wave: Sequence[BucketStep]) -> None:
        """Wait, round by round, until these have submitted everything."""
        up_to_round = 0
        while any(step.has_more for step in wave):
            for step in wave:
                step.advance(up_to_round)
            up_to_round += 1
