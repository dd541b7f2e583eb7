"""The runs that the study makes: five experiments, each a list of cases.

The runs of a case differ only in their seeds. Its `group` is what is trained, `what` is compared
there, and `x` says what was varied. `--quick` keeps one seed, shorter runs, and what matters most.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from study_run import Run

from scalecom_hvd.stages import LADDER

RATE = 100
# Tasks without local steps.
SECOND = ("mobilenet", "transformer")
MANY = {"steps": 250, "batch_size": 8, "norm": "group"}
# Local steps between synchronisations, and what is sent: who chooses, and values' quantisation.
STEPS = (1, 4, 16)
CHOICES: dict[str, tuple[str, dict[str, str]]] = {
    "leader top-k, none": ("ScaleCom", {}),
    "local top-k, none": ("LocalTopK", {}),
    "local top-k, sign": ("LocalTopK", {"quantiser": "sign"}),
}
# Few synchronisations: what workers send after H steps or, with DeMo, after every step.
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
    "its choice, 32 bits, 3 %": ("LocalTopK", {"rate": 33} | FADING),
    "ScaleCom, 32 bits, 3 %": ("ScaleCom", {"rate": 33, "beta": 1.0}),
}
MAIN = ("plain average", "DiLoCo", "SparseLoCo, 3 %", "its choice, 3 %")
# What is trained, H, what workers send after H steps, and how many seeds.
SYNCHRONISED: dict[str, tuple[str, dict[str, Any], tuple[int, ...], Iterable[str], int]] = {
    "LSTM, AdamW, 4 workers": ("lstm", {"steps": 1984}, (4, 16, 64), SENT, 3),
    "LSTM, AdamW, 8 workers": ("lstm", {"steps": 1984, "workers": 8}, (16,), MAIN, 1),
    "Transformer of 1.2 M, 4 workers": ("wider", {"lr_warmup": 0.05}, (16, 64), MAIN, 3),
    # These take half an hour to an hour of a core each.
    "Transformer, 10,240 steps": (
        "wider",
        {"lr_warmup": 0.05, "steps": 10240},
        (16,),
        MAIN[:3],
        1,
    ),
}
# What is compared by all that a run sends: the library's defaults, parts of them, the paper's form,
# and, as a control, one worker that trains alone and sends nothing.
LIBRARY: dict[str, Any] = {"warmup": None, "rate": None}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "the defaults": ("ScaleCom", LIBRARY),
    "with look-ahead": ("ScaleCom", LIBRARY | {"lookahead": True}),
    "output layer at rate 4": ("ScaleCom", LIBRARY | {"output_rate": 4}),
    "nu=1": ("ScaleCom", LIBRARY | {"nu": 1}),
    "32 bits, rate 100": ("ScaleCom", {"nu": 1}),
    "local top-k, rate 100": ("LocalTopK", {"nu": 1}),
    "one worker alone": ("dense", {"workers": 1}),
}
# What workers send after every step, for comparison with few synchronisations.
EVERY_STEP = {name: FORMS[name] for name in ("dense", "the defaults", "32 bits, rate 100")}
EVERY_STEP["DeMo, 3 %"] = ("DeMo", {"rate": 33, "dense": (), "warmup": 0.0, "min_numel": 1})
# What a user trains: {name: (task, fields)}. If a node of four ranks is one worker, it has all
# their images.
SITUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM, 500 steps, AdamW": ("lstm", {"optimizer": "adamw"}),
    "Transformer, 250 steps, AdamW": ("transformer", {"optimizer": "adamw"}),
    "ResNet, group norm": ("resnet", {"norm": "group"}),
    "ResNet, layer norm": ("resnet", {"norm": "layer"}),
    "plain CNN, no norm": ("plain", {"norm": "none", "lr": 0.1, "steps": 400}),
    "ResNet, group norm, unlike data": ("resnet", {"norm": "group", "unlike": True}),
    "ResNet, batch norm": ("resnet", {}),
    "MobileNetV2, batch norm, 200 steps": ("mobilenet", {}),
    "plain CNN, group norm, 16 workers": ("plain", MANY | {"workers": 16}),
    "LSTM, 500 steps": ("lstm", {}),
    "Transformer, 250 steps": ("transformer", {}),
    "the same 16 ranks, as 4 nodes of 4": ("plain", MANY | {"batch_size": 32}),
    "plain CNN, group norm, 64 workers": ("plain", MANY | {"workers": 64}),
}
# Here methods are compared at about equal bytes of a run. Each has the learning rate, momentum and
# filter that were best on a seed that is not reported.
TUNED = ("ResNet, group norm", "LSTM, 500 steps, AdamW", "Transformer, 250 steps, AdamW")
FILTERS = (0.2, 1.0)
NUS = (1, 0.75, 0.5, 0.25)
MOMENTUM_ASKED = (
    "LSTM, 500 steps, AdamW",
    "LSTM, 500 steps",
    "Transformer, 250 steps, AdamW",
    "ResNet, group norm",
    "ResNet, group norm, unlike data",
)
# The tasks of these optimizers, with the learning rate that was best for dense training on seed 11.
OTHER_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Transformer, 250 steps, Lion": {"optimizer": "lion", "lr": 0.003},
    "Transformer, 250 steps, Muon": {"optimizer": "muon", "lr": 0.01},
}
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "the defaults": ("ScaleCom", LIBRARY),
    "LocalTopK": ("LocalTopK", {"rate": 150, "nu": 1}),
    "LocalTopK, sign": ("LocalTopK", {"rate": 35, "nu": 1, "quantiser": "sign"}),
    **{f"PowerSGD, rank {r}": ("PowerSGD", {"factors": r, "min_numel": 1}) for r in (2, 4)},
    "DeMo": ("DeMo", {"rate": 133, "min_numel": 1, "optimizer": "adamw"}),
}
RIVALS_IN_SHORT = ("dense", "the defaults", "PowerSGD, rank 2")
FACTORS = (0.5, 1, 2)
# With half the momentum SGD takes five times the learning rate, so that a gradient has the same
# effect in the end. AdamW's first moment is an average, which does not change that.
MOMENTA = {0.9: 1, 0.5: 5}
TRIAL_SEED = 11
# Steps of --quick, of which local steps take a whole number of rounds; elsewhere 150.
QUICK_STEPS = {"local": 144, "synchronisations": 128}


@dataclass(frozen=True)
class Case:
    """Runs that differ only in their seeds: see the module."""

    experiment: str
    group: str
    what: str
    x: float | None
    runs: tuple[Run, ...]


def cases(tasks: tuple[str, ...], seeds: tuple[int, ...], quick: bool) -> list[Case]:
    """All cases of all experiments. Cases of several experiments may share runs."""
    own = [task for task in tasks if task not in SECOND][: 1 if quick else None]
    found = [*defaults(tasks, quick), *momentum(tasks, quick), *trials(tasks, quick)]
    found += [*local(own, quick), *rungs(tasks, quick)]
    if "lstm" in tasks:
        found += [*synchronisations(quick)]
    return [dataclasses.replace(case, runs=tuple(with_seeds(case, seeds, quick))) for case in found]


def with_seeds(case: Case, seeds: tuple[int, ...], quick: bool) -> Iterator[Run]:
    """All seeds to compare defaults and methods, and three or two elsewhere.

    With 64 workers there is time for only one.
    """
    (run,) = case.runs
    if quick:
        run = dataclasses.replace(run, steps=QUICK_STEPS.get(case.experiment, 150))
    wanted = {"momentum": 2, "local": 3}.get(case.experiment, len(seeds))
    if case.experiment == "synchronisations":
        *_, wanted = SYNCHRONISED[case.group]
    if quick or run.workers >= 64:
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
    """A case with a run of these fields. Those that Run does not have are the method's options."""
    own = {field.name for field in dataclasses.fields(Run)}
    options = {name: value for name, value in fields.items() if name not in own}
    if method not in ("dense", "PowerSGD") and rate is not None:
        options = {"rate": rate} | options
    chosen = {name: value for name, value in fields.items() if name in own}
    run = Run(task=task, method=method, options=tuple(options.items()), **chosen)
    return Case(experiment, group, what, x, (run,))


def defaults(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """1. The library's defaults: what a whole run sends, and its score.

    Nothing is tuned. A user's own task files are included too.
    """
    own = {task: (task, {}) for task in tasks if task.endswith(".py")}
    for situation, (task, fields) in (SITUATIONS | own).items():
        if asked_about(task, tasks) and not (quick and situation in (*SITUATIONS,)[2:]):
            for what, (method, options) in FORMS.items():
                yield case("defaults", situation, what, task, method, **fields | options)


def asked_about(task: str, tasks: tuple[str, ...]) -> bool:
    """Whether a situation's task is among those asked for. The plain CNN comes with the digits."""
    return ("resnet" if task == "plain" else task) in tasks


def momentum(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """2. The momentum's share of a step: nu, instead of the library's choice."""
    asked = {name: SITUATIONS[name] for name in MOMENTUM_ASKED[: 1 if quick else None]}
    if not quick:
        asked |= {name: ("transformer", fields) for name, fields in OTHER_OPTIMIZERS.items()}
    for situation, (task, fields) in asked.items():
        if asked_about(task, tasks):
            own = fields | LIBRARY
            yield case("momentum", situation, "dense", task, **fields)
            yield case("momentum", situation, "the defaults", task, "ScaleCom", **own)
            for nu in NUS[:2] if quick else NUS:
                yield case("momentum", situation, "nu", task, "ScaleCom", nu, **own, nu=nu)


def rungs(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """6. Every rung of the ladder that rate="auto" climbs."""
    for situation in TUNED[1:2] if quick else TUNED:
        task, fields = SITUATIONS[situation]
        for rung in LADDER[:4] if quick else LADDER if asked_about(task, tasks) else ():
            own, method = fields, "dense"
            if not rung.is_whole:
                own, method = fields | LIBRARY | {"rate": rung.rate, "bits": rung.bits}, "ScaleCom"
            yield case("rungs", situation, str(rung), task, method, **own)


def trials(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """3. Each rival with all of its choices, on a seed that is not reported."""
    for situation in TUNED[1:2] if quick else TUNED:
        task, fields = SITUATIONS[situation]
        if not asked_about(task, tasks):
            continue
        for rival in RIVALS_IN_SHORT if quick else RIVALS:
            method, options = RIVALS[rival]
            nothing_whole = {} if method == "dense" else {"warmup": None}
            own = fields | options | nothing_whole
            task_lr = case("", "", "", task, **own).runs[0].resolved().lr
            filters = FILTERS if method == "LocalTopK" else (None,)
            momenta = (0.9,) if quick or method == "DeMo" else MOMENTA
            for momentum, beta, factor in itertools.product(momenta, filters, FACTORS):
                lr = task_lr * factor
                if own.get("optimizer", "sgd") == "sgd":
                    lr *= MOMENTA[momentum]
                chosen = own | {"lr": lr, "momentum": momentum}
                chosen |= {} if beta is None else {"beta": beta}
                yield case("trials", situation, rival, task, method, factor, **chosen)


def rivals(best: list[Case], seeds: tuple[int, ...], quick: bool) -> list[Case]:
    """3. The best of each rival's trials, on the seeds that are reported."""
    found = [dataclasses.replace(case, experiment="rivals") for case in best]
    return [dataclasses.replace(case, runs=tuple(with_seeds(case, seeds, quick))) for case in found]


def local(tasks: list[str], quick: bool) -> Iterator[Case]:
    """4. Local steps, with both choices, and quantised values. All take equally many gradients."""
    for task in tasks:
        # A whole number of rounds. Smaller tensors are compressed too, so that what is sent whole
        # hides less of what few bits save.
        steps = {"lstm": 496}.get(task, 400)
        for h in STEPS[1:] if quick else STEPS:
            fields = {"local_steps": h, "steps": steps}
            yield case("local", task, "sent whole", task, "dense", h, **fields)
            fields["min_numel"] = 256
            for what, (method, options) in CHOICES.items():
                yield case("local", task, what, task, method, h, **fields, **options)


def synchronisations(quick: bool) -> Iterator[Case]:
    """5. Few synchronisations: what an outer optimizer wins back, and how little may be sent.

    Workers step by AdamW, and all cases take equally many gradients. Every tensor from 256 elements
    on is compressed.
    """
    for group, (task, own, apart, asked, _) in [*SYNCHRONISED.items()][: 1 if quick else None]:
        fields = {"optimizer": "adamw"} | own
        for what, (method, options) in EVERY_STEP.items():
            yield case("synchronisations", group, what, task, method, 1, **fields | options)
        for h, what in itertools.product(*((apart[:1], MAIN) if quick else (apart, asked))):
            method, options = SENT[what]
            more = {"local_steps": h} | fields | options
            if method != "dense":
                more |= {"dense": (), "warmup": 0.0, "min_numel": 256}
            yield case("synchronisations", group, what, task, method, h, **more)
