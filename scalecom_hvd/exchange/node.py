"""The ranks of one node, each of which holds a part of every gradient.

Inside a node, links are fast, so gradients are averaged whole. Every rank then has its own part of
the average, its *shard*. Between nodes, the ranks that hold the same shard, the *peers*, exchange
it: they are the Collectives of an Exchange. So an exchange sees ordinary tensors. Only one question
goes beyond the peers: whether a step counts. In another shard, a gradient may not be finite, or the
exchange may have failed.

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
        ranks: the collectives of this node's ranks, used for nothing else. Their `all_reduce` gives
            sums.
        everyone: the collectives of all ranks of all nodes, if a script may ask for averages at any
            time. None: backward asks for them.
        number: this node's number. It is the same on all ranks of the node, and differs from those
            of other nodes that they are in. None: the next that this process has not used.

    Attributes:
        whole: {name: shape} of the tensors that the node's ranks share out. None: the shapes are
            those of their parts.
        size: how many ranks the node has, and so how many shards every tensor has.
        position: this rank's position in the node: which shard it holds.
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

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flattened tensor: a view."""
        size = -(-flat.numel() // self.size)
        return flat[self.position * size : (self.position + 1) * size]

    @contextlib.contextmanager
    def ending_a_step(self) -> Iterator[None]:
        """Enclose the end of a step. If it fails, the other ranks are told, and fail too.

        Without this, they would wait for ever for a rank that lost a peer.
        """
        self._has_told = False
        try:
            yield
        except BaseException:
            if not self._has_told:
                self._tell(GAVE_UP, 0)
            raise

    def counts(self, is_sound: bool, step: int, votes: int = 0) -> tuple[bool, int]:
        """Whether the step is sound in all shards, so that it counts. Waits for all ranks.

        Args:
            is_sound: whether it is sound in this shard; the same on all peers.
            step: the step's number.
            votes: what this shard's ranks have told each other.

        Returns:
            Whether it counts, and the largest of all shards' votes.

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
        """(ranks, 3): the state, the step and the votes of every rank of the node.

        A rank that gives up does not wait, because the others may be lost.
        """
        self._has_told = True
        row = torch.tensor([state, step, votes], dtype=torch.int64, device="cpu")
        work = self._ranks.gather(row[None], self._name)
        return row[:0] if state == GAVE_UP else work.wait()

    def add_up(self, buffer: torch.Tensor, what: str) -> Work:
        """Add up the buffers of all ranks of the node, in place.

        All ranks call it, in the same order if their transport does not look at names.

        This is an all-reduce instead of a reduce-scatter and an all-gather. It sends twice as much,
        but over fast links. It needs no buffer in the order of shards, and is quicker over Gloo.

        Args:
            buffer: float32 or float64.
            what: a name that no other sum under way has.
        """
        self.bytes_sent += 2 * (self.size - 1) * buffer.nbytes // self.size
        return self._ranks.all_reduce(buffer, f"{self._name}.{what}")

    def note_submitted(self) -> Work | None:
        """Tell all ranks of all nodes that this rank has submitted all of a step.

        The work ends when all ranks have told. A rank that leaves shuts Horovod down on all ranks.
        Without this, that could happen while a node waits for a slower rank. None: `everyone` is.
        """
        if self.everyone is None:
            return None
        return self.everyone.gather(torch.zeros(1, device="cpu"), f"{self._name}.submitted")
