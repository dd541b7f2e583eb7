"""Ranks with parameters that are not the right ones, or of which only one loads a state.

Either the ranks are told, or all of them have the same parameters to the bit. If only one rank has
loaded its residues, or the optimizer's state, all ranks go on. (test_torch_state.py refuses
residues of another rank.)
"""

import copy
import re

import models
import numpy as np
import pytest
import torch
from faces import UNDER_TORCHRUN, horovods_alone, hvd, stock
from made_up import gradients

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000)}
MODES = [{}, {"lookahead": True}, {"warmup_steps": 100}]
in_modes = pytest.mark.parametrize("mode", MODES, ids=str)
# Horovod's own optimizer is look-ahead in every mode.
in_every_library = pytest.mark.parametrize(
    ("library", "mode"),
    [pytest.param(hvd, mode, id=str(mode)) for mode in MODES]
    + [
        pytest.param(stock, mode, id=f"stock {mode}", marks=horovods_alone)
        for mode in MODES
        if "lookahead" not in mode
    ],
)
some_rank = pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.long)])
# If ranks wait for ever, the test fails.
pytestmark = pytest.mark.timeout(45, method="thread")

# Also allowed if the set of parameters has changed.
ANEW = "broadcast_parameters|Make a new DistributedOptimizer"


def make(library, model, mode, **sgd):
    every = {"rate": 20, "dense": ["bias"], "warmup_steps": 0, "min_numel": 100}
    return models.wrap(library, model, **({"lr": 0.1} | sgd), **(every | mode))


def stay_alike_or_are_refused(model, optimizer, steps, advice="broadcast_parameters", caplog=None):
    """Return whether all ranks refused a step, with advice that makes them alike.

    caplog: where a warning with this advice will do.
    """
    for step in steps:
        error = ""
        frozen = [name for name, p in model.items() if not p.requires_grad]
        try:
            models.take_steps(optimizer, model, [step], skips=lambda *_: frozen)  # noqa: B023
        except RuntimeError as refusal:
            error = str(refusal)
        for record in caplog.records if caplog else ():
            error = error or record.getMessage()
        errors = hvd.allgather_object(error, name="errors")
        if any(errors):
            assert all(re.search(advice, each) for each in errors), errors
            return True
        assert models.same_on_all_ranks(model.values()), f"after step {step}, and nobody says so"
    return False


def by_all_elements(model):
    model["second"].add_(hvd.rank())


def by_one_element(model):
    if hvd.rank() == hvd.size() - 1:
        model["first"][7, 3] = 1e-6


def by_nothing_any_more(model):
    by_all_elements(model)
    hvd.broadcast_parameters(dict(model), 0)


@in_modes
@pytest.mark.parametrize("differ", [by_all_elements, by_one_element, by_nothing_any_more])
def test_ranks_that_begin_with_other_parameters(differ, mode, caplog):
    """Stock Horovod trains on, so its face only warns."""
    model = models.parameters(SHAPES)
    with torch.no_grad():
        differ(model)
    only_warns = None if UNDER_TORCHRUN else caplog
    optimizer, _ = make(hvd, model, mode)
    refused = stay_alike_or_are_refused(model, optimizer, range(6), caplog=only_warns)
    assert refused == (differ is not by_nothing_any_more)


@in_modes
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("how", ["thawed", "added"])
def test_a_parameter_that_comes_later(how, when, mode):
    """It has no hook, so it is not averaged."""
    model, late = models.parameters(SHAPES), torch.nn.Parameter(torch.zeros(3000))
    model["second"].requires_grad_(how != "thawed")
    optimizer, _ = make(hvd, model, mode)
    assert not stay_alike_or_are_refused(model, optimizer, range(when))
    if how == "thawed":
        model["second"].requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [late]})
        model["late"] = late
    stay_alike_or_are_refused(model, optimizer, range(when, when + 4), ANEW)


def test_the_test_of_likeness_sees_what_differs():
    assert models.same_on_all_ranks([torch.ones(3)])
    assert not models.same_on_all_ranks([torch.ones(3) + hvd.rank()])


@pytest.mark.on_cpus  # the other ranks' streams wait for the step that they gave up
@in_every_library
@some_rank
def test_one_rank_loads_its_residues_and_nothing_is_lost(who, mode, library):
    """The rank loads its own state before the fourth step, even if that step is sent whole.

    One tensor is large enough to travel for a while. One embedding has sparse gradients, if they
    are averaged.
    """
    shapes = {"rows": (50, 8), "large": (700, 500), "first": (60, 50), "bias": (60,)}
    has_rows = library is hvd and hasattr(hvd, "mpi_enabled")
    model = models.parameters(shapes)
    settings = {name: 5 if name == "warmup_steps" else value for name, value in mode.items()}
    settings["dense"] = ["bias", "rows"]
    optimizer, compressor = make(library, model, settings, lr=1.0)
    came = dict.fromkeys(shapes, 0.0)
    for step in range(6):
        if step == 3 and hvd.rank() == who:
            compressor.load_state_dict(copy.deepcopy(compressor.state_dict()))
        optimizer.zero_grad()
        models.feed(model, gradients(shapes, hvd.rank(), step), skip=["rows"] if has_rows else ())
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
    assert models.same_on_all_ranks(model.values())
    models.assert_nothing_is_lost(model, compressor, came, hvd.size())


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


@in_every_library
@some_rank
def test_one_rank_loads_the_optimizers_state_and_broadcasts_it(who, mode, library):
    """The best checkpoint is loaded so by Horovod's own pattern.

    All ranks end where they would if all had loaded what this rank loaded.
    """
    trained = []
    for who_loads in (range(hvd.size()), [who]):
        model = models.parameters(SHAPES)
        optimizer, compressor = make(library, model, mode, momentum=0.9)
        models.take_steps(optimizer, model, range(1))
        saved = copy.deepcopy(optimizer.state_dict())
        models.take_steps(optimizer, model, range(1, 3))
        if hvd.rank() in who_loads:
            optimizer.load_state_dict(saved)
        broadcast(optimizer, who_loads[0])
        models.take_steps(optimizer, model, range(3, 6))
        trained.append(model)
    assert compressor.stats()["step"] == 6
    assert models.same_on_all_ranks(trained[1].values())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)


def test_what_a_rank_had_submitted_when_it_loaded_is_in_no_average():
    """One rank begins a step and gives it up. The other ranks have an empty batch meanwhile.

    What it had submitted meets what the other ranks submit in the next step.
    """
    trained, last = [], hvd.size() - 1
    for gives_up in (False, True):
        model = models.parameters(SHAPES)
        optimizer, compressor = make(hvd, model, {"warmup_steps": 100}, momentum=0.9)
        models.take_steps(optimizer, model, range(2))
        if gives_up and hvd.rank() == last:
            optimizer.zero_grad()
            models.feed(model, gradients(SHAPES, last, 10))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        models.take_steps(optimizer, model, range(2, 4))
        trained.append(model)
    assert compressor.stats()["step"] == 4
    assert models.same_on_all_ranks(trained[1].values())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)
