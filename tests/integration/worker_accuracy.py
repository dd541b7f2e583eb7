"""Run on every rank by test_accuracy.py: short trainings on digits, intact or with one part broken.

Prints the accuracies reached. A part is broken as a bug would break it, which shows that the bounds
of test_accuracy.py catch such a bug.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Step

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "examples"))
from train_image import augment, load_digits, shift

STEPS, BATCH = 280, 32


def train(name: str, settings: dict | None) -> float:
    """Return acc9 (percent): the accuracy over the nine one-pixel shifts of the test images."""
    torch.manual_seed(0)
    # There is no batch norm, because it hides errors.
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    compression = hvd.Compression.none if settings is None else hvd.ScaleCom(**settings)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        compression=compression,
    )
    data = load_digits()
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    if name == "every rank its own indices":
        BucketStep.take_and_accumulate = take_at_own_indices
    for _ in range(STEPS):
        chosen = torch.randint(0, len(data.train_images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(augment(data.train_images[chosen], generator)), data.train_labels[chosen]
        ).backward()
        optimizer.step()
        if name == "residues thrown away":
            for tensor in optimizer.compression.residues.tensors.values():
                tensor.residue.zero_()
    BucketStep.take_and_accumulate = sound_take
    with torch.no_grad():
        right = [
            (model(shift(data.test_images, x, y)).argmax(1) == data.test_labels)
            for x in (-1, 0, 1)
            for y in (-1, 0, 1)
        ]
    return 100 * float(torch.stack(right).float().mean())


sound_take = BucketStep.take_and_accumulate


def take_at_own_indices(bucket: BucketStep, offsets: torch.Tensor, choose: bool = False) -> Step:
    """Send what a rank would send if it took itself for the leader."""
    own = offsets.clone()
    generator = torch.Generator().manual_seed(hvd.rank())
    choices = bucket.choices.split(own).values()
    for tensor, choice in zip(bucket.tensors, choices, strict=True):
        k, part = tensor.geometry.k, choice["offsets"]
        rows = torch.randint(0, max(tensor.residue.numel() // k - 1, 1), (k,), generator=generator)
        part.copy_(rows)
    return sound_take(bucket, own, choose)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    recipe = {"rate": 50, "bits": 32, "dense": ["7.*"]}
    runs = {
        "dense": None,
        "ScaleCom": recipe,
        "the defaults": {"nu": None},
        "residues thrown away": recipe,
        "every rank its own indices": recipe,
    }
    reached = {name: train(name, settings) for name, settings in runs.items()}
    if hvd.rank() == 0:
        print("REACHED " + json.dumps(reached), flush=True)


if __name__ == "__main__":
    main()
