"""Tests in one process, including tests of the programs in scripts/."""

import contextlib
import sys
from pathlib import Path

import pytest

# TensorFlow and Triton both bring LLVM. If Triton comes after TensorFlow, and both halves of
# Horovod are started, the process dies at its exit. PyTorch imports Triton now and then.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

TESTS = Path(__file__).resolve().parents[1]
# tests/momentum.py serves tests on one process and on several. parallel.made_up belongs to the
# tests on several.
SCRIPTS = TESTS.parent / "scripts"
sys.path[:0] = [*map(str, [SCRIPTS, *SCRIPTS.glob("*/")]), str(TESTS)]


@pytest.fixture
def one_thread_per_rank():
    """Use one thread per rank: simulated ranks are threads, and each would start its own pool."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
