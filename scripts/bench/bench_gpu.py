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

from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.exchange.kernels.base import Kernel, TensorSlot, Wire
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel
from scalecom_hvd.integers import levels_of
from scalecom_hvd.lanes import Lanes

BETA, EXTRA = 0.5, 1.0
# Of the defaults.
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


class Workload:
    """Tensors of several sizes as a bucket holds them, with `numel` elements in all."""

    def __init__(self, numel: int, rate: float, dtype: torch.dtype, device: torch.device) -> None:
        shares = [2 ** (i % 8) for i in range(N_TENSORS)]
        self.lanes = [
            Lanes(numel * share // sum(shares) + i, rate) for i, share in enumerate(shares)
        ]
        self.grads = [torch.randn(lanes.numel, device=device).to(dtype) for lanes in self.lanes]
        self.residues = [torch.zeros(lanes.numel, device=device) for lanes in self.lanes]
        self.outputs = [torch.empty_like(grad) for grad in self.grads]
        self.numel = sum(lanes.numel for lanes in self.lanes)

    def kernel(self, kind: type[Kernel], bits: int = 32) -> Kernel:
        """A kernel in its step, and buffers for what it moves."""
        levels = levels_of(bits)
        layout = Layout(dict(zip(map(str, range(N_TENSORS)), self.lanes, strict=True)), levels > 0)
        slots = [
            TensorSlot(
                residue,
                lanes,
                layout.offsets[str(i)].start,
                layout.values[str(i)].start,
                levels,
                layout.scales[str(i)].start,
            )
            for i, (residue, lanes) in enumerate(zip(self.residues, self.lanes, strict=True))
        ]
        device = self.residues[0].device
        self.offsets, self.chosen = torch.zeros(
            2, layout.offsets_bytes, dtype=torch.uint8, device=device
        )
        dtype = torch.int8 if levels else torch.float32
        self.values = torch.zeros(layout.n_values, dtype=dtype, device=device)
        kernel = kind(slots, [grad.dtype for grad in self.grads])
        self.begin(kernel)
        kernel.choose(EXTRA, self.offsets)
        return kernel

    def begin(self, kernel: Kernel) -> None:
        kernel.begin(self.grads, [False] * len(self.grads), 1.0)

    def moves(self, kernel: Kernel, label: str) -> Iterator[Candidate]:
        """The moves of a step."""
        # reading the gradient; a pass also reads and writes the residue
        once = self.numel * self.grads[0].element_size()
        wire = Wire(self.offsets, self.values)
        yield Candidate(f"{label}: begin", lambda: self.begin(kernel), 0)
        yield Candidate(
            f"{label}: choose",
            lambda: kernel.choose(EXTRA, self.offsets),
            4 * self.numel + once,
        )
        yield Candidate(
            f"{label}: take + accumulate",
            lambda: kernel.take_and_accumulate(BETA, EXTRA, wire),
            8 * self.numel + once,
        )
        yield Candidate(
            f"{label}: look-ahead's take + accumulate + choose",
            lambda: kernel.take_and_accumulate(BETA, EXTRA, wire, self.chosen),
            8 * self.numel + once,
        )
        averages = self.values.float()
        yield Candidate(
            f"{label}: scatter",
            lambda: kernel.scatter(self.outputs, self.offsets, averages),
            once,
        )

    def copies(self) -> Iterator[Candidate]:
        """The copies. Moves are compared with the first one."""
        whole, there = torch.randn(2, self.numel, device=self.residues[0].device)
        yield Candidate("copy_ of one tensor", lambda: there.copy_(whole), 8 * self.numel)
        yield Candidate(
            "copy_ of the same tensors",
            lambda: torch._foreach_copy_(self.outputs, self.grads),
            8 * self.numel,
        )


def candidates(numel: int, rate: float, device: torch.device) -> Iterator[Candidate]:
    from scalecom_hvd.exchange.kernels.triton_kernel import TritonKernel

    work = Workload(numel, rate, torch.float32, device)
    yield from work.copies()
    yield from work.moves(work.kernel(TritonKernel), "Triton, float32")
    for dtype in (torch.float16, torch.bfloat16):
        halves = Workload(numel, rate, dtype, device)
        yield from halves.moves(
            halves.kernel(TritonKernel), f"Triton, {str(dtype).removeprefix('torch.')}"
        )
    few = Workload(numel, FEW_BITS_RATE, torch.float32, device)
    label = f"Triton, {BITS} bits, rate {FEW_BITS_RATE}"
    yield from few.moves(few.kernel(TritonKernel, BITS), label)
    yield from work.moves(work.kernel(TorchKernel), "plain torch, float32")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 100_000_000])
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "bench_gpu.py times a CUDA GPU, and torch sees none here: make bench-kernels times "
            "the CPU's kernels",
            file=sys.stderr,
        )
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    measured = {}
    for numel in arguments.numel:
        with torch.no_grad():
            measured[numel] = measure(
                list(candidates(numel, arguments.rate, device)), arguments.rounds, device
            )
        show(
            measured[numel],
            f"{name}: {numel / 1e6:g} M elements in {N_TENSORS} tensors at rate {arguments.rate:g}",
        )
    print(
        json.dumps(
            {"device": name, "torch": torch.__version__, "rate": arguments.rate, "numel": measured}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
