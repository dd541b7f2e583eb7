"""In every mode, a step's parts have their names in torch.profiler."""

import pytest
import torch
from models import parameters, take_steps, wrap

import scalecom_hvd.torch as hvd

SHAPES = {"weight": (200, 100), "bias": (100,)}


@pytest.mark.parametrize("bits", [None, 32])
@pytest.mark.parametrize("lookahead", [False, True])
def test_parts_of_a_step_have_names(lookahead, bits):
    hvd.init()
    model = parameters(SHAPES)
    optimizer, _ = wrap(hvd, model, lookahead=lookahead, bits=bits)
    take_steps(optimizer, model, [0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_steps(optimizer, model, range(1, 4))
    counts = {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith("scalecom.")
    }
    # Integers of few bits and tensors that are sent whole have different buckets.
    buckets = 1 if bits == 32 else 2
    expected = {f"scalecom.{part}": 3 for part in ["take_and_accumulate", "scatter"]}
    expected["scalecom.wait for values"] = 3 * buckets
    assert counts.items() >= expected.items()
