"""What the exposed time of a step under DDP's hook goes to: one line for each profiler range.

    python scripts/bench/hosts.py --hosts 2 --mbit 1000 --launcher torchrun -- \\
        scripts/bench/bench_budget.py

It trains the Transformer of `make bench`, whose compute is a pause. A range is exposed while it
runs between the last call of the hook and the end of backward, on the thread that ends the step.
(Moves on the thread of kernels are "wait for kernel" there.) What then belongs to no range are
Python, packing, the agreement whether the step counts, and DDP itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import bench_cases
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook
from scalecom_hvd.exchange import bucket_step, waves

Span = tuple[str, int, float, float]  # what, on which thread, from when until when
spans: list[Span] = []


class Timed:
    """Takes the place of torch.profiler.record_function: notes when a range begins and ends."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        name, thread = self.name.removeprefix("scalecom."), threading.get_ident()
        spans.append((name, thread, self.begun, time.perf_counter()))


def step(model: Any, loss: Any, optimizer: Any, calls: list[Span]) -> dict[str, float]:
    """Take a step. Returns what its exposed time went to, in ms."""
    spans.clear()
    calls.clear()
    optimizer.zero_grad()
    loss(model).backward()
    end = time.perf_counter()
    optimizer.step()
    last = calls[-1][3]
    finishes = next(thread for name, thread, *_ in spans if name == "scatter")
    parts = defaultdict(float, {"in the hook, while backward waits": 0.0})
    for *_, begun, ended in calls:
        parts["in the hook, while backward waits"] += ended - begun
    for name, thread, begun, ended in spans:
        if thread == finishes:
            parts[f"after it: {name}"] += max(0.0, min(ended, end) - max(begun, last))
    ranges = sum(value for name, value in parts.items() if name.startswith("after"))
    parts["after it: in no range"] = end - last - ranges
    return {name: 1e3 * value for name, value in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=8)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    bucket_step.record_function = waves.record_function = Timed
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, loss = bench_cases.CASES["transformer"](0)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    state, calls = ScaleComState(model, rate=args.rate, bits=args.bits), []

    # DDP does not accept annotations that are strings.
    def hook(state, bucket):
        begun = time.perf_counter()
        future = scalecom_hook(state, bucket)
        calls.append(("hook", 0, begun, time.perf_counter()))
        return future

    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = [step(model, loss, optimizer, calls) for _ in range(args.steps + 3)][3:]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank():
        return
    print(f"{'ms a step, medians; the rank that leads counts too':52s}{'mean of ranks':>14s}")
    for name in sorted({name for steps in everyone for each in steps for name in each}):
        medians = [statistics.median(each.get(name, 0.0) for each in own) for own in everyone]
        print(f"{name:52s}{statistics.mean(medians):14.1f}")


if __name__ == "__main__":
    sys.exit(main())
