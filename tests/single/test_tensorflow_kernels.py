"""Which of TensorFlow's kernels serves whom, and what graphs make of them.

test_kernels.py tests the kernels themselves.
"""

import pytest
from kernel_cases import DTYPES, Case
from kernels_tensorflow import TracedGraph, TracedNative
from test_kernels import check

from scalecom_hvd import native
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.tensorflow.kernels import GraphKernel, NativeKernel, kernel_for, operations


@pytest.mark.parametrize(
    ("kernel", "levels"), [(TracedNative, 0), (TracedNative, 127), (TracedGraph, 127)]
)
def test_a_graph_that_tensorflow_optimizes_makes_the_same_moves(kernel, levels):
    check(kernel, Case([Lanes(numel, 16) for numel in (1, 65, 20_000)], DTYPES[:1] * 3, levels))


def test_which_kernel_serves_whom(monkeypatch):
    assert kernel_for("CPU", "lanes", same_width=True) is NativeKernel
    assert kernel_for("GPU", "lanes", same_width=True) is GraphKernel
    assert kernel_for("CPU", "lanes", same_width=False) is GraphKernel
    assert kernel_for("CPU", "exact", same_width=True) is GraphKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "tensorflow")
    assert kernel_for("CPU", "lanes", same_width=True) is GraphKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    with pytest.raises(ValueError, match="must be 'native' or 'tensorflow' here"):
        kernel_for("CPU", "lanes", same_width=True)


def test_without_the_library(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "OPERATIONS", tmp_path / "missing.so")
    operations.cache_clear()
    try:
        assert kernel_for("CPU", "lanes", same_width=True) is GraphKernel
        assert kernel_for("CPU", "lanes", same_width=True) is GraphKernel
        assert caplog.text.count("the native kernel was not built") == 1
        monkeypatch.setenv("SCALECOM_KERNEL", "native")
        with pytest.raises(RuntimeError, match="install a C compiler .* and run pip"):
            kernel_for("CPU", "lanes", same_width=True)
    finally:
        operations.cache_clear()
