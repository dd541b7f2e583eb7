"""What only the Triton kernel has: a launch per dtype, and when it serves at all.

test_triton.py runs this file in a process of its own, because the interpreter must be requested
before anything imports triton, and torch may import it.
"""

import sys

import pytest
import torch
from kernel_cases import Case
from kernels_torch import there
from kernels_triton import Tiles
from test_kernels import check
from test_torch_kernels import Failing

from scalecom_hvd import triton as tiles
from scalecom_hvd.exchange.kernels import choice
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel
from scalecom_hvd.exchange.kernels.triton_kernel import TritonKernel
from scalecom_hvd.lanes import Lanes, geometry

DEVICE = Tiles.device
MOVES = ["__init__", "begin", "choose", "take_and_accumulate", "scatter", "roll_back"]


def test_a_launch_that_fails_is_not_rolled_back():
    """Two dtypes need two launches. Before each, there is a new count of bad elements."""
    case = Case([Lanes(900, 7)] * 2, ["float32", "bfloat16"])
    made, taken = Tiles(case), case.take_and_accumulate()
    with pytest.raises(torch.OutOfMemoryError, match="made up"), Failing(1, torch.zeros):
        made.take_and_accumulate(False)
    first, second = made.residues
    assert torch.equal(first, there(taken.residues[0]).to(DEVICE))
    rolled_back = made.roll_back()
    assert (rolled_back[0] == case.roll_back(taken)[0]).all()
    assert torch.equal(second, there(case.residues[1]).to(DEVICE))


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device: only there can a move wait for one")
def test_no_move_waits_for_the_device():
    def forbidding(name):
        def move(self, *arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return getattr(TritonKernel, name)(self, *arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return move

    class Impatient(Tiles):
        kernel = type("Impatient", (TritonKernel,), {name: forbidding(name) for name in MOVES})

    check(Impatient, Case([Lanes(6401, 7), Lanes(333, 300)], ["float32", "bfloat16"]))


def kernel(dtype=torch.float32, device=DEVICE, selection="lanes"):
    lanes = geometry(900, 7, selection)
    return kernel_for(torch.device(device), dtype, torch.float32, lanes)


@pytest.fixture
def asks(monkeypatch):
    """Return a function that sets SCALECOM_KERNEL; clear the caches of earlier answers."""
    choice._why_not_triton.cache_clear()
    choice._warn.cache_clear()
    yield lambda name: monkeypatch.setenv("SCALECOM_KERNEL", name)
    choice._why_not_triton.cache_clear()


def test_which_tensors_it_serves(asks):
    asks("triton")
    assert kernel(torch.bfloat16) is TritonKernel
    assert kernel(torch.float64) is TorchKernel
    assert kernel(torch.bfloat16, selection="exact") is TorchKernel
    with pytest.raises(
        RuntimeError, match="SCALECOM_KERNEL=triton, but .*: it is for CUDA devices, not for 'meta'"
    ):
        kernel(device="meta")


def test_the_cpus_tensors_need_the_interpreter(asks, monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    asks("triton")
    with pytest.raises(RuntimeError, match="SCALECOM_KERNEL=triton, but .* set TRITON_INTERPRET=1"):
        kernel(device="cpu")


def test_without_triton_plain_torch_serves_cuda_and_says_so(asks, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "scalecom_hvd.exchange.kernels.triton_kernel", None)
    monkeypatch.delattr("scalecom_hvd.exchange.kernels.triton_kernel")
    asks("")
    assert {kernel(device="cuda") for _ in range(3)} == {TorchKernel}
    assert caplog.text.count("the Triton kernel is not used: triton cannot be imported") == 1
    asks("triton")
    with pytest.raises(RuntimeError, match="SCALECOM_KERNEL=triton, but .*: triton cannot"):
        kernel(device="cuda")
