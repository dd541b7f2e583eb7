"""TensorFlow's exchange, compared with the oracle.

Its selections and values must be those of n simulated workers, over many steps.
"""

import pytest
from parity_cases import CASES, LONG, MORE_IN_TENSORFLOW, in_cases
from tensorflow_parity import run_against_reference

import scalecom_hvd.tensorflow as hvd


@in_cases([*LONG, *MORE_IN_TENSORFLOW])
def test_parity(settings):
    if isinstance(settings["rate"], dict) or settings["rate"] == 1:
        pytest.skip("for PyTorch alone")
    if settings.get("lookahead"):  # only PyTorch has it
        settings = {what: value for what, value in settings.items() if what != "lookahead"}
        if settings in CASES.values():
            pytest.skip("another case is the same without look-ahead")
    compressor = run_against_reference(**settings)
    assert len(compressor.exchanges()[0].buckets) >= 4 or "leader" not in settings


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"rate": 300}, {"rate": 8, "bits": 3}], ids=str)
def test_plain_operations(settings, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "tensorflow")
    run_against_reference(**settings, beta=0.3)


@pytest.mark.parametrize("kernel", [pytest.param("", marks=pytest.mark.long), "tensorflow"])
def test_outliers(kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    outliers = [(0, 13), (1, 15)]
    compressor = run_against_reference(outliers=outliers, steps=18, rate=8)
    of_this_rank = [rank for rank, _ in outliers if rank == hvd.rank()]
    residues = compressor.state_dict()["residues"]
    assert compressor.stats()["outliers"] == len(of_this_rank) * len(residues)


def test_eagerly():
    run_against_reference(rate=100, beta=0.3, traced=False, steps=6)
