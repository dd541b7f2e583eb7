"""Which tests notice which mistake: change one line of behaviour at a time, and run the tests.

    python scripts/checks/mutations.py                 all of them: two hours on two cores
    python scripts/checks/mutations.py --only leader   those with names that contain it

The mutations are in mutations.toml. Each is made in a copy of the working tree, one copy per core.
Every finished mutation leaves a file in --output, and a second call makes only the missing ones.
The table is --output/table.md. If no test notices a mutation, the exit code is 1.

In one process all tests run. On several ranks a file ends with its first failure, because ranks no
longer wait for each other after it. So for each file only the first test that notices is known.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))

import launch  # noqa: E402
from diary import failed_tests  # noqa: E402

PYTEST = [
    *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
    # It checks that the mutations fit the code, so it would notice every one.
    "--ignore=tests/single/test_mutations.py",
]
SKIPPED = {  # they take a third of the time, and notice no change outside of native code
    "native": ["tests/single/test_sanitizers.py"],
    "triton": ["tests/single/test_triton.py"],
}


@dataclass(frozen=True)
class Mutation:
    """A change of the package, as mutations.toml describes it."""

    name: str
    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """The text of its file in a tree, with the mutation.

        Raises:
            ValueError: the text that it replaces is missing, or occurs more than once.
        """
        text = (root / "scalecom_hvd" / self.file).read_text()
        if text.count(self.was) != 1:
            raise ValueError(
                f"mutations.toml, {self.name!r}: {self.was!r} stands {text.count(self.was)} times "
                f"in scalecom_hvd/{self.file}, and must once: bring the mutation up to date"
            )
        return text.replace(self.was, self.becomes)

    @property
    def file_name(self) -> str:
        return re.sub(r"\W+", "_", self.name) + ".json"


def mutations() -> list[Mutation]:
    """The mutations of mutations.toml, in its order."""
    found = tomllib.loads((HERE / "mutations.toml").read_text())["mutation"]
    return [Mutation(**one | {"tests": tuple(one["tests"])}) for one in found]


def build(root: Path) -> None:
    """Compile the native kernel of a tree."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def copy(root: Path) -> None:
    """Copy the working tree's files and libraries."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    libraries = (str(path.relative_to(ROOT)) for path in ROOT.glob("scalecom_hvd/native/*.so"))
    for name in {*listed, *libraries} - {""}:
        if (ROOT / name).is_file():  # a deleted file is still listed
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def notice(mutation: Mutation, root: Path, core: int) -> dict[str, list[str]]:
    """{group: the tests that fail} with this mutation."""
    noticed = {}
    for group in mutation.tests:
        if group == "single" or "/" in group:
            skipped = [
                f"--ignore={file}"
                for part, files in SKIPPED.items()
                if not mutation.file.startswith(part)
                for file in files
            ]
            of_kernels = mutation.file.startswith(tuple(SKIPPED))
            marks = ["-m", "not long"] if group == "single" and not of_kernels else []
            program = [*PYTEST, *marks, "--timeout=100", *skipped, f"tests/{group}"]
            program = [sys.executable, *program]
            noticed[group] = failing(program, root, core)
        else:
            noticed[group] = list(failing_on_ranks(group, root, core))
    return noticed


def failing_on_ranks(group: str, root: Path, core: int) -> Iterator[str]:
    """The first test that fails in each file of a face, or in the file that is named."""
    face, *more = group.split()
    ranks, *named = more or ["2"]
    # Files of torch.distributed's face fail unless torchrun has started the ranks.
    names = named or [
        file.name
        for file in sorted((root / "tests" / "parallel").glob("test_*.py"))
        if face == next((own for own in ("tensorflow", "ddp") if own in file.name), "torch")
    ]
    files = [f"tests/parallel/{name}" for name in names]
    launcher = "mpirun" if face in ("torch", "tensorflow") else "torchrun"
    device = {"TESTS_DEVICE": "delayed"} if face == "device" else {}
    while files:
        program = [*PYTEST, "-x", "--timeout=40", "--timeout-method=thread", *files]
        tests = failing(launch.command(launcher, int(ranks), program), root, core, **device)
        yield from tests
        reached = [n for n, file in enumerate(files) if any(file in test for test in tests)]
        # If ranks die without a report, nobody knows which file they had reached.
        files = files[max(reached) + 1 :] if reached else []


def failing(command: Sequence[str], root: Path, core: int, **more: str) -> list[str]:
    """The functions of the tests that fail in a run. Parameters' values would fill pages."""
    diary = root / "diary"
    diary.unlink(missing_ok=True)
    subprocess.run(
        command,
        cwd=root,
        env=launch.environment(
            PYTHONPATH=str(root), TEST_DIARY=str(diary), OMPI_MCA_mpi_yield_when_idle="1", **more
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=3600,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    return list(dict.fromkeys(test.partition("[")[0] for test in failed_tests(diary)))


def run(mutation: Mutation, cores: queue.SimpleQueue[int], output: Path) -> None:
    """Make one mutation, run its tests, and write down which notice."""
    core, began = cores.get(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="mutation.") as folder:
            root = Path(folder)
            copy(root)
            (root / "scalecom_hvd" / mutation.file).write_text(mutation.applied(root))
            if mutation.file.startswith("native"):
                build(root)
            noticed = notice(mutation, root, core)
    finally:
        cores.put(core)
    (output / mutation.file_name).write_text(json.dumps(noticed, indent=1) + "\n")
    count = sum(map(len, noticed.values()))
    took = time.monotonic() - began
    print(f"{mutation.name}: noticed by {count or 'NONE'} ({took:.0f} s)", flush=True)


def table(wanted: Sequence[Mutation], output: Path, before: Path | None) -> str:
    """Every mutation, and how many tests notice it, by file; also those of another run's folder.

    Below it are the tests that are the only ones to notice something. They must stay.
    """
    compared = before is not None
    lines = [
        f"| what goes wrong | {'before | ' * compared}noticed by | in |",
        f"|---|---|---|{'---|' * compared}",
    ]
    alone = []
    for mutation in wanted:
        tests = noticed_in(output, mutation)
        files = collections.Counter(test.partition("::")[0] for test in tests)
        names = ", ".join(
            f"{file.removeprefix('tests/')}{f' ({n})' if n > 1 else ''}"
            for file, n in files.items()
        )
        earlier = ""
        if compared:
            tried = (before / mutation.file_name).exists()
            count = len(noticed_in(before, mutation)) or "**none**"
            earlier = f"{count if tried else 'not tried'} | "
        lines.append(f"| {mutation.name} | {earlier}{len(tests) or '**none**'} | {names} |")
        alone += [f"| {mutation.name} | {tests[0]} |"] if len(tests) == 1 else []
    lines += ["", "| noticed by one test alone | which |", "|---|---|", *alone] if alone else []
    return "\n".join(lines) + "\n"


def noticed_in(folder: Path, mutation: Mutation) -> list[str]:
    """The tests that noticed a mutation; none if it was not tried."""
    path = folder / mutation.file_name
    groups = json.loads(path.read_text()) if path.exists() else {}
    return list(dict.fromkeys(test for tests in groups.values() for test in tests))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--output", type=Path, default=Path("mutations"))
    parser.add_argument("--before", type=Path, help="show the numbers of this folder beside")
    arguments = parser.parse_args()
    wanted = [mutation for mutation in mutations() if arguments.only in mutation.name]
    if not wanted:
        parser.error(f"no mutation's name contains {arguments.only!r}: see mutations.toml")
    arguments.output.mkdir(parents=True, exist_ok=True)
    missing = [one for one in wanted if not (arguments.output / one.file_name).exists()]
    available = sorted(os.sched_getaffinity(0))
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in available:
        cores.put(core)
    with concurrent.futures.ThreadPoolExecutor(len(available)) as pool:
        for job in [pool.submit(run, one, cores, arguments.output) for one in missing]:
            job.result()
    text = table(wanted, arguments.output, arguments.before)
    (arguments.output / "table.md").write_text(text)
    print(text)
    return 0 if all(noticed_in(arguments.output, mutation) for mutation in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
