"""The Triton kernel: its cases (triton_cases.py), and the code that it compiles to.

Without a GPU, the compiled code shows errors that the interpreter does not show.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DTYPES

pytest.importorskip("triton", reason="the package triton is not installed")


HERE = Path(__file__).parent
POISONED = "test_torch_kernels.py::test_no_gradient_poisons_the_residue_for_ever"
CASES = ["test_kernels.py", "triton_cases.py", f"{POISONED}[1e+20-False]", f"{POISONED}[nan-True]"]
# The interpreter takes 10 ms per tile, so `make test` runs these, and only the night all cases.
QUICK = [
    "triton_cases.py",
    "test_kernels.py::test_sent_plus_residue_is_what_came_in",
    "test_kernels.py::test_all_moves_are_numpys[triton.Tiles-63-float32]",
    "test_kernels.py::test_all_moves_are_numpys[triton.Tiles-129-bfloat16]",
    "test_kernels.py::test_of_tensors_that_share_a_move_some_are_not_rolled_back",
    "test_kernels.py::test_special_numbers[triton.Tiles-float32-nan]",
    "test_kernels.py::test_special_numbers[triton.Tiles-bfloat16-overflowing values]",
]


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param(CASES, marks=pytest.mark.long)], ids=["quick", "all"]
)
@pytest.mark.timeout(600)
def test_cases(cases):
    """Run the cases on a GPU if there is one, and in Triton's interpreter otherwise."""
    environment = {**os.environ, "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1"}
    environment["TESTS_KERNELS"] = "triton.Tiles"
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-x", *cases]
    how = {"capture_output": True, "text": True, "timeout": 580}
    done = subprocess.run(command, cwd=HERE, env=environment, **how)
    assert done.returncode == 0, done.stdout[-10_000:]
    print(done.stdout[-500:])


# This program runs in a process of its own. In it, triton compiles every kernel that the moves ask
# for, for a GPU that need not exist, and launches none of them.
COMPILE = """
import re
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

kind, arch, warp, *dtypes = sys.argv[2:]

class Absent:
    get_current_target = staticmethod(
        lambda: GPUTarget(kind, int(arch) if kind == "cuda" else arch, int(warp))
    )
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Absent())
run, compiled = JITFunction.run, {}

def compile_only(self, *arguments, warmup, **options):
    kernel = run(self, *arguments, warmup=True, **options)
    compiled[kernel.hash] = self.__name__, options["GRAD"], kernel.asm

JITFunction.run = compile_only

sys.path.insert(0, sys.argv[1])
from kernel_cases import Case
from kernels_torch import Adapter
from scalecom_hvd.exchange.kernels.triton_kernel import TritonKernel
from scalecom_hvd.lanes import Lanes

class Tiles(Adapter):
    kernel = TritonKernel

for dtype in dtypes:
    for levels in (0, 3):
        for chooses in (False, True):
            made = Tiles(Case([Lanes(900, 7)], [dtype], levels))
            made.choose()
            values = made.take_and_accumulate(chooses).values
            made.roll_back()
            if not levels:
                made.scatter(values)

for name, grad, asm in compiled.values():
    if kind == "hip":
        code = asm["amdgcn"]
        # Of float16 alone: it rounds a product once, where other devices round it twice.
        fused = set(re.findall(r"v_(?:pk_)?(?:fma|mad|mac|fmac)[a-z_]*_f[0-9]+", code))
        if "v_div_fixup" in code:  # a division, which is rounded right by them
            fused = {own for own in fused if not re.fullmatch("v_fma[cs]?_f(32|64)", own)}
        assert fused <= {"v_fma_mixlo_f16", "v_fma_mixhi_f16"}, f"{name} for {grad} has {fused}"
        assert not fused or str(grad) == "fp16", f"{name} for {grad} has {fused}"
        assert not re.search(r"[vs]gpr_spill_count: *[1-9]", code), f"{name} for {grad} spills"
        continue
    ptx = asm["ptx"]
    assert "fma." not in ptx, f"{name} for {grad} has a fused multiply-add"
    assert ".ftz" not in ptx, f"{name} for {grad} flushes denormals"
    wide = {"fp32": "v4.b32", "fp64": "v2.b64"}.get(str(grad), "v2.b32")
    moves_wide = name == "measure_blocks" or f"global.{wide}" in ptx
    assert moves_wide, f"{name} for {grad} does not move {wide}"
print(len(compiled), "kernels")
"""


TARGETS = ["cuda 90 32", "cuda 80 32", "hip gfx942 64"]


@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        (TARGETS[0], DTYPES[-1:]),
        *(pytest.param(target, DTYPES, marks=pytest.mark.long) for target in TARGETS),
    ],
)
def test_it_compiles_for_gpus_to_wide_moves_without_fused_multiply_adds_or_spills(
    target, dtypes, tmp_path
):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "SCALECOM_KERNEL": "triton",
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    command = [sys.executable, "-c", COMPILE, str(HERE), *target.split(), *dtypes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) == 9 * len(dtypes)
    if "cuda" in target:
        stores = re.findall(r"(\d+) bytes spill stores", done.stdout)
        assert len(stores) >= 7 * len(dtypes)
        # One kernel may spill one or two registers.
        assert sum(map(int, stores)) <= 8
