"""A script throws averages away: no step of its optimizer uses them.

With this package's optimizers, residues become what they were before. With Horovod's own one, a
warning says what is lost.
"""

import logging

import pytest
import torch
from faces import hvd, in_every_library, stock
from models import same_on_all_ranks
from test_torch_changed_gradients import refuses
from thrown_away import (
    SHAPES,
    add,
    assert_nothing_is_lost,
    assert_warned_if_something_is_lost,
    average,
    mine,
    warnings,
)


def make(library, **settings):
    """Parameters of zeros, plain SGD with learning rate 1, and the compressor."""
    model = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    named = {"named_parameters": model.items()} if library is stock else {}
    every = {"rate": 10, "beta": 1.0, "dense": ["bias"], "min_numel": 2, "outliers": None}
    compressor = hvd.ScaleCom(**named, **(every | settings))
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=1.0), model.items(), compression=compressor
    )
    return model, optimizer, compressor


def backward(model, number):
    """Run backward. Return the average of the gradients over ranks."""
    own = mine(number)
    sum((p * own[name]).sum() for name, p in model.items()).backward()
    return average(number)


def sharpness_aware(model, optimizer, step, real, thrown_away):
    """SAM: the first average only says where to take the gradient that the step uses."""
    add(thrown_away, backward(model, 2 * step))
    optimizer.synchronize()
    where = {name: p.detach().clone() for name, p in model.items()}
    with torch.no_grad():
        for parameter in model.values():
            parameter.add_(parameter.grad, alpha=0.01)
    optimizer.zero_grad()
    add(real, backward(model, 2 * step + 1))
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(where[name])
    optimizer.step()


def skipped(model, optimizer, step, real, thrown_away):
    """Large models' scripts skip a step if its gradient is too long."""
    came = backward(model, step)
    optimizer.synchronize()
    if step % 3 == 2:
        add(thrown_away, came)
        return
    add(real, came)
    with optimizer.skip_synchronize():
        optimizer.step()


def set_to_none(model, optimizer, step, real, thrown_away):
    add(thrown_away, backward(model, 2 * step))
    optimizer.synchronize()
    for parameter in model.values():
        parameter.grad = None
    add(real, backward(model, 2 * step + 1))
    optimizer.step()


def set_to_zero(model, optimizer, step, real, thrown_away):
    add(thrown_away, backward(model, 2 * step))
    optimizer.synchronize()
    for parameter in model.values():
        parameter.grad.zero_()
    add(real, backward(model, 2 * step + 1))
    optimizer.step()


SCRIPTS = [sharpness_aware, skipped, set_to_none, set_to_zero]


def take_steps(library, caplog, script, steps):
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, optimizer, compressor = make(library)
    real, thrown_away = {}, {}
    for step in range(steps):
        optimizer.zero_grad()
        script(model, optimizer, step, real, thrown_away)
    assert same_on_all_ranks(model.values())
    return model, compressor, real, thrown_away


@pytest.mark.parametrize("script", SCRIPTS)
@in_every_library
def test_averages_that_no_step_uses(library, script, caplog):
    model, compressor, real, thrown_away = take_steps(library, caplog, script, 10)
    if library is hvd:
        assert_nothing_is_lost(model, compressor.residues.tensors, real, caplog)
        assert compressor.stats()["averages_thrown_away"] == (3 if script is skipped else 10)
    else:
        assert_warned_if_something_is_lost(
            model, compressor.residues.tensors, real, thrown_away, caplog
        )


def test_a_script_that_shows_late_what_it_does_is_warned(caplog):
    """Then there is no copy of the residues yet. From then on, there is one."""

    def late(model, optimizer, step, real, thrown_away):
        came = backward(model, step)
        optimizer.synchronize()
        if step in (15, 17):
            add(thrown_away, came)
            return
        add(real, came)
        with optimizer.skip_synchronize():
            optimizer.step()

    _, compressor, *_ = take_steps(hvd, caplog, late, 20)
    assert all(warnings(caplog))
    assert len([r for r in caplog.records if "no optimizer step used" in r.getMessage()]) == 1
    assert compressor.stats()["averages_thrown_away"] == 1


@in_every_library
def test_averages_that_are_replaced_by_those_of_the_step_itself(library, caplog):
    """Gradients set by hand are averaged in step(). Nobody knows whether they hold the old ones."""

    def script(model, optimizer, step, real, thrown_away):
        add(thrown_away, backward(model, 2 * step))
        optimizer.synchronize()
        for name, parameter in model.items():
            parameter.grad = mine(2 * step + 1)[name]
        add(real, average(2 * step + 1))
        optimizer.step()

    model, compressor, real, thrown_away = take_steps(library, caplog, script, 6)
    assert_warned_if_something_is_lost(
        model, compressor.residues.tensors, real, thrown_away, caplog
    )


@in_every_library
def test_averages_that_several_passes_add_up_are_used(library, caplog):
    """The script averages after every pass, and adds up what comes."""

    def script(model, optimizer, step, real, thrown_away):
        backward(model, 2 * step)
        optimizer.synchronize()
        backward(model, 2 * step + 1)
        add(real, average(2 * step))
        add(real, average(2 * step + 1))
        optimizer.step()

    model, compressor, real, _ = take_steps(library, caplog, script, 6)
    assert_nothing_is_lost(model, compressor.residues.tensors, real, caplog)


@in_every_library
def test_after_a_step_that_was_refused(library, caplog):
    """The error has ended that step, so later averages are not those of its closure."""
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, optimizer, compressor = make(library)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        if step == 1:
            model["weight"].grad.mul_(0.5)
            assert refuses(optimizer.step)
        else:
            optimizer.step()
    # This gives a step up in Horovod's own optimizer.
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(2, 5):  # the first of these is sent whole there
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
    if library is hvd:
        assert compressor.stats()["averages_thrown_away"] == 2
    else:
        assert any(warnings(caplog))
