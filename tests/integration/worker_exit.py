"""Run on every rank by test_training.py: ends right after a step whose model nobody holds."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


def train():
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model.register_comm_hook(ScaleComState(model), scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
