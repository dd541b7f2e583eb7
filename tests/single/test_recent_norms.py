"""When a gradient is an outlier, and what is left of its residue."""

import math

import pytest

from scalecom_hvd.recent_norms import LEAST, RecentNorms


def after(norms, times=4.0):
    recent = RecentNorms()
    return [recent.share(norm, times) for norm in norms], recent


@pytest.mark.parametrize(
    ("norms", "last"),
    [
        ([1.0] * LEAST + [100.0], 2.0**-5),  # 3.125 is the largest power of two below 4
        ([1.0] * LEAST + [4.0], 1.0),
        ([1.0] * LEAST + [4.1], 0.5),
        ([math.nextafter(2.0, 0.0)] * LEAST + [32.0], 2.0**-3),  # math.log2 would round to -2
        ([1.0] * (LEAST - 1) + [100.0], 1.0),  # too early to tell
        ([1.0] * LEAST + [0.0] * 500 + [3.0], 1.0),  # an expert that got no tokens meanwhile
        ([1.0] * LEAST + [float("inf")], 1.0),  # the step does not count
    ],
)
def test_an_outlier_is_much_longer_than_all_recent_gradients(norms, last):
    shares, recent = after(norms)
    assert shares == [1.0] * (len(norms) - 1) + [last]
    assert recent.outliers == (last < 1)


def test_an_outlier_does_not_hide_the_next_one():
    shares, recent = after([1.0] * LEAST + [1000.0, 1000.0])
    assert shares[LEAST:] == [2.0**-8, 2.0**-6]
    assert recent.outliers == 2


def test_gradients_that_grow_for_good_are_outliers_for_a_few_steps():
    shares, _ = after([1.0] * LEAST + [1000.0] * 20)
    assert shares[-1] == 1.0
    assert 0 < sum(share < 1 for share in shares) < 10


def test_what_is_recent_fades():
    norms = [100.0] + [1.0] * 300
    assert after([*norms, 10.0])[0][-1] < 1
    assert after([*norms[:50], 10.0])[0][-1] == 1


def test_without_a_bound_there_are_no_outliers():
    shares, recent = after([1.0] * LEAST + [1e6], times=None)
    assert shares[-1] == 1
    assert recent.outliers == 0
