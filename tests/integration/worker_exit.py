"""Run on every rank by test_training.py: ends right after a step whose model nobody holds.

Each rank also waits for what the other never sends, as after a step that was given up.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives


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
collectives = ProcessGroupCollectives()
for name in ("first", "second"):  # what made the group is then let go
    collectives.all_reduce(torch.ones(1), name).wait()
collectives.broadcast(torch.ones(1), 1 - dist.get_rank(), "never sent")
dist.destroy_process_group()
