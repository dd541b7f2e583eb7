"""horovod.torch.elastic, whose states keep residues: every rank commits and restores its own, and
newcomers start with none.

Horovod's TorchState asks a registry of handlers how to keep an object. Here handlers for ScaleCom
and the other methods, for optimizers that use them, and for models, are put into that registry, so
TorchState knows them from the import of scalecom_hvd.torch on. Rank 0's model and optimizer come to
all ranks, its residues to none. With local steps every rank keeps its own parameters and optimizer,
and who comes anew gets the common parameters.

Imports broadcast and exchange.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import elastic as _elastic
from horovod.torch.elastic import *  # noqa: F403
from horovod.torch.elastic import state as _state
from horovod.torch.functions import broadcast_object

from scalecom_hvd.exchange.local_steps import rounds_of
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.torch.broadcast import broadcast_parameters


class ResiduesHandler(_state.StateHandler):
    """Keeps a method's residues and step: this rank's own, of the last commit."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.save()

    def save(self) -> None:
        try:
            state = self.value.state_dict()
        except HorovodInternalError:
            # A worker was lost after the step, with look-ahead's offsets in flight. The commit is
            # whole without them: they would be dropped when Horovod starts again. Half a commit,
            # the model of this step with residues of another, would not be.
            self.value.abort()
            state = self.value.state_dict()
        self._saved = copy.deepcopy(state)

    def restore(self) -> None:
        # A worker may be lost anywhere, so a step may be half done, and what is in flight will
        # never arrive.
        self.value.abort()
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.meet()


class OptimizerHandler(_state.OptimizerStateHandler):
    """Keeps an optimizer as Horovod does, and the residues of its ScaleCom."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._residues = ResiduesHandler(optimizer._compression)

    def save(self) -> None:
        super().save()
        self._residues.set_value(self.value._compression)

    def restore(self) -> None:
        self._residues.restore()
        # An optimizer goes on with the tensors it is given: Horovod would give it the commit's own,
        # which a second failure needs.
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))

    def sync(self) -> None:
        local = self.value._compression.local
        if local is None:
            super().sync()
        else:
            # With local steps the optimizer's state is each rank's own; a newcomer begins with rank
            # 0's.
            state = broadcast_object(
                self.value.state_dict(), root_rank=0, name="scalecom.optimizer_state"
            )
            if local.newcomer:
                self.value.load_state_dict(state)
        self._residues.sync()


class ModelHandler(_state.ModelStateHandler):
    """Keeps a model as Horovod does; with local steps, every rank its own in the middle of a round."""

    def sync(self) -> None:
        values = self.value.state_dict()
        for local in rounds_of(values):
            local.keep()
        broadcast_parameters(values, root_rank=0)


def _handler(optimizer: torch.optim.Optimizer) -> _state.StateHandler:
    has_residues = isinstance(getattr(optimizer, "_compression", None), Method)
    return (OptimizerHandler if has_residues else _state.OptimizerStateHandler)(optimizer)


_state.set_handler_registry(
    [
        (Method, ResiduesHandler),
        (torch.optim.Optimizer, _handler),
        (torch.nn.Module, ModelHandler),
        *_state.get_handler_registry(),
    ]
)


def __getattr__(name: str) -> Any:
    return getattr(_elastic, name)


__all__ = list(_elastic.__all__)
