"""`pip install .` into an environment that has Horovod: with a compiler, without one, and what the
wheel must hold.
"""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

TRAIN = """
import logging, sys, torch
logging.basicConfig()
import scalecom_hvd, scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.kernels import kernel_for
from scalecom_hvd.lanes import Lanes
assert scalecom_hvd.__file__.startswith(sys.argv[1]), scalecom_hvd.__file__
hvd.init()
model = torch.nn.Linear(200, 300)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    optimizer, model.named_parameters(), compression=hvd.ScaleCom
)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
kernel = kernel_for(torch.device("cpu"), torch.float32, torch.float32, Lanes(4, 2)).__name__
print(f"rank {hvd.rank()} trained with {kernel} for {optimizer.compression.stats()['step']} steps")
"""

TRAIN_KERAS = """
import logging, sys
logging.basicConfig()
import tensorflow as tf
import scalecom_hvd, scalecom_hvd.tensorflow.keras as hvd
from scalecom_hvd.tensorflow.kernels import kernel_for
assert scalecom_hvd.__file__.startswith(sys.argv[1]), scalecom_hvd.__file__
hvd.init()
model = tf.keras.Sequential([tf.keras.layers.Input((200,)), tf.keras.layers.Dense(300)])
optimizer = tf.keras.optimizers.SGD(0.1)
model.compile(hvd.DistributedOptimizer(optimizer, compression=hvd.ScaleCom), "mse")
model.fit(tf.ones((12, 200)), tf.ones((12, 300)), batch_size=4, verbose=0)
kernel = kernel_for("CPU", "lanes", same_width=True).__name__
step = model.optimizer.compression.stats()["step"]
print(f"rank {hvd.rank()} trained with {kernel} for {step} steps")
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what git knows, or would: the build leaves nothing in the real checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


@pytest.mark.long
@pytest.mark.parametrize("compiler", [True, False])
def test_pip_install(run, launched, checkout, tmp_path, compiler):
    place = tmp_path / "place"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        place,
        checkout,
    ]
    run(command, **({} if compiler else {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}))
    files = (
        "exchange/methods/scalecom.py tensorflow/keras/__init__.py native/lanes.c "
        "native/lanes_template.h native/lanes.h"
    )
    for needed in files.split():
        assert (place / "scalecom_hvd" / needed).exists(), needed
    for built in ("_lanes.so", "_tensorflow_ops.so"):
        assert (place / "scalecom_hvd/native" / built).exists() == compiler

    program = tmp_path / "train.py"
    for source, kernel in (
        (TRAIN, "NativeKernel" if compiler else "TorchKernel"),
        (TRAIN_KERAS, "NativeKernel" if compiler else "GraphKernel"),
    ):
        program.write_text(source)
        output = launched("mpirun", 2, [program, place], PYTHONPATH=str(place))
        for rank in range(2):
            assert f"rank {rank} trained with {kernel} for 3 steps" in output
        # one warning on each rank
        assert output.count("the native kernel was not built") == (0 if compiler else 2)
