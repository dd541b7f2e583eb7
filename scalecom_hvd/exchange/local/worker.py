"""The worker that takes local steps: one rank, or all ranks of a node together.

Inside a node, gradients are averaged whole in every step, so that all ranks of the node step alike.
Each rank has its *shard* of every parameter, sends the change of this shard to its peers in other
nodes, and keeps the shard's residue. If the script sharded the model itself, the shards are the
script's. If every rank has the whole model, a rank's shard is a contiguous run of the flattened
parameter, and the node's ranks put shards together when averages have changed them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from scalecom_hvd.exchange.gradients import local_part, wide_dtype
from scalecom_hvd.exchange.new_gradients import digest
from scalecom_hvd.exchange.node import Node


class Worker(Mapping[str, torch.Tensor]):
    """{name: what this rank averages of a parameter}, which is in the parameter's memory.

    Args:
        parameters: {name: parameter} of all that are trained. In a node, all are sharded (DTensors)
            or none is.
        node: the ranks of this rank's node. None: this rank is a worker by itself.

    Attributes:
        own: {name: what this rank has of a parameter}: the shard, or all of it.

    Raises:
        ValueError: a parameter has no memory that can be cut into runs.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], node: Node | None) -> None:
        self._parameters, self.node = parameters, node
        self._is_cut = node is not None and not any(
            hasattr(parameter, "placements") for parameter in parameters.values()
        )
        self.own: Mapping[str, torch.Tensor] = parameters
        if node is not None:
            node.whole = {name: tuple(p.shape) for name, p in parameters.items()}
            self.own = parameters if self._is_cut else self
        for name in self._parameters if self._is_cut else ():
            self._flat(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        if self.node is None:
            return parameter
        shard = self.node.shard_of(self._flat(name)) if self._is_cut else local_part(parameter)
        return shard.requires_grad_(parameter.requires_grad)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def has_any_at(self, addresses: set[int]) -> bool:
        """Whether some parameter is at one of these memory addresses."""
        return any(local_part(p).data_ptr() in addresses for p in self._parameters.values())

    def _flat(self, name: str) -> torch.Tensor:
        """All elements of a parameter that every rank of the node has, as they lie in memory."""
        own = self._parameters[name].data
        reach = 1
        for stride, size in sorted(zip(own.stride(), own.shape, strict=True)):
            if size > 1 and stride != reach:
                raise ValueError(f"{name} has gaps in its memory: make the parameter contiguous")
            reach *= size
        return own.as_strided((own.numel(),), (1,))

    @contextlib.contextmanager
    def agreeing(self, step: int) -> Iterator[None]:
        """Enclose an agreement among peers. If it fails on one rank, it fails in the whole node.

        step: how many steps this rank has taken then, like all of the node.
        """
        if self.node is None:
            yield
            return
        with self.node.ending_a_step():
            yield
            self.node.counts(True, step)

    def any(self, found: bool, step: int) -> bool:
        """Whether something was found on a rank of this worker. Waits for all of them.

        Raises RuntimeError, on all of them, unless their numbers of steps are equal.
        """
        return found if self.node is None else not self.node.counts(not found, step)[0]

    def check_alike(self, step: int) -> None:
        """Raise RuntimeError on all ranks of a node unless they have the same parameters."""
        if not self._is_cut:
            return
        mine = int(digest(self._parameters.values())[:15], 16)
        _, largest = self.node.counts(True, step, mine)
        if self.any(mine != largest, step):
            raise RuntimeError(
                "the ranks of this node have different parameters. With local steps and mesh=, "
                "they must average their gradients in every step. Wrap the model in "
                'DistributedDataParallel(model, process_group=mesh.get_group("shard")), or shard '
                'it by fully_shard(module, mesh=mesh["shard"])'
            )

    def norm(self, mine: float, device: torch.device) -> float:
        """The norm of all shards together, from that of this rank's."""
        if self.node is None:
            return mine
        total = torch.tensor([mine * mine], dtype=torch.float64, device=device)
        return math.sqrt(float(self.node.add_up(total, "norm").wait()))

    def complete(self, names: Iterable[str]) -> None:
        """Give every rank of a node the shards that other ranks have changed."""
        if not self._is_cut:
            return
        self.node.bytes_sent = 0
        works = []
        for name in names:
            flat = self._flat(name)
            whole = torch.zeros_like(flat, dtype=wide_dtype(flat))
            self.node.shard_of(whole).copy_(self.node.shard_of(flat))
            works.append((flat, self.node.add_up(whole, f"shards.{name}")))
        for flat, work in works:
            flat.copy_(work.wait())


@dataclass
class OwnParameters:
    """The values that this rank's parameters must have at its next step, which resumes a round.

    They must be in place before the first forward, even if a model is loaded or broadcast
    meanwhile. So they are put in place with the state, and after every call of the face's
    `broadcast_parameters`. If something else has overwritten them, all ranks refuse to go on.
    """

    parameters: Mapping[str, torch.Tensor]  # all that are trained
    values: dict[str, torch.Tensor] | None = None  # that are held; None: nothing is held

    @property
    def held(self) -> bool:
        """Whether values are held, so that the parameters stay this rank's own."""
        return self.values is not None

    @torch.no_grad()
    def hold(self, values: Mapping[str, torch.Tensor] | None = None) -> None:
        """Hold copies of these values. None: hold copies of the parameters as they are."""
        values = self.parameters if values is None else values
        self.values = {
            name: torch.empty_like(p).copy_(values[name]) for name, p in self.parameters.items()
        }

    def let_go(self) -> None:
        """Hold nothing any more: training goes on."""
        self.values = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the parameters this rank's own again."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.values[name])

    def in_place(self) -> bool:
        """Whether the parameters equal what is held. True if nothing is held."""
        # In a round that went wrong, parameters may be NaN.
        return self.values is None or all(
            torch.allclose(parameter, self.values[name], rtol=0, atol=0, equal_nan=True)
            for name, parameter in self.parameters.items()
        )
