"""A method with state (tests/momentum.py) on real ranks.

Its state is saved, loaded, and undone with the step.
"""

import copy
import io

import numpy as np
import pytest
import torch
from faces import hvd
from models import (
    SHAPES,
    assert_nothing_is_lost,
    came_in,
    feed,
    gradients,
    parameters,
    same_on_all_ranks,
)
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


def numbers(method):
    """Copies of all numbers in a method's state_dict()."""
    state = copy.deepcopy(method.state_dict())
    return [state["residues"], state["method_state"]]


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nothing_is_lost():
    model = parameters(SHAPES)
    optimizer, method = make(model, lr=1.0, momentum=0.0, beta=1.0, mu=0.0)
    run(optimizer, model, range(8))
    assert_nothing_is_lost(model, method, came_in(range(hvd.size()), range(8)), hvd.size())
    assert len(method.residues.buckets) > 1, "each bucket gives a part of the state"
    _, state = numbers(method)
    assert state["method"]["steps"] == 8
    everyone = hvd.allgather(torch.cat(list(state["tensors"]["velocity"].values()))[None])
    assert len({tuple(own.tolist()) for own in everyone}) == hvd.size(), (
        "each rank has velocities of its own"
    )


@pytest.mark.parametrize("where", ["a new optimizer", "in mid-run"])
def test_resuming_is_bit_identical(where):
    model = parameters(SHAPES)
    optimizer, method = make(model)
    run(optimizer, model, range(7))
    file = io.BytesIO()
    values = {name: parameter.detach() for name, parameter in model.items()}
    torch.save([values, optimizer.state_dict(), method.state_dict()], file)
    run(optimizer, model, range(7, 14))
    straight = copy.deepcopy(model), numbers(method)

    if where == "a new optimizer":
        model = parameters(SHAPES)
        optimizer, method = make(model)
    file.seek(0)
    values, momentum, state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(values[name])
    optimizer.load_state_dict(momentum)
    method.load_state_dict(state)
    run(optimizer, model, range(7, 14))
    assert_equal((model, numbers(method)), straight)
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("why", ["a gradient is not finite", "a worker was lost"])
def test_a_step_that_does_not_count_is_undone(why, monkeypatch):
    """Training goes on as if the step had never been.

    It is equal to the bit, because residues do not change before a step counts.
    """
    model, other = parameters(SHAPES), parameters(SHAPES)
    (optimizer, method), (straight, reference) = make(model), make(other)
    run(optimizer, model, range(4))
    before = numbers(method)

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
        _, state = before  # what must be equal on all ranks begins anew
        state["method"]["steps"] = 0
        state["tensors"]["sent"] = {n: s * 0 for n, s in state["tensors"]["sent"].items()}
    assert_equal(numbers(method), before)

    run(optimizer, model, range(4, 9))
    run(straight, other, range(9))
    assert all(torch.equal(model[name], other[name]) for name in SHAPES)
    assert method.stats()["step"] == reference.stats()["step"] == 9
