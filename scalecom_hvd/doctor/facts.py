"""What is on this machine, as plain values. findings.py says what is wrong with it.

probe.py asks the frameworks, in processes of their own.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from os.path import realpath
from pathlib import Path
from typing import Any

import scalecom_hvd
from scalecom_hvd import native
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.doctor import children, probe

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
# The parts of probe.py. One process asks those of a line, and a part may need those before it.
PARTS = (
    ("native",),
    ("torch", "horovod.torch"),
    ("tensorflow", "horovod.tensorflow", "horovod.tensorflow.operations"),
    ("triton",),
)
LAUNCHERS = ("mpirun", "horovodrun", "torchrun")
PREFIXES = ("SCALECOM_", "HOROVOD_", "OMPI_", "GLOO_", "NCCL_")
OTHER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPAL_PREFIX", "PYTHONPATH")
SECRETS = ("KEY", "SECRET", "TOKEN", "PASSWORD")


@dataclass(frozen=True)
class Facts:
    """Everything that the doctor looks at before it starts ranks."""

    # This package's version and folder, Python, and the system.
    about: dict[str, str] = field(default_factory=dict)
    checkout: str = ""  # from which Python imports this package; empty: it is installed
    root: bool = False  # whether root runs this
    installed: dict[str, bool] = field(default_factory=dict)  # {package: whether it is there}
    # {part of probe.py: what it says}; if it cannot be imported, {"error": why}
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    horovod: str | None = None  # its version; None: it is not installed
    horovod_serves: list[str] = field(default_factory=list)  # for which frameworks it was built
    programs: dict[str, str] = field(default_factory=dict)  # {name: path}
    hidden: list[str] = field(default_factory=list)  # launchers that a user's shell does not find
    mpi: str = ""  # what mpirun says about its version
    variables: dict[str, str] = field(default_factory=dict)  # that matter here
    wrong_setting: str = ""  # ScaleComConfig's error about SCALECOM_ variables

    def says(self, part: str, what: str) -> Any:
        """What a part of probe.py says about something; empty: nothing."""
        return self.said.get(part, {}).get(what, "")

    def works(self, part: str) -> bool:
        """Whether a part of probe.py was imported."""
        return part in self.said and not self.says(part, "error")

    @property
    def gpus(self) -> list[str]:
        """The GPUs that a framework sees."""
        return self.says("torch", "gpus") or self.says("tensorflow", "gpus") or []

    @property
    def horovod_parts(self) -> dict[str, bool]:
        """{"mpi" | "gloo" | "nccl" | ...: whether Horovod was built with it}; empty: unknown."""
        parts = (f"horovod.{framework}" for framework in FRAMEWORKS)
        return next((self.said[part] for part in parts if self.works(part)), {})


def collect(limit: float) -> Facts:
    """Look at everything. limit: seconds for each import."""
    specs = {name: find_spec(name) for name in (*FRAMEWORKS, "horovod", "triton")}  # no import
    origins = {name: spec.origin for name, spec in specs.items() if spec and spec.origin}
    installed = {name: name in origins for name in specs}
    horovod = Path(origins.get("horovod", "/none/at/all")).parent
    where = children.environment()["PATH"]
    found = {name: shutil.which(name, path=where) for name in (*LAUNCHERS, "nvidia-smi")}
    programs = {name: path for name, path in found.items() if path}
    on_path = {name: realpath(shutil.which(name) or "") for name in programs}
    mpi = children.run(["mpirun", "--version"], 20).output if "mpirun" in programs else ""
    return Facts(
        about={
            "scalecom_hvd": f"{scalecom_hvd.__version__}, {Path(scalecom_hvd.__file__).parent}",
            "Python": f"{platform.python_version()}, {sys.executable}",
            "system": f"{platform.platform()}; {len(os.sched_getaffinity(0))} cores",
        },
        checkout=native.checkout(),
        root=os.geteuid() == 0,
        installed=installed,
        said=_ask(PARTS, installed, limit),
        horovod=importlib.metadata.version("horovod") if installed["horovod"] else None,
        horovod_serves=[
            name for part, name in FRAMEWORKS.items() if list((horovod / part).glob("mpi_lib*.so"))
        ],
        programs=programs,
        hidden=[n for n in LAUNCHERS if n in programs and on_path[n] != realpath(programs[n])],
        mpi=mpi.strip().partition("\n")[0],
        variables=_variables(),
        wrong_setting=_wrong_setting(),
    )


def _ask(
    parts: Sequence[Sequence[str]], installed: dict[str, bool], limit: float
) -> dict[str, dict[str, Any]]:
    """What the parts say whose packages are installed. limit: seconds for each process."""

    def ask(together: Sequence[str]) -> dict[str, dict[str, Any]]:
        missing = {name for name in installed if not installed[name]}
        there = [part for part in together if missing.isdisjoint(part.split("."))]
        if not there:
            return {}
        command = [sys.executable, "-m", "scalecom_hvd.doctor.probe", *there]
        outcome = children.run(command, limit)
        said = {part: {"error": f"the import failed: {outcome.why}"} for part in there}
        for line in outcome.output.splitlines():
            if line.startswith(probe.MARK):
                said |= json.loads(line.removeprefix(probe.MARK))
        return said

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return {part: said for found in pool.map(ask, parts) for part, said in found.items()}


def _variables() -> dict[str, str]:
    """The environment variables that change what happens; secrets are not shown."""
    return {
        name: "(not shown)" if any(word in name for word in SECRETS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) or name in OTHER_VARIABLES
    }


def _wrong_setting() -> str:
    try:
        ScaleComConfig.from_env()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def lines(facts: Facts) -> Iterator[str]:
    """The facts, aligned."""
    return (f"{label:15s} {text}".rstrip() for label, text in _rows(facts))


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from facts.about.items()
    for part, label in (FRAMEWORKS | {"triton": "Triton"}).items():
        version = facts.says(part, "version") or "cannot be imported (see below)"
        more = {name: facts.says(part, name.lower()) for name in ("CUDA", "Keras")}
        version += "".join(f", {name} {said}" for name, said in more.items() if said)
        yield label, version if facts.installed.get(part) else "not installed"
    built = [part for part, there in facts.horovod_parts.items() if there]
    parts = ", ".join("Gloo" if part == "gloo" else part.upper() for part in built)
    about = f"{facts.horovod}, for {' and '.join(facts.horovod_serves) or 'no framework'}"
    about += f", with {parts}" * bool(parts)
    yield "Horovod", "not installed" if facts.horovod is None else about
    for name in LAUNCHERS:
        where = facts.programs.get(name, "not there")
        where += " (not on the PATH)" * (name in facts.hidden)
        yield name, f"{where}: {facts.mpi}" if name == "mpirun" and facts.mpi else where
    yield "kernel in C", _loaded(facts, "native")
    if facts.works("horovod.tensorflow"):
        yield "  in TensorFlow", _loaded(facts, "horovod.tensorflow.operations")
    yield "GPUs", ", ".join(facts.gpus) or "none"
    for i, (name, value) in enumerate(facts.variables.items()):
        yield "" if i else "environment", f"{name}={value}"


def _loaded(facts: Facts, part: str) -> str:
    if facts.says(part, "loaded"):
        return "loaded"
    return "not built" if facts.says(part, "there") is False else "cannot be loaded (see below)"
