"""Train a ResNet or a MobileNetV2 on handwritten digits, dense or with ScaleCom.

    horovodrun -np 2 python scripts/examples/train_image.py --compression scalecom
    mpirun -np 4 python scripts/examples/train_image.py --model mobilenetv2 --norm group
    torchrun --nproc-per-node 2 scripts/examples/train_image.py             (without Horovod)
    python scripts/examples/train_image.py --steps 200      (one process, to try things out)

training_torch.py has the loop. The study and the tests use this module's models and images.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import digits
import torch
import training
import training_torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)
from training_torch import hvd, start

NINE = [(dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train as the options say; returns the run's summary."""
    data = load_digits()
    torch.manual_seed(args.seed)
    device = training_torch.device()
    model = build_model(args.model, args.norm, data.train_images.shape[1]).to(device)
    mine = range(hvd.rank(), len(data.test_images), hvd.size())

    def loss_of(step: int) -> torch.Tensor:
        chosen = training_torch.batch_indices(args, len(data.train_images), step)
        random = training_torch.generator(args.seed, step, hvd.rank())
        images = augment(data.train_images[chosen], random)
        return F.cross_entropy(model(images.to(device)), data.train_labels[chosen].to(device))

    def evaluate() -> dict[str, float]:
        """The accuracy, and "acc9": over the images' nine one-pixel shifts."""
        images, labels = data.test_images[mine], data.test_labels[mine]

        def accuracy(name: str, moves: Sequence[tuple[int, int]]) -> float:
            right = 0
            for moved in (shift(images, dx, dy) for dx, dy in moves):
                for x, y in zip(moved.split(500), labels.split(500), strict=True):
                    right += int((model(x.to(device)).argmax(1) == y.to(device)).sum())
            return training_torch.ratio_over_ranks(right, len(moves) * len(mine), name)

        return {"accuracy": accuracy("accuracy", [(0, 0)]), "acc9": accuracy("acc9", NINE)}

    title = f"digits {args.model} {args.compression}"
    return training_torch.train(args, title, model, loss_of, evaluate)


# data


class Data(NamedTuple):
    """Images are (count, channels, height, width), float32."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits() -> Data:
    """scikit-learn's handwritten digits, split as in digits.py."""
    parts = [torch.from_numpy(part) for split in digits.load() for part in split]
    return Data(parts[0].unsqueeze(1), parts[1], parts[2].unsqueeze(1), parts[3])


def shift(images: torch.Tensor, dx: int, dy: int) -> torch.Tensor:
    """Move images by one pixel at most, right by dx and down by dy; new pixels are zero."""
    height, width = images.shape[-2:]
    return F.pad(images, (1, 1, 1, 1))[..., 1 - dy : 1 - dy + height, 1 - dx : 1 - dx + width]


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random one-pixel shifts, each image its own."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1))
    down, right = torch.randint(0, 3, (2, len(images), 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    each = torch.arange(len(images))[:, None, None]
    moved = padded[each, :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


# models


def build_model(name: str, norm: str, channels: int, classes: int = 10) -> nn.Module:
    """A network by its name in MODELS, for images from 8 x 8 up; norm: one of NORMS.

    Each has about 200 000 parameters, except ResNet-34, which has 21 million.
    """
    return MODELS[name](norm, channels, classes)


NORMS = {
    "batch": nn.BatchNorm2d,
    "group": functools.partial(nn.GroupNorm, 8),
    "layer": functools.partial(nn.GroupNorm, 1),
    "none": nn.Identity,
}


def convolution(
    inputs: int, outputs: int, norm: str, size: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution without bias, and its normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False),
        NORMS[norm](outputs),
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, norm, stride=stride)
        self.second = convolution(outputs, outputs, norm)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else convolution(inputs, outputs, norm, size=1, stride=stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem and stages of residual blocks. Each stage but the first halves height and width.

    depths: blocks in each stage.
    """

    def __init__(
        self,
        norm: str,
        channels: int,
        classes: int,
        width: int = 24,
        depths: Sequence[int] = (1, 1, 1),
    ) -> None:
        super().__init__()
        self.stem = convolution(channels, width, norm)
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            outputs = width * 2**stage
            for number in range(depth):
                halves = stage > 0 and number == 0
                blocks.append(ResidualBlock(inputs, outputs, 2 if halves else 1, norm))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class InvertedBlock(nn.Module):
    """Expand, convolve each channel by itself, project (Sandler et al., 2018)."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: str, expansion: int = 6
    ) -> None:
        super().__init__()
        inner = expansion * inputs
        self.expand = convolution(inputs, inner, norm, size=1)
        self.depthwise = convolution(inner, inner, norm, stride=stride, groups=inner)
        self.project = convolution(inner, outputs, norm, size=1)
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))
        return x + y if self.same else y


class MobileNetV2(nn.Module):
    """A stem, six inverted blocks and a wide 1 x 1 convolution before the output layer."""

    def __init__(self, norm: str, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = convolution(channels, 16, norm)
        self.blocks = nn.Sequential(
            InvertedBlock(16, 24, 1, norm),
            InvertedBlock(24, 32, 2, norm),
            InvertedBlock(32, 32, 1, norm),
            InvertedBlock(32, 64, 2, norm),
            InvertedBlock(64, 64, 1, norm),
            InvertedBlock(64, 64, 1, norm),
        )
        self.last = convolution(64, 256, norm, size=1)
        self.head = nn.Linear(256, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu6(self.stem(x)))
        return self.head(F.relu6(self.last(x)).mean((2, 3)))


class PlainNetwork(nn.Module):
    """Three convolutions and a hidden layer, without shortcuts.

    A large learning rate upsets it more easily than the other models.
    """

    def __init__(self, norm: str, channels: int, classes: int) -> None:
        super().__init__()
        first, second = convolution(channels, 32, norm), convolution(32, 64, norm, stride=2)
        self.convolutions = nn.ModuleList([first, second, convolution(64, 64, norm)])
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            x = F.relu(layer(x))
        return self.head(F.relu(self.hidden(F.adaptive_avg_pool2d(x, 4).flatten(1))))


MODELS = {
    "resnet": ResNet,
    "resnet34": functools.partial(ResNet, width=64, depths=(3, 4, 6, 3)),
    "mobilenetv2": MobileNetV2,
    "plain": PlainNetwork,
}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        parents=[training_torch.backend_option],
        description="Train a classifier of handwritten digits, dense or with ScaleCom.",
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet", help="the network")
    parser.add_argument("--norm", choices=tuple(NORMS), default="batch", help="its normalisation")
    training.add_training_options(parser, lr=0.025, steps=600, batch_size=32, weight_decay=1e-4)
    return parser


if __name__ == "__main__":
    training.main(argument_parser(), train, start, hvd)
