"""What a case of same_numbers.py comes to: a digest of each part, the same wherever numbers are.

A digest says nothing of settings, of the version of a saved state, or of the order of its keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Parts = dict[str, str]
"""{part: digest}, or {"failed": error} of a case that raised one."""

# What of stats() is compared.
COUNTED = (
    "bytes_offsets",
    "bytes_values",
    "bytes_dense",
    "bytes_gathered",
    "collectives",
    "rate",
)


class Record:
    """What one rank did in one case."""

    def __init__(self) -> None:
        self._stats: list[list[Any]] = []

    def note(self, stats: Mapping[str, Any]) -> None:
        """A step was taken, and these are stats() after it."""
        self._stats.append([stats.get(kind) for kind in COUNTED])

    def end(self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Parts:
        """The case is over: what the rank holds now.

        Args:
            parameters: {name: parameter} of the model.
            state: what the method's state_dict() gave.
        """
        others = [*tensors_in(state.get("offsets")), *tensors_in(state.get("local_steps"))]
        return {
            "parameters": of_tensors(parameters.items()),
            "residues": of_tensors(state["residues"].items()),
            "offsets and local steps": of_tensors(others),
            "step": str(int(state["step"])),
            "stats": of_text(json.dumps(self._stats)),
        }


def together(ranks: Sequence[Parts]) -> Parts:
    """What a case came to on all ranks, as one.

    Args:
        ranks: what it came to on each, in order.
    """
    failed = [f"rank {rank}: {own['failed']}" for rank, own in enumerate(ranks) if "failed" in own]
    if failed:
        return {"failed": failed[0]}
    return {part: of_text(" ".join(own[part] for own in ranks)) for part in ranks[0]}


def of_text(text: str) -> str:
    """The digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of tensors, to the bit, and of their names, in whatever order they come."""
    return of_text(" ".join(sorted(f"{name} {_of_tensor(tensor)}" for name, tensor in named)))


def tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a saved state with its own key; where in the state it is does not count."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_in(value, str(key))


def _of_tensor(tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().contiguous()
    content = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = f"{whole.dtype} {list(whole.shape)} ".encode()
    return hashlib.blake2b(kind + content, digest_size=8).hexdigest()
