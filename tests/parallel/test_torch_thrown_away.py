"""A script throws averages away by zero_grad().

Either what was sent with them is not lost, or a warning says that it is.
"""

import logging

import torch
from faces import hvd, in_every_library, stock
from models import same_on_all_ranks
from test_torch_changed_gradients import refuses
from thrown_away import SHAPES, add, assert_nothing_is_lost_or_warned, average, mine, warned


def make(library, **settings):
    """Parameters of zeros, plain SGD with learning rate 1, and the compressor."""
    model = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    named = {"named_parameters": model.items()} if library is stock else {}
    every = {"rate": 10, "beta": 1.0, "dense": ["bias"], "warmup_steps": 0, "min_numel": 2}
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


def check_steps(library, caplog, script, steps=6):
    """Take steps of the script after zero_grad(). Note what each step uses, and what not.

    script(model, optimizer, step, real, thrown_away): one step, which averages.
    """
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, optimizer, compressor = make(library)
    real, thrown_away = {}, {}
    for step in range(steps):
        optimizer.zero_grad()
        script(model, optimizer, step, real, thrown_away)
    assert same_on_all_ranks(model.values())
    assert_nothing_is_lost_or_warned(model, compressor, real, thrown_away, caplog)


@in_every_library
def test_sharpness_aware_steps(library, caplog):
    """SAM: the first average only says where to take the gradient that the step uses."""

    def script(model, optimizer, step, real, thrown_away):
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

    check_steps(library, caplog, script)


@in_every_library
def test_a_step_that_a_script_skips_after_synchronize(library, caplog):
    """Large models' scripts skip a step if its gradient is too long."""

    def script(model, optimizer, step, real, thrown_away):
        came = backward(model, step)
        optimizer.synchronize()
        if step % 3 == 2:
            add(thrown_away, came)
            return
        add(real, came)
        with optimizer.skip_synchronize():
            optimizer.step()

    check_steps(library, caplog, script, steps=8)


@in_every_library
def test_gradients_that_are_set_to_none_before_the_step(library, caplog):

    def script(model, optimizer, step, real, thrown_away):
        add(thrown_away, backward(model, 2 * step))
        optimizer.synchronize()
        for parameter in model.values():
            parameter.grad = None
        add(real, backward(model, 2 * step + 1))
        optimizer.step()

    check_steps(library, caplog, script)


@in_every_library
def test_averages_that_are_replaced_by_those_of_the_step_itself(library, caplog):
    """Gradients set by hand are averaged in step(). The warning is due once a step has begun."""

    def script(model, optimizer, step, real, thrown_away):
        add(thrown_away, backward(model, 2 * step))
        optimizer.synchronize()
        for name, parameter in model.items():
            parameter.grad = mine(2 * step + 1)[name]
        add(real, average(2 * step + 1))
        optimizer.step()

    check_steps(library, caplog, script)


@in_every_library
def test_after_a_step_that_was_refused(library, caplog):
    """The error has ended that step, so later averages are not those of its closure."""
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, optimizer, _ = make(library)
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
    assert warned(caplog)
