"""How many parameters a model has: some well-known models, and files with a state_dict.

plan.py uses this. Imports no framework.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

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
# The keys under which a checkpoint has a model's state_dict, unless it is one itself.
KEYS = ("model", "state_dict", "model_state_dict")


def parameters_of(model: str) -> int:
    """How many elements a model has.

    In a file, all floating-point tensors count, including a few that are not parameters, such as
    the running means of batch norm.

    Args:
        model: one of KNOWN, or a file: a state_dict that torch.save wrote, or a checkpoint that
            holds one as "model", "state_dict" or "model_state_dict", or *.safetensors.

    Raises:
        ValueError: there is no such model or file, the file holds no tensors, or it is one of
            several files of a model.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model)
    if re.search(r"-of-\d+", path.name):
        raise ValueError(f"{model} holds only a part of a model: give --parameters")
    try:
        count = _of_safetensors(path) if path.suffix == ".safetensors" else _of_torch(path)
    except OSError as error:
        names = ", ".join(KNOWN)
        raise ValueError(f"must be one of {names}, or a file, not {model!r} ({error})") from error
    if not count:
        raise ValueError(
            f"{model} is not a state_dict, and holds none under {', '.join(map(repr, KEYS))}"
        )
    return count


def _of_safetensors(path: Path) -> int:
    # The format: 8 bytes give the length of the JSON that follows (huggingface/safetensors,
    # README).
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, path.stat().st_size))
    try:
        header = json.loads(text)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        floats = [t["shape"] for t in tensors if "F" in t["dtype"]]  # F32, BF16, F8_E4M3
        return sum(math.prod(map(abs, shape)) for shape in floats)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _of_torch(path: Path) -> int:
    with path.open("rb"):  # tells a file that cannot be opened from one that cannot be read
        pass
    command = [sys.executable, "-c", _COUNT, str(path), *KEYS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ValueError(
            f"{path} cannot be read as a state_dict ({error}). Save model.state_dict() instead of "
            "the model, or give --parameters"
        )
    return int(done.stdout)


# This runs in a process of its own, because this process has no framework. Files of old versions of
# PyTorch are not zip files, and are read whole. A file lists a tied embedding twice, with one
# storage.
_COUNT = """
import sys, zipfile
from collections.abc import Mapping
import torch

path, *keys = sys.argv[1:]
try:
    mmap = zipfile.is_zipfile(path)
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
except Exception as error:
    sys.exit(type(error).__name__)
count = 0
if isinstance(loaded, Mapping):
    for state in (*(loaded.get(key) for key in keys), loaded):
        if isinstance(state, Mapping) and not count:
            tensors = [t for t in state.values() if isinstance(t, torch.Tensor)]
            count = sum({
                (t.untyped_storage().data_ptr(), t.storage_offset()): t.numel()
                for t in tensors if t.is_floating_point() and t.layout == torch.strided
            }.values())
print(count)
"""
