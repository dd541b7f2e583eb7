"""`python -m scalecom_hvd plan`: what each method would cost per training step, and what to set.

The numbers are predictions of scaling.py: the command runs nothing, and needs no framework. Every
function here returns values or text, and __main__ writes them. Imports config, model_sizes, scaling
and training_warnings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.model_sizes import KNOWN, parameters_of
from scalecom_hvd.scaling import (
    FITTED,
    LOCAL_METHODS,
    NODES,
    Constants,
    Setting,
    bytes_a_step,
    on_devices,
    own_cores,
    predict,
    sends,
    where_the_gain_ends,
    with_derived,
)
from scalecom_hvd.training_warnings import SENDS_WANTED

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
LARGEST_MODEL = 1e14
WORTH_IT = 1.1
"""A method must make steps at least this many times as fast to be worth its trouble."""
MEGABYTE = 1e6
# {the model's name: what the user sets}
AVERAGING = {
    "dense": "dense (no compression)",
    "fp16": "Horovod's fp16",
    "LocalTopK": "LocalTopK",
    "random-k": "RandomK",
    "ScaleCom staggered": "ScaleCom",
    "ScaleCom look-ahead": "ScaleCom, lookahead=True",
}
# How many batches' gradients are added up before they are averaged.
ACCUMULATED = (4, 16)
LOCAL = {"local SGD": "local steps, dense", "ScaleCom local": "local steps, ScaleCom"}


@dataclass(frozen=True)
class Row:
    """What one method costs.

    Attributes:
        method: the model's name.
        label: its name for users.
        megabytes: what a worker sends in a step, on average.
        milliseconds: the time of a step, on average. For larger batches: the time of each batch
            that is added up.
        speed_up: how many times as fast as a dense step it is.
        memory: megabytes of residues, and copies of parameters, on each worker.
    """

    method: str
    label: str
    megabytes: float
    milliseconds: float
    speed_up: float
    memory: float


def count(text: str) -> float:
    """A number of parameters: "350M" is 350 million.

    Raises:
        ArgumentTypeError: it is no number, or no model has so many.
    """
    factor = SUFFIXES.get(text[-1:].upper(), 1.0)
    number = _positive(text[:-1] if factor != 1 else text)
    if number is None or not 1 <= number * factor <= LARGEST_MODEL:
        raise argparse.ArgumentTypeError(
            f"must be a number from 1 to 100T, such as 25000000, 350M or 1.3B, not {text!r}"
        )
    return number * factor


def model(text: str) -> float:
    """The number of parameters of a known model, by its name, or of a file with a state_dict.

    Raises:
        ArgumentTypeError: there is no such model, or the file holds none.
    """
    try:
        return float(parameters_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> float:
    """A number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    number = _positive(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"must be a number above 0, such as 1000, not {text!r}")
    return number


def whole_number(least: int, why: str) -> Callable[[str], int]:
    """A function that reads a whole number, `least` or more. `why` ends its error message."""

    def read(text: str) -> int:
        number = _positive(text)
        if number is None or number != int(number) or number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}{why}, not {text!r}"
            )
        return int(number)

    return read


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` to a parser."""
    add = parser.add_argument
    workers = whole_number(2, " (a single worker sends nothing)")
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument(
        "--parameters",
        type=count,
        metavar="N",
        help="number of the model's parameters, such as 350M or 1.3B",
    )
    sizes.add_argument(
        "--model",
        type=model,
        dest="parameters",
        metavar="NAME",
        help=f"a model instead of --parameters: {', '.join(KNOWN)}, or a file with its state_dict",
    )
    add(
        "--workers",
        type=workers,
        required=True,
        metavar="N",
        help="number of workers that train together",
    )
    add(
        "--mbit",
        type=positive,
        required=True,
        metavar="N",
        help="nominal speed of each worker's network link in Mbit/s (1000 for 1 Gbit/s)",
    )
    add(
        "--gpus-per-node",
        type=whole_number(1, ""),
        default=1,
        metavar="N",
        help="number of workers that share a node and its network link (default: %(default)s)",
    )
    add(
        "--compute-ms",
        type=positive,
        required=True,
        metavar="N",
        help="time of a step's forward and backward without any communication, in milliseconds",
    )
    add(
        "--rate",
        type=positive,
        metavar="N",
        help="one element in N is sent (default: 16 by ScaleCom, 100 by other methods)",
    )
    add(
        "--bits",
        type=whole_number(2, ""),
        metavar="N",
        help="bits of each of ScaleCom's values (default: 3)",
    )
    add(
        "--local-steps",
        type=whole_number(1, ""),
        metavar="H",
        help="a number of local steps to show besides 4 and 16",
    )
    add(
        "--steps",
        type=whole_number(1, ""),
        metavar="N",
        help="steps of the whole run, to estimate its time and whether it is long enough for the "
        "rate",
    )
    add("--nccl", action="store_true", help="gradients are summed on GPUs, not on processors")
    add("--json", action="store_true", help="write the same numbers as JSON")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines that the command writes.

    Args:
        arguments: as `add_arguments` reads them.

    Raises:
        ValueError: settings cannot work. The error says what to write instead.
    """
    s = setting(arguments)
    c = constants(arguments.nccl)
    rows = compare(s, c, sorted({4, 16, arguments.local_steps or 4}))
    if arguments.json:
        yield json.dumps(as_numbers(s, rows, recommended(rows)), indent=1)
        return
    yield from _wrapped(heading(s, arguments.nccl))
    yield ""
    yield from table(rows)
    yield ""
    yield from _wrapped(advice(s, c, rows, arguments.steps))
    yield ""
    yield from _wrapped([" ".join(caveats(s, c))])


def setting(arguments: argparse.Namespace) -> Setting:
    """The setting in which steps are predicted.

    Raises:
        ValueError: the rate is below 1, there is no such number of bits, or workers do not fill two
            or more nodes.
    """
    ScaleComConfig(rate=arguments.rate, bits=arguments.bits)
    workers, per_node = arguments.workers, arguments.gpus_per_node
    if workers % per_node:
        raise ValueError(f"--gpus-per-node {per_node} does not divide --workers {workers}")
    if workers == per_node:
        raise ValueError(
            f"{workers} workers with --gpus-per-node {per_node} are one node. Gradients travel "
            "only inside this node, but compression is for slower links. Train dense"
        )
    return Setting(
        workers=arguments.workers,
        gbit=arguments.mbit / 1000,
        compute=arguments.compute_ms,
        numel=arguments.parameters,
        rate=arguments.rate,
        bits=arguments.bits,
        per_node=per_node,
    )


def constants(nccl: bool = False) -> Constants:
    """The constants for workers with processors of their own. nccl: whether GPUs sum gradients."""
    c = with_derived(own_cores(FITTED))
    return on_devices(c) if nccl else c


def compare(s: Setting, c: Constants, local_steps: list[int]) -> list[Row]:
    """Every method, dense first.

    Args:
        s: the setting.
        c: the model's constants.
        local_steps: each H to show.
    """
    at = [(method, label, s) for method, label in AVERAGING.items()]
    if s.per_node > 1:
        at.append((NODES, "ScaleCom, whole in nodes", s))
    at += [
        (method, f"{label}, H = {h}", dataclasses.replace(s, local_steps=h))
        for method, label in LOCAL.items()
        for h in local_steps
    ]
    dense = predict("dense", s, c)
    rows = []
    for method, label, there in at:
        time = predict(method, there, c)
        megabytes = bytes_a_step(method, there) / MEGABYTE
        rows.append(Row(method, label, megabytes, time, dense / time, memory(method, there)))
    return [rows[0], *_larger_batches(rows[0], s.compute), *rows[1:]]


def _larger_batches(dense: Row, compute: float) -> Iterator[Row]:
    """What dense training may do instead. Only the last batch's backward has communication."""
    for batches in ACCUMULATED:
        time = compute + (dense.milliseconds - compute) / batches
        label = f"dense, {batches} times the batch"
        megabytes, speed_up = dense.megabytes / batches, dense.milliseconds / time
        yield Row(f"larger batch {batches}", label, megabytes, time, speed_up, 0.0)


def memory(method: str, s: Setting) -> float:
    """Megabytes on each worker, beyond what dense training takes.

    A residue has 4 bytes for each parameter, which the workers of a node share out. Local steps
    keep the common parameters and the changes.
    """
    residues = 0.0 if method in ("dense", "fp16", "local SGD") else 4 * s.numel
    if method == NODES:
        residues /= s.per_node
    copies = 2 * 4 * s.numel if method in LOCAL_METHODS else 0
    return (residues + copies) / MEGABYTE


def recommended(rows: list[Row]) -> Row:
    """What to set: the simplest of dense, fp16 and ScaleCom's forms that is near the fastest.

    "Near" means within a factor of WORTH_IT. Simpler ones cost less accuracy.
    """
    by_name = {row.method: row for row in rows}
    names = ("dense", "fp16", NODES, "ScaleCom staggered", "ScaleCom look-ahead")
    candidates = [by_name[name] for name in names if name in by_name]
    fastest = min(row.milliseconds for row in candidates)
    return next(row for row in candidates if row.milliseconds <= WORTH_IT * fastest)


def heading(s: Setting, nccl: bool) -> Iterator[str]:
    """The setting that the user asked for."""
    sums = "on GPUs (NCCL)" if nccl else "by processors (Gloo, MPI; --nccl: on GPUs)"
    rate, bits = sends("ScaleCom", s)
    other, _ = sends("LocalTopK", s)
    each = "each" if s.per_node == 1 else f"for each node of {s.per_node}"
    yield (
        f"{_count(s.numel)} parameters, {s.workers} workers with {_speed(s.gbit)} {each}, "
        f"{s.compute:g} ms of compute a step. Gradients are summed {sums}. ScaleCom sends one "
        f"element in {rate:g} in {bits} bits, LocalTopK and RandomK one in {other:g} in 32."
    )


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as an aligned table."""
    wide = max(len(row.label) for row in rows)
    yield (
        f"{'method':{wide}s} {'MB a step':>10s} {'ms a step':>10s} {'speed-up':>9s} "
        f"{'MB of memory':>13s}"
    )
    for row in rows:
        yield (
            f"{row.label:{wide}s} {_digits(row.megabytes):>10s} {_digits(row.milliseconds):>10s} "
            f"{_speed_up(row.speed_up) + 'x':>9s} {_digits(row.memory):>13s}"
        )


def advice(s: Setting, c: Constants, rows: list[Row], steps: int | None) -> Iterator[str]:
    """What to set, what that costs, and what else would help.

    Args:
        s: the setting.
        c: the model's constants.
        rows: as `compare` gave them.
        steps: of the whole run, if known.
    """
    choice = recommended(rows)
    yield from _on_gpus(choice, s, c)
    if choice.method == "dense":
        yield (
            f"Leave compression out: it would not make steps {WORTH_IT:g} times as fast here, and "
            "dense training costs no accuracy."
            + (f" A run of {steps:,} steps takes {_run_time(rows[0], steps)}." if steps else "")
        )
        yield from _where_it_would_pay(s, c)
        yield from _fewer_averages(choice, rows)
        return
    yield (
        f"Set {choice.label}: steps are {_times(choice.speed_up)} as fast as dense ones."
        + (_whole_run(choice, rows, steps) if steps else "")
    )
    yield ""
    yield from _snippet(choice, s, steps)
    yield ""
    if choice.method == "fp16":
        yield f"- Methods that send less are not {WORTH_IT:g} times as fast as fp16 here."
        return
    yield from _accuracy(choice, s, steps)
    yield from _what_else(choice, s, c, rows)


def caveats(s: Setting, c: Constants) -> Iterator[str]:
    """What the numbers rest on, as sentences. s, c: the setting, and the model's constants."""
    buckets = "a bucket" if s.buckets == 1 else f"{s.buckets} buckets"
    yield (
        "This is a model, not a measurement. Its constants are fitted to steps of 24.8 M "
        "parameters on 2 to 8 hosts of one machine, over Gloo (docs/speed.md). For ScaleCom, it "
        "agrees with the measured steps within 17 %. Dense steps at 1 Gbit/s took 1.2 to 2.7 times "
        "as long as it says. LocalTopK and RandomK are composed from measured parts."
    )
    if not c.megabyte["dense"]:
        yield "With NCCL nothing was measured: the model assumes that sums cost nothing."
    link = (
        "Each worker has a link and"
        if s.per_node == 1
        else "Each node has a link, and each worker has"
    )
    yield f"{link} its own processors, and gradients fill {buckets} of 25 MiB (bucket_bytes)."
    yield (
        "With m times the batch, a step here is one of the m batches whose gradients are added up, "
        "so the same data gives m times fewer updates."
    )
    if s.per_node > 1:
        yield "The model assumes that links inside a node cost nothing (docs/nodes.md)."


def as_numbers(s: Setting, rows: list[Row], choice: Row) -> dict[str, object]:
    """The setting and all rows as plain numbers and names, for JSON."""
    return {
        "setting": dataclasses.asdict(s),
        "methods": [dataclasses.asdict(row) for row in rows],
        "recommended": choice.label,
    }


def _on_gpus(choice: Row, s: Setting, c: Constants) -> Iterator[str]:
    """What NCCL would change, if it was not asked for: sums on processors are slow."""
    if not c.megabyte["dense"]:
        return
    there = recommended(compare(s, constants(nccl=True), [4]))
    if there.method == choice.method:
        gain = "" if choice.method == "dense" else f", {_times(there.speed_up)} as fast as dense"
        yield f"The same holds if GPUs sum the gradients with NCCL{gain}."
    else:
        yield (
            "This is for gradients that are summed by processors (Gloo, MPI). If GPUs sum them "
            f"with NCCL, ask again with --nccl: the answer is then {there.label}."
        )
    yield ""


def _where_it_would_pay(s: Setting, c: Constants) -> Iterator[str]:
    ends = max(
        where_the_gain_ends(method, s, c, WORTH_IT)
        for method in ("ScaleCom staggered", "ScaleCom look-ahead")
    )
    if ends > 0.01:
        yield f"- ScaleCom would pay on networks slower than {_speed(ends)}."


def _snippet(choice: Row, s: Setting, steps: int | None) -> Iterator[str]:
    """The lines to paste into a script: on Horovod, and under torchrun."""
    given = {"rate": s.rate, "bits": s.bits}
    settings = [f"{name}={number:g}" for name, number in given.items() if number]
    settings += ["lookahead=True"] * choice.label.endswith("=True")
    settings.append(f"total_steps={steps or '...'}")
    compression = f"hvd.ScaleCom({', '.join(settings)})"
    origin, names = "scalecom_hvd.ddp", "ScaleComState, scalecom_hook"
    hook, state = "scalecom_hook", f"ScaleComState(model, {', '.join(settings)})"
    if choice.method == "fp16":
        compression = "hvd.Compression.fp16"
        origin = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        names = hook = "fp16_compress_hook"
        state = "None  # this hook needs none"
    if choice.method == NODES:
        state = f"{state[:-1]}, mesh=mesh)  # docs/nodes.md"
    keras = "" if choice.method == NODES else "  # or scalecom_hvd.tensorflow.keras"
    without = "" if choice.method == NODES else "  # not in Keras"
    yield f"    import scalecom_hvd.torch as hvd{keras}"
    yield ""
    yield "    optimizer = hvd.DistributedOptimizer("
    yield "        optimizer,"
    yield f"        named_parameters=model.named_parameters(),{without}"
    yield f"        compression={compression},"
    if choice.method == NODES:
        yield "        nodes=True,"
    yield "    )"
    yield ""
    yield "Under torchrun, with a model that DistributedDataParallel wraps:"
    yield ""
    yield f"    from {origin} import {names}"
    yield ""
    yield f"    state = {state}"
    yield f"    model.register_comm_hook(state, {hook})"


def _whole_run(choice: Row, rows: list[Row], steps: int) -> str:
    """How long all steps take, and how much they send."""
    times = [_run_time(row, steps) for row in (choice, rows[0])]
    sent = [_digits(steps * row.megabytes / 1e3) for row in (choice, rows[0])]
    return (
        f" A run of {steps:,} takes {times[0]} instead of {times[1]}, and a worker sends "
        f"{sent[0]} GB instead of {sent[1]}."
    )


def _run_time(row: Row, steps: int) -> str:
    return _duration(steps * row.milliseconds / 1e3)


def _accuracy(choice: Row, s: Setting, steps: int | None) -> Iterator[str]:
    if s.rate is None and s.bits is None:
        yield (
            "- Accuracy: small models lost 0 to 0.4 points on images, and 0.05 bits on text. "
            "In TensorFlow and Keras they lost up to 1.8 points and 0.25 bits."
        )
    yield "- How to tune it: docs/tuning.md. Measured accuracy: docs/results.md."
    rate, _ = sends(choice.method, s)
    if steps is None:
        yield (
            f"- Runs of under {math.ceil(SENDS_WANTED * rate):,} steps send each element fewer "
            f"than {SENDS_WANTED} times at this rate, and lose accuracy (language models: 60 "
            "times). Lower the rate for such runs."
        )
        return
    if steps / rate < SENDS_WANTED:
        lower = math.floor(steps / SENDS_WANTED)
        yield (
            f"- {steps:,} steps are too few for rate {rate:g}: each element is sent "
            f"{steps / rate:.1f} times, and below about {SENDS_WANTED} times accuracy suffers. "
            + (f"Try --rate {lower}." if lower > 1 else "Train dense.")
        )


def _what_else(choice: Row, s: Setting, c: Constants, rows: list[Row]) -> Iterator[str]:
    """Other settings that would be faster, or better, and where this one stops paying."""
    by_name = {row.method: row for row in rows}
    if choice.method == "ScaleCom look-ahead":
        without = by_name["ScaleCom staggered"]
        yield (
            "- lookahead=True cost an LSTM with AdamW 0.07 bits more, and images up to 0.5 points. "
            "If accuracy comes first, leave it out: steps are then "
            f"{_times(without.speed_up)} as fast as dense ones."
        )
    yield from _fewer_averages(choice, rows)
    ends = where_the_gain_ends(choice.method, s, c, WORTH_IT)
    if ends < math.inf:
        yield f"- On networks faster than {_speed(ends)} compression is no longer worth it."


def _fewer_averages(choice: Row, rows: list[Row]) -> Iterator[str]:
    """Whether local steps would be faster."""
    local = min(
        (row for row in rows if row.method in LOCAL_METHODS), key=lambda row: row.milliseconds
    )
    if WORTH_IT * local.milliseconds < choice.milliseconds:
        yield (
            f"- Faster still: {local.label}, {_digits(local.milliseconds)} ms a step. Local steps "
            "cost accuracy, but less with hvd.sparseloco(H): docs/local_steps.md."
        )


def _duration(seconds: float) -> str:
    """A time in words, such as 3.2 hours."""
    for length, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{_digits(seconds / length)} {name}"
    return f"{_digits(seconds)} seconds"


def _count(number: float) -> str:
    """A number in words, such as 350 M."""
    for factor, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.4g}{name}"
    return f"{number:g}"


def _speed(gbit: float) -> str:
    return f"{gbit:.3g} Gbit/s" if gbit >= 1 else f"{1000 * gbit:.3g} Mbit/s"


def _digits(number: float) -> str:
    """Three significant digits, or all digits before the point."""
    if number >= 100 or number == 0:
        return f"{number:,.0f}"
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def _speed_up(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else _digits(ratio)


def _times(speed_up: float) -> str:
    return f"{_speed_up(speed_up)} times"


def _wrapped(paragraphs: Iterable[str]) -> Iterator[str]:
    """Lines of at most 100 columns. Indented lines stay as they are."""
    for paragraph in paragraphs:
        if not paragraph or paragraph.startswith(" "):
            yield paragraph
            continue
        hanging = "  " if paragraph.startswith("- ") else ""
        yield from textwrap.wrap(paragraph, 100, subsequent_indent=hanging, break_on_hyphens=False)
