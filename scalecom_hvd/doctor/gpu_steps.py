"""Compares steps of simulated ranks on a GPU with those on the CPU, to the bit.

`python -m scalecom_hvd.doctor.gpu_steps`, started by self_test.py. Kernels, formats, buckets and
streams are those of a real run; only the transport stays inside this process.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from scalecom_hvd.doctor.rank_check import PASSED, RANKS
from scalecom_hvd.exchange.methods import LocalTopK, RandomK
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


def run(device: str, dtype: torch.dtype, settings: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """All visible results of some steps, one of them skipped: averages and residues."""
    simulation = Simulation(
        RANKS,
        lambda _: {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            for name, shape in SHAPES.items()
        },
        **{"min_numel": 0, "nu": 1, **settings},
    )
    random = np.random.default_rng(0)
    for step in range(STEPS):
        everyones = [
            {name: torch.from_numpy(random.standard_normal(SHAPES[name])) for name in SHAPES}
            for _ in range(RANKS)
        ]
        if step == 2:
            everyones[1]["bias"][3] = float("nan")
        on_device = [{name: g.to(dtype).to(device) for name, g in own.items()} for own in everyones]
        for averages in simulation.step(on_device):
            yield from averages.values()
        for method in simulation.compressors:
            yield from (tensor.residue for tensor in method.residues.tensors.values())


def check(device: str) -> int:
    """How many kinds of steps were compared. Raises AssertionError if a number differs."""
    kinds = list(itertools.product((torch.float32, torch.float16, torch.bfloat16), KINDS))
    for dtype, name in kinds:
        found, expected = (run(where, dtype, KINDS[name]) for where in (device, "cpu"))
        if not all(map(same, found, expected)):
            raise AssertionError(
                f"{name}, {dtype}: a step on {device} gives different numbers than on the CPU"
            )
    return len(kinds)


def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are the same, except in NaN: which of two a sum keeps, processors decide."""
    ours, expected = ours.detach().cpu(), expected.detach()
    kind = torch.int32 if expected.element_size() == 4 else torch.int16
    alike = ours.view(kind) == expected.view(kind)
    return bool((alike | (ours.isnan() & expected.isnan())).all())


if __name__ == "__main__":
    sys.stdout.write(f"{PASSED}{check('cuda:0')} kinds of steps equal the CPU's, to the bit\n")
