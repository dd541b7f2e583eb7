"""`python -m scalecom_hvd plan`: what each method would cost per training step, and what to set.

The numbers are predictions of scaling.py: the command runs nothing, and needs no framework.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from scalecom_hvd import scaling
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.scaling import NODES, Constants, Setting
from scalecom_hvd.stages import LADDER
from scalecom_hvd.training_warnings import SENDS_WANTED

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
WORTH_IT = 1.1
"""A method must make steps at least this many times as fast to be worth its trouble."""
# {the model's name: what the user sets}
AVERAGING = {
    "dense": "dense (no compression)",
    "fp16": "Horovod's fp16",
    "ScaleCom staggered": "ScaleCom",
    "ScaleCom look-ahead": "ScaleCom, lookahead=True",
}
LOCAL = {"local SGD": "local steps, dense", "ScaleCom local": "local steps, ScaleCom"}


class Row(NamedTuple):
    """What one method costs, on average over steps."""

    method: str  # the model's name
    label: str  # its name for users
    megabytes: float  # that a worker sends in a step
    milliseconds: float  # of a step; for larger batches, of each batch that is added up
    speed_up: float  # over a dense step
    memory: float  # megabytes of residues, and copies of parameters, on each worker


def _reader(
    means: str, accepts: Callable[[float], bool], made: type = float
) -> Callable[[str], Any]:
    """A reader of a number, such as 5 or 5K, which `accepts` accepts. means: for the error."""

    def read(text: str) -> Any:
        factor = SUFFIXES.get(text[-1:].upper(), 1.0)
        try:
            number = float(text[:-1] if factor != 1 else text) * factor
        except ValueError:
            number = math.nan
        if not accepts(number):
            raise argparse.ArgumentTypeError(f"must be {means}, not {text!r}")
        return made(number)

    return read


def _whole_number(least: int, why: str = "") -> Callable[[str], int]:
    means = f"a whole number of at least {least}{why}"
    return _reader(means, lambda x: least <= x < math.inf and x == int(x), int)


positive = _reader("a number above 0, such as 1000", lambda x: 0 < x < math.inf)
_SIZES = "a number from 1 to 100T, such as 25000000, 350M or 1.3B"
count = _reader(_SIZES, lambda x: 1 <= x <= 1e14)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` to a parser."""
    workers, whole = _whole_number(2, " (a single worker sends nothing)"), _whole_number(1)
    for name, read, what in (
        ("--parameters", count, "number of the model's parameters, such as 350M or 1.3B"),
        ("--workers", workers, "number of workers that train together"),
        ("--mbit", positive, "nominal speed of each worker's network link in Mbit/s"),
        ("--compute-ms", positive, "milliseconds of a step's forward and backward alone"),
        ("--gpus-per-node", whole, "number of workers that share a network link (default: 1)"),
        ("--rate", positive, "one element in N is sent (default: 8, or 100 with 32 bits)"),
        ("--bits", _whole_number(2), "bits of each of ScaleCom's values (default: 4)"),
        ("--local-steps", whole, "a number of local steps to show besides 4 and 16"),
        ("--steps", whole, "steps of the whole run: its time, and whether it is too short"),
    ):
        needed = name in ("--parameters", "--workers", "--mbit", "--compute-ms")
        parser.add_argument(name, type=read, required=needed, metavar="N", help=what)
    sums = "gradients are summed on GPUs, not on processors"
    parser.add_argument("--nccl", action="store_true", help=sums)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines that the command writes, for arguments as `add_arguments` reads them.

    Raises:
        ValueError: settings cannot work. The error says what to write instead.
    """
    s, c = setting(arguments), constants(arguments.nccl)
    rows = compare(s, c, sorted({4, 16, arguments.local_steps or 4}))
    paragraphs = [heading(s, arguments.nccl), "", *table(rows), ""]
    paragraphs += [*advice(s, c, rows, arguments.steps), "", caveats(s, arguments.nccl)]
    for text in paragraphs:
        as_it_is = "  " in text or not text  # a row of the table, or a setting
        hanging = "  " if text.startswith("- ") else ""
        wrapped = textwrap.wrap(text, 100, subsequent_indent=hanging, break_on_hyphens=False)
        yield from [text] if as_it_is else wrapped


def setting(arguments: argparse.Namespace) -> Setting:
    """The setting in which steps are predicted. Raises ValueError if it cannot be."""
    ScaleComConfig(rate=arguments.rate, bits=arguments.bits)  # checks both
    workers, per_node = arguments.workers, arguments.gpus_per_node or 1
    if workers % per_node:
        raise ValueError(f"--gpus-per-node {per_node} does not divide --workers {workers}")
    if workers == per_node:
        raise ValueError(
            f"{workers} workers with --gpus-per-node {per_node} are one node. Gradients travel "
            "only inside this node, but compression is for slower links. Train dense"
        )
    return Setting(
        workers=workers,
        gbit=arguments.mbit / 1000,
        compute=arguments.compute_ms,
        numel=arguments.parameters,
        rate=arguments.rate,
        bits=arguments.bits,
        per_node=per_node,
    )


def constants(nccl: bool = False) -> Constants:
    """The constants for workers with processors of their own. nccl: whether GPUs sum gradients."""
    c = dataclasses.replace(scaling.FITTED, cores=math.inf)
    return scaling.on_devices(c) if nccl else c


def compare(s: Setting, c: Constants, local_steps: list[int]) -> list[Row]:
    """Every method, dense first. local_steps: each H to show."""
    at = [(method, label, s) for method, label in AVERAGING.items()]
    if s.per_node > 1:
        at.append((NODES, "ScaleCom, whole in nodes", s))
    at += [
        (method, f"{label}, H = {h}", dataclasses.replace(s, local_steps=h))
        for method, label in LOCAL.items()
        for h in local_steps
    ]
    dense = scaling.predict("dense", s, c)
    rows = []
    for method, label, there in at:
        time, sent = scaling.predict(method, there, c), scaling.bytes_a_step(method, there) / 1e6
        # The workers of a node share out its residue. Local steps keep the common parameters and
        # the changes.
        sharers = s.per_node if method == NODES else 1
        memory = 0.0 if method in scaling.WHOLE_METHODS else 4 * s.numel / sharers
        memory += 8 * s.numel * (method in scaling.LOCAL_METHODS)
        rows.append(Row(method, label, sent, time, dense / time, memory / 1e6))
    for i, batches in enumerate((4, 16)):
        # What dense training may do instead. Only the last batch's backward has communication.
        time, sent = s.compute + (dense - s.compute) / batches, rows[0].megabytes / batches
        label = f"dense, {batches} times the batch"
        rows.insert(1 + i, Row(f"larger batch {batches}", label, sent, time, dense / time, 0.0))
    return rows


def recommended(rows: list[Row]) -> Row:
    """What to set: the simplest of dense, fp16 and ScaleCom within WORTH_IT of the fastest.

    Simpler ones cost less accuracy. Look-ahead costs too much to be recommended.
    """
    names = ("dense", "fp16", NODES, "ScaleCom staggered")
    candidates = [row for name in names for row in rows if row.method == name]
    fastest = min(row.milliseconds for row in candidates)
    return next(row for row in candidates if row.milliseconds <= WORTH_IT * fastest)


def heading(s: Setting, nccl: bool) -> str:
    """The setting that the user asked for."""
    sums = "on GPUs (NCCL)" if nccl else "by processors (Gloo, MPI; --nccl: on GPUs)"
    rate, bits = scaling.sends("ScaleCom", s)
    each = "each" if s.per_node == 1 else f"for each node of {s.per_node}"
    return (
        f"{s.numel / 1e6:,.4g} M parameters, {s.workers} workers with {_speed(s.gbit)} {each}, "
        f"{s.compute:g} ms of compute a step. Gradients are summed {sums}. ScaleCom sends one "
        f"element in {rate:g} in {bits} bits."
    )


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as an aligned table."""
    wide = max(len(row.label) for row in rows)
    heads = ("MB a step", "ms a step", "speed-up", "MB of memory")
    yield f"{'method':{wide}s} " + " ".join(f"{head:>12s}" for head in heads)
    for row in rows:
        numbers = (row.megabytes, row.milliseconds, row.speed_up, row.memory)
        yield f"{row.label:{wide}s} " + " ".join(f"{_digits(number):>12s}" for number in numbers)


def advice(s: Setting, c: Constants, rows: list[Row], steps: int | None) -> Iterator[str]:
    """What to set, what that costs, and what else would help. steps: of the whole run, if known."""
    choice, dense = recommended(rows), rows[0]
    if choice is dense:
        yield (
            f"Leave compression out: it would not make steps {WORTH_IT:g} times as fast here, and "
            f"dense training costs no accuracy.{_whole_run([dense], steps)}"
        )
        ends = scaling.where_the_gain_ends("ScaleCom staggered", s, c, WORTH_IT)
        if ends > 0.01:
            yield f"- ScaleCom would pay on networks slower than {_speed(ends)}."
    else:
        yield (
            f"Set {choice.label}: steps are {_digits(choice.speed_up)} times as fast as dense "
            f"ones.{_whole_run([choice, dense], steps)}"
        )
        yield from ("", *_setting(choice, s, steps), "")
        if choice.method == "fp16":
            return
        yield from _accuracy(choice, s, steps)
        ends = scaling.where_the_gain_ends(choice.method, s, c, WORTH_IT)
        if ends < math.inf:
            yield f"- On networks faster than {_speed(ends)} compression is no longer worth it."
    if s.per_node == 1 and s.rate is None and s.bits is None:
        found = LADDER[scaling.rung_of_auto(s, c)]
        yield f"- In PyTorch, ScaleCom(rate='auto') would settle on: {found}."
    local = min((row for row in rows if row.method in LOCAL), key=lambda row: row.milliseconds)
    if WORTH_IT * local.milliseconds < choice.milliseconds:
        yield (
            f"- Faster still: {local.label}, {_digits(local.milliseconds)} ms a step. Local steps "
            "cost accuracy, but less with hvd.sparseloco(H): docs/local_steps.md."
        )


def _whole_run(rows: list[Row], steps: int | None) -> str:
    """How long all steps take, and how much they send, with one row instead of another."""
    if not steps:
        return ""
    hours = " instead of ".join(_digits(steps * row.milliseconds / 3.6e6) for row in rows)
    sent = " instead of ".join(_digits(steps * row.megabytes / 1e3) for row in rows)
    return f" A run of {steps:,} steps takes {hours} hours, and a worker sends {sent} GB."


def _setting(choice: Row, s: Setting, steps: int | None) -> Iterator[str]:
    """What to give, on Horovod and under torchrun."""
    if choice.method == "fp16":
        yield "    compression=hvd.Compression.fp16  # on Horovod"
        yield "    model.register_comm_hook(None, fp16_compress_hook)  # of PyTorch, under torchrun"
        return
    given = {"rate": s.rate, "bits": s.bits}
    settings = [f"{name}={number:g}" for name, number in given.items() if number]
    words, nodes = ", ".join([*settings, f"total_steps={steps or '...'}"]), choice.method == NODES
    yield f"    compression=hvd.ScaleCom({words}){', nodes=True' * nodes}  # on Horovod"
    yield f"    ScaleComState(model, {words}{', mesh=mesh' * nodes})  # under torchrun"


def _accuracy(choice: Row, s: Setting, steps: int | None) -> Iterator[str]:
    yield "- How to tune it: docs/tuning.md. What it costs in accuracy: docs/results.md."
    rate, _ = scaling.sends(choice.method, s)
    if steps is None:
        yield (
            f"- Runs of under {math.ceil(SENDS_WANTED * rate):,} steps send each element fewer "
            f"than {SENDS_WANTED} times at this rate, and lose accuracy (language models: 60 "
            "times). Lower the rate for such runs."
        )
    elif steps / rate < SENDS_WANTED:
        lower = math.floor(steps / SENDS_WANTED)
        yield (
            f"- {steps:,} steps are too few for rate {rate:g}: each element is sent "
            f"{steps / rate:.1f} times, and below about {SENDS_WANTED} times accuracy suffers. "
            + (f"Try --rate {lower}." if lower > 1 else "Train dense.")
        )


def caveats(s: Setting, nccl: bool) -> str:
    """What the numbers rest on."""
    said = (
        "This is a model, not a measurement. Its constants are fitted to steps of 24.8 M "
        "parameters on 2 to 8 hosts of one machine, over Gloo (docs/speed.md). For ScaleCom, it "
        "agrees with the measured steps within 13 %. Dense steps at 1 Gbit/s took 1.3 to 2.4 times "
        "as long as it says. "
    )
    if nccl:
        said += "With NCCL nothing was measured: the model assumes that sums cost nothing. "
    if s.per_node > 1:
        said += "The model assumes that links inside a node cost nothing (docs/nodes.md). "
    return said + (
        f"Gradients fill {s.buckets} bucket{'s' * (s.buckets > 1)} of 25 MiB (bucket_bytes). With "
        "m times the batch, a step here is one of the m batches whose gradients are added up, so "
        "the same data gives m times fewer updates."
    )


def _speed(gbit: float) -> str:
    return f"{gbit:.3g} Gbit/s" if gbit >= 1 else f"{1000 * gbit:.3g} Mbit/s"


def _digits(number: float) -> str:
    """Three significant digits, or all digits before the point."""
    if number >= 100 or number == 0:
        return f"{number:,.0f}"
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"
