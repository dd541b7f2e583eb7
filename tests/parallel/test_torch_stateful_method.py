"""A method with state (tests/momentum.py) on real ranks.

Its state is saved, loaded, and undone with the step.
"""

import copy
import io

import numpy as np
import pytest
import torch
from faces import hvd
from models import SHAPES, assert_nothing_is_lost, feed, gradients, parameters, same_on_all_ranks
from momentum import Momentum

from scalecom_hvd.exchange.bucket_step import BucketStep


def make(model, lr=0.1, momentum=0.9, **settings):
    method = Momentum(
        **({"rate": 20, "min_numel": 100, "beta": 0.5, "bucket_bytes": 30_000} | settings)
    )
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr, momentum), model.items(), compression=method
    ), method


def run(optimizer, model, steps):
    for step in steps:
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()


def numbers(state):
    """All numbers in a method's state_dict()."""
    return (
        {"residues": state["residues"]}
        | state["method_state"]["tensors"]
        | state["method_state"]["method"]
    )


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def saved(model, optimizer, method):
    """Everything that training needs to go on, through a file."""
    file = io.BytesIO()
    values = {name: parameter.detach() for name, parameter in model.items()}
    torch.save(
        {"model": values, "optimizer": optimizer.state_dict(), "method": method.state_dict()}, file
    )
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(model, optimizer, state):
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(state["model"][name])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    optimizer.compression.load_state_dict(state["method"])


def test_nothing_is_lost():
    model = parameters(SHAPES)
    optimizer, method = make(model, lr=1.0, momentum=0.0, beta=1.0)
    run(optimizer, model, range(8))
    came = {
        name: sum(
            gradients(SHAPES, rank, s)[name].astype(np.float64)
            for rank in range(hvd.size())
            for s in range(8)
        )
        for name in SHAPES
    }
    assert_nothing_is_lost(model, method, came, hvd.size())
    assert len(method.residues.buckets) > 1, "each bucket gives a part of the state"
    state = numbers(method.state_dict())
    assert state["steps"] == 8
    everyone = hvd.allgather(torch.cat(list(state["momentum"].values()))[None])
    assert len({tuple(own.tolist()) for own in everyone}) == hvd.size(), (
        "each rank has momenta of its own"
    )


@pytest.mark.parametrize("where", ["a new optimizer", "in mid-run"])
def test_resuming_is_bit_identical(where):
    model = parameters(SHAPES)
    optimizer, method = make(model)
    run(optimizer, model, range(7))
    state = saved(model, optimizer, method)
    run(optimizer, model, range(7, 14))
    straight = saved(model, optimizer, method)

    if where == "a new optimizer":
        model = parameters(SHAPES)
        optimizer, method = make(model)
    load(model, optimizer, state)
    run(optimizer, model, range(7, 14))
    resumed = saved(model, optimizer, method)
    assert_equal(resumed["model"], straight["model"])
    assert_equal(numbers(resumed["method"]), numbers(straight["method"]))
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("why", ["a gradient is not finite", "a worker was lost"])
def test_a_step_that_does_not_count_is_undone(why, monkeypatch):
    """Training goes on as if the step had never been.

    It is equal to the bit, because residues do not change before a step counts.
    """
    model, other = parameters(SHAPES), parameters(SHAPES)
    (optimizer, method), (straight, reference) = make(model), make(other)
    run(optimizer, model, range(4))
    before = copy.deepcopy(numbers(method.state_dict()))

    optimizer.zero_grad()
    grads = gradients(SHAPES, hvd.rank(), 99)
    if why == "a gradient is not finite":
        if hvd.rank() == 1:
            grads["third"][17] = np.nan
        feed(model, grads)
        optimizer.synchronize()
        assert all(parameter.grad.isnan().all() for parameter in model.values())
    else:

        def lost(bucket):
            raise hvd.HorovodInternalError("a worker was lost")

        feed(model, grads)
        with monkeypatch.context() as patch, pytest.raises(hvd.HorovodInternalError):
            patch.setattr(BucketStep, "is_sound", lost)  # all is averaged, but nothing counts yet
            optimizer.synchronize()
        optimizer.load_state_dict(optimizer.state_dict())  # Horovod drops its handles
    assert_equal(numbers(method.state_dict()), before)

    run(optimizer, model, range(4, 9))
    run(straight, other, range(9))
    assert all(torch.equal(model[name], other[name]) for name in SHAPES)
    assert method.stats()["step"] == reference.stats()["step"] == 9
