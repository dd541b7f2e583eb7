"""Every number of the diagnostics is compared with its definition.

The definition is computed independently, on the whole model. Further tests cover what a user may
ask for.
"""

import itertools

import numpy as np
import pytest
import simulated
from parallel.made_up import gradients
from simulated import as_tensors, assert_same

import scalecom_hvd.torch as hvd
from scalecom_hvd.diagnostics import Piece, draw, look
from scalecom_hvd.lanes import geometry
from scalecom_hvd.reference import select

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (6401,)}
SETTINGS = {"rate": 20, "beta": 0.3, "min_numel": 100}

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


def simulate(n, compression=hvd.ScaleCom, shapes=SHAPES, **fields):
    return simulated.simulate(n, shapes, compression=compression, **(SETTINGS | fields))


def alike(n, step, shapes=SHAPES):
    """Return gradients with a common part, so that no number comes from pure noise."""
    common = gradients(shapes, 1000, step)
    return [
        {name: common[name] + noise for name, noise in gradients(shapes, rank, step).items()}
        for rank in range(n)
    ]


def residues_of(simulation):
    residues = simulated.residues_of(simulation)
    return [{name: residue.numpy() for name, residue in own.items()} for own in residues]


def seen(simulation):
    """Return the diagnostics, which must be the same on all ranks."""
    numbers = [compressor.stats()["diagnostics"] for compressor in simulation.compressors]
    assert all(other == numbers[0] for other in numbers)
    return numbers[0]


def check(got, want):
    assert got.keys() == want.keys()
    for name in want:
        if want[name] is None:
            assert got[name] is None, name
        else:
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def mean_distance(vectors):
    pairs = itertools.combinations(vectors, 2)
    return np.mean([1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs])


def by_definition(step, before, grads, averages, after, config):
    """Compute all numbers, tensor by tensor and pair by pair."""
    names = list(before[0])
    n = len(before)
    m = [{name: residues[name].astype(np.float64) for name in names} for residues in before]
    g = [{name: worker[name].reshape(-1).astype(np.float64) for name in names} for worker in grads]
    acc = [{name: m[i][name] + g[i][name] for name in names} for i in range(n)]
    y = {name: sum(acc[i][name] for i in range(n)) / n for name in names}
    s = {name: averages[name].reshape(-1).astype(np.float64) for name in names}
    beta = config.beta
    sent = [
        {name: acc[i][name] - (after[i][name] - (1 - beta) * m[i][name]) / beta for name in names}
        for i in range(n)
    ]

    missed, k, left, left_by_top, union = 0, 0, 0.0, 0.0, 0
    for name in names:
        chosen = set(np.flatnonzero(s[name]))
        best = set(np.argsort(-np.abs(y[name]), kind="stable")[: len(chosen)])
        missed, k = missed + len(chosen - best), k + len(chosen)
        left += sum((y[name] - s[name]) ** 2)
        rest = (place for place in range(y[name].size) if place not in best)
        left_by_top += sum(y[name][place] ** 2 for place in rest)
        lanes = geometry(y[name].size, config.rate, config.selection)
        own = [select(acc[i][name].astype(np.float32), lanes, config.selection) for i in range(n)]
        union += len(set().union(*own))

    def flat(arrays):
        return np.concatenate([arrays[name] for name in names])

    whole = sum(flat(y) ** 2)
    norms = [np.linalg.norm(flat(m[i])) for i in range(n)]
    comparable = n > 1 and norms[0] > 0
    gradient = np.linalg.norm(sum(flat(g[i]) for i in range(n)) / n)
    return {
        "step": step,
        "residue_distance": mean_distance(map(flat, m)) if comparable else None,
        "distance_to_top_k": missed / k,
        "contraction": left / whole,
        "contraction_top_k": left_by_top / whole,
        "energy_sent": np.mean(
            [sum(flat(sent[i]) ** 2) / sum(flat(acc[i]) ** 2) for i in range(n)]
        ),
        "residue_norm_mean": np.mean(norms),
        "residue_norm_ratio": np.mean(norms) / gradient,
        "union_density": union / flat(y).size,
        "sent_density": k / flat(y).size,
    }


@pytest.mark.parametrize(
    ("n", "compression", "fields"),
    [
        (1, hvd.ScaleCom, {}),
        (2, hvd.ScaleCom, {}),
        (11, hvd.ScaleCom, {}),
        (3, hvd.ScaleCom, {"lookahead": True, "leader": "staggered", "bucket_bytes": 10_000}),
        (3, hvd.ScaleCom, {"selection": "exact", "bits": 32}),
        (1, hvd.LocalTopK, {}),
        (3, hvd.LocalTopK, {}),
        (3, hvd.LocalTopK, {"selection": "exact", "beta": 1.0}),
        (3, hvd.RandomK, {"beta": 1.0}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_every_number_is_what_its_definition_says(n, compression, fields):
    simulation = simulate(n, compression, diagnostics=2, **fields)
    config = simulation.compressors[0].config
    for step in range(5):
        grads = alike(n, step)
        before = residues_of(simulation)
        averages = simulation.step(as_tensors(grads))[0]
        if step == 0 and config.lookahead:
            assert seen(simulation) is None  # this step is uncompressed
        elif step % 2 == 0:
            averages = {name: average.numpy() for name, average in averages.items()}
            check(
                seen(simulation),
                by_definition(step, before, grads, averages, residues_of(simulation), config),
            )
        else:
            assert seen(simulation) is None or seen(simulation)["step"] == step - 1
    if compression is hvd.LocalTopK:
        assert seen(simulation)["union_density"] == seen(simulation)["sent_density"]


def test_sums_loss_scales_late_and_frozen_gradients():
    """The numbers are those of averages in unscaled units.

    Missing gradients count as zeros. Frozen tensors do not count at all.
    """
    plain = simulate(3, diagnostics=1)
    scaled = simulate(3, diagnostics=1, loss_scale=lambda: 4.0, sums=True)
    for simulation in (plain, scaled):
        for parameters in simulation.parameters:
            parameters["second"].requires_grad_(False)
    for step in range(4):
        grads = alike(3, step)
        del grads[1]["third"]
        for worker in grads:
            worker["second"] = np.ones(SHAPES["second"], np.float32)
        plain.step(as_tensors(grads))
        scaled.step(as_tensors(grads, scale=4))
        check(seen(scaled), seen(plain))
    frozen = {"second": np.zeros(3000, np.float32)}
    before = [residues | frozen for residues in residues_of(plain)]
    grads = [worker | {"second": np.zeros(SHAPES["second"], np.float32)} for worker in alike(3, 4)]
    averages = {name: average.numpy() for name, average in plain.step(as_tensors(grads))[0].items()}
    after = [residues | frozen for residues in residues_of(plain)]
    want = by_definition(4, before, grads, averages, after, plain.compressors[0].config)
    check(seen(plain), want)


def test_void_steps_and_the_warm_up_are_not_looked_at():
    simulation, looked_at = simulate(2, diagnostics=2, warmup_steps=1), []
    for step, value in enumerate((0.0, 0.0, 0.0, 0.0, np.nan, 0.0)):
        grads = alike(2, step)
        grads[1]["first"][3, 3] += value
        simulation.step(as_tensors(grads))
        looked_at.append((seen(simulation) or {}).get("step"))
    # The fifth step does not count, so the sixth is number 4.
    assert looked_at == [None, None, 2, 2, 2, 4]


@pytest.mark.parametrize(
    "fields",
    [{}, {"lookahead": True}, {"compression": hvd.LocalTopK}, {"compression": hvd.RandomK}],
    ids=str,
)
def test_looking_changes_nothing(fields):
    watched, alone = simulate(3, diagnostics=1, **fields), simulate(3, **fields)
    for step in range(6):
        assert_same(*(each.step(as_tensors(alike(3, step))) for each in (watched, alone)))
    assert_same(*map(simulated.residues_of, (watched, alone)))
    got, want = watched.compressors[0].stats(), alone.compressors[0].stats()
    assert "diagnostics" not in want
    assert {name: number for name, number in got.items() if name != "diagnostics"} == want


@pytest.mark.parametrize("selection", ["lanes", "exact"])
@pytest.mark.parametrize("rate", [7, 100, 2.5])
def test_the_sample_is_of_whole_lanes_in_proportion_to_sizes(selection, rate, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.diagnostics.SAMPLE", 6000)
    tensors = {
        "b": geometry(50_001, rate, selection),
        "a": geometry(12_000, rate, selection),
        "tiny": geometry(130, rate, selection),
    }
    pieces = draw(tensors)
    assert list(pieces) == ["a", "b", "tiny"]
    again = draw(dict(reversed(tensors.items())))
    for name, piece in pieces.items():
        lanes = tensors[name]
        assert np.array_equal(piece.positions, again[name].positions)
        assert np.unique(piece.positions).size == piece.positions.size
        assert piece.positions.min() >= 0
        assert piece.positions.max() < lanes.numel
        assert piece.positions.size == pytest.approx(
            6000 * lanes.numel / 62_131, rel=0.02, abs=2 * rate
        )
        if selection == "exact":
            assert piece.k == max(round(piece.positions.size / rate), 1)
            continue
        starts, strides = lanes.starts_and_strides()
        of_lane = {
            tuple(range(start, lanes.numel, stride)[: lanes.rows])
            for start, stride in zip(starts, strides, strict=True)
        }
        ends = np.cumsum(piece.lengths)
        for lane in np.split(piece.positions, ends[:-1]):
            assert tuple(lane) in of_lane
    monkeypatch.setattr("scalecom_hvd.diagnostics.SAMPLE", 62_131)
    everything = draw(tensors)
    assert all(
        sorted(piece.positions) == list(range(tensors[name].numel))
        for name, piece in everything.items()
    )


def test_equals_count_as_chosen_well_as_far_as_they_can():
    piece = Piece(np.arange(4), None, 1)
    accumulators = np.array([[3.0, 1, 1, 0]])

    def distance(average):
        numbers = look(np.zeros((1, 4)), accumulators, np.array(average), np.zeros(1), [piece])
        return numbers["distance_to_top_k"]

    assert distance([3.0, 1, 0, 0]) == 0
    assert distance([3.0, 0, 1, 0]) == 0
    assert distance([0.0, 1, 1, 0]) == 0.5
    assert distance([0.0, 1, 0, 0]) == 1
    assert distance([0.0, 0, 0, 0]) is None


def test_nothing_but_zeros():
    pieces = [Piece(np.arange(4), np.array([2, 2]), 2)]
    numbers = look(np.zeros((2, 4)), np.zeros((2, 4)), np.zeros(4), np.full(2, np.nan), pieces)
    for name in ("residue_distance", "distance_to_top_k", "contraction", "energy_sent"):
        assert numbers[name] is None
    assert numbers["sent_density"] == 0


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (0, ValueError, "at least 1, not 0"),
        (-1, ValueError, "at least 1, not -1"),
        (True, TypeError, "a whole number, not True"),
        ("often", TypeError, "a whole number, not 'often'"),
        (2.5, TypeError, "a whole number, not 2.5"),
    ],
)
@pytest.mark.parametrize("kind", [hvd.ScaleCom, hvd.RandomK])
def test_what_is_refused(kind, wrong, error, words):
    with pytest.raises(error, match=f"diagnostics must be {words}"):
        kind(diagnostics=wrong)
