"""Saved states that are refused, and the messages.

These tests use no framework. Tests of each framework cover the callers, and what those refuse:
states of other models, and with residues that are not finite.
"""

import numpy as np
import pytest

from scalecom_hvd import ScaleComConfig, saved_state

CONFIG = ScaleComConfig(rate=20).resolved()
SCALECOM = {"method": "ScaleCom"}


def state(**other):
    basis = {"version": saved_state.STATE_VERSION, "step": 3, "settings": SCALECOM}
    return basis | {"config": CONFIG.to_dict(), "residues": {}} | other


def test_what_fits_passes():
    saved_state.check_state(state(), CONFIG, SCALECOM)
    other_buckets = CONFIG.replace(bucket_bytes=1000).to_dict()  # this changes no result
    saved_state.check_state(state(config=other_buckets), CONFIG, SCALECOM)
    other, planned = {"method": "RandomK"}, CONFIG.replace(total_steps=9).to_dict()
    saved_state.check_state(state(settings=other, config=planned), CONFIG, other)
    saved_state.check_residues({"a": (3, 4)}, {"a": [3, 4]})


def test_states_of_other_versions():
    old = state(version=1, method="MyMethod")  # which had no settings
    del old["settings"]
    for other in (old, state(version=99)):
        with pytest.raises(
            ValueError,
            match=rf"version {other['version']}, but this release reads only version 2. Load it "
            r"with the release that saved it \(version 1: 0.2.0\), or go on without",
        ):
            saved_state.check_state(other, CONFIG, SCALECOM)


def test_residues_of_other_settings():
    other = state(config=CONFIG.replace(min_numel=9, beta=0.1).to_dict())
    with pytest.raises(
        ValueError,
        match="beta=0.1 in the state and 0.2 now, min_numel=9 in the state and 2048 now.*"
        "go on without loading the state",
    ):
        saved_state.check_state(other, CONFIG, SCALECOM)
    other_buckets = CONFIG.replace(bucket_bytes=1000).to_dict()
    refusal = "other settings: bucket_bytes=1000 in the state and 26214400 now"
    # These draw random numbers, or choose, per bucket.
    binned = {"method": "LocalTopK", "quantiser": "BinMeans()"}
    for who in ({"method": "LocalTopK"}, {"method": "RandomK", "seed": 0}, binned):
        with pytest.raises(ValueError, match=refusal):
            saved_state.check_state(state(config=other_buckets, settings=who), CONFIG, who)
    # Earlier releases had quantisers in ScaleCom too.
    earlier = state(settings=SCALECOM | {"quantiser": "BinMeans()"})
    with pytest.raises(ValueError, match=r"quantiser='BinMeans\(\)' in the state and None now"):
        saved_state.check_state(earlier, CONFIG, SCALECOM)
    with pytest.raises(ValueError, match="novelty=1 in the state and None now"):
        saved_state.check_state(state(config=CONFIG.to_dict() | {"novelty": 1}), CONFIG, SCALECOM)
    without = {name: value for name, value in CONFIG.to_dict().items() if name != "beta"}
    with pytest.raises(ValueError, match="beta=None in the state and 0.2 now"):
        saved_state.check_state(state(config=without), CONFIG, SCALECOM)


def test_residues_are_not_lost_where_all_is_sent():
    whole, in_few_bits = (ScaleComConfig(rate=1, bits=bits).resolved() for bits in (None, 4))
    full = state(residues={"a": np.ones(3)}, config=whole.to_dict())
    with pytest.raises(ValueError, match=r"what those .* hold would be lost.*rate=\{0: 8, 3: 1\}"):
        saved_state.check_state(full, whole, SCALECOM)
    saved_state.check_state(state(config=whole.to_dict()), whole, SCALECOM)
    full["config"] = in_few_bits.to_dict()
    saved_state.check_state(full, in_few_bits, SCALECOM)


def test_residues_of_another_shard():
    residues = {"a": np.ones(3)}
    saved_state.check_shard(state(), (1, 2))  # there are none
    saved_state.check_shard(state(residues=residues, shard=[1, 2]), (1, 2))
    with pytest.raises(ValueError, match="of shard 0 of 1 of each tensor.* holds shard 1 of 2"):
        saved_state.check_shard(state(residues=residues), (1, 2))


def test_a_choice_is_left_out_if_lanes_may_differ():
    tensors = {"scales": 1, "others": 2}
    full = state(offsets={"a": 0}, method_state={"tensors": tensors, "more": 3})
    assert saved_state.without_choice(full, CONFIG.replace(beta=1)) == full
    for other in ({"rate": 16}, {"bits": 3}, {"warmup_steps": 9}):
        left = saved_state.without_choice(full, CONFIG.replace(**other))
        assert "offsets" not in left
        assert left["method_state"] == {"tensors": {"others": 2}, "more": 3}


def test_norms_that_were_deleted_are_zero():
    """The error of damaged norms says that one may delete them."""
    assert saved_state.norms_of(state()) == [[0, 0, 0], [0, 0, 0]]
    assert saved_state.norms_of(state(norms=[[1, 2, 3], (4, 5, 6)])) == [[1, 2, 3], [4, 5, 6]]
