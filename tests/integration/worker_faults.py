"""Run on every rank by test_faults.py. Rank 0 prints the result.

Arguments: "late SECONDS", "longer", "submits" or "travels".
"""

import copy
import gc
import sys
import time

import torch
from horovod.common.exceptions import HorovodInternalError

import scalecom_hvd.torch as hvd
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives

hvd.init()


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 100), torch.nn.Tanh(), torch.nn.Linear(100, 100)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        model.named_parameters(),
        compression=hvd.ScaleCom(rate=20, lookahead=True),
    )
    return model, optimizer


def step(model, optimizer, number):
    optimizer.zero_grad()
    inputs = torch.randn(8, 100, generator=torch.Generator().manual_seed(100 * hvd.rank() + number))
    model(inputs).square().mean().backward()
    optimizer.step()


def train(late=0.0):
    model, optimizer = make()
    for number in range(6):
        if number == 3 and hvd.rank() == 1:
            time.sleep(late)
        step(model, optimizer, number)
    residues = optimizer.compression.state_dict()["residues"]
    return [*model.state_dict().values(), *residues.values()]


def train_with_overlap(steps):
    weights = [torch.nn.Parameter(torch.ones(40_000)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.1),
        named_parameters=[(f"weight{i}", weight) for i, weight in enumerate(weights)],
        compression=hvd.ScaleCom(rate=100, bucket_bytes=200_000),
        local_steps=4,
        overlap=3,
    )
    for number in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + hvd.rank())
        if hvd.rank() == 1 and number == 7:
            time.sleep(1)  # the other rank has sent its part, and goes on to its end
        optimizer.step()
    return optimizer


if sys.argv[1] == "late":
    in_time = train()
    began = time.monotonic()
    late = train(float(sys.argv[2]))
    waited = time.monotonic() - began
    assert all(torch.equal(a, b) for a, b in zip(in_time, late, strict=True))
    if hvd.rank() == 0:
        print(f"waited {waited:.0f} s, and everything is as if it had not")
elif sys.argv[1] == "travels":
    train_with_overlap(9)  # drops the optimizer
    gc.collect()
    kept = train_with_overlap(8)
    sys.stdout.write(f"rank {hvd.rank()} is done\n")
elif sys.argv[1] == "submits":
    tensors = [torch.zeros(1) for _ in range(40_000)]
    hvd.allreduce(torch.zeros(1))
    if hvd.rank() == 1:
        time.sleep(0.2)
    else:
        collectives, works = HorovodCollectives(), []
        try:
            for number, tensor in enumerate(tensors):
                works.append(collectives.all_reduce(tensor, f"tensor {number}"))
            works[0].wait()
        except HorovodInternalError:
            print(f"the other rank has ended: {len(works)} were submitted")
else:
    model, optimizer = make()
    for number in range(5):
        step(model, optimizer, number)
    if hvd.rank() == 0:
        compressor = optimizer.compression
        before = copy.deepcopy(compressor.state_dict()["residues"])
        weights = copy.deepcopy(model.state_dict())
        try:
            step(model, optimizer, 5)
        except HorovodInternalError as error:
            print(f"a step more: {type(error).__name__}: {error}")
        assert compressor.stats()["step"] == 5
        now = compressor.state_dict()["residues"]
        torch.testing.assert_close(now, before, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
        print("nothing was lost")
