"""The race's ResNet: 4.9 million parameters, on scikit-learn's handwritten digits, by SGD."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # scripts to copy

import train_image

# How many times an evaluation reads each test image, moved by another pixel.
COPIES = 2


class Images:
    """A task, like race_language.LanguageModel. width: channels of the ResNet's first stage."""

    case = "race-resnet"
    clip_norm = None
    lr, bucket_mb = 0.05, None
    batch = 16  # images of a worker in a microbatch
    _data: train_image.Data

    def __init__(self, width: int = 128) -> None:
        self.size = width

    def load(self) -> None:
        self._data = train_image.load_digits()

    def model(self) -> nn.Module:
        return resnet(self.size)

    def optimizers(self, model: nn.Module, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)]

    def loss(
        self, called: nn.Module, random: torch.Generator, device: torch.device
    ) -> torch.Tensor:
        count = len(self._data.train_images)
        chosen = torch.randint(count, (self.batch,), generator=random)
        images = train_image.augment(self._data.train_images[chosen], random)
        labels = self._data.train_labels[chosen]
        return F.cross_entropy(called(images.to(device)), labels.to(device))

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        images, labels = self._data.test_images, self._data.test_labels
        images = images.repeat(COPIES, 1, 1, 1)
        moved = train_image.augment(images, torch.Generator().manual_seed(0))
        return float(F.cross_entropy(model(moved.to(device)), labels.repeat(COPIES).to(device)))


def resnet(width: int = 128) -> train_image.ResNet:
    """With batch norm. 128 channels in the first stage make 4.9 million parameters."""
    return train_image.ResNet("batch", channels=1, classes=10, width=width)
