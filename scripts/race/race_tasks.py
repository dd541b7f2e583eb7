"""What the race can train, each behind the same few functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import race_images
import race_language
import torch
from torch import nn

TASKS = ("language-model", "resnet")


class Task(Protocol):
    """A model, its data and its optimizers.

    Attributes:
        case: bench_cases.py's name of its step.
        size: what tells two sizes of the task apart.
        lr: dense training's learning rate, found by trying.
        clip_norm: the norm to which gradients are clipped; None: they are not.
        bucket_mb: how many megabytes DDP puts into a bucket; None: as it likes.
    """

    case: str
    size: Any
    lr: float
    clip_norm: float | None
    bucket_mb: float | None

    def load(self) -> None:
        """Read the data. Call this before `loss` and `evaluate`."""
        ...

    def model(self) -> nn.Module: ...

    def optimizers(self, model: nn.Module, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
        """The optimizers of all parameters. muon: whether Muon trains the matrices inside."""
        ...

    def loss(
        self, called: nn.Module, random: torch.Generator, device: torch.device, batch: int | None
    ) -> torch.Tensor:
        """The mean loss of a microbatch, drawn by `random`.

        Args:
            called: the model, or what wraps it.
            random: on the CPU.
            device: the model's.
            batch: how many windows, or images, a microbatch has; None: the task's own number.
        """
        ...

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        """The mean loss on data that are held out, always the same. The model is in eval mode."""
        ...


def task(name: str, size: str, folder: Path) -> Task:
    """A task by its name in TASKS.

    Args:
        size: "tiny" for the tests, "full", or another of the language model's sizes.
        folder: where the language model's text is kept, cut into pieces.
    """
    if name == "resnet":
        return race_images.Images(8) if size == "tiny" else race_images.Images()
    return race_language.LanguageModel(race_language.SIZES[size], folder)
