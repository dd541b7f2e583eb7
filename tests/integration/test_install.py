"""`pip install .` into an environment that has Horovod: with a compiler, without one, and what the wheel must hold."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

TRAIN = """
import logging, sys, torch
logging.basicConfig()
import scalecom_hvd, scalecom_hvd.torch as hvd
from scalecom_hvd.torch.kernels import kernel_for
assert scalecom_hvd.__file__.startswith(sys.argv[1]), scalecom_hvd.__file__
hvd.init()
model = torch.nn.Linear(200, 300)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.ScaleCom)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
kernel = kernel_for(torch.device("cpu"), torch.float32, torch.float32).__name__
print(f"rank {hvd.rank()} trained with {kernel} for {optimizer.compression.stats()['step']} steps")
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what git knows (or would), so that the build leaves nothing in the real checkout."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


@pytest.mark.parametrize("compiler", [True, False])
def test_pip_install(run, launched, checkout, tmp_path, compiler):
    place = tmp_path / "place"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", place, checkout]
    run(command, **({} if compiler else {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}))
    for needed in ("native/_lanes.so",) * compiler + ("torch/reducer.py", "native/lanes.c", "native/lanes_template.h"):
        assert (place / "scalecom_hvd" / needed).exists(), needed
    assert compiler or not (place / "scalecom_hvd/native/_lanes.so").exists()

    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    output = launched("mpirun", 2, [program, place], PYTHONPATH=str(place))
    kernel = "NativeKernel" if compiler else "TorchKernel"
    for rank in range(2):
        assert f"rank {rank} trained with {kernel} for 3 steps" in output
    assert output.count("the native kernel was not built") == (0 if compiler else 2)  # one warning on each rank
