"""The geometry's promises, for any size and rate."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalecom_hvd.lanes import LANES, Lanes, Positions, geometry

numels = st.one_of(
    st.integers(1, 20_000), st.sampled_from([63, 64, 65, 6399, 6400, 6401, 12_800, 12_801])
)
rates = st.one_of(
    st.integers(1, 1000),
    st.floats(1, 500, allow_nan=False),
    st.sampled_from([1, 2, 100, 256, 257, 40_000]),
)
seeds = st.integers(0, 1000)


@given(numels, rates)
@settings(max_examples=300, deadline=None)
def test_every_element_is_in_exactly_one_lane(numel, rate):
    lanes = Lanes(numel, rate)
    every_lane = zip(*lanes.starts_and_strides(), lanes.lengths(), strict=True)
    members = [start + stride * np.arange(length) for start, stride, length in every_lane]
    assert np.array_equal(np.sort(np.concatenate(members)), np.arange(numel))


@given(numels, rates)
@settings(max_examples=300, deadline=None)
def test_k_is_the_rate_promised(numel, rate):
    lanes = Lanes(numel, rate)
    assert lanes.k == math.ceil(numel / rate)
    assert 1 <= lanes.k <= numel


@given(numels, rates, seeds)
@settings(max_examples=300, deadline=None)
def test_offsets_tell_an_element_of_each_lane_and_fit_only_there(numel, rate, seed):
    lanes = Lanes(numel, rate)
    starts, strides = lanes.starts_and_strides()
    lengths, random = lanes.lengths(), np.random.default_rng(seed)
    assert lengths.max() - 1 <= np.iinfo(lanes.offset_dtype).max
    offsets = random.integers(lengths)
    indices = lanes.indices(offsets.astype(lanes.offset_dtype))
    assert np.array_equal(indices, starts + strides * offsets)
    assert lanes.fit(offsets)
    lane = random.integers(lanes.k)
    for wrong in (lengths[lane], -1, 2**31 - 1, -(2**31)):
        broken = offsets.copy()
        broken[lane] = wrong
        assert not lanes.fit(broken)


@given(numels, rates)
@settings(max_examples=100, deadline=None)
def test_blocks_hold_the_lanes_as_columns(numel, rate):
    lanes = Lanes(numel, rate)
    flat, lane = np.arange(numel), 0
    starts, strides = lanes.starts_and_strides()
    for elements, groups, width in lanes.groups():
        block = flat[elements]
        for column in range(groups * width):
            group, inside = divmod(column, width)
            rows = (
                block.size // groups
                if groups > 1 or lane + groups * width < lanes.k
                else block.size
            )
            assert block[group * rows + inside] == starts[lane + column]
            assert strides[lane + column] == width
        lane += groups * width
    assert lane == lanes.k


@pytest.mark.parametrize(
    ("rate", "dtype"),
    [
        (1, "uint8"),
        (256, "uint8"),
        (257, "int16"),
        (32_768, "int16"),
        (32_769, "int32"),
        (2.5, "uint8"),
    ],
)
def test_offsets_travel_in_the_fewest_bytes(rate, dtype):
    assert Lanes(10**6, rate).offset_dtype == dtype
    assert Lanes(10**6, rate).offset_width == np.dtype(dtype).itemsize * (rate > 1)
    assert Positions(10**6, rate).offset_width == 4


def test_lanes_of_one_element_have_no_offsets():
    for lanes in (Lanes(10_001, 1), Lanes(1, 1.5)):
        assert (lanes.offset_width, lanes.offset_bits) == (0, 0)
        assert lanes.indices(np.zeros(0, np.uint8)).tolist() == list(range(lanes.numel))
        assert lanes.fit(np.zeros(0, np.uint8))
    assert Lanes(10_001, 2).offset_bits == 4


def test_a_full_group_is_rate_rows_of_64():
    lanes = Lanes(6400 * 3 + 1, 100)
    assert (lanes.k, lanes.width, lanes.rows, lanes.full_lanes) == (193, LANES, 100, 192)
    assert Lanes(0, 100).k == 0


@pytest.mark.parametrize("selection", ["lanes", "exact"])
@pytest.mark.parametrize("rate", [1, 1.5, 2, 64, 100, 257, 70_000])
def test_empty_and_one_element_tensors(rate, selection):
    empty, one = geometry(0, rate, selection), geometry(1, rate, selection)
    assert empty.k == 0
    assert empty.indices(np.zeros(0, empty.offset_dtype)).shape == (0,)
    assert one.k == 1
    assert one.indices(np.zeros(1, one.offset_dtype)).tolist() == [0]
    if selection == "lanes":
        assert (empty.full_lanes, empty.groups()) == (0, [])
        assert (one.full_lanes, one.groups()) == (0, [(slice(0, 1), 1, 1)])


def test_positions_fit_when_they_ascend():
    positions = geometry(100, 25, "exact")
    assert positions.fit(np.array([0, 5, 7, 99], np.int32))
    for wrong in (
        [0, 5, 5, 99],
        [5, 0, 7, 99],
        [-1, 5, 7, 99],
        [0, 5, 7, 100],
        [5, -(2**31) + 8, -5, 99],
    ):
        assert not positions.fit(np.array(wrong, np.int32))
    assert geometry(0, 10, "exact").fit(np.zeros(0, np.int32))
    assert geometry(0, 10, "lanes").fit(np.zeros(0, np.uint8))


def test_exact_selection_sends_positions():
    positions = geometry(1000, 10, "exact")
    assert isinstance(positions, Positions)
    assert positions.k == 100
    assert np.array_equal(positions.indices(np.arange(100)), np.arange(100))
    with pytest.raises(ValueError, match="use selection='lanes'"):
        Positions(2**31, 100)
