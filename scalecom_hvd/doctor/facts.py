"""What is on this machine, as plain values. findings.py says what is wrong with it.

probe.py asks the frameworks, in processes of their own. Imports children and config.
"""

from __future__ import annotations

import concurrent.futures
import difflib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scalecom_hvd
from scalecom_hvd import native
from scalecom_hvd.config import ENVIRONMENT_PREFIX, ScaleComConfig
from scalecom_hvd.doctor import children

PROGRAMS = ("mpirun", "horovodrun", "torchrun", "nvidia-smi", "cc")
PREFIXES = ("SCALECOM_", "HOROVOD_", "OMPI_", "GLOO_", "NCCL_")
OTHER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPAL_PREFIX", "PYTHONPATH")
SECRETS = ("KEY", "SECRET", "TOKEN", "PASSWORD")
# {a folder of Horovod's: the framework it serves}
HOROVOD_FOLDERS = {"torch": "PyTorch", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
NETWORK = Path("/sys/class/net")
# From Linux's <linux/sockios.h>.
SIOCGIFADDR = 0x8915
UP = 0x1


@dataclass(frozen=True)
class Program:
    """A program that launches, or builds.

    Attributes:
        path: where it is.
        on_path: whether a user's shell finds it.
        says: the first line that it writes when asked for its version; empty: it was not asked.
    """

    path: str
    on_path: bool
    says: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: eth0, ...
        up: whether it is in use.
        address: IPv4; None: it has none.
        mbit: its nominal speed in Mbit/s; None: it does not say.
    """

    name: str
    up: bool
    address: str | None
    mbit: int | None


@dataclass(frozen=True)
class Facts:
    """Everything that the doctor looks at before it starts ranks.

    Attributes:
        python, executable, system: which Python this is, and on which system.
        version, place: of this package.
        checkout: the checkout from which Python imports this package; empty: it is installed.
        root: whether root runs this.
        cores, memory: what this process may use; memory in bytes.
        installed: {"torch" | "tensorflow" | "horovod" | "triton": whether it is there}.
        said: {part of probe.py: what it says}. A part that cannot be imported says {"error": why}.
        horovod: its version, None if it is not installed.
        horovod_serves: frameworks that it was built for.
        programs: {name: Program} of the programs that are there.
        files: {"native" | "operations": whether the kernel's library is there}.
        interfaces: of the network.
        variables: {name: value} of the environment variables that matter here.
        wrong_setting: ScaleComConfig's error about SCALECOM_ variables; empty: they are right.
        misspelt: {name: the SCALECOM_ variable that it looks like}; nobody reads the name.
    """

    python: str = ""
    executable: str = ""
    system: str = ""
    version: str = ""
    place: str = ""
    checkout: str = ""
    root: bool = False
    cores: int = 0
    memory: int = 0
    installed: dict[str, bool] = field(default_factory=dict)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    horovod: str | None = None
    horovod_serves: list[str] = field(default_factory=list)
    programs: dict[str, Program] = field(default_factory=dict)
    files: dict[str, bool] = field(default_factory=dict)
    interfaces: list[Interface] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    wrong_setting: str = ""
    misspelt: dict[str, str] = field(default_factory=dict)

    def works(self, part: str) -> bool:
        """Whether a part of probe.py was imported."""
        return part in self.said and "error" not in self.said[part]

    @property
    def gpus(self) -> list[str]:
        """The GPUs that a framework sees."""
        return next((said["gpus"] for said in self.said.values() if said.get("gpus")), [])

    @property
    def horovod_parts(self) -> dict[str, bool]:
        """{"mpi" | "gloo" | "nccl" | ...: whether Horovod was built with it}; empty: unknown."""
        parts = (f"horovod.{framework}" for framework in ("torch", "tensorflow"))
        return next((self.said[part] for part in parts if self.works(part)), {})


def collect(limit: float) -> Facts:
    """Look at everything. limit: seconds for each import."""
    horovod = _folder_of("horovod")
    installed = {
        name: _folder_of(name) is not None for name in ("torch", "tensorflow", "horovod", "triton")
    }
    folder = Path(scalecom_hvd.__file__).parent
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        system=platform.platform(),
        version=scalecom_hvd.__version__,
        place=str(folder),
        checkout=native.checkout(),
        root=os.geteuid() == 0,
        cores=_cores(),
        memory=_memory(),
        installed=installed,
        said=_ask(_parts(installed), limit),
        horovod=_horovod_version() if horovod else None,
        horovod_serves=[
            framework
            for folder, framework in HOROVOD_FOLDERS.items()
            if horovod and list((horovod / folder).glob("mpi_lib*.so"))
        ],
        programs=_programs(),
        files={
            "native": native.LIBRARY.exists(),
            "operations": native.OPERATIONS.exists(),
        },
        interfaces=_interfaces(),
        variables=_variables(),
        wrong_setting=_wrong_setting(),
        misspelt=_misspelt(),
    )


def _folder_of(module: str) -> Path | None:
    """Where an installed package is, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _horovod_version() -> str:
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _parts(installed: dict[str, bool]) -> list[list[str]]:
    """The parts of probe.py to ask. One process asks all parts of a framework."""
    found = [["native"]]
    for framework, more in (("torch", []), ("tensorflow", ["tensorflow operations"])):
        if installed[framework]:
            on_horovod = [f"horovod.{framework}", *more] if installed["horovod"] else []
            found.append([framework, *on_horovod])
    if installed["triton"]:
        found.append(["triton"])
    return found


def _ask(parts: list[list[str]], limit: float) -> dict[str, dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = pool.map(lambda together: _ask_in_one_process(together, limit), parts)
        return {part: said for answer in answers for part, said in answer.items()}


def _ask_in_one_process(parts: list[str], limit: float) -> dict[str, dict[str, Any]]:
    said: dict[str, dict[str, Any]] = {}
    while left := [part for part in parts if part not in said]:
        command = [sys.executable, "-m", "scalecom_hvd.doctor.probe", *left]
        outcome = children.run(command, limit)
        for line in outcome.output.splitlines():
            if line.startswith(children.MARK):
                said |= json.loads(line.removeprefix(children.MARK))
        silent = next((part for part in left if part not in said), None)
        if silent is not None:
            said[silent] = {"error": f"the import failed: {outcome.why}"}
    return said


def _programs() -> dict[str, Program]:
    found = {}
    for name in PROGRAMS:
        path, on_path = children.find(name)
        if path is not None:
            says = ""
            if name == "mpirun":
                lines = children.run([path, "--version"], 20).output.strip().splitlines()
                says = lines[0] if lines else ""
            found[name] = Program(path, on_path, says)
    return found


def _cores() -> int:
    """Cores that this process may use: a container may have fewer than the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        return max(1, min(cores or 1, int(quota[0]) // int(quota[1])))
    return cores or 1


def _memory() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _words("/sys/fs/cgroup/memory.max")
    return min(memory, int(limit[0])) if limit and limit[0].isdigit() else memory


def _words(path: str | Path) -> list[str]:
    """A file's words; none if it cannot be read."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _interfaces() -> list[Interface]:
    found = []
    for folder in sorted(NETWORK.glob("*")):
        flags, speed = _words(folder / "flags"), _words(folder / "speed")
        mbit = int(speed[0]) if speed and re.fullmatch(r"-?\d+", speed[0]) else -1
        up = bool(flags) and bool(int(flags[0], 16) & UP)
        found.append(Interface(folder.name, up, _address(folder.name), mbit if mbit > 0 else None))
    return found


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])


def _variables() -> dict[str, str]:
    """The environment variables that change what happens; secrets are not shown."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in OTHER_VARIABLES:
            secret = any(word in name for word in SECRETS)
            found[name] = "(not shown)" if secret else value
    return found


def _misspelt() -> dict[str, str]:
    """Variables like SCALCOM_RATE: nobody reads the prefix, and the rest is a setting's name."""
    found = {}
    for name in os.environ:
        prefix, _, rest = name.partition("_")
        like = f"{ENVIRONMENT_PREFIX}{rest.upper()}"
        near = difflib.SequenceMatcher(None, f"{prefix.upper()}_", ENVIRONMENT_PREFIX).ratio()
        if name != like and near > 0.8 and rest.lower() in ScaleComConfig().to_dict():
            found[name] = like
    return found


def _wrong_setting() -> str:
    try:
        ScaleComConfig.from_env()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def lines(facts: Facts) -> Iterator[str]:
    """The facts, aligned."""
    rows = list(_rows(facts))
    wide = max(len(label) for label, _ in rows)
    for label, text in rows:
        yield f"{label:{wide}s}  {text}".rstrip()


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "scalecom_hvd", f"{facts.version}, {facts.place}"
    yield "Python", f"{facts.python}, {facts.executable}"
    yield "system", f"{facts.system}; {facts.cores} cores, {facts.memory / 2**30:.1f} GiB of memory"
    yield "PyTorch", _framework(facts, "torch")
    yield "TensorFlow", _framework(facts, "tensorflow")
    yield "Horovod", _horovod(facts)
    for name in ("mpirun", "horovodrun", "torchrun"):
        yield name, _program(facts.programs.get(name))
    yield "kernel in C", _loaded(facts, "native", "native")
    if facts.works("horovod.tensorflow"):
        yield "  in TensorFlow", _loaded(facts, "tensorflow operations", "operations")
    yield "Triton", _version(facts, "triton")
    yield "GPUs", ", ".join(facts.gpus) or "none"
    for i, interface in enumerate(facts.interfaces):
        yield "network" if i == 0 else "", _interface(interface)
    for i, (name, value) in enumerate(facts.variables.items()):
        yield "environment" if i == 0 else "", f"{name}={value}"


def _version(facts: Facts, part: str) -> str:
    if not facts.installed.get(part):
        return "not installed"
    said = facts.said.get(part, {})
    return str(said["version"]) if "version" in said else "cannot be imported (see below)"


def _framework(facts: Facts, part: str) -> str:
    said = facts.said.get(part, {})
    more = [f"CUDA {said['cuda']}"] if said.get("cuda") else []
    more += [f"Keras {said['keras']}"] if "keras" in said else []
    return ", ".join([_version(facts, part), *more])


def _horovod(facts: Facts) -> str:
    if facts.horovod is None:
        return "not installed"
    names = {"mpi": "MPI", "gloo": "Gloo", "cuda": "CUDA", "rocm": "ROCm"}
    parts = [names.get(part, part.upper()) for part, there in facts.horovod_parts.items() if there]
    serves = " and ".join(facts.horovod_serves) or "no framework"
    return f"{facts.horovod}, for {serves}" + (f", with {', '.join(parts)}" if parts else "")


def _program(program: Program | None) -> str:
    if program is None:
        return "not there"
    where = program.path if program.on_path else f"{program.path} (not on the PATH)"
    return f"{where}: {program.says}" if program.says else where


def _loaded(facts: Facts, part: str, file: str) -> str:
    if facts.said.get(part, {}).get("loaded"):
        return "loaded"
    return "cannot be loaded (see below)" if facts.files.get(file) else "not built"


def _interface(interface: Interface) -> str:
    speed = f"{interface.mbit} Mbit/s" if interface.mbit else "speed unknown"
    address = interface.address or "no IPv4 address"
    return f"{interface.name}: {address}, {speed}" + ("" if interface.up else ", down")
