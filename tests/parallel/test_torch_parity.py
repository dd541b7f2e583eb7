"""The drop-in optimizer against the oracle: the same selections and values as n simulated workers,
over many steps.
"""

import numpy as np
import pytest
from parity import run_against_reference


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(
    ("rate", "beta"), [(100, 1.0), (100, 0.1), (7, 0.3), (2.5, 1.0), (400, 0.5)]
)
def test_lanes(rate, beta, lookahead):
    run_against_reference(rate=rate, beta=beta, lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_gradient_dtypes(dtype, lookahead):
    run_against_reference(
        dtype,
        rate=50,
        beta=0.3,
        lookahead=lookahead,
        tolerance=1e-3 if dtype is np.float16 else 1e-12,
    )


@pytest.mark.parametrize("lookahead", [False, True])
def test_staggered_leaders_of_many_buckets(lookahead):
    compressor = run_against_reference(
        rate=20, beta=0.5, leader="staggered", bucket_bytes=20_000, lookahead=lookahead
    )
    assert len(compressor.residues.buckets) >= 4


@pytest.mark.parametrize("lookahead", [False, True])
def test_exact_selection(lookahead):
    run_against_reference(rate=30, beta=0.3, selection="exact", lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [False, True])
def test_float16_on_the_wire(lookahead):
    # Horovod sums in float16, the oracle in float32.
    run_against_reference(
        rate=30, beta=0.3, wire_dtype="float16", lookahead=lookahead, tolerance=1e-2
    )


@pytest.mark.parametrize("lookahead", [False, True])
def test_warm_up_rates_and_dense(lookahead):
    run_against_reference(
        steps=20,
        rate=100,
        rates={"n64*": 10, "matrix": 1000},
        dense=["embedding", "auto:first"],
        warmup_steps=5,
        lookahead=lookahead,
    )


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_either_kernel(kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    run_against_reference(steps=15, rate=100, beta=0.3)


@pytest.mark.parametrize(
    "settings", [{}, {"lookahead": True, "leader": "staggered"}, {"bucket_bytes": 20_000}], ids=str
)
def test_kernels_that_run_beside_backward(settings, monkeypatch):
    """As in buckets of half a million elements and more."""
    monkeypatch.setattr("scalecom_hvd.exchange.bucket.WORTH_A_THREAD", 1)
    run_against_reference(steps=15, rate=20, beta=0.3, **settings)
