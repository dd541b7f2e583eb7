"""Installations.

`pip install .` is tried next to Horovod, with and without a compiler. The files that `make dist`
makes are installed next to either framework, and next to none. What a face then says, and how
ranks train without Horovod, test_core_without_horovod.py shows.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import scalecom_hvd

SITE = Path(sysconfig.get_path("purelib"))
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}

TRAIN = """
import logging, sys, torch
logging.basicConfig()
import scalecom_hvd, scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.kernels.choice import kernel_for
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
    """Return a copy of all files that git tracks or does not ignore.

    The build then leaves nothing in the real checkout.
    """
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", [True, False])
def test_pip_install(run, launched, checkout, tmp_path, compiler):
    place = tmp_path / "place"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    run([*pip, "--target", place, checkout], **({} if compiler else NO_COMPILER))
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
        # Without a compiler, each rank warns once.
        assert output.count("the native kernel was not built") == (0 if compiler else 2)


# Packages that every environment has, and packages whose removal makes a framework absent.
EVERYWHERE = ("numpy", "yaml", "_yaml")
WITHOUT = {
    "torch alone": ("horovod", "tensorflow", "keras"),
    "tensorflow alone": ("horovod", "torch", "functorch"),
}
IMPORT = """
import sys
import scalecom_hvd
assert scalecom_hvd.__file__.startswith(sys.prefix), scalecom_hvd.__file__
assert not {"torch", "tensorflow", "horovod"} & set(sys.modules)
"""
NATIVE = """
from scalecom_hvd import native
assert native.LIBRARY.exists() and native.OPERATIONS.exists()
"""
REFERENCE = """
import numpy as np
from scalecom_hvd import ScaleComConfig
from scalecom_hvd.reference import ScaleComReference
config = ScaleComConfig(rate=10, dense=(), warmup_steps=0)
reference = ScaleComReference(2, {"weight": (50, 100)}, config)
averages = reference.step([{"weight": np.full((50, 100), 1 + rank, "f4")} for rank in range(2)])
assert np.count_nonzero(averages["weight"]) == 500
"""
SIMULATION = """
import torch
import scalecom_hvd.ddp
from scalecom_hvd.exchange import Simulation
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.lanes import Lanes
make = lambda rank: {"weight": torch.nn.Parameter(torch.zeros(50, 100))}
simulation = Simulation(2, make, rate=10, dense=[], warmup_steps=0)
averages = simulation.step([{"weight": torch.full((50, 100), 1.0 + rank)} for rank in range(2)])
assert averages[0]["weight"].count_nonzero() == 500
kernel = kernel_for(torch.device("cpu"), torch.float32, torch.float32, Lanes(4, 2))
assert kernel.__name__ == "NativeKernel", kernel
"""
OPERATIONS = """
import ctypes, pathlib
import tensorflow as tf
from scalecom_hvd import native
(framework,) = pathlib.Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*")
for needed in (framework, native.LIBRARY):
    ctypes.CDLL(str(needed), ctypes.RTLD_GLOBAL)
tf.load_op_library(str(native.OPERATIONS))
"""
PROGRAMS = {"torch alone": SIMULATION, "tensorflow alone": OPERATIONS, "neither": ""}


def test_one_version():
    """Files that cannot read the version from the package state the same version."""
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {scalecom_hvd.__version__}\n" in citation
    released = re.search(r"date-released: (\S+)", citation)[1]
    newest = re.search(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == f"{scalecom_hvd.__version__} - {released}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """environment(what) -> the Python of a new environment with some of this one's packages."""

    def make(what):
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        there = folder / "lib" / SITE.parent.name / "site-packages"
        for package in SITE.iterdir():
            name = package.name.lower()
            wanted = name in EVERYWHERE or name.startswith(("numpy", "pyyaml"))
            if what in WITHOUT:
                wanted = not name.startswith((*WITHOUT[what], "scalecom", "__editable__"))
            if wanted and package.suffix != ".pth":
                (there / package.name).symlink_to(package)
        return folder / "bin" / "python"

    return make


def installed(run, python, wheel):
    """Install the wheel, and nothing else, for this Python."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    run([*pip, "--no-deps", "--no-index", wheel])
    return python


@pytest.mark.nightly
def test_dist(run, checkout, environment):
    """All this is one test because `make dist` takes most of the time."""
    make = {"command": ["make", "dist", f"PYTHON={sys.executable}"], "cwd": checkout, "limit": 600}
    output = run(**make, fails=True, **NO_COMPILER)
    assert "make dist failed: a C compiler is needed" in output
    assert not (checkout / "dist").exists()
    run(**make, SOURCE_DATE_EPOCH="1700000000")
    sdist, wheel = sorted((checkout / "dist").iterdir(), key=lambda path: path.suffix)
    version = scalecom_hvd.__version__
    assert sdist.name == f"scalecom_hvd-{version}.tar.gz"
    name = rf"scalecom_hvd-{version}-py3-none-manylinux_2_\d+_{os.uname().machine}\.whl"
    assert re.fullmatch(name, wheel.name)

    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        metadata = archive.read(f"scalecom_hvd-{version}.dist-info/METADATA").decode()
    for needed in ("py.typed", "native/_lanes.so", "native/_tensorflow_ops.so", "native/lanes.c"):
        assert f"scalecom_hvd/{needed}" in files
    assert f"scalecom_hvd-{version}.dist-info/licenses/LICENSE" in files
    assert "License-Expression: Apache-2.0\n" in metadata
    assert {file.split("/")[0] for file in files} == {
        "scalecom_hvd",
        f"scalecom_hvd-{version}.dist-info",
    }
    with tarfile.open(sdist) as archive:
        names = {member.partition("/")[2] for member in archive.getnames()}
        assert {member.mtime for member in archive.getmembers()} == {1700000000}
    for needed in ("LICENSE", "README.md", "setup.py", "scalecom_hvd/native/lanes_template.h"):
        assert needed in names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]

    for what, program in PROGRAMS.items():
        python = installed(run, environment(what), wheel)
        run([python, "-c", IMPORT + NATIVE + REFERENCE + program], PYTHONPATH="")


@pytest.mark.nightly
def test_a_wheel_without_libraries_is_for_any_platform(run, checkout, tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", tmp_path / "wheels", checkout], **NO_COMPILER)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == f"scalecom_hvd-{scalecom_hvd.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
