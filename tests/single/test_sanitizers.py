"""The C code under AddressSanitizer and UndefinedBehaviorSanitizer.

It reads and writes no byte beyond a buffer, for any geometry, and for any offsets that a broken
peer sends.

The cases are in sanitizer_cases.py, which needs neither torch nor TensorFlow.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalecom_hvd import native

pytestmark = pytest.mark.long
HERE = Path(__file__).parent
SOURCES = Path(native.__file__).parent
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
AS_INSTALLED = [
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs sanitizer_cases.py in a process with sanitizers."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("no C compiler is here")
    asan = Path(
        subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    if not asan.is_absolute() or not asan.exists():
        pytest.skip(f"{compiler} has no libasan.so")
    library = tmp_path_factory.mktemp("sanitized") / "kernel.so"
    ours = [SOURCES / name for name in ("lanes.c", "tensorflow_ops.c")]
    sources = [*ours, HERE / "tensorflow_stub.c"]
    command = [compiler, *SANITIZE, *AS_INSTALLED, f"-I{SOURCES}", *sources, "-o", library]
    subprocess.run(command, check=True, timeout=110)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(asan),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OPENBLAS_NUM_THREADS": "1",
    }

    def started(case):
        command = [sys.executable, HERE / "sanitizer_cases.py", case, library]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)

    return started


def test_no_case_leaves_its_memory(run):
    done = run("cases")
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    print(done.stdout)


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("short_residue", "heap-buffer-overflow"),
        ("short_values", "heap-buffer-overflow"),
        ("misaligned_offsets", "misaligned address"),
    ],
)
def test_the_sanitizers_do_report(run, case, report):
    done = run(case)
    assert done.returncode != 0
    assert report in done.stderr
