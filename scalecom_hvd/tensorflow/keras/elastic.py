"""horovod.tensorflow.keras.elastic, with a KerasState that keeps every rank's own residues.

See tensorflow/elastic.py.
"""

from __future__ import annotations

from horovod.tensorflow.keras import elastic as _elastic
from horovod.tensorflow.keras.elastic import *  # noqa: F403

from scalecom_hvd.tensorflow.elastic import KeepsResidues


class KerasState(KeepsResidues, _elastic.KerasState):
    """horovod.tensorflow.keras.elastic.KerasState, with every rank's own residues."""


__all__ = list(_elastic.__all__)
