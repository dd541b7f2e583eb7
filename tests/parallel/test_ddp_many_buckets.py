"""What many buckets cost a process in file descriptors and threads, both of which are limited."""

import gc
import os
import resource

import pytest
import torch
import torch.distributed as dist
from faces import hvd
from models import same_on_all_ranks
from torch import nn

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives

LAYERS = 100
SETTINGS = {"rate": 10, "dense": (), "warmup_steps": 0, "min_numel": 2, "bucket_bytes": 4000}


class Layers(nn.Module):
    """A model of layers, each with a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(1000)) for _ in range(LAYERS))

    def forward(self, grad):
        return sum((layer * grad).sum() for layer in self.layers)


def open_now():
    gc.collect()
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def test_a_hundred_buckets_take_fewer_than_a_hundred_of_each():
    before, model = open_now(), Layers()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), ScaleCom(**SETTINGS))
    for step in range(3):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(1000, generator=random)).backward()
        optimizer.step()
    during = open_now()
    assert same_on_all_ranks(model.parameters())
    more = {what: count - before[what] for what, count in during.items()}
    everyone = hvd.allgather_object(more)
    assert all(count < LAYERS for own in everyone for count in own.values()), everyone


def test_too_many_open_files_are_told():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest, opened = max(map(int, os.listdir("/proc/self/fd"))), [0]
    while opened[-1] <= highest:  # the limit is a descriptor's number, and small ones may be free
        opened.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1] + 3, hard))
    try:
        with pytest.raises(RuntimeError, match="ulimit -n 65536"):
            for _ in range(3):
                ProcessGroupCollectives()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in opened[1:]:
            os.close(number)
    dist.barrier()
