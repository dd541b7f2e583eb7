"""The study's results: the numbers of every case, as a CSV file and as Markdown tables.

NUMBERS is everything known of a case. results.csv has a column for each number, and a table has
those of its experiment. docs/results.md says what the numbers mean.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import study_tasks
from study_cases import Case
from study_run import Run

NAMES = {
    "LocalTopK": "local top-k",
    "LocalTopK, sign": "local top-k, signs",
    "RandomK": "random-k",
}
# make bench's model, for which times are given: its elements, its compute, and the share of a
# link's nominal speed that is reached.
NUMEL, COMPUTE_SECONDS, REACHED = 24_800_000, 0.150, 0.95


def name_of(what: str) -> str:
    """The name in tables."""
    return NAMES.get(what, what)


class Scores:
    """One case, and the results of its runs.

    `mean` is None if any run diverged: a mean of the other runs would be too good.
    """

    def __init__(self, case: Case, results: Sequence[dict[str, Any]]) -> None:
        self.case, self.results, self.run = case, results, case.runs[0]
        self.task = study_tasks.find(self.run.task)
        self.diverged = sum(result["diverged"] or result["score"] is None for result in results)
        scores = [result["score"] for result in results]
        self.mean = None if self.diverged else statistics.mean(scores)
        self.deviation = statistics.stdev(scores) if len(scores) > 1 and not self.diverged else None
        self.bytes = results[0]["bytes_per_step"]

    @property
    def title(self) -> str:
        """The title of its group: the task's title, or the setting's own name."""
        return self.task.title if self.case.group == self.run.task else self.case.group

    def better_than(self, other: Scores | None) -> float | None:
        """By how much, in the metric's units; negative is worse. None if either has no mean."""
        if other is None or self.mean is None or other.mean is None:
            return None
        return (self.mean - other.mean) * (1 if self.task.higher_is_better else -1)

    def reaches(self, target: float | None) -> tuple[float, float] | None:
        """(steps, bytes) that a worker had spent when the training loss reached `target`.

        None if it never did, on any of the seeds.
        """
        spent = []
        for result in self.results:
            rows = zip(smooth(result["losses"]), result["bytes"], strict=True)
            there = ((step, n) for (step, loss), (_, n) in rows if loss <= (target or -math.inf))
            spent.append(next(there, None))
        if self.diverged or None in spent:
            return None
        return tuple(map(statistics.mean, zip(*spent, strict=True)))


def smooth(losses: list[list[float]]) -> list[tuple[float, float]]:
    """Means of three points each."""
    values = [loss for _, loss in losses]
    return [
        (step, statistics.mean(values[max(0, i - 2) : i + 1])) for i, (step, _) in enumerate(losses)
    ]


class Study:
    """All cases of all experiments, with their results."""

    def __init__(self, cases: Sequence[Case], results: dict[str, dict[str, Any]]) -> None:
        self.scores = [Scores(case, [results[run.name] for run in case.runs]) for case in cases]

    def of(self, experiment: str, group: str | None = None) -> list[Scores]:
        """The cases of an experiment, or of one of its groups."""
        wanted = (s for s in self.scores if s.case.experiment == experiment)
        return [s for s in wanted if group is None or s.case.group == group]

    def best(self, experiment: str) -> list[Case]:
        """The case with the best score, for each group and curve."""
        found: dict[tuple[str, str], Scores] = {}
        for s in self.of(experiment):
            key = (s.case.group, s.case.what)
            if key not in found or (s.better_than(found[key]) or 0) > 0 or found[key].mean is None:
                found[key] = s
        return [s.case for s in found.values()]

    def reference(self, scores: Scores) -> Scores | None:
        """The case that a case is compared with: values as they are, or dense."""
        whats = ("none", "dense", "sent whole")
        if scores.case.what in whats:
            return None
        own = self.of(scores.case.experiment, scores.case.group)
        # Prefer the same x if it exists: as many workers, or local steps.
        own.sort(key=lambda s: (s.case.x != scores.case.x, s.case.x or 0))
        return next((s for what in whats for s in own if s.case.what == what), None)

    def target(self, scores: Scores) -> float | None:
        """A training loss that dense training and ScaleCom both reach, in all that is compared.

        None if one of them diverged.
        """
        common = {
            "rivals": ("dense", "the defaults"),
            "local": ("leader top-k, none",),
            "synchronisations": ("dense", "plain average"),
        }
        case = scores.case
        among = [
            s
            for s in self.of(case.experiment, case.group)
            if s.case.what in common.get(case.experiment, ())
        ]
        if not among or any(s.diverged for s in among):
            return None
        return 1.05 * max(smooth(r["losses"])[-1][1] for s in among for r in s.results)


def seconds(share_of_model: float, steps: float, gbit: float) -> float:
    """How long steps of make bench's model take if a worker sends this share of its bytes in each.

    Equally for all methods, nothing is hidden behind backward, and no processor time is counted.
    """
    return steps * (COMPUTE_SECONDS + share_of_model * 4 * NUMEL * 8 / (gbit * 1e9 * REACHED))


def to_loss(study: Study, scores: Scores, number: Callable[[float, float], float]) -> float | None:
    """A number made of the (steps, bytes) until the target loss."""
    spent = scores.reaches(study.target(scores))
    return None if spent is None else number(*spent)


def seconds_to_loss(study: Study, scores: Scores, gbit: float) -> float | None:
    """`seconds` until the target loss."""
    model = 4 * scores.results[0]["parameters"]
    return to_loss(study, scores, lambda n, spent: seconds(spent / n / model, n, gbit))


Number = Callable[[Study, Scores], float | None]
SECONDS = {"s to loss, 1 Gbit/s": 1, "s to loss, 10 Gbit/s": 10}
SLOWER = {"s to loss, 10 Mbit/s": 0.01, "s to loss, 100 Mbit/s": 0.1}
NUMBERS: dict[str, Number] = {
    "better": lambda study, s: s.better_than(study.reference(s)),
    "kB per step": lambda study, s: s.bytes / 1000,
    "MB of the run": lambda study, s: s.results[0]["bytes"][-1][1] / 1e6,
    "kB compressed": lambda study, s: (s.bytes - s.results[0]["bytes_whole_per_step"]) / 1000,
    "target loss": lambda study, s: study.target(s),
    "steps to loss": lambda study, s: to_loss(study, s, lambda steps, spent: steps),
    "MB to loss": lambda study, s: to_loss(study, s, lambda steps, spent: spent / 1e6),
    **{
        head: lambda study, s, gbit=gbit: seconds_to_loss(study, s, gbit)
        for head, gbit in (SLOWER | SECONDS).items()
    },
}
TO_LOSS = ("target loss", "steps to loss", "MB to loss")


@dataclass(frozen=True)
class Table:
    """How an experiment is shown. `x` says what was varied; `numbers` are some of NUMBERS."""

    title: str
    x: str
    numbers: tuple[str, ...]


TABLES = {
    "defaults": Table("The defaults", "", ("better", "kB per step", "MB of the run")),
    "momentum": Table("The momentum's share of a step", "nu", ()),
    "rivals": Table(
        "Methods at equal bytes, each at its own best",
        "learning rate, times",
        ("better", "MB of the run", *TO_LOSS, *SECONDS),
    ),
    "local": Table(
        "Local steps and quantised values", "H", ("kB per step", "kB compressed", *TO_LOSS)
    ),
    "rungs": Table("The rungs of rate='auto'", "", ("better", "kB per step")),
    "synchronisations": Table(
        "Few synchronisations", "H", ("better", "kB per step", *TO_LOSS, *SLOWER, *SECONDS)
    ),
}


def shown(name: str, number: float | None) -> str:
    """A number as a table shows it."""
    if number is None:
        return ""
    return f"{number:+.3g}" if name == "better" else f"{number:.4g}"


def result(scores: Scores) -> str:
    """The mean, and the deviation over seeds."""
    if scores.mean is None:
        return f"came apart ({scores.diverged} of {len(scores.results)})"
    digits = scores.task.digits
    spread = "" if scores.deviation is None else f" ± {scores.deviation:.{digits}f}"
    return f"{scores.mean:.{digits}f}{spread} {scores.task.unit}"


def lines_of(study: Study, experiment: str, table: Table) -> Iterator[str]:
    """The lines of a Markdown table. A column is left out if no case has its number."""
    cases = study.of(experiment)
    columns = {name: [NUMBERS[name](study, s) for s in cases] for name in table.numbers}
    columns = {name: found for name, found in columns.items() if any(n is not None for n in found)}
    head = ["", "", *([table.x] if table.x else []), "result", *columns]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for i, s in enumerate(cases):
        place = [shown("", s.case.x)] if table.x else []
        cells = [shown(name, found[i]) for name, found in columns.items()]
        yield f"| {' | '.join([s.title, name_of(s.case.what), *place, result(s), *cells])} |"


def write_tables(study: Study, path: Path) -> None:
    """Write all tables that have runs as one Markdown file."""
    lines = ["Made by `make study`; docs/results.md says what it means. `better`: by how much, in"]
    lines += ["the result's unit, than dense training, or than what is recommended.", ""]
    for experiment, table in TABLES.items():
        if study.of(experiment):
            lines += [f"## {table.title}", "", *lines_of(study, experiment, table), ""]
    path.write_text("\n".join(lines))


def write_csv(study: Study, path: Path) -> None:
    """Write one row per case, with all its numbers."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        head = ("experiment", "group", "what", "x", "task", "steps", "workers", "seeds", "diverged")
        rows.writerow([*head, "unit", "mean", "deviation", *NUMBERS])
        for s in study.scores:
            case, run = s.case, s.run
            own = [case.experiment, case.group, case.what, case.x, run.task, run.steps, run.workers]
            own += [len(s.results), s.diverged, s.task.unit, s.mean, s.deviation]
            rows.writerow([*own, *(number(study, s) for number in NUMBERS.values())])


# What a run was given, as far as methods differ in it.
GIVEN = ("lr", "momentum", "beta", "nu")
SCORE_COLUMNS = ("experiment", "situation", "what", "seed", *GIVEN, "score", "MB")


def write_scores(study: Study, path: Path) -> None:
    """Write one row per run: its settings, its score, and what a worker sent, in MB."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(SCORE_COLUMNS)
        for s in study.scores:
            for run, found in zip(map(Run.resolved, s.case.runs), s.results, strict=True):
                options = dict(run.options)
                given = [f"{run.lr:.4g}", run.momentum, options.get("beta"), options.get("nu")]
                megabytes = f"{found['bytes'][-1][1] / 1e6:.4g}"
                score = "" if found["score"] is None else f"{found['score']:.4f}"
                own = [s.case.experiment, s.case.group, s.case.what, run.seed]
                rows.writerow([*own, *given, score, megabytes])
