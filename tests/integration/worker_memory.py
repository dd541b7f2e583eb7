"""Run on every rank by test_memory.py: trains 32 M parameters for some steps.

Rank 0 prints in bytes by how much the process's peak memory grew after the model was made.
Arguments: "dense", or ScaleCom's settings as JSON.
"""

import json
import re
import sys
from pathlib import Path

import torch

import scalecom_hvd.torch as hvd


def peak() -> int:
    return (
        int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
    )


hvd.init()
torch.set_num_threads(1)
hvd.allreduce(torch.zeros(1), name="connect")
before = peak()
model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4_000_000)) for _ in range(8))
dense = sys.argv[1] == "dense"
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none if dense else hvd.ScaleCom(**json.loads(sys.argv[1])),
)
for _ in range(4):
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.backward(torch.ones_like(parameter))
    optimizer.step()
if hvd.rank() == 0:
    print("PEAK", peak() - before)
