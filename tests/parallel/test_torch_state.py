"""Residues in checkpoints: resuming is bit-identical. What does not fit is refused by its name."""

import copy
import io

import numpy as np
import pytest
import torch
from faces import horovods_alone, hvd, in_every_library, stock
from models import SHAPES, assert_nothing_is_lost, feed, gradients, parameters, same_on_all_ranks

SETTINGS = {"rate": 20, "beta": 0.5, "min_numel": 100}
MODES = [
    {},
    {"lookahead": True},
    {"leader": "staggered", "bucket_bytes": 10_000},
    {"leader": "staggered", "lookahead": True, "bucket_bytes": 10_000},
]


def make(library, model, **settings):
    named = {"named_parameters": model.items()} if library is stock else {}
    compressor = hvd.ScaleCom(**named, **(SETTINGS | settings))
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1, momentum=0.9), model.items(), compression=compressor
    )
    return optimizer, compressor


def run(optimizer, model, steps):
    shapes = {name: tuple(p.shape) for name, p in model.items()}
    for step in steps:
        optimizer.zero_grad()
        feed(model, gradients(shapes, hvd.rank(), step))
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@in_every_library
@pytest.mark.parametrize("mode", [*MODES, {"warmup_steps": 9}], ids=str)
def test_resuming_is_bit_identical(library, mode):
    straight = parameters(SHAPES)
    optimizer, compressor = make(library, straight, **mode)
    run(optimizer, straight, range(7))
    saved = through_a_file(
        {
            "model": {n: p.detach() for n, p in straight.items()},
            "optimizer": optimizer.state_dict(),
            "scalecom": compressor.state_dict(),
        }
    )
    run(optimizer, straight, range(7, 14))
    stats = compressor.stats()

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
    assert stats["step"] == 14
    # The first step measures it, except in Horovod's own optimizer, and if that step is sent whole.
    assert library is stock or mode or stats["residue_ratio"] is not None
    assert compressor.stats() == stats
    assert same_on_all_ranks(resumed.values())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_loading_in_mid_run_goes_back(mode):
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model, **mode)
    run(optimizer, model, range(4))
    saved, values = (
        copy.deepcopy(compressor.state_dict()),
        {n: p.detach().clone() for n, p in model.items()},
    )
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
    assert "ranks come from different steps" in caplog.text
    run(optimizer, again, range(6, 10))
    assert same_on_all_ranks(again.values())


def test_the_state_is_what_the_design_says():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    run(optimizer, model, range(3))
    state = compressor.state_dict()
    assert (state["version"], state["settings"]) == (2, {"method": "ScaleCom"})
    assert state["step"] == 3
    assert state["config"]["rate"] == 20
    assert {name: tuple(t.shape) for name, t in state["residues"].items()} == {
        n: s for n, s in SHAPES.items() if n != "bias"
    }


def test_states_that_do_not_fit_are_refused():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    run(optimizer, model, range(2))
    state = through_a_file(compressor.state_dict())
    other = parameters({**SHAPES, "third": (6000,)})
    spoilt = state["residues"] | {"second": torch.full(SHAPES["second"], float("inf"))}
    for change, model, settings, message in (
        ({}, parameters(SHAPES), {"rate": 50}, r"rate=20.0 in the state and 50.0 now"),
        (
            {"version": 99},
            parameters(SHAPES),
            {},
            "version 99, but this release reads only version 2",
        ),
        ({}, other, {}, r"third has shape \(5000,\) in the state and \(6000,\) in the model"),
        (
            {},
            parameters({n: s for n, s in SHAPES.items() if n != "third"}),
            {},
            "third is not in this model",
        ),
        ({}, parameters({**SHAPES, "fourth": (5000,)}), {}, "fourth is not in the state"),
        ({"residues": spoilt}, parameters(SHAPES), {}, "residues of second are not finite"),
        (
            {"offsets": {"third": torch.zeros(3, dtype=torch.uint8)}},
            parameters(SHAPES),
            {},
            "offsets of third belong to another model",
        ),
    ):
        _, compressor = make(hvd, model, **settings)
        with pytest.raises(ValueError, match=message):
            compressor.load_state_dict(state | change)
        early = hvd.ScaleCom(**(SETTINGS | settings))
        with pytest.raises(ValueError, match=message):
            early.load_state_dict(state | change)
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=early
            )
    with pytest.raises(ValueError, match="it lacks config, residues, settings, step, version"):
        compressor.load_state_dict({"param_groups": []})


@in_every_library
def test_ranks_that_load_the_residues_of_one_rank_are_refused(library):
    """Residues would be sent several times. Residues that changed their ranks are no less right."""
    optimizer, compressor = make(library, model := parameters(SHAPES))
    run(optimizer, model, range(3))
    states = hvd.allgather_object(compressor.state_dict(), name="states")
    for shift in (1, 0):
        optimizer, compressor = make(library, model := parameters(SHAPES))
        compressor.load_state_dict(states[(hvd.rank() + 1) % hvd.size() if shift else 0])
        if shift:
            run(optimizer, model, range(3, 5))
            assert compressor.stats()["step"] == 5
        else:
            with pytest.raises(
                RuntimeError, match="ranks 0 and 1 have both loaded the residues of"
            ):
                run(optimizer, model, range(3, 5))


def test_between_backward_and_step_there_is_no_state():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    feed(model, gradients(SHAPES, hvd.rank(), 0))
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        compressor.state_dict()
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        compressor.load_state_dict({})
    optimizer.step()


def test_buckets_of_a_state_that_no_longer_fit_are_made_anew():
    """A parameter has become float64 meanwhile, so it cannot share a bucket with the others."""

    def build(dtype):
        model = {
            "a": torch.nn.Parameter(torch.zeros(4096)),
            "b": torch.nn.Parameter(torch.zeros(40_000, dtype=dtype)),
        }
        # Unrounded, the residues of gradients of ones are whole numbers.
        return model, *make(hvd, model, beta=1.0, bits=32)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            sum((p * torch.ones_like(p)).sum() for p in model.values()).backward()
            optimizer.step()

    model, optimizer, compressor = build(torch.float32)
    train(model, optimizer, 2)
    state = through_a_file(compressor.state_dict())
    assert len(state["buckets"]) == 1
    model, optimizer, compressor = build(torch.float64)
    compressor.load_state_dict(state)
    train(model, optimizer, 3)
    assert len(compressor.residues.buckets) == 2
    for tensor in compressor.residues.tensors.values():
        assert set(tensor.residue.tolist()) <= {0, 1, 2, 3, 4, 5}


def test_other_bucket_bytes_make_other_buckets():
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    run(optimizer, model, range(3))
    state = compressor.state_dict()
    again = parameters(SHAPES)
    optimizer, other = make(hvd, again, bucket_bytes=5_000)
    other.load_state_dict(state)
    run(optimizer, again, range(3, 6))
    assert len(compressor.residues.buckets) < len(other.residues.buckets)


@in_every_library
def test_a_state_saved_before_the_first_step(library):
    state = make(library, parameters(SHAPES))[1].state_dict()
    model = parameters(SHAPES)
    optimizer, compressor = make(library, model)
    compressor.load_state_dict(state)
    run(optimizer, model, range(3))
    assert same_on_all_ranks(model.values())


@horovods_alone
def test_stock_resumes_what_ran_on_another_number_of_ranks(caplog):
    model = parameters(SHAPES)
    optimizer, compressor = make(stock, model)
    run(optimizer, model, range(3))
    state = through_a_file(compressor.state_dict()) | {"ranks": 99}
    model = parameters(SHAPES)
    optimizer, compressor = make(stock, model)
    if hvd.rank() == 0:  # the other ranks are newcomers
        compressor.load_state_dict(state)
        assert compressor.residues.tensors == {}
    run(optimizer, model, range(3, 6))
    assert compressor.stats()["step"] == 6
    assert same_on_all_ranks(model.values())
    assert hvd.rank() > 0 or "resuming on" in caplog.text


@pytest.fixture
def halves():
    """This rank's half of the ranks."""
    sets = [
        hvd.add_process_set(ranks)
        for ranks in (range(hvd.size() // 2), range(hvd.size() // 2, hvd.size()))
    ]
    yield sets[hvd.rank() >= hvd.size() // 2]
    for process_set in sets:
        hvd.remove_process_set(process_set)


@horovods_alone
@pytest.mark.parametrize(
    ("library", "mode"),
    [(hvd, {}), (hvd, {"lookahead": True}), (stock, {})],
    ids=["cyclic", "look-ahead", "stock"],
)
def test_resuming_on_fewer_and_then_on_more_ranks(library, mode, halves, caplog):
    """Survivors keep their residues, newcomers begin with none, and nothing else is lost."""

    def resume(state, steps, ranks):
        """Train on some ranks from a state on. Return the state after that."""
        model = parameters(SHAPES)
        compressor = hvd.ScaleCom(
            model.items() if library is stock else None,
            process_set=ranks,
            rate=20,
            min_numel=100,
            **mode,
        )
        optimizer = library.DistributedOptimizer(
            torch.optim.SGD(model.values(), lr=1.0),
            model.items(),
            compression=compressor,
            process_set=ranks,
        )
        before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        if state is not None:
            compressor.load_state_dict(state)
            before |= {
                n: (m / compressor.config.beta).numpy() for n, m in state["residues"].items()
            }
        run(optimizer, model, steps)
        came_in = {}
        for name, mine in before.items():
            mine = mine + sum(gradients(SHAPES, hvd.rank(), step)[name] for step in steps)
            came_in[name] = hvd.allreduce(
                torch.as_tensor(mine), op=hvd.Sum, name=f"came_in.{name}", process_set=ranks
            ).numpy()
        assert_nothing_is_lost(model, compressor, came_in, ranks.size(), ranks)
        assert compressor.stats()["step"] == steps[-1] + 1
        return through_a_file(compressor.state_dict())

    everyone = resume(None, range(3), hvd.global_process_set)
    fewer = resume(everyone, range(3, 5), halves)
    assert f"on {halves.size()} ranks, after training on {hvd.size()}" in caplog.text
    caplog.clear()
    newcomer = hvd.rank() >= hvd.size() // 2
    resume(None if newcomer else fewer, range(5, 8), hvd.global_process_set)
    assert newcomer or f"on {hvd.size()} ranks, after training on {halves.size()}" in caplog.text


@horovods_alone
def test_stock_resumes_with_a_parameter_that_another_optimizer_trains():
    def build():
        model = parameters({"mine": (4096,), "other": (4096,)})
        compressor = hvd.ScaleCom(named_parameters=model.items(), rate=4, min_numel=100)
        return (
            model,
            compressor,
            stock.DistributedOptimizer(
                torch.optim.SGD([model["mine"]], lr=1.0), [("mine", model["mine"])], compressor
            ),
        )

    def train(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            feed(model, gradients({"mine": (4096,)}, hvd.rank(), step), skip=["other"])
            optimizer.step()

    model, compressor, optimizer = build()
    train(model, optimizer)
    state = through_a_file(compressor.state_dict())
    model, compressor, optimizer = build()
    compressor.load_state_dict(state)
    train(model, optimizer)
    assert same_on_all_ranks(model.values())


@horovods_alone
@in_every_library
@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_horovods_elastic_states_keep_residues(library, mode):
    model = torch.nn.Linear(100, 60)
    parameters_of = dict(model.named_parameters())
    optimizer, compressor = make(library, parameters_of, **mode)

    run(optimizer, parameters_of, range(3))
    # the elastic state of Horovod itself knows residues too
    state = library.elastic.TorchState(model, optimizer, batch=3)
    state.sync()
    run(optimizer, parameters_of, range(3, 5))
    state.batch = 5
    state.save()
    saved = copy.deepcopy(compressor.state_dict())
    run(optimizer, parameters_of, range(5, 8))
    went_on = {name: p.detach().clone() for name, p in parameters_of.items()}
    state.restore()
    restored = compressor.state_dict()
    assert (state.batch, restored["step"]) == (5, saved["step"])
    for name, residue in saved["residues"].items():
        assert torch.equal(restored["residues"][name], residue), name
    run(optimizer, parameters_of, range(5, 8))
    for name, parameter in parameters_of.items():
        assert torch.equal(parameter, went_on[name]), name
    assert same_on_all_ranks(parameters_of.values())


def let_rank_1_go_back(optimizer, compressor, model):
    """Train. Load step 3 on rank 1, and step 5 on all other ranks. Return this rank's residues."""
    run(optimizer, model, range(3))
    older = through_a_file(compressor.state_dict())
    run(optimizer, model, range(3, 5))
    newer = through_a_file(compressor.state_dict())
    compressor.load_state_dict(older if hvd.rank() == 1 else newer)
    return {name: residue.clone() for name, residue in compressor.state_dict()["residues"].items()}


@pytest.mark.parametrize("mode", MODES[1::2], ids=str)
def test_a_rank_that_loads_an_older_state_has_other_offsets(mode):
    """Ranks that gathered at different offsets would average unlike elements.

    If their offsets differ, the next step is sent whole.
    """
    model = parameters(SHAPES)
    optimizer, compressor = make(hvd, model, **mode)
    before = let_rank_1_go_back(optimizer, compressor, model)
    run(optimizer, model, range(5, 6))
    assert compressor.stats()["step"] == 6
    assert compressor.stats()["bytes_values"] == 0
    for name, residue in compressor.state_dict()["residues"].items():
        assert torch.equal(residue, before[name]), name
    run(optimizer, model, range(6, 9))
    assert compressor.stats()["bytes_values"] > 0
    assert same_on_all_ranks(model.values())


@horovods_alone
def test_stock_refuses_ranks_with_states_of_different_steps():
    """There ranks can compare only at the first step's end, but before any parameter is changed."""
    model = parameters(SHAPES)
    optimizer, compressor = make(stock, model)
    before = let_rank_1_go_back(optimizer, compressor, model)
    weights = {name: p.detach().clone() for name, p in model.items()}
    with pytest.raises(RuntimeError, match="look-ahead offsets differ between ranks"):
        run(optimizer, model, range(5, 6))
    for name, residue in compressor.state_dict()["residues"].items():
        torch.testing.assert_close(residue, before[name], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(model[name], weight) for name, weight in weights.items())


@horovods_alone
def test_a_commit_is_whole_though_offsets_in_flight_never_arrive(monkeypatch):
    """A worker that dies after a step leaves the other ranks without the next offsets.

    Their commit is of this step all the same.
    """
    from scalecom_hvd.torch.horovod_collectives import HorovodWork

    model = torch.nn.Linear(100, 60)
    parameters_of = dict(model.named_parameters())
    optimizer, compressor = make(hvd, parameters_of, lookahead=True)

    run(optimizer, parameters_of, range(3))
    state = hvd.elastic.TorchState(model, optimizer, batch=3)
    run(optimizer, parameters_of, range(3, 5))
    wait = HorovodWork.wait
    with monkeypatch.context() as patch:

        def lost(work):
            wait(work)
            raise hvd.HorovodInternalError("a worker was lost")

        patch.setattr(HorovodWork, "wait", lost)
        state.batch = 5
        state.save()
    residues = {
        name: residue.clone() for name, residue in compressor.state_dict()["residues"].items()
    }
    run(optimizer, parameters_of, range(5, 7))
    state.restore()
    assert (state.batch, compressor.stats()["step"]) == (5, 5)
    assert all(
        torch.equal(residue, residues[name])
        for name, residue in compressor.state_dict()["residues"].items()
    )
    run(optimizer, parameters_of, range(5, 8))
    assert same_on_all_ranks(model.parameters())


@pytest.mark.skipif(hvd.size() < 2, reason="one rank lacks a gradient that another has")
@horovods_alone
def test_look_ahead_resumed_where_a_sparse_gradient_comes_on_one_rank_only():
    """Ranks decide whether the first step is sent whole only when all know what is sparse."""

    def made(state=None):
        torch.manual_seed(0)
        table, layer = torch.nn.Embedding(200, 20, sparse=True), torch.nn.Linear(20, 200)
        named = [("table", table.weight), ("layer", layer.weight), ("bias", layer.bias)]
        compression = hvd.ScaleCom(rate=10, lookahead=True, dense=[], warmup_steps=0)
        optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression)
        if state is not None:
            compression.load_state_dict(state)

        def step(uses_table):
            optimizer.zero_grad()
            words = torch.arange(4)
            rows = table(words) if uses_table else torch.ones(4, 20)
            layer(rows).square().sum().backward()
            optimizer.step()

        return compression, step

    compression, step = made()
    for _ in range(3):
        step(True)
    again, step = made(copy.deepcopy(compression.state_dict()))
    step(hvd.rank() == 0)
    assert again.stats()["step"] == 4
    assert again.stats()["bytes_values"] > 0, "it was sent whole, though all offsets are known"
