"""ScaleCom in horovod.torch's own DistributedOptimizer.

That optimizer tells a compressor neither names nor steps.
"""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from models import SHAPES, assert_nothing_is_lost, feed, gradients, parameters, same_on_all_ranks
from parity import run_against_reference

from scalecom_hvd.reference import ScaleComReference
from scalecom_hvd.torch import ScaleCom


@pytest.mark.parametrize(("rate", "beta"), [(100, 1.0), (7, 0.3)])
def test_against_the_oracle(rate, beta):
    run_against_reference(stock=True, rate=rate, beta=beta)


def test_float16_gradients():
    run_against_reference(np.float16, stock=True, rate=20, beta=0.5, tolerance=1e-3)


def test_exact_selection_and_warm_up():
    run_against_reference(stock=True, steps=20, rate=30, selection="exact", warmup_steps=4)


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_integers_of_few_bits(warmup_steps):
    run_against_reference(stock=True, rate=16, bits=3, beta=0.3, warmup_steps=warmup_steps)


@pytest.mark.parametrize(
    "options", [{"op": hvd.Sum}, {"gradient_predivide_factor": 3.0}, {}], ids=str
)
@pytest.mark.parametrize("bits", [2, 3])
def test_integers_are_what_the_script_asks_for(bits, options):
    """Horovod sums, divides before, or divides after, and does not tell a compressor which."""
    shapes = {"weight": (70, 100), "bias": (40,)}
    model = parameters(shapes)
    compressor = ScaleCom(named_parameters=model.items(), rate=16, bits=bits, min_numel=2)
    reference = ScaleComReference(hvd.size(), shapes, compressor.config.replace(lookahead=True))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.0),
        named_parameters=model.items(),
        compression=compressor,
        **options,
    )
    for step in range(6):
        everyone = [gradients(shapes, rank, step) for rank in range(hvd.size())]
        if step == 4:
            everyone[-1]["bias"][3] = np.inf
        feed(model, everyone[hvd.rank()])
        optimizer.step()
        averages = reference.step(everyone)
        for name, parameter in model.items():
            if step == 4:
                assert parameter.grad.isnan().any() == (name == "bias")
                continue
            want = averages[name] * (hvd.size() if options.get("op") == hvd.Sum else 1)
            np.testing.assert_allclose(parameter.grad.numpy(), want, rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()


def test_a_step_that_overflows_on_one_rank_never_happened():
    model = parameters(SHAPES)
    compressor = ScaleCom(named_parameters=model.items(), rate=20, beta=0.5, min_numel=100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        named_parameters=model.items(),
        compression=compressor,
    )
    overflowing = {3: np.inf, 5: 1e38}
    for step in range(8):
        grads = gradients(SHAPES, hvd.rank(), step)
        overflows = step in overflowing
        if overflows and hvd.rank() == step % hvd.size():
            grads["second"][1, 7] = overflowing[step]
        before = {name: t.residue.clone() for name, t in compressor.residues.tensors.items()}
        optimizer.zero_grad()
        feed(model, grads)
        optimizer.synchronize()
        assert all(p.grad.isfinite().all() for p in model.values()) == (not overflows)
        if overflows:
            for name, tensor in compressor.residues.tensors.items():
                torch.testing.assert_close(tensor.residue, before[name], rtol=1e-5, atol=1e-5)
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert compressor.stats()["step"] == 6
    assert compressor.stats()["skipped_steps"] == 2
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("compression", [ScaleCom, "without parameters"])
def test_stock_needs_the_parameters(compression):
    model = parameters(SHAPES)
    compression = ScaleCom() if isinstance(compression, str) else compression
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        named_parameters=model.items(),
        compression=compression,
    )
    with pytest.raises(
        TypeError,
        match=r"Write compression=ScaleCom\(named_parameters=model.named_parameters\(\)\)",
    ):
        feed(model, gradients(SHAPES, hvd.rank(), 0))
        optimizer.synchronize()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_what_is_no_real_number_is_refused(dtype):
    with pytest.raises(
        TypeError, match=f"floating-point gradients, not {dtype}: use hvd.Compression.none"
    ):
        hvd.allreduce(torch.ones(5, dtype=dtype), compression=ScaleCom(named_parameters=[]))


def test_names_given_to_scalecom():
    model = parameters(SHAPES)
    for names, message in (
        (list(model), "should be .name, parameter. tuples"),
        (list(model.values()), "should be .name, parameter. tuples"),
        ([("same", p) for p in model.values()], "must be unique, but same names several"),
    ):
        with pytest.raises(ValueError, match=message):
            ScaleCom(names)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), compression=ScaleCom(list(model.items())[:2])
    )
    with pytest.raises(TypeError, match="cannot tell which parameter's gradient"):
        feed(model, gradients(SHAPES, hvd.rank(), 0))
        optimizer.synchronize()


def test_tied_parameters_go_by_one_name():
    """Gradients come in another order on every rank, and that order says nothing about names."""
    shapes = {"first": (4096,), "middle": (4096,)}
    model = parameters(shapes)
    named = [*model.items(), ("last", model["first"])]
    compressor = ScaleCom(iter(named), rate=20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=1.0), iter(named), compression=compressor
    )
    total = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    for step in range(6):
        optimizer.zero_grad()
        grads = gradients(shapes, hvd.rank(), step)
        for name in list(shapes)[:: 1 if hvd.rank() % 2 else -1]:
            (model[name] * torch.as_tensor(grads[name])).sum().backward()
        optimizer.step()
        for rank in range(hvd.size()):
            for name, grad in gradients(shapes, rank, step).items():
                total[name] += grad
    assert list(compressor.residues.tensors) == ["first", "middle"]
    assert same_on_all_ranks(model.values())
    assert_nothing_is_lost(model, compressor, total, hvd.size())


def test_tensors_that_are_no_gradient_are_refused():
    with pytest.raises(TypeError, match="cannot tell which parameter's gradient"):
        hvd.allreduce(
            torch.zeros(5), compression=ScaleCom(named_parameters=parameters(SHAPES).items())
        )


def test_a_sparse_embedding_that_a_later_step_does_not_use():
    torch.manual_seed(2)
    table, weight = torch.nn.Embedding(100, 64, sparse=True), torch.nn.Parameter(torch.zeros(4096))
    hvd.broadcast_parameters(table.state_dict(), 0)
    named = [("table", table.weight), ("weight", weight)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, weight], lr=0.1),
        named,
        compression=ScaleCom(named, rate=4, min_numel=100),
    )
    for step in range(5):
        optimizer.zero_grad()
        loss = (weight * torch.as_tensor(gradients({"w": (4096,)}, hvd.rank(), step)["w"])).sum()
        if step != 2:
            loss = loss + table(torch.tensor([step])).sum()
        loss.backward()
        optimizer.step()
    assert same_on_all_ranks([table.weight, weight])


def test_one_object_for_two_optimizers():
    model = parameters({"a": (4096,), "b": (4096,)})
    shared = ScaleCom(model.items(), rate=4)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [(name, p)], shared)
        for name, p in model.items()
    ]
    feed(model, gradients({"a": (4096,), "b": (4096,)}, hvd.rank(), 0), skip=["b"])
    optimizers[0].step()
    feed(model, gradients({"a": (4096,), "b": (4096,)}, hvd.rank(), 1), skip=["a"])
    with pytest.raises(ValueError, match="Make one for each"):
        optimizers[1].step()


def test_a_dropin_optimizers_object_compresses_nothing_else():
    import scalecom_hvd.torch as dropin

    model = parameters(SHAPES)
    optimizer = dropin.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=dropin.ScaleCom
    )
    with pytest.raises(TypeError, match="compresses nothing else"):
        hvd.allreduce(torch.zeros(5), compression=optimizer.compression)


def test_stats_before_the_first_step_of_an_elastic_run():
    model = parameters(SHAPES)
    compressor = ScaleCom(model.items(), rate=20)
    hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=compressor
    )
    compressor.rejoin()
    stats = compressor.stats()
    assert (stats["step"], stats["collectives"]) == (0, 0)
