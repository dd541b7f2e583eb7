"""How many parameters a model has: of a few that many train, and of files with a state_dict.

plan.py asks. Imports torch only to read its files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KNOWN = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3-8b": 8_030_261_248,
    "resnet50": 25_557_032,
    "vit-b-16": 86_567_656,
}
# Under which of them a checkpoint has a model's state_dict, unless it is one itself.
KEYS = ("model", "state_dict", "model_state_dict")


def parameters_of(model: str) -> int:
    """How many elements a model has.

    Args:
        model: one of KNOWN, or a file: a state_dict that torch.save wrote, or a checkpoint that
            holds one as "model", "state_dict" or "model_state_dict", or *.safetensors.

    Raises:
        ValueError: there is no such model or file, or the file holds no tensors.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model)
    if not path.is_file():
        raise ValueError(f"must be a file, or one of {', '.join(KNOWN)}, not {model!r}")
    count = _of_safetensors(path) if path.suffix == ".safetensors" else _of_torch(path)
    if not count:
        raise ValueError(
            f"{model} holds no state_dict, neither itself nor as {', '.join(map(repr, KEYS))}"
        )
    return count


def _of_safetensors(path: Path) -> int:
    # The format: 8 bytes say how long the JSON is that follows (huggingface/safetensors, README).
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
        return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def _of_torch(path: Path) -> int:
    import torch

    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zipfile's, torch's own
        raise ValueError(
            f"{path} cannot be read as a state_dict ({type(error).__name__}): save "
            "model.state_dict(), not the model"
        ) from error
    if not isinstance(loaded, Mapping):
        return 0
    state = next((loaded[key] for key in KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    # A tied embedding stands there twice.
    own = {(t.untyped_storage().data_ptr(), t.storage_offset()): t.numel() for t in tensors}
    return sum(own.values())
