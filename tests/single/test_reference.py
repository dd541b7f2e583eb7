"""The oracle itself, against the algorithm as the paper writes it."""

import numpy as np
import pytest

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.reference import ScaleComReference, select

SHAPES = {"w": (50, 40), "b": (7,)}


def worker_gradients(n, step, shapes=SHAPES):
    random = np.random.default_rng(step)
    return [{name: random.standard_normal(shape).astype(np.float64) for name, shape in shapes.items()} for _ in range(n)]


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_step_is_section_one_of_the_design(n, beta):
    """The two moves, multiplied out, are the paper's equations."""
    config = ScaleComConfig(rate=10, beta=beta, min_numel=100)
    reference = ScaleComReference(n, SHAPES, config)
    memory = [np.zeros(2000) for _ in range(n)]
    lanes = Lanes(2000, 10)
    for t in range(20):
        grads = worker_gradients(n, t)
        accumulators = [memory[i] + grads[i]["w"].reshape(-1) for i in range(n)]
        chosen = select(accumulators[t % n], lanes, "lanes")
        sent = np.zeros((n, 2000))
        for i in range(n):
            sent[i, chosen] = accumulators[i][chosen]
            memory[i] = (1 - beta) * memory[i] + beta * (accumulators[i] - sent[i])
        averages = reference.step(grads)
        np.testing.assert_array_equal(reference.selections["w"], chosen)
        np.testing.assert_allclose(averages["w"].reshape(-1), sent.mean(0), atol=1e-12)
        np.testing.assert_allclose(averages["b"], np.mean([g["b"] for g in grads], 0), atol=1e-12)
        for i in range(n):
            np.testing.assert_allclose(reference.residues[i]["w"].reshape(-1), memory[i], atol=1e-12)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("wire", [None, "float16"])
def test_sent_plus_residue_is_what_came_in(lookahead, wire):
    reference = ScaleComReference(3, SHAPES, ScaleComConfig(rate=10, min_numel=100, lookahead=lookahead, wire_dtype=wire))
    sent, came = np.zeros(SHAPES["w"]), np.zeros(SHAPES["w"])
    for t in range(40):
        grads = worker_gradients(3, t)
        sent += reference.step(grads)["w"]
        came += np.mean([g["w"] for g in grads], 0)
    left = np.mean([r["w"] for r in reference.residues], 0)
    np.testing.assert_allclose(sent + left, came, atol=1e-10)
    assert np.abs(left).max() > 0


def test_each_lane_sends_its_largest():
    lanes, values = Lanes(6401, 100), np.random.default_rng(0).standard_normal(6401)
    chosen = set(select(values, lanes, "lanes").tolist())
    starts, strides = lanes.starts_and_strides()
    for lane in range(lanes.k):
        end = lanes.full_lanes * lanes.rows if lane < lanes.full_lanes else 6401
        members = np.arange(starts[lane], end, strides[lane])
        assert members[np.abs(values[members]).argmax()] in chosen


def test_exact_selection_takes_the_k_largest_and_the_first_of_equals():
    values = np.array([0.0, 3, -3, 1, 3, 0, -5, 0])
    assert select(values, Lanes(8, 4), "exact").tolist() == [1, 6]
    assert select(np.zeros(8), Lanes(8, 4), "exact").tolist() == [0, 1]


def test_leaders_take_turns():
    config = ScaleComConfig(leader="staggered")
    reference = ScaleComReference(3, {"a": (5000,), "b": (5000,)}, config, buckets=[["a"], ["b"]])
    assert [reference.leader("a", t) for t in range(4)] == [0, 1, 2, 0]
    assert [reference.leader("b", t) for t in range(4)] == [1, 2, 0, 1]


def test_a_step_with_a_value_not_finite_never_happened():
    reference = ScaleComReference(2, SHAPES, ScaleComConfig(rate=10, min_numel=100))
    reference.step(worker_gradients(2, 0))
    before = [r["w"].copy() for r in reference.residues]
    grads = worker_gradients(2, 1)
    grads[1]["b"][3] = np.inf
    assert np.isnan(reference.step(grads)["w"]).all()
    assert reference.step_number == 1
    for residues, old in zip(reference.residues, before, strict=True):
        np.testing.assert_array_equal(residues["w"], old)
