"""p.grad in and out, for optimizers whose ranks have whole gradients.

Hooks report parameters (`ready`), and synchronize() asks for averages (`result`). In between, the
exchange sees named flat gradients. What is special about p.grad is here: it may be sparse, a script
may change it on its way, or put something there by hand (new_gradients.py).

In every synchronize(), ranks make one all-reduce besides the data, the *header*: whether some rank
has new gradients, changed gradients while they were averaged, or has given up what ranks agreed on.
After a change, all ranks refuse together. If some rank gave up, all agree anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from scalecom_hvd.exchange.bucket import Groups
from scalecom_hvd.exchange.collectives import Collectives, gather_objects
from scalecom_hvd.exchange.devices import recorded
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Face, Options, Told
from scalecom_hvd.exchange.gradients import flat_tensor, unflat_gradient
from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.new_gradients import (
    CHANGED,
    NewGradients,
    SparseAverage,
    check_same_parameters,
    digest,
    fill_in,
)
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.node_exchange import NodeExchange
from scalecom_hvd.exchange.unused_averages import UnusedAverages


class StartsAlike(Face):
    """A face whose ranks must begin with the same parameters, or shards of them.

    refuses: whether differences are refused. Stock Horovod trains with them, so its face warns.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], refuses: bool = True, of_shards: bool = False
    ) -> None:
        self._own, self._is_new, self._refuses = dict(parameters), True, refuses
        self._of_shards = of_shards

    def tell(self) -> Told:
        """See Face."""
        return {"parameters": digest(self._own.values()) if self._is_new else None}

    def hear(self, everyone: Sequence[Told], elsewhere: Collection[str]) -> None:
        """See Face."""
        check_same_parameters(everyone, self._refuses, self._of_shards)
        self._is_new = False

    def aborted(self, restarted: bool) -> None:
        """See Face."""
        self._is_new = self._is_new or restarted


class OptimizerGradients(StartsAlike):
    """The gradients of one optimizer on this rank: those of its `trained` parameters.

    Args:
        parameters, method, collectives, groups, refuses: see Exchange, Options and StartsAlike.
            With nodes, collectives are the ranks at this rank's position in other nodes.
        sparse_as_dense: whether sparse gradients are made dense.
        send_sparse: a function that averages a gradient that stays sparse.
        node: this rank's node, which also knows all ranks. None: each rank is one of its own.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        groups: Groups | None,
        sparse_as_dense: bool,
        send_sparse: SparseAverage,
        node: Node | None = None,
        refuses: bool = True,
    ) -> None:
        super().__init__(parameters, refuses)
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self.trained = self._name_of.keys()
        self._sparse_as_dense, self._send_sparse = sparse_as_dense, send_sparse
        self._node = node
        # All ranks of all nodes: they have p.grad.
        self._everyone = collectives if node is None else node.everyone
        self._unused = UnusedAverages(parameters, calls_hooks=True)
        who, options = (parameters, method, collectives), Options(groups, unused=self._unused)
        self._stage: Exchange | NodeExchange
        if node is None:
            settings = {"sparse_as_dense": sparse_as_dense}
            self.exchange = self._stage = Exchange(*who, options, face=self, settings=settings)
        else:
            self._stage = NodeExchange(*who, node, options, self)
            self.exchange = self._stage.exchange
        self._news = NewGradients(self._everyone, self.exchange.names, parameters)
        # For the header. None: ranks have not agreed yet.
        self._channel: Collectives | None = None
        # {name: a function that waits for its average} of the sparse gradients that travel. None:
        # nothing travels now.
        self._sparse: dict[str, Callable[[], torch.Tensor] | None] = {}
        self._averages: dict[str, torch.Tensor] = {}
        method.mix_momentum(parameters, collectives)

    def ready(self, parameter: torch.Tensor) -> None:
        """Report a trained parameter's .grad, or zeros for None. Hooks call it: it never waits."""
        name, exchange = self._name_of[parameter], self.exchange
        exchange.notice_restart()
        if not exchange.in_step():
            self._news.begin()
        fill_in(parameter, name in self._sparse)
        if name in self._sparse and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_sparse(1)
        self._news.mark(name)  # if a script changed this gradient now, that would be lost
        stays_sparse = parameter.grad.is_sparse and not self._sparse_as_dense
        if name in self._sparse or (stays_sparse and not exchange.agreed):
            with exchange.entered(joins=False):
                if self._node is not None:
                    raise RuntimeError(
                        f"the gradient of {name} is sparse, but sparse gradients are not averaged "
                        "between nodes. Give sparse_as_dense=True, or make the embedding with "
                        "sparse=False"
                    )
                self._sparse[name] = self._send_sparse(parameter)
                exchange.ready_elsewhere(name)
            return
        flat = flat_tensor(parameter.grad)
        if self._node is not None:  # p.grad stays what the script sees
            flat = flat.clone()
        self._stage.ready(name, flat, parameter.requires_grad)

    def result(self, parameter: torch.Tensor) -> torch.Tensor:
        """What .grad must become; NaN in a skipped step. The first call waits for all ranks.

        Call it once for each parameter, when every gradient of this rank has been reported.
        """
        name = self._name_of[parameter]
        if name not in self._averages:
            self._finish()
        return self._averages.pop(name)

    @torch.no_grad()
    def _finish(self) -> None:
        for name, flat in self._stage.finish().items():
            parameter = self._own[name]
            is_own = self._node is None  # whether the average is where p.grad is
            average = unflat_gradient(parameter, flat) if is_own else flat.view(parameter.shape)
            self._averages[name] = average
        self._sparse = dict.fromkeys(self._sparse)
        self._news.end()

    # What ranks tell each other.

    def must_exchange(self, fresh: bool) -> bool:
        """Whether a synchronize() that begins now has gradients to exchange.

        If so, the optimizer reports all of them, and asks for results. If backward gave no rank any
        since the last exchange (`fresh`), gradients become what Horovod's average (or sum) of them
        is. Residues, leader and step then stay as they are.

        Raises:
            RuntimeError: on all ranks, if gradients were changed on some rank after they arrived,
                or if ranks of nodes begin with different parameters.
        """
        if self._node is not None and self._is_new:
            try:
                everyone = gather_objects(self._everyone, self.tell(), "agreement.start")
                check_same_parameters(everyone, self._refuses)
            except RuntimeError:
                self._stage.complete_collectives(alike=False)
                raise
            self._is_new = False
        with self.exchange.entered():
            self.exchange.notice_restart()
            has_gradients = self._ask_all(fresh)
        for parameter in () if has_gradients else self._own.values():
            if parameter.grad is not None:
                recorded(parameter.grad)
        return has_gradients

    def _ask_all(self, fresh: bool) -> bool:
        changed, news = self._has_changed(), self._news
        if self._channel is not None:
            is_any_fresh, is_any_changed, has_any_given_up = self._header(fresh, changed)
            if not (is_any_fresh or self._came_by_hand()):
                return False
            if is_any_changed:
                for name in () if has_any_given_up else self._sparse:
                    if self._sparse[name] is None:  # none came here, but another rank waits for it
                        self.ready(self._own[name])
                self._stage.complete_collectives(alike=not has_any_given_up)
                for wait in () if has_any_given_up else self._sparse.values():
                    wait()
                raise RuntimeError(CHANGED)
            if not has_any_given_up:
                return True
            # If this rank has begun a step, the step is rolled back, and begins again once ranks
            # have agreed. Sparse gradients are on their way already.
            if self.exchange.agreed:
                sparse = self._sparse
                self.exchange.begin_again()
                self._sparse = sparse
            self._channel = None
        under_way = {name: wait for name, wait in self._sparse.items() if wait is not None}
        return news.ask_at_first(fresh, changed, under_way) or self._came_by_hand()

    def _came_by_hand(self) -> bool:
        if self._news.came_by_hand(self._sparse, self._send_sparse):
            self._unused.warn_of_replaced()
            return True
        self._unused.end(())
        return False

    def _header(self, fresh: bool, changed: bool) -> tuple[bool, ...]:
        """Whether any rank has new gradients, has changed some, and has given up. Waits for all."""
        mine = [fresh, changed, not self.exchange.agreed]
        header = torch.tensor(mine, dtype=torch.float64, device="cpu")
        total = self._channel.all_reduce(header, self.exchange.names("agreement.header")).wait()
        return tuple(bool(number) for number in total)

    def _has_changed(self) -> bool:
        """Whether a gradient was changed after it arrived, if that matters."""
        # The other ranks wait for this rank's header, perhaps before they submit what this rank's
        # own stream waits for.
        with self.exchange.streams.left():
            changed = self._news.changed()
            if self._node is None and changed and not self.exchange.holds_gradients:
                # Gradients are exchanged as they are now. Only sparse gradients travel already.
                # `ready` marks them on the script's streams, where `changed` compares them.
                for name in changed:
                    if name not in self._sparse:
                        self.ready(self._own[name])  # it may be another tensor
                changed = [name for name in changed if name in self._sparse]
        if changed:
            self.exchange.keep_gradients()
        return bool(changed)

    # What the exchange calls.

    def hear(self, everyone: Sequence[Told], elsewhere: Collection[str]) -> None:
        """See Face. Sparse gradients that did not arrive here take part as empty ones."""
        if self._node is None:
            super().hear(everyone, elsewhere)
        self._channel = self.exchange.channel if self._node is None else self._everyone
        for name in sorted(elsewhere):
            if self._sparse.get(name) is None:
                parameter = self._own[name]
                parameter.grad = parameter.grad.to_sparse(1)
                self._sparse[name] = self._send_sparse(parameter)

    def average_others(self) -> Iterable[torch.Tensor]:
        """See Face."""
        sparse = {name: wait() for name, wait in self._sparse.items()}
        self._averages = dict(sparse)
        return [average._values() for average in sparse.values()]

    def aborted(self, restarted: bool) -> None:
        """See Face."""
        super().aborted(restarted)
        if restarted:
            self._channel = None
        self._sparse = dict.fromkeys(self._sparse)
        self._averages = {}
        self._news.give_up()

    def start_over(self) -> None:
        """Forget the step in progress, if any, because the optimizer's state was loaded.

        Raises:
            RuntimeError: with nodes, between backward() and step().
        """
        # Other ranks may have to meet what this rank has sent inside its node, even if they load
        # nothing themselves.
        if self._node is not None and self._stage.in_step():
            raise RuntimeError(
                "load_state_dict() was called between backward() and step(), which does not work "
                "with nodes=. Call it before backward(), or after step()"
            )
        if self.exchange.in_step():
            self.exchange.abort()
