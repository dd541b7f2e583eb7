"""The study's pictures, one file each: what study_results.py knows, over what was varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from study_cases import RATE
from study_results import NUMBERS, TABLES, Scores, Study, Table, name_of, smooth

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen first

COLOURS = {
    "dense": "black",
    "sent whole": "black",
    "ScaleCom": "C0",
    "LocalTopK": "C1",
    "GTopK": "C2",
    "RandomK": "C3",
    "GlobalTopK": "C4",
    "ECQSGD 4 bits": "C5",
}
LINES = ("--", ":", "-.", (0, (5, 1)), (0, (1, 3)))
Point = tuple[float, float, float]  # x, y, deviation of y


def panels(titles: Sequence[str], width: float = 4.6, height: float = 3.8) -> tuple[Any, Any]:
    """A figure with a panel for each title, in rows of four at most."""
    columns = min(len(titles), 4)
    rows = -(-len(titles) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        layout="constrained",
        squeeze=False,
    )
    for axis in axes.flat[len(titles) :]:
        axis.remove()
    for axis, title in zip(axes.flat, titles, strict=False):
        axis.set_title(title, fontsize=10)
    return figure, axes.flat[: len(titles)]


def curves(axis: Any, cases: Sequence[Scores], point: Callable[[Scores], Point | None]) -> None:
    """A curve for each `what`, over what was varied; a line across where nothing was."""
    lines = iter(LINES * len(cases))
    for what in dict.fromkeys(s.case.what for s in cases):
        own = [s for s in cases if s.case.what == what]
        points = sorted(p for s in own if (p := point(s)) is not None)
        if not points:
            continue
        style = {"label": name_of(what)} | ({"color": COLOURS[what]} if what in COLOURS else {})
        xs, ys, deviations = zip(*points, strict=True)
        if own[0].case.x is None:
            line = "-" if what == "dense" else next(lines)
            axis.axhline(ys[0], linestyle=line, **({"color": "grey"} | style))
        else:
            axis.errorbar(xs, ys, deviations, marker="o", markersize=4, capsize=2, **style)


def by_group(
    study: Study, table: Table, *size: float
) -> tuple[Any, list[tuple[Any, list[Scores]]]]:
    """A figure with a panel for each group of an experiment, and [(panel, the group's cases)]."""
    groups = [study.of(table.experiment, group) for group in study.groups(table.experiment)]
    figure, axes = panels([cases[0].title for cases in groups], *size)
    return figure, list(zip(axes, groups, strict=True))


def show_metric(axis: Any, cases: Sequence[Scores]) -> None:
    """What is drawn upwards is the cases' score."""
    axis.set_ylabel(f"{cases[0].task.metric}, {cases[0].task.unit}")


def show_varied(axis: Any, cases: Sequence[Scores], xlabel: str) -> None:
    """What is drawn to the right is what was varied."""
    ticks = sorted({s.case.x for s in cases if s.case.x is not None})
    axis.set(xscale="log", xlabel=xlabel)
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=7)


def over_x(study: Study, table: Table) -> Any:
    """Scores over what was varied, a panel for each group."""
    figure, groups = by_group(study, table)
    for axis, cases in groups:
        curves(axis, cases, lambda s: mean_at(s, s.case.x))
        show_metric(axis, cases)
        show_varied(axis, cases, table.x)
    return figure


def mean_at(scores: Scores, x: float | None) -> Point | None:
    """A case's place in a picture; None where it came apart."""
    return None if scores.mean is None else (x or 0, scores.mean, scores.deviation or 0)


def workers(study: Study, table: Table) -> Any:
    """Scores, bytes, similarity and build-up over the number of workers."""
    names = {
        "kB per step": "kB per worker and step",
        "residue distance": "cosine distance of residues",
        "sent density": "share of elements that the average holds",
    }
    figure, axes = panels(["acc9, %", *names.values()], 3.8, 3.6)
    cases = study.of(table.experiment)

    def point(s: Scores, name: str) -> Point | None:
        value = NUMBERS[name](study, s)
        return None if value is None else (s.case.x, value, 0)

    curves(axes[0], cases, lambda s: mean_at(s, s.case.x))
    for axis, name in zip(axes[1:], names, strict=True):
        curves(axis, cases, lambda s, name=name: point(s, name))
    axes[1].set_yscale("log")
    for axis in axes:
        show_varied(axis, cases, table.x)
    return figure


def similarity(study: Study, table: Table) -> Any:
    """What diagnostics saw, over the steps."""
    names = {
        "residue_distance": "cosine distance of residues",
        "distance_to_top_k": "d/k to the true top-k",
        "energy_sent": "share of energy sent",
        "quantile_correlation": "Q-Q correlation of residues",
    }
    figure, axes = panels(list(names.values()))
    for axis, name in zip(axes, names, strict=True):
        for s in study.of(table.experiment):
            if looks := s.looks(name):
                axis.plot(*zip(*looks, strict=True), label=f"{s.title}, {s.case.what}")
        axis.set_xlabel("step")
    axes[0].legend(fontsize=7)
    return figure


def choices(study: Study, table: Table) -> Any:
    """How much better or worse than the group's first case each choice is, a mark for each seed."""
    figure, groups = by_group(study, table, 6.4, 4.6)
    for axis, cases in groups:
        bars = [(s, s.better_than(study.reference(s))) for s in reversed(cases[1:])]
        bars = [(s, better) for s, better in bars if better is not None]
        axis.barh([s.case.what for s, _ in bars], [better for _, better in bars])
        usual, sign = cases[0], 1 if cases[0].task.higher_is_better else -1
        for place, (s, _) in enumerate(bars):
            each = [sign * (result["score"] - usual.mean) for result in s.results]
            axis.plot(each, [place] * len(each), "k|")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvspan(-(usual.deviation or 0), usual.deviation or 0, color="grey", alpha=0.2)
        axis.set_xlabel(f"change against '{usual.case.what}', {usual.task.unit}; right is better")
    return figure


def loss_over_bytes(study: Study, table: Table) -> Any:
    """Training loss over what a worker has sent; what is left of the line came to it earlier."""
    figure, groups = by_group(study, table)
    for axis, cases in groups:
        for s in cases:
            if s.case.what in COLOURS and s.case.x in (None, RATE):
                found = s.results[0]
                spent = [traffic / 1e6 for _, traffic in found["bytes"]]
                losses = [loss for _, loss in smooth(found["losses"])]
                colour = COLOURS[s.case.what]
                axis.plot(spent, losses, color=colour, label=name_of(s.case.what))
        target = study.target(cases[0])
        if target is not None:
            axis.axhline(target, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="MB sent per worker", ylabel="training loss")
        axis.legend(fontsize=7)
    return figure


def bounded(study: Study, table: Table) -> Any:
    """The largest residue of a worker over the steps, and what it is expected to stay below."""
    figure, (axis,) = panels(["the largest residue of a worker, and its bound (dashed)"], 6.4, 4.0)
    for i, s in enumerate(study.of(table.experiment)):
        norms = s.results[0]["norms"]
        steps, largest = [step for step, *_ in norms], [norm for _, norm, _ in norms]
        axis.plot(steps, largest, color=f"C{i}", label=f"{s.case.group}, {s.case.what}")
        axis.axhline(s.bound, color=f"C{i}", linestyle="--")
    axis.set(yscale="log", xlabel="step", ylabel="norm")
    axis.legend(fontsize=7)
    return figure


def local(study: Study, table: Table) -> Any:
    """Scores over what is sent, a curve for each choice and quantiser along H, the points' number.

    Of those that choose without what is sent whole.
    """
    figure, groups = by_group(study, table, 5.2, 4.6)
    for axis, cases in groups:

        def point(s: Scores) -> Point | None:
            number = "kB per step" if s.case.what == "sent whole" else "kB compressed"
            return mean_at(s, NUMBERS[number](study, s))

        curves(axis, cases, point)
        for s in cases:
            if (place := point(s)) is not None:
                axis.annotate(f"{s.case.x:g}", place[:2], fontsize=6)
        axis.set(xscale="log", xlabel="kB per worker and step, compressed")
        show_metric(axis, cases)
        axis.legend(fontsize=6)
    return figure


PICTURES: dict[str, Callable[[Study, Table], Any]] = {
    "accuracy": over_x,
    "bytes": loss_over_bytes,
    "large": over_x,
    "workers": workers,
    "similarity": similarity,
    "choices": choices,
    "settings": choices,
    "tuned": choices,
    "bounded": bounded,
    "local": local,
    "widths": over_x,
}


def draw(study: Study, folder: Path) -> None:
    """Draw the pictures of all tables that there are runs for."""
    for name, make in PICTURES.items():
        if study.of(TABLES[name].experiment):
            figure = make(study, TABLES[name])
            figure.savefig(folder / f"{name}.png", dpi=110)
            plt.close(figure)
