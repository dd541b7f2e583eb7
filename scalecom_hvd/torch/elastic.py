"""horovod.torch.elastic, whose states keep residues.

Every rank commits and restores its own residues, and newcomers start with none. Horovod's
TorchState asks a registry of handlers how to keep an object. Here handlers are put into it: for
ScaleCom and the other methods, for optimizers that use them, and for models. So TorchState knows
them from the import of scalecom_hvd.torch on. Rank 0's model and optimizer come to all ranks, its
residues to none. With local steps every rank keeps its own parameters and optimizer, and newcomers
get the common parameters.

Imports broadcast, exchange/local_steps and exchange/methods.
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

from scalecom_hvd.exchange.local_steps import LocalSteps
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.exchange.rounds_alive import rounds_of
from scalecom_hvd.torch.broadcast import broadcast_parameters


class ResiduesHandler(_state.StateHandler):
    """Keeps a method's residues and step: this rank's own, of the last commit."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.save()

    def save(self) -> None:
        """Remember this rank's state."""
        try:
            state = self.value.state_dict()
        except HorovodInternalError:
            if self.value.run.averager.travels:
                # Others may have received the averages that this rank waited for, and have
                # committed them. The last commit stays: all go on from the latest there is.
                raise
            # A worker was lost after the step, with look-ahead's offsets under way. The commit is
            # whole without them: they would be dropped when Horovod starts again. Half a commit,
            # the model of this step with the residues of another, would not be.
            self.value.run.averager.abort()
            state = self.value.state_dict()
        self._saved = copy.deepcopy(state)

    def restore(self) -> None:
        """Take up what was remembered."""
        # A worker may be lost anywhere, so a step may be half done, and what is under way will
        # never arrive.
        if self.value.run.averager is not None:
            self.value.run.averager.abort()
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Ranks come together."""
        self.value.rejoin()


class OptimizerHandler(_state.OptimizerStateHandler):
    """Keeps an optimizer as Horovod does, and the residues of its method."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._residues = ResiduesHandler(self.value._compression)

    def save(self) -> None:
        """Remember the optimizer's state, and its method's, which may fail and so comes first."""
        self._residues.set_value(self.value._compression)
        super().save()

    def restore(self) -> None:
        """Take up what was remembered."""
        self._residues.restore()
        # An optimizer goes on with the tensors it is given. Horovod would give it the commit's
        # own, which a second failure needs.
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))

    def sync(self) -> None:
        """Give rank 0's state to all ranks.

        With local steps, where every rank has its own, only to newcomers.
        """
        local = self.value._compression.run.averager
        if not isinstance(local, LocalSteps):
            super().sync()
        else:
            state = broadcast_object(
                self.value.state_dict(), root_rank=0, name="scalecom.optimizer_state"
            )
            if local.newcomer:
                self.value.load_state_dict(state)
        self._residues.sync()


class ModelHandler(_state.ModelStateHandler):
    """Keeps a model as Horovod does; in the middle of a round of local steps, each rank its own."""

    def sync(self) -> None:
        """Give rank 0's parameters to all ranks; with local steps the common ones to newcomers."""
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
