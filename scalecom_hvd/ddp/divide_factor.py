"""Whether a script told FSDP2 what to divide gradients by.

`FSDPModule.set_gradient_divide_factor(f)` makes plain FSDP2 divide the sum over all ranks by f.
When FSDP2 shards inside nodes only, it divides the sum over a node's ranks by f, and the average
over nodes is then too small by the number of nodes. PyTorch has no public way to read f. Private
names of PyTorch 2.8 to 2.13 tell it, and if they are missing, a warning says what to do. Imports
nothing of this package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

log = logging.getLogger("scalecom_hvd")

UNREADABLE = (
    "this version of PyTorch does not tell whether FSDPModule.set_gradient_divide_factor() was "
    "called (%s). If it was, multiply the loss by the number of nodes"
)


class DivideFactors:
    """The groups of parameters in which FSDP2 reduces gradients, and what it divides them by.

    Args:
        parameters: sharded parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._groups: dict[torch.Tensor, Any] = {}
        wanted = set(parameters)
        try:
            for group in _groups():
                own = (each.sharded_param for each in group.fsdp_params)
                self._groups |= dict.fromkeys(wanted.intersection(own), group)
                group.gradient_divide_factor  # noqa: B018 (it must exist)
        except (ImportError, AttributeError) as missing:
            self._groups = {}
            log.warning(UNREADABLE, missing)

    def is_given(self, parameter: torch.Tensor) -> bool:
        """Whether the script chose what this parameter's gradients are divided by."""
        group = self._groups.get(parameter)
        return group is not None and group.gradient_divide_factor is not None


def _groups() -> Iterable[Any]:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # since PyTorch 2.13
            yield from several or filter(None, [state._fsdp_param_group])
