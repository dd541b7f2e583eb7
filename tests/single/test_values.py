"""Integers of few bits in words: C packs and unpacks them as plain torch does, to the bit."""

import itertools

import pytest
import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.kernels.base import TensorSlot, scale_blocks_
from scalecom_hvd.exchange.values import IntegerValues
from scalecom_hvd.integers import blocks_of, fields_per_word, levels_of
from scalecom_hvd.lanes import Lanes

CPU = torch.device("cpu")


@pytest.mark.skipif(native.library() is None, reason="the C kernel was not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(1,), (511, 513, 7), (5000,), (12_345, 3, 1024)], ids=str)
def test_c_and_torch_are_equal(sizes, dtype, monkeypatch):
    generator, numel = torch.Generator().manual_seed(0), sum(sizes)
    values_at = itertools.accumulate(sizes[:-1], initial=0)
    scales_at = itertools.accumulate((4 * blocks_of(size) for size in sizes[:-1]), initial=0)
    places = list(zip(sizes, values_at, scales_at, strict=True))
    for bits, ranks in itertools.product((2, 3, 4, 8), (1, 2, 3, 5, 64)):
        levels = levels_of(bits)
        monkeypatch.setenv("SCALECOM_KERNEL", "native")
        in_c = IntegerValues(numel, 2, levels, ranks, CPU, dtype)
        monkeypatch.setenv("SCALECOM_KERNEL", "torch")
        in_torch = IntegerValues(numel, 2, levels, ranks, CPU, dtype)
        integers = torch.randint(-levels, levels + 1, (numel,), generator=generator)
        for values in (in_c, in_torch):
            values.compressed.copy_(integers)
            values.fill({})
        assert torch.equal(in_c.buffer, in_torch.buffer)
        for values in (in_c, in_torch):  # as if all ranks had sent the same
            values.averages.mul_(ranks)
        slots = [
            TensorSlot(torch.zeros(size), Lanes(size, 1), 0, at, levels, scales)
            for size, at, scales in places
        ]
        n_scales = sum(map(blocks_of, sizes))
        # Scales have 8 significant bits.
        scales = torch.rand(n_scales, generator=generator).bfloat16().float()
        offsets = scales.view(torch.uint8)
        expected = in_torch.sums().to(dtype)
        for slot in slots:
            scale_blocks_(slot.values(expected), slot.scales(offsets))
        found = in_c.averages_of(slots, offsets, 1 / ranks)
        assert torch.equal(found, expected.mul_(1 / ranks))
        assert in_torch.averages_of(slots, offsets, 1 / ranks) is None


@pytest.mark.parametrize(
    ("bits", "ranks", "fields"), [(2, 1, 16), (2, 2, 10), (4, 2, 6), (8, 1, 4), (8, 2**23, 1)]
)
def test_a_field_holds_the_sum_of_all_ranks(bits, ranks, fields):
    assert fields_per_word(levels_of(bits), ranks) == fields


def test_more_ranks_than_a_word_can_count_are_refused():
    with pytest.raises(ValueError, match="are too many to sum integers of 127 levels in 32 bits"):
        fields_per_word(127, 2**25)
