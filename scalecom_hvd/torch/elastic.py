"""horovod.torch.elastic, with states that keep residues.

Every rank commits and restores its own residues, and new ranks start with none. Horovod's
TorchState asks a registry of handlers how to keep an object. This module adds handlers for methods,
for optimizers that use them, and for models. All ranks get rank 0's model and optimizer, but never
its residues. With local steps, every rank keeps its own parameters and optimizer, and new ranks get
the common parameters.
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

from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.local.rounds_alive import every_one, rounds_of
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.torch.optimizer import broadcast_parameters


class ResiduesHandler(_state.StateHandler):
    """Keeps a method's residues and step on this rank, as of the last commit."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.save()

    def save(self) -> None:
        """Remember this rank's state."""
        try:
            state = self.value.state_dict()
        except HorovodInternalError:
            if self.value.run.averager.travels:
                # Other ranks may have received the averages that this rank waited for, and
                # committed them. So this rank keeps its last commit, and all ranks go on from the
                # latest commit there is.
                raise
            # A worker was lost after the step, while look-ahead's offsets were travelling. The
            # commit is complete without them, because they are dropped when Horovod starts again.
            # Half a commit would not be complete: it would have the model of this step with the
            # residues of another.
            self.value.run.averager.abort()
            state = self.value.state_dict()
        self._saved = copy.deepcopy(state)

    def restore(self) -> None:
        """Restore the remembered state."""
        # A worker may be lost at any moment. So a step may be half done, and what is travelling
        # will never arrive.
        if self.value.run.averager is not None:
            self.value.run.averager.abort()
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Meet the other ranks again. All ranks do so."""
        self.value.rejoin()


class OptimizerHandler(_state.OptimizerStateHandler):
    """Keeps an optimizer as Horovod does, and the residues of its method."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._residues = ResiduesHandler(self.value._compression)

    def save(self) -> None:
        """Remember the method's state and the optimizer's. The method comes first: it may fail."""
        self._residues.set_value(self.value._compression)
        super().save()

    def restore(self) -> None:
        """Restore the remembered state."""
        self._residues.restore()
        # An optimizer goes on using the tensors that it loads, so give it copies. Horovod would
        # give it the commit's own tensors, which are needed again after a second failure.
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))

    def sync(self) -> None:
        """Give rank 0's state to all ranks; with local steps, to new ranks alone."""
        local = self.value._compression.run.averager
        if not isinstance(local, LocalSteps):
            super().sync()
        else:
            mine = self.value.state_dict()
            state = broadcast_object(mine, root_rank=0, name="scalecom.optimizer_state")
            if local.newcomer:
                self.value.load_state_dict(state)
        self._residues.sync()


class ModelHandler(_state.ModelStateHandler):
    """Keeps a model as Horovod does. Within a round of local steps, each rank keeps its own."""

    def save(self) -> None:
        """Remember this rank's model, when nothing travels that could fail the rest of a commit."""
        for local in every_one():
            local.collect()
        super().save()

    def sync(self) -> None:
        """Give rank 0's parameters to all ranks; with local steps, the common ones to new ranks."""
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
