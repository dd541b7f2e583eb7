"""The device "delayed": a PyTorch device without hardware, on which streams matter.

Its tensors are in host memory, but every operation is enqueued on the current stream and runs late.
A missing wait_stream, wait_event or record_stream then gives wrong numbers on a CPU, as it may on a
GPU. Importing this package builds the device (once for each version of PyTorch and of the sources)
and registers it. torch.accelerator is the interface to its streams.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

__all__ = [
    "cpu_alias",
    "enqueue",
    "forbid_host_waits",
    "foreign_devices",
    "host_waits",
    "set_delay",
    "synchronous_operations",
    "uploads",
]

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / f"{name}.cpp" for name in ("delayed", "collectives", "runtime")]
NAME = "_scalecom_delayed"


def built() -> Path:
    """Compile the library unless it exists; several processes may call this at once."""
    from torch.utils import cpp_extension

    files = [*SOURCES, HERE / "delayed.h"]
    text = b"".join(file.read_bytes() for file in files)
    key = hashlib.sha256(text + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"{NAME}_{os.getuid()}_{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{NAME}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        flags = ["-std=c++20", "-O1", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        flags += [f"-isystem{path}" for path in include]
        objects = [folder / f"{source.stem}.o" for source in SOURCES]
        compilers = [
            subprocess.Popen(["g++", *flags, "-c", str(source), "-o", str(made)])
            for source, made in zip(SOURCES, objects, strict=True)
        ]
        statuses = [compiler.wait() for compiler in compilers]
        if any(statuses):
            raise RuntimeError("the device 'delayed' does not compile")
        links = [f"-L{path}" for path in cpp_extension.library_paths()]
        links += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
        links += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        unfinished = library.with_suffix(".unfinished")
        command = ["g++", "-shared", *map(str, objects), *links, "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(library)
    return library


def device_module() -> ModuleType:
    """Return the module that PyTorch expects at torch.delayed."""
    module = ModuleType("torch.delayed")
    functions: dict[str, Callable] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: None,  # the CPU draws random numbers
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.random.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.random.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "synchronize": torch.accelerator.synchronize,
        "current_stream": torch.accelerator.current_stream,
        "set_stream": torch.accelerator.set_stream,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0,
            device_index=0,
            device_type=20,  # c10::kPrivateUse1
        ),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module.Stream = torch.Stream
    module.Event = torch.Event
    return module


def registered() -> ModuleType:
    """Load the C++ module, once even if this package is imported under several names."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(NAME, built())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    torch.utils.rename_privateuse1_backend("delayed")
    torch._register_device_module("delayed", device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.accelerator.set_device_index(0)  # as scripts do; other threads begin elsewhere
    atexit.register(module.drain, 5.0)
    module.set_delay(0.005, "mixed")
    return module


_C = registered()


def set_delay(seconds: float, order: str = "mixed") -> None:
    """Set how late operations run, and in which order streams run that don't wait for each other.

    Args:
        seconds: The time from enqueueing an operation to running it on the default stream, unless
            somebody waits for it.
        order: "early": other streams run ahead of the default stream, which shows that they read
            values before these are computed. "late": they run behind it, which shows that the
            values they read are overwritten. "mixed": sometimes ahead, sometimes behind. "same":
            all run alike, which shows next to nothing. Of two side streams the one made later is
            further ahead, or further behind; after four streams the delays repeat.
    """
    _C.set_delay(seconds, order)


def foreign_devices() -> int:
    """Return how many times this process made another rank's device the current one.

    Every thread begins on that device, without having used it. On CUDA, a thread that makes device
    0 current, even for a moment, gives the process a context there, which takes memory.
    """
    return _C.foreign_devices()


def host_waits() -> int:
    """Return how many times the host has waited for the device."""
    return _C.host_waits()


def uploads() -> int:
    """Return how many blocking copies there have been from ordinary CPU memory to the device.

    They take no time here, but on CUDA the host waits for the current stream at each of them.
    """
    return _C.uploads()


@contextlib.contextmanager
def forbid_host_waits(uploads: bool = False) -> Iterator[None]:
    """Inside, an operation that makes the host wait raises a RuntimeError that names it.

    This holds for all threads.

    Args:
        uploads: Whether to forbid the copies that `uploads` counts, too.
    """
    _C.forbid(1, int(uploads))
    try:
        yield
    finally:
        _C.forbid(-1, -int(uploads))


def synchronous_operations() -> set[str]:
    """Return the operations that were run at once, uncounted, because their sizes are unknown."""
    return _C.synchronous()


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory. Use it only in functions passed to `enqueue`."""
    return _C.cpu_alias(tensor)


def enqueue(function: Callable[[], object], stream: torch.Stream | None = None) -> None:
    """Call a function late, in its turn on a stream (by default the current one).

    The function is called on the stream's thread. It may block, but must not wait for the device.
    """
    _C.enqueue(function, stream)
