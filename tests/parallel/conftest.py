"""Every file here runs whole on every rank: mpirun -np 4 pytest tests/parallel, or horovodrun --gloo -np 2 pytest tests/parallel."""

import horovod.torch as hvd
import pytest
import torch

hvd.init()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def together():
    """All ranks start each test with the same seed, and none starts the next before all have ended this one."""
    torch.manual_seed(1234)
    yield
    hvd.barrier()
