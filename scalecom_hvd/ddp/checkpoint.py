"""Residues in a checkpoint of torch.distributed.checkpoint.

It keeps one copy of what has the same name on all ranks, and loads only into what a fresh state
already holds. But every rank has its own residues, and a fresh state has few. So each rank's state
is saved as bytes, under a name of its own. Imports nothing of this package.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

log = logging.getLogger("scalecom_hvd")


class PerRank:
    """Lets torch.distributed.checkpoint save and load every rank's own state.

    Args:
        state: a ScaleComState, or `optimizer.compression`.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> whole = {"model": model.state_dict(), "scalecom": PerRank(state)}
        >>> dcp.save(whole, checkpoint_id="checkpoint")
        >>> dcp.load(whole, checkpoint_id="checkpoint")
    """

    def __init__(self, state: Stateful) -> None:
        self._state = state
        self._given = b""

    def state_dict(self) -> dict[str, bytes]:
        """{"rank<number>": this rank's state, as torch.save writes it}."""
        file = io.BytesIO()
        torch.save(self._state.state_dict(), file)
        self._given = file.getvalue()
        return {self._name: self._given}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load what this rank saved; see Method.load_state_dict.

        If fewer ranks saved the checkpoint, it has nothing for some ranks. Such a rank begins with
        empty residues, and a warning is logged. torch.distributed.checkpoint must be told that
        something may be missing: planner=DefaultLoadPlanner(allow_partial_load=True).
        """
        saved = state.get(self._name, self._given)
        # This rank's GPU may have another number now. Residues are copied to where they belong.
        read: Any = {"map_location": "cpu", "weights_only": True}
        own = torch.load(io.BytesIO(saved), **read) if saved else {"step": 0}
        # What a checkpoint lacks comes back as it was before loading, which is fresh then.
        if saved == self._given and own["step"] == 0:
            log.warning(
                "the checkpoint holds no residues of rank %d, so this rank begins with empty "
                "residues",
                dist.get_rank(),
            )
        else:
            self._state.load_state_dict(own)

    @property
    def _name(self) -> str:
        return f"rank{dist.get_rank()}"
