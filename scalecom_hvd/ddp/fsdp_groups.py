"""What FSDP2 does with the gradients of a group of parameters, which only private names tell.

`FSDPModule.set_gradient_divide_factor(f)` makes plain FSDP2 divide the sum over all ranks by f. If
FSDP2 sums inside nodes only, the average over nodes is then too small by the number of nodes. So
FSDP2 is given f over this number instead, once f is known.

If a model is sharded over both dimensions of a mesh (HSDP), FSDP2 itself averages between nodes. It
is given a group of one rank for this. So it sends nothing, and its settings keep their meaning,
such as set_requires_all_reduce(False). The names are those of PyTorch 2.8 to 2.13. If one is
missing, a message says what to write.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from scalecom_hvd.ddp.nodes import is_hybrid

log = logging.getLogger("scalecom_hvd")

UNREADABLE = (
    "this version of PyTorch does not tell whether FSDPModule.set_gradient_divide_factor() was "
    "called (%s). If it was, multiply the loss by the number of nodes"
)
AVERAGES_ITSELF = (
    "in this version of PyTorch ({}), FSDP2's own averages between nodes cannot be left out. Shard "
    'over one dimension of the mesh: fully_shard(module, mesh=mesh["shard"])'
)
UNOWNED = (
    "{} shares a fully_shard group with parameters of a DistributedOptimizer, but has no such "
    "optimizer itself, so nodes would not average its gradients. Before the first backward, give "
    "it to a DistributedOptimizer with mesh=, or call requires_grad_(False) on it"
)


class FsdpGroups:
    """The groups in which FSDP2 reduces gradients that an optimizer averages between nodes.

    FSDP2 itself does not, until the optimizers are gone. The one made last has the parameters.
    Raises RuntimeError if FSDP2 cannot be kept from averaging.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], mesh: DeviceMesh | None) -> None:
        self._of: dict[torch.Tensor, Any] = {}
        self._hybrid: list[Any] = []
        parameters = [p for p in parameters if hasattr(p, "device_mesh")]
        try:
            for group in _groups() if parameters else ():
                own = {each.sharded_param for each in group.fsdp_params}
                self._of |= dict.fromkeys(own.intersection(parameters), group)
                group.gradient_divide_factor  # noqa: B018 (it must exist)
        except (ImportError, AttributeError) as missing:
            self._of = {}
            log.warning(UNREADABLE, missing)
        hybrid = dict.fromkeys(self._of.get(p) for p in parameters if is_hybrid(p, mesh))
        self._hybrid = [group for group in hybrid if _leave_alone(group)]
        if len(self._hybrid) < len(hybrid):
            raise RuntimeError(AVERAGES_ITSELF.format(torch.__version__))
        itself = weakref.ref(self)
        for parameter in parameters:
            _owners[parameter] = itself

    def __del__(self) -> None:  # a weakref.finalize would hold the model
        for group in self._hybrid:
            own = group.mesh_info
            if isinstance(own.replicate_process_group, _Alone) and self._owns(group):
                own.replicate_process_group = own.replicate_process_group.instead_of
        for group in set(self._of.values()):
            factor = group.gradient_divide_factor
            if isinstance(factor, _OfNode) and self._owns(group):
                group.gradient_divide_factor = factor.instead_of

    def _owns(self, group: Any) -> bool:
        return {_owner(each.sharded_param) for each in group.fsdp_params} <= {None, self}

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether no later optimizer has the parameter."""
        return _owner(parameter) is self

    def is_too_small(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient was just divided by a factor that the script chose for all nodes."""
        factor = getattr(self._of.get(parameter), "gradient_divide_factor", None)
        return factor is not None and not isinstance(factor, _OfNode)

    def divide_by_less(self, nodes: int) -> None:
        """From the next backward on, let FSDP2 divide by factors that make no gradient too small.

        Backward adds to p.grad, so it must find its own units there.
        """
        for group in {self._of[p] for p in self._of if self.is_too_small(p)}:
            given = group.gradient_divide_factor
            group.gradient_divide_factor = own = _OfNode(given / nodes)
            own.instead_of = given

    def check_owned(self) -> None:
        """Raise RuntimeError if nothing averages a gradient that FSDP2 would have averaged."""
        for each in (each for group in self._hybrid for each in group.fsdp_params):
            if each.sharded_param.requires_grad and _owner(each.sharded_param) is None:
                raise RuntimeError(UNOWNED.format(getattr(each, "_param_fqn", "a parameter")))


_owners: MutableMapping[torch.Tensor, weakref.ref[FsdpGroups]] = WeakTensorKeyDictionary()


def _owner(parameter: torch.Tensor) -> FsdpGroups | None:
    found = _owners.get(parameter)
    return None if found is None else found()


class _OfNode(float):
    """What FSDP2 divides by instead of the factor that the script gave."""

    instead_of: float


class _Alone(dist.ProcessGroup):
    """A group that has only this rank, so a sum over it is what it was."""

    def __init__(self, instead_of: dist.ProcessGroup) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # PyTorch's stubs name one of two forms
        self.instead_of = instead_of

    def allreduce(self, *_: Any) -> None:
        """Do nothing."""


def _leave_alone(group: Any) -> bool:
    """Make FSDP2 average this group over this rank only. False: it would not, or there is none."""
    own = getattr(group, "mesh_info", None)
    given = getattr(own, "replicate_process_group", None)
    if own is None or given is not getattr(group, "_all_reduce_process_group", own):
        return False
    if not isinstance(given, _Alone):
        own.replicate_process_group = _Alone(given)
    return group._all_reduce_process_group is own.replicate_process_group


def _groups() -> Iterable[Any]:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # since PyTorch 2.13
            yield from several or filter(None, [state._fsdp_param_group])
