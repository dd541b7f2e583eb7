"""An exchange between nodes, for an optimizer whose ranks have whole gradients.

A copy of each gradient that backward brings is first averaged inside the node; p.grad stays what
the script sees. The exchange gets this rank's shard of the average, at the latest when averages are
asked for. All ranks of all nodes ask for averages equally often, so all of them take part in what
ranks tell each other (new_gradients.py). DDP's hook does the same by itself, because its gradients
come in buckets and in one order. Imports exchange, node, new_gradients and methods/base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from scalecom_hvd.exchange.collectives import Collectives, gather_objects
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.new_gradients import CHANGED, check_same_parameters, digest, fill_in
from scalecom_hvd.exchange.node import Node, Shards, WholeBuffer


class NodeExchange:
    """The exchange of one optimizer's gradients. For the methods, see Exchange.

    Args:
        parameters: {name: parameter} of all that are trained, in the model's order.
        method: how tensors are averaged. From now on the method serves these parameters.
        peers: the ranks at this rank's position in other nodes.
        node: the ranks of this node. It also knows all ranks of all nodes.
        groups: lists of names that share a bucket.
        sparse_as_dense: whether sparse gradients are made dense. If not, they are refused.

    Attributes:
        trained: the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        peers: Collectives,
        node: Node,
        groups: Sequence[Sequence[str]] | None,
        sparse_as_dense: bool,
    ) -> None:
        self._node = node
        self._parameters = dict(parameters)
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self.trained = self._name_of.keys()
        self._sparse_as_dense, self._is_new = sparse_as_dense, True
        node.shards = self._shards = Shards(parameters, node)
        self._exchange = Exchange(
            self._shards.stand_ins,
            method,
            peers,
            groups=groups,
            asks_for_news=True,
            compares_parameters=False,
            node=node,
        )
        method.mix_momentum(parameters, peers)
        # {name: (flat gradient, its buffer)} of the gradients that backward brought in this step.
        self._brought: dict[str, tuple[torch.Tensor, WholeBuffer]] = {}
        # Those that the exchange does not have yet.
        self._unreported: dict[str, None] = {}
        self._averages: dict[str, torch.Tensor] = {}

    def must_exchange(self, fresh: bool) -> bool:
        """See Exchange. All ranks of all nodes get the same answer, or the same error."""
        if self._is_new:
            self._compare_parameters()
        try:
            return self._exchange.must_exchange(fresh)
        except RuntimeError as error:
            if str(error) == CHANGED:  # on all ranks
                self._forget()
            raise

    def _compare_parameters(self) -> None:
        """Raise RuntimeError, on all ranks, if they begin with different parameters."""
        mine = {"parameters": digest(self._parameters.values())}
        everyone = gather_objects(self._node.everyone, mine, "agreement.parameters")
        try:
            check_same_parameters(everyone)
        except RuntimeError:  # on all ranks
            self._forget()
            raise
        self._is_new = False

    @torch.no_grad()
    def ready(self, parameter: torch.Tensor) -> None:
        """Report a complete gradient of this rank. Waits for nothing."""
        name = self._name_of[parameter]
        fill_in(parameter, False)
        if parameter.grad.is_sparse and not self._sparse_as_dense:
            raise RuntimeError(
                f"the gradient of {name} is sparse, but sparse gradients are not averaged between "
                "nodes. Give sparse_as_dense=True, or make the embedding with sparse=False"
            )
        if not self._brought:
            self._node.bytes_sent = 0
            self._averages.clear()
        self._bring(name)
        self._exchange.mark(name)
        for other in list(self._unreported):
            if self._brought[other][1].is_averaged():
                self._report(other)

    def _bring(self, name: str) -> None:
        """Begin to average a gradient inside the node."""
        parameter = self._parameters[name]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat = (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1).clone()
        self._brought[name] = flat, WholeBuffer(flat, self._node, name)
        self._unreported[name] = None

    def _report(self, name: str) -> None:
        """Give the exchange this rank's shard of the node's average."""
        del self._unreported[name]
        flat, buffer = self._brought[name]
        buffer.wait()
        stand_in = self._shards.stand_ins[name]
        stand_in.requires_grad_(self._parameters[name].requires_grad)
        stand_in.grad = self._shards.cut(name, flat)
        self._exchange.ready(stand_in)

    @torch.no_grad()
    def result(self, parameter: torch.Tensor) -> torch.Tensor:
        """The average over all ranks; see Exchange."""
        if not self._averages:
            try:
                self._finish()
            finally:  # after an error the exchange has given the step up
                self._brought.clear()
                self._unreported.clear()
        return self._averages.pop(self._name_of[parameter])

    def _finish(self) -> None:
        for name in list(self._unreported):
            self._report(name)
        self._exchange.finish()
        self._exchange.look()
        for name, (flat, buffer) in self._brought.items():
            stand_in = self._shards.stand_ins[name]
            average = self._exchange.result(stand_in).clone()  # it may be a part of `flat`
            stand_in.grad = None
            self._shards.cut(name, flat.zero_()).copy_(average)
            buffer.complete()
        submitted = self._node.note_submitted()
        for name, (flat, buffer) in self._brought.items():
            buffer.wait()
            self._averages[name] = flat.view(self._parameters[name].shape)
        submitted.wait()

    def start_over(self) -> None:
        """The optimizer's state is loaded.

        Raises:
            RuntimeError: it is loaded between backward() and step(). Other ranks may have to meet
                what this rank has sent inside its node, even if they load nothing themselves.
        """
        if self._brought:
            raise RuntimeError(
                "load_state_dict() was called between backward() and step(), which does not work "
                "with nodes=. Call it before backward(), or after step()"
            )
        self._exchange.start_over()

    def _forget(self) -> None:
        """Leave nothing under way in the node: all ranks have to send what some have sent."""
        for name in self._parameters.keys() - self._brought.keys():
            self._bring(name)
        for _, buffer in self._brought.values():
            buffer.wait()
        self._brought.clear()
        self._unreported.clear()
        for stand_in in self._shards.stand_ins.values():
            stand_in.grad = None
