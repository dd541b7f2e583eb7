"""The set-up names what a machine lacks, and does nothing twice.

For GPUs it finds CUDA and NCCL.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setup_environment as setup
from conftest import ROOT

from scalecom_hvd.doctor import findings

SCRIPT = ROOT / "scripts" / "setup" / "setup_environment.py"


@pytest.fixture
def bare(tmp_path):
    """Return an empty folder. A test puts programs into it and makes it the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def set_up(tmp_path, change):
    """Return the command that runs the set-up in an interpreter after the code `change`."""
    code = (
        f"import os, runpy, sys; sys.argv = ['setup', '--venv', {str(tmp_path / 'venv')!r}]; "
        f"{change}; "
    )
    return [sys.executable, "-c", code + f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"]


def test_without_a_compiler_or_make(run, bare, tmp_path):
    command = set_up(tmp_path, f"os.environ['PATH'] = {str(bare)!r}; os.environ.pop('CXX', None)")
    output = run(command, fails=True)
    assert "set-up failed: this machine lacks a C++ compiler" in output
    assert "and make. Debian, Ubuntu: apt install make" in output
    (bare / "g++").symlink_to(shutil.which("c++") or "/bin/true")
    assert "lacks make" in run(command, fails=True)
    assert not (tmp_path / "venv").exists()


def test_a_second_set_up_does_nothing(run):
    if not (ROOT / ".venv" / "setup.json").exists():
        pytest.skip("this checkout's environment was not made by make setup")
    run(["make", "setup", f"PYTHON={sys.executable}"], cwd=ROOT, limit=600)
    output = run(["make", "setup", f"PYTHON={sys.executable}"], cwd=ROOT)
    assert "[setup" not in output


# A substitute for nvcc.
NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
--dryrun) echo '#$ TOP={home}/bin/..' >&2 ;;
esac
"""


@pytest.fixture
def toolkit(bare, tmp_path, monkeypatch):
    """toolkit(folder, version) makes a CUDA toolkit in the folder. No other one can be found."""
    monkeypatch.setattr(setup, "TOOLKITS", tmp_path / "local")
    monkeypatch.setenv("PATH", f"{bare}{os.pathsep}{os.defpath}")
    for name in ("HOROVOD_CUDA_HOME", *setup.NCCL_SETTINGS):
        monkeypatch.delenv(name, raising=False)

    def make(folder, version):
        home = tmp_path / folder
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "nvcc").write_text(NVCC.format(version=version, home=home))
        (home / "bin" / "nvcc").chmod(0o755)
        return home

    return make


def test_which_toolkit_is_found(toolkit, bare, monkeypatch):
    """Horovod's variable decides, then nvcc on the PATH, unless another version is asked for."""
    with pytest.raises(setup.SetupError, match="no nvcc of CUDA 12 or 13 on the PATH"):
        setup.find_cuda(None)
    toolkit("local/cuda", "11.8")  # there is no torch for it
    with pytest.raises(setup.SetupError, match=r"only 11\.8 in .*: HOROVOD_CUDA_HOME="):
        setup.find_cuda(None)
    older, home = toolkit("local/cuda-12.6", "12.6"), toolkit("opt/cuda", "13.0")
    (bare / "nvcc").write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    (bare / "nvcc").chmod(0o755)
    assert setup.find_cuda(None) == setup.Cuda(home, "13.0")
    assert setup.find_cuda(12) == setup.Cuda(older, "12.6")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(older))
    assert setup.find_cuda(None) == setup.Cuda(older, "12.6")
    with pytest.raises(setup.SetupError, match="CUDA 13 in HOROVOD_CUDA_HOME, only 12.6"):
        setup.find_cuda(13)


def test_torch_is_a_build_for_the_toolkit_and_tensorflow_is_left_out():
    *others, for_13 = setup.requirements(setup.Cuda(Path("/cuda"), "13.0"))
    names = [line.split("==")[0] for line in others]
    assert "triton" in names
    assert "tensorflow-cpu" not in names
    torch = for_13.split(",")[0]
    assert for_13 == f"{torch},!={torch.removeprefix('torch==')}+cpu"
    for_12 = setup.requirements(setup.Cuda(Path("/cuda"), "12.8"))
    index = "https://download.pytorch.org/whl/cu126"
    assert for_12 == [*others, f"{torch}+cu126", "--extra-index-url", index]
    assert setup.requirements(None) == ["-r", str(setup.HERE / "requirements.txt")]


def test_nccl_is_that_of_torch_if_no_other_is_named(tmp_path, monkeypatch):
    for name in setup.NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(setup, "site_packages", lambda venv: venv / "packages")
    with pytest.raises(setup.SetupError, match="NCCL's headers are not in"):
        setup.nccl_package(tmp_path)
    home = tmp_path / "packages" / "nvidia" / "nccl"
    (home / "include").mkdir(parents=True)
    (home / "include" / "nccl.h").touch()
    assert setup.nccl_package(tmp_path) == home
    told = setup.gpu_environment(setup.Cuda(Path("/cuda"), "13.0"), home, "/usr/bin")
    assert told["HOROVOD_NCCL_HOME"] == str(home)
    assert told["HOROVOD_CUDA_HOME"] == told["CUDA_HOME"] == "/cuda"
    assert told["PATH"] == f"/cuda/bin{os.pathsep}/usr/bin"

    monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
    assert setup.nccl_package(tmp_path) is None
    told = setup.gpu_environment(setup.Cuda(Path("/cuda"), "13.0"), None, "/usr/bin")
    assert not [name for name in told if "NCCL" in name]


# What is edited of Horovod's sources.
SOURCES = {
    "CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)",
    "horovod/torch/CMakeLists.txt": "    set(CMAKE_CXX_STANDARD 14)",
    "cmake/Modules/FindNCCL.cmake": 'NAMES "nccl"',
}


def write_sources(folder):
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("mpi", "nccl", "folders"),
    [
        (False, False, None),
        (True, False, "$ORIGIN/../../../.."),
        (True, True, "$ORIGIN/../../../..;$ORIGIN/../../nvidia/nccl/lib"),
    ],
)
def test_libraries_are_looked_for_in_the_environment(tmp_path, mpi, nccl, folders):
    write_sources(tmp_path)
    setup.patch_horovod(tmp_path, mpi, nccl)
    top, torch, find_nccl = ((tmp_path / name).read_text().strip() for name in SOURCES)
    wanted = "set(CMAKE_CXX_STANDARD 17)"
    assert torch == "set(CMAKE_CXX_STANDARD 20)"
    assert top == (wanted + f'\nset(CMAKE_BUILD_RPATH "{folders}")' if folders else wanted)
    assert find_nccl == 'NAMES "libnccl.so.2" "nccl"'
    with pytest.raises(setup.SetupError, match="is this Horovod"):
        setup.patch_horovod(tmp_path, mpi, nccl)


def test_the_doctor_s_command_makes_the_same_edits(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_sources(ours)
    write_sources(theirs)
    setup.patch_horovod(ours, False, False)
    _, command = findings.build_horovod("torch")
    edits = [part for part in command.split(" && ") if part.startswith("sed")]
    subprocess.run(" && ".join(edits), shell=True, cwd=theirs, check=True)
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        assert (theirs / name).read_text() == (ours / name).read_text() != SOURCES[name]
    assert re.findall(r"-include (\w+)", command) == list(setup.HEADERS)
