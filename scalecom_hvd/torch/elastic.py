"""horovod.torch.elastic, whose states keep residues: every rank commits and restores its own, and newcomers start with none.

Horovod's TorchState asks a registry of handlers how to keep an object. Here handlers for ScaleCom and the other methods, and for
optimizers that use them, are put into that registry, so Horovod's own TorchState knows them from the import of scalecom_hvd.torch on;
with local steps the one here keeps more.
Rank 0's model and optimizer come to all ranks, its residues to none.

Used by users alone; imports compressor.
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

from scalecom_hvd.torch.compressor import ErrorFeedback


class ResiduesHandler(_state.StateHandler):
    """Keeps a method's residues and step: this rank's own, of the last commit."""

    def __init__(self, compressor: ErrorFeedback) -> None:
        super().__init__(compressor)
        self._kept = False
        self.save()

    def save(self) -> None:
        try:
            state = self.value.state_dict()
        except HorovodInternalError:
            # A worker was lost after the step, with look-ahead's offsets in flight. The commit is whole without them: they would be dropped
            # when Horovod starts again. Half a commit, the model of this step with residues of another, would not be.
            self.value.abort()
            state = self.value.state_dict()
        self._saved = copy.deepcopy(state)

    def restore(self) -> None:
        # A worker may be lost anywhere, so a step may be half done, and what is in flight will never arrive.
        self.value.abort()
        self.value.load_state_dict(self._saved)

    def keep(self) -> None:
        """Before rank 0's model comes to all ranks, which in the middle of a round of local steps is not this rank's own."""
        if self.value.local is not None:
            self.value.local.keep()
            self._kept = True

    def sync(self) -> None:
        local, saved = self.value.local, self._saved
        # Horovod's own TorchState asks nobody before it broadcasts the model: there what was committed at this very step must do.
        if local is not None and not self._kept:
            committed, now = (saved["local_steps"]["taken"], saved["step"]), (local.taken, self.value.residues.step)
            if committed == now:
                local.load_state_dict(saved["local_steps"])
        self._kept = False
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
        super().restore()

    def keep(self) -> None:
        self._residues.keep()

    def sync(self) -> None:
        local = self.value._compression.local
        if local is None:
            super().sync()
        else:
            # With local steps the optimizer's state is each rank's own; a newcomer begins with rank 0's.
            state = broadcast_object(self.value.state_dict(), root_rank=0, name="scalecom.optimizer_state")
            if local.taken == 0:
                self.value.load_state_dict(state)
            super().save()
        self._residues.sync()


def _handler(optimizer: torch.optim.Optimizer) -> _state.StateHandler:
    has_residues = isinstance(getattr(optimizer, "_compression", None), ErrorFeedback)
    return (OptimizerHandler if has_residues else _state.OptimizerStateHandler)(optimizer)


_state.set_handler_registry([(ErrorFeedback, ResiduesHandler), (torch.optim.Optimizer, _handler), *_state.get_handler_registry()])


class TorchState(_elastic.TorchState):
    """Horovod's TorchState, which besides asks what every rank has to keep for itself before rank 0's model comes to all."""

    def sync(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, (ResiduesHandler, OptimizerHandler)):
                handler.keep()
        super().sync()


def __getattr__(name: str) -> Any:
    return getattr(_elastic, name)


__all__ = list(_elastic.__all__)
