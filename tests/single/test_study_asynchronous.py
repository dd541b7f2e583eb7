"""The study's local steps with a schedule for each rank, compared with the oracle."""

import functools

import numpy as np
import pytest
import torch
from oracles import methods as oracle
from oracles.local_steps import LocalStepsReference
from parallel.made_up import gradients
from study_asynchronous import AsynchronousRanks

import scalecom_hvd.torch as hvd

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000)}
SETTINGS = {"bits": 32, "rate": 20, "beta": 0.25, "min_numel": 100}
LR = 0.5


def begin(rank):
    start = gradients(SHAPES, 99, 0)
    return {n: torch.nn.Parameter(torch.from_numpy(value.copy())) for n, value in start.items()}


def sgd(worker, values, grads):
    return {name: value - np.float32(LR) * grads[name] for name, value in values.items()}


@pytest.mark.parametrize("ranks", [[2, 3], [4, 1, 2, 3]], ids=str)
def test_each_rank_synchronises_after_steps_of_its_own(ranks):
    simulation, n = AsynchronousRanks(ranks, begin, hvd.ScaleCom, **SETTINGS), len(ranks)
    method = simulation.methods[0]
    exchange = oracle.MethodReference(n, SHAPES, method.config, oracle.sending(oracle.leaders))
    reference = LocalStepsReference(exchange, gradients(SHAPES, 99, 0), ranks, sgd)

    def take(rank, grads):
        with torch.no_grad():
            for name, parameter in simulation.parameters[rank].items():
                parameter.sub_(torch.from_numpy(grads[name]), alpha=LR)

    leaders = set()
    for step in range(30):
        everyone = [gradients(SHAPES, rank, step) for rank in range(n)]
        simulation.take_steps([functools.partial(take, i, everyone[i]) for i in range(n)])
        reference.step(everyone)
        for rank, parameters in enumerate(simulation.parameters):
            for name, parameter in parameters.items():
                want = reference.workers[rank][name]
                np.testing.assert_allclose(parameter.detach().numpy(), want, 1e-5, 1e-5)
        leaders.add(method.stats()["leader"])
    assert method.stats()["step"] == exchange.step_number
    assert leaders == set(range(n))
    simulation.synchronise()
    for name, parameter in simulation.parameters[0].items():
        for other in simulation.parameters[1:]:
            torch.testing.assert_close(parameter, other[name])


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        ([2, 2], {"lookahead": True}, "leave lookahead out"),
        ([2, 0], {}, "one number of steps .* for each of the 2 ranks"),
    ],
)
def test_what_cannot_work_is_refused(ranks, more, message):
    with pytest.raises(ValueError, match=message):
        AsynchronousRanks(ranks, begin, hvd.ScaleCom, **SETTINGS, **more)
