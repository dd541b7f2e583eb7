"""Local steps of simulated ranks, with a schedule for each rank, compared with the oracle."""

import numpy as np
import pytest
import torch
from oracles import methods as oracle
from oracles.local_steps import LocalStepsReference
from parallel.made_up import gradients

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange import Simulation

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000)}
SETTINGS = {"bits": 32, "rate": 20, "min_numel": 100, "dense": [], "warmup_steps": 0}
METHODS = {"ScaleCom": oracle.leaders, "LocalTopK": oracle.own}
LR = 0.5


def simulate(ranks, compression=hvd.ScaleCom, **more):
    start = gradients(SHAPES, 99, 0)
    return Simulation(
        len(ranks),
        lambda rank: {
            name: torch.nn.Parameter(torch.from_numpy(value.copy()))
            for name, value in start.items()
        },
        compression=compression,
        local_steps=ranks,
        **(SETTINGS | more),
    )


def descend(simulation, everyone):
    """Take a step of plain SGD on each rank, with the rank's own gradients."""

    def take(rank):
        with torch.no_grad():
            for name, parameter in simulation.parameters[rank].items():
                parameter.sub_(torch.from_numpy(everyone[rank][name]), alpha=LR)
        return rank

    ranks = range(len(everyone))
    assert simulation.take_steps([lambda rank=rank: take(rank) for rank in ranks]) == list(ranks)


def sgd(worker, values, grads):
    return {name: value - np.float32(LR) * grads[name] for name, value in values.items()}


@pytest.mark.parametrize("beta", [1.0, 0.25])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [[2, 3], [4, 1, 2, 3]], ids=str)
def test_each_rank_synchronises_after_steps_of_its_own(ranks, name, beta):
    simulation, n = simulate(ranks, getattr(hvd, name), beta=beta), len(ranks)
    config = simulation.compressors[0].config
    exchange = oracle.MethodReference(n, SHAPES, config, oracle.sending(METHODS[name]))
    start = gradients(SHAPES, 99, 0)
    reference = LocalStepsReference(exchange, start, ranks, sgd)
    for step in range(30):
        everyone = [gradients(SHAPES, rank, step) for rank in range(n)]
        descend(simulation, everyone)
        reference.step(everyone)
        for rank, parameters in enumerate(simulation.parameters):
            for which, parameter in parameters.items():
                want = reference.workers[rank][which]
                np.testing.assert_allclose(parameter.detach().numpy(), want, 1e-5, 1e-5)
            for which, tensor in simulation.compressors[rank].residues.tensors.items():
                want = exchange.residues[rank].get(which, np.zeros(SHAPES[which])).reshape(-1)
                np.testing.assert_allclose(tensor.residue.numpy(), want, 1e-4, 1e-4)
    assert simulation.compressors[0].stats()["step"] == exchange.step_number
    simulation.synchronise()
    for which, parameter in simulation.parameters[0].items():
        for other in simulation.parameters[1:]:
            torch.testing.assert_close(parameter, other[which])


def test_every_rank_leads():
    simulation, leaders = simulate([1, 1, 2, 2]), set()
    for step in range(60):
        descend(simulation, [gradients(SHAPES, rank, step) for rank in range(4)])
        leaders.add(simulation.compressors[0].stats()["leader"])
    assert leaders == {0, 1, 2, 3}


def test_a_warm_up_is_counted_in_steps():
    simulation, rates = simulate([2, 3], warmup_steps=6), []
    for step in range(12):
        descend(simulation, [gradients(SHAPES, rank, step) for rank in range(2)])
        rates.append(simulation.compressors[0].stats()["rate"])
    assert set(rates[1:7]) == {1.0}
    assert set(rates[7:]) == {simulation.compressors[0].stats()["rate"]} != {1.0}


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        ([2, 2], {"lookahead": True}, "lookahead does not work with a list of local_steps"),
        ([2, 2], {"overlap": 1}, "a list of local_steps excludes outer"),
        ([2, 0], {}, "must list one number of steps .* for each of the 2 ranks"),
    ],
)
def test_what_cannot_work_is_refused(ranks, more, message):
    with pytest.raises(ValueError, match=message):
        simulate(ranks, **more)


def test_real_ranks_have_one_schedule():
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"local_steps must be a number of steps.*not \[2, 3\]"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("w", weight)], hvd.ScaleCom, local_steps=[2, 3]
        )
