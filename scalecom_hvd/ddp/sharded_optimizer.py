"""Gradients of FSDP2's shards, exchanged between nodes before backward returns.

fully_shard averages gradients inside a node, and leaves each rank its shard of them as p.grad.
Hooks report these shards to an exchange among this rank's peers, and when backward ends, p.grad
becomes the average over all ranks. So a script sees the same as with plain FSDP2 that shards inside
nodes and replicates between them. FSDPModule.set_all_reduce_hook cannot do this: FSDP2 uses the
buffer as soon as the hook returns, but averages exist only when all buckets are known to be sound.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from scalecom_hvd.ddp.fsdp_groups import FsdpGroups
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Options
from scalecom_hvd.exchange.faces import check_parameters, skip_nothing
from scalecom_hvd.exchange.gradients import current_backward, flat_tensor, local_part
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.not_compiled import not_compiled
from scalecom_hvd.exchange.optimizer_gradients import StartsAlike
from scalecom_hvd.exchange.unused_averages import UnusedAverages


class ShardedGradients:
    """The gradients of one optimizer's parameters, sharded only inside a node of the mesh.

    Args:
        method, peers, node: the method, which begins to serve these parameters; the ranks that hold
            the same shards; and those that hold the other shards.
        groups, passes: names that share buckets; backward passes that add up before an exchange.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        mesh: DeviceMesh,
        method: Method,
        peers: Collectives,
        node: Node,
        groups: list[list[str]] | None,
        passes: int,
    ) -> None:
        # For the exchange, a shard is a tensor like any other.
        shards = {name: local_part(p) for name, p in parameters.items()}
        node.whole = {name: tuple(p.shape) for name, p in parameters.items()}
        self._unused = UnusedAverages(parameters, calls_hooks=True)
        # What the last exchange left as p.grad.
        self._left: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {}
        options = Options(groups, drops_unused=True, unused=self._unused)
        face = StartsAlike(shards, of_shards=True)
        self._exchange = Exchange(shards, method, peers, options, face=face, node=node)
        self.names = {p: name for name, p in parameters.items()}
        self.passes, self._passes_over = passes, 0
        # Autograd's number of the backward under way and of the latest one, and the parameters that
        # got gradients from it so far.
        self._backward: int | None = None
        self._latest = -1
        self._came: set[torch.Tensor] = set()
        # Parameters that got gradients in this step, in order, and whether these are too small; see
        # FsdpGroups. Then gradients that the exchange has.
        self._arrived: dict[torch.Tensor, bool] = {}
        self._taken: dict[torch.Tensor, Any] = {}
        # Parameters of modules that are called twice. After passes without synchronisation, their
        # gradients may be reduced twice in a backward. They are complete only the second time.
        self._late: set[torch.Tensor] = set()
        self._is_first = True
        # With CPUOffloadPolicy, gradients are on their way to the host when hooks run. PyTorch
        # before 2.13 waits for them only when backward ends (its pull request 180666).
        self._are_offloaded = any(
            p.device.type == "cpu" and p.device_mesh.device_type != "cpu"
            for p in parameters.values()
            if hasattr(p, "device_mesh")
        )
        method.mix_momentum(parameters, peers)
        self._fsdp = FsdpGroups(parameters.values(), mesh)  # retires an optimizer made before
        itself = weakref.ref(self)
        for parameter in parameters.values() if peers.size > 1 else ():
            parameter.register_post_accumulate_grad_hook(functools.partial(_report, itself))

    def came(self, parameter: torch.Tensor) -> None:
        """Note that FSDP2 has reduced a gradient inside the node. Waits for nothing."""
        backward = current_backward()
        if self._backward != backward:
            if backward < self._latest:  # autograd counts upwards
                raise RuntimeError(
                    "a backward pass ran inside this one, as it does under activation "
                    "checkpointing with use_reentrant=True. Give checkpoint(..., "
                    "use_reentrant=False)"
                )
            self.end_failed_backward()
            self._backward = self._latest = backward
            # Autograd calls this after what was queued before. If several models were sharded one
            # by one, FSDP2 reduces some of their gradients in callbacks that it queues later.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end_backward))
        # FSDP2 adds to p.grad in place, unless the script has set it to None.
        if parameter in self._left and self._left.pop(parameter)() is not parameter.grad:
            self._unused.note_dropped(self.names[parameter])
        if parameter in self._came:
            self._late.add(parameter)
        self._came.add(parameter)
        self._arrived[parameter] = self._fsdp.is_too_small(parameter)
        if parameter in self._taken:  # too early
            self._exchange.abort()
            self._give_back()
        is_last_pass = self._passes_over + 1 >= self.passes
        is_complete = parameter not in self._late and not self._are_offloaded
        if is_last_pass and not self._is_first and is_complete:
            self._report(parameter)

    def _report(self, parameter: torch.Tensor) -> None:
        """Give the exchange a gradient. From now on, FSDP2 must not add anything to it."""
        self._taken[parameter], parameter.grad = _placed(parameter), None
        grad = self._taken[parameter]
        flat = None if grad is None else flat_tensor(local_part(grad))
        self._exchange.ready(self.names[parameter], flat, parameter.requires_grad)

    @torch.no_grad()
    def _give_back(self) -> None:
        """Make gradients that the exchange had p.grad again, and add what came meanwhile."""
        for parameter, grad in self._taken.items():
            if grad is not None:
                if parameter.grad is not None:
                    grad += parameter.grad
                parameter.grad = grad
        self._taken.clear()

    def _end_backward(self) -> None:
        """End a backward: all its gradients are here."""
        self._backward = None
        self._came.clear()
        self._passes_over += 1
        if self._passes_over >= self.passes:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Average what backward has brought since the last time, if it brought anything.

        All ranks call this: a backward that brings a gradient to one rank brings it to all.
        """
        if not self._passes_over:
            return
        try:
            if self._is_first:
                self._fsdp.check_owned()
            self._passes_over, self._is_first = 0, False
            for parameter in dict.fromkeys([*self._arrived, *self.names]):
                if parameter not in self._taken:
                    self._report(parameter)
            averages, nodes = self._exchange.finish(), self._exchange.collectives.size
            self._give_back()
            for parameter, name in self.names.items():
                if name in averages:
                    average = averages[name].view(local_part(parameter).shape)
                    if self._arrived.get(parameter):
                        average.mul_(nodes)
                    _put(parameter, average)
                if parameter.grad is not None:
                    self._left[parameter] = weakref.ref(parameter.grad)
            if self._exchange.node.size > 1:  # else FSDP2 divides float16 and float64 twice
                self._fsdp.divide_by_less(nodes)
        finally:  # after an error the exchange has given the step up
            self.forget()

    def forget(self, keeps: bool = True) -> None:
        """Begin anew. p.grad is what it was; without `keeps`, None if the exchange had it."""
        if self._exchange.in_step():
            self._exchange.abort()
        if not keeps:
            self._taken = dict.fromkeys(self._taken)
        self._give_back()
        self._arrived.clear()
        self._came.clear()
        self._passes_over, self._backward = 0, None

    def end_failed_backward(self) -> None:
        """Forget a backward that ended in an error: the script has gone on without it."""
        if self._backward is not None:
            self.forget(keeps=False)

    def refuse_inside_backward(self) -> None:
        """Raise an error if backward has brought gradients, and has not ended."""
        if self._backward is not None and current_backward() == self._backward:
            raise RuntimeError(
                "step() was called inside backward, by a hook. Gradients of shards are averaged "
                "between nodes when backward ends: call step() after backward()"
            )


@not_compiled
def _report(gradients: Callable[[], ShardedGradients | None], parameter: torch.Tensor) -> None:
    own = gradients()
    # None: the optimizer was deleted, and its parameters are still in use.
    if own is not None and own._fsdp.has(parameter):
        own.came(parameter)


def _placed(parameter: Any) -> Any:
    """p.grad, placed like the parameter. Waits for other ranks if it is still a sum over them.

    Tensor parallelism leaves sums of ranks that have a parameter whole, such as a norm's weight.
    """
    grad, placements = parameter.grad, getattr(parameter, "placements", None)
    if grad is None or placements == getattr(grad, "placements", None):
        return grad
    return grad.redistribute(placements=placements)


def _put(parameter: Any, average: torch.Tensor) -> None:
    """Make p.grad the average. Without gradients on all ranks it stays None, as in plain FSDP2."""
    if parameter.grad is not None:
        own = local_part(parameter.grad)
        if own.data_ptr() != average.data_ptr():
            own.copy_(average)
    elif not hasattr(parameter, "placements"):
        parameter.grad = average.detach()
    else:
        where = parameter.device_mesh, parameter.placements
        size = {"shape": parameter.shape, "stride": parameter.stride()}
        make = type(parameter.data).from_local
        parameter.grad = make(average.detach(), *where, run_check=False, **size)


class AveragesInBackward:
    """What an optimizer of sharded parameters has besides its own class, the next base."""

    _gradients: ShardedGradients

    @not_compiled
    def synchronize(self) -> None:
        """Average what backward did not, because backward_passes_per_step waits for more."""
        self._gradients.exchange()

    skip_synchronize = skip_nothing

    def synchronize_parameters(self) -> None:
        """Do nothing: parameters are the same on all nodes after every step."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up this many backward passes from now on. Not allowed in the middle of a step."""
        self._gradients.passes = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients as usual, including those of a backward that ended in an error."""
        self._gradients.end_failed_backward()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    @not_compiled
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step with the averages, or raise RuntimeError in a hook of backward."""
        self._gradients.refuse_inside_backward()
        groups = self.param_groups  # type: ignore[attr-defined]
        check_parameters(groups, self._gradients.names, "average")
        self._gradients.exchange()
        return super().step(*args, **kwargs)  # type: ignore[misc]

    # The next base's step() calls the hooks of a step.
    step.hooked = True  # type: ignore[attr-defined]
