"""When users are warned, and when not.

Examples are a run that is too short for its rate, and residues that keep growing.
"""

import logging

import pytest

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.training_warnings import (
    Health,
    check_length,
    check_run,
    check_share_whole,
    growth_limit,
)


@pytest.fixture(autouse=True)
def at_warning(caplog):
    caplog.set_level(logging.WARNING, "scalecom_hvd")


@pytest.mark.parametrize(
    ("steps", "warmup", "rates", "warned"),
    [
        (499, 0, {"w": 100.0, "b": 1.0}, True),
        (500, 0, {"w": 100.0}, False),
        (500, 50, {"w": 100.0}, True),
        (30, 50, {"w": 100.0}, True),
        (500, 0, {"w": 25.0, "v": 400.0}, True),
        (1, 0, {"b": 1.0}, False),
        (1, 0, {}, False),
    ],
)
def test_a_run_too_short_for_its_rate(caplog, steps, warmup, rates, warned):
    check_length(steps, warmup, rates.values())
    assert len(caplog.records) == warned
    if warned:
        assert "each element is sent" in caplog.text
        assert "a rate of at most" in caplog.text


def look(norms, rate=100.0):
    health = Health()
    for number, (residues, gradients) in enumerate(norms):
        health.look(100 * number, residues, gradients, growth_limit([1.0, rate], ScaleComConfig()))
    return health


@pytest.mark.parametrize(
    ("norms", "warnings"),
    [
        ([(1, 1), (20, 1), (30, 1)], 1),
        ([(1, 1), (20, 1), (30, 1), (40, 1), (50, 1)], 1),  # only one warning
        ([(1, 1), (20, 1), (24, 1)], 0),  # a quarter of the rate
        ([(60, 1), (50, 1), (40, 1)], 0),  # they fall
        ([(1, 1), (60, 1), (60, 1), (59, 1)], 0),  # they stay as they are
        ([(1, 1), (2, 1), (3, 0)], 0),  # a batch that fits perfectly
        ([(300, 9), (101, 4), (102, 1), (150, 1)], 0),  # gradients fall, near the end of a run
        ([(1, 0), (2, 0), (3, 0)], 0),
    ],
    ids=str,
)
def test_residues_that_keep_growing(caplog, norms, warnings):
    health = look(norms)
    assert len(caplog.records) == warnings
    largest = max(gradients for _, gradients in norms[-3:])
    assert health.ratio == (pytest.approx(norms[-1][0] / largest) if largest else None)


def test_much_of_a_large_model_sent_whole_is_said(caplog):
    numels = {"body": 1_000_000, "head": 100_000}
    check_share_whole({"body": 100, "head": 100}, numels)
    check_share_whole({"body": 100, "head": 1}, {"body": 10_000, "head": 1_000})  # small
    check_share_whole({"body": 1, "head": 1}, numels)  # nothing is to be compressed
    check_share_whole({"body": 100, "head": 1}, {"body": 10_000_000, "head": 100_000})
    assert not caplog.records
    check_share_whole({"body": 100, "head": 1}, numels)
    assert "9 % of the model's elements are sent uncompressed, most of them in head" in caplog.text


@pytest.mark.parametrize("warmup", [0, 200, 400])
def test_only_exchanges_of_the_last_stage_count(caplog, warmup):
    config = ScaleComConfig(rate={0: 4, 300: 100}, warmup_steps=warmup, total_steps=700)
    check_run(config.resolved(), {"w": None, "v": 2.0}, {}, lambda steps: steps // 10)
    left = 70 - max(300, warmup) // 10
    assert f"of 70 exchanges, {left} are compressed at rate 100" in caplog.text


def test_how_much_may_wait():
    assert growth_limit([1.0, 100.0, 4.0], ScaleComConfig(beta=0.5)) == 25
    assert growth_limit([4.0], ScaleComConfig()) == 4
    assert growth_limit([100.0], ScaleComConfig(beta=0.5, flush=False)) == 50


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [({}, 0), ({"lookahead": True}, 0), ({"beta": 1}, 0), ({"lookahead": True, "beta": 1}, 1)],
    ids=str,
)
def test_look_ahead_with_a_beta_near_one(caplog, fields, warnings):
    check_run(ScaleComConfig(**fields).resolved(), {}, {})
    assert len(caplog.records) == warnings
    assert not warnings or "look-ahead with beta=1 breaks training" in caplog.text
