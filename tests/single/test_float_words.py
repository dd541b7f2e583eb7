"""Integers packed as fields of floats are exact, whatever factor is applied on the way."""

import pytest
import torch

from scalecom_hvd.integers import levels_of
from scalecom_hvd.torch.float_words import pack, unpack


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16, 64, 200])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("before", [1.0, 1 / 3, 1 / 7.3])
def test_sums_are_exact(ranks, bits, before):
    levels = levels_of(bits)
    torch.manual_seed(ranks)
    integers = torch.randint(-levels, levels + 1, (ranks, 1001), dtype=torch.int8)
    integers[:, 0], integers[:, 1] = levels, -levels
    for after in (1.0, 1 / ranks / before, 2 / 3):
        total = torch.zeros(())
        for own in integers:
            total = total + pack(own, levels, ranks) * before
        sums, share = unpack(total * after, 1001, levels, ranks)
        assert torch.equal(sums, integers.int().sum(0, dtype=torch.int32))
        assert share == pytest.approx(before * after, rel=1e-4)


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match=r"1000 ranks are too many to sum integers of 127 levels"):
        pack(torch.zeros(10, dtype=torch.int8), 127, 1000)
