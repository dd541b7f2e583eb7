"""The fused kernel's speed against the memory's: `m.add_(g, alpha=beta)` is the floor of any pass over a residue.

All are timed in turn, round by round, on one core in one run, and the medians compared, so that a noisy machine hurts all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from scalecom_hvd import native
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.torch.kernels import CHOOSE_ACCUMULATOR, CHOOSE_NOTHING, CHOOSE_RESIDUE, NativeKernel, TorchKernel


def candidates(numel: int, rate: int, beta: float) -> dict[str, Callable[[], object]]:
    """What is compared, each a call that does one pass over `numel` elements."""
    grad, residue, lanes = torch.randn(numel), torch.zeros(numel), Lanes(numel, rate)
    half, bfloat = grad.half(), grad.bfloat16()
    offsets, values = torch.zeros(lanes.k, dtype=torch.uint8), torch.empty(lanes.k)
    plain = TorchKernel()

    def contiguous_chunks() -> None:
        residue.add_(grad, alpha=beta)
        rows = numel // rate
        residue[: rows * rate].view(rows, rate).abs().max(dim=1)

    def top_k() -> None:
        residue.add_(grad, alpha=beta)
        residue.abs().topk(lanes.k)

    tried: dict[str, Callable[[], object]] = {"m.add_(g, alpha=beta): the floor": lambda: residue.add_(grad, alpha=beta)}
    if native.library() is not None:
        kernel = NativeKernel(native.library())
        tried |= {
            "native: filter": lambda: kernel.filter(grad, residue, lanes, beta, 1.0, CHOOSE_NOTHING, None),
            "native: filter + select (cyclic)": lambda: kernel.filter(grad, residue, lanes, beta, 1.0, CHOOSE_ACCUMULATOR, offsets),
            "native: filter + select (look-ahead)": lambda: kernel.filter(grad, residue, lanes, beta, 1.0, CHOOSE_RESIDUE, offsets),
            "native: the same, float16 gradients": lambda: kernel.filter(half, residue, lanes, beta, 1.0, CHOOSE_ACCUMULATOR, offsets),
            "native: the same, bfloat16 gradients": lambda: kernel.filter(bfloat, residue, lanes, beta, 1.0, CHOOSE_ACCUMULATOR, offsets),
            "native: gather (k values)": lambda: kernel.gather(grad, residue, lanes, beta, 1.0, 1 - beta, offsets, 1.0, values),
        }
    return tried | {
        "plain torch: filter + select": lambda: plain.filter(grad, residue, lanes, beta, 1.0, CHOOSE_ACCUMULATOR, offsets),
        "torch, contiguous chunks: add_, abs, max": contiguous_chunks,
        "torch.topk: add_, abs, topk": top_k,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried = candidates(arguments.numel, arguments.rate, arguments.beta)
    times: dict[str, list[float]] = {name: [] for name in tried}
    for counted in [False] + [True] * arguments.rounds:
        for name, call in tried.items():
            begun = time.perf_counter()
            call()
            if counted:
                times[name].append((time.perf_counter() - begun) * 1e3)
    floor = statistics.median(next(iter(times.values())))
    print(f"{arguments.numel / 1e6:.1f} M float32 residues, rate {arguments.rate}, one core, {arguments.rounds} rounds")
    print(f"{'':42s} {'median ms':>10s} {'min':>8s} {'ratio to the floor':>19s}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:42s} {median:10.2f} {min(values):8.2f} {median / floor:19.2f}")


if __name__ == "__main__":
    main()
