"""Imports run downwards only, and the core works where Horovod is not installed."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import scalecom_hvd

PACKAGE = Path(scalecom_hvd.__file__).parent
FREE = "framework-free"
# Which other rooms, and which of the packages below, each room may import.
ROOMS = {
    FREE: set(),
    "native": {FREE},
    "triton": {FREE, "native"},
    "exchange": {FREE, "native", "triton"},
    "torch": {FREE, "native", "exchange"},
    "tensorflow": {FREE, "native"},
}
PACKAGES = {
    FREE: set(),
    "native": set(),
    "triton": {"triton"},
    "exchange": {"torch", "triton"},
    "torch": {"torch", "horovod"},
    "tensorflow": {"tensorflow", "horovod"},
}
FRAMEWORKS = {"torch", "tensorflow", "horovod", "triton"}

# As where only PyTorch is installed.
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "tensorflow"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
"""
# A module whose Triton is missing is one that nobody asks for there.
EVERY_MODULE = """
import importlib, pkgutil
import scalecom_hvd.exchange
for module in pkgutil.walk_packages(scalecom_hvd.exchange.__path__, "scalecom_hvd.exchange."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
"""


@pytest.mark.parametrize(
    "code",
    ["import scalecom_hvd.exchange\n", EVERY_MODULE],
    ids=["as a user does", "every module of it"],
)
def test_the_core_imports_where_horovod_is_not_installed(code):
    told = "print(*sorted(sys.modules), sep='\\n')"
    command = [sys.executable, "-c", ABSENT + code + told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "scalecom_hvd.exchange" in imported
    assert "torch" in imported
    for absent in ("horovod", "tensorflow", "scalecom_hvd.torch", "scalecom_hvd.tensorflow"):
        assert not [name for name in imported if f"{name}.".startswith(f"{absent}.")]


def test_horovod_and_tensorflow_are_absent_there():
    for name in ("horovod", "tensorflow"):
        command = [sys.executable, "-c", f"{ABSENT}import {name}.torch"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"{name} is not installed here" in done.stderr


def imports_of(path):
    """Full names of what a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    return path.parts[0] if len(path.parts) > 1 else FREE


def room_named(name):
    """The room of what is imported as `scalecom_hvd.<...>`."""
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
    list(graphlib.TopologicalSorter(graph).static_order())  # refuses circles
