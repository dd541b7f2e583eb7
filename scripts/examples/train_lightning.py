"""Train digits with Lightning and ScaleCom.

    python scripts/examples/train_lightning.py --devices 2 --checkpoint /tmp/digits.ckpt
    python scripts/examples/train_lightning.py --devices 2 --resume /tmp/digits.ckpt
    torchrun --nproc-per-node 2 scripts/examples/train_lightning.py

The part to copy is `ScaleComCallback`. DDPStrategy(ddp_comm_state=, ddp_comm_hook=) would register
the hook on GPUs only and silently ignore it elsewhere. Besides, a state is made from a model that
is already wrapped. Needs torch, lightning and scikit-learn.
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import digits
import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


class ScaleComCallback(lightning.Callback):
    """Registers the hook when DistributedDataParallel has wrapped the model.

    A checkpoint holds the residues of all ranks. A run with as many ranks goes on with them.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.saved = settings, None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.world_size == 1:
            return
        model = trainer.strategy.model
        self.state = ScaleComState(model, **self.settings)
        model.register_comm_hook(self.state, scalecom_hook)
        if self.saved is not None:
            self.state.load_state_dict(self.saved)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.world_size == 1:
            return
        everyone = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(self.state.state_dict(), everyone)
        checkpoint["scalecom"] = everyone

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        everyone = checkpoint.get("scalecom")
        if everyone is not None:
            self.saved = everyone[trainer.global_rank]


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def test_step(self, batch: Any, index: int) -> None:
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def validation_step(self, batch: Any, index: int) -> None:
        self.test_step(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", help="where to write one")
    parser.add_argument("--resume", help="one to go on from")
    parser.add_argument("--validate", action=argparse.BooleanOptionalAction, default=True)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's
    parser.add_argument("--devices", type=int, default=here, help="of this machine")
    options = parser.parse_args()

    lightning.seed_everything(1)
    train, test = (
        torch.utils.data.TensorDataset(*map(torch.from_numpy, part)) for part in digits.load()
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),  # torchrun's too
        strategy="ddp",
        max_epochs=options.epochs,
        callbacks=[ScaleComCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)
    model = Model()
    looked_at = torch.utils.data.DataLoader(test, batch_size=180)
    trainer.fit(model, loader, looked_at if options.validate else None, ckpt_path=options.resume)
    if options.checkpoint:
        trainer.save_checkpoint(options.checkpoint)
    trainer.test(model, looked_at)


if __name__ == "__main__":
    main()
    # Over Gloo, torch 2.13 may abort if Python ends while a thread still releases averaged tensors
    # (pytorch/pytorch#190489). Destroying the group waits for its threads, but it waits for ever if
    # a wrapped model still holds the group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
