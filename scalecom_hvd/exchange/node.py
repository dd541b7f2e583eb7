"""The ranks of one node, each of which holds a part of every gradient.

Inside a node, links are fast, so gradients are averaged whole. Each rank then has its own part of
the average, its *shard*, which the ranks that hold the same shard, the *peers*, exchange between
nodes: they are the Collectives of an Exchange, which sees ordinary tensors. It asks the node only
whether a step counts: in another shard, a gradient may not be finite, or the exchange have failed.
If each rank has the whole model, node_exchange.py cuts its gradients, and puts averages together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from scalecom_hvd.exchange.collectives import CollectiveError, Collectives, Work

GAVE_UP, VOID, SOUND = range(3)


class Node:
    """The ranks of this node. All of them end every step, and ask each other once per step.

    Args:
        ranks: the node's ranks, for nothing else. Their `all_reduce` gives sums.
        everyone: all ranks of all nodes. None: only backward asks for averages, no script.
        number: this node's number, the same on all its ranks. None: the next one not used.

    Attributes:
        whole: {name: shape} of the tensors that are shared out. None: there are only their parts.
        size, position: how many ranks, and shards of a tensor, there are, and which is this one's.
        bytes_sent: the bytes that this rank has sent inside the node since this was set to 0.
    """

    def __init__(
        self, ranks: Collectives, everyone: Collectives | None = None, number: int | None = None
    ) -> None:
        self.everyone = everyone
        # Every rank makes its nodes in the same order.
        number = ranks.numbers.claim() if number is None else number
        self._ranks, self._name = ranks, f"scalecom.node.{number}"
        self.size, self.position = ranks.size, ranks.position
        self.bytes_sent = 0
        self.whole: Mapping[str, tuple[int, ...]] | None = None
        self._has_told = False
        self._gave_up: Work | None = None  # how this rank told so, until the others have heard

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flattened tensor: a view."""
        size = -(-flat.numel() // self.size)
        return flat[self.position * size : (self.position + 1) * size]

    @contextlib.contextmanager
    def ending_a_step(self) -> Iterator[None]:
        """Enclose a step's end: if it fails, tell the others, who would wait for ever, to fail."""
        self._has_told = False
        try:
            yield
        except BaseException:
            if not self._has_told:
                self._tell(GAVE_UP, 0)
            raise

    def counts(self, is_sound: bool, step: int, votes: int = 0) -> tuple[bool, int]:
        """Whether the step is sound in all shards, so that it counts, and the largest vote.

        Waits for all ranks. All peers must pass the same.

        Raises:
            CollectiveError: on all other ranks, if a rank of the node could not end the step.
            RuntimeError: on all ranks, if shards are at different steps.
        """
        states, steps, voted = self._tell(SOUND if is_sound else VOID, step, votes).T.tolist()
        if GAVE_UP in states:
            raise CollectiveError(
                "a rank of this node could not end this step, so its shard was not averaged: see "
                "that rank's own error"
            )
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"the ranks of this node are at different steps, {steps}. Load residues of the "
                "same step on all ranks, or load none on any rank"
            )
        return all(state == SOUND for state in states), max(voted)

    def _tell(self, state: int, step: int, votes: int = 0) -> torch.Tensor:
        """(ranks, 3): the state, the step and the votes of every rank of the node."""
        self._has_told = True
        before, self._gave_up = self._gave_up, None
        if before is not None:
            before.wait()  # its name is used again
        row = torch.tensor([state, step, votes], dtype=torch.int64, device="cpu")
        work = self._ranks.gather(row[None], self._name)
        if state == GAVE_UP:  # this rank does not wait, because the others may be lost
            self._gave_up = work
            return row[:0]
        return work.wait()

    def add_up(self, buffer: torch.Tensor, what: str) -> Work:
        """Add up the float32 or float64 buffers of all ranks of the node, in place.

        All ranks call it in the same order, each time with a name that no sum under way has. An
        all-reduce sends twice as much as a reduce-scatter and an all-gather, but over fast links.
        It needs no buffer in the order of shards, and is quicker over Gloo.
        """
        self.bytes_sent += 2 * (self.size - 1) * buffer.nbytes // self.size
        return self._ranks.all_reduce(buffer, f"{self._name}.{what}")

    def note_submitted(self) -> Work | None:
        """Tell all of `everyone`, if given, that this rank has submitted all of a step.

        The work ends when all have told. A rank that leaves shuts Horovod down on all ranks, and a
        node could still be waiting for a slower rank.
        """
        if self.everyone is None:
            return None
        return self.everyone.gather(torch.zeros(1, device="cpu"), f"{self._name}.submitted")
