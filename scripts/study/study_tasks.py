"""What the study trains: small tasks on data that every machine has, and tasks of a reader's own.

A task of your own is a file that defines TASK, an object like these: an instance of a subclass of
`Task` with a model, batches, a loss and an evaluation.

    python scripts/study/study.py --task my_task.py
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # they are scripts to copy, not a package

import train_char_lm  # noqa: E402
import train_image  # noqa: E402
import training  # noqa: E402
from training_torch import generator  # noqa: E402


class Task:
    """A model, its data, and its training on 4 workers, unless an experiment says differently.

    title: the name in tables.
    metric, higher_is_better, unit, digits: what `evaluate` returns, and how it is written.
    steps, batch_size (per worker), lr (of all workers together), momentum, weight_decay: for
        training.
    adamw_lr: the lr if AdamW replaces SGD.
    """

    title = ""
    metric = ""
    higher_is_better = True
    unit = ""
    digits = 1
    steps = 500
    batch_size = 16
    lr = 0.1
    adamw_lr = 0.003
    momentum = 0.9
    weight_decay = 0.0

    def model(self, norm: str) -> nn.Module:
        """A new model, with parameters drawn from torch's generator.

        norm: "batch", "group", "layer" or "none", if the model has a choice.
        """
        raise NotImplementedError

    def batch(
        self, seed: int, step: int, worker: int, workers: int, size: int, unlike: bool
    ) -> Any:
        """What a worker trains on in a step. It is the same every time.

        unlike: take it from a shard of the worker's own, unlike the other workers' shards.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> float:
        """Evaluate on held-out data."""
        raise NotImplementedError


class Images(Task):
    """Digits: accuracy over nine one-pixel shifts of each held-out image."""

    metric, unit = "acc9", "%"
    weight_decay = 1e-4

    def __init__(self, title: str, name: str, steps: int, lr: float) -> None:
        self.title, self._name, self.steps, self.lr = title, name, steps, lr

    @functools.cached_property
    def _data(self) -> train_image.Data:
        return train_image.load_digits()

    @functools.cached_property
    def _by_label(self) -> torch.Tensor:
        return self._data.train_labels.argsort(stable=True)

    def model(self, norm: str) -> nn.Module:
        return train_image.build_model(self._name, norm, channels=self._data.train_images.shape[1])

    def batch(self, seed, step, worker, workers, size, unlike):
        random = generator(seed, step, worker)
        count = len(self._data.train_images)
        if unlike:  # a worker sees only digits of its own range of labels
            own = self._by_label[worker * count // workers : (worker + 1) * count // workers]
            chosen = own[torch.randint(len(own), (size,), generator=random)]
        else:
            place = SimpleNamespace(size=lambda: workers, rank=lambda: worker)
            epoch, mine = training.deal(SimpleNamespace(batch_size=size), count, step, place)
            chosen = torch.randperm(count, generator=generator(seed, epoch))[mine]
        images = train_image.augment(self._data.train_images[chosen], random)
        return images, self._data.train_labels[chosen]

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model):
        images, labels = self._data.test_images, self._data.test_labels
        correct = sum(
            int((model(train_image.shift(images, dx, dy)).argmax(1) == labels).sum())
            for dx, dy in train_image.NINE
        )
        return 100 * correct / 9 / len(labels)


class Characters(Task):
    """Source code of Python's standard library, character by character.

    The score is bits per character on held-out files.
    """

    metric, unit, digits, higher_is_better = "bits_per_character", "bits", 3, False
    batch_size = 4

    def __init__(
        self, title: str, make: Callable[[], nn.Module], steps: int, lr: float, adamw_lr: float
    ) -> None:
        self.title, self._make, self.steps = title, make, steps
        self.lr, self.adamw_lr = lr, adamw_lr

    @functools.cached_property
    def _text(self) -> train_char_lm.Text:
        return train_char_lm.load_text(None)

    def model(self, norm: str) -> nn.Module:
        return self._make()

    def batch(self, seed, step, worker, workers, size, unlike):
        # Neighbouring files belong to one package, so a stretch of its own is text of another kind.
        text = self._text.train
        first, last = (
            (worker * len(text) // workers, (worker + 1) * len(text) // workers)
            if unlike
            else (0, len(text))
        )
        starts = torch.randint(
            first, last - train_char_lm.WINDOW, (size,), generator=generator(seed, step, worker)
        )
        return train_char_lm.windows_at(text, starts)

    def loss(self, model, batch):
        return train_char_lm.cross_entropy(model, batch)

    def evaluate(self, model):
        held_out = self._text.held_out
        starts = torch.linspace(0, len(held_out) - train_char_lm.WINDOW - 1, 400).long()
        losses = [
            float(self.loss(model, train_char_lm.windows_at(held_out, part))) * len(part)
            for part in starts.split(100)
        ]
        return sum(losses) / len(starts) / math.log(2)


TASKS: dict[str, Task] = {
    "resnet": Images("digits, ResNet", "resnet", steps=400, lr=0.02),
    "mobilenet": Images("digits, MobileNetV2", "mobilenetv2", steps=200, lr=0.05),
    "plain": Images("digits, plain CNN", "plain", steps=300, lr=0.02),
    "lstm": Characters("source code, LSTM", train_char_lm.LSTM, steps=500, lr=2.0, adamw_lr=0.01),
    "transformer": Characters(
        "source code, Transformer",
        train_char_lm.Transformer,
        steps=250,
        lr=0.2,
        adamw_lr=0.003,
    ),
    "wider": Characters(
        "source code, Transformer of 1.2 M",
        functools.partial(train_char_lm.Transformer, width=160, inner=640, layers=4),
        steps=1024,
        lr=0.2,
        adamw_lr=0.001,
    ),
}


@functools.cache
def find(name: str) -> Task:
    """A task by its name in TASKS, or the task of a reader's file.

    Raises WrongInput that says what is missing.
    """
    if name in TASKS:
        return TASKS[name]
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise training.WrongInput(
            f"--task {name}: neither one of {', '.join(TASKS)} nor a Python file that defines TASK"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, "TASK", None), Task):
        raise training.WrongInput(
            f"--task {name}: the file must define TASK, an object of a subclass of study_tasks.Task"
        )
    return module.TASK
