"""How tensors share collectives: groups, buckets, positions in buffers, and costs."""

import numpy as np
import pytest

from scalecom_hvd.bucket_layout import Layout, divide, group_names, split, step_stats, traffic
from scalecom_hvd.lanes import geometry

NAMES = {7: "a", 3: "b", 5: "c", 1: "d", 2: "e"}  # keys in the model's order


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (None, None),
        (1, [["a", "b", "c", "d", "e"]]),
        (2, [["a", "b", "c"], ["d", "e"]]),
        (3, [["a", "b"], ["c", "d"], ["e"]]),
        (5, [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ([[1, 7], [5]], [["d", "a"], ["c"], ["b"], ["e"]]),
        ([[1, 99], [98]], [["d"], ["a"], ["b"], ["c"], ["e"]]),  # keys without a name are left out
        ([], [["a"], ["b"], ["c"], ["d"], ["e"]]),
    ],
    ids=str,
)
def test_groups(groups, expected):
    assert group_names(groups, NAMES) == expected


def test_buckets_are_of_one_kind_and_of_limited_size():
    kinds = {"a": "float32", "b": "float64", "c": "float32", "d": "float64", "e": "float32"}

    def buckets(limit):
        return split(list("abcde"), kinds.get, lambda name: 100, limit)

    assert buckets(None) == [["a", "c", "e"], ["b", "d"]]
    assert buckets(10**6) == buckets(None)
    assert buckets(100) == [["a"], ["c"], ["e"], ["b"], ["d"]]
    for limit in (1, 50, 100, 250, 1000, None):
        parts = buckets(limit)
        assert sorted(name for part in parts for name in part) == list("abcde")
        assert all(len({kinds[name] for name in part}) == 1 for part in parts)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([10] * 12, ["abcd", "efgh", "ij", "k", "l"]),
        ([10, 10, 10, 10, 4], ["ab", "c", "de"]),  # 4 alone would be too small
        ([8] * 10 + [1] * 8, ["abcde", "fgh", "i", "j", "klmnopqr"]),
        ([1] * 9, ["abcdefghi"]),
        ([0, 100, 0, 3, 100], ["ab", "cd", "e"]),
    ],
    ids=str,
)
def test_the_last_buckets_are_smaller_but_not_too_small(sizes, expected):
    sizes = dict(zip("abcdefghijklmnopqr", sizes, strict=False))
    parts = split(sizes, lambda name: "float32", sizes.get, 40)
    assert ["".join(part) for part in parts] == expected


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([1, 1, 1, 1, 1, 1], 3, ["ab", "cd", "ef"]),
        ([1, 1, 1, 10, 1, 1], 3, ["abc", "d", "ef"]),
        ([10, 1, 1], 3, ["a", "b", "c"]),
        ([1, 1, 10], 2, ["ab", "c"]),
        ([5, 1, 1, 1], 2, ["a", "bcd"]),
        ([0, 0, 0, 7], 4, ["a", "b", "c", "d"]),
        ([3, 2, 1], 1, ["abc"]),
    ],
)
def test_fragments_are_of_about_the_same_size(sizes, count, expected):
    parts = divide(sizes, list("abcdef")[: len(sizes)], count)
    assert ["".join(part) for part in parts] == expected


def test_tensors_lie_one_after_the_other_and_aligned():
    rates = {"none": 1, "one byte": 10, "four bytes": 70_000, "two bytes": 1000, "one too": 256}
    geometries = {name: geometry(100_001, rate, "lanes") for name, rate in rates.items()}
    layout = Layout(geometries)
    used = np.zeros(layout.offsets_bytes, int)
    for name, lanes in geometries.items():
        where, width = layout.offsets[name], lanes.offset_width
        assert where.start % lanes.offset_dtype.itemsize == 0
        assert where.stop - where.start == lanes.k * width
        used[where] += 1
    assert (used == 1).all()
    ends = np.cumsum([lanes.k for lanes in geometries.values()])
    assert [layout.values[name].stop for name in geometries] == ends.tolist()
    assert layout.n_values == ends[-1]


def test_traffic_is_that_of_a_ring():
    assert traffic(1, 1000, 1000, 1000) == 0
    assert traffic(4, 1000, 4000) == 3 / 4 * (1000 + 2 * 4000)
    assert traffic(4, 0, 0, 100) == 300


def test_the_rate_is_that_of_what_has_gradients():
    chosen = {"w": 10, "without a gradient": 50}
    sizes = {"offsets": 10, "values": 40, "dense": 800}
    assert step_stats(2, 1, {"w": 1000, "head": 200}, chosen, 3, **sizes)["rate"] == 1200 / 210
    assert step_stats(2, 0, {}, {}, 0, **dict.fromkeys(sizes, 0))["rate"] == 0
