"""An exchange with a node in front of it: whole gradients in, averages over all ranks out.

Gradients are averaged inside the node while backward goes on. The exchange averages this rank's
shard of them between nodes, and the node's ranks put their shards together again. A shard is a
contiguous run of the flattened tensor, empty for some ranks if the tensor is small. Ranks begin and
end sums in the node in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scalecom_hvd.exchange.collectives import Collectives, Work
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Face, Options
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.node import Node


@dataclass(eq=False)
class _Brought:
    """A buffer that is averaged in the node, and whole again after the exchange; see `bring`."""

    node: Node
    buffer: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    what: str
    trained: bool

    def __post_init__(self) -> None:
        # In narrow dtypes, sums would overflow, or lose small values. A wide buffer is its own sum.
        self._wide = self.buffer.to(wide_dtype(self.buffer)).div_(self.node.size)
        self.work: Work | None = self.node.add_up(self._wide, self.what)

    def wait(self) -> None:
        """Wait for the sum that is under way. The buffer then holds it."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
            self.buffer.copy_(self._wide)

    def complete(self) -> None:
        """Begin to add other ranks' shards to the buffer, which holds this rank's, and zeros."""
        self._wide.copy_(self.buffer)
        self.work = self.node.add_up(self._wide, self.what)


class NodeExchange:
    """The exchange of named tensors that all ranks have whole. For the contract, see Exchange.

    Its `exchange` averages shards among the `peers`, the ranks at this position in other nodes.
    """

    def __init__(
        self,
        like: Mapping[str, torch.Tensor],
        method: Method,
        peers: Collectives,
        node: Node,
        options: Options | None = None,
        face: Face | None = None,
    ) -> None:
        self._node, self._like = node, dict(like)
        # A single node has nothing to exchange. But ranks that ask each other for news have to
        # agree, which an exchange does.
        self._is_alone = peers.size == 1 and face is None
        node.whole = {name: tuple(tensor.shape) for name, tensor in like.items()}
        shards = {
            name: node.shard_of(tensor.detach().new_zeros(1).expand(tensor.numel()))
            for name, tensor in like.items()
        }
        self.exchange = Exchange(shards, method, peers, options, face=face, node=node)
        self._brought: list[_Brought] = []
        # How many of them the exchange has.
        self._reported = 0

    def ready(self, name: str, flat: torch.Tensor, trained: bool = True) -> None:
        """Report a complete gradient of this rank; see Exchange. It is averaged in place."""
        self.bring(flat, {name: flat}, name, trained)

    def bring(
        self,
        buffer: torch.Tensor,
        gradients: Mapping[str, torch.Tensor],
        what: str,
        trained: bool = True,
    ) -> None:
        """Report a buffer (N,) of gradients. It is averaged in place, and waits for nothing.

        gradients: {name: gradient} of any shape, in the buffer; what: a name of it alone in a step.
        """
        if not self._brought:
            self._node.bytes_sent = 0
        self._brought.append(_Brought(self._node, buffer, gradients, what, trained))
        while not self._is_alone and self._reported < len(self._brought):
            if not self._brought[self._reported].work.done():
                return
            self._report_next()

    def _report_next(self) -> None:
        """Wait for the node's next average, and give the exchange this rank's shards of it."""
        own = self._brought[self._reported]
        self._reported += 1
        own.wait()
        shards = {n: self._node.shard_of(g.reshape(-1)) for n, g in own.gradients.items()}
        self.exchange.ready_all(shards, own.trained)

    @torch.no_grad()
    def finish(self) -> dict[str, torch.Tensor]:
        """Wait for everything; see Exchange. Averages are where the gradients were."""
        try:
            if self._is_alone:
                return self._finish_in_node()
            while self._reported < len(self._brought):
                self._report_next()
            return self._put_together(self.exchange.finish())
        finally:  # after an error the exchange has given the step up
            self.forget()

    def _finish_in_node(self) -> dict[str, torch.Tensor]:
        for own in self._brought:
            own.wait()
        return {name: own for brought in self._brought for name, own in brought.gradients.items()}

    def _put_together(self, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put the averages of all shards together."""
        shards = {name: average.clone() for name, average in shards.items()}  # parts of buffers
        averages = {}
        for own in self._brought:
            own.buffer.zero_()
            for name in own.gradients.keys() & shards.keys():
                gradient = averages[name] = own.gradients[name]
                flat = gradient.reshape(-1)
                self._node.shard_of(flat).copy_(shards[name])
                if flat.data_ptr() != gradient.data_ptr():
                    gradient.copy_(flat.view(gradient.shape))
            own.complete()
        submitted = self._node.note_submitted()
        for own in self._brought:
            own.wait()
        if submitted is not None:
            submitted.wait()
        return averages

    def complete_collectives(self, alike: bool) -> None:
        """See Exchange. In the node, all ranks have to send what some have sent."""
        self.exchange.complete_collectives(alike)
        for name in self._like.keys() - {n for own in self._brought for n in own.gradients}:
            zeros = self._like[name].detach().new_zeros(self._like[name].numel())
            self._brought.append(_Brought(self._node, zeros, {}, name, True))
        self._finish_in_node()
        self.forget()

    def in_step(self) -> bool:
        """Whether gradients were reported that are not averaged yet."""
        return bool(self._brought)

    def forget(self) -> None:
        """Forget what was brought in this step."""
        self._brought, self._reported = [], 0
