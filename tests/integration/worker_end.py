"""Run on every rank by test_faults.py: ends while averages of local steps travel.

They are those of the optimizer in use, and those of an optimizer that was dropped.
"""

import gc
import sys
import time

import torch

import scalecom_hvd.torch as hvd

hvd.init()


def train(steps: int) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.ones(40_000)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.1),
        named_parameters=[(f"weight{i}", weight) for i, weight in enumerate(weights)],
        compression=hvd.ScaleCom(rate=100, dense=[], warmup_steps=0, bucket_bytes=200_000),
        local_steps=4,
        overlap=3,
    )
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + hvd.rank())
        if hvd.rank() == 1 and step == 7:
            time.sleep(1)  # the other rank has sent its part, and goes on to its end
        optimizer.step()
    return optimizer


train(9)  # drops the optimizer
gc.collect()
kept = train(8)
sys.stdout.write(f"rank {hvd.rank()} is done\n")
