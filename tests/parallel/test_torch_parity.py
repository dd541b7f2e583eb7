"""The drop-in optimizer against the oracle: the same selections and values as n simulated workers,
over many steps.
"""

import numpy as np
import pytest
from parity import run_against_reference
from parity_cases import CASES, STAGGERED

INTEGERS = {
    "integers of 3 bits": {"bits": 3, "rate": 16, "beta": 0.3},
    "integers, look-ahead, many buckets": STAGGERED | {"bits": 2, "rate": 7.5, "lookahead": True},
    "integers of float64 gradients": {
        "bits": 4,
        "rate": 30,
        "dtype": np.float64,
        "tolerance": 1e-12,
    },
    "integers of float16 gradients, warm-up, look-ahead": {
        "bits": 3,
        "dtype": np.float16,
        "rate": 16,
        "warmup_steps": 3,
        "lookahead": True,
        "tolerance": 1e-3,
    },
}


@pytest.mark.parametrize("settings", (CASES | INTEGERS).values(), ids=CASES | INTEGERS)
def test_parity(settings):
    compressor = run_against_reference(**settings)
    assert len(compressor.residues.buckets) >= 4 or "leader" not in settings


def test_the_plain_kernel(monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    run_against_reference(rate=100, beta=0.3)


@pytest.mark.parametrize("settings", [{"rate": 20}, STAGGERED | {"lookahead": True}], ids=str)
def test_kernels_that_run_beside_backward(settings, monkeypatch):
    """As in buckets of half a million elements and more."""
    monkeypatch.setattr("scalecom_hvd.exchange.bucket.WORTH_A_THREAD", 1)
    run_against_reference(**settings)
