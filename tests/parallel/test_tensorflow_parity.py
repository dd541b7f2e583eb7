"""TensorFlow's exchange, compared with the oracle.

Its selections and values must be those of n simulated workers, over many steps.
"""

import pytest
from parity_cases import CASES
from tensorflow_parity import run_against_reference

# Tracing takes seconds, so only make test-long runs these, on 4 ranks.
LONG = [
    *("few are left", "many are sent, look-ahead", "the same, look-ahead"),
    *("exact, look-ahead", "float16 values", "integers of float64 gradients"),
    "exact, float16 values, a warm-up at a rate of its own",
]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.long] * (name in LONG))
        for name, settings in CASES.items()
    ],
)
def test_parity(settings):
    compressor = run_against_reference(**settings)
    assert len(compressor.exchanges()[0].buckets) >= 4 or "leader" not in settings


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("settings", [{"rate": 300}, {"rate": 8, "bits": 3}], ids=str)
def test_plain_operations(settings, lookahead, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "tensorflow")
    run_against_reference(**settings, beta=0.3, lookahead=lookahead)


def test_eagerly():
    run_against_reference(rate=100, beta=0.3, lookahead=True, traced=False)
