"""The methods other than ScaleCom, in one process.

Tests cover their parts separately, compare any number of simulated ranks with the oracle, and hold
settings and states of one method against those of another.
"""

import functools
import itertools
import re

import numpy as np
import pytest
import torch
from oracles import methods as oracle
from parallel.made_up import SHAPES
from parallel.rules import sending
from simulated import as_tensors, made_up, residues_of, simulate, step_as

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.methods.random_k import draw, generator
from scalecom_hvd.lanes import Lanes, Positions

SETTINGS = {"rate": 20, "beta": 0.3, "min_numel": 0, "dense": ["bias"], "warmup_steps": 0}
SETTINGS |= {"groups": [["third", "first", "bias"], ["second"]]}

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


# RandomK's draw.


def assert_spread(hits, expected):
    assert (np.abs(hits - expected) <= 6 * np.sqrt(expected)).all()


@pytest.mark.parametrize("numel", [1, 50, 63, 65, 640, 641, 701, 999])
@pytest.mark.parametrize("rate", [2.5, 10, 100])
def test_a_draw_hits_every_lane_once_and_reaches_every_element(numel, rate):
    lanes, random = Lanes(numel, rate), torch.Generator().manual_seed(1)
    every_lane = zip(*lanes.starts_and_strides(), lanes.lengths(), strict=True)
    lane_of = np.full(numel, -1)
    for lane, (start, stride, length) in enumerate(every_lane):
        lane_of[start + stride * np.arange(length)] = lane
    assert (lane_of >= 0).all()
    hits, draws = np.zeros(numel, int), 60 * lanes.rows
    for _ in range(draws):
        places = draw(lanes, random).numpy()
        assert np.array_equal(lane_of[places], np.arange(lanes.k))
        hits[places] += 1
    assert_spread(hits, draws / np.bincount(lane_of)[lane_of])


def test_an_exact_draw_is_any_places_without_repeats():
    random, hits = torch.Generator().manual_seed(1), np.zeros(101, int)
    for _ in range(600):
        places = draw(Positions(101, 10), random).numpy()
        assert len(np.unique(places)) == 11
        hits[places] += 1
    assert_spread(hits, 600 * 11 / 101)


def test_numbers_drawn_depend_on_every_number_given():
    def first(*numbers):
        return torch.rand(1, generator=generator(*numbers)).item()

    assert len({first(*numbers) for numbers in np.ndindex(3, 3, 3)}) == 27
    assert first(-1, 2**40) == first(-1, 2**40)


# Simulated ranks.


METHODS = {
    "RandomK": functools.partial(hvd.RandomK, seed=7),
    "LocalTopK": hvd.LocalTopK,
}


def some(n, method, **fields):
    return simulate(n, compression=method, **(SETTINGS | fields))


def hold_to_the_oracle(n, method, *how, tolerance=1e-6, of_residues=0.0, **fields):
    """Compare averages and residues; `how` is what else MethodReference takes."""
    simulation = some(n, method, **fields)
    compressor, buckets = simulation.compressors[0], SETTINGS["groups"]
    reference = oracle.MethodReference(
        n, SHAPES, compressor.config, sending(compressor), buckets, *how
    )
    for step in range(12):
        everyone = made_up(n, step)
        if step in (3, 7):
            everyone[-1]["second"][1, 17] = np.nan
        step_as(reference, simulation, everyone, tolerance, of_residues, of_residues)
    assert simulation.compressors[0].residues.buckets == buckets
    assert reference.step_number == 10


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("name", METHODS)
def test_simulated_ranks_are_those_of_the_oracle(name, n):
    hold_to_the_oracle(n, METHODS[name])


@pytest.mark.parametrize("average", ["all", "contributors"])
@pytest.mark.parametrize("selection", ["lanes", "exact"])
def test_what_waits_fades_as_the_oracle_says(selection, average):
    fields = {"beta": 1.0, "selection": selection, "tolerance": 1e-5, "of_residues": 1e-5}
    method = functools.partial(hvd.LocalTopK, decay=0.75, average=average)
    hold_to_the_oracle(3, method, 0.75, average == "contributors", **fields)


@pytest.mark.parametrize("average", ["all", "contributors"])
def test_a_sum_is_the_average_times_the_number_of_ranks(average):
    """Also where averages are over fewer ranks: op=Sum does not change which way training goes."""
    method = functools.partial(hvd.LocalTopK, average=average)
    averages, sums = (
        some(3, method, sums=sums).step(as_tensors(made_up(3, 0)))[0] for sums in (False, True)
    )
    for name in SHAPES:
        torch.testing.assert_close(sums[name], 3 * averages[name])


def test_ranks_that_send_zeros_do_not_contribute():
    """The second rank chooses the first of 8 elements of each lane. Some are the first rank's."""
    method = functools.partial(hvd.LocalTopK, average="contributors")
    simulation = simulate(2, {"weight": (64,)}, compression=method, rate=8, min_numel=0)
    gradient, places = torch.arange(64.0), [0, 1, 2, 3, 60, 61, 62, 63]
    gradient[:4] = 100
    sent = torch.zeros(64)
    sent[places] = gradient[places]
    averages, _ = simulation.step([{"weight": gradient}, {"weight": torch.zeros(64)}])
    assert torch.equal(averages["weight"], sent)


def test_a_frozen_tensors_residue_does_not_fade():
    simulation = some(2, functools.partial(hvd.LocalTopK, decay=0.5), beta=1.0)
    simulation.step(as_tensors(made_up(2, 0)))
    before = residues_of(simulation)[0]["second"]
    for parameters in simulation.parameters:
        parameters["second"].requires_grad_(False)
    averages = simulation.step([own | {"second": None} for own in as_tensors(made_up(2, 1))])
    assert before.any()
    assert not averages[0]["second"].any()
    assert torch.equal(residues_of(simulation)[0]["second"], before)
    averages = simulation.step(as_tensors(made_up(2, 2)))  # the script gives it a gradient
    assert averages[0]["second"].any()


# What is refused.

KINDS = hvd.RandomK, hvd.LocalTopK, hvd.ScaleCom
DIFFERENT = [
    ((one, {}), (other, {}), "method", one.__name__, other.__name__)
    for one, other in itertools.combinations(KINDS, 2)
]
DIFFERENT += [
    ((method, {}), (method, {what: value}), what, before, shown)
    for method, what, value, before, shown in (
        (hvd.RandomK, "seed", 5, 0, 5),
        (hvd.RandomK, "beta", 0.5, 1.0, 0.5),
        (hvd.RandomK, "min_numel", 9, 0, 9),
        (hvd.LocalTopK, "decay", 0, None, 0.0),
        (hvd.LocalTopK, "average", "contributors", None, "contributors"),
        (hvd.LocalTopK, "quantiser", hvd.BinMeans, None, "BinMeans(block=512)"),
    )
]


@pytest.mark.parametrize(("one", "other", "what", "a", "b"), DIFFERENT)
def test_what_differs_between_states_or_ranks_is_refused(one, other, what, a, b):
    def make(**settings):
        method, fields = next(methods)
        return method(**(settings | fields))

    methods = iter([one, one, other, other, one, other, other, one])
    same, others, mixed, turned = (some(2, make, beta=1.0) for _ in range(4))
    for simulation in (same, others):
        simulation.step(as_tensors(made_up(2, 0)))
    for here, there, mine, theirs in ((same, others, a, b), (others, same, b, a)):
        message = re.escape(f"{what}={theirs!r} in the state and {mine!r} now")
        with pytest.raises(ValueError, match=f"made (by another|with other) .*{message}"):
            here.compressors[0].load_state_dict(there.compressors[0].state_dict())
    for simulation, first, second in ((mixed, a, b), (turned, b, a)):
        first, second = ("missing" if each is None else each for each in (first, second))
        message = f"{what} is {first} on rank 0 and {second} on rank 1"
        with pytest.raises(RuntimeError, match=f"settings differ.*{re.escape(message)}"):
            simulation.step(as_tensors(made_up(2, 0)))


REFUSED = [
    (ValueError, hvd.LocalTopK, {"decay": 1.5, "beta": 1.0}, r"from 0 \(no residue is kept\) to 1"),
    (ValueError, hvd.LocalTopK, {"decay": -0.5, "beta": 1.0}, "to 1 .*, not -0.5"),
    (TypeError, hvd.LocalTopK, {"decay": "much", "beta": 1}, "must be a number, not 'much'"),
    (ValueError, hvd.LocalTopK, {"decay": 0.9, "beta": 0.5}, "each other: give beta=1, not 0.5"),
    (ValueError, hvd.LocalTopK, {"average": "some"}, '"all" or "contributors", not \'some\''),
    (ValueError, hvd.LocalTopK, {"rat": 3}, "did you mean"),
    (ValueError, hvd.RandomK, {"shared": False}, "all ranks draw the same indices: leave it out"),
]
MEANT = {"lookahead": True, "leader": "staggered", "selection": "exact"}
REFUSED += [
    (ValueError, method, {setting: value}, f"{setting} means nothing to {method.__name__}")
    for method in KINDS
    for setting, value in MEANT.items()
    if setting not in method.uses
]


@pytest.mark.parametrize(("error", "method", "fields", "message"), REFUSED)
def test_settings_that_cannot_work_or_mean_nothing_are_refused(error, method, fields, message):
    with pytest.raises(error, match=message):
        method(**fields)


@pytest.mark.parametrize("method", KINDS[:-1])
def test_a_variable_that_means_nothing_is_named(method, monkeypatch):
    monkeypatch.setenv("SCALECOM_LOOKAHEAD", "true")
    with pytest.raises(ValueError, match="lookahead means nothing.*unset SCALECOM_LOOKAHEAD"):
        method()
