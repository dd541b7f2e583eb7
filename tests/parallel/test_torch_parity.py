"""The drop-in optimizer against the oracle: the same selections and values as n simulated workers, over many steps."""

import numpy as np
import pytest
import torch
from models import ODD_SHAPES, feed, gradients, parameters, same_on_all_ranks

import scalecom_hvd.torch as hvd
from scalecom_hvd.reference import ScaleComReference

TORCH_DTYPES = {np.float16: torch.float16, np.float32: torch.float32, np.float64: torch.float64}


def run_against_reference(dtype=np.float32, steps=50, shapes=ODD_SHAPES, tolerance=1e-5, **settings):
    settings.setdefault("min_numel", 2)
    n, rank = hvd.size(), hvd.rank()
    model = parameters(shapes, TORCH_DTYPES[dtype])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), named_parameters=model.items(), compression=hvd.ScaleCom(**settings)
    )
    compressor = optimizer.compression
    reference = ScaleComReference(n, shapes, compressor.config)
    for step in range(steps):
        everyone = [gradients(shapes, r, step, dtype) for r in range(n)]
        optimizer.zero_grad()
        feed(model, everyone[rank])
        optimizer.synchronize()
        if step == 0:
            reference.bucket_of = {name: b for b, names in enumerate(compressor.residues.buckets) for name in names}
        averages = reference.step(everyone)
        for name, parameter in model.items():
            got = parameter.grad.numpy()
            assert got.dtype == dtype
            assert got.shape == shapes[name]
            chosen = reference.selections.get(name)
            if chosen is not None:
                assert not np.delete(got.reshape(-1), chosen).any(), f"{name} at step {step}: something outside the selection was sent"
            np.testing.assert_allclose(got, averages[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} at step {step}")
        for name, tensor in compressor.residues.tensors.items():
            # To the bit: what a worker keeps depends on its own arithmetic alone.
            np.testing.assert_array_equal(
                tensor.residue.view(tensor.shape).numpy(),
                reference.residues[rank].get(name, np.zeros(tensor.shape)),
                err_msg=f"{name} at step {step}",
            )
        with optimizer.skip_synchronize():
            optimizer.step()
    assert same_on_all_ranks(model.values())
    return compressor


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(("rate", "beta"), [(100, 1.0), (100, 0.1), (7, 0.3), (2.5, 1.0), (400, 0.5)])
def test_lanes(rate, beta, lookahead):
    run_against_reference(rate=rate, beta=beta, lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_gradient_dtypes(dtype, lookahead):
    run_against_reference(dtype, rate=50, beta=0.3, lookahead=lookahead, tolerance=1e-3 if dtype is np.float16 else 1e-12)


@pytest.mark.parametrize("lookahead", [False, True])
def test_staggered_leaders_of_many_buckets(lookahead):
    compressor = run_against_reference(rate=20, beta=0.5, leader="staggered", bucket_bytes=20_000, lookahead=lookahead)
    assert len(compressor.residues.buckets) >= 4


@pytest.mark.parametrize("lookahead", [False, True])
def test_exact_selection(lookahead):
    run_against_reference(rate=30, beta=0.3, selection="exact", lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [False, True])
def test_float16_on_the_wire(lookahead):
    # Horovod sums in float16, the oracle in float32.
    run_against_reference(rate=30, beta=0.3, wire_dtype="float16", lookahead=lookahead, tolerance=2e-2)


@pytest.mark.parametrize("lookahead", [False, True])
def test_warm_up_rates_and_dense(lookahead):
    run_against_reference(
        steps=20, rate=100, rates={"n64*": 10, "matrix": 1000}, dense=["embedding", "auto:first"], warmup_steps=5, lookahead=lookahead
    )


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_either_kernel(kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    run_against_reference(steps=15, rate=100, beta=0.3)
