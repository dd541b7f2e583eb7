"""Train digits with Lightning Fabric and ScaleCom.

    fabric run --accelerator cpu --strategy ddp --devices 2 \\
        scripts/examples/train_fabric.py --checkpoint /tmp/digits
    fabric run --accelerator cpu --strategy ddp --devices 2 \\
        scripts/examples/train_fabric.py --resume /tmp/digits

An example to copy. The hook is registered on the DistributedDataParallel inside the model that
`fabric.setup` returns, and every rank writes its own residues next to what `fabric.save` writes.
Needs torch, lightning and scikit-learn.
"""

from __future__ import annotations

import argparse
import gc

import digits
import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", help="the folder to write one to")
    parser.add_argument("--resume", help="the folder of one to go on from")
    options = parser.parse_args()

    fabric = lightning.Fabric()  # `fabric run` says how many devices there are, and of what kind
    fabric.seed_everything(1)
    train, test = (TensorDataset(*map(torch.from_numpy, part)) for part in digits.load())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    looked_at = fabric.setup_dataloaders(DataLoader(test, batch_size=180))
    # A loader of Fabric's numbers epochs from 0 again when training is resumed.
    sampler = DistributedSampler(train, fabric.world_size, fabric.global_rank)
    batches = DataLoader(train, batch_size=32, sampler=sampler)

    state = None
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):  # with one rank there is none
            state = ScaleComState(module)
            module.register_comm_hook(state, scalecom_hook)
    everything = {"model": model, "optimizer": optimizer, "epochs": 0}
    mine = f"rank{fabric.global_rank}.pt"
    if options.resume:
        fabric.load(f"{options.resume}/model.pt", everything)
        if state is not None:
            saved = torch.load(f"{options.resume}/{mine}", map_location="cpu", weights_only=True)
            state.load_state_dict(saved)

    for epoch in range(everything["epochs"], options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in batches:
            images, labels = fabric.to_device(batch)
            fabric.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        everything["epochs"] = epoch + 1
        fabric.print(f"epoch {epoch + 1}: accuracy {accuracy(fabric, model, looked_at):.3f}")
    if options.checkpoint:
        fabric.save(f"{options.checkpoint}/model.pt", everything)
        if state is not None:
            torch.save(state.state_dict(), f"{options.checkpoint}/{mine}")


@torch.no_grad()
def accuracy(fabric: lightning.Fabric, model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    right = [(model(images).argmax(1) == labels).float().mean() for images, labels in batches]
    return fabric.all_reduce(torch.stack(right).mean(), reduce_op="mean").item()


if __name__ == "__main__":
    main()
    # Over Gloo, torch 2.13 may abort if Python ends while a thread still releases averaged tensors
    # (pytorch/pytorch#190489). Destroying the group waits for its threads, but it waits for ever if
    # a wrapped model still holds the group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
