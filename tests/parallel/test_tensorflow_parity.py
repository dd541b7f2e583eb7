"""TensorFlow's exchange against the oracle: the same selections and values as n simulated workers,
over many steps.
"""

import pytest
from parity_cases import CASES
from tensorflow_parity import run_against_reference


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_parity(settings):
    compressor = run_against_reference(**settings)
    assert len(compressor.exchanges()[0].buckets) >= 4 or "leader" not in settings


@pytest.mark.parametrize("lookahead", [False, True])
def test_plain_operations(lookahead, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "tensorflow")
    run_against_reference(rate=300, beta=0.3, lookahead=lookahead)


def test_eagerly():
    run_against_reference(rate=100, beta=0.3, lookahead=True, traced=False)
