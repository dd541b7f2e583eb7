"""Every file here runs whole on every rank: mpirun -np 4 pytest -x tests/parallel, or horovodrun --gloo -np 2 pytest -x tests/parallel."""

import os
import sys

import horovod.torch as hvd
import pytest
import torch

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
hvd.init()
torch.set_num_threads(1)

failed = False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    global failed
    failed = failed or outcome.get_result().failed


@pytest.fixture(autouse=True)
def together():
    """All ranks start each test with the same seed, and none starts the next before all have ended this one."""
    torch.manual_seed(1234)
    yield
    if not failed:
        hvd.barrier()


def pytest_unconfigure():
    """After a failure ranks no longer wait for each other: leave at once, and the launcher stops the rest."""
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
