"""The result of a case of same_numbers.py: a digest of each part.

Equal numbers have equal digests. A digest depends neither on settings, nor on a saved state's
version, nor on the order of its keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Parts = dict[str, str]
"""{part: digest}, or {"failed": error} if a case raised one."""

# The parts of stats() that are compared.
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
        """Note the stats() after a step."""
        self._stats.append([stats.get(kind) for kind in COUNTED])

    def end(self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Parts:
        """The case is over: digest what the rank holds now.

        Args:
            parameters: {name: parameter} of the model.
            state: what the method's state_dict() returned.
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
    """A case's results on all ranks, as one.

    Args:
        ranks: the result on each rank, in order.
    """
    failed = [f"rank {rank}: {own['failed']}" for rank, own in enumerate(ranks) if "failed" in own]
    if failed:
        return {"failed": failed[0]}
    return {part: of_text(" ".join(own[part] for own in ranks)) for part in ranks[0]}


def of_text(text: str) -> str:
    """The digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of tensors, to the bit, and of their names. Their order does not matter."""
    return of_text(" ".join(sorted(f"{name} {_of_tensor(tensor)}" for name, tensor in named)))


def tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a saved state, with its own key. Its position in the state does not matter."""
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
