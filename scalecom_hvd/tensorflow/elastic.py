"""horovod.tensorflow.elastic with states that include residues.

Every rank commits and restores its own residues, and new ranks learn what the others agreed on.
Horovod's states broadcast rank 0's model and optimizer. Residues belong to neither, so rank 0's
residues never reach other ranks, and a new rank starts with residues of zero. Elastic training with
ScaleCom needs one of these states.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import elastic as _elastic
from horovod.tensorflow.elastic import *  # noqa: F403

from scalecom_hvd.tensorflow.compressor import ScaleCom, all_exchanges, objects
from scalecom_hvd.tensorflow.exchange import have_met, meet

# super() finds one of Horovod's states, which mypy cannot know.
_State: Any = object


class KeepsResidues(_State):
    """A mixin for Horovod's states that also commits and restores residues.

    They are the residues of all ScaleComs of this process.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._keep_residues()
        super().__init__(*args, **kwargs)

    def save(self) -> None:
        """Save the residues, too."""
        self._keep_residues()
        super().save()

    def restore(self) -> None:
        """Go back to the residues of the last `save`, too."""
        for compressor in objects():
            now = compressor.state_dict()
            before_any = now | {"step": 0, "residues": {}, "exchanges": {}}
            then = self._residues.get(compressor, before_any)
            # Residues that were made after the commit count as zero at that time.
            zeros = {name: np.zeros_like(residue) for name, residue in now["residues"].items()}
            # The settings are the same. They may have been settled since.
            mine = {"config": now["config"], "residues": zeros | then["residues"]}
            compressor.load_state_dict(then | mine)
        super().restore()

    def reset(self) -> None:
        """Horovod was started again, so ranks meet: new ranks must learn what others agreed on."""
        gc.collect()  # a ScaleCom that is no longer used must not take part
        with contextlib.suppress(HorovodInternalError), _as_lost_worker():  # `sync` will try again
            meet(all_exchanges())
        super().reset()

    def sync(self) -> None:
        """Bring ranks together first."""
        with _as_lost_worker():
            if not have_met():
                meet(all_exchanges())
            self._keep_residues()
            super().sync()

    def _keep_residues(self) -> None:
        states = {compressor: compressor.state_dict() for compressor in objects()}
        self._residues: Mapping[ScaleCom, dict[str, Any]] = weakref.WeakKeyDictionary(states)


@contextlib.contextmanager
def _as_lost_worker() -> Iterator[None]:
    """Turn errors of Horovod's operations into the error that hvd.elastic.run expects.

    Without this, it would not survive the loss of a worker while ranks meet.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Horovod" in error.message:
            raise HorovodInternalError(error) from error
        raise


class TensorFlowKerasState(KeepsResidues, _elastic.TensorFlowKerasState):
    """horovod.tensorflow.elastic.TensorFlowKerasState, with every rank's own residues."""


class TensorFlowState(KeepsResidues, _elastic.TensorFlowState):
    """horovod.tensorflow.elastic.TensorFlowState, with every rank's own residues."""


__all__ = list(_elastic.__all__)
