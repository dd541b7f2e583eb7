"""Residues in checkpoints: resuming is bit-identical. What does not fit is refused by its name."""

import copy
import functools

import models
import numpy as np
import pytest
import torch
from faces import horovods_alone, hvd, in_every_library, stock
from local_models import values_of
from made_up import SHAPES, gradients

MODES = [
    {},
    {"lookahead": True},
    {"leader": "staggered", "bucket_bytes": 10_000},
    {"leader": "staggered", "lookahead": True, "bucket_bytes": 10_000},
]
make = functools.partial(models.wrap, lr=0.1, momentum=0.9, rate=20, beta=0.5, min_numel=100)


def in_modes(modes, of_stock=({},)):
    """Horovod's own optimizer is look-ahead in every mode, so it need not run in all."""
    cases = [pytest.param(hvd, mode, id=str(mode)) for mode in modes]
    for mode in of_stock:
        cases += [pytest.param(stock, mode, id=f"stock {mode}", marks=horovods_alone)]
    return pytest.mark.parametrize(("library", "mode"), cases)


@pytest.mark.parametrize("where", ["new_optimizer", "mid_run"])
@in_modes(
    [*MODES, {"warmup_steps": 9}, {"lookahead": True, "rate": 1.0001}],  # one element to a lane
    of_stock=[{}, {"warmup_steps": 9}, {"rate": 1.0001}],
)
def test_resuming_is_bit_identical(library, mode, where):
    def run():
        model = models.parameters(SHAPES)
        return model, *make(library, model, **mode)

    stats = models.resume(run, where, 7, 14).stats()
    # The first step measures it, except in Horovod's own optimizer, and if that step is sent whole.
    assert library is stock or mode or stats["residue_ratio"] is not None


def without(name):
    return {n: shape for n, shape in SHAPES.items() if n != name}


# {what the error says: the settings, the model's shapes, or what the state says instead}
UNFIT = {
    r"beta=0.5 in the state and 0.7 now": {"settings": {"beta": 0.7}},
    r"version 99, but this release reads only version 2": {"version": 99},
    r"third has shape \(5000,\) in the state and \(6000,\) in the model": {
        "shapes": SHAPES | {"third": (6000,)}
    },
    "third is not in this model": {"shapes": without("third")},
    r"that ends with 1: rate=\{0: 8, 2: 1\}, bits=32. Or": {"settings": {"rate": 1}},
    "fourth is not in the state": {"shapes": SHAPES | {"fourth": (5000,)}},
    "residues of second are not finite": {
        "residues": {"second": torch.full(SHAPES["second"], float("inf"))}
    },
    "offsets of third belong to another model": {
        "offsets": {"third": torch.zeros(3, dtype=torch.uint8)}
    },
}


def test_states_that_do_not_fit_are_refused():
    model = models.parameters(SHAPES)
    optimizer, compressor = make(hvd, model)
    models.take_steps(optimizer, model, range(2))
    state = models.through_a_file(compressor.state_dict())
    for message, changes in UNFIT.items():
        spoilt, changes = dict(state), dict(changes)
        shapes, settings = changes.pop("shapes", SHAPES), changes.pop("settings", {})
        for name, change in changes.items():
            spoilt[name] = spoilt[name] | change if name == "residues" else change
        model = models.parameters(shapes)
        _, compressor = make(hvd, model, **settings)
        with pytest.raises(ValueError, match=message):
            compressor.load_state_dict(spoilt)
        early = hvd.ScaleCom(**({"rate": 20, "beta": 0.5, "min_numel": 100} | settings))
        sgd = torch.optim.SGD(model.values(), lr=0.1)
        with pytest.raises(ValueError, match=message):
            early.load_state_dict(spoilt)
            hvd.DistributedOptimizer(sgd, model.items(), compression=early)
    with pytest.raises(ValueError, match="it lacks config, residues, settings, step, version"):
        compressor.load_state_dict({"param_groups": []})


@in_modes([{}, {"lookahead": True}, {"warmup_steps": 100}])
def test_ranks_that_load_the_residues_of_one_rank_are_refused(library, mode):
    """Residues would be sent several times. Residues that changed their ranks are no less right."""
    optimizer, compressor = make(library, model := models.parameters(SHAPES), **mode)
    models.take_steps(optimizer, model, range(3))
    states = hvd.allgather_object(compressor.state_dict(), name="states")
    optimizer, compressor = make(library, model := models.parameters(SHAPES), **mode)
    compressor.load_state_dict(states[(hvd.rank() + 1) % hvd.size()])
    models.take_steps(optimizer, model, range(3, 5))
    assert compressor.stats()["step"] == 5
    for ranks in (hvd.size(), 8):
        optimizer, compressor = make(library, model := models.parameters(SHAPES), **mode)
        compressor.load_state_dict(states[0] | {"ranks": ranks})
        refusal = "ranks 0 and 1 have both loaded the residues of rank 0"
        with pytest.raises(RuntimeError, match=refusal):
            models.take_steps(optimizer, model, range(3, 5))


def test_buckets_of_a_state_that_no_longer_fit_are_made_anew():
    """A parameter has become float64, so it cannot share a bucket."""

    def train(dtype, state, steps):
        model = models.parameters({"a": (4096,)}) | models.parameters({"b": (40_000,)}, dtype)
        # Unrounded, the residues of gradients of ones are whole numbers.
        optimizer, compressor = make(hvd, model, beta=1.0, bits=32)
        if state is not None:
            compressor.load_state_dict(state)
        for _ in range(steps):
            optimizer.zero_grad()
            sum((p * torch.ones_like(p)).sum() for p in model.values()).backward()
            optimizer.step()
        return compressor

    before = train(torch.float32, None, 2)
    assert len(before.residues.buckets) == 1
    after = train(torch.float64, models.through_a_file(before.state_dict()), 3)
    assert len(after.residues.buckets) == 2
    for tensor in after.residues.tensors.values():
        assert set(tensor.residue.tolist()) <= {0, 1, 2, 3, 4, 5}


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
        model = models.parameters(SHAPES)
        settings = {"process_set": ranks, "rate": 20, "min_numel": 100} | mode
        optimizer, compressor = models.wrap(
            library, model, options={"process_set": ranks}, **settings
        )
        before = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        if state is not None:
            compressor.load_state_dict(state)
            for name, residue in state["residues"].items():
                before[name] = (residue / compressor.config.beta).numpy()
        models.take_steps(optimizer, model, steps)
        came_in = {}
        for name, mine in before.items():
            mine = mine + sum(gradients(SHAPES, hvd.rank(), step)[name] for step in steps)
            came_in[name] = hvd.allreduce(
                torch.as_tensor(mine), op=hvd.Sum, name=f"came_in.{name}", process_set=ranks
            ).numpy()
        models.assert_nothing_is_lost(model, compressor, came_in, ranks.size(), ranks)
        assert compressor.stats()["step"] == steps[-1] + 1
        return models.through_a_file(compressor.state_dict())

    everyone = resume(None, range(3), hvd.global_process_set)
    fewer = resume(everyone, range(3, 5), halves)
    assert f"on {halves.size()} ranks, after training on {hvd.size()}" in caplog.text
    caplog.clear()
    newcomer = hvd.rank() >= hvd.size() // 2
    resume(None if newcomer else fewer, range(5, 8), hvd.global_process_set)
    assert newcomer or f"on {hvd.size()} ranks, after training on {halves.size()}" in caplog.text


@horovods_alone
def test_a_rank_outside_the_process_set_loads_its_state():
    ranks = hvd.add_process_set([0])
    options = {"process_set": ranks}
    _, compressor = models.wrap(hvd, models.parameters(SHAPES), options=options, rate=20, **options)
    compressor.load_state_dict(compressor.state_dict())
    hvd.remove_process_set(ranks)


@horovods_alone
def test_stock_resumes_with_a_parameter_that_another_optimizer_trains():
    state = None
    for _ in range(2):
        model = models.parameters({"mine": (4096,), "other": (4096,)})
        optimizer, compressor = make(stock, model, trained={"mine": model["mine"]})
        if state is not None:
            compressor.load_state_dict(state)
        models.take_steps(optimizer, model, range(3), skips=lambda rank, step: ["other"])
        state = models.through_a_file(compressor.state_dict())
    assert state["step"] == 6
    assert models.same_on_all_ranks(model.values())


@horovods_alone
@in_modes(MODES[:2])
def test_horovods_elastic_states_keep_residues(library, mode):
    net = torch.nn.Linear(100, 60)
    model = dict(net.named_parameters())
    optimizer, compressor = make(library, model, **mode)
    models.take_steps(optimizer, model, range(3))
    # the elastic state of Horovod itself knows residues too
    state = library.elastic.TorchState(net, optimizer, batch=3)
    state.sync()
    models.take_steps(optimizer, model, range(3, 5))
    state.batch = 5
    state.save()
    saved = copy.deepcopy(compressor.state_dict())
    models.take_steps(optimizer, model, range(5, 8))
    went_on = values_of(model)
    optimizer.zero_grad()
    shapes = {name: p.shape for name, p in model.items()}
    models.feed(model, gradients(shapes, hvd.rank(), 8))  # a step is under way
    stock.barrier()  # Horovod refuses a name that is still under way
    state.restore()
    restored = compressor.state_dict()
    assert (state.batch, restored["step"]) == (5, saved["step"])
    for name, residue in saved["residues"].items():
        assert torch.equal(restored["residues"][name], residue), name
    models.take_steps(optimizer, model, range(5, 8))
    for name, parameter in model.items():
        assert torch.equal(parameter, went_on[name]), name
    assert models.same_on_all_ranks(model.values())


@horovods_alone
@in_every_library
def test_a_newcomer_of_an_elastic_run_goes_on_where_the_others_are(library, monkeypatch):
    """The others keep their residues. In Horovod's own optimizer, all meet before a gradient."""
    from horovod.torch import mpi_ops

    def begin():
        net = torch.nn.Linear(100, 60)
        model = dict(net.named_parameters())
        optimizer, compressor = make(library, model)
        return model, optimizer, compressor, library.elastic.TorchState(net, optimizer)

    model, optimizer, compressor, state = begin()
    models.take_steps(optimizer, model, range(3))
    before = compressor.state_dict()["residues"]["weight"].clone()
    if hvd.rank() == 1:
        model, optimizer, compressor, state = begin()
    # Horovod has started again.
    monkeypatch.setattr(mpi_ops, "_handle_map", dict(mpi_ops._handle_map))
    state.sync()
    assert compressor.stats()["step"] == 3 or library is hvd
    residue = compressor.state_dict()["residues"]["weight"]
    assert not residue.any() if hvd.rank() == 1 else torch.equal(residue, before)
    models.take_steps(optimizer, model, range(3, 6))
    assert compressor.stats()["step"] == 6
    assert compressor.stats()["bytes_values"] > 0
    assert models.same_on_all_ranks(model.values())


def let_rank_1_go_back(optimizer, compressor, model):
    """Train. Load step 3 on rank 1, and step 5 on all other ranks. Return this rank's residues."""
    models.take_steps(optimizer, model, range(3))
    older = models.through_a_file(compressor.state_dict())
    models.take_steps(optimizer, model, range(3, 5))
    newer = models.through_a_file(compressor.state_dict())
    compressor.load_state_dict(older if hvd.rank() == 1 else newer)
    return copy.deepcopy(compressor.state_dict()["residues"])


@pytest.mark.parametrize("mode", MODES[1::2], ids=str)
def test_a_rank_that_loads_an_older_state_has_other_offsets(mode):
    """Ranks that gathered at different offsets would average unlike elements.

    If their offsets differ, the next step is sent whole.
    """
    model = models.parameters(SHAPES)
    optimizer, compressor = make(hvd, model, **mode)
    before = let_rank_1_go_back(optimizer, compressor, model)
    models.take_steps(optimizer, model, range(5, 6))
    assert compressor.stats()["step"] == 6
    assert compressor.stats()["bytes_values"] == 0
    for name, residue in compressor.state_dict()["residues"].items():
        assert torch.equal(residue, before[name]), name
    models.take_steps(optimizer, model, range(6, 9))
    assert compressor.stats()["bytes_values"] > 0
    assert models.same_on_all_ranks(model.values())


@horovods_alone
def test_stock_refuses_ranks_with_states_of_different_steps():
    """There ranks can compare only at the first step's end, but before any parameter is changed."""
    model = models.parameters(SHAPES)
    optimizer, compressor = make(stock, model)
    before = let_rank_1_go_back(optimizer, compressor, model)
    weights = values_of(model)
    with pytest.raises(RuntimeError, match="look-ahead offsets differ between ranks"):
        models.take_steps(optimizer, model, range(5, 6))
    torch.testing.assert_close(compressor.state_dict()["residues"], before, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(model[name], weight) for name, weight in weights.items())


@horovods_alone
def test_a_commit_is_whole_though_offsets_in_flight_never_arrive(monkeypatch):
    """A worker that dies after a step leaves the other ranks without the next offsets.

    Their commit is of this step all the same.
    """
    from scalecom_hvd.torch.horovod_collectives import HorovodWork

    net = torch.nn.Linear(100, 60)
    model = dict(net.named_parameters())
    optimizer, compressor = make(hvd, model, lookahead=True)

    models.take_steps(optimizer, model, range(3))
    state = hvd.elastic.TorchState(net, optimizer, batch=3)
    models.take_steps(optimizer, model, range(3, 5))
    wait = HorovodWork.wait
    with monkeypatch.context() as patch:

        def lost(work):
            wait(work)
            raise hvd.HorovodInternalError("a worker was lost")

        patch.setattr(HorovodWork, "wait", lost)
        state.batch = 5
        state.save()
    residues = copy.deepcopy(compressor.state_dict()["residues"])
    models.take_steps(optimizer, model, range(5, 7))
    state.restore()
    assert (state.batch, compressor.stats()["step"]) == (5, 5)
    for name, residue in compressor.state_dict()["residues"].items():
        assert torch.equal(residue, residues[name]), name
    models.take_steps(optimizer, model, range(5, 8))
    assert models.same_on_all_ranks(model.values())


@pytest.mark.skipif(hvd.size() < 2, reason="one rank lacks a gradient that another has")
@horovods_alone
def test_look_ahead_resumed_where_a_sparse_gradient_comes_on_one_rank_only():
    """Ranks decide whether the first step is sent whole only when all know what is sparse."""
    state = None
    for uses_table in ([True] * 3, [hvd.rank() == 0]):
        model = models.parameters({"table": (200, 20), "layer": (200, 20)})
        optimizer, compressor = models.wrap(hvd, model, rate=10, lookahead=True)
        if state is not None:
            compressor.load_state_dict(state)
        for uses in uses_table:
            optimizer.zero_grad()
            words, own = torch.arange(4), gradients({"layer": (200, 20)}, hvd.rank(), 0)["layer"]
            loss = (model["layer"] * torch.as_tensor(own)).sum()
            if uses:
                rows = torch.nn.functional.embedding(words, model["table"], sparse=True)
                loss = loss + rows.sum()
            loss.backward()
            optimizer.step()
        state = copy.deepcopy(compressor.state_dict())
    assert compressor.stats()["step"] == 4
    assert compressor.stats()["bytes_values"] > 0, "it was sent whole, though all offsets are known"
