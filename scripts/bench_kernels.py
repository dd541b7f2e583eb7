"""What the residues of a whole model cost on one core, against the memory's speed: `torch._foreach_add_(residues, grads, alpha=beta)`.

The model is that of `make bench`, 24.8 M parameters. All are timed in turn, round by round, in one run, and the medians compared, so that a
noisy machine hurts all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from bench_cases import transformer_shapes

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange import bucket
from scalecom_hvd.exchange.residue import CompressedTensor

FLOOR = "torch._foreach_add_(residues, grads)"


class Model:
    """Residues and gradients of the model's compressed tensors, with the buffers of one bucket that holds them all."""

    def __init__(self, rate: float, beta: float, dtype: torch.dtype = torch.float32, wire_dtype: str | None = None) -> None:
        config = ScaleComConfig(rate=rate, beta=beta, wire_dtype=wire_dtype)
        shapes = [shape for layer in transformer_shapes() for shape in layer if torch.Size(shape).numel() >= config.min_numel]
        self.tensors = [CompressedTensor(f"{i}", torch.empty(shape, dtype=dtype), rate, config) for i, shape in enumerate(shapes)]
        self.grads = [torch.randn(tensor.residue.numel()).to(dtype) for tensor in self.tensors]
        self.residues = [tensor.residue for tensor in self.tensors]
        self.moves = moves.Moves(self.tensors)
        self.offsets, self.chosen = (self.moves.new_offsets(torch.device("cpu")) for _ in range(2))
        self.values = torch.zeros(self.moves.n_values, dtype=self.tensors[0].wire_dtype)
        self.outputs = [torch.zeros_like(grad) for grad in self.grads]
        self.moves.begin(self.grads, 1.0, [False] * len(self.grads))
        self.moves.filter(self.offsets)

    def gather(self) -> None:
        self.moves.gather(self.offsets, self.values, 2)

    def gather_and_filter(self, chooses: bool) -> None:
        self.moves.gather_and_filter(self.offsets, self.values, 2, self.chosen if chooses else None)

    def scatter(self) -> None:
        self.moves.scatter(self.outputs, self.offsets, self.values)


def candidates(rate: float, beta: float) -> dict[str, Callable[[], object]]:
    """What is compared, each a call that goes once over the model."""
    model = Model(rate, beta)
    half, bfloat, wire = (
        Model(rate, beta, torch.float16),
        Model(rate, beta, torch.bfloat16),
        Model(rate, beta, wire_dtype="float16"),
    )
    os.environ["SCALECOM_KERNEL"] = "torch"
    plain = Model(rate, beta)
    del os.environ["SCALECOM_KERNEL"]

    def contiguous_chunks() -> None:
        for residue, grad in zip(model.residues, model.grads, strict=True):
            rows = residue.numel() // int(rate)
            residue.add_(grad, alpha=beta)[: rows * int(rate)].view(rows, int(rate)).abs().max(dim=1)

    def top_k() -> None:
        for residue, grad in zip(model.residues, model.grads, strict=True):
            residue.add_(grad, alpha=beta).abs().topk(int(residue.numel() / rate))

    return {
        FLOOR: lambda: torch._foreach_add_(model.residues, model.grads, alpha=beta),
        "filter": lambda: model.moves.filter(),
        "filter + select": lambda: model.moves.filter(model.offsets),
        "gather": model.gather,
        "look-ahead's gather + filter": lambda: model.gather_and_filter(False),
        "look-ahead's gather + filter + select": lambda: model.gather_and_filter(True),
        "scatter": model.scatter,
        "scatter by torch: zero all": lambda: torch._foreach_zero_(model.outputs),
        "filter + select, float16 gradients": lambda: half.moves.filter(half.offsets),
        "filter + select, bfloat16 gradients": lambda: bfloat.moves.filter(bfloat.offsets),
        "look-ahead's three, float16 values": lambda: wire.gather_and_filter(True),
        "filter + select, plain torch": lambda: plain.moves.filter(plain.offsets),
        "add_, abs, max of contiguous chunks": contiguous_chunks,
        "add_, abs, topk": top_k,
    }


# Whole steps of one rank, made up of the above.
STEPS = {
    "cyclic step, leader": ("filter + select", "gather", "scatter"),
    "cyclic step, other ranks": ("filter", "gather", "scatter"),
    "look-ahead step, leader": ("look-ahead's gather + filter + select", "scatter"),
    "look-ahead step, other ranks": ("look-ahead's gather + filter", "scatter"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried = candidates(arguments.rate, arguments.beta)
    times: dict[str, list[float]] = {name: [] for name in tried}
    for counted in [False] + [True] * arguments.rounds:
        for name, call in tried.items():
            begun = time.perf_counter()
            call()
            if counted:
                times[name].append((time.perf_counter() - begun) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians |= {name: sum(medians[part] for part in parts) for name, parts in STEPS.items()}
    staggered = "look-ahead step, staggered leaders, 4 workers"
    medians[staggered] = (medians["look-ahead step, leader"] + 3 * medians["look-ahead step, other ranks"]) / 4
    print(f"24.8 M float32 residues, rate {arguments.rate:g}, beta {arguments.beta:g}, one core, medians of {arguments.rounds} rounds")
    print(f"{'':46s} {'ms':>8s} {'ratio to the floor':>19s}")
    for name, median in medians.items():
        print(f"{name:46s} {median:8.2f} {median / medians[FLOOR]:19.2f}")


if __name__ == "__main__":
    main()
