"""horovod.tensorflow.elastic with states that know residues: every rank commits and restores its own, and newcomers learn what is agreed.

Horovod's states broadcast rank 0's model and optimizer; residues are no part of either, so rank 0's never come to other ranks. A function
that survivors traced before a reset is not traced again, so newcomers cannot ask them then: they are told in `sync`.

Imports compressor.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
from horovod.tensorflow import elastic as _elastic
from horovod.tensorflow.elastic import *  # noqa: F403

from scalecom_hvd.tensorflow.compressor import adopt, agreements, alive


class KeepsResidues:
    """Mixed into Horovod's states: residues of all ScaleComs of this process are committed, restored and synchronized with the rest."""

    _saved_residues: Any = ()

    def save(self) -> None:
        self._saved_residues = [(compressor, compressor.state_dict()) for compressor in alive()]
        super().save()

    def restore(self) -> None:
        for compressor, state in self._saved_residues:
            compressor.load_state_dict(state)
        super().restore()

    def sync(self) -> None:
        adopt(horovod.broadcast_object(agreements(), root_rank=0, name="scalecom.agreements"))
        self._saved_residues = [(compressor, compressor.state_dict()) for compressor in alive()]
        super().sync()


class TensorFlowKerasState(KeepsResidues, _elastic.TensorFlowKerasState):
    """horovod.tensorflow.elastic.TensorFlowKerasState, with every rank's own residues."""


class TensorFlowState(KeepsResidues, _elastic.TensorFlowState):
    """horovod.tensorflow.elastic.TensorFlowState, with every rank's own residues."""


__all__ = list(_elastic.__all__)
