"""Train digits with Ray Train and ScaleCom.

    python scripts/examples/train_ray.py --checkpoint /tmp/digits --epochs 6
    python scripts/examples/train_ray.py --checkpoint /tmp/digits --epochs 8  (goes on)

An example to copy. The hook is registered on the model that `prepare_model` returns. Every rank
writes a file of its own, and Ray makes one checkpoint of all ranks' files. Needs torch, ray[train]
and scikit-learn.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import digits
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)
from torch.utils.data import DataLoader, TensorDataset

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


def train_on_a_worker(settings: dict[str, Any]) -> None:
    context = ray.train.get_context()
    several, mine = context.get_world_size() > 1, f"rank{context.get_world_rank()}.pt"
    torch.manual_seed(1)
    train, test = (TensorDataset(*map(torch.from_numpy, part)) for part in digits.load())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = DataLoader(train, batch_size=32, shuffle=True)
    batches = ray.train.torch.prepare_data_loader(batches)
    looked_at = DataLoader(test, batch_size=180)
    looked_at = ray.train.torch.prepare_data_loader(looked_at)

    state = None
    if several:  # else there is nothing to average
        state = ScaleComState(model)
        model.register_comm_hook(state, scalecom_hook)
    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()  # after a failure, and in a run of the same name
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/{mine}", map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epochs"]
        if state is not None:
            state.load_state_dict(saved["scalecom"])

    for epoch in range(first_epoch, settings["epochs"]):
        if several:
            batches.sampler.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epochs": epoch + 1,
            "scalecom": None if state is None else state.state_dict(),
        }
        with tempfile.TemporaryDirectory() as folder:
            torch.save(saved, f"{folder}/{mine}")
            files = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"accuracy": accuracy(model, looked_at)}, checkpoint=files)


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    right = [(model(images).argmax(1) == labels).float().mean() for images, labels in batches]
    average = torch.stack(right).mean() / ray.train.get_context().get_world_size()
    if dist.is_initialized():
        dist.all_reduce(average)
    return average.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, required=True, help="their folder")
    options = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train_on_a_worker,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers, use_gpu=torch.cuda.is_available()
        ),
        run_config=ray.train.RunConfig(
            name="digits",
            storage_path=str(options.checkpoint.resolve()),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    print(f"accuracy {trainer.fit().metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
