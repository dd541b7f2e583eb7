"""Imports go only downwards, and the core works without Horovod."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scalecom_hvd
from scalecom_hvd.missing import explained

PACKAGE = Path(scalecom_hvd.__file__).parent
FREE = "framework-free"
COMMANDS = "__main__"
# The other rooms, and (below) the packages, that each room may import.
ROOMS = {
    FREE: set(),
    "native": {FREE},
    "triton": {FREE, "native"},
    "exchange": {FREE, "native", "triton"},
    "torch": {FREE, "native", "exchange"},
    "ddp": {FREE, "exchange"},
    "tensorflow": {FREE, "native"},
    "doctor": {FREE, "native", "exchange", "torch", "ddp", "tensorflow"},
    COMMANDS: {FREE, "doctor"},
}
PACKAGES = {
    FREE: set(),
    "native": set(),
    "triton": {"triton"},
    "exchange": {"torch", "triton"},
    "torch": {"torch", "horovod"},
    "ddp": {"torch"},
    "tensorflow": {"tensorflow", "horovod"},
    "doctor": {"torch", "tensorflow", "triton"},  # in child processes
    COMMANDS: set(),
}
FRAMEWORKS = {"torch", "tensorflow", "horovod", "triton"}

# A module may lack Triton, because nobody asks for this module where Triton is missing.
EVERY_MODULE = """
import importlib, pkgutil
import scalecom_hvd.ddp, scalecom_hvd.exchange
for face in (scalecom_hvd.ddp, scalecom_hvd.exchange):
    for module in pkgutil.walk_packages(face.__path__, f"{face.__name__}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
"""


TRAINING = """
import torch
from scalecom_hvd.exchange import Simulation

def make(rank):
    return {"weight": torch.nn.Parameter(torch.zeros(50, 100))}

simulation = Simulation(2, make, rate=10, dense=[], warmup_steps=0)
average = simulation.step([{"weight": torch.full((50, 100), rank + 1.0)} for rank in range(2)])
assert average[0]["weight"].count_nonzero() == 500
"""


@pytest.fixture(scope="module")
def run_there(tmp_path_factory):
    """Return a function that runs code with all packages but Horovod, TensorFlow and Keras."""
    there = tmp_path_factory.mktemp("site")
    for package in Path(torch.__file__).parent.parent.iterdir():
        absent = package.name.lower().startswith(("horovod", "tensorflow", "keras"))
        if not absent and package.suffix != ".pth":
            (there / package.name).symlink_to(package)
    begin = f"import sys; sys.path += [{str(there)!r}, {str(PACKAGE.parent)!r}]\n"

    def run(code):
        command = [sys.executable, "-I", "-S", "-c", begin + code]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("code", [EVERY_MODULE, TRAINING], ids=["every module of it", "trains"])
def test_the_core_works_where_horovod_is_not_installed(run_there, code):
    done = run_there(code + "print(*sorted(sys.modules), sep='\\n')")
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "scalecom_hvd.exchange" in imported
    assert "torch" in imported
    absent_ones = ["horovod", "tensorflow", "scalecom_hvd.torch", "scalecom_hvd.tensorflow"]
    # Only a tensor on a GPU asks for Triton's kernel.
    for absent in absent_ones + ["scalecom_hvd.triton"] * (code == TRAINING):
        assert not [name for name in imported if f"{name}.".startswith(f"{absent}.")]


@pytest.mark.parametrize("name", ["horovod", "tensorflow"])
def test_they_are_absent_there(run_there, name):
    assert f"No module named '{name}'" in run_there(f"import {name}").stderr


OF_HOROVOD = "needs Horovod.*Without Horovod, use scalecom_hvd.ddp"
OF_TORCH = r'needs PyTorch: pip install "scalecom_hvd\[torch\]"'


@pytest.mark.parametrize(
    ("face", "message"),
    [
        *((face, OF_HOROVOD) for face in ("torch", "tensorflow", "tensorflow.keras")),
        *((face, OF_TORCH) for face in ("ddp", "exchange")),
    ],
)
def test_faces_say_what_is_missing(run_there, face, message):
    hidden = "import sys; sys.modules['torch'] = None\n" if message == OF_TORCH else ""
    error = run_there(f"{hidden}import scalecom_hvd.{face}").stderr.splitlines()[-1]
    assert re.match(f"ModuleNotFoundError: scalecom_hvd.{face.split('.')[0]} {message}", error)


def test_what_is_no_framework_is_not_explained():
    error = ModuleNotFoundError("No module named 'of_ones_own'", name="of_ones_own")
    assert explained(error, "scalecom_hvd.ddp") is error


def imports_of(path):
    """Return the full names of all that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    if path.stem == COMMANDS:
        return COMMANDS
    return path.parts[0] if len(path.parts) > 1 else FREE


def room_named(name):
    """Return the room of a module that is imported as `scalecom_hvd.<...>`."""
    part = name.split(".")[1] if "." in name else ""
    return part if part in ROOMS else FREE


FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def test_every_room_is_known():
    assert {room_of(path) for path in FILES} == set(ROOMS)
    assert not [name for rooms in ROOMS.values() for name in rooms if name not in ROOMS]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_downwards_only(path):
    room = room_of(path)
    for name in imports_of(PACKAGE / path):
        first = name.partition(".")[0]
        if first == "scalecom_hvd":
            assert room_named(name) in {room} | ROOMS[room], f"{room} may not import {name}"
        elif first in FRAMEWORKS:
            assert first in PACKAGES[room], f"{room} may not import {name}"


def test_framework_free_rooms_import_each_other_downwards_only():
    free = {path.stem for path in FILES if room_of(path) == FREE}
    graph = {}
    for room in free - {"__init__"}:
        names = (name.split(".") for name in imports_of(PACKAGE / f"{room}.py"))
        graph[room] = {parts[1] for parts in names if parts[0] == "scalecom_hvd"} & free
    list(graphlib.TopologicalSorter(graph).static_order())  # raises if there is a cycle
