"""Saved states that are refused, and the messages.

These tests use no framework. Tests of each framework cover the callers.
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
    saved_state.check_finite({"a": True, "b": True})
    saved_state.check_finite({})


def test_what_is_no_state():
    incomplete = state()
    del incomplete["residues"], incomplete["step"]
    with pytest.raises(
        ValueError,
        match=r"not a ScaleCom state: it lacks residues, step. Pass what ScaleCom.state_dict",
    ):
        saved_state.check_state(incomplete, CONFIG, SCALECOM)
    old = state(version=1, method="MyMethod")  # which had no settings
    del old["settings"]
    for other in (old, state(version=99)):
        with pytest.raises(
            ValueError,
            match=rf"version {other['version']}, but this release reads only version 2. Load it "
            r"with the release that saved it \(version 1: 0.2.0\), or go on without",
        ):
            saved_state.check_state(other, CONFIG, SCALECOM)


def test_settings_are_no_part_of_what_all_states_have():
    own = {"method": "MyMethod", "step": 7}
    saved_state.check_state(state(settings=own), CONFIG, own)
    with pytest.raises(ValueError, match="method='ScaleCom' in the state and 'MyMethod' now, step"):
        saved_state.check_state(state(), CONFIG, own)


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


def test_norms_that_are_damaged():
    assert saved_state.norms_of(state()) == [[0, 0, 0], [0, 0, 0]]  # deleted, as the error says
    assert saved_state.norms_of(state(norms=[[1, 2, 3], (4, 5, 6)])) == [[1, 2, 3], [4, 5, 6]]
    for norms in ([[1, 2, 3]], [[1, 2, 3], [4, 5, np.nan]]):
        with pytest.raises(ValueError, match="damaged: its norms are .*Load an older state"):
            saved_state.norms_of(state(norms=norms))


def test_residues_of_another_model():
    with pytest.raises(
        ValueError,
        match=r"another model: a has shape \(3,\) in the state and \(4,\) in the model; "
        "b is not in the state; c is",
    ):
        saved_state.check_residues({"a": (3,), "c": (1,)}, {"a": (4,), "b": (2,)})
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        saved_state.check_residues({}, {f"layer{i}": (3,) for i in range(100)})
    assert str(refusal.value).count("is not in the state") == 5


def test_residues_that_are_not_finite_are_refused_by_name():
    residues = {"good": np.ones(3), "b": np.array([1, np.nan]), "a": np.array([[np.inf, 0]])}
    are_finite = {name: bool(np.isfinite(residue).all()) for name, residue in residues.items()}
    with pytest.raises(
        ValueError, match="residues of a, b are not finite.*earlier step, or go on without loading"
    ):
        saved_state.check_finite(are_finite)
    with pytest.raises(
        ValueError, match="of layer0, layer1, layer2, layer3, layer4, ... are not finite"
    ):
        saved_state.check_finite({f"layer{i}": False for i in range(6)})
