"""A state of the optimizer that only one rank loads while training goes on, as the best checkpoint
is by Horovod's own pattern: rank 0 loads it, and broadcasts it to the others.
"""

import copy

import numpy as np
import pytest
import torch
from faces import hvd, in_every_library, stock
from made_up import gradients
from models import assert_nothing_is_lost, feed, parameters, same_on_all_ranks

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000)}
pytestmark = pytest.mark.timeout(45, method="thread")  # ranks that wait for ever fail


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
    """All ranks take up one rank's state of the optimizer."""
    if hasattr(hvd, "broadcast_optimizer_state"):
        hvd.broadcast_optimizer_state(optimizer, root)
        return
    state = optimizer.state_dict()["state"]
    hvd.broadcast_parameters([own["momentum_buffer"] for own in state.values()], root)
    groups = hvd.broadcast_object(optimizer.state_dict()["param_groups"], root)
    for group, theirs in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = theirs["lr"]


def train(library, mode, who_loads):
    """Six steps, where these ranks load after the third what the optimizer was after the first."""
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
    """They end where they would if all ranks had loaded what this one did."""
    together, _ = train(library, mode, range(hvd.size()))
    model, compressor = train(library, mode, [who])
    assert compressor.stats()["step"] == 6
    assert same_on_all_ranks(model.values())
    for name, parameter in model.items():
        torch.testing.assert_close(parameter, together[name], rtol=1e-4, atol=1e-5)


@in_every_library
@pytest.mark.parametrize("mode", [{}, {"lookahead": True}, {"warmup_steps": 5}], ids=str)
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_rank_loads_its_residues_and_nothing_is_lost(who, mode, library):
    """It loads what it has, before the fourth step; in a step that is sent whole, too.

    One tensor is large enough to travel for a while. One embedding has sparse gradients, where
    they are averaged.
    """
    shapes = {"rows": (50, 8), "large": (700, 500), "first": (60, 50), "bias": (60,)}
    has_rows = library is hvd and hasattr(hvd, "mpi_enabled")
    model = parameters(shapes)
    every = {"rate": 20, "dense": ["bias", "rows"], "warmup_steps": 0, "min_numel": 100}
    named = {"named_parameters": model.items()} if library is stock else {}
    compressor = hvd.ScaleCom(**named, **(every | mode))
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=1.0), model.items(), compression=compressor
    )
    came = dict.fromkeys(shapes, 0.0)
    for step in range(6):
        if step == 3 and hvd.rank() == who:
            compressor.load_state_dict(copy.deepcopy(compressor.state_dict()))
        optimizer.zero_grad()
        feed(model, gradients(shapes, hvd.rank(), step), skip=["rows"] if has_rows else ())
        if has_rows:
            chosen = torch.tensor([step, 7, 7, 10 + hvd.rank()])
            torch.nn.functional.embedding(chosen, model["rows"], sparse=True).sum().backward()
        optimizer.step()
        for rank in range(hvd.size()):
            grads = gradients(shapes, rank, step)
            if has_rows:
                grads["rows"] = np.zeros(shapes["rows"])
                np.add.at(grads["rows"], [step, 7, 7, 10 + rank], 1.0)
            came = {name: came[name] + grads[name] for name in shapes}
    assert compressor.stats()["step"] == 6
    assert same_on_all_ranks(model.values())
    assert_nothing_is_lost(model, compressor, came, hvd.size())
