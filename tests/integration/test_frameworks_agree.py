"""PyTorch, TensorFlow and the reference agree when they are given the same gradients.

Selections and residues are equal to the bit, averages up to rounding.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from frameworks_cases import MODES, SHAPES, STEPS, digest, gradients

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.reference import ScaleComReference

WORKER = Path(__file__).with_name("worker_frameworks.py")


def hold_to_reference(directory, framework, mode, ranks) -> None:
    settings, groups = MODES[mode]
    config = ScaleComConfig(outliers=None, **settings)
    reference = ScaleComReference(ranks, SHAPES, config, groups)
    with np.load(directory / f"{framework}-{mode}.npz") as saved:
        averages = dict(saved)
    digests = [
        json.loads((directory / f"{framework}-{mode}-{rank}.json").read_text())
        for rank in range(ranks)
    ]
    for step in range(STEPS):
        expected = reference.step([gradients(SHAPES, rank, step) for rank in range(ranks)])
        for name, average in expected.items():
            told = f"{framework}, {mode}: {name} at step {step}"
            got = averages[name][step]
            np.testing.assert_allclose(got, average, rtol=1e-6, atol=1e-6, err_msg=told)
            if name in reference.selections:
                assert (
                    set(np.flatnonzero(got))
                    == set(np.flatnonzero(average))
                    <= set(reference.selections[name])
                ), told
        for rank in range(ranks):
            residues = {name: digest(residue) for name, residue in reference.residues[rank].items()}
            for name, value in digests[rank][step].items():
                assert value == residues.get(name, digest(np.zeros(SHAPES[name], np.float32))), (
                    f"{framework}, {mode}: residue of {name}, rank {rank}, step {step}"
                )


@pytest.mark.long
@pytest.mark.timeout(220, func_only=True)
@pytest.mark.parametrize(("launcher", "ranks"), [("mpirun", 4), ("horovodrun --gloo", 2)])
def test_frameworks_agree(launched, tmp_path, launcher, ranks):
    for framework in ("torch", "tensorflow"):
        launched(launcher, ranks, [WORKER, framework, tmp_path], limit=100)
    for mode in MODES:
        for framework in ("torch", "tensorflow"):
            hold_to_reference(tmp_path, framework, mode, ranks)
        with (
            np.load(tmp_path / f"torch-{mode}.npz") as torch,
            np.load(tmp_path / f"tensorflow-{mode}.npz") as tensorflow,
        ):
            for name in SHAPES:
                if ranks == 2:  # the sum of two does not depend on the order
                    np.testing.assert_array_equal(
                        torch[name], tensorflow[name], err_msg=f"{mode}: {name}"
                    )
                else:
                    np.testing.assert_allclose(
                        torch[name],
                        tensorflow[name],
                        rtol=1e-6,
                        atol=1e-6,
                        err_msg=f"{mode}: {name}",
                    )
