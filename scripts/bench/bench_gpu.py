"""The Triton kernel's speed on a CUDA GPU, compared with the device's own copying.

One launch handles many tensors. A ratio is a move's time over the time in which copy_ moves as many
bytes as the move must: 1 is as fast as memory. Everything is timed in turn, round by round, in one
run, and medians are compared. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from bench_kernels import Model, in_plain_torch

BETA = 0.5
BITS, FEW_BITS_RATE = 3, 16
N_TENSORS = 75
# A tensor of this size is read before every move. It is many times larger than a cache, and reading
# it keeps the device busy while the host queues the move.
FLUSHING_ELEMENTS = 2**28


class Candidate(NamedTuple):
    """Something to time.

    bytes: what it must move at least; 0 if moving bytes is not what takes its time.
    """

    name: str
    call: Callable[[], object]
    bytes: int


def moves(model: Model, label: str) -> Iterator[Candidate]:
    """The moves of a step."""
    numel = sum(grad.numel() for grad in model.grads)
    # reading the gradient; a pass also reads and writes the residue
    once = numel * model.grads[0].element_size()
    whole = 8 * numel + once
    yield Candidate(f"{label}: begin", model.begin, 0)
    yield Candidate(f"{label}: choose", model.select, 4 * numel + once)
    yield Candidate(f"{label}: take + accumulate", model.take_and_accumulate, whole)
    ahead = f"{label}: look-ahead's take + accumulate + choose"
    yield Candidate(ahead, lambda: model.take_and_accumulate(True), whole)
    yield Candidate(f"{label}: scatter", model.scatter, once)


def candidates(numel: int, rate: float, device: torch.device) -> Iterator[Candidate]:
    """Moves of tensors of several sizes. They are compared with the first candidate, a copy."""
    shares = [2 ** (i % 8) for i in range(N_TENSORS)]
    shapes = [(numel * share // sum(shares) + i,) for i, share in enumerate(shares)]
    model = Model(shapes, rate, BETA, device=device)
    whole, there = torch.randn(2, sum(n for (n,) in shapes), device=device)
    yield Candidate("copy_ of one tensor", lambda: there.copy_(whole), 8 * whole.numel())
    outputs = list(model.outputs.values())
    same = "copy_ of the same tensors"
    yield Candidate(same, lambda: torch._foreach_copy_(outputs, model.grads), 8 * whole.numel())
    yield from moves(model, "Triton, float32")
    for dtype in (torch.float16, torch.bfloat16):
        label = f"Triton, {str(dtype).removeprefix('torch.')}"
        yield from moves(Model(shapes, rate, BETA, dtype, device=device), label)
    few = Model(shapes, FEW_BITS_RATE, BETA, bits=BITS, device=device)
    yield from moves(few, f"Triton, {BITS} bits, rate {FEW_BITS_RATE}")
    plain = in_plain_torch(lambda: Model(shapes, rate, BETA, device=device))
    yield from moves(plain, "plain torch, float32")


def measure(
    tried: list[Candidate], rounds: int, device: torch.device
) -> dict[str, dict[str, float | None]]:
    """By name: milliseconds on the device and on the host, gigabytes per second, and the ratio.

    The ratio is to the first candidate.
    """
    flushing = torch.randn(FLUSHING_ELEMENTS, device=device)
    taken: dict[str, list[tuple[float, float]]] = {candidate.name: [] for candidate in tried}
    for candidate in tried * 3:  # warm up: compile, fill the allocators
        candidate.call()
    for _ in range(rounds):
        for candidate in tried:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flushing.sum()
            start.record()
            begun = time.perf_counter()
            candidate.call()
            host = time.perf_counter() - begun
            stop.record()
            stop.synchronize()
            taken[candidate.name].append((start.elapsed_time(stop), host * 1e3))
    results, copy_rate = {}, None
    for candidate in tried:
        milliseconds, host = (
            statistics.median(times) for times in zip(*taken[candidate.name], strict=True)
        )
        rate = candidate.bytes / milliseconds
        copy_rate = copy_rate or rate
        ratio = copy_rate / rate if candidate.bytes else None
        results[candidate.name] = {
            "ms": milliseconds,
            "host_ms": host,
            "GB/s": rate / 1e6 if candidate.bytes else None,
            "ratio": ratio,
        }
    return results


def show(results: dict[str, dict[str, float | None]], title: str) -> None:
    print(f"\n{title}\n{'':52s}{'ms':>9s}{'GB/s':>8s}{'ratio':>7s}{'host ms':>9s}")
    for name, row in results.items():
        speed = f"{row['GB/s']:8.0f}{row['ratio']:7.2f}" if row["ratio"] else f"{'':15s}"
        print(f"{name:52s}{row['ms']:9.3f}{speed}{row['host_ms']:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 100_000_000])
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        none = "bench_gpu.py times a CUDA GPU, and torch sees none here"
        sys.exit(f"{none}: make bench-kernels times the CPU's kernels")
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    measured = {}
    for numel in arguments.numel:
        with torch.no_grad():
            tried = list(candidates(numel, arguments.rate, device))
            measured[numel] = measure(tried, arguments.rounds, device)
        of = f"{numel / 1e6:g} M elements in {N_TENSORS} tensors at rate {arguments.rate:g}"
        show(measured[numel], f"{name}: {of}")
    told = {"device": name, "torch": torch.__version__, "rate": arguments.rate}
    print(json.dumps(told | {"numel": measured}))


if __name__ == "__main__":
    main()
