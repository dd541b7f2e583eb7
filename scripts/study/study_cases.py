"""Which runs the study makes: twelve experiments, each a list of cases.

A case is runs that differ in their seeds alone. Its `group` is the picture's panel it belongs to,
`what` the curve, `x` the place on it. `--quick` keeps one seed, shorter runs, and the rates and
numbers of workers that matter most.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from study_run import Run

RATES = (25, 100, 400)
METHODS = ("ScaleCom", "LocalTopK", "GTopK", "RandomK", "GlobalTopK")
BETAS = (1.0, 0.3, 0.1, 0.03)
# Experiments on beta are on the filter as the paper has it.
PAPERS_FILTER: dict[str, Any] = {"flush": False}
WORKERS = (4, 8, 16, 64)
RATE = 100
# Tasks that only the first experiment asks.
SECOND = ("mobilenet", "transformer")
# Where beta = 1 breaks: a large learning rate, held, and no batch normalisation, which would hide
# it.
LARGE_RATE = {"lr": 0.15, "schedule": "constant", "steps": 300}
LARGE_BATCH = {"lr": 0.25, "schedule": "constant", "steps": 150, "batch_size": 64, "norm": "group"}
MANY = {"steps": 250, "batch_size": 8, "norm": "group"}
FILTER = 0.1
# Local steps between synchronisations, what the sent values become, and who chooses them.
STEPS = (1, 4, 16)
QUANTISERS = ("none", "sign", "4 bits", "8 bits")
WIDTHS = ("none", "8 bits", "4 bits", "2 bits", "sign")
SELECTIONS = {"leader": "ScaleCom", "local": "LocalTopK"}
# Few meetings: what workers send, after H steps or, DeMo, after every step.
FADING = {"beta": 1.0, "decay": 0.95}
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "plain average": ("dense", {}),
    "DiLoCo": ("dense", {"outer": "nesterov 0.7"}),
    "DiLoCo, half its rate": ("dense", {"outer": "nesterov 0.35"}),
    "SparseLoCo, 3 %": (
        "LocalTopK",
        {"rate": 33, "quantiser": "means", "average": "contributors"} | FADING,
    ),
    "its choice, 3 %": ("LocalTopK", {"rate": 33, "quantiser": "means"} | FADING),
    "its choice, 1 %": ("LocalTopK", {"rate": 100, "quantiser": "means"} | FADING),
    "its choice, exact, 3 %": (
        "LocalTopK",
        {"rate": 33, "quantiser": "means", "selection": "exact"} | FADING,
    ),
    "its choice, 4 bits, 3 %": ("LocalTopK", {"rate": 33, "quantiser": "4 bits"} | FADING),
    "its choice, 32 bits, 3 %": ("LocalTopK", {"rate": 33} | FADING),
    "ScaleCom, 2 bits, 3 %": ("ScaleCom", {"rate": 33, "quantiser": "means", "beta": 1.0}),
    "ScaleCom, 32 bits, 3 %": ("ScaleCom", {"rate": 33, "beta": 1.0}),
}
DEMO = {"rate": 33, "dense": (), "warmup": 0.0, "min_numel": 1}
MAIN = (
    *("plain average", "DiLoCo", "SparseLoCo, 3 %", "its choice, 3 %"),
    "ScaleCom, 2 bits, 3 %",
)
# What is trained, after how many steps workers meet, what they send then, and on how many seeds.
MEETINGS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], Iterable[str], int]] = {
    "LSTM, AdamW, 4 workers": ("lstm", {"steps": 1984}, (4, 16, 64), SENT, 3),
    "LSTM, AdamW, 8 workers": ("lstm", {"steps": 1984, "workers": 8}, (16,), MAIN, 1),
    "Transformer of 1.2 M, 4 workers": ("wider", {"lr_warmup": 0.05}, (16, 64), MAIN, 3),
    # Half an hour of a core each.
    "Transformer, 10,240 steps": (
        "wider",
        {"lr_warmup": 0.05, "steps": 10240},
        (16,),
        MAIN[:3],
        1,
    ),
}
# What is compared at all that a run sends: the library's defaults, parts of them, and the paper's
# form.
LIBRARY: dict[str, Any] = {"warmup": None, "rate": None}
AHEAD = LIBRARY | {"step_ahead": 1.0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "the defaults": ("ScaleCom", AHEAD),
    "with look-ahead": ("ScaleCom", AHEAD | {"lookahead": True}),
    "output layer at rate 4": ("ScaleCom", AHEAD | {"rates": (("auto:output", 4),)}),
    "the model not known": ("ScaleCom", LIBRARY),
    "32 bits, rate 100": ("ScaleCom", {}),
    "local top-k, rate 100": ("LocalTopK", {}),
}
CONTROLS = ("residues thrown away", "compressed tensors frozen")
# What a user trains, and what may be set: {name: (task, fields)} and {name: (method, fields)}.
SITUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet, group norm": ("resnet", {"norm": "group"}),
    "ResNet, layer norm": ("resnet", {"norm": "layer"}),
    "plain CNN, no norm": ("plain", {"norm": "none", "lr": 0.1, "steps": 400}),
    "ResNet, group norm, unlike data": ("resnet", {"norm": "group", "unlike": True}),
    "ResNet, batch norm": ("resnet", {}),
    "MobileNetV2, batch norm, 200 steps": ("mobilenet", {}),
    "plain CNN, group norm, 16 workers": ("plain", MANY | {"workers": 16}),
    "LSTM, 500 steps": ("lstm", {}),
    "Transformer, 250 steps": ("transformer", {}),
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "ScaleCom": ("ScaleCom", {}),
    "ScaleCom, beta 1": ("ScaleCom", {"beta": 1.0}),
    "ScaleCom, no flush": ("ScaleCom", {"flush": False}),
    "ScaleCom, look-ahead": ("ScaleCom", {"lookahead": True}),
    "look-ahead, beta 1": ("ScaleCom", {"lookahead": True, "beta": 1.0}),
    "LocalTopK": ("LocalTopK", {}),
    "RandomK": ("RandomK", {}),
}
# What is compared on all seeds; the rest shows what a setting costs, on fewer.
COMPARED = ("dense", "ScaleCom", "ScaleCom, look-ahead", "LocalTopK", "RandomK")
# Where the rate, the length, the optimizer or the number of workers is another, no method is
# compared with another.
OTHER_SITUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet, group norm, rate 25": ("resnet", {"norm": "group", "rate": 25}),
    "ResNet, group norm, rate 400": ("resnet", {"norm": "group", "rate": 400}),
    "LSTM, 500 steps, rate 25": ("lstm", {"rate": 25}),
    "LSTM, 500 steps, rate 400": ("lstm", {"rate": 400}),
    "plain CNN, group norm, 64 workers": ("plain", MANY | {"workers": 64}),
    "LSTM, 2000 steps": ("lstm", {"steps": 2000}),
    "LSTM, 4000 steps": ("lstm", {"steps": 4000}),
    "LSTM, 500 steps, AdamW": ("lstm", {"optimizer": "adamw"}),
    "LSTM, 2000 steps, AdamW": ("lstm", {"steps": 2000, "optimizer": "adamw"}),
    "Transformer, 250 steps, AdamW": ("transformer", {"optimizer": "adamw"}),
}
FEWER = ("dense", "ScaleCom", "ScaleCom, beta 1")
# What every method may choose from where each is compared at its best, and on which seed it does.
TUNED = (
    "ResNet, group norm",
    "plain CNN, group norm, 16 workers",
    "LSTM, 500 steps",
    "LSTM, 500 steps, AdamW",
)
TUNED_METHODS = ("ScaleCom", "LocalTopK", "RandomK")
FILTERS: dict[str, dict[str, Any]] = {"the default": {}, "beta 1": {"beta": 1.0}}
FACTORS = (0.5, 1, 2)
TRIAL_SEED = 11
# What every choice is compared with, in experiments where it is not dense training.
RECOMMENDED = "as recommended"


@dataclass(frozen=True)
class Case:
    """Runs that differ in their seeds alone; see the module."""

    experiment: str
    group: str
    what: str
    x: float | None
    runs: tuple[Run, ...]


def cases(tasks: tuple[str, ...], seeds: tuple[int, ...], quick: bool) -> list[Case]:
    """All cases of all experiments; cases of several experiments may share runs."""
    shorter = {"steps": 150} if quick else {}
    own = [task for task in tasks if task not in SECOND][: 1 if quick else None]
    digits = "resnet" in tasks
    found = [*accuracy(tasks, quick, shorter)]
    if digits:
        found += [*large(quick), *workers(quick)]
    found += [*similarity(own, quick, shorter, digits), *choices(own, quick, shorter)]
    if "lstm" in tasks:
        found += [*bounded(quick), *([] if quick else lstm_betas())]
    found += [*settings(tasks, quick), *trials(tasks, quick), *few_bits(tasks, quick)]
    found += [*local(own, quick), *(widths() if digits and not quick else [])]
    if "lstm" in tasks:
        found += [*meetings(quick)]
    return [dataclasses.replace(case, runs=tuple(with_seeds(case, seeds, quick))) for case in found]


def with_seeds(case: Case, seeds: tuple[int, ...], quick: bool) -> Iterator[Run]:
    """All seeds where defaults and methods are held against each other, three or two elsewhere.

    One is enough for whether something stays bounded over 10 000 steps, and all that there is time
    for with 64 workers.
    """
    (run,) = case.runs
    wanted = {"local": 3, "tuned": len(seeds)}.get(case.experiment, 2)
    if case.experiment == "bits" or (case.experiment == "accuracy" and case.x in (None, RATE)):
        wanted = 3
    if case.experiment == "settings" and case.what in COMPARED:
        wanted = len(seeds)
    if case.experiment == "meetings":
        *_, wanted = MEETINGS[case.group]
    if quick or case.experiment == "bounded" or run.workers >= 64:
        wanted = 1
    for seed in (TRIAL_SEED,) if case.experiment == "trials" else seeds[:wanted]:
        yield dataclasses.replace(run, seed=seed).resolved()


def case(
    experiment: str,
    group: str,
    what: str,
    task: str,
    method: str = "dense",
    x: float | None = None,
    rate: float | None = RATE,
    **fields: Any,
) -> Case:
    """A case whose run has these fields; those that are not of Run are options of the method."""
    own = {field.name for field in dataclasses.fields(Run)}
    options = {name: value for name, value in fields.items() if name not in own}
    if method not in ("dense", "ECQSGD") and rate is not None:
        options = {"rate": rate} | options
    chosen = {name: value for name, value in fields.items() if name in own}
    run = Run(task=task, method=method, options=tuple(options.items()), **chosen)
    return Case(experiment, group, what, x, (run,))


def accuracy(tasks: tuple[str, ...], quick: bool, shorter: dict[str, Any]) -> Iterator[Case]:
    """1. The standard batch: every method at every rate, and controls that tell what it tells."""
    for task in tasks:
        yield case("accuracy", task, "dense", task, **shorter)
        for rate in (RATE,) if quick else RATES:
            for method in METHODS:
                yield case("accuracy", task, method, task, method, rate, rate, **shorter)
        yield case("accuracy", task, "ECQSGD 4 bits", task, "ECQSGD", bits=4, **shorter)
        if not quick:
            flops = {"rates": "from_flops", "dense": ()}
            name = "ScaleCom, rates from flops"
            yield case("accuracy", task, name, task, "ScaleCom", rate=None, **flops)
        for control in CONTROLS:
            yield case("accuracy", task, control, task, "ScaleCom", control=control, **shorter)


def large(quick: bool) -> Iterator[Case]:
    """2. Large batches and rates: when the filter rescues, and whether it is just momentum."""
    settings = {"large learning rate, group norm": LARGE_RATE | {"norm": "group"}}
    if not quick:
        warm = LARGE_RATE | {"norm": "group", "lr_warmup": 0.2}
        settings |= {
            "large learning rate, group norm, warm-up": warm,
            "large learning rate, batch norm": LARGE_RATE,
            "batch of 256, group norm": LARGE_BATCH,
            "standard": {},
        }
    for name, fields in settings.items():
        yield case("large", name, "dense", "resnet", **fields)
        for beta in (1.0, 0.1) if quick else BETAS:
            own = PAPERS_FILTER | {"beta": beta} | fields
            yield case("large", name, "ScaleCom", "resnet", "ScaleCom", beta, **own)
        if "group norm" in name and "warm-up" not in name:
            # The same filter on gradients, in the place of the residues' own: if it does the same,
            # ScaleCom's is a momentum.
            filtered = {"control": FILTER} | fields
            yield case("large", name, "dense, gradients filtered", "resnet", **filtered)
            what = "beta 1, gradients filtered"
            yield case("large", name, what, "resnet", "ScaleCom", **filtered)
            if not quick:
                yield case("large", name, "RandomK", "resnet", "RandomK", **fields)


def lstm_betas() -> Iterator[Case]:
    """2. What the filter costs where nothing has to be rescued."""
    for beta in BETAS:
        own = PAPERS_FILTER | {"beta": beta}
        yield case("large", "LSTM", "ScaleCom", "lstm", "ScaleCom", beta, **own)


def workers(quick: bool) -> Iterator[Case]:
    """3. More workers: accuracy, similarity, build-up, bytes."""
    fields = MANY | ({"steps": 60} if quick else {})
    for n in (4, 16) if quick else WORKERS:
        for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
            looks = {"diagnostics": 20} if method in ("ScaleCom", "LocalTopK") else {}
            name = "digits, plain CNN, group norm"
            yield case("workers", name, method, "plain", method, n, workers=n, **looks, **fields)


def similarity(
    tasks: list[str], quick: bool, shorter: dict[str, Any], digits: bool
) -> Iterator[Case]:
    """4. Over time; and where workers should be unlike: tiny batches, shards of unlike data."""
    for task in tasks:
        for beta in (1.0, 0.1):
            fields = PAPERS_FILTER | {"beta": beta, "diagnostics": 10} | shorter
            yield case("similarity", task, f"beta {beta:g}", task, "ScaleCom", **fields)
    settings = {
        "batch of 2": {"batch_size": 2, "norm": "group"},
        "batch of 16": {"norm": "group"},
        "unlike shards": {"unlike": True, "norm": "group"},
    }
    for name, fields in settings.items() if digits else ():
        for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
            looks = {"diagnostics": 10} if method == "ScaleCom" else {}
            own = looks | shorter | fields
            yield case("similarity", name, method, "resnet", method, **own)


def choices(tasks: list[str], quick: bool, shorter: dict[str, Any]) -> Iterator[Case]:
    """5. What each choice costs or gains, one at a time, at rate 100."""
    variants: dict[str, dict[str, Any]] = {
        RECOMMENDED: {},
        "nothing sent whole": {"dense": (), "warmup": 0.0},
        "no dense warm-up": {"warmup": 0.0},
        "output layer compressed": {"dense": ()},
    }
    if not quick:
        staggered = {"leader": "staggered", "bucket_bytes": 200_000}
        variants |= {
            "the library's defaults": AHEAD,
            "first layer whole too": {"dense": ("auto:first", "auto:output")},
            "look-ahead": {"lookahead": True},
            "staggered leaders": staggered,
            "both": {"lookahead": True} | staggered,
            "float16 values": {"wire_dtype": "float16"},
            "exact top-k": {"selection": "exact"},
            "clipping after the exchange": {"clip": 1.0},
            "clipping before the exchange": {"clip_first": 1.0},
            "momentum before the exchange": {"momentum_first": True},
            "weight decay before the exchange": {"decay_first": True},
        }
    for task in tasks:
        for name, fields in variants.items():
            if name.startswith("weight decay") and task == "lstm":
                continue  # it has none
            yield case("choices", task, name, task, "ScaleCom", **shorter, **fields)
        if not quick:
            yield case("choices", task, "dense, clipped", task, clip=1.0)


def bounded(quick: bool) -> Iterator[Case]:
    """7. Residues over ten thousand steps, where gradients do not vanish.

    Text that is never seen twice, at a learning rate that does not fall.
    """
    steps = 300 if quick else 10_000
    fields = {"steps": steps, "batch_size": 1, "schedule": "constant", "warmup": 0.0, "lr": 0.3}
    for beta in (1.0,) if quick else (1.0, 0.1):
        own = PAPERS_FILTER | {"beta": beta, "diagnostics": steps // 50} | fields
        yield case("bounded", "LSTM", f"beta {beta:g}", "lstm", "ScaleCom", **own)


def settings(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """9. What a user should set, by what is trained."""
    asked = [(SITUATIONS, tuple(SETTINGS)), (OTHER_SITUATIONS, FEWER)]
    for situations, whats in asked[: 1 if quick else None]:
        for situation, (task, fields) in situations.items():
            if not asked_about(task, tasks, quick):
                continue
            for what in whats:
                method, options = SETTINGS[what]
                own = fields | options | ({"steps": 150} if quick else {})
                yield case("settings", situation, what, task, method, **own)


def asked_about(task: str, tasks: tuple[str, ...], quick: bool) -> bool:
    """Whether a situation's task is among those asked for.

    As in the third experiment, the plain CNN comes with the other digits.
    """
    return ("resnet" if task == "plain" else task) in tasks and (task == "lstm" or not quick)


def few_bits(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """12. The library's defaults: what a whole run sends, and what it comes to."""
    situations = SITUATIONS | OTHER_SITUATIONS
    for situation in (
        "LSTM, 500 steps, AdamW",
        "Transformer, 250 steps, AdamW",
        *SITUATIONS,
    )[: 1 if quick else None]:
        task, fields = situations[situation]
        if not asked_about(task, tasks, quick):
            continue
        for what, (method, options) in FORMS.items():
            own = fields | options | ({"steps": 150} if quick else {})
            yield case("bits", situation, what, task, method, **own)


def trials(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """10. Each method with every filter and learning rate, on a seed that is not reported."""
    filters = dict([*FILTERS.items()][: 1 if quick else None])
    for situation in TUNED[2:3] if quick else TUNED:
        task, fields = (SITUATIONS | OTHER_SITUATIONS)[situation]
        if not asked_about(task, tasks, quick):
            continue
        fields = fields | ({"steps": 150} if quick else {})
        asked = [("dense", "dense", {})]
        for method in TUNED_METHODS[: 1 if quick else None]:
            asked += [(f"{method}, {name}", method, options) for name, options in filters.items()]
        for what, method, options in asked:
            one = case("trials", situation, what, task, method, **fields, **options)
            lr = one.runs[0].resolved().lr
            for factor in FACTORS[1 if quick else 0 :]:
                run = dataclasses.replace(one.runs[0], lr=factor * lr)
                yield dataclasses.replace(one, x=factor, runs=(run,))


def tuned(best: list[Case], seeds: tuple[int, ...], quick: bool) -> list[Case]:
    """10. What was best of each method's trials, on the seeds that are reported."""
    found = [dataclasses.replace(case, experiment="tuned") for case in best]
    return [dataclasses.replace(case, runs=tuple(with_seeds(case, seeds, quick))) for case in found]


def local(tasks: list[str], quick: bool) -> Iterator[Case]:
    """8. Local steps, and quantised values of both choices, with as many gradients for all."""
    for task in tasks:
        # A whole number of rounds. Smaller tensors are compressed too, so that what is sent whole
        # hides less of what bits save.
        steps = 144 if quick else {"lstm": 496}.get(task, 400)
        for h in STEPS[1:] if quick else STEPS:
            fields = {"local_steps": h, "steps": steps}
            yield case("local", task, "sent whole", task, "dense", h, **fields)
            fields["min_numel"] = 256
            for quantiser in ("none", "sign") if quick else QUANTISERS:
                for selection, method in SELECTIONS.items():
                    options = {} if quantiser == "none" else {"quantiser": quantiser}
                    what = f"{selection} top-k, {quantiser}"
                    yield case("local", task, what, task, method, h, **fields, **options)


def widths() -> Iterator[Case]:
    """8. How the levels of a quantiser and k play together."""
    fields = {"local_steps": 4, "steps": 400, "min_numel": 256}
    for rate in RATES:
        for width in WIDTHS:
            own = fields | ({} if width == "none" else {"quantiser": width})
            yield case("widths", "digits, H = 4", width, "resnet", "ScaleCom", rate, rate, **own)


def meetings(quick: bool) -> Iterator[Case]:
    """11. Few meetings: what an outer optimizer wins back, and how little may be sent.

    AdamW inside, and as many gradients for all. All that has 256 elements is compressed.
    """
    for group, (task, own, apart, asked, _) in [*MEETINGS.items()][: 1 if quick else None]:
        fields = {"optimizer": "adamw"} | own | ({"steps": 128} if quick else {})
        yield case("meetings", group, "dense", task, x=1, **fields)
        yield case("meetings", group, "ScaleCom", task, "ScaleCom", 1, **fields)
        yield case("meetings", group, "DeMo, 3 %", task, "DeMo", 1, **fields, **DEMO)
        for h, what in itertools.product(*((apart[:1], MAIN) if quick else (apart, asked))):
            method, options = SENT[what]
            more = {"local_steps": h} | fields | options
            if method != "dense":
                more |= {"dense": (), "warmup": 0.0, "min_numel": 256}
            yield case("meetings", group, what, task, method, h, **more)
