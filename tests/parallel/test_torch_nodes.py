"""Horovod's face with gradients sent whole inside a node, and compressed between two nodes.

The oracles are stock Horovod, and reference.py with each node as one worker. All ranks are on one
host, so the tests deal them to two nodes.
"""

import gc
import io

import horovod.torch as horovod
import numpy as np
import pytest
import torch
from models import OPTIMIZERS, SETTINGS, assert_close, loss, make_model, same_on_all_ranks
from oracles import nodes as oracle

import scalecom_hvd.torch as hvd
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.torch.horovod_nodes import process_sets

NODES = 2


@pytest.fixture(autouse=True, scope="module")
def no_process_sets_are_left():
    """Other files make the same process sets, and Horovod can have only one of each."""
    yield
    remove_process_sets()


def remove_process_sets():
    """Remove all process sets except the one of all ranks. All ranks must call this."""
    gc.collect()
    for ranks, process_set in sorted(process_sets().items()):
        if len(ranks) < hvd.size():
            horovod.remove_process_set(process_set)


def make(optimizer="sgd", model=None, compression=None, **settings):
    model = make_model() if model is None else model
    passes = settings.pop("backward_passes_per_step", 1)
    settings = {**SETTINGS, **settings}
    method = compression(rate=5, min_numel=20) if compression else hvd.ScaleCom(**settings)
    wrapped = hvd.DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()),
        model.named_parameters(),
        compression=method,
        backward_passes_per_step=passes,
        nodes=NODES,
    )
    return model, wrapped


def stock(passes):
    model = make_model()
    wrapped = horovod.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
    )
    return model, wrapped


def take(model, optimizer, step):
    optimizer.zero_grad()
    loss(model, hvd.rank(), step).backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lookahead": True}, {"nu": 0.4, "bits": 3, "rate": 8}],
    ids=str,
)
def test_a_node_is_one_worker_of_the_reference(optimizer, settings):
    model, wrapped = make(optimizer, **settings)
    for step in range(12):
        take(model, wrapped, step)
        assert same_on_all_ranks(model.parameters())
    other, local = make_model(), hvd.size() // NODES
    references = oracle.train(
        other,
        OPTIMIZERS[optimizer](other.parameters()),
        ScaleComConfig(**{"nu": 1, **SETTINGS, **settings}),
        NODES,
        local,
        12,
        loss,
        oracle.flat_parts,
    )
    assert_close(model, other)
    node, place = divmod(hvd.rank(), local)
    own, tensors = references[place].residues[node], wrapped.compression.residues.tensors
    assert own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor.residue, own[name].ravel(), rtol=1e-4, atol=1e-6)
    stats = wrapped.compression.stats()
    assert stats["ranks_per_node"] == local
    assert (stats["bytes_in_node"] > 0) == (local > 1)


def test_with_everything_chosen_it_is_stock_horovod():
    """Also after several passes. test_torch_orders.py has other orders of calls."""
    model, wrapped = make(rate=1, backward_passes_per_step=2)
    other, optimizer = stock(passes=2)
    for step in range(3):
        for m, o in ((model, wrapped), (other, optimizer)):
            o.zero_grad()
            for micro in range(2):
                loss(m, hvd.rank(), 2 * step + micro).backward()
            o.step()
    assert_close(model, other)


@pytest.mark.parametrize("compression", [None, hvd.LocalTopK, hvd.RandomK])
def test_nothing_is_lost(compression):
    """Nothing is lost even after a refused step."""
    model, wrapped = make(compression=compression)
    named = dict(model.named_parameters())
    left = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in range(12):
        wrapped.zero_grad()
        loss(model, hvd.rank(), step).backward()
        came = {name: p.grad.clone() for name, p in named.items()}
        if step == 4 and hvd.rank() == hvd.size() - 1:
            next(iter(named.values())).grad[0, 0] = float("nan")
        if step == 4:  # this step is refused: the script has changed it on its way
            with pytest.raises(RuntimeError, match="were changed on some rank"):
                wrapped.step()
            continue
        if step == 6:
            with pytest.raises(RuntimeError, match="between backward.* with nodes="):
                wrapped.load_state_dict(wrapped.state_dict())
        wrapped.synchronize()
        for name, p in named.items():
            left[name] += came[name] - p.grad
        with wrapped.skip_synchronize():
            wrapped.step()
    assert same_on_all_ranks(model.parameters())
    stage = wrapped._gradients._stage
    _, place = divmod(hvd.rank(), hvd.size() // NODES)
    for name, total in left.items():
        total = hvd.allreduce(total, op=hvd.Average, name="left")
        tensor = wrapped.compression.residues.tensors.get(name)
        if tensor is None:
            assert total.abs().max() < 1e-9
            continue
        waits = torch.zeros_like(total)
        stage.cut(name, waits.view(-1)).copy_(tensor.residue / tensor.beta)
        waits = hvd.allreduce(waits, op=hvd.Sum, name="waits") / NODES
        assert total.any()
        torch.testing.assert_close(total, waits, rtol=1e-4, atol=1e-6)


def test_a_frozen_parameter_stays_where_it_is():
    model, wrapped = make("sgd")
    for step in range(4):
        take(model, wrapped, step)
    frozen = model[2].weight.requires_grad_(False)
    before = frozen.detach().clone()
    for step in range(4, 10):
        take(model, wrapped, step)
    assert torch.equal(frozen, before)
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize(
    "settings", [{"min_numel": 0}, {"min_numel": 10, "rates": {"auto:output": 2}}], ids=str
)
def test_all_ranks_of_a_node_compress_the_same(settings):
    """Some shards of a bias of 3 elements are smaller than others, or empty."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(12, 3), torch.nn.Tanh(), torch.nn.Linear(3, 6))
    model, wrapped = make("adamw", model=model.double(), nu=None, **settings)
    for step in range(5):
        take(model, wrapped, step)
        assert same_on_all_ranks(model.parameters())
    rates = wrapped.compression.residues.rates
    found = [rates] * hvd.size()
    assert hvd.allgather_object(rates, name="rates") == found
    assert rates["0.bias"] == (1 if "rates" in settings else 5)
    assert rates["2.weight"] == (2 if "rates" in settings else 5)


def test_ranks_with_other_parameters_are_warned(caplog):
    """Stock Horovod trains on."""
    model, wrapped = make(rate=1, model=make_model(seed=hvd.rank()))
    take(model, wrapped, 7)
    assert any("different parameters" in record.getMessage() for record in caplog.records)


def test_a_gradient_that_is_not_finite_voids_the_step_on_all_ranks():
    model, wrapped = make()
    for step in range(3):
        take(model, wrapped, step)
    before = {n: t.residue.clone() for n, t in wrapped.compression.residues.tensors.items()}
    wrapped.zero_grad()
    (loss(model, hvd.rank(), 3) * (float("inf") if hvd.rank() == 0 else 1)).backward()
    wrapped.synchronize()
    assert all(p.grad.isnan().all() for p in model.parameters())
    for name, tensor in wrapped.compression.residues.tensors.items():
        torch.testing.assert_close(tensor.residue, before[name], rtol=1e-5, atol=1e-6)
    take(model, wrapped, 4)
    stats = wrapped.compression.stats()
    assert (stats["step"], stats["skipped_steps"]) == (4, 1)


def test_stopped_and_resumed():
    settings = {"nu": None, "lookahead": True}
    model, wrapped = make("adamw", **settings)
    for step in range(6):
        take(model, wrapped, step)
        if step == 2:
            file = io.BytesIO()
            parts = model.state_dict(), wrapped.state_dict(), wrapped.compression.state_dict()
            torch.save(parts, file)
    file.seek(0)
    of_model, of_optimizer, of_residues = torch.load(file, weights_only=True)
    again, second = make("adamw", model=make_model(seed=5), **settings)
    again.load_state_dict(of_model)
    second.load_state_dict(of_optimizer)
    second.compression.load_state_dict(of_residues)
    for step in range(3, 6):
        second.zero_grad()
        loss(again, hvd.rank(), step).backward()
        second.synchronize()
        with second.skip_synchronize():
            second.step()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_cannot_work_is_refused():
    def wrap(nodes=NODES, **more):
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"compression": hvd.ScaleCom, "nodes": nodes} | more
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), **settings)

    with pytest.raises(ValueError, match="all . ranks are one node.*give nodes=2"):
        wrap(nodes=True)
    with pytest.raises(ValueError, match="nodes=3 does not divide"):
        wrap(nodes=3)
    for settings in ({"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"local_steps": 4}):
        with pytest.raises(ValueError, match=f"{[*settings][0]} cannot be used with nodes="):
            wrap(**settings)
