"""The study's page of answers: tables, pictures, and to every question two lines that are computed
from the runs.

Nothing here is measured and nothing is written by hand but the words: what a sentence says follows
from the numbers beside it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import scaling_model
import study_local
import study_tasks
from study_answers import QUESTIONS, change, markdown
from study_questions import BETAS, MANY, METHODS, RATE, Case

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

COLOURS = {
    "dense": "black",
    "ScaleCom": "C0",
    "LocalTopK": "C1",
    "GTopK": "C2",
    "RandomK": "C3",
    "GlobalTopK": "C4",
    "ECQSGD": "C5",
}
NAMES = {
    "LocalTopK": "local top-k",
    "GTopK": "gTop-k",
    "RandomK": "random-k",
    "GlobalTopK": "global top-k",
    "ECQSGD": "ECQ-SGD, 4 bits",
}
# The model that step times are told of, and its compute: make bench's.
NUMEL, COMPUTE_MS = 24_800_000, 150


def named(method: str) -> str:
    return NAMES.get(method, method)


class Scores:
    """One case: the runs of all seeds.

    `mean` is None where any of them came apart: what is left would be a flattering choice.
    """

    def __init__(self, case: Case, results: Sequence[dict[str, Any]]) -> None:
        self.results, self.run = results, case.runs[0]
        self.task = study_tasks.find(self.run.task)
        self.diverged = sum(result["diverged"] or result["score"] is None for result in results)
        scores = [result["score"] for result in results]
        self.mean = None if self.diverged else statistics.mean(scores)
        self.deviation = statistics.stdev(scores) if len(scores) > 1 and not self.diverged else None
        self.bytes = results[0]["bytes_per_step"]

    def better_than(self, other: Scores) -> float | None:
        """By how much, in the metric's units; negative is worse.

        Infinite where one of both came apart, None where both did.
        """
        if self.mean is None and other.mean is None:
            return None
        if self.mean is None or other.mean is None:
            return -math.inf if self.mean is None else math.inf
        return (self.mean - other.mean) * (1 if self.task.higher_is_better else -1)

    def text(self) -> str:
        if self.mean is None:
            return f"came apart ({self.diverged} of {len(self.results)})"
        spread = f" ± {self.deviation:.{self.task.digits}f}" if self.deviation is not None else ""
        return f"{self.mean:.{self.task.digits}f}{spread}"

    def looks(self, name: str) -> list[tuple[int, float]]:
        """[(step, mean over seeds)] of a diagnostic."""
        by_step: dict[int, list[float]] = {}
        for result in self.results:
            for look in result["looks"]:
                if look.get(name) is not None:
                    by_step.setdefault(look["step"], []).append(look[name])
        return [(step, statistics.mean(values)) for step, values in sorted(by_step.items())]

    def typical(self, name: str) -> float | None:
        """A diagnostic's median over the second half of the run."""
        looks = self.looks(name)
        values = [value for step, value in looks if step >= (self.run.steps or 0) / 2]
        return statistics.median(values) if values else None

    def reaches(self, target: float, measure: str) -> float | None:
        """How much of "bytes" or steps a worker had spent when the mean training loss came to
        `target`; None: it never did.
        """
        spent = []
        for result in self.results:
            for (step, loss), (_, traffic) in zip(
                smooth(result["losses"]), result["bytes"], strict=True
            ):
                if loss <= target:
                    spent.append(traffic if measure == "bytes" else step)
                    break
            else:
                return None
        return statistics.mean(spent)


def smooth(losses: list[list[float]]) -> list[tuple[float, float]]:
    """Means of three points each."""
    values = [loss for _, loss in losses]
    return [
        (step, statistics.mean(values[max(0, i - 2) : i + 1])) for i, (step, _) in enumerate(losses)
    ]


class Study:
    """All cases, by (experiment, label)."""

    def __init__(
        self, cases: Sequence[Case], results: dict[str, dict[str, Any] | None], bench: Path
    ) -> None:
        self.scores = {
            (case.experiment, case.label): Scores(case, [results[run.name] for run in case.runs])
            for case in cases
        }
        self.tasks = list(
            dict.fromkeys(
                case.label.partition(": ")[0] for case in cases if case.experiment == "accuracy"
            )
        )
        self.rates = sorted(
            {
                dict(scores.run.options)["rate"]
                for _, scores in self.of("accuracy")
                if "rate" in dict(scores.run.options)
            }
        )
        self.speeds = Speeds(bench)

    def get(self, experiment: str, label: str) -> Scores | None:
        return self.scores.get((experiment, label))

    def of(self, experiment: str) -> list[tuple[str, Scores]]:
        return [
            (label, scores) for (name, label), scores in self.scores.items() if name == experiment
        ]


class Speeds:
    """Step times of the model of `make bench`, with its compute and traffic in proportion to a
    task's.

    constants: those fitted to `make bench` (scaling_model.py), None where it was not run; the share
    of the nominal speed that is reached is then taken to be 0.95. Nothing is hidden behind
    backward, and no method's processor time is counted, for all alike.
    """

    def __init__(self, bench: Path) -> None:
        self.constants: scaling_model.Constants | None = None
        if bench.exists():
            found = json.loads(bench.read_text())
            results = [
                r
                for r in found["results"]
                if r["case"] == "transformer" and r["method"] in scaling_model.METHODS
            ]
            self.constants = scaling_model.fit(results, found["machine"]["cores"])

    def step_seconds(self, share_of_model: float, gbit: float) -> float:
        """A step in which a worker sends `share_of_model` times the model's bytes."""
        reached = self.constants.reached if self.constants else 0.95
        return COMPUTE_MS / 1000 + share_of_model * 4 * NUMEL * 8 / (gbit * 1e9 * reached)


def write(
    folder: Path, cases: Sequence[Case], results: dict[str, dict[str, Any] | None], bench: Path
) -> Path:
    """Write answers.md and its pictures; gives its path."""
    study = Study(cases, results, bench)
    pictures = {name: draw(study, folder / f"{name}.png") for name, draw in PICTURES.items()}
    seconds = sum(result["seconds"] for result in results.values())
    lines = [
        "# Does ScaleCom keep accuracy, when not, and against what else",
        "",
        f"Made by `make study`: {len(results)} runs, {seconds / 3600:.1f} hours of one core. "
        "Simulated workers, 4 unless said, run the exchange that real ranks run. acc9: accuracy "
        "in % over the nine one-pixel shifts of 360 test digits; bits: per character of source "
        "code held out. ±: standard deviation over seeds. Learning rates are what dense training "
        f"was given. Unless said otherwise the rate is {RATE}, and the output layer and the first "
        "tenth of the steps are sent whole, for every method alike. Differences of less than 0.3 "
        "points or 0.02 bits are called noise.",
        "",
    ]
    lines += ["## Answers", ""]
    for question, answer, picture in [*QUESTIONS, *study_local.QUESTIONS]:
        text = answer(study)
        if text is not None:
            shown = f" ([picture]({picture}.png))" if pictures.get(picture) else ""
            lines += [f"**{question}** {text}{shown}", ""]
    lines += ["## Tables and pictures", ""]
    for title, name, table in SECTIONS:
        rows = table(study)
        if rows:
            lines += [f"### {title}", ""]
            lines += [f"![{title}]({name}.png)", ""] if pictures.get(name) else []
            lines += [*rows, ""]
    page = folder / "answers.md"
    page.write_text("\n".join(lines))
    return page


# --------------------------------------------------------------------------------------------------
# tables


def accuracy_table(study: Study) -> list[str]:
    rows = []
    for task in study.tasks:
        for label, scores in study.of("accuracy"):
            if label.startswith(f"{task}: "):
                dense = study.get("accuracy", f"{task}: dense")
                better = None if scores is dense else scores.better_than(dense)
                difference = "" if better is None else change(scores, better)
                method, _, rest = label.removeprefix(f"{task}: ").partition(" ")
                shown = (
                    f"{named(method)} {rest}".strip()
                    if method in METHODS
                    else "ECQ-SGD 4 bits"
                    if method == "ECQSGD"
                    else f"{method} {rest}".strip()
                )
                rows.append(
                    [
                        scores.task.title,
                        scores.run.steps,
                        shown,
                        scores.text(),
                        difference,
                        f"{scores.bytes / 1000:.1f}",
                    ]
                )
    return markdown(
        [
            "task",
            "steps",
            "method",
            "acc9 / bits",
            "against dense (+ is better)",
            "kB per worker and step",
        ],
        rows,
    )


def large_table(study: Study) -> list[str]:
    by_setting: dict[str, dict[str, Scores]] = {}
    for label, scores in study.of("large"):
        setting, _, what = label.rpartition(": ")
        by_setting.setdefault(setting, {})[what] = scores
    columns = list(dict.fromkeys(what for found in by_setting.values() for what in found))
    rows = [
        [setting, *(found[what].text() if what in found else "" for what in columns)]
        for setting, found in by_setting.items()
    ]
    return markdown(["setting", *columns], rows)


def workers_table(study: Study) -> list[str]:
    rows = []
    for label, scores in study.of("workers"):
        n, _, method = label.partition(": ")
        looks = [
            scores.typical(name)
            for name in ("residue_distance", "distance_to_top_k", "union_density", "energy_sent")
        ]
        cells = [
            "" if value is None else f"{100 * value:.1f} %" if i in (2, 3) else f"{value:.2f}"
            for i, value in enumerate(looks)
        ]
        rows.append([n, named(method), scores.text(), f"{scores.bytes / 1000:.1f}", *cells])
    head = [
        "workers",
        "method",
        "acc9",
        "kB per worker and step",
        "cosine distance of residues",
        "d/k",
        "union of own choices",
        "energy sent",
    ]
    return markdown(head, rows)


def similarity_table(study: Study) -> list[str]:
    names = (
        "residue_distance",
        "distance_to_top_k",
        "contraction",
        "contraction_top_k",
        "energy_sent",
        "quantile_correlation",
    )
    rows = []
    for label, scores in study.of("similarity"):
        looks = [scores.typical(name) for name in names]
        where, _, method = label.rpartition(": ")
        rows.append(
            [
                where,
                named(method),
                scores.text(),
                *("" if value is None else f"{value:.3f}" for value in looks),
            ]
        )
    head = [
        "task or setting",
        "",
        "acc9 / bits",
        "distance of residues",
        "d/k",
        "contraction",
        "that of the true top-k",
        "energy sent",
        "Q-Q",
    ]
    return markdown(head, rows)


def choices_table(study: Study) -> list[str]:
    rows = []
    for label, scores in study.of("choices"):
        task, _, what = label.partition(": ")
        usual = study.get("choices", f"{task}: as recommended")
        better = None if scores is usual else scores.better_than(usual)
        difference = "" if better is None else change(scores, better)
        rows.append(
            [scores.task.title, what, scores.text(), difference, f"{scores.bytes / 1000:.1f}"]
        )
    return markdown(
        [
            "task",
            "choice",
            "acc9 / bits",
            "better (+) or worse (-) than recommended",
            "kB per worker and step",
        ],
        rows,
    )


def target_of(study: Study, task: str) -> float | None:
    """A training loss that dense training and ScaleCom both come to."""
    ends = []
    for label in (f"{task}: dense", f"{task}: ScaleCom {RATE}x"):
        scores = study.get("accuracy", label)
        if scores is None or scores.diverged:
            return None
        ends += [smooth(result["losses"])[-1][1] for result in scores.results]
    return 1.05 * max(ends)


def reached(study: Study, task: str) -> list[tuple[str, Scores, float, float]]:
    """(method, scores, steps, bytes) until the task's target, for every method at rate 100."""
    target = target_of(study, task)
    if target is None:
        return []
    found = []
    for method in ("dense", *METHODS, "ECQSGD"):
        label = {"dense": "dense", "ECQSGD": "ECQSGD 4 bits"}.get(method, f"{method} {RATE}x")
        scores = study.get("accuracy", f"{task}: {label}")
        if scores is not None:
            steps = scores.reaches(target, "steps")
            found.append(
                (
                    method,
                    scores,
                    math.nan if steps is None else steps,
                    math.nan if steps is None else scores.reaches(target, "bytes"),
                )
            )
    return found


def seconds_to(study: Study, scores: Scores, steps: float, spent: float, gbit: float) -> float:
    """`steps` steps of the model of make bench, with traffic in proportion."""
    return steps * study.speeds.step_seconds(
        spent / steps / (4 * scores.results[0]["parameters"]), gbit
    )


def bytes_table(study: Study) -> list[str]:
    rows = []
    for task in study.tasks:
        for method, scores, steps, spent in reached(study, task):
            if math.isnan(steps):
                rows.append(
                    [
                        scores.task.title,
                        f"{target_of(study, task):.3f}",
                        named(method),
                        "not reached",
                        "",
                        "",
                        "",
                    ]
                )
                continue
            times = [f"{seconds_to(study, scores, steps, spent, gbit):.0f}" for gbit in (1, 10)]
            rows.append(
                [
                    scores.task.title,
                    f"{target_of(study, task):.3f}",
                    named(method),
                    f"{steps:.0f}",
                    f"{spent / 1e6:.1f}",
                    *times,
                ]
            )
    return markdown(
        [
            "task",
            "training loss",
            "method",
            "steps",
            "MB per worker",
            "s at 1 Gbit/s",
            "s at 10 Gbit/s",
        ],
        rows,
    )


def bounded_table(study: Study) -> list[str]:
    rows = []
    for label, scores in study.of("bounded"):
        norms = scores.results[0]["norms"]
        residues, gradients = [m for _, m, _ in norms], [g for *_, g in norms]
        numbers = (max(residues), residues[-1], max(gradients), bound_of(scores) * max(gradients))
        rows.append([label, norms[-1][0], *(f"{number:.3g}" for number in numbers)])
    return markdown(
        [
            "setting",
            "steps",
            "largest residue of a worker",
            "last",
            "largest gradient of a worker",
            "bound to be expected",
        ],
        rows,
    )


def bound_of(scores: Scores) -> float:
    """Which norm of a residue is to be expected at most, in norms of the largest gradient.

    If every step sends at least a share d of the accumulator's energy, |acc - sent|^2 <= (1 - d) |m
    + g|^2, then with the filter |m'| <= (1 - beta) |m| + beta sqrt(1 - d) (|m| + |g|), so |m|
    cannot grow where |m| (1 - sqrt(1 - d)) >= sqrt(1 - d) |g|. Hence |m| <= sqrt(1 - d) / (1 -
    sqrt(1 - d)) max |g|, whatever beta, which is about 2/d for small d (the bound of error
    feedback: Stich et al., 2018, Karimireddy et al., 2019). A leader sends the largest of each lane
    of its own, so its d is at least 1/rate in each tensor. For the others that holds if the
    leader's places carry at least the energy that places drawn at random would, which is 1/rate on
    average: an expectation, not a guarantee.
    """
    share = math.sqrt(1 - 1 / dict(scores.run.options)["rate"])
    return share / (1 - share)


# --------------------------------------------------------------------------------------------------
# pictures


def panels(
    count: int, path: Path, draw: Callable[[Any], None], size: tuple[float, float] = (4.6, 3.8)
) -> Path:
    figure, axes = plt.subplots(
        1, count, figsize=(size[0] * count, size[1]), layout="constrained", squeeze=False
    )
    draw(axes[0])
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def draw_accuracy(study: Study, path: Path) -> Path | None:
    if not study.tasks:
        return None

    def draw(axes):
        for axis, task in zip(axes, study.tasks, strict=True):
            dense = study.get("accuracy", f"{task}: dense")
            if dense.mean is not None:
                axis.axhline(dense.mean, color="black", label="dense")
            for method in METHODS:
                points = [
                    (rate, study.get("accuracy", f"{task}: {method} {rate}x"))
                    for rate in study.rates
                ]
                points = [
                    (rate, scores)
                    for rate, scores in points
                    if scores is not None and scores.mean is not None
                ]
                axis.errorbar(
                    [rate for rate, _ in points],
                    [scores.mean for _, scores in points],
                    [scores.deviation or 0 for _, scores in points],
                    marker="o",
                    markersize=4,
                    capsize=2,
                    color=COLOURS[method],
                    label=named(method),
                )
            for label, style in (("residues thrown away", ":"), ("ECQSGD 4 bits", "--")):
                control = study.get("accuracy", f"{task}: {label}")
                if control is not None and control.mean is not None:
                    axis.axhline(
                        control.mean,
                        color="grey",
                        linestyle=style,
                        label=label.replace("ECQSGD", "ECQ-SGD"),
                    )
            axis.set(
                title=f"{dense.task.title}, {dense.run.steps} steps",
                xlabel="rate",
                xscale="log",
                ylabel=f"{dense.task.metric}, {dense.task.unit}",
            )
            axis.set_xticks(study.rates, [str(rate) for rate in study.rates])
            axis.minorticks_off()
        axes[0].legend(fontsize=7)

    return panels(len(study.tasks), path, draw)


def draw_large(study: Study, path: Path) -> Path | None:
    settings = list(dict.fromkeys(label.rpartition(": ")[0] for label, _ in study.of("large")))
    if not settings:
        return None

    def draw(axes):
        for axis, setting in zip(axes, settings, strict=True):
            points = [(beta, study.get("large", f"{setting}: beta {beta:g}")) for beta in BETAS]
            points = [
                (beta, scores)
                for beta, scores in points
                if scores is not None and scores.mean is not None
            ]
            axis.errorbar(
                [beta for beta, _ in points],
                [scores.mean for _, scores in points],
                [scores.deviation or 0 for _, scores in points],
                marker="o",
                capsize=2,
                label="ScaleCom",
            )
            lines = {
                "dense": "-",
                "dense, gradients filtered": "--",
                "beta 1, gradients filtered": ":",
                "RandomK": "-.",
            }
            for what, style in lines.items():
                scores = study.get("large", f"{setting}: {what}")
                if scores is not None and scores.mean is not None:
                    axis.axhline(
                        scores.mean,
                        color=COLOURS["RandomK"] if what == "RandomK" else "black",
                        linestyle=style,
                        label=named(what),
                    )
            axis.set(title=setting, xscale="log", xlabel="beta")
            axis.set_xticks(BETAS, [f"{beta:g}" for beta in BETAS])
            axis.minorticks_off()
            axis.legend(fontsize=7)
        axes[0].set_ylabel("acc9, %")

    return panels(len(settings), path, draw, (3.6, 3.6))


def draw_workers(study: Study, path: Path) -> Path | None:
    found = study.of("workers")
    if not found:
        return None
    counts = sorted({int(label.partition(": ")[0]) for label, _ in found})

    def line(axis, method, value):
        points = [
            (n, value(scores))
            for n in counts
            if (scores := study.get("workers", f"{n}: {method}")) is not None
        ]
        points = [(n, y) for n, y in points if y is not None]
        axis.plot(
            [n for n, _ in points],
            [y for _, y in points],
            "o-",
            color=COLOURS[method],
            label=named(method),
        )

    def draw(axes):
        for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
            line(axes[0], method, lambda scores: scores.mean)
            line(axes[1], method, lambda scores: scores.bytes / 1000)
        for method in ("ScaleCom", "LocalTopK"):
            line(axes[2], method, lambda scores: scores.typical("residue_distance"))
        line(axes[3], "LocalTopK", lambda scores: scores.typical("union_density"))
        line(axes[3], "ScaleCom", lambda scores: scores.typical("sent_density"))
        titles = (
            "acc9, %",
            "kB per worker and step",
            "mean cosine distance of residues",
            "density of the average: build-up",
        )
        for axis, title in zip(axes, titles, strict=True):
            axis.set(title=title, xlabel="workers", xscale="log")
            axis.set_xticks(counts, [str(n) for n in counts])
            axis.minorticks_off()
            axis.legend(fontsize=7)
        axes[1].set_yscale("log")

    return panels(4, path, draw, (3.8, 3.6))


def draw_similarity(study: Study, path: Path) -> Path | None:
    found = [
        (label, scores)
        for label, scores in study.of("similarity")
        if scores.looks("residue_distance")
    ]
    if not found:
        return None
    names = {
        "residue_distance": "cosine distance of residues",
        "distance_to_top_k": "d/k to the true top-k",
        "energy_sent": "share of energy sent",
        "quantile_correlation": "Q-Q correlation of residues",
    }

    def draw(axes):
        for axis, (name, title) in zip(axes, names.items(), strict=True):
            for i, (label, scores) in enumerate(found):
                looks = scores.looks(name)
                axis.plot(
                    [step for step, _ in looks],
                    [value for _, value in looks],
                    color=f"C{i}",
                    label=label.removesuffix(": ScaleCom"),
                )
            axis.set(title=title, xlabel="step")
        axes[0].legend(fontsize=7)

    return panels(len(names), path, draw)


def draw_choices(study: Study, path: Path) -> Path | None:
    tasks = list(dict.fromkeys(label.partition(": ")[0] for label, _ in study.of("choices")))
    if not tasks:
        return None

    def draw(axes):
        for axis, task in zip(axes, tasks, strict=True):
            usual = study.get("choices", f"{task}: as recommended")
            bars = [
                (label.partition(": ")[2], s)
                for label, s in study.of("choices")
                if label.startswith(f"{task}: ") and s.mean is not None
            ]
            bars = [
                (label, scores)
                for label, scores in bars
                if scores is not usual and usual.mean is not None
            ][::-1]
            axis.barh(
                [label for label, _ in bars],
                [scores.better_than(usual) for _, scores in bars],
                color="C0",
            )
            for place, (_, scores) in enumerate(bars):
                sign = 1 if scores.task.higher_is_better else -1
                each = [
                    sign * (result["score"] - usual.mean)
                    for result in scores.results
                    if result["score"] is not None
                ]
                axis.plot(each, [place] * len(each), "k|")
            axis.axvline(0, color="black", linewidth=0.8)
            if usual.deviation:
                axis.axvspan(-usual.deviation, usual.deviation, color="grey", alpha=0.2)
            axis.set(
                title=usual.task.title,
                xlabel=f"change against what is recommended, {usual.task.unit}; right is better",
            )

    return panels(len(tasks), path, draw, (6.4, 4.6))


def draw_bytes(study: Study, path: Path) -> Path | None:
    tasks = [task for task in study.tasks if target_of(study, task) is not None]
    if not tasks:
        return None
    figure, axes = plt.subplots(
        2, len(tasks), figsize=(4.6 * len(tasks), 7.4), layout="constrained", squeeze=False
    )
    for column, task in enumerate(tasks):
        above, below = axes[:, column]
        found = reached(study, task)
        for method, scores, _, _ in found:
            result = scores.results[0]
            curve = [
                (traffic / 1e6, loss)
                for (_, loss), (_, traffic) in zip(
                    smooth(result["losses"]), result["bytes"], strict=True
                )
            ]
            above.plot(
                [x for x, _ in curve],
                [y for _, y in curve],
                color=COLOURS[method],
                label=named(method),
            )
        above.axhline(target_of(study, task), color="grey", linewidth=0.8)
        above.set(
            title=f"{found[0][1].task.title}",
            xscale="log",
            yscale="log",
            xlabel="MB sent per worker",
            ylabel="training loss",
        )
        width = 0.38
        names = [named(method) for method, *_ in found]
        for place, gbit in enumerate((1, 10)):
            heights = [
                0 if math.isnan(steps) else seconds_to(study, s, steps, spent, gbit)
                for _, s, steps, spent in found
            ]
            bars = below.bar(
                [i + place * width for i in range(len(found))],
                heights,
                width,
                label=f"{gbit} Gbit/s",
                color=f"C{place}",
            )
            below.bar_label(
                bars,
                [
                    "-" if math.isnan(row[2]) else f"{height:.0f}"
                    for row, height in zip(found, heights, strict=True)
                ],
                fontsize=7,
            )
        below.set_xticks(
            [i + width / 2 for i in range(len(found))], names, rotation=30, ha="right", fontsize=8
        )
        below.set(yscale="log", ylabel=f"seconds to training loss {target_of(study, task):.3f}")
        below.legend(fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def draw_bounded(study: Study, path: Path) -> Path | None:
    found = study.of("bounded")
    if not found:
        return None

    def draw(axes):
        for i, (label, scores) in enumerate(found):
            norms = scores.results[0]["norms"]
            largest = max(g for *_, g in norms)
            axes[0].plot(
                [step for step, _, _ in norms], [m for _, m, _ in norms], color=f"C{i}", label=label
            )
            axes[0].axhline(bound_of(scores) * largest, color=f"C{i}", linestyle="--")
        axes[0].set(
            title="the largest residue of a worker, and its bound (dashed)",
            yscale="log",
            xlabel="step",
            ylabel="norm",
        )
        axes[0].legend(fontsize=7)

    return panels(1, path, draw, (6.4, 4.0))


PICTURES = {
    "accuracy": draw_accuracy,
    "large": draw_large,
    "workers": draw_workers,
    "similarity": draw_similarity,
    "choices": draw_choices,
    "bytes": draw_bytes,
    "bounded": draw_bounded,
    "local": study_local.draw,
}
SECTIONS = [
    ("1. Accuracy at the standard batch", "accuracy", accuracy_table),
    ("2. Large batches and learning rates", "large", large_table),
    (
        f"3. More workers (plain CNN, group norm, {MANY['steps']} steps of {MANY['batch_size']} "
        "images a worker)",
        "workers",
        workers_table,
    ),
    ("4. Similarity over time, and where workers are unlike", "similarity", similarity_table),
    ("5. What each choice costs or gains", "choices", choices_table),
    ("6. Bytes and time to a given loss", "bytes", bytes_table),
    ("7. Residues over many steps", "bounded", bounded_table),
    ("8. Local steps and quantised values", "local", study_local.table),
]
