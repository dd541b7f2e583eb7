"""Train digits with Hugging Face Accelerate and ScaleCom.

    accelerate launch --cpu --num_processes 2 \\
        scripts/examples/train_accelerate.py --checkpoint /tmp/digits
    torchrun --nproc-per-node 2 scripts/examples/train_accelerate.py --resume /tmp/digits

An example to copy. The hook is registered on the model that `prepare` returns, and every rank
writes its own residues next to what `save_state` writes. Needs torch, accelerate and scikit-learn.
"""

from __future__ import annotations

import argparse
import gc

import accelerate
import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--passes", type=int, default=1, help="backward passes per step")
    parser.add_argument("--checkpoint", help="the folder to write one to")
    parser.add_argument("--resume", help="the folder of one to go on from")
    options = parser.parse_args()

    accelerate.utils.set_seed(1)
    train, test = (
        torch.utils.data.TensorDataset(*map(torch.from_numpy, part)) for part in digits.load()
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator = accelerate.Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=options.passes,
        # Each epoch has an order of its own, even in a run that begins in the middle.
        dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model, optimizer, batches, test_batches = accelerator.prepare(
        model,
        optimizer,
        torch.utils.data.DataLoader(train, batch_size=32, shuffle=True),
        torch.utils.data.DataLoader(test, batch_size=180),
    )

    state = None
    if accelerator.num_processes > 1:  # else there is nothing to average
        state = ScaleComState(model)
        model.register_comm_hook(state, scalecom_hook)
    mine = f"rank{accelerator.process_index}.pt"
    first_epoch = 0
    if options.resume:
        accelerator.load_state(options.resume)
        saved = torch.load(f"{options.resume}/{mine}", map_location="cpu", weights_only=True)
        first_epoch = saved["epochs"]
        if state is not None and saved["scalecom"] is not None:
            state.load_state_dict(saved["scalecom"])

    for epoch in range(first_epoch, options.epochs):
        batches.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    if options.checkpoint:
        accelerator.save_state(options.checkpoint)
        residues = None if state is None else state.state_dict()
        saved = {"epochs": options.epochs, "scalecom": residues}
        torch.save(saved, f"{options.checkpoint}/{mine}")

    model.eval()
    right = 0
    for images, labels in test_batches:
        with torch.no_grad():
            found = accelerator.gather_for_metrics((model(images).argmax(1), labels))
        right += int((found[0] == found[1]).sum())
    accelerator.print(f"accuracy {right / len(test):.3f}")


if __name__ == "__main__":
    main()
    # Over Gloo, torch 2.13 may abort if Python ends while a thread still releases averaged tensors
    # (pytorch/pytorch#190489). Destroying the group waits for its threads, but it waits for ever if
    # a wrapped model still holds the group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
