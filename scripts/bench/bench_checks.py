"""What ScaleCom's checks cost per step.

The checks find gradients that are not finite or too large, damaged offsets, and growing residues.
The model of `make bench` (24.8 M parameters) trains on this machine's ranks. Steps with all checks,
as shipped, and steps without any take turns, and their medians are compared. A step without checks
has a kernel compiled from the same C code with its tests taken out, and does not look at what
arrived. The look at norms, every 100 steps, is timed by itself. (The agreement is no part of a
step: it happens only at the start.)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

# The tests in the C code, and what replaces them.
TESTS = {
    "lanes_template.h": [("INTEGER good = (bits & MAGNITUDE) <= LARGEST;", "INTEGER good = 1;")],
    "lanes.c": [("if (!all_fit(tensors, count, offsets)) return OFFSETS_OUTSIDE;", "")],
}
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
]
KERNELS = ("checked", "unchecked")
METHODS = {
    "cyclic": {},
    "look-ahead, staggered": {"lookahead": True, "leader": "staggered"},
}
SETTLING_STEPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument(
        "--steps", type=int, default=400, help="half of them with checks (default: %(default)s)"
    )
    parser.add_argument("--as-rank", type=Path, metavar="KERNELS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        measure(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for name in KERNELS:
            compile_kernel(Path(folder), name)
        # each method in processes of its own, where memory lies as it does for a user
        for method in args.methods:
            program = [__file__, "--as-rank", folder, *sys.argv[1:], "--methods", method]
            code = subprocess.call(
                launch.command("mpirun", args.ranks, program), env=launch.environment()
            )
            if code:
                return code
        return 0


def measure(args: argparse.Namespace) -> None:
    """What every rank does; rank 0 prints the table."""
    import torch

    import scalecom_hvd.torch as hvd
    from scalecom_hvd import native
    from scalecom_hvd.exchange.residue import Residues
    from scalecom_hvd.training_warnings import LOOK_EVERY

    hvd.init()
    torch.set_num_threads(1)
    library = Switch(*(loaded(args.as_rank, name) for name in KERNELS))
    with (
        mock.patch.object(native, "library", return_value=library),
        # so rare that it is timed by itself
        mock.patch.object(Residues, "norms_due", return_value=False),
    ):
        for method in args.methods:
            step, look, skipped = training_step(METHODS[method])
            timed(step, SETTLING_STEPS)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(args.steps):
                # two by two, so that every rank leads as often with checks as without
                checks = number // 2 % 2 == 0
                with contextlib.nullcontext() if checks else unchecked(library):
                    seconds[checks].append(timed(step, 1))
            looks = [timed(look, 1) for _ in range(20)]
            assert skipped() == 0, "steps that are taken back are no measure"
            if hvd.rank() == 0:
                checked, plain = statistics.median(seconds[True]), statistics.median(seconds[False])
                share = statistics.median(looks) / LOOK_EVERY / checked
                every_step = f"checks of every step: {checked / plain - 1:+.1%}"
                print(
                    f"{method:24s} {1e3 * checked:6.1f} ms/step; {every_step}; looks at norms: "
                    f"{share:+.2%}",
                    flush=True,
                )


class Switch:
    """The kernel's functions, from one of two libraries."""

    def __init__(self, checked: ctypes.CDLL, unchecked: ctypes.CDLL) -> None:
        self.checked, self.unchecked = checked, unchecked
        self.now = checked

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


def compile_kernel(folder: Path, name: str) -> None:
    """Compile the kernel, with its tests or without, into a folder of its own."""
    from scalecom_hvd import native

    (folder / name).mkdir()
    for path in Path(native.__file__).parent.glob("*.[ch]"):
        text = path.read_text()
        for test, nothing in TESTS.get(path.name, []):
            if test not in text:
                sys.exit(
                    f"{path.name} no longer says {test!r}: tell scripts/bench/bench_checks.py "
                    "what the test is now"
                )
            text = text if name == "checked" else text.replace(test, nothing)
        (folder / name / path.name).write_text(text)
    built = folder / name / "lanes"
    command = ["cc", *FLAGS, "-o", built.with_suffix(".so"), built.with_suffix(".c")]
    subprocess.run(command, check=True)


def loaded(folder: Path, name: str) -> ctypes.CDLL:
    from scalecom_hvd import native

    with mock.patch.object(native, "LIBRARY", folder / name / "lanes.so"):
        return native.library.__wrapped__()


@contextlib.contextmanager
def unchecked(library: Switch) -> Iterator[None]:
    """Steps in this context check nothing."""
    import torch

    from scalecom_hvd.exchange import bucket, values

    yes = torch.tensor(True)
    with (
        mock.patch.object(library, "now", library.unchecked),
        mock.patch.object(bucket.Bucket, "is_sound", return_value=yes),
        mock.patch.object(values.Values, "fill", fill_without_look),
    ):
        yield


def fill_without_look(self: Any, grads: dict[str, Any]) -> int:
    """Values.fill without the look at what is sent whole."""
    import torch

    if self.whole:
        torch._foreach_copy_(list(self.whole.values()), [grads[name] for name in self.whole])
    return 0


def training_step(
    settings: dict[str, Any],
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], int]]:
    """A step, the look at norms as Bucket.norms does it, and how many steps were skipped.

    The step's forward and backward cost next to nothing, so that the exchange is nearly all of it.
    That is the worst case for a ratio.
    """
    import torch
    from bench_cases import transformer_shapes

    import scalecom_hvd.torch as hvd

    shapes = [shape for layer in transformer_shapes() for shape in layer]
    model = {f"{i}": torch.nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    noise = [torch.randn(shape) for shape in shapes]
    grads = [torch.empty(shape) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), 1e-4),
        model.items(),
        compression=hvd.ScaleCom(**settings),
    )

    def step() -> None:
        optimizer.zero_grad()
        torch._foreach_copy_(grads, noise)  # averages are written over gradients
        torch.autograd.backward(list(model.values()), [grad.detach() for grad in grads])
        optimizer.step()

    def look() -> None:
        kept = [tensor.residue for tensor in optimizer.compression.residues.tensors.values()]
        for tensors in (
            kept,
            [
                grad.view(-1)
                for grad in grads
                if grad.numel() >= optimizer.compression.config.min_numel
            ],
        ):
            torch._foreach_norm(tensors, 2, dtype=torch.float32)

    return step, look, lambda: optimizer.compression.residues.skipped_steps


def timed(step: Callable[[], object], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begun) / count


if __name__ == "__main__":
    sys.exit(main())
