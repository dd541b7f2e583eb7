"""Every rank runs every file here as a whole.

Run mpirun -np 4 pytest -x tests/parallel, or horovodrun --gloo -np 2 pytest -x tests/parallel. The
files of torch.distributed's face, and those of both faces (faces.py), run under torchrun too.

Files named test_tensorflow* test TensorFlow, all others PyTorch. Each framework's Horovod starts
when the first file that needs it is collected. Both can run in one process, but their threads then
take the cores from each other. Two separate runs are quicker.
"""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # momentum.py, devices.py

import devices

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

started = {}
failed = False


def pytest_collectstart(collector):
    """Start Horovod before the file is imported."""
    if not isinstance(collector, pytest.Module):
        return
    framework = "tensorflow" if collector.path.name.startswith("test_tensorflow") else "torch"
    if framework in started:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks, which have no Horovod
        import torch
        import torch.distributed as dist

        devices.begin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        dist.init_process_group(devices.backends())
        torch.set_num_threads(1)
        started[framework] = (torch.manual_seed, dist.barrier)
    elif framework == "torch":
        import horovod.torch as hvd
        import torch

        hvd.init()
        devices.begin(hvd.local_rank(), hvd.local_size())
        torch.set_num_threads(1)
        started[framework] = (torch.manual_seed, hvd.barrier)
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        started[framework] = (
            tf.keras.utils.set_random_seed,
            lambda: hvd.allreduce(tf.zeros(1), name="barrier"),
        )


def pytest_collection_modifyitems(items):
    """Skip what the tested device cannot show."""
    for item in items:
        if devices.DEVICE != "cpu" and item.get_closest_marker("on_cpus"):
            item.add_marker(pytest.mark.skip(reason="of CPUs alone"))
        if devices.DEVICE == "delayed" and "sparse" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="tests/delayed has no sparse tensors"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    global failed
    failed = failed or outcome.get_result().failed


@pytest.fixture(autouse=True)
def together():
    """Seed all ranks alike before each test.

    No rank starts the next test before all ranks have ended this one. If models that are gone have
    left many threads, this ends them. A thousand threads in each of 4 ranks keep a core busy.
    """
    for seed, _ in started.values():
        seed(1234)
    before = devices.foreign()
    yield
    assert devices.foreign() == before, "a thread made another rank's device current"
    if not failed:
        next(iter(started.values()))[1]()
        if len(os.listdir("/proc/self/task")) > 200:
            gc.collect()


@pytest.fixture
def elastic_run(monkeypatch):
    """A run of TensorFlow in which ranks may come and go. They have not met."""
    gc.collect()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr("scalecom_hvd.tensorflow.exchange._kept", None)


@pytest.fixture
def shared_folder():
    """A folder that torchrun's rank 0 makes and removes."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


def pytest_unconfigure():
    """After a failure, leave at once.

    Ranks no longer wait for each other then. The launcher stops the other ranks.
    """
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
