"""Which runs answer which question: the study's eight experiments, each a list of runs.
study_page.py makes tables and pictures of them.

--quick keeps one seed, shorter runs and the rates and numbers of workers that matter most; the
questions stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from study_run import Run

RATES = (25, 100, 400)
METHODS = ("ScaleCom", "LocalTopK", "GTopK", "RandomK", "GlobalTopK")
BETAS = (1.0, 0.3, 0.1, 0.03)
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
CONTROLS = ("residues thrown away", "compressed tensors frozen")


@dataclass(frozen=True)
class Case:
    """Runs that differ in their seeds alone. label: what tables call it."""

    experiment: str
    label: str
    runs: tuple[Run, ...]


def cases(tasks: tuple[str, ...], seeds: tuple[int, ...], quick: bool) -> list[Case]:
    """All cases of all experiments; cases of several experiments may share runs."""
    found = [
        case
        for make in (accuracy, large, workers, similarity, choices, bounded, local)
        for case in make(tasks, quick)
    ]
    return [dataclasses.replace(case, runs=tuple(with_seeds(case, seeds, quick))) for case in found]


def with_seeds(case: Case, seeds: tuple[int, ...], quick: bool) -> Iterator[Run]:
    (run,) = case.runs
    # All seeds where methods are compared, two elsewhere. One is enough for whether something stays
    # bounded over 10 000 steps, and all that there is time for with 64 workers.
    wanted = len(seeds) if case.experiment in ("accuracy", "local") else 2
    if quick or case.experiment == "bounded" or run.workers >= 64:
        wanted = 1
    for seed in seeds[:wanted]:
        yield dataclasses.replace(run, seed=seed).resolved()


def case(
    experiment: str,
    label: str,
    task: str,
    method: str = "dense",
    rate: float | None = RATE,
    **fields: Any,
) -> Case:
    """A case whose run has these fields; those that are not of Run are options of the method."""
    own = {field.name for field in dataclasses.fields(Run)}
    options = {name: value for name, value in fields.items() if name not in own}
    if method not in ("dense", "ECQSGD") and rate is not None:
        options = {"rate": rate} | options
    chosen = {name: value for name, value in fields.items() if name in own}
    return Case(
        experiment,
        label,
        (Run(task=task, method=method, options=tuple(options.items()), **chosen),),
    )


def accuracy(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """1.

    Accuracy at the standard batch: every method at every rate, with the controls that show what the
    numbers can tell.
    """
    rates = (RATE,) if quick else RATES
    shorter = {"steps": 150} if quick else {}
    for task in tasks:
        yield case("accuracy", f"{task}: dense", task, **shorter)
        for rate in rates:
            for method in METHODS:
                yield case("accuracy", f"{task}: {method} {rate}x", task, method, rate, **shorter)
        yield case("accuracy", f"{task}: ECQSGD 4 bits", task, "ECQSGD", bits=4, **shorter)
        if not quick:
            yield case(
                "accuracy",
                f"{task}: ScaleCom, rates from flops",
                task,
                "ScaleCom",
                None,
                rates="from_flops",
                dense=(),
                **shorter,
            )
        for control in CONTROLS:
            yield case(
                "accuracy", f"{task}: {control}", task, "ScaleCom", control=control, **shorter
            )


def large(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """2.

    Large batches and learning rates: when the filter rescues, what it costs otherwise, and whether
    it is just momentum.
    """
    if "resnet" not in tasks:
        return
    settings = {"large learning rate, group norm": LARGE_RATE | {"norm": "group"}}
    if not quick:
        settings |= {
            "large learning rate, group norm, warm-up": LARGE_RATE
            | {"norm": "group", "lr_warmup": 0.2},
            "large learning rate, batch norm": LARGE_RATE,
            "batch of 256, group norm": LARGE_BATCH,
            "standard": {},
        }
    for name, fields in settings.items():
        yield case("large", f"{name}: dense", "resnet", **fields)
        for beta in (1.0, 0.1) if quick else BETAS:
            yield case("large", f"{name}: beta {beta:g}", "resnet", "ScaleCom", beta=beta, **fields)
        if "group norm" in name and "warm-up" not in name:
            # The same filter on gradients, in the place of the residues' own: if it does the same,
            # ScaleCom's is a momentum.
            yield case(
                "large", f"{name}: dense, gradients filtered", "resnet", control=FILTER, **fields
            )
            yield case(
                "large",
                f"{name}: beta 1, gradients filtered",
                "resnet",
                "ScaleCom",
                control=FILTER,
                **fields,
            )
            if not quick:
                yield case("large", f"{name}: RandomK", "resnet", "RandomK", **fields)
    if "lstm" in tasks and not quick:
        for beta in BETAS:
            yield case("large", f"LSTM: beta {beta:g}", "lstm", "ScaleCom", beta=beta)


def workers(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """3. More workers: accuracy, similarity, build-up, bytes."""
    if "resnet" not in tasks:
        return
    for n in (4, 16) if quick else WORKERS:
        for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
            looks = {"diagnostics": 20} if method in ("ScaleCom", "LocalTopK") else {}
            yield case(
                "workers",
                f"{n}: {method}",
                "plain",
                method,
                workers=n,
                **looks,
                **MANY | ({"steps": 60} if quick else {}),
            )


def similarity(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """4.

    Similarity over time, and where the assumption that workers are alike should fail: tiny batches,
    shards of unlike data.
    """
    shorter = {"steps": 150} if quick else {}
    for task in tasks[:1] if quick else [task for task in tasks if task not in SECOND]:
        for beta in (1.0, 0.1):
            yield case(
                "similarity",
                f"{task}: beta {beta:g}",
                task,
                "ScaleCom",
                beta=beta,
                diagnostics=10,
                **shorter,
            )
    if "resnet" not in tasks:
        return
    unlike = {"unlike": True, "norm": "group"}
    settings = {
        "batch of 2": {"batch_size": 2, "norm": "group"},
        "batch of 16": {"norm": "group"},
        "unlike shards": unlike,
    }
    for name, fields in settings.items():
        for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
            looks = {"diagnostics": 10} if method == "ScaleCom" else {}
            yield case(
                "similarity", f"{name}: {method}", "resnet", method, **looks, **shorter, **fields
            )


def choices(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """5. What each choice costs or gains, one at a time, at rate 100."""
    variants: dict[str, dict[str, Any]] = {
        "as recommended": {},
        "nothing sent whole": {"dense": (), "warmup": 0.0},
        "no dense warm-up": {"warmup": 0.0},
        "output layer compressed": {"dense": ()},
    }
    if not quick:
        variants |= {
            "the library's defaults": {"warmup": None},
            "first layer whole too": {"dense": ("auto:first", "auto:output")},
            "look-ahead": {"lookahead": True},
            "staggered leaders": {"leader": "staggered", "bucket_bytes": 200_000},
            "both": {"lookahead": True, "leader": "staggered", "bucket_bytes": 200_000},
            "float16 values": {"wire_dtype": "float16"},
            "exact top-k": {"selection": "exact"},
            "clipping after the exchange": {"clip": 1.0},
            "clipping before the exchange": {"clip_first": 1.0},
            "momentum before the exchange": {"momentum_first": True},
            "weight decay before the exchange": {"decay_first": True},
        }
    shorter = {"steps": 150} if quick else {}
    for task in tasks[:1] if quick else [task for task in tasks if task not in SECOND]:
        for name, fields in variants.items():
            if name.startswith("weight decay") and task == "lstm":
                continue  # it has none
            yield case("choices", f"{task}: {name}", task, "ScaleCom", **shorter, **fields)
        if not quick:
            yield case("choices", f"{task}: dense, clipped", task, clip=1.0)


def bounded(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """7.

    Residues over ten thousand steps, where gradients do not vanish: text that is never seen twice,
    at a rate that does not fall.
    """
    if "lstm" not in tasks:
        return
    steps = 300 if quick else 10_000
    for beta in (1.0,) if quick else (1.0, 0.1):
        fields = {"steps": steps, "batch_size": 1, "schedule": "constant", "warmup": 0.0, "lr": 0.3}
        yield case(
            "bounded",
            f"LSTM, rate {RATE}, beta {beta:g}",
            "lstm",
            "ScaleCom",
            beta=beta,
            diagnostics=steps // 50,
            **fields,
        )


def local(tasks: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """8.

    Local steps, and quantised values of both choices, with as many gradients for all; and how the
    levels and k play together.
    """
    for task in tasks[:1] if quick else [task for task in tasks if task not in SECOND]:
        # A whole number of rounds. Smaller tensors are compressed too, so that what is sent whole
        # hides less of what bits save.
        steps = {"steps": 144 if quick else {"lstm": 496}.get(task, 400), "min_numel": 256}
        for h in STEPS[1:] if quick else STEPS:
            yield case(
                "local", f"{task}: H = {h}, dense, none", task, local_steps=h, steps=steps["steps"]
            )
            for quantiser in ("none", "sign") if quick else QUANTISERS:
                for selection, method in SELECTIONS.items():
                    options = {} if quantiser == "none" else {"quantiser": quantiser}
                    yield case(
                        "local",
                        f"{task}: H = {h}, {selection}, {quantiser}",
                        task,
                        method,
                        local_steps=h,
                        **steps,
                        **options,
                    )
    if "resnet" in tasks and not quick:
        for rate in RATES:
            for width in WIDTHS:
                options = {} if width == "none" else {"quantiser": width}
                yield case(
                    "widths",
                    f"{rate}x, {width}",
                    "resnet",
                    "ScaleCom",
                    rate,
                    local_steps=4,
                    steps=400,
                    min_numel=256,
                    **options,
                )
