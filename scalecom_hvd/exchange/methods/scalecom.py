"""ScaleCom: the algorithm of the paper, on this page.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
Distributed Training", NeurIPS 2020, arXiv 2104.11125. Numbers in the comments are those of the
steps in `ScaleCom`'s docstring. reference.py and bucket_step.py instead number the two moves of
steps (3) and (5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Step, Wait
from scalecom_hvd.exchange.methods.base import OPTIONAL, Method
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.methods.state import State


class ScaleCom(Method):
    """Cyclic local top-k compression with low-pass filtered residues.

    At step t, with n workers, worker j = t mod n is the leader. Every worker i has a residue m_i
    and a gradient g_i, and does::

        (1)  acc_i = m_i + g_i                    the accumulator
        (2)  I     = top-k of |acc_j|             the leader's choice; its offsets are broadcast
        (3)  v_i   = acc_i at I                   what every worker sends, rounded for the wire
        (4)  g     = (1/n) sum_i v_i at I         one all-reduce; zero elsewhere
        (5)  m_i   = (1 - beta) m_i + beta (acc_i - v_i)        the low-pass filter (eq. 5)

    Steps (3) and (5) are one pass that needs no accumulator: v = m + g and m <- m - beta v at I,
    then m <- m + beta g everywhere.

    A residue holds beta times what waits to be sent, so v_i is g_i plus beta times what waits. With
    `flush`, which is not in the paper, v_i is g_i plus all that waits, at indices where m_i and g_i
    do not have opposite signs. Beta then damps only what training has turned against since.

    With `bits` below 32, which is the default and not in the paper either, v_i is an integer times
    a scale. The scale is the leader's and is broadcast with the offsets. The all-reduce sums the
    integers (integers.py). By (5), rounding errors stay in m_i.

    With look-ahead, the leader of step t + 1 chooses at the end of step t, from its new residue and
    the gradient that it has. The broadcast then hides behind the next forward and backward.

    Args:
        config, loss_scale, diagnostics, fields: see `Method`.

    Raises:
        ValueError, TypeError: a setting cannot work.

    Example:
        >>> ScaleCom(rate=8, bits=4)
    """

    uses = OPTIONAL
    equal_state = ("offsets", "scales")

    @classmethod
    def as_published(cls, rate: float = 100, beta: float = 0.1, **settings: Any) -> ScaleCom:
        """The paper's own algorithm: values of 32 bits, its filter, and the optimizer as it is.

        Example:
            >>> ScaleCom.as_published(rate=400)
        """
        return cls(rate=rate, beta=beta, bits=32, flush=False, nu=1, outliers=None, **settings)

    def step(
        self, bucket: BucketStep, collectives: BucketCollectives, state: State
    ) -> Step[State | None]:
        """One bucket's step, in the form that was asked for."""
        if self.config.lookahead:
            return self.look_ahead(bucket, collectives, state)
        return self.cyclic(bucket, collectives)

    def cyclic(self, bucket: BucketStep, collectives: BucketCollectives) -> Step[None]:
        """The leader chooses in this step, for this step."""
        offsets = bucket.new_offsets()
        if offsets.numel():  # otherwise everything is sent as it is, and there is nothing to tell
            chosen = (yield from bucket.select()) if collectives.leads() else offsets  # (1), (2)
            offsets = yield from collectives.broadcast_choice(chosen, collectives.leader())
        yield from bucket.take_and_accumulate(offsets)  # (3), (5)
        averages = yield from collectives.average_taken()  # (4)
        bucket.receive(offsets, averages)

    def look_ahead(
        self, bucket: BucketStep, collectives: BucketCollectives, state: State
    ) -> Step[State]:
        """The next step's leader chooses in this step. The choice for this step is here already."""
        offsets = bucket.choices.join(state.tensors)
        # Taking comes first, so that the next leader chooses from residues that this step's values
        # have left. Both come before the all-reduce, because they count what is not finite.
        leads = collectives.leads(later=1)
        chosen = yield from bucket.take_and_accumulate(offsets, leads)  # (3), (5), (1), (2)
        travelling = collectives.average_taken()
        next_state = self._broadcast_ahead(bucket, collectives, state, chosen)
        averages = yield from travelling  # (4)
        bucket.receive(offsets, averages)
        return next_state

    def whole_step(
        self, bucket: BucketStep, collectives: BucketCollectives, state: State
    ) -> Step[State | None]:
        """With look-ahead, make the first choice in the last step that is sent whole."""
        if not self.config.lookahead or state.whole_next or not bucket.tensors:
            return None
        leads = collectives.leads(later=1)
        chosen = (yield from bucket.select()) if leads else None
        return self._broadcast_ahead(bucket, collectives, state, chosen)

    def _broadcast_ahead(
        self,
        bucket: BucketStep,
        collectives: BucketCollectives,
        state: State,
        chosen: torch.Tensor | None,
    ) -> State:
        """(2) for the next step."""
        offsets = bucket.new_offsets() if chosen is None else chosen
        travelling = collectives.broadcast_choice(offsets, collectives.leader(later=1))
        # By the next step, every rank has submitted it.
        arrives = Wait("offsets", travelling.work, round=0, then=travelling.then)
        parts = bucket.choices.split(offsets)
        own = {name: {**old, **parts[name]} for name, old in state.tensors.items()}
        return dataclasses.replace(state, tensors=own, arrives=arrives)

    def is_ready(self, names: Collection[str]) -> bool:
        """Whether there is a choice. With look-ahead, there is none before the first step."""
        chosen = ("offsets" in self.run.tensor_states[name] for name in names)
        return not self.config.lookahead or all(chosen)
