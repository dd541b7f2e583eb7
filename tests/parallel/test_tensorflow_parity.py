"""TensorFlow's exchange against the oracle: the same selections and values as n simulated workers,
over many steps.
"""

import numpy as np
import pytest
from tensorflow_parity import run_against_reference


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
    assert len(compressor.exchanges()[0].buckets) >= 4


@pytest.mark.parametrize("lookahead", [False, True])
def test_exact_selection(lookahead):
    run_against_reference(rate=30, beta=0.3, selection="exact", lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [False, True])
def test_float16_on_the_wire(lookahead):
    # Horovod sums in float16, the oracle in float32.
    run_against_reference(
        rate=30, beta=0.3, wire_dtype="float16", lookahead=lookahead, tolerance=2e-2
    )


@pytest.mark.parametrize("lookahead", [False, True])
def test_warm_up_rates_and_dense(lookahead):
    run_against_reference(
        rate=100,
        rates={"n64*": 10, "matrix": 1000},
        dense=["embedding", "auto:first"],
        warmup_steps=5,
        lookahead=lookahead,
    )


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("kernel", ["tensorflow", "native"])
def test_either_kernel(kernel, lookahead, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    run_against_reference(rate=300, beta=0.3, lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [False, True])
def test_eagerly(lookahead):
    run_against_reference(rate=100, beta=0.3, lookahead=lookahead, traced=False)
