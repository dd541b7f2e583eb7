"""Train a ResNet on a folder of pictures with DistributedDataParallel and ScaleCom.

    torchrun --nproc-per-node 2 scripts/examples/train_imagefolder.py --data pictures
    torchrun --nproc-per-node 2 scripts/examples/train_imagefolder.py --data pictures \\
        --checkpoint run1 --resume
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29500 \\
        scripts/examples/train_imagefolder.py --data /data/imagenet --checkpoint /shared/run1

An example to copy: DataLoader, mixed precision, validation, checkpoints, GPUs, several GPUs a node.
The lines that a script without ScaleCom lacks name `scalecom`. --data has the folders train/ and
val/, and these have a folder of pictures for each class, as torchvision's ImageFolder wants them.
Needs torch, numpy, Pillow and tqdm.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
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

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

AMP_DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
PICTURES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


def main() -> None:
    args = argument_parser().parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
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
    from train_image import build_model  # it looks for torchrun's variables when it is imported

    rank, ranks = dist.get_rank(), dist.get_world_size()
    pictures = Pictures(args.data / "train", args.image_size)
    batches = loader(pictures, args, trains=True)
    validation = loader(Pictures(args.data / "val", args.image_size, pictures.classes), args)
    total_steps = args.epochs * len(batches)

    torch.manual_seed(0)
    model: torch.nn.Module = build_model(args.model, "batch", 3, len(pictures.classes))
    model.to(device)
    settings = {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    dtype = AMP_DTYPES[args.amp]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    everything = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    checkpoint = newest(args.checkpoint) if args.resume else None
    first_epoch = 0
    if checkpoint is not None:
        first_epoch = load(checkpoint, everything, device)
        if schedule.T_max != total_steps:
            other = f"{checkpoint} is of a run of {schedule.T_max} steps, not {total_steps}"
            raise SystemExit(f"{other}: give the same --epochs, --batch-size and number of ranks")
    model = DistributedDataParallel(model)
    scalecom = ScaleComState(model, total_steps=total_steps, loss_scale=scaler, mesh=nodes(device))
    model.register_comm_hook(scalecom, scalecom_hook)
    if checkpoint is not None:
        scalecom.load_state_dict(torch.load(own_file(checkpoint), map_location=device))

    for epoch in range(first_epoch, args.stop_after or args.epochs):
        model.train()
        torch.manual_seed(epoch * ranks + rank)  # for dropout, and in the loaders' processes
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
        if rank == 0:
            sent = scalecom.stats()["bytes_traffic"]
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}, {sent:,.0f} bytes a step")
        save(args.checkpoint, everything, scalecom, epoch + 1)


class Pictures(Dataset):
    """(picture (3, size, size) float32, class) of all files in a folder of folders, one a class.

    torchvision.datasets.ImageFolder gives the same, and torchvision can augment pictures. classes:
    names of the folders; None: those that there are.
    """

    def __init__(self, folder: Path, size: int, classes: list[str] | None = None) -> None:
        self.size = size
        found = sorted(each.name for each in folder.iterdir() if each.is_dir())
        self.classes = classes or found
        if not set(found) <= set(self.classes):
            raise SystemExit(f"{folder} has classes that the training pictures have not")
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted(folder.glob(f"{name}/*"))
            if file.suffix.lower() in PICTURES
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[index]
        picture = Image.open(file).convert("RGB").resize((self.size, self.size))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1, label


def loader(dataset: Dataset, args: argparse.Namespace, trains: bool = False) -> DataLoader:
    """This rank's share of the batches. All ranks have equally many."""
    return DataLoader(
        dataset,
        args.batch_size,
        # It repeats a few pictures where they cannot be shared out evenly.
        sampler=DistributedSampler(dataset, shuffle=trains),
        num_workers=args.loaders,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=args.loaders > 0,
        drop_last=trains,
    )


def nodes(device: torch.device) -> DeviceMesh | None:
    """The mesh of nodes. None: there is one node, or one rank a node."""
    ranks, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks % local:
        raise SystemExit("give every node the same number of ranks (--nproc-per-node)")
    if local in (1, ranks):
        return None
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (ranks // local, local), mesh_dim_names=names)


@torch.no_grad()
def validate(
    model: torch.nn.Module, batches: DataLoader, device: torch.device, dtype: torch.dtype | None
) -> float:
    """The share of the pictures that the model knows, over all ranks."""
    model.eval()
    right = torch.zeros(2, device=device)
    for images, labels in batches:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            found = model(images.to(device)).argmax(1)
        right[0] += (found == labels.to(device)).sum()
        right[1] += len(labels)
    dist.all_reduce(right)
    return float(right[0] / right[1])


def own_file(checkpoint: Path) -> Path:
    """Where this rank keeps its residues: no two ranks have the same."""
    return checkpoint / f"scalecom-rank{dist.get_rank()}.pt"


def save(folder: Path, everything: dict[str, Any], scalecom: ScaleComState, epochs: int) -> None:
    """Save this rank's residues and, on rank 0, what all ranks have in common.

    A checkpoint counts once all ranks have written it, so a run that dies here leaves the last one.
    """
    checkpoint = folder / f"epoch-{epochs}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(scalecom.state_dict(), own_file(checkpoint))
    if dist.get_rank() == 0:
        common = {name: part.state_dict() for name, part in everything.items()}
        torch.save(common | {"epochs": epochs}, checkpoint / "common.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest.part").write_text(checkpoint.name)
        (folder / "latest.part").replace(folder / "latest")
        for old in folder.glob("epoch-*"):
            if old != checkpoint:
                shutil.rmtree(old)


def newest(folder: Path) -> Path | None:
    """The last checkpoint; None if there is none."""
    latest = folder / "latest"
    return folder / latest.read_text() if latest.exists() else None


def load(checkpoint: Path, everything: dict[str, Any], device: torch.device) -> int:
    """Load what all ranks have in common; returns how many epochs were trained."""
    saved = torch.load(checkpoint / "common.pt", map_location=device)
    for name, part in everything.items():
        part.load_state_dict(saved[name])
    return int(saved["epochs"])


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a ResNet on a folder of pictures.")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="has train/ and val/")
    add("--model", default="resnet34", help="one of train_image.py's")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32, help="of each rank")
    add("--lr", type=float, default=0.1)
    add("--image-size", type=int, default=224)
    add("--amp", choices=AMP_DTYPES, default="bfloat16")
    add("--loaders", type=int, default=2, help="processes that read pictures")
    add("--checkpoint", type=Path, default=Path("checkpoint"), help="all ranks see this folder")
    add("--stop-after", type=int, help="end after so many of the epochs")
    add("--resume", action="store_true", help="go on from --checkpoint, if any")
    return parser


if __name__ == "__main__":
    main()
