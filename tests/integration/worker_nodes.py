"""A rank of test_nodes.py: trains on Horovod with nodes, and prints the result.

Arguments: what nodes= is, and "fails" if rank 1 raises an error in the middle of local steps.
"""

import json
import sys
import time

import torch

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.node import Node

STEPS = 10
counts = Node.counts


def counts_late(node, is_sound, step, *votes):
    """Call Node.counts, late in the last step: ranks of the other node may have left by then."""
    if step == STEPS - 1:
        time.sleep(0.5)
    return counts(node, is_sound, step, *votes)


def train(fails=False, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=hvd.ScaleCom(min_numel=100),
        nodes=True if sys.argv[1] == "True" else int(sys.argv[1]),
        **settings,
    )
    random = torch.Generator().manual_seed(hvd.rank())
    for step in range(STEPS):
        if fails and hvd.rank() == 1 and step == 5:  # rank 0 waits for this rank after step 8
            raise ArithmeticError("in the script")
        inputs = torch.randn(8, 40, generator=random)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
    return model, optimizer


hvd.init(process_sets="dynamic")
torch.set_num_threads(1)
if hvd.rank() >= hvd.size() // 2:
    Node.counts = counts_late
model, optimizer = train()
if hvd.rank() == 0:
    weights = [p.double().sum().item() for p in model.parameters()]
    print("RESULT", json.dumps([weights, optimizer.compression.stats()["ranks_per_node"]]))
# The first node ends while averages travel, and before the other node has averaged inside.
train(fails=sys.argv[2:] == ["fails"], local_steps=4, overlap=1)
