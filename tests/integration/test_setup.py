"""The set-up names what a machine lacks, and does nothing twice; uv is told what pip is."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import setup_environment as setup
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


# What stands in for uv: it notes how it was called, and fails where it is told to.
UV = """#!/bin/sh
echo "$UV_EXTRA_INDEX_URL" "$@" >> "$0.called"
exit {code}
"""


@pytest.fixture
def uv(bare, monkeypatch):
    """uv(code) puts an uv on the PATH that exits so; gives the file that says how it was called."""

    def put(code):
        (bare / "uv").write_text(UV.format(code=code))
        (bare / "uv").chmod(0o755)
        monkeypatch.setenv("PATH", f"{bare}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://index.example/simple")
        monkeypatch.delenv("UV_EXTRA_INDEX_URL", raising=False)
        return bare / "uv.called"

    return put


def test_uv_installs_where_there_is_one(uv, tmp_path):
    called = uv(code=0)
    setup.pip_install(Path(sys.prefix), tmp_path / "log", "some_package")
    assert called.read_text().startswith("https://index.example/simple pip install --python ")
    assert called.read_text().endswith(" some_package\n")


def test_pip_installs_where_uv_cannot(uv, tmp_path, capsys):
    called = uv(code=2)
    # which pip finds to be there already
    setup.pip_install(Path(sys.prefix), tmp_path / "log", "--no-index", "setuptools")
    assert called.exists()
    assert "uv failed" in capsys.readouterr().out
    assert "-m pip install" in (tmp_path / "log").read_text()


def test_what_pip_is_told_in_words_of_uv():
    listed = (
        ":env:.find-links='/one /two'\n"
        "global.extra-index-url='https://a.example\\nhttps://b.example'\n"
        "global.find-links='/three'\n"
        "install.cert='/cert'\n"
        "freeze.timeout='3'\n"
    )
    assert setup.uv_settings(listed) == {
        "UV_FIND_LINKS": "/one,/two",
        "UV_EXTRA_INDEX_URL": "https://a.example https://b.example",
        "SSL_CERT_FILE": "/cert",
    }


@pytest.mark.parametrize(
    ("percent", "elapsed", "text"),
    [
        (40, 60, ""),
        (75, 260, ", about 10 min left"),
        (93, 480, ", about 5 min left"),
        (100, 780, ", less than a minute left"),
    ],
)
def test_how_long_horovods_compilation_takes(percent, elapsed, text):
    assert setup.time_left(percent, elapsed) == text


def test_progress_is_told_while_a_command_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup, "TELL_EVERY", 0.2)
    log = tmp_path / "log"
    command = ["sh", "-c", "echo '  [ 75%] Building CXX object x.o'; sleep 1"]
    setup.run(command, log, setup.compilation(log))
    assert "Horovod: 75 % of its files are compiled, less than a minute left" in (
        capsys.readouterr().out
    )
