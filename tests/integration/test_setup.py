"""The set-up names what a machine lacks, and does nothing twice."""

import shutil
import sys

import pytest
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "setup" / "setup_environment.py"


@pytest.fixture
def bare(tmp_path):
    """A folder to be the whole PATH, with nothing but what is put there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def set_up(tmp_path, change):
    """The command that runs the set-up in an interpreter changed so."""
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


def test_another_python(run, tmp_path):
    output = run(set_up(tmp_path, "sys.version_info = (3, 13, 0)"), fails=True)
    assert "set-up failed: Python 3.11 is needed" in output
    assert "make setup PYTHON=/path/to/python3.11" in output


def test_a_python_that_is_not_there(run):
    assert "python3.99 is not on the PATH" in run(
        ["make", "setup", "PYTHON=python3.99"], fails=True, cwd=ROOT
    )


def test_a_second_set_up_does_nothing(run):
    if not (ROOT / ".venv" / "setup.json").exists():
        pytest.skip("this checkout's environment was not made by make setup")
    run(["make", "setup", f"PYTHON={sys.executable}"], cwd=ROOT, limit=600)
    output = run(["make", "setup", f"PYTHON={sys.executable}"], cwd=ROOT)
    assert "[setup" not in output
