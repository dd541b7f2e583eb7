"""Tests in one process, including tests of the programs in scripts/."""

import sys
from pathlib import Path

import pytest

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
