"""The oracle itself is compared with the algorithm as the paper writes it."""

import numpy as np
import pytest

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.reference import ScaleComReference, integers, scales, select

SHAPES = {"w": (50, 40), "b": (7,)}


def settings(**fields):
    """Return settings that compress all tensors of at least 100 elements at rate 10."""
    small = {"bits": 32, "rate": 10, "min_numel": 100}
    return ScaleComConfig(**(small | fields))


def worker_gradients(n, step, shapes=SHAPES):
    random = np.random.default_rng(step)
    return [
        {name: random.standard_normal(shape).astype(np.float64) for name, shape in shapes.items()}
        for _ in range(n)
    ]


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_step_is_section_one_of_the_design(n, beta):
    """Multiplied out, the two moves are the paper's equations."""
    config = settings(beta=beta, flush=False)
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
            np.testing.assert_allclose(
                reference.residues[i]["w"].reshape(-1), memory[i], atol=1e-12
            )


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("lookahead", [False, True])
def test_what_waits_is_sent_whole_where_gradients_agree_and_beta_of_it_elsewhere(lookahead, beta):
    """`waits` is in units of gradients: a residue is beta times as large."""
    config = settings(beta=beta, lookahead=lookahead, flush=True)
    reference = ScaleComReference(2, SHAPES, config)
    waits = [np.zeros(2000) for _ in range(2)]
    for t in range(20):
        grads = worker_gradients(2, t)
        averages = reference.step(grads)["w"].reshape(-1)
        chosen = reference.selections.get("w", slice(None))  # look-ahead's step 0 is uncompressed
        sent = np.zeros((2, 2000))
        for i in range(2):
            g = grads[i]["w"].reshape(-1)
            share = np.where(waits[i] * g >= 0, 1, beta)
            sent[i, chosen] = (share * waits[i] + g)[chosen]
            waits[i] += g - sent[i]
            m = reference.residues[i]["w"].reshape(-1)
            np.testing.assert_allclose(m, beta * waits[i], atol=1e-12)
        np.testing.assert_allclose(averages, sent.mean(0), atol=1e-12)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("bits", [32, 3])
def test_sent_plus_residue_is_what_came_in(lookahead, bits):
    config = settings(lookahead=lookahead, bits=bits, beta=0.2)
    reference = ScaleComReference(3, SHAPES, config)
    sent, came = np.zeros(SHAPES["w"]), np.zeros(SHAPES["w"])
    for t in range(40):
        grads = worker_gradients(3, t)
        sent += reference.step(grads)["w"]
        came += np.mean([g["w"] for g in grads], 0)
    left = np.mean([r["w"] for r in reference.residues], 0) / 0.2
    np.testing.assert_allclose(sent + left, came, atol=1e-10)
    assert np.abs(left).max() > 0


def test_each_lane_sends_its_largest():
    lanes, values = Lanes(6401, 100), np.random.default_rng(0).standard_normal(6401)
    chosen = set(select(values, lanes, "lanes").tolist())
    for start, stride, length in zip(*lanes.starts_and_strides(), lanes.lengths(), strict=True):
        members = start + stride * np.arange(length)
        assert members[np.abs(values[members]).argmax()] in chosen


def test_exact_selection_takes_the_k_largest_and_the_first_of_equals():
    values = np.array([0.0, 3, -3, 1, 3, 0, -5, 0])
    assert select(values, Lanes(8, 4), "exact").tolist() == [1, 6]
    assert select(np.zeros(8), Lanes(8, 4), "exact").tolist() == [0, 1]


def test_a_step_sent_whole_only_has_to_be_finite():
    """No residue accumulates the gradients, and a look-ahead leader does not choose by them."""
    reference = ScaleComReference(1, SHAPES, settings(lookahead=True))
    grads = worker_gradients(1, 0)
    grads[0] = {name: grad.astype(np.float32) for name, grad in grads[0].items()}
    grads[0]["w"][3, 3] = 1e38
    assert reference.step(grads)["w"][3, 3] == np.float32(1e38)
    assert reference.step_number == 1
    # The residue is still zero, so the indices chosen by that gradient are sent now.
    reference.step([{name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}])
    grads[0]["w"][3, 3] = 0
    np.testing.assert_array_equal(
        reference.selections["w"], select(grads[0]["w"].reshape(-1), Lanes(2000, 10), "lanes")
    )


@pytest.mark.parametrize(("levels", "reach"), [(1, 1), (3, 2), (7, 3.5), (15, 7.5), (127, 7.9)])
def test_more_bits_reach_further(levels, reach):
    """The largest integer stands for `reach` times the mean.

    Smaller values are right to within half a scale.
    """
    values = np.ones(512, np.float32)
    values[:50] = np.linspace(0, 12, 50)
    values /= values.mean()
    scale = scales(values, levels)
    found = integers(values, scale, levels) * scale
    assert found.max() == pytest.approx(reach, rel=0.01)
    inside = values <= 0.99 * reach
    assert inside.sum() > 400
    assert np.abs(found - values)[inside].max() <= 0.5 * scale[0]
