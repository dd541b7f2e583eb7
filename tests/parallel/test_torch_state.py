"""Residues in checkpoints: resuming is bit-identical, and what does not fit is refused by name."""

import copy
import io

import horovod.torch as stock
import pytest
import torch
from models import feed, gradients, parameters, same_on_all_ranks

import scalecom_hvd.torch as hvd

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (5000,)}
SETTINGS = {"rate": 20, "beta": 0.5, "min_numel": 100}
MODES = [
    {},
    {"lookahead": True},
    {"leader": "staggered", "bucket_bytes": 10_000},
    {"leader": "staggered", "lookahead": True, "bucket_bytes": 10_000},
]


def make(library, model, **settings):
    compressor = hvd.ScaleCom(named_parameters=model.items() if library is stock else None, **(SETTINGS | settings))
    optimizer = library.DistributedOptimizer(torch.optim.SGD(model.values(), lr=0.1, momentum=0.9), model.items(), compression=compressor)
    return optimizer, compressor


def run(optimizer, model, steps):
    for step in steps:
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("library", [hvd, stock], ids=["drop-in", "stock"])
@pytest.mark.parametrize("mode", [*MODES, {"warmup_steps": 9}, {"wire_dtype": "float16"}], ids=str)
def test_resuming_is_bit_identical(library, mode):
    straight = parameters(SHAPES)
    optimizer, compressor = make(library, straight, **mode)
    run(optimizer, straight, range(7))
    saved = through_a_file(
        {"model": {n: p.detach() for n, p in straight.items()}, "optimizer": optimizer.state_dict(), "scalecom": compressor.state_dict()}
    )
    run(optimizer, straight, range(7, 14))

    resumed = parameters(SHAPES)
    optimizer, compressor = make(library, resumed, **mode)
    if library is stock:
        compressor.load_state_dict(saved["scalecom"])
    else:
        optimizer.compression.load_state_dict(saved["scalecom"])
    with torch.no_grad():
        for name, parameter in resumed.items():
            parameter.copy_(saved["model"][name])
    optimizer.load_state_dict(saved["optimizer"])
    run(optimizer, resumed, range(7, 14))
    for name in SHAPES:
        assert torch.equal(resumed[name], straight[name]), name
    assert compressor.stats()["step"] == 14
    assert same_on_all_ranks(resumed.values())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_loading_in_mid_run_goes_back(mode):
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model, **mode)
    run(optimizer, model, range(4))
    saved, values = copy.deepcopy(compressor.state_dict()), {n: p.detach().clone() for n, p in model.items()}
    momentum = copy.deepcopy(optimizer.state_dict())
    run(optimizer, model, range(4, 8))
    after = {n: p.detach().clone() for n, p in model.items()}
    compressor.load_state_dict(saved)
    optimizer.load_state_dict(momentum)
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(values[name])
    run(optimizer, model, range(4, 8))
    for name in SHAPES:
        assert torch.equal(model[name], after[name]), name


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_newcomer_starts_with_empty_residues(mode, caplog):
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model, **mode)
    run(optimizer, model, range(5))
    saved = through_a_file(compressor.state_dict())

    again = parameters(SHAPES)
    optimizer, compressor = make(hvd, again, **mode)
    newcomer = hvd.rank() == hvd.size() - 1
    if not newcomer:
        compressor.load_state_dict(saved)
    run(optimizer, again, range(5, 6))
    assert compressor.stats()["step"] == 6
    assert "ranks loaded different steps" in caplog.text
    run(optimizer, again, range(6, 10))
    assert same_on_all_ranks(again.values())


def test_the_state_is_what_the_design_says():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    run(optimizer, model, range(3))
    state = compressor.state_dict()
    assert state["version"] == 1
    assert state["step"] == 3
    assert state["config"]["rate"] == 20
    assert {name: tuple(t.shape) for name, t in state["residues"].items()} == {n: s for n, s in SHAPES.items() if n != "bias"}


def test_states_that_do_not_fit_are_refused():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    run(optimizer, model, range(2))
    state = through_a_file(compressor.state_dict())
    other = parameters({**SHAPES, "third": (6000,)})
    for change, model, settings, message in (
        ({}, parameters(SHAPES), {"rate": 50}, r"rate=20.0 in the state and 50.0 now"),
        ({"version": 99}, parameters(SHAPES), {}, "version 99, and this release reads version 1"),
        ({}, other, {}, r"third has shape \(5000,\) in the state and \(6000,\) in the model"),
        ({}, parameters({n: s for n, s in SHAPES.items() if n != "third"}), {}, "third is not in this model"),
        ({}, parameters({**SHAPES, "fourth": (5000,)}), {}, "fourth is not in the state"),
    ):
        _, compressor = make(hvd, model, **settings)
        with pytest.raises(ValueError, match=message):
            compressor.load_state_dict(state | change)
        early = hvd.ScaleCom(**(SETTINGS | settings))
        with pytest.raises(ValueError, match=message):
            early.load_state_dict(state | change)
            hvd.DistributedOptimizer(torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=early)
    with pytest.raises(ValueError, match="it lacks config, residues, step, version"):
        compressor.load_state_dict({"param_groups": []})


def test_between_backward_and_step_there_is_no_state():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    feed(model, gradients(SHAPES, hvd.rank(), 0))
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        compressor.state_dict()
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        compressor.load_state_dict({})
    optimizer.step()
