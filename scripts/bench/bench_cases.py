"""What `make bench` trains: models whose compute is a pause, as if a GPU did it.

bench_worker.py runs them on every rank.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "race"))

import race_images
import race_language

Loss = Callable[[torch.nn.Module], torch.Tensor]


def transformer_shapes(
    layers: int = 6, width: int = 512, tokens: int = 11_000, positions: int = 512
) -> list[list[tuple[int, ...]]]:
    """The parameters of a Transformer encoder with tied embedding, layer by layer.

    They are 24.8 M in 75 tensors.
    """
    block = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
    ]
    norms = [(width,)] * 4
    return [
        [(tokens, width), (positions, width)],
        *[block + norms for _ in range(layers)],
        [(tokens,)],
    ]


class _PausedLayer(torch.autograd.Function):
    """A layer whose gradients lie in memory already.

    Its forward and backward take as long as the case says.
    """

    @staticmethod
    def forward(ctx, x, layer, *parameters):
        ctx.layer = layer
        layer.begin()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.layer.backward_pause)
        # New tensors on the same memory: autograd takes them over as p.grad without a copy.
        return grad, None, *[gradient.detach() for gradient in ctx.layer.gradients]


class PausedLayer(torch.nn.Module):
    """Parameters with random gradients.

    Every forward makes new gradients, which takes part of its pause.
    """

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        forward_pause: float,
        backward_pause: float,
        noise: torch.Tensor,
    ) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes
        )
        self.gradients = [torch.zeros(shape) for shape in shapes]
        self.forward_pause, self.backward_pause = forward_pause, backward_pause
        self._noise = noise

    def begin(self) -> None:
        end = time.perf_counter() + self.forward_pause
        for gradient in self.gradients:
            start = int(torch.randint(self._noise.numel() - gradient.numel(), ()))
            gradient.view(-1).copy_(self._noise[start : start + gradient.numel()])
        time.sleep(max(0.0, end - time.perf_counter()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PausedLayer.apply(x, self, *self.weights)


def paused_transformer(
    seed: int, pause: float = 0.15, shapes: list[list[tuple[int, ...]]] | None = None
) -> tuple[torch.nn.Module, Loss]:
    """The model, and a function that computes its loss, wrapped or not.

    pause: seconds of compute per step, a third of them in forward. Layers share them by their
        numbers of parameters.
    """
    torch.manual_seed(seed)
    shapes = shapes or transformer_shapes()
    largest = max(torch.Size(shape).numel() for layer in shapes for shape in layer)
    noise = torch.randn(largest + 2_000_000) * 1e-3
    sizes = [sum(torch.Size(shape).numel() for shape in layer) for layer in shapes]
    layers = [
        PausedLayer(layer, pause / 3 * size / sum(sizes), pause * 2 / 3 * size / sum(sizes), noise)
        for layer, size in zip(shapes, sizes, strict=True)
    ]
    model = torch.nn.Sequential(*layers)
    x = torch.ones((), requires_grad=True)
    return model, lambda model: model(x)


def language_model(seed: int) -> tuple[torch.nn.Module, Loss]:
    """The shapes of the race's language model, 5 M parameters; a step computes for 30 ms.

    In proportion to its size, that is as long as the Transformer's step.
    """
    with torch.device("meta"):
        model = race_language.Decoder(race_language.SIZES["full"])
    parts = [model.embedding, *model.blocks, model.norm]
    return paused_transformer(seed, 0.03, shapes_of(parts))


def race_resnet(seed: int) -> tuple[torch.nn.Module, Loss]:
    """The shapes of the race's ResNet, 4.9 M parameters; a step computes for 30 ms."""
    with torch.device("meta"):
        model = race_images.resnet()
    return paused_transformer(seed, 0.03, shapes_of([model.stem, *model.blocks, model.head]))


def shapes_of(parts: Iterable[torch.nn.Module]) -> list[list[tuple[int, ...]]]:
    """The shapes of each part's parameters."""
    return [[tuple(p.shape) for p in part.parameters()] for part in parts]


# The optimizers of cases whose steps are those of a whole run. Others have plain SGD.
OPTIMIZERS = {
    "language-model": torch.optim.AdamW,
    "race-resnet": functools.partial(torch.optim.SGD, momentum=0.9),
}
CASES = {
    "transformer": paused_transformer,
    "language-model": language_model,
    "race-resnet": race_resnet,
}
