"""Residues in a checkpoint of torch.distributed.checkpoint.

That keeps one copy of what has one name on all ranks, and loads into what a fresh state holds
already. Residues are every rank's own, and a fresh state has few of them. So a rank's state is one
value of bytes there, under a name of its own. Imports nothing of this package.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

log = logging.getLogger("scalecom_hvd")


class HasState(Protocol):
    """A ScaleComState, or an optimizer's `compression`."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank saves."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what this rank saved."""
        ...


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

    def __init__(self, state: HasState) -> None:
        self._state = state
        self._given = b""

    def state_dict(self) -> dict[str, bytes]:
        """{"rank<number>": this rank's state, as torch.save writes it}."""
        file = io.BytesIO()
        torch.save(self._state.state_dict(), file)
        self._given = file.getvalue()
        return {self._name: self._given}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Take up what this rank saved; see Method.load_state_dict.

        A rank of which the checkpoint has nothing, as fewer ranks saved it, begins with empty
        residues, and the log warns. torch.distributed.checkpoint wants to be told that something
        may be missing: planner=DefaultLoadPlanner(allow_partial_load=True).
        """
        saved = state.get(self._name, self._given)
        own = torch.load(io.BytesIO(saved), weights_only=True) if saved else {"step": 0}
        # What a checkpoint lacks is given back as it was before, which is fresh then.
        if saved == self._given and own["step"] == 0:
            log.warning(
                "the checkpoint holds no residues of rank %d: it begins with empty ones",
                dist.get_rank(),
            )
        else:
            self._state.load_state_dict(own)

    @property
    def _name(self) -> str:
        return f"rank{dist.get_rank()}"
