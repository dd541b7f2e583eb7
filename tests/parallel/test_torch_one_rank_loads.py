"""Only one rank loads a state of the optimizer while training goes on.

The best checkpoint is loaded so by Horovod's own pattern: rank 0 loads it, and broadcasts it.
"""

import copy

import pytest
import torch
from faces import hvd, in_every_library, stock
from made_up import gradients
from models import feed, parameters, same_on_all_ranks

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000)}
pytestmark = pytest.mark.timeout(45, method="thread")  # if ranks wait for ever, the test fails


def make(library, mode):
    model = parameters(SHAPES)
    named = {"named_parameters": model.items()} if library is stock else {}
    every = {"rate": 20, "dense": ["bias"], "warmup_steps": 0, "min_numel": 100}
    compressor = hvd.ScaleCom(**named, **(every | mode))
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1, momentum=0.9),
        model.items(),
        compression=compressor,
    )
    return model, optimizer, compressor


def broadcast(optimizer, root):
    """All ranks take over one rank's state of the optimizer."""
    if hasattr(hvd, "broadcast_optimizer_state"):
        hvd.broadcast_optimizer_state(optimizer, root)
        return
    state = optimizer.state_dict()["state"]
    hvd.broadcast_parameters([own["momentum_buffer"] for own in state.values()], root)
    groups = hvd.broadcast_object(optimizer.state_dict()["param_groups"], root)
    for group, theirs in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = theirs["lr"]


def train(library, mode, who_loads):
    """Take six steps. After the third, these ranks load the optimizer's state after the first."""
    model, optimizer, compressor = make(library, mode)
    saved = None
    for step in range(6):
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
        if step == 3:
            if hvd.rank() in who_loads:
                optimizer.load_state_dict(saved)
            broadcast(optimizer, who_loads[0])
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
    return model, compressor


MODES = pytest.mark.parametrize("mode", [{}, {"lookahead": True}, {"warmup_steps": 100}], ids=str)


@in_every_library
@MODES
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_rank_loads_and_all_go_on(who, mode, library):
    """All ranks end where they would if all had loaded what this rank loaded."""
    together, _ = train(library, mode, range(hvd.size()))
    model, compressor = train(library, mode, [who])
    assert compressor.stats()["step"] == 6
    assert same_on_all_ranks(model.values())
    for name, parameter in model.items():
        torch.testing.assert_close(parameter, together[name], rtol=1e-4, atol=1e-5)


def go_on_after_a_load(gives_up):
    """Take four steps of training.

    One rank begins the third and gives it up. The other ranks have an empty batch meanwhile.
    """
    model, optimizer, compressor = make(hvd, {"warmup_steps": 100})
    last = hvd.size() - 1
    for step in range(4):
        optimizer.zero_grad()
        if step == 2 and gives_up and hvd.rank() == last:
            feed(model, gradients(SHAPES, last, 10))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
    return model, compressor


def test_what_a_rank_had_submitted_when_it_loaded_is_in_no_average():
    """It meets what the other ranks submit in the next step."""
    expected, _ = go_on_after_a_load(gives_up=False)
    model, compressor = go_on_after_a_load(gives_up=True)
    assert compressor.stats()["step"] == 4
    assert same_on_all_ranks(model.values())
    for name, parameter in model.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
