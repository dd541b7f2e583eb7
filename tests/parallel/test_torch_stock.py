"""ScaleCom in horovod.torch's own DistributedOptimizer.

That optimizer tells a compressor neither names nor steps.
"""

import horovod.torch as hvd
import models
import numpy as np
import pytest
import torch
from made_up import SHAPES, came_in, gradients
from parity import run_against_reference

import scalecom_hvd.torch as dropin
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.torch import ScaleCom


def optimizer_of(model, compression, lr=0.1):
    sgd = torch.optim.SGD(model.values(), lr=lr)
    return hvd.DistributedOptimizer(sgd, model.items(), compression=compression)


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": 100, "beta": 1.0},
        {"rate": 7, "beta": 0.3},
        {"rate": 20, "beta": 0.5, "dtype": np.float16, "tolerance": 1e-3},
        {"rate": 30, "selection": "exact", "warmup_steps": 4, "steps": 20},
    ],
    ids=str,
)
def test_parity(settings):
    run_against_reference(stock=True, **settings)


def test_an_average_that_overflows_half_precision_does_not_count():
    """What waited fits into the residue, but not into p.grad, which carries the loss scale."""
    model = {"w": torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))}
    compression = ScaleCom(model.items(), rate=4, min_numel=0, loss_scale=lambda: 1024.0)
    optimizer = optimizer_of(model, compression, lr=0.0)
    for skipped in (0, 0, 1, 2):  # the first step is whole, and the third would send 80 * 1024
        optimizer.zero_grad()
        (model["w"].float() * 40 * 1024).sum().backward()
        optimizer.synchronize()
        assert compression.stats()["skipped_steps"] == skipped
        found = model["w"].grad
        assert bool(found.isnan().all() if skipped else found.isfinite().all())
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("compression", [ScaleCom, "without parameters"])
def test_stock_needs_the_parameters(compression):
    model = models.parameters(SHAPES)
    optimizer = optimizer_of(model, ScaleCom() if isinstance(compression, str) else compression)
    with pytest.raises(
        TypeError,
        match=r"Write compression=ScaleCom\(named_parameters=model.named_parameters\(\)\)",
    ):
        models.feed(model, gradients(SHAPES, hvd.rank(), 0))
        optimizer.synchronize()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_what_is_no_real_number_is_refused(dtype):
    with pytest.raises(
        TypeError, match=f"floating-point gradients, not {dtype}: use hvd.Compression.none"
    ):
        hvd.allreduce(torch.ones(5, dtype=dtype), compression=ScaleCom(named_parameters=[]))


def test_names_given_to_scalecom():
    model = models.parameters(SHAPES)
    for names, message in (
        (list(model), "should be .name, parameter. tuples"),
        (list(model.values()), "should be .name, parameter. tuples"),
        ([("same", p) for p in model.values()], "must be unique, but same names several"),
    ):
        with pytest.raises(ValueError, match=message):
            ScaleCom(names)
    optimizer = optimizer_of(model, ScaleCom(list(model.items())[:2]))
    with pytest.raises(TypeError, match="cannot tell which parameter's gradient"):
        models.feed(model, gradients(SHAPES, hvd.rank(), 0))
        optimizer.synchronize()


def test_tied_parameters_go_by_one_name():
    """Gradients come in another order on every rank, and that order says nothing about names."""
    shapes = {"first": (4096,), "middle": (4096,)}
    model = models.parameters(shapes)
    named = [*model.items(), ("last", model["first"])]
    compressor = ScaleCom(iter(named), rate=20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=1.0), iter(named), compression=compressor
    )
    for step in range(6):
        optimizer.zero_grad()
        grads = gradients(shapes, hvd.rank(), step)
        for name in list(shapes)[:: 1 if hvd.rank() % 2 else -1]:
            (model[name] * torch.as_tensor(grads[name])).sum().backward()
        optimizer.step()
    assert list(compressor.residues.tensors) == ["first", "middle"]
    assert models.same_on_all_ranks(model.values())
    total = came_in(range(hvd.size()), range(6), shapes)
    models.assert_nothing_is_lost(model, compressor, total, hvd.size())


def test_one_object_for_two_optimizers():
    shapes = {"a": (4096,), "b": (4096,)}
    model = models.parameters(shapes)
    shared = ScaleCom(model.items(), rate=4)
    optimizers = [optimizer_of({name: p}, shared) for name, p in model.items()]
    models.feed(model, gradients(shapes, hvd.rank(), 0), skip=["b"])
    optimizers[0].step()
    models.feed(model, gradients(shapes, hvd.rank(), 1), skip=["a"])
    with pytest.raises(ValueError, match="Make one for each"):
        optimizers[1].step()


def test_a_dropin_optimizers_object_compresses_nothing_else():
    optimizer, compressor = models.wrap(dropin, models.parameters(SHAPES))
    with pytest.raises(TypeError, match="compresses nothing else"):
        hvd.allreduce(torch.zeros(5), compression=compressor)


def test_stats_before_the_first_step_of_an_elastic_run():
    _, compressor = models.wrap(hvd, models.parameters(SHAPES), rate=20)
    compressor.rejoin()
    stats = compressor.stats()
    assert (stats["step"], stats["collectives"]) == (0, 0)


def test_stats_are_those_of_look_ahead_with_a_bucket_for_each_tensor():
    found = []
    for library, more in ((hvd, {}), (dropin, {"lookahead": True, "bits": 32})):
        model = models.parameters(SHAPES)
        optimizer, compressor = models.wrap(library, model, rate=20, warmup_steps=2, **more)
        for step in range(4):
            models.take_steps(optimizer, model, [step])
            found.append(compressor.stats())
    alike = ("step", "leader", "rate", "bytes_offsets", "bytes_values", "residue_norm")
    for own, other in zip(found[:4], found[4:], strict=True):
        assert [own[name] for name in alike] == pytest.approx([other[name] for name in alike])
        told = 4  # the bytes by which ranks tell each other of bad gradients
        assert own["bytes_dense"] == other["bytes_dense"] - told
        assert own["collectives"] == len(SHAPES) + (own["bytes_offsets"] > 0)


def test_averages_are_averaged_again_after_loading():
    """A new optimizer's ranks know only when its first step ends that nothing was new."""
    model = models.parameters(SHAPES)
    optimizer, compressor = models.wrap(hvd, model, rate=20)
    models.take_steps(optimizer, model, range(3))
    again, loads = models.wrap(hvd, model, rate=20)
    loads.load_state_dict(compressor.state_dict())
    before = models.numbers(loads), {name: p.grad.clone() for name, p in model.items()}
    again.synchronize()
    found = models.numbers(loads), {name: p.grad for name, p in model.items()}
    torch.testing.assert_close(found, before, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_gradient_that_cannot_be_compressed(fails_at, monkeypatch):
    """Nothing of its step is lost, whether other gradients were sent before or not."""
    model = models.parameters(SHAPES)
    optimizer, compressor = models.wrap(hvd, model, rate=20, beta=1.0)
    models.take_steps(optimizer, model, range(3))
    took, take = [], BucketStep.take_and_accumulate

    def fail(self, *args, **more):
        chosen = yield from take(self, *args, **more)
        took.append(self)
        if len(took) > fails_at:
            raise MemoryError
        return chosen

    monkeypatch.setattr(BucketStep, "take_and_accumulate", fail)
    with pytest.raises(MemoryError):
        models.take_steps(optimizer, model, [3])
    monkeypatch.undo()
    hvd.barrier()
    optimizer.load_state_dict(optimizer.state_dict())  # Horovod begins its step anew
    models.take_steps(optimizer, model, range(3, 6))
    assert compressor.stats()["step"] == 6
    total = came_in(range(hvd.size()), range(6), SHAPES)
    models.assert_nothing_is_lost(model, compressor, total, hvd.size())
