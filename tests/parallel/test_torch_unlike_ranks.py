"""Ranks with parameters, or loaded residues, that are not the right ones.

Either the ranks are told, or all of them have the same parameters to the bit. If only one rank has
loaded its residues, all ranks go on.
"""

import copy
import os
import re

import numpy as np
import pytest
import torch
from faces import hvd, in_every_library, stock
from models import assert_nothing_is_lost, feed, gradients, parameters, same_on_all_ranks

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000)}
MODES = pytest.mark.parametrize("mode", [{}, {"lookahead": True}, {"warmup_steps": 100}], ids=str)

# Also allowed if the set of parameters has changed.
ANEW = "broadcast_parameters|Make a new DistributedOptimizer"


def make(model, trained=None, **settings):
    every = {"rate": 20, "dense": [], "warmup_steps": 0, "min_numel": 100}
    return hvd.DistributedOptimizer(
        torch.optim.SGD((trained or model).values(), lr=0.1),
        (trained or model).items(),
        compression=hvd.ScaleCom(**(every | settings)),
    )


def take_step(model, optimizer, step):
    shapes = {name: tuple(p.shape) for name, p in model.items()}
    optimizer.zero_grad()
    trained = [name for name, p in model.items() if p.requires_grad]
    skip = [name for name in shapes if name not in trained]
    feed(model, gradients(shapes, hvd.rank(), step), skip=skip)
    optimizer.step()


def stay_alike_or_are_refused(model, optimizer, steps, advice="broadcast_parameters", caplog=None):
    """Return whether all ranks refused a step, with advice that makes them alike.

    caplog: where a warning with this advice will do.
    """
    for step in steps:
        error = ""
        try:
            take_step(model, optimizer, step)
        except RuntimeError as refusal:
            error = str(refusal)
        for record in caplog.records if caplog else ():
            error = error or record.getMessage()
        errors = hvd.allgather_object(error, name="errors")
        if any(errors):
            assert all(re.search(advice, each) for each in errors), errors
            return True
        flat = torch.cat([p.detach().reshape(-1) for p in model.values()])
        everyone = hvd.allgather(flat.unsqueeze(0), name="everyone")
        apart = float((everyone - everyone[0]).abs().max())
        assert apart == 0, f"after step {step} ranks are {apart:.3g} apart, and nobody says so"
    return False


@MODES
def test_ranks_that_begin_with_other_parameters(mode, caplog):
    """Stock Horovod trains on, so its face only warns."""
    model = parameters(SHAPES)
    with torch.no_grad():
        model["second"].add_(hvd.rank())
    only_warns = caplog if "TORCHELASTIC_RUN_ID" not in os.environ else None
    assert stay_alike_or_are_refused(model, make(model, **mode), range(6), caplog=only_warns)


@MODES
def test_one_element_of_one_rank_is_another(mode, caplog):
    model = parameters(SHAPES)
    if hvd.rank() == hvd.size() - 1:
        with torch.no_grad():
            model["first"][7, 3] = 1e-6
    only_warns = caplog if "TORCHELASTIC_RUN_ID" not in os.environ else None
    assert stay_alike_or_are_refused(model, make(model, **mode), range(3), caplog=only_warns)


@MODES
def test_ranks_that_begin_alike_are_not_refused(mode):
    model = parameters(SHAPES)
    with torch.no_grad():
        model["second"].add_(hvd.rank())
    hvd.broadcast_parameters(dict(model), 0)
    assert not stay_alike_or_are_refused(model, make(model, **mode), range(6))


@MODES
@pytest.mark.parametrize("when", [0, 3])
def test_a_layer_that_is_thawed(when, mode):
    """It has no hook, so it is not averaged."""
    model = parameters(SHAPES)
    model["second"].requires_grad_(False)
    optimizer = make(model, **mode)
    assert not stay_alike_or_are_refused(model, optimizer, range(when))
    model["second"].requires_grad_(True)
    stay_alike_or_are_refused(model, optimizer, range(when, when + 4), ANEW)


@MODES
@pytest.mark.parametrize("when", [0, 3])
def test_a_group_of_parameters_that_is_added(when, mode):
    model = parameters(SHAPES)
    late = torch.nn.Parameter(torch.zeros(3000))
    optimizer = make(model, **mode)
    assert not stay_alike_or_are_refused(model, optimizer, range(when))
    optimizer.add_param_group({"params": [late]})
    stay_alike_or_are_refused(model | {"late": late}, optimizer, range(when, when + 4), ANEW)


@MODES
def test_residues_of_another_rank_are_refused(mode):
    """Rank 0 saves its residues and all ranks load them, as with a model's checkpoint."""
    model = parameters(SHAPES)
    optimizer = make(model, **mode)
    for step in range(3):
        take_step(model, optimizer, step)
    mine = copy.deepcopy(optimizer.compression.state_dict())
    rank_0s = hvd.broadcast_object(mine, 0, name="state")
    model = parameters(SHAPES)
    again = make(model, **mode)
    again.compression.load_state_dict(rank_0s)
    with pytest.raises(RuntimeError, match="ranks 0 and 1 have both loaded the residues of rank 0"):
        take_step(model, again, 3)
    again = make(parameters(SHAPES), **mode)
    again.compression.load_state_dict(mine)  # its own residues still fit
    for name, tensor in again.compression.residues.tensors.items():
        assert torch.equal(tensor.residue, optimizer.compression.residues.tensors[name].residue)


def test_the_test_of_likeness_sees_what_differs():
    assert same_on_all_ranks([torch.ones(3)])
    assert not same_on_all_ranks([torch.ones(3) + hvd.rank()])


@pytest.mark.on_cpus  # the other ranks' streams wait for the step that they gave up
@in_every_library
@pytest.mark.parametrize("mode", [{}, {"lookahead": True}, {"warmup_steps": 5}], ids=str)
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_rank_loads_its_residues_and_nothing_is_lost(who, mode, library):
    """The rank loads its own state before the fourth step, even if that step is sent whole.

    One tensor is large enough to travel for a while. One embedding has sparse gradients, if they
    are averaged.
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
