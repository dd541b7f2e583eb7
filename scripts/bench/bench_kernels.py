"""What the residues of a whole model cost on one core, compared with the memory's speed.

The memory's speed is that of `torch._foreach_add_(residues, grads, alpha=beta)`. The model is that
of `make bench`, 24.8 M parameters. All are timed in turn, round by round, in one run, and the
medians are compared, so that a noisy machine hurts all alike.
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
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import finished
from scalecom_hvd.exchange.residue import CompressedTensor, Residues

FLOOR = "torch._foreach_add_(residues, grads)"


class Model:
    """Residues and gradients of the model's compressed tensors, in one bucket."""

    def __init__(self, rate: float, beta: float, dtype: torch.dtype = torch.float32) -> None:
        residues = Residues(ScaleComConfig(rate=rate, bits=32, beta=beta))
        shapes = [
            shape
            for layer in transformer_shapes()
            for shape in layer
            if torch.Size(shape).numel() >= residues.config.min_numel
        ]
        parameters = {
            f"{i}": torch.nn.Parameter(torch.empty(shape, dtype=dtype))
            for i, shape in enumerate(shapes)
        }
        residues.tensors = {
            name: CompressedTensor(name, p, rate, residues.config) for name, p in parameters.items()
        }
        grads = {name: torch.randn(p.numel()).to(dtype) for name, p in parameters.items()}
        self.grads = list(grads.values())
        self.residues = [tensor.residue for tensor in residues.tensors.values()]
        self.outputs = {name: torch.zeros_like(grad) for name, grad in grads.items()}
        bucket = Bucket(0, list(parameters), parameters, residues, ranks=2)
        self.step = BucketStep(bucket, 1.0, grads)
        self.offsets = self.select().clone()
        self.take_and_accumulate()
        self.step.receive(self.offsets, self.step.taken)

    def select(self) -> torch.Tensor:
        return finished(self.step.select())

    def take_and_accumulate(self, choose: bool = False) -> None:
        finished(self.step.take_and_accumulate(self.offsets, choose))

    def scatter(self) -> None:
        self.step.scatter(self.outputs)


def candidates(rate: float, beta: float) -> dict[str, Callable[[], object]]:
    """What is compared, each a call that goes once over the model."""
    model = Model(rate, beta)
    half, bfloat = Model(rate, beta, torch.float16), Model(rate, beta, torch.bfloat16)
    os.environ["SCALECOM_KERNEL"] = "torch"
    plain = Model(rate, beta)
    del os.environ["SCALECOM_KERNEL"]

    def contiguous_chunks() -> None:
        for residue, grad in zip(model.residues, model.grads, strict=True):
            rows = residue.numel() // int(rate)
            residue.add_(grad, alpha=beta)[: rows * int(rate)].view(rows, int(rate)).abs().max(
                dim=1
            )

    momenta = [torch.zeros_like(residue) for residue in model.residues]

    def mix() -> None:
        """What exchange/momentum.py does before and after AdamW's step."""
        torch._foreach_lerp_(momenta, model.grads, 0.5)
        torch._foreach_lerp_(momenta, model.grads, -1.0)

    def top_k() -> None:
        for residue, grad in zip(model.residues, model.grads, strict=True):
            residue.add_(grad, alpha=beta).abs().topk(int(residue.numel() / rate))

    return {
        FLOOR: lambda: torch._foreach_add_(model.residues, model.grads, alpha=beta),
        "choose": model.select,
        "take + accumulate": model.take_and_accumulate,
        "look-ahead's take + accumulate + choose": lambda: model.take_and_accumulate(True),
        "scatter": model.scatter,
        "momentum: mix, and solve for it": mix,
        "scatter by torch: zero all": lambda: torch._foreach_zero_(list(model.outputs.values())),
        "take + accumulate, float16 gradients": half.take_and_accumulate,
        "take + accumulate, bfloat16 gradients": bfloat.take_and_accumulate,
        "choose, plain torch": plain.select,
        "take + accumulate, plain torch": plain.take_and_accumulate,
        "add_, abs, max of contiguous chunks": contiguous_chunks,
        "add_, abs, topk": top_k,
    }


# Whole steps of one rank, as sums of the above.
STEPS = {
    "cyclic step, leader": ("choose", "take + accumulate", "scatter"),
    "look-ahead step, leader": ("look-ahead's take + accumulate + choose", "scatter"),
    "step of other ranks": ("take + accumulate", "scatter"),
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
    medians[staggered] = (
        medians["look-ahead step, leader"] + 3 * medians["step of other ranks"]
    ) / 4
    print(
        f"24.8 M float32 residues, rate {arguments.rate:g}, beta {arguments.beta:g}, one core, "
        f"medians of {arguments.rounds} rounds"
    )
    print(f"{'':46s} {'ms':>8s} {'ratio to the floor':>19s}")
    for name, median in medians.items():
        print(f"{name:46s} {median:8.2f} {median / medians[FLOOR]:19.2f}")


if __name__ == "__main__":
    main()
