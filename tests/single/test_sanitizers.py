"""The C code under AddressSanitizer and UndefinedBehaviorSanitizer.

It reads and writes no byte beyond a buffer, for any geometry, and for any offsets that a broken
peer sends. test_kernels.py has the cases. They run with the
kernel for PyTorch, and with TensorFlow's operations, but without TensorFlow.
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
AS_INSTALLED = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs Python in a process with sanitizers."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("no C compiler is here")
    asked = [compiler, "-print-file-name=libasan.so"]
    asan = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not asan.is_absolute() or not asan.exists():
        pytest.skip(f"{compiler} has no libasan.so")
    library = tmp_path_factory.mktemp("sanitized") / "kernel.so"
    sources = [SOURCES / "lanes.c", SOURCES / "tensorflow_ops.c", HERE / "tensorflow_stub.c"]
    flags = [*SANITIZE, *AS_INSTALLED, "-fPIC", "-shared", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, *sources, "-o", library], check=True, timeout=200)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(asan),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OPENBLAS_NUM_THREADS": "1",
        "KERNEL_LIBRARY": str(library),
        "TESTS_KERNELS": "c.Operations torch.Native",
    }
    how = {"cwd": HERE, "env": environment, "capture_output": True, "text": True, "timeout": 250}
    return lambda *arguments: subprocess.run([sys.executable, *arguments], **how)


def test_no_case_leaves_its_memory(run):
    done = run("-m", "pytest", "-q", "--color=no", "-x", "-s", HERE / "test_kernels.py")
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    print(done.stdout[-500:])


STEP = """
import torch
from kernel_cases import Case
from kernels_torch import Native
from scalecom_hvd.lanes import Lanes

case = Case([Lanes(1000, 300)], ["float32"])
made = Native(case)
{}
made.take_and_accumulate(False)
"""


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ("", ""),
        ("case.residues[0] = case.residues[0][:-1]; made = Native(case)", "heap-buffer-overflow"),
        ("made.values = made.values[:-1].clone()", "heap-buffer-overflow"),
        ("made.offsets = torch.cat([made.offsets, made.offsets])[1:]", "misaligned address"),
    ],
    ids=["nothing", "short residue", "short values", "misaligned offsets"],
)
def test_the_sanitizers_do_report(run, change, report):
    done = run("-c", STEP.format(change))
    assert (done.returncode != 0) == bool(change), done.stderr
    assert report in done.stderr
