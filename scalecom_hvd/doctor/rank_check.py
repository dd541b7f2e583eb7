"""The checks of both programs that the self-test's ranks run, step by step.

Every rank computes the gradients of all ranks. So it knows what reference.py would average, and
compares that with what it received. Imports config and reference.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.reference import Array, ScaleComReference

RANKS = 2
# Each rank leads twice.
STEPS = 4
# Everything is compressed, from the first step on.
CONFIG = ScaleComConfig(rate=10, dense=[], warmup_steps=0, min_numel=0).resolved()
LEARNING_RATE = 0.1
PASSED = "scalecom_hvd self-test passed: "
# Seconds after which a rank ends itself and says where it was, so that launchers leave none behind.
LIFETIME = 600.0

Arrays = Mapping[str, Array]


class RankCheck:
    """One rank's view of a run.

    Args:
        shapes: {parameter: shape}, in the model's order.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        faulthandler.dump_traceback_later(LIFETIME, exit=True)
        self._reference = ScaleComReference(RANKS, shapes, CONFIG)
        self._came = {name: np.zeros(shape) for name, shape in shapes.items()}
        self._went = {name: np.zeros(shape) for name, shape in shapes.items()}

    def step(self, gradients: Sequence[Arrays], received: Arrays) -> None:
        """Compare a step with the reference.

        Args:
            gradients: every rank's gradients.
            received: what the exchange gave on this rank.

        Raises:
            AssertionError: the step differs.
        """
        expected = self._reference.step(gradients)
        for name, average in expected.items():
            _same(f"the average of {name}", received[name], average)
            self._came[name] += sum(grads[name] for grads in gradients) / RANKS
            self._went[name] += received[name]
            if np.count_nonzero(average) == average.size:
                raise AssertionError(f"{name} was sent uncompressed")

    def end(self, residues: Arrays, parameters: Sequence[Array]) -> None:
        """Check at the end what must be conserved.

        Args:
            residues: averaged over all ranks.
            parameters: each rank's parameters, in one array.

        Raises:
            AssertionError: a gradient value was lost, or the ranks' parameters differ.
        """
        for name, came in self._came.items():
            waits = residues[name] / CONFIG.beta
            _same(f"the sent part of {name} plus its residue", self._went[name] + waits, came)
        if not all(np.array_equal(parameters[0], others) for others in parameters):
            raise AssertionError("parameters differ between ranks")

    def passed(self, kernel: str) -> None:
        """Report success, in one write because ranks share their output."""
        sys.stdout.write(f"{PASSED}{STEPS} steps equal the reference's, {kernel}\n")
        sys.stdout.flush()


def check_size(size: int) -> None:
    """Raise RuntimeError unless all ranks have found each other. size: how many have."""
    if size != RANKS:
        raise RuntimeError(
            f"{RANKS} ranks were started, but {size} found each other. The launcher belongs to "
            "another MPI than the one that Horovod was built with, or was given another number of "
            "ranks"
        )


def inputs(step: int, rank: int, rows: int, columns: int) -> Array:
    """A rank's data for a step, (rows, columns) float32."""
    return np.random.default_rng([step, rank]).standard_normal((rows, columns), np.float32)


def _same(what: str, found: Array, expected: Array) -> None:
    if not np.allclose(found, expected, rtol=1e-4, atol=1e-6):
        off = np.abs(found - expected).max()
        raise AssertionError(f"{what} differs from the expected values by up to {off:g}")
