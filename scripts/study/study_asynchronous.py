"""Local steps with a separate schedule for each rank, on simulated ranks.

This is Qsparse-local-SGD, algorithm 2 (Basu et al., 2019, arXiv 1906.02367): each rank synchronises
after its own number of steps. On real ranks this saves nothing, because no collective lets a rank
run ahead of the others. So only simulated ranks have it, to compare it with algorithm 1
(scalecom_hvd/exchange/local/local_steps.py). Below, x stands for the common parameters, and
start_i for the x_i of rank i's last synchronisation.

    every step:   x_i <- optimizer_i(x_i, gradient_i)
    if any rank synchronises after it:
        the ranks that synchronise send start_i - x_i; the others send nothing
        x <- x - the average over all ranks
        on the ranks that synchronise: x_i, start_i <- x
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Options
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.exchange.simulator import Network, SimulatedCollectives


class AsynchronousRanks:
    """Simulated ranks that take local steps, each with its own H.

    Args:
        ranks: the H of every rank.
        make_parameters: a function that is called with a rank, and returns its
            {name: torch.nn.Parameter} in the model's order.
        compression: the method's class.
        **settings: what the method's class takes.

    Attributes:
        parameters, methods: each rank's parameters and method.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        make_parameters: Callable[[int], dict[str, torch.Tensor]],
        compression: Callable[..., Method],
        **settings: Any,
    ) -> None:
        self._network = Network(len(ranks))
        weakref.finalize(self, self._network.close)
        self.parameters = [make_parameters(rank) for rank in range(len(ranks))]
        self.methods = [compression(**settings) for _ in ranks]
        self._steps = [
            AsynchronousSteps(parameters, method, SimulatedCollectives(self._network, rank), ranks)
            for rank, (parameters, method) in enumerate(
                zip(self.parameters, self.methods, strict=True)
            )
        ]

    def take_steps(self, takes: Sequence[Callable[[], object]]) -> None:
        """Let every rank's own optimizer take a step, and synchronise the ranks that are due."""
        steps = zip(self._steps, takes, strict=True)
        self._network.run([functools.partial(own.step, take) for own, take in steps])

    def synchronise(self) -> None:
        """Synchronise all ranks now."""
        self._network.run([own.synchronise for own in self._steps])


class AsynchronousSteps:
    """The local steps of one simulated rank. Each rank has its own H.

    Args:
        parameters: {name: parameter} of all trained parameters, the same on all ranks.
        method: how changes are averaged.
        collectives: how this rank reaches the others.
        ranks: the H of every rank.

    Attributes:
        common: {name: x}, float32 or float64, the same on all ranks.
        exchange: averages the changes.

    Raises:
        ValueError: the method uses look-ahead, which must know which ranks synchronise next; or
            `ranks` does not hold one number of steps for each rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        ranks: Sequence[int],
    ) -> None:
        if method.config.lookahead:
            raise ValueError(
                "lookahead does not work here, because it must know which ranks synchronise next: "
                "leave lookahead out"
            )
        if len(ranks) != collectives.size or min(ranks) < 1:
            raise ValueError(
                "there must be one number of steps (at least 1) for each of the "
                f"{collectives.size} ranks, not {list(ranks)}"
            )
        self._parameters, self._ranks = parameters, ranks
        self._position, self._taken = collectives.position, 0
        self.common = {
            name: torch.nn.Parameter(p.detach().to(wide_dtype(p), copy=True))
            for name, p in parameters.items()
        }
        self._starts = {name: x.detach().clone() for name, x in self.common.items()}
        self.exchange = _Exchange(self.common, method, collectives, ranks)

    def step(self, take: Callable[[], object]) -> None:
        """Take one step of this rank's own optimizer, and synchronise if that is due."""
        take()
        self._taken += 1
        due = _due(self._ranks, self._taken)
        if due:
            self._synchronise(due)

    def synchronise(self) -> None:
        """Synchronise all ranks now."""
        self._synchronise(range(len(self._ranks)))

    @torch.no_grad()
    def _synchronise(self, due: Sequence[int]) -> None:
        mine = self._position in due
        self.exchange.senders = due
        for name, x in reversed(self.common.items()):
            parameter, flat = self._parameters[name], None
            if mine:
                change = self._starts[name].to(parameter.dtype).to(x.dtype) - parameter
                flat = change.view(-1)
            # A frozen tensor sends nothing, and its residue stays as it is.
            self.exchange.ready(name, flat, mine and parameter.requires_grad)
        averages = self.exchange.finish()
        for name, x in self.common.items():
            x.sub_(averages[name].view(x.shape))
            if mine:
                self._parameters[name].copy_(x)
                self._starts[name].copy_(x)


class _Exchange(Exchange):
    """An exchange in which only some ranks have something to send.

    Attributes:
        senders: the positions of these ranks in the coming step.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        ranks: Sequence[int],
    ) -> None:
        self.senders: Sequence[int] = range(len(ranks))
        self._ranks = ranks
        super().__init__(parameters, method, collectives, Options(is_scaled=False))

    def leader_at(self, step: int, bucket: int) -> int:
        """Draw one of the senders, the same one on all ranks.

        If ranks took turns, and the same ranks sent every other time, some would never lead.
        """
        turn = step + (bucket if self.residues.config.leader == "staggered" else 0)
        return self.senders[random.Random(turn).randrange(len(self.senders))]

    def synchronisations_in(self, steps: int) -> int:
        """How many of the first `steps` steps are followed by some rank's synchronisation."""
        return sum(bool(_due(self._ranks, step)) for step in range(1, steps + 1))


def _due(ranks: Sequence[int], step: int) -> list[int]:
    """The positions of the ranks that synchronise after this step: 1, 2, ..."""
    return [rank for rank, steps in enumerate(ranks) if step % steps == 0]
