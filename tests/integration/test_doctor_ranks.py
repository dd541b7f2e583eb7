"""`python -m scalecom_hvd doctor` as a user calls it.

It runs in this environment, both intact and with something broken, and in the environment without
Horovod.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import launch
import pytest
from conftest import ROOT

import scalecom_hvd

pytestmark = pytest.mark.long
DOCTOR = [sys.executable, "-m", "scalecom_hvd", "doctor"]


@pytest.fixture
def copied(tmp_path):
    """Return a copy of the package, and the environment variables that make Python import it."""
    package = Path(scalecom_hvd.__file__).parent
    there = tmp_path / "copy"
    shutil.copytree(package, there / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return there / package.name, {"PYTHONPATH": str(there)}


@pytest.mark.timeout(400)
def test_everything_that_is_here_works(run):
    """Four launches of two ranks take half a minute if the machine does nothing else."""
    output = run(DOCTOR, limit=380)
    for test in (
        "PyTorch on Horovod, mpirun",
        "PyTorch on Horovod, horovodrun --gloo",
        "PyTorch on torch.distributed, torchrun",
        "TensorFlow on Horovod, mpirun",
    ):
        assert re.search(rf"ok +{test} .* 4 steps equal the reference's", output), output
    assert re.search(r"Horovod +\S+, for PyTorch and TensorFlow, with MPI, Gloo", output)
    assert re.search(r"scalecom_hvd +\S+, /", output)
    assert output.rstrip().endswith("Nothing is wrong.")


def test_what_cannot_be_loaded_is_wrong_and_what_is_not_there_is_missing(run, copied):
    package, environment = copied
    (package / "native" / "_lanes.so").write_bytes(b"no library")
    output = run([*DOCTOR, "--no-self-test", "--json"], fails=True, **environment)
    found = json.loads(output[output.index("{") :])
    assert found["facts"]["about"]["scalecom_hvd"].endswith(f", {package}")
    assert [f["level"] for f in found["findings"] if "the kernel in C" in f["what"]] == ["wrong"]
    for library in (package / "native").glob("*.so"):
        library.unlink()
    output = run([*DOCTOR, "--no-self-test"], **environment)
    assert "the kernel in C was not built" in output
    assert "Nothing is wrong." in output


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_ranks_that_fail_are_wrong(run, copied):
    """Each average is a tenth too small when it arrives."""
    package, environment = copied
    rank = package / "doctor" / "torch_rank.py"
    text = rank.read_text()
    assert "numpy().copy()" in text
    rank.write_text(text.replace("numpy().copy()", "numpy() * 0.9"))
    output = run(DOCTOR, limit=380, fails=True, **environment)
    assert len(re.findall(r"FAILS +PyTorch", output)) == 3
    assert re.search(r"ok +TensorFlow", output)
    assert "differs from the expected values by up to" in output
    assert "3 things are wrong" in output


@pytest.mark.timeout(200)
def test_without_horovod(run):
    if not launch.TORCH_ALONE.exists():
        pytest.skip("needs .venv-torch: make setup-torch")
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT)}
    output = run([launch.TORCH_ALONE, *DOCTOR[1:]], limit=180, **environment)
    assert re.search(r"ok +PyTorch on torch.distributed, torchrun", output)
    assert output.count("left out: ") == 3
    assert "Horovod is not installed" in output
    assert "Nothing is wrong." in output
