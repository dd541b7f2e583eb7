"""The methods other than ScaleCom, in one process.

Tests cover their parts separately, and compare any number of simulated ranks with the oracle.
"""

import functools

import numpy as np
import pytest
import torch
from oracles import methods as oracle
from parallel.made_up import gradients

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.methods.g_top_k import merge
from scalecom_hvd.exchange.methods.local_top_k import pack, unpack
from scalecom_hvd.exchange.methods.random_k import draw
from scalecom_hvd.exchange.quantisers import generator
from scalecom_hvd.exchange.simulator import Simulation
from scalecom_hvd.lanes import Lanes, Positions

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "scalar": ()}
BUCKETS = [["scalar", "first", "bias"], ["second"]]

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


# RandomK's draw.


@pytest.mark.parametrize(
    ("numel", "rate"),
    [
        (1, 100),
        (63, 10),
        (65, 10),
        (640, 10),
        (641, 10),
        (701, 10),
        (1000, 7),
        (999, 2.5),
        (50, 1000),
    ],
)
def test_a_draw_hits_every_lane_once_and_reaches_every_element(numel, rate):
    lanes, random = Lanes(numel, rate), torch.Generator().manual_seed(1)
    starts, strides = lanes.starts_and_strides()
    lane_of = np.full(numel, -1)
    for lane in range(lanes.k):
        end = lanes.full_lanes * lanes.rows if lane < lanes.full_lanes else numel
        members = np.arange(starts[lane], end, strides[lane])[: lanes.rows]
        lane_of[members] = lane
    assert (lane_of >= 0).all()
    hits = np.zeros(numel, int)
    draws = 60 * lanes.rows if numel > 50 else 600
    for _ in range(draws):
        places = draw(lanes, random).numpy()
        assert np.array_equal(lane_of[places], np.arange(lanes.k))
        hits[places] += 1
    expected = draws / np.bincount(lane_of)[lane_of]
    assert (np.abs(hits - expected) <= 6 * np.sqrt(expected)).all()


def test_an_exact_draw_is_any_places_without_repeats():
    random, hits = torch.Generator().manual_seed(1), np.zeros(101, int)
    for _ in range(600):
        places = draw(Positions(101, 10), random).numpy()
        assert len(np.unique(places)) == 11
        hits[places] += 1
    assert (np.abs(hits - 600 * 11 / 101) <= 6 * np.sqrt(600 * 11 / 101)).all()


def test_numbers_drawn_depend_on_every_number_given():
    first = [torch.rand(1, generator=generator(*numbers)).item() for numbers in np.ndindex(3, 3, 3)]
    assert len(set(first)) == 27
    assert (
        torch.rand(1, generator=generator(-1, 2**40)).item()
        == torch.rand(1, generator=generator(-1, 2**40)).item()
    )


# What is sent.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_packed_values_and_bytes_come_back(count, dtype):
    payloads, wanted = [], []
    for i in range(3):
        values, more = torch.randn(count, dtype=dtype), torch.full((count,), i, dtype=torch.uint8)
        payloads.append(pack(values, more))
        wanted.append((values, more))
    for payload, (values, more) in zip(payloads, wanted, strict=True):
        theirs, rest = unpack(payload, values)
        assert torch.equal(theirs, values)
        assert torch.equal(rest, more)


@pytest.mark.parametrize("n", range(1, 9))
def test_gtopks_merge_gives_what_ranks_sent(n):
    """The paper's tree, spelled out. Indices overlap, are equal on all ranks, or values cancel."""
    k, numel = 5, 12
    for trial in range(24):
        random = np.random.default_rng([n, trial])
        places = [np.sort(random.permutation(numel)[:k]) for _ in range(n)]
        if trial % 4 == 0:
            places = [places[0]] * n
        values = [
            random.standard_normal(k) if trial % 3 else random.choice([-1.0, 1.0, 2.0], k)
            for _ in range(n)
        ]
        choices = [
            (torch.from_numpy(p), torch.from_numpy(v)) for p, v in zip(places, values, strict=True)
        ]
        merged = [merge(list(choices), k, rank) for rank in range(n)]
        (chosen, sums), _ = merged[0]
        assert len(chosen) == k
        assert len(set(chosen.tolist())) == k
        result, sent = np.zeros(numel), np.zeros(numel)
        result[chosen.numpy()] = sums.numpy()
        for rank, ((theirs, same), mine) in enumerate(merged):
            assert torch.equal(theirs, chosen)
            assert torch.equal(same, sums)
            assert set(mine.tolist()) <= set(places[rank].tolist()) & set(chosen.tolist())
            whole = np.zeros(numel)
            whole[places[rank]] = values[rank]
            sent[mine.numpy()] += whole[mine.numpy()]
        np.testing.assert_allclose(result, sent, atol=1e-12)
        if n == 1:
            assert torch.equal(merged[0][1], choices[0][0])


# Simulated ranks.

METHODS = {
    "RandomK": (functools.partial(hvd.RandomK, seed=7), lambda: oracle.random_k(drawn)),
    "LocalTopK": (hvd.LocalTopK, lambda: oracle.local_topk),
    "GTopK": (hvd.GTopK, lambda: oracle.gtopk),
    "GlobalTopK": (hvd.GlobalTopK, lambda: oracle.global_topk),
    "ECQSGD": (functools.partial(hvd.ECQSGD, seed=7), lambda: oracle.ecqsgd(4, uniform)),
}


def drawn(bucket):
    random = generator(7, bucket.step, bucket.number)
    return [draw(lanes, random).numpy() for lanes, _ in bucket.tensors]


def uniform(bucket, worker, shape):
    return torch.rand(shape, generator=generator(7, bucket.step, bucket.number, worker)).numpy()


def simulate(n, method, **fields):
    settings = {
        "rate": 20,
        "beta": 0.3,
        "min_numel": 0,
        "dense": ["bias"],
        "warmup_steps": 0,
        "groups": BUCKETS,
    } | fields
    return Simulation(
        n,
        lambda rank: {
            name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()
        },
        compression=method,
        **settings,
    )


def made_up(n, step):
    return [gradients(SHAPES, rank, step) for rank in range(n)]


def as_tensors(grads):
    return [
        {name: torch.from_numpy(array.copy()) for name, array in worker.items()} for worker in grads
    ]


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("name", METHODS)
def test_simulated_ranks_are_those_of_the_oracle(name, n):
    method, send = METHODS[name]
    simulation = simulate(n, method)
    reference = oracle.MethodReference(n, SHAPES, simulation.compressors[0].config, send(), BUCKETS)
    for step in range(12):
        everyone = made_up(n, step)
        if step in (3, 7):
            everyone[-1]["second"][1, 17] = np.nan
        outputs = simulation.step(as_tensors(everyone))
        averages = reference.step(everyone)
        for rank in range(n):
            for tensor, got in outputs[rank].items():
                np.testing.assert_array_equal(got.numpy(), outputs[0][tensor].numpy())
                np.testing.assert_allclose(
                    got.numpy(),
                    averages[tensor],
                    rtol=1e-6,
                    atol=1e-6,
                    err_msg=f"{tensor}, step {step}",
                )
            for tensor in simulation.compressors[rank].residues.tensors.values():
                want = reference.residues[rank].get(tensor.name, np.zeros(tensor.shape, np.float32))
                np.testing.assert_array_equal(
                    tensor.residue.view(tensor.shape).numpy(),
                    want,
                    err_msg=f"{tensor.name}, step {step}",
                )
    assert simulation.compressors[0].residues.buckets == BUCKETS
    assert reference.step_number == simulation.compressors[0].stats()["step"] == 10


@pytest.mark.parametrize("name", METHODS)
def test_two_simulations_give_the_same_bits(name):
    one, other = (simulate(3, METHODS[name][0]) for _ in range(2))
    for step in range(6):
        grads = made_up(3, step)
        for a, b in zip(one.step(as_tensors(grads)), other.step(as_tensors(grads)), strict=True):
            assert all(torch.equal(a[tensor], b[tensor]) for tensor in SHAPES)


@pytest.mark.parametrize("method", [hvd.RandomK, hvd.ECQSGD])
def test_another_seed_gives_other_numbers(method):
    outputs = [
        simulate(2, method, seed=seed).step(as_tensors(made_up(2, 0)))[0]["first"]
        for seed in (0, 1)
    ]
    assert not torch.equal(*outputs)


# Residues that fade.


@pytest.mark.parametrize("average", ["all", "contributors"])
@pytest.mark.parametrize("selection", ["lanes", "exact"])
def test_what_waits_fades_as_the_oracle_says(selection, average):
    method = functools.partial(hvd.LocalTopK, decay=0.75, average=average)
    simulation = simulate(3, method, beta=1.0, selection=selection)
    config = simulation.compressors[0].config
    by_contributors = average == "contributors"
    reference = oracle.MethodReference(
        3, SHAPES, config, oracle.local_topk, BUCKETS, 0.75, by_contributors
    )
    for step in range(12):
        everyone = made_up(3, step)
        if step in (3, 7):
            everyone[-1]["second"][1, 17] = np.nan
        outputs, averages = simulation.step(as_tensors(everyone))[1], reference.step(everyone)
        for name, got in outputs.items():
            np.testing.assert_allclose(got.numpy(), averages[name], 1e-5, 1e-5, err_msg=name)
        for name, tensor in simulation.compressors[1].residues.tensors.items():
            want = reference.residues[1].get(name, np.zeros(tensor.shape, np.float32)).reshape(-1)
            np.testing.assert_allclose(tensor.residue.numpy(), want, 1e-5, 1e-5, err_msg=name)


def test_a_frozen_tensors_residue_does_not_fade():
    simulation = simulate(2, functools.partial(hvd.LocalTopK, decay=0.5), beta=1.0)
    simulation.step(as_tensors(made_up(2, 0)))
    residue = simulation.compressors[0].residues.tensors["second"].residue
    before = residue.clone()
    for parameters in simulation.parameters:
        parameters["second"].requires_grad_(False)
    without = [{n: g for n, g in each.items() if n != "second"} for each in made_up(2, 1)]
    simulation.step(as_tensors(without))
    assert bool(before.any())
    assert torch.equal(residue, before)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"decay": 1.5, "beta": 1.0},
            ValueError,
            r"from 0 \(no residue is kept\) to 1 \(all of it is kept\)",
        ),
        ({"decay": "much", "beta": 1.0}, TypeError, "decay must be a number, not 'much'"),
        ({"decay": 0.9, "beta": 0.5}, ValueError, "exclude each other: give beta=1, not 0.5"),
        ({"average": "some"}, ValueError, 'average must be "all" or "contributors", not \'some\''),
    ],
)
def test_what_local_top_k_cannot_do(fields, error, message):
    with pytest.raises(error, match=message):
        hvd.LocalTopK(**fields)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"decay": 0}, "decay=None in the state and 0.0 now"),
        ({"average": "contributors"}, "average=None in the state and 'contributors' now"),
    ],
)
def test_another_decay_is_another_method(more, message):
    one, other = (
        simulate(2, functools.partial(hvd.LocalTopK, **own), beta=1.0) for own in ({}, more)
    )
    one.step(as_tensors(made_up(2, 0)))
    with pytest.raises(ValueError, match=message):
        other.compressors[0].load_state_dict(one.compressors[0].state_dict())
    other.step(as_tensors(made_up(2, 0)))
    with pytest.raises(ValueError, match="in the state and None now"):
        one.compressors[0].load_state_dict(other.compressors[0].state_dict())
