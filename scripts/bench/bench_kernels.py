"""What the residues of a whole model cost on one core, compared with the memory's speed.

The memory's speed is that of `torch._foreach_add_(residues, grads, alpha=beta)`. The model is that
of `make bench`, 24.8 M parameters. All are timed in turn, round by round, in one run, and the
medians are compared, so that a noisy machine hurts all alike.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from bench_cases import transformer_shapes

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import finished
from scalecom_hvd.exchange.residue import CompressedTensor, Residues

MIN_NUMEL = ScaleComConfig().min_numel
FLOOR = "torch._foreach_add_(residues, grads)"


class Model:
    """Residues and gradients of tensors that are compressed, in one bucket."""

    def __init__(
        self,
        shapes: Iterable[tuple[int, ...]],
        rate: float,
        beta: float,
        dtype: torch.dtype = torch.float32,
        bits: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        residues = Residues(ScaleComConfig(rate=rate, bits=bits, beta=beta))
        parameters = {
            f"{i}": torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            for i, shape in enumerate(shapes)
        }
        residues.tensors = {
            name: CompressedTensor(name, p, rate, residues.config) for name, p in parameters.items()
        }
        self._named = {
            n: torch.randn(p.numel(), device=device).to(dtype) for n, p in parameters.items()
        }
        self.grads = list(self._named.values())
        self.residues = [tensor.residue for tensor in residues.tensors.values()]
        self.outputs = {name: torch.zeros_like(grad) for name, grad in self._named.items()}
        self._bucket = Bucket(0, list(parameters), parameters, residues.tensors, ranks=2)
        self.begin()
        self.offsets = self.select().clone()
        self.take_and_accumulate()
        self.averages = self.step.taken.float()

    def begin(self) -> None:
        self.step = BucketStep(self._bucket, 1.0, self._named)

    def select(self) -> torch.Tensor:
        return finished(self.step.select())

    def take_and_accumulate(self, choose: bool = False) -> None:
        finished(self.step.take_and_accumulate(self.offsets, choose))

    def scatter(self) -> None:
        self.step.receive(self.offsets, self.averages)
        self.step.scatter(self.outputs)


def in_plain_torch(make: Callable[[], Model]) -> Model:
    """A model that does not use the C kernel, or Triton's."""
    os.environ["SCALECOM_KERNEL"] = "torch"
    try:
        return make()
    finally:
        del os.environ["SCALECOM_KERNEL"]


def candidates(rate: float, beta: float, bits: int) -> dict[str, Callable[[], object]]:
    """What is compared, each a call that goes once over the model."""
    shapes = [s for layer in transformer_shapes() for s in layer if math.prod(s) >= MIN_NUMEL]
    model = Model(shapes, rate, beta, bits=bits)
    half, bfloat = (Model(shapes, rate, beta, d, bits) for d in (torch.float16, torch.bfloat16))
    plain = in_plain_torch(lambda: Model(shapes, rate, beta, bits=bits))

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
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried = candidates(arguments.rate, arguments.beta, arguments.bits)
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
        f"24.8 M float32 residues, rate {arguments.rate:g}, {arguments.bits} bits, beta "
        f"{arguments.beta:g}, one core, medians of {arguments.rounds} rounds"
    )
    print(f"{'':46s} {'ms':>8s} {'ratio to the floor':>19s}")
    for name, median in medians.items():
        print(f"{name:46s} {median:8.2f} {median / medians[FLOOR]:19.2f}")


if __name__ == "__main__":
    main()
