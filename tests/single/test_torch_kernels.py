"""PyTorch's kernels in the steps of a bucket, and which kernel serves which tensors.

test_kernels.py tests the kernels themselves.
"""

import os
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from buckets import made
from kernel_cases import Case
from kernels_torch import Native, Plain
from simulated import assert_same, residues_of, simulate, step_as
from torch.overrides import TorchFunctionMode

from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import finished
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.kernels.native_kernel import NativeKernel
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel
from scalecom_hvd.lanes import Lanes, geometry
from scalecom_hvd.reference import ScaleComReference

# test_triton.py runs a test of this file with Triton's kernel.
ASKED = "triton" if os.environ.get("TESTS_KERNELS") == "triton.Tiles" else "native"
DEVICE = "cuda" if ASKED == "triton" and torch.cuda.is_available() else "cpu"
STEPS = 60 if ASKED == "native" else 8


def history(huge, lookahead, device="cpu"):
    """Return all averages and residues of steps of one worker, with huge gradients in the middle.

    They are the oracle's. SCALECOM_KERNEL names the kernel.
    """
    settings = {"rates": {"p0": 7, "p1": 300, "p2": 2.5}, "bits": 32, "min_numel": 0, "beta": 0.5}
    shapes, seen, random = dict.fromkeys(settings["rates"], (700,)), [], np.random.default_rng(0)
    simulation = simulate(1, shapes, device=device, **settings, lookahead=lookahead)
    reference = ScaleComReference(1, shapes, simulation.compressors[0].config)
    for step in range(STEPS):
        grads = {name: random.standard_normal(700).astype(np.float32) for name in shapes}
        is_huge = STEPS // 4 <= step < STEPS - 5
        grads["p0"][::3] = huge if is_huge else grads["p0"][::3]
        (averages,) = step_as(reference, simulation, [grads], rolled_back=1e-5)
        assert averages["p0"].isnan().all() == (is_huge and huge != 1e20)
        seen += [{n: own.cpu() for n, own in averages.items()}, residues_of(simulation)[0]]
        assert all(own.isfinite().all() for own in seen[-1].values())
    return seen


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("huge", [3e38, 1e20, float("inf"), float("nan")])
def test_no_gradient_poisons_the_residue_for_ever(lookahead, huge, monkeypatch):
    """After steps with huge or non-finite gradients, later steps count again, with any kernel."""
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    expected = history(huge, lookahead)
    monkeypatch.setenv("SCALECOM_KERNEL", ASKED)
    assert_same(history(huge, lookahead, DEVICE), expected)


class Failing(TorchFunctionMode):
    """Makes the n-th call from now on run out of memory: of one function, or of any of torch."""

    def __init__(self, n, of=None):
        super().__init__()
        self.left, self.of = n, of

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.left -= self.of in (None, function)
        if self.left == -1:
            raise torch.OutOfMemoryError("made up")
        return function(*args, **(kwargs or {}))


# Dtypes for one kernel and for two. Plain torch's kernel serves the tensors whose gradients are
# wider than their residues.
SEVERAL = {
    "one": (torch.float32, torch.float16, torch.float32),
    "two": (torch.float32, torch.float64, torch.bfloat16, torch.float64),
}
ORDERS = {
    "leader": lambda own, offsets: finished(own.take_and_accumulate(finished(own.select()))),
    "follower": lambda own, offsets: finished(own.take_and_accumulate(offsets)),
    "look-ahead": lambda own, offsets: finished(own.take_and_accumulate(offsets, choose=True)),
}


@pytest.mark.parametrize(
    ("asked", "selection"), [("native", "lanes"), ("torch", "lanes"), ("torch", "exact")]
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernels", SEVERAL)
def test_a_step_that_fails_anywhere_is_rolled_back(kernels, order, asked, selection, monkeypatch):
    """Of several tensors in several kernels, some have moved by then and some have not."""
    monkeypatch.setenv("SCALECOM_KERNEL", asked)
    dtypes = SEVERAL[kernels]
    named = {f"p{i}": torch.zeros(700 + i, dtype=dtype) for i, dtype in enumerate(dtypes)}
    settings = {"rate": 10, "beta": 0.5, "min_numel": 2, "residue_dtype": "float32"}
    bucket = made(named, selection=selection, **settings)
    tensors = bucket.tensors
    random = torch.Generator().manual_seed(1)
    offsets = torch.zeros_like(bucket.choices.new())
    for choice in bucket.choices.split(offsets).values() if selection == "exact" else ():
        choice["offsets"].copy_(torch.arange(len(choice["offsets"])))
    parts, n, failed = set(), 0, True
    while failed:
        before = [tensor.residue.normal_(generator=random).clone() for tensor in tensors]
        grads = {
            tensor.name: torch.randn(tensor.residue.numel(), generator=random).to(dtype)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        }
        grads[bucket.names[-1]].zero_()
        own = BucketStep(bucket, 0.5, grads, idle=bucket.names[-1:])
        try:
            with Failing(n):
                ORDERS[order](own, offsets)
            failed = False
        except torch.OutOfMemoryError:
            untouched = [torch.equal(t.residue, b) for t, b in zip(tensors, before, strict=True)]
            parts.add(tuple(untouched))
        own.roll_back()
        own.release()
        for tensor, old, same in zip(tensors, before, untouched, strict=True):
            if same and failed:
                assert torch.equal(tensor.residue, old), f"{tensor.name}, call {n}"
            torch.testing.assert_close(
                tensor.residue, old, msg=lambda text, n=n: f"call {n}: {text}"
            )
        n += 1
    assert n > 3
    if asked == "torch" or kernels == "two" or selection == "exact":
        assert len(parts) > 2  # some failures came after some of the tensors had moved


@pytest.mark.parametrize(
    ("asked", "grad_dtype", "selection", "kernel"),
    [
        ("", torch.bfloat16, "lanes", NativeKernel),
        ("", torch.float64, "lanes", TorchKernel),  # wider than the residue
        *((asked, torch.float32, "exact", TorchKernel) for asked in ("", "native", "triton")),
        ("torch", torch.float32, "lanes", TorchKernel),
    ],
)
def test_which_kernel(asked, grad_dtype, selection, kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", asked)
    shape = geometry(900, 7, selection)
    assert kernel_for(torch.device("cpu"), grad_dtype, torch.float32, shape) is kernel


def test_a_kernel_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "fast")
    with pytest.raises(ValueError, match="must be 'native', 'triton' or 'torch'"):
        kernel_for(torch.device("cpu"), torch.float32, torch.float32, Lanes(900, 7))


def test_without_a_library_there_is_one_warning(tmp_path):
    code = (
        "import logging, pathlib; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "import torch; from scalecom_hvd import native; from scalecom_hvd.lanes import Lanes\n"
        "from scalecom_hvd.exchange.kernels.choice import kernel_for\n"
        f"native.LIBRARY = pathlib.Path({str(tmp_path / '_lanes.so')!r})\n"
        "what = torch.device('cpu'), torch.float32, torch.float32, Lanes(900, 7)\n"
        "print({kernel_for(*what).__name__ for _ in range(5)})\n"
        "import os; os.environ['SCALECOM_KERNEL'] = 'native'; kernel_for(*what)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "{'TorchKernel'}"
    assert done.stderr.count("WARNING the native kernel was not built") == 1
    assert "Error: SCALECOM_KERNEL=native, but the native kernel was not built" in done.stderr


def products():
    denormal = np.float32(1e-40) * np.float32(1)
    return denormal > 0, (np.full(1000, 1e-30, np.float32) * np.float32(1e-10)).all()


@pytest.mark.parametrize("library", ["native:library", "tensorflow.kernels:operations"])
def test_the_libraries_leave_the_processors_modes_alone(library):
    """Linking with -ffast-math would flush denormal numbers to zero in the whole process."""
    assert pkgutil.resolve_name(f"scalecom_hvd.{library}")() is not None
    with ThreadPoolExecutor(1) as another:
        assert products() == another.submit(products).result() == (True, True)


def test_float16_subnormals_survive_flush_to_zero():
    """float16's smallest numbers are normal numbers in float32.

    Decoding must not pass through float32 denormals, which this mode flushes to zero.
    """
    case = Case([Lanes(2**10, 1)], ["float16"], scale=1.0)
    case.grads[0][:] = np.arange(2**10, dtype=np.uint16).view(np.float16)
    case.residues[0][:] = 0
    assert torch.set_flush_denormal(True)
    try:
        for kernel in (Native, Plain):
            values = kernel(case).take_and_accumulate(False).values
            np.testing.assert_array_equal(values, np.arange(2**10) * 2.0**-24)
    finally:
        torch.set_flush_denormal(False)
