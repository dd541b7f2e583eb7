"""Residues in a checkpoint of torch.distributed.checkpoint.

That keeps one copy of what has one name on all ranks, and loads into what a fresh state holds
already. Residues are every rank's own, and a fresh state has few of them. So a rank's state is one
value of bytes there, under a name of its own. Imports nothing of this package.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist


class HasState(Protocol):
    """A ScaleComState, or an optimizer's `compression`."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank saves."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what this rank saved."""
        ...


class PerRank:
    """Every rank's own state, for torch.distributed.checkpoint, which saves and loads it.

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

    def state_dict(self) -> dict[str, bytes]:
        """{"rank<number>": this rank's state, as torch.save writes it}."""
        file = io.BytesIO()
        torch.save(self._state.state_dict(), file)
        return {self._name: file.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Take up what this rank saved; see Method.load_state_dict."""
        file = io.BytesIO(state[self._name])
        self._state.load_state_dict(torch.load(file, weights_only=True))

    @property
    def _name(self) -> str:
        return f"rank{dist.get_rank()}"
