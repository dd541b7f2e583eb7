"""The drop-in optimizer, compared with the oracle.

Its selections and values must be those of n simulated workers, over many steps.
"""

import pytest
from faces import hvd, in_every_library, stock
from parity import run_against_reference
from parity_cases import STAGGERED, in_all_cases
from rungs import Restless

from scalecom_hvd.stages import START


@in_all_cases
def test_parity(settings):
    compressor = run_against_reference(**settings)
    assert len(compressor.residues.buckets) >= 4 or "leader" not in settings


@pytest.mark.parametrize("settings", [{}, {"beta": 0.3, "bucket_bytes": 3000}], ids=str)
def test_other_rungs(settings, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Restless)
    compressor = run_against_reference(rate="auto", **settings)
    assert compressor.residues.rung != START


def test_the_plain_kernel(monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    run_against_reference(rate=100, beta=0.3)


@pytest.mark.parametrize("settings", [{"rate": 20}, STAGGERED | {"lookahead": True}], ids=str)
def test_kernels_that_run_beside_backward(settings, monkeypatch):
    """Buckets of half a million elements and more have such kernels."""
    monkeypatch.setattr("scalecom_hvd.exchange.bucket.WORTH_A_THREAD", 1)
    run_against_reference(**settings)


@in_every_library
def test_outliers(library):
    """After the second one, what it left is small beside the next gradients."""
    outliers = [(0, 13), (1, 13), (1, 15)]
    settings = {"rate": 10, "beta": 1.0, "steps": 18}
    compressor = run_against_reference(stock=library is stock, outliers=outliers, **settings)
    of_this_rank = [rank for rank, _ in outliers if rank == hvd.rank()]
    assert compressor.stats()["outliers"] == len(of_this_rank) * len(compressor.residues.tensors)
