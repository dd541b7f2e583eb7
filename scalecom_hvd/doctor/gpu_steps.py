"""Compares steps of simulated ranks on a GPU with those on the CPU, to the bit, and times them.

`python -m scalecom_hvd.doctor.gpu_steps [DEVICE]`, started by self_test.py. Kernels, formats,
buckets and streams are those of a real run; only the transport stays inside this process. Imports
rank_check, and methods, bucket and simulator of exchange/.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scalecom_hvd.doctor.rank_check import PASSED, RANKS
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import finished
from scalecom_hvd.exchange.methods import LocalTopK, RandomK, ScaleCom
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.exchange.simulator import Simulation

STEPS = 6
SHAPES = {"weight": (300, 170), "bias": (300,), "odd": (7, 9, 11), "table": (1001, 64)}
KINDS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "32 bits": {"bits": 32, "beta": 0.3},
    "32 bits, look-ahead": {"bits": 32, "lookahead": True},
    "few bits, look-ahead": {"lookahead": True},
    "local top-k": {"compression": LocalTopK, "rate": 50},
    "random-k": {"compression": RandomK, "rate": 50},
}
NUMEL = 25_000_000
ROUNDS = 20


def run(
    device: torch.device, dtype: torch.dtype, settings: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """All visible results of some steps, one of them skipped: averages and residues."""
    simulation = Simulation(
        RANKS,
        lambda _: {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            for name, shape in SHAPES.items()
        },
        **{"min_numel": 0, "nu": 1, **settings},
    )
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        everyones = [
            {name: _gradient(shape, dtype, random) for name, shape in SHAPES.items()}
            for _ in range(RANKS)
        ]
        if step == 2:
            everyones[1]["bias"][3] = float("nan")
        on_device = [{name: grad.to(device) for name, grad in own.items()} for own in everyones]
        for averages in simulation.step(on_device):
            yield from averages.values()
        for method in simulation.compressors:
            yield from (tensor.residue for tensor in method.residues.tensors.values())


def _gradient(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random, device="cpu").to(dtype)


def check(device: torch.device) -> int:
    """Compare every kind of step with the CPU's. Returns how many kinds there were.

    Raises:
        AssertionError: a number differs.
    """
    count = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for name, settings in KINDS.items():
            pairs = zip(
                run(device, dtype, settings), run(torch.device("cpu"), dtype, settings), strict=True
            )
            for ours, expected in pairs:
                if not same(ours.detach().cpu(), expected.detach()):
                    raise AssertionError(
                        f"{name}, {dtype}: a step on {device} gives different numbers than on the "
                        "CPU"
                    )
            count += 1
    return count


def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are the same, except in NaN: which of two a sum keeps, processors decide."""
    kind = torch.int32 if expected.element_size() == 4 else torch.int16
    alike = ours.view(kind) == expected.view(kind)
    return bool((alike | (ours.isnan() & expected.isnan())).all())


def speed(device: torch.device, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Median milliseconds of a leader's moves in a step, and of copying as many gradients."""
    method = ScaleCom(min_numel=0, nu=1, **settings)
    parameter = torch.nn.Parameter(torch.zeros(NUMEL, device=device))
    residues = Residues(method.config)
    residues.attach({"one": parameter})
    bucket = Bucket(0, ["one"], {"one": parameter}, residues, ranks=RANKS)
    grad, there = torch.randn(NUMEL, device=device), torch.empty(NUMEL, device=device)

    def step() -> None:
        own = BucketStep(bucket, 1.0, {"one": grad})
        offsets = finished(own.select())
        finished(own.take_and_accumulate(offsets))
        own.fill()
        own.receive(offsets, own.averages_taken())
        own.commit()
        own.release()

    times: dict[str, list[float]] = {"step": [], "copy": []}
    for _ in range(ROUNDS):
        times["step"].append(_milliseconds(device, step))
        times["copy"].append(_milliseconds(device, lambda: there.copy_(grad)))
    return statistics.median(times["step"]), statistics.median(times["copy"])


def _milliseconds(device: torch.device, function: Any) -> float:
    start, stop = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def main(device: str = "cuda") -> None:
    """Check, and time."""
    own = torch.device(device, 0)
    count = check(own)
    step, copy = speed(own, {})
    memory = torch.accelerator.max_memory_allocated(own) / 2**20
    sys.stdout.write(
        f"{PASSED}{count} kinds of steps equal the CPU's, to the bit; {NUMEL / 1e6:g} M elements: "
        f"moves {step:.2f} ms, one copy {copy:.2f} ms, ratio {step / copy:.1f}; at most "
        f"{memory:.0f} MiB\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
