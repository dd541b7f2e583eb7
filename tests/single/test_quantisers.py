"""Quantisers by themselves.

They are contractions, and their values are packed into the promised number of bits.
"""

import numpy as np
import pytest
import torch
from oracles import methods as oracle
from parallel.rules import Sign, rounding

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange import quantisers

ALL = [hvd.BinMeans(), hvd.BinMeans(block=7), Sign(), Sign(block=7)]
COUNTS = (1, 700, 512, 33, 600)
KINDS = ["normal", "alike", "sparse", "heavy"]


def values_of(kind, seed, dtype=torch.float32):
    """Return values of several tensors of different scales, some of one sign, sparse or alike."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(COUNTS), generator=random, dtype=torch.float64)
    if kind == "alike":
        values = values.sign()
    elif kind == "sparse":
        values = values * (torch.rand(len(values), generator=random) < 0.02)
    elif kind == "heavy":
        values = values**5
    parts = values.split(COUNTS)
    return torch.cat([part * 10.0 ** (i - 2) for i, part in enumerate(parts)]).to(dtype)


def sent(quantiser, values):
    payload = quantiser.pack(values, COUNTS)
    return payload, quantiser.unpack(payload, values, COUNTS)


def in_blocks(values, block):
    rows, _ = oracle.in_blocks(values.double().numpy(), COUNTS, block)
    return torch.from_numpy(rows)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_levels_come_back(bits):
    every = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int8).repeat(9)
    for count in (0, 1, 3, len(every)):  # every level at every position in a byte
        packed = quantisers.pack_levels(every[:count], bits)
        assert (packed.dtype, packed.numel()) == (torch.uint8, -(-count * bits // 8))
        assert torch.equal(quantisers.unpack_levels(packed, bits)[:count], every[:count])


@pytest.mark.parametrize("quantiser", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_bytes_are_those_that_were_promised(quantiser, dtype):
    values = values_of("normal", 1, dtype)
    payload, restored = sent(quantiser, values)
    blocks = sum(-(-count // quantiser.block) for count in COUNTS)
    scales = blocks * quantiser.scales * dtype.itemsize
    assert payload.dtype == torch.uint8
    assert payload.numel() == scales + -(-len(values) * quantiser.bits // 8)
    assert (restored.dtype, restored.shape) == (values.dtype, values.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantiser", ALL, ids=str)
def test_what_stays_is_less_than_what_came(quantiser, kind):
    """Quantisers are contractions (Basu et al., definition 3).

    Less than |x|^2 is left, so error feedback keeps residues bounded.
    """
    values = values_of(kind, 3)
    error = (values.double() - sent(quantiser, values)[1]).square()
    rest = in_blocks(error, quantiser.block).sum(1)
    energy = in_blocks(values, quantiser.block).square().sum(1)
    assert (rest[energy > 0] < energy[energy > 0]).all()
    assert (rest[energy == 0] == 0).all()


@pytest.mark.parametrize("quantiser", [*ALL, quantisers.Unrounded()], ids=str)
def test_numbers_at_the_ends(quantiser):
    """A scale may be zero, denormal, or the largest number there is."""
    for size in (0.0, 1e-45, 1e-39, 1.0, 2.0**125, 3.4e38):
        values = torch.tensor([-size, 0.0, size / 3, size] * 10)
        payload = quantiser.pack(values, (40,))
        restored = quantiser.unpack(payload, values, (40,))
        assert restored.isfinite().all()
        assert (restored.abs() <= size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("quantiser", ALL, ids=str)
def test_the_oracle_agrees(quantiser, dtype):
    for kind in KINDS:
        values = values_of(kind, 4, dtype)
        wanted = rounding(quantiser)(values.numpy(), COUNTS)
        # float64 values are summed in float64, so the order of the sum may show.
        rtol = 1e-14 if dtype == torch.float64 else 0
        np.testing.assert_allclose(sent(quantiser, values)[1].numpy(), wanted, rtol=rtol)


class ThreeBits(hvd.Quantiser):
    bits = 3


NO_QUANTISER = r"must be hvd.BinMeans\(\), an hvd.Quantiser of your own, or None"
OF_THREE = "ThreeBits.bits must be 1, 2, 4 or 8, so that values fill whole bytes, not 3"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (hvd.BinMeans, {"block": 0}, "block must be a whole number of values, at least 1"),
        (hvd.BinMeans, {"block": 2.5}, "block must be a whole number of values, at least 1"),
        *(
            (hvd.LocalTopK, {"quantiser": wrong}, NO_QUANTISER)
            for wrong in ("sign", 4, hvd.ScaleCom)
        ),
        (hvd.LocalTopK, {"quantiser": ThreeBits}, OF_THREE),
    ],
)
def test_wrong_settings_are_refused(kind, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**settings)


@pytest.mark.parametrize("kind", [hvd.ScaleCom, hvd.RandomK, type("MyOwn", (hvd.Method,), {})])
def test_only_local_top_k_takes_a_quantiser(kind):
    with pytest.raises(ValueError, match=r"give bits= .* LocalTopK\(quantiser=...\)"):
        kind(quantiser=hvd.BinMeans())


def test_a_class_is_a_quantiser_with_its_defaults():
    assert isinstance(quantisers.quantiser_of(None), quantisers.Unrounded)
    assert isinstance(quantisers.quantiser_of(hvd.BinMeans), hvd.BinMeans)
    assert quantisers.BLOCK == hvd.BinMeans().block == 512
