"""The checks of both programs that the self-test's ranks run, step by step.

Every rank computes the gradients of all ranks. So it knows what reference.py would average, and
compares that with what it received.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Mapping

import numpy as np

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.reference import Array, ScaleComReference

RANKS = 2
# Each rank leads twice.
STEPS = 4
# Everything is compressed, from the first step on.
CONFIG = ScaleComConfig(rate=10, dense=[], warmup_steps=0, min_numel=0).resolved()
LEARNING_RATE = 0.1
KERNELS = {"NativeKernel": "kernel in C", "TritonKernel": "kernel in Triton"}
KERNELS |= {"TorchKernel": "plain PyTorch's kernel", "GraphKernel": "plain TensorFlow's kernel"}
PASSED = "scalecom_hvd self-test passed: "
# Seconds after which a rank ends itself and says where it was, so that launchers leave none behind.
LIFETIME = 600.0

Arrays = Mapping[str, Array]


def check(
    shapes: Mapping[str, tuple[int, ...]],
    gradients: Callable[[int, int], Arrays],
    take_step: Callable[[int], Arrays],
) -> None:
    """Take the steps on this rank, and raise AssertionError if one differs from the reference's.

    This checks parameters and residues too, because later steps depend on them.

    Args:
        shapes: {parameter: shape}, in the model's order.
        gradients: gives the gradients of a rank in a step, from (step, rank).
        take_step: takes a step, and gives the averages that came.
    """
    reference = ScaleComReference(RANKS, shapes, CONFIG)
    for step in range(STEPS):
        averages = reference.step([gradients(step, rank) for rank in range(RANKS)])
        received = take_step(step)
        for name, average in averages.items():
            # `assert` would not run under PYTHONOPTIMIZE.
            if np.count_nonzero(average) == average.size:
                raise AssertionError(f"{name} was sent uncompressed")
            if not np.allclose(received[name], average, rtol=1e-4, atol=1e-6):
                off = np.abs(received[name] - average).max()
                raise AssertionError(
                    f"the average of {name} differs from the expected values by up to {off:g}"
                )


def passed(kernel: type, more: str = "") -> None:
    """Report success, in one write because ranks share their output."""
    name = KERNELS.get(kernel.__name__, kernel.__name__)
    sys.stdout.write(f"{PASSED}{STEPS} steps equal the reference's, {name}{more}\n")
    sys.stdout.flush()


def check_size(size: int) -> None:
    """Raise RuntimeError unless all ranks have found each other, and limit this rank's lifetime."""
    faulthandler.dump_traceback_later(LIFETIME, exit=True)
    if size != RANKS:
        raise RuntimeError(
            f"{RANKS} ranks were started, but {size} found each other. The launcher belongs to "
            "another MPI than the one that Horovod was built with"
        )


def inputs(step: int, rank: int, rows: int, columns: int) -> Array:
    """A rank's data for a step, (rows, columns) float32."""
    return np.random.default_rng([step, rank]).standard_normal((rows, columns), np.float32)
