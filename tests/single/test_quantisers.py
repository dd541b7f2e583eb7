"""Quantisers by themselves.

They are right on average, their errors stay within the bounds, and their values are packed into the
promised number of bits.
"""

import numpy as np
import pytest
import torch
from oracles import methods as oracle

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange import quantisers

UNSCALED = hvd.QSGD(7, norm=2, block=512, scaled=False)
RANDOM = [hvd.QSGD(levels) for levels in (1, 7, 127)]
RANDOM += [hvd.QSGD(3, norm=2), hvd.QSGD(7, norm=2, block=32), UNSCALED]
ALL = [*RANDOM, hvd.QSGD(1, block=300), hvd.Sign(), hvd.Sign(block=7)]
ALL += [hvd.BinMeans(), hvd.BinMeans(block=7)]
WIDE = [hvd.QSGD(1, block=512), hvd.QSGD(1, norm=2, block=512)]
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


def sent(quantiser, values, seed=0):
    payload = quantiser.pack(values, COUNTS, quantisers.generator(seed))
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


@pytest.mark.parametrize(
    ("levels", "bits", "packed"),
    [
        ([0, -1, -1, 0, 0, 0, 0, -1, -1], 1, [0b10000110, 1]),
        ([1, -1, 0, 1], 2, [0b01_00_11_01]),
        ([7, -7], 4, [0b1001_0111]),
        ([-127], 8, [0b1000_0001]),
    ],
)
def test_levels_are_packed_with_the_first_in_the_lowest_bits(levels, bits, packed):
    assert quantisers.pack_levels(torch.tensor(levels, dtype=torch.int8), bits).tolist() == packed


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
@pytest.mark.parametrize("quantiser", RANDOM, ids=str)
def test_the_variance_is_within_the_papers_bound(quantiser, kind):
    """The variance is that of each block. test_the_oracle_agrees shows that no draw is biased."""
    values = values_of(kind, 2)
    drawn = torch.stack([sent(quantiser, values, seed)[1] for seed in range(400)]).double()
    drawn *= 1 + quantiser.variance if quantiser.scaled else 1.0
    off = in_blocks((drawn - values).square().mean(0), quantiser.block).sum(1)
    energy = in_blocks(values, quantiser.block).square().sum(1)
    assert (off <= quantiser.variance * energy * 1.2 + 1e-12 * energy).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantiser", [*ALL, *WIDE], ids=str)
def test_what_stays_is_less_than_what_came(quantiser, kind):
    """Quantisers are contractions (Basu et al., definition 3).

    On average less than |x|^2 is left, so error feedback keeps residues bounded. This is why QSGD
    scales: unscaled, four bits of a Euclidean norm of 512 values leave more than they send.
    """
    values = values_of(kind, 3)
    errors = [(values.double() - sent(quantiser, values, seed)[1]).square() for seed in range(100)]
    rest = in_blocks(torch.stack(errors).mean(0), quantiser.block).sum(1)
    energy = in_blocks(values, quantiser.block).square().sum(1)
    if quantiser is UNSCALED:
        assert kind != "normal" or (rest > energy).any()
    else:
        assert (rest[energy > 0] < energy[energy > 0]).all()
        assert (rest[energy == 0] == 0).all()


def test_the_default_block_keeps_the_variance_below_one_where_that_can_be():
    assert [hvd.QSGD(s).block for s in (1, 2, 3, 7, 127)] == [64, 64, 64, 256, 512]
    assert all((hvd.QSGD(s).variance < 1) != hvd.QSGD(s).scaled == (s < 3) for s in range(1, 128))
    assert (hvd.QSGD(7, norm=2).block, hvd.QSGD(7, norm=2).scaled) == (64, True)
    assert not hvd.QSGD(7, norm=2, block=32).scaled
    assert hvd.QSGD(1, block=512).scaled
    assert not hvd.QSGD(1, block=512, scaled=False).scaled
    assert [hvd.QSGD(s).bits for s in (1, 2, 7, 8, 127)] == [2, 4, 4, 8, 8]


@pytest.mark.parametrize("quantiser", [*ALL, quantisers.Unrounded()], ids=str)
def test_numbers_at_the_ends(quantiser):
    """A scale may be zero, denormal, or the largest number there is."""
    for size in (0.0, 1e-45, 1e-39, 1.0, 2.0**125, 3.4e38):
        values = torch.tensor([-size, 0.0, size / 3, size] * 10)
        payload = quantiser.pack(values, (40,), quantisers.generator(1))
        restored = quantiser.unpack(payload, values, (40,))
        assert restored.isfinite().all()
        assert (restored.abs() <= size * 4.5).all()  # by Euclidean norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("quantiser", ALL, ids=str)
def test_the_oracle_agrees(quantiser, dtype):
    for kind in KINDS:
        values = values_of(kind, 4, dtype)
        if isinstance(quantiser, hvd.Sign):
            rule = oracle.sign(quantiser.block)
        elif isinstance(quantiser, hvd.BinMeans):
            rule = oracle.bin_means(quantiser.block)
        else:
            shrink = 1 + quantiser.variance if quantiser.scaled else 1.0
            rule = oracle.qsgd(quantiser.levels, quantiser.block, quantiser.norm, shrink)
        wanted = rule(
            values.numpy(),
            COUNTS,
            lambda shape: torch.rand(shape, generator=quantisers.generator(9)).numpy(),
        )
        # float64 values are summed in float64, so the order of the sum may show.
        rtol = 1e-14 if dtype == torch.float64 else 0
        np.testing.assert_allclose(sent(quantiser, values, 9)[1].numpy(), wanted, rtol=rtol)


def test_when_values_are_gathered():
    """Values are gathered while n b < 64, where b is the bits of a value including scales."""
    values = values_of("normal", 1)[: 1000 * 4]
    values = torch.cat([values] * 3)[:5120]

    def up_to(quantiser):
        payload = quantiser.pack(values, (5120,), quantisers.generator(1))
        scales = 32 * quantiser.scales / quantiser.block
        assert payload.numel() * 8 / 5120 == pytest.approx(quantiser.bits + scales)
        return [n for n in range(1, 70) if quantiser.is_gathered(payload, values, n)]

    assert up_to(hvd.Sign()) == list(range(1, 61))  # b is 1 + 1/16
    assert up_to(hvd.QSGD(1)) == list(range(1, 26))  # b is 2.5
    assert up_to(hvd.BinMeans()) == list(range(1, 29))  # b is 2.25
    assert up_to(hvd.QSGD(7)) == list(range(1, 16))  # b is 4 + 1/8
    assert up_to(hvd.QSGD(127)) == list(range(1, 8))
    as_they_are = quantisers.Unrounded().pack(values, (5120,), quantisers.generator(1))
    assert not quantisers.Unrounded().is_gathered(as_they_are, values, 2)


class ThreeBits(hvd.Quantiser):
    bits = 3


class NoQuantiser(hvd.Method):
    pass


NO_QUANTISER = r"must be hvd.QSGD\(levels=...\), hvd.Sign\(\), hvd.BinMeans\(\) or None"
OF_THREE = "ThreeBits.bits must be 1, 2, 4 or 8, so that values fill whole bytes, not 3"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (hvd.QSGD, {"levels": 0}, "levels must be a whole number from 1 to 127"),
        (hvd.QSGD, {"levels": 128}, "More levels do not fit into 8 bits"),
        (hvd.QSGD, {"levels": 2.5}, "levels must be a whole number"),
        (hvd.QSGD, {"levels": 7, "norm": 1}, 'norm must be "max" or 2'),
        (hvd.QSGD, {"levels": 7, "block": 0}, "block must be a whole number of values, at least 1"),
        (hvd.Sign, {"block": -1}, "block must be a whole number of values, at least 1"),
        (
            hvd.ScaleCom,
            {"quantiser": hvd.Sign(), "lookahead": True},
            "lookahead and a quantiser exclude each other",
        ),
        (hvd.ScaleCom, {"quantiser": hvd.QSGD(7), "bits": 8}, "bits and a quantiser exclude"),
        *(
            (hvd.LocalTopK, {"quantiser": wrong}, NO_QUANTISER)
            for wrong in ("sign", 4, hvd.ScaleCom)
        ),
        (NoQuantiser, {"quantiser": hvd.Sign()}, "a quantiser means nothing to NoQuantiser"),
        (hvd.LocalTopK, {"quantiser": ThreeBits}, OF_THREE),
    ],
)
def test_wrong_settings_are_refused(kind, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**settings)


def test_a_class_is_a_quantiser_with_its_defaults():
    assert isinstance(quantisers.quantiser_of(None), quantisers.Unrounded)
    assert isinstance(quantisers.quantiser_of(hvd.Sign), hvd.Sign)
    assert quantisers.BLOCK == hvd.Sign().block == 512
