"""Train a ResNet or a MobileNetV2 on images with Horovod, dense or with ScaleCom.

    horovodrun -np 2 python scripts/examples/train_image.py --compression scalecom
    mpirun -np 4 python scripts/examples/train_image.py --dataset cifar10 \\
        --data-dir ~/cifar-10-batches-py --steps 12000 --lr 0.05
    torchrun --nproc-per-node 2 scripts/examples/train_image.py             (without Horovod)
    python scripts/examples/train_image.py --steps 200      (one process, to try things out)

An example to copy: `train` is all of it. Compared with a script without Horovod, the lines that
differ call `hvd`. Compared with a script with Horovod, only `compression=` differs.
"""

from __future__ import annotations

import argparse
import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import digits
import torch
import training
import training_torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)
from training_torch import hvd, start

CIFAR10_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
CIFAR10_TEST = 10_000


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train as the options say; returns the run's summary."""
    data = load_digits() if args.dataset == "digits" else load_cifar10(args.data_dir)

    torch.manual_seed(args.seed)
    device = training_torch.device()
    model = build_model(args.model, args.norm, data.train_images.shape[1]).to(device)
    optimizer = hvd.DistributedOptimizer(
        training_torch.optimizer_from(args, model.parameters()),
        named_parameters=model.named_parameters(),
        compression=training.compression_from(args, training_torch.shapes_of(model), hvd),
    )
    first_step = training_torch.begin(args, model, optimizer)
    title = f"{args.dataset} {args.model} {args.compression}"
    log = training_torch.run_log(args, title, first_step, optimizer)

    def test() -> dict[str, float]:
        return evaluate(model, data)

    def save(step: int) -> None:
        training_torch.save_checkpoint(args.checkpoint_dir, step, model, optimizer)

    for step in log.steps():
        chosen = training_torch.batch_indices(args, len(data.train_images), step)
        random = training_torch.generator(args.seed, step, hvd.rank())
        images = augment(data.train_images[chosen], data, random)

        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), data.train_labels[chosen].to(device))
        loss.backward()
        lr = training_torch.apply_gradients(args, optimizer, step)
        log.step_done(step, loss, lr, test, save)
    return training_torch.end(log, args, model, optimizer)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> dict[str, float]:
    """{"accuracy"} on the test images; with shifts also {"acc9"}, over their nine one-pixel shifts.

    Each rank does its share.
    """
    device = training_torch.device()
    training_torch.share_buffers(model)
    model.eval()
    mine = training.my_share(len(data.test_images), hvd)
    images, labels = data.test_images[mine], data.test_labels[mine]

    def correct(images: torch.Tensor) -> int:
        return sum(
            int((model(x.to(device)).argmax(1) == y.to(device)).sum())
            for x, y in zip(images.split(500), labels.split(500), strict=True)
        )

    scores = {"accuracy": training_torch.ratio_over_ranks(correct(images), len(mine), "accuracy")}
    if data.shifts:
        shifted = sum(correct(shift(images, dx, dy)) for dx in (-1, 0, 1) for dy in (-1, 0, 1))
        scores["acc9"] = training_torch.ratio_over_ranks(shifted, 9 * len(mine), "acc9")
    return scores


# --------------------------------------------------------------------------------------------------
# data


class Data(NamedTuple):
    """Images are (count, channels, height, width), float32, centred.

    shifts: whether to augment and test with one-pixel shifts. If not, images are cropped and
        flipped.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    shifts: bool


def load_digits() -> Data:
    """scikit-learn's handwritten digits, split as in digits.py."""
    parts = [torch.from_numpy(part) for split in digits.load() for part in split]
    return Data(parts[0].unsqueeze(1), parts[1], parts[2].unsqueeze(1), parts[3], shifts=True)


def load_cifar10(folder: Path | None) -> Data:
    """CIFAR-10 from its python pickle files, https://www.cs.toronto.edu/~kriz/cifar.html."""
    if folder is None:
        needed = f"the folder 'cifar-10-batches-py' with the files {', '.join(CIFAR10_FILES)}"
        raise training.WrongInput(f"--dataset cifar10 needs --data-dir: {needed}")
    missing = [name for name in CIFAR10_FILES if not (folder / name).is_file()]
    if missing:
        lacks = f"CIFAR-10 is not complete in {folder}: missing {', '.join(missing)}"
        raise training.WrongInput(
            f"{lacks}. Unpack cifar-10-python.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html) "
            "and give its folder 'cifar-10-batches-py' as --data-dir"
        )
    files = [pickle.loads((folder / n).read_bytes(), encoding="bytes") for n in CIFAR10_FILES]
    images = torch.cat([torch.from_numpy(file[b"data"]) for file in files])
    images = images.reshape(-1, 3, 32, 32).float() / 255
    labels = torch.cat([torch.tensor(file[b"labels"]) for file in files])
    train, test = images[:-CIFAR10_TEST], images[-CIFAR10_TEST:]
    mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    train, test = (train - mean) / deviation, (test - mean) / deviation
    return Data(train, labels[:-CIFAR10_TEST], test, labels[-CIFAR10_TEST:], shifts=False)


def shift(images: torch.Tensor, dx: int, dy: int) -> torch.Tensor:
    """Move images by one pixel at most, right by dx and down by dy; new pixels are zero."""
    height, width = images.shape[-2:]
    return F.pad(images, (1, 1, 1, 1))[..., 1 - dy : 1 - dy + height, 1 - dx : 1 - dx + width]


def augment(images: torch.Tensor, data: Data, generator: torch.Generator) -> torch.Tensor:
    """Random one-pixel shifts for digits.

    For photographs, random shifts by up to four pixels and mirror images.
    """
    reach = 1 if data.shifts else 4
    height, width = images.shape[-2:]
    padded = F.pad(images, (reach, reach, reach, reach))
    down, right = torch.randint(0, 2 * reach + 1, (2, len(images), 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    each = torch.arange(len(images))[:, None, None]
    moved = padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if data.shifts:
        return moved.contiguous()
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], moved.flip(-1), moved).contiguous()


# --------------------------------------------------------------------------------------------------
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
        description="Train an image classifier with Horovod, dense or with ScaleCom.",
    )
    data = "digits come with scikit-learn"
    parser.add_argument("--dataset", choices=("digits", "cifar10"), default="digits", help=data)
    parser.add_argument("--data-dir", type=Path, help="cifar10: the folder cifar-10-batches-py")
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet", help="the network")
    parser.add_argument("--norm", choices=tuple(NORMS), default="batch", help="its normalisation")
    training.add_training_options(parser, lr=0.025, steps=600, batch_size=32, weight_decay=1e-4)
    return parser


if __name__ == "__main__":
    training.main(argument_parser(), train, start, hvd)
