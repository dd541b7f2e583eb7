"""The native and the plain-torch kernel: bit-identical to each other and to NumPy, for any size, rate and dtype."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalecom_hvd import native
from scalecom_hvd.lanes import geometry
from scalecom_hvd.reference import select
from scalecom_hvd.torch.kernels import (
    CHOOSE_ACCUMULATOR,
    CHOOSE_NOTHING,
    CHOOSE_RESIDUE,
    NativeKernel,
    TorchKernel,
    kernel_for,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 2, 63, 64, 65, 6399, 6400, 6401, 20_000]
KERNELS = [NativeKernel(native.library()), TorchKernel()]


def residue_dtype(grad_dtype):
    return torch.float64 if grad_dtype == torch.float64 else torch.float32


def all_moves(kernel, grad, residue, shape, beta, scale, choose, wire):
    """Everything a step does with a tensor; gives every intermediate tensor."""
    residue, states = residue.clone(), []
    dtype = getattr(torch, str(shape.offset_dtype))
    offsets = torch.arange(shape.k).to(dtype) if choose == CHOOSE_NOTHING and shape.width == 0 else torch.zeros(shape.k, dtype=dtype)
    bad = kernel.filter(grad, residue, shape, beta, scale, choose, offsets)
    states += [residue.clone(), offsets.clone()]
    values = torch.empty(shape.k, dtype=wire)
    kernel.gather(grad, residue, shape, beta, scale, 1 - beta, offsets, 65504 / 4, values)
    states += [values.clone(), residue.clone()]
    output = grad.clone()
    kernel.scatter(output, shape, scale, offsets, values)
    states.append(output)
    kernel.undo(grad, residue, shape, beta, scale, True, offsets, values)
    states.append(residue)
    return int(bad), states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("choose", [CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE])
def test_kernels_agree_to_the_bit(dtype, numel, choose):
    torch.manual_seed(numel)
    kind = residue_dtype(dtype)
    for rate in (1, 2, 2.5, 7, 100, 300, 70_000):
        for selection in ("lanes", "exact"):
            for wire in (kind, torch.float16):
                grad, residue = torch.randn(numel, dtype=torch.float64).to(dtype), torch.randn(numel, dtype=kind)
                if numel > 100:
                    grad[5], grad[17], grad[30] = float("nan"), float("inf"), -float("inf")
                results = [all_moves(k, grad, residue, geometry(numel, rate, selection), 0.3, 0.5, choose, wire) for k in KERNELS]
                assert results[0][0] == results[1][0] == (3 if numel > 100 else 0)
                for ours, plain in zip(results[0][1], results[1][1], strict=True):
                    assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("selection", ["lanes", "exact"])
def test_kernels_agree_with_numpy(dtype, numel, selection):
    torch.manual_seed(numel)
    for kernel in KERNELS:
        for rate in (1, 2.5, 100):
            grad, residue, shape = torch.randn(numel, dtype=dtype), torch.randn(numel, dtype=dtype), geometry(numel, rate, selection)
            g, m = grad.numpy().copy(), residue.numpy().copy()
            beta = m.dtype.type(0.3)
            offsets = torch.zeros(shape.k, dtype=getattr(torch, str(shape.offset_dtype)))
            kernel.filter(grad, residue, shape, 0.3, 1.0, CHOOSE_ACCUMULATOR, offsets)
            np.testing.assert_array_equal(shape.indices(offsets.numpy()), select(m + g, shape, selection))
            np.testing.assert_array_equal(residue.numpy(), m + beta * g)
            kernel.filter(grad, residue, shape, 0.3, 1.0, CHOOSE_RESIDUE, offsets)
            np.testing.assert_array_equal(shape.indices(offsets.numpy()), select(m + beta * g + beta * g, shape, selection))


@given(st.integers(1, 3000), st.integers(1, 400), st.sampled_from(DTYPES), st.integers(0, 2**31), st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_sent_plus_residue_is_what_came_in(numel, rate, dtype, seed, beta):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    before = torch.randn(numel, generator=generator, dtype=residue_dtype(dtype))
    shape = geometry(numel, rate, "lanes")
    for kernel in KERNELS:
        residue, offsets = before.clone(), torch.zeros(shape.k, dtype=getattr(torch, str(shape.offset_dtype)))
        kernel.filter(grad, residue, shape, beta, 1.0, CHOOSE_ACCUMULATOR, offsets)
        values = torch.empty(shape.k, dtype=torch.float16)
        kernel.gather(grad, residue, shape, beta, 1.0, 1 - beta, offsets, 65504, values)
        sent = torch.zeros(numel, dtype=torch.float64)
        sent[torch.from_numpy(shape.indices(offsets.numpy()))] = values.double()
        # eq. 5: what stays is the filtered rest of the accumulator
        expected = (1 - beta) * before.double() + beta * (before.double() + grad.double() - sent)
        torch.testing.assert_close(residue.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 63, 64, 6399, 6400, 6464, 6499])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_and_counts_as_zero(kernel, dtype, position, value):
    grad = torch.ones(6500).to(dtype)
    grad[position] = value
    for choose in (CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE):
        residue, shape = torch.zeros(6500, dtype=residue_dtype(dtype)), geometry(6500, 100, "lanes")
        assert int(kernel.filter(grad, residue, shape, 1.0, 1.0, choose, torch.zeros(shape.k, dtype=torch.uint8))) == 1
        assert residue[position] == 0
        assert residue.sum() == 6499


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_float16_wire_saturates_and_keeps_the_rest(kernel):
    grad, residue, shape = torch.tensor([1e6, -1e9, 3.0]), torch.zeros(3), geometry(3, 1, "lanes")
    offsets, values = torch.zeros(3, dtype=torch.uint8), torch.empty(3, dtype=torch.float16)
    kernel.filter(grad, residue, shape, 1.0, 1.0, CHOOSE_NOTHING, None)
    assert int(kernel.gather(grad, residue, shape, 1.0, 1.0, 0.0, offsets, 65504 / 2, values)) == 0
    assert values.tolist() == [32752, -32752, 3]
    torch.testing.assert_close(residue + values.float(), grad)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_an_accumulator_that_overflows_is_reported(kernel):
    grad, residue, shape = torch.tensor([3e38, 1.0]), torch.tensor([3e38, 0.0]), geometry(2, 1, "lanes")
    kernel.filter(grad, residue, shape, 1.0, 1.0, CHOOSE_NOTHING, None)
    values = torch.empty(2)
    assert int(kernel.gather(grad, residue, shape, 1.0, 1.0, 0.0, torch.zeros(2, dtype=torch.uint8), 1.0, values)) == 1
    assert values.isfinite().all()


def test_every_float16_survives_the_wire():
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    for source in (halves.float(), halves.float() * (1 + 2**-12), halves.float() * (1 - 2**-12)):
        source = source.clamp(-65504, 65504)
        values = torch.empty(source.numel(), dtype=torch.float16)
        shape = geometry(source.numel(), 1, "lanes")
        KERNELS[0].gather(
            torch.zeros_like(source), source.clone(), shape, 1.0, 1.0, 1.0, torch.zeros(source.numel(), dtype=torch.uint8), 65504, values
        )
        assert torch.equal(values, source.half())
        for dtype in (torch.float16, torch.bfloat16):
            outputs = [torch.empty(source.numel(), dtype=dtype) for _ in KERNELS]
            for kernel, output in zip(KERNELS, outputs, strict=True):
                kernel.scatter(output, shape, 1 / 3, torch.zeros(source.numel(), dtype=torch.uint8), source)
            assert torch.equal(*outputs)


def test_the_library_leaves_the_processors_modes_alone():
    """Linking with -ffast-math would flush denormal numbers to zero in the whole process."""
    assert native.library() is not None
    assert float(torch.tensor(1e-40).double()) > 0
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_which_kernel(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("SCALECOM_KERNEL", raising=False)
    assert isinstance(kernel_for(cpu, torch.bfloat16, torch.float32), NativeKernel)
    assert isinstance(kernel_for(cpu, torch.float64, torch.float32), TorchKernel)
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    assert isinstance(kernel_for(cpu, torch.float32, torch.float32), TorchKernel)
    monkeypatch.setenv("SCALECOM_KERNEL", "fast")
    with pytest.raises(ValueError, match="must be 'native' or 'torch'"):
        kernel_for(cpu, torch.float32, torch.float32)


def test_without_a_library_there_is_one_warning(tmp_path):
    code = (
        "import logging, pathlib; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "import torch; from scalecom_hvd import native; from scalecom_hvd.torch.kernels import kernel_for\n"
        f"native.__file__ = {str(tmp_path / '__init__.py')!r}\n"
        "kinds = {type(kernel_for(torch.device('cpu'), torch.float32, torch.float32)).__name__ for _ in range(5)}; print(kinds)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "{'TorchKernel'}"
    assert done.stderr.count("the native kernel was not built") == 1


def test_float16_subnormals_survive_flush_to_zero():
    """float16's smallest numbers are float32 normals; decoding must not pass through float32 denormals, which this mode drops."""
    assert torch.set_flush_denormal(True)
    try:
        shape = geometry(2**10, 1, "lanes")
        halves = torch.arange(2**10, dtype=torch.int16).view(torch.float16)
        for kernel in KERNELS:
            residue = torch.zeros(2**10)
            kernel.filter(halves, residue, shape, 1.0, 1.0, CHOOSE_NOTHING, None)
            assert torch.equal(residue, torch.arange(2**10) * 2.0**-24)
    finally:
        torch.set_flush_denormal(False)
