"""Tests in one process, also of what lies in scripts/."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# momentum.py is for tests on one process and on several; parallel.made_up is a module of theirs.
SCRIPTS = TESTS.parent / "scripts"
sys.path[:0] = [*map(str, [SCRIPTS, *SCRIPTS.glob("*/")]), str(TESTS)]


@pytest.fixture
def one_thread_per_rank():
    """Simulated ranks are threads, of which each would have a pool of its own."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
