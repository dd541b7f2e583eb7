"""ScaleCom in horovod.torch's own DistributedOptimizer, which tells a compressor neither names nor steps."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from models import feed, gradients, parameters, same_on_all_ranks
from parity import run_against_reference

from scalecom_hvd.torch import ScaleCom

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (5000,)}


@pytest.mark.parametrize(("rate", "beta"), [(100, 1.0), (7, 0.3)])
def test_against_the_oracle(rate, beta):
    run_against_reference(stock=True, rate=rate, beta=beta)


def test_float16_gradients_and_wire():
    run_against_reference(np.float16, stock=True, rate=20, beta=0.5, tolerance=1e-3)
    run_against_reference(stock=True, rate=20, beta=0.5, wire_dtype="float16", tolerance=2e-2)


def test_exact_selection_and_warm_up():
    run_against_reference(stock=True, steps=20, rate=30, selection="exact", warmup_steps=4)


def train(skips, steps=12, **options):
    model = parameters(SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        named_parameters=model.items(),
        compression=ScaleCom(named_parameters=model.items(), rate=20, min_numel=100),
        **options,
    )
    for step in range(steps):
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step), skip=skips(hvd.rank(), step))
        optimizer.step()
    return model


def test_each_rank_skips_other_layers():
    names = list(SHAPES)
    model = train(lambda rank, step: [names[(rank + step) % 4], names[(rank * 2 + 1) % 4]])
    assert same_on_all_ranks(model.values())
    assert all(p.abs().sum() > 0 for p in model.values())


def test_one_rank_has_no_gradient_at_all():
    model = train(lambda rank, step: list(SHAPES) if step % hvd.size() == rank else [])
    assert same_on_all_ranks(model.values())


def test_groups_and_accumulation():
    assert same_on_all_ranks(train(lambda rank, step: [], groups=2).values())
    model = parameters(SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=1.0),
        named_parameters=model.items(),
        compression=ScaleCom(named_parameters=model.items(), rate=1),
        backward_passes_per_step=2,
    )
    feed(model, gradients(SHAPES, hvd.rank(), 0))
    feed(model, gradients(SHAPES, hvd.rank(), 1))
    optimizer.step()
    for name, parameter in model.items():
        expected = sum(gradients(SHAPES, r, s)[name] for r in range(hvd.size()) for s in range(2)) / hvd.size()
        np.testing.assert_allclose(-parameter.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_step_that_overflows_on_one_rank_never_happened():
    model = parameters(SHAPES)
    compressor = ScaleCom(named_parameters=model.items(), rate=20, beta=0.5, min_numel=100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.values(), lr=0.1), named_parameters=model.items(), compression=compressor)
    for step in range(8):
        grads = gradients(SHAPES, hvd.rank(), step)
        overflows = step in (3, 5)
        if overflows and hvd.rank() == step % hvd.size():
            grads["second"][1, 7] = np.inf
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


def test_sparse_as_dense():
    torch.manual_seed(1)
    table = torch.nn.Embedding(300, 20, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1),
        named_parameters=table.named_parameters(),
        compression=ScaleCom(named_parameters=table.named_parameters(), rate=10),
        sparse_as_dense=True,
    )
    for step in range(5):
        optimizer.zero_grad()
        table(torch.arange(30) + 10 * hvd.rank() + step).square().sum().backward()
        optimizer.step()
    assert same_on_all_ranks(table.parameters())


@pytest.mark.parametrize("compression", [ScaleCom, "without parameters"])
def test_stock_needs_the_parameters(compression):
    model = parameters(SHAPES)
    compression = ScaleCom() if isinstance(compression, str) else compression
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.values(), lr=0.1), named_parameters=model.items(), compression=compression)
    with pytest.raises(TypeError, match=r"write compression=ScaleCom\(named_parameters=model.named_parameters\(\), rate=100\)"):
        feed(model, gradients(SHAPES, hvd.rank(), 0))
        optimizer.synchronize()


def test_integers_are_refused():
    with pytest.raises(TypeError, match="floating-point gradients, not torch.int64: use hvd.Compression.none"):
        hvd.allreduce(torch.arange(5), compression=ScaleCom(named_parameters=[]))


def test_tensors_that_are_no_gradient_are_refused():
    with pytest.raises(TypeError, match="cannot tell whose gradient"):
        hvd.allreduce(torch.zeros(5), compression=ScaleCom(named_parameters=parameters(SHAPES).items()))


def test_a_sparse_embedding_that_a_later_step_does_not_use():
    torch.manual_seed(2)
    table, weight = torch.nn.Embedding(100, 64, sparse=True), torch.nn.Parameter(torch.zeros(4096))
    hvd.broadcast_parameters(table.state_dict(), 0)
    named = [("table", table.weight), ("weight", weight)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, weight], lr=0.1), named, compression=ScaleCom(named, rate=4, min_numel=100)
    )
    for step in range(5):
        optimizer.zero_grad()
        loss = (weight * torch.from_numpy(gradients({"w": (4096,)}, hvd.rank(), step)["w"])).sum()
        if step != 2:
            loss = loss + table(torch.tensor([step])).sum()
        loss.backward()
        optimizer.step()
    assert same_on_all_ranks([table.weight, weight])


def test_one_object_for_two_optimizers():
    model = parameters({"a": (4096,), "b": (4096,)})
    shared = ScaleCom(model.items(), rate=4)
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [(name, p)], shared) for name, p in model.items()]
    feed(model, gradients({"a": (4096,), "b": (4096,)}, hvd.rank(), 0), skip=["b"])
    optimizers[0].step()
    feed(model, gradients({"a": (4096,), "b": (4096,)}, hvd.rank(), 1), skip=["a"])
    with pytest.raises(ValueError, match="make one for each"):
        optimizers[1].step()


def test_a_dropin_optimizers_object_compresses_nothing_else():
    import scalecom_hvd.torch as dropin

    model = parameters(SHAPES)
    optimizer = dropin.DistributedOptimizer(torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=dropin.ScaleCom)
    with pytest.raises(TypeError, match="compresses nothing else"):
        hvd.allreduce(torch.zeros(5), compression=optimizer.compression)
