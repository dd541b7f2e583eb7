"""Train a ResNet on a folder of pictures with DistributedDataParallel and ScaleCom.

    torchrun --nproc-per-node 2 scripts/examples/train_imagefolder.py --data pictures
    torchrun --nproc-per-node 2 scripts/examples/train_imagefolder.py --data pictures \\
        --checkpoint run1 --resume
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29500 \\
        scripts/examples/train_imagefolder.py --data /data/imagenet --checkpoint /shared/run1

An example to copy: DataLoader, mixed precision, validation, checkpoints, GPUs, several GPUs a node.
The lines that a script without ScaleCom lacks name `scalecom`. --data has the folders train/ and
val/, and these have a folder of pictures for each class, as torchvision's ImageFolder wants them.
Needs torch, numpy and Pillow.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from train_image import build_model

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

AMP_DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    args = argument_parser().parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("launch with torchrun --nproc-per-node 2 " + __file__)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # Gloo for CPUs, NCCL for GPUs
    train(args, device)
    # Over Gloo, torch 2.13 may abort if Python ends while a thread still releases averaged tensors
    # (pytorch/pytorch#190489). Destroying the group waits for its threads, but it waits for ever if
    # a wrapped model still holds the group.
    gc.collect()
    dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train and validate as the options say."""
    is_first = dist.get_rank() == 0
    batches = loader(Pictures(args.data / "train", args.image_size), args, shuffle=True)
    validation = loader(Pictures(args.data / "val", args.image_size), args, shuffle=False)
    torch.manual_seed(0)
    model: torch.nn.Module = build_model(args.model, "batch", 3, len(batches.dataset.classes))
    model.to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    total_steps = args.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps)
    dtype = AMP_DTYPES[args.amp]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    everything = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    first_epoch = load(args.checkpoint, everything, device) if args.resume else 0

    model = DistributedDataParallel(model)
    scalecom = ScaleComState(model, total_steps=total_steps, loss_scale=scaler, mesh=nodes(device))
    model.register_comm_hook(scalecom, scalecom_hook)
    if args.resume:
        scalecom.load_state_dict(torch.load(own_file(args.checkpoint), map_location=device))

    for epoch in range(first_epoch, args.stop_after or args.epochs):
        model.train()
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        accuracy = validate(model, validation, device, dtype)
        if is_first:
            sent = scalecom.stats()["bytes_traffic"]
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}, {sent:,.0f} bytes a step")
        if args.checkpoint:
            save(args.checkpoint, everything, scalecom, epoch + 1)


class Pictures(Dataset):
    """(picture (3, size, size) float32, class) of all files in a folder of folders, one a class.

    torchvision.datasets.ImageFolder gives the same, and has more ways to augment pictures.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[index]
        picture = Image.open(file).convert("RGB").resize((self.size, self.size))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1, label


def loader(dataset: Dataset, args: argparse.Namespace, shuffle: bool) -> DataLoader:
    """This rank's share of the batches."""
    return DataLoader(
        dataset,
        args.batch_size,
        sampler=DistributedSampler(dataset, shuffle=shuffle),
        num_workers=args.loaders,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=args.loaders > 0,
    )


def nodes(device: torch.device) -> DeviceMesh | None:
    """The mesh of nodes. None: there is one node, or one rank a node."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = dist.get_world_size() // local, local
    if min(shape) == 1:
        return None
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def validate(
    model: torch.nn.Module, batches: DataLoader, device: torch.device, dtype: torch.dtype | None
) -> float:
    """The share of the pictures that the model knows, over all ranks."""
    model.eval()
    right = torch.zeros(2, device=device)
    for images, labels in batches:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            known = model(images.to(device)).argmax(1) == labels.to(device)
        right += torch.tensor([known.sum(), known.numel()], device=device)
    dist.all_reduce(right)
    return float(right[0] / right[1])


def own_file(folder: Path) -> Path:
    """Where this rank keeps its residues: no two ranks have the same."""
    return folder / f"scalecom-rank{dist.get_rank()}.pt"


def save(folder: Path, everything: dict[str, Any], scalecom: ScaleComState, epochs: int) -> None:
    """Save this rank's residues and, on rank 0, all that ranks have in common.

    A file takes its name once it is whole, so a run that dies here leaves the last checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {own_file(folder): scalecom.state_dict()}
    if dist.get_rank() == 0:
        common = {name: part.state_dict() for name, part in everything.items()}
        files[folder / "checkpoint.pt"] = common | {"epochs": epochs}
    for file, state in files.items():
        torch.save(state, file.with_suffix(".part"))
    dist.barrier()  # all ranks have written all of theirs
    for file in files:
        file.with_suffix(".part").replace(file)
    dist.barrier()


def load(folder: Path, everything: dict[str, Any], device: torch.device) -> int:
    """Load what all ranks have in common; returns how many epochs were trained."""
    saved = torch.load(folder / "checkpoint.pt", map_location=device)
    for name, part in everything.items():
        part.load_state_dict(saved[name])
    return int(saved["epochs"])


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a ResNet on a folder of pictures.")
    parser.add_argument("--data", type=Path, required=True, help="has train/ and val/")
    parser.add_argument("--model", default="resnet34", help="one of train_image.py's")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--amp", choices=AMP_DTYPES, default="bfloat16")
    parser.add_argument("--loaders", type=int, default=2, help="processes that read pictures")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all ranks see")
    parser.add_argument("--stop-after", type=int, help="end after so many of the epochs")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    return parser


if __name__ == "__main__":
    main()
