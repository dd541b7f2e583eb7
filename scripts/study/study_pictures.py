"""The study's pictures, one file each: the numbers of study_results.py over what was varied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study_results import NUMBERS, TABLES, Scores, Study, Table, name_of, smooth

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where pictures.py is

import pictures
from pictures import Mark, legend, marks, panels

Point = tuple[float, float, float]  # x, y, deviation of y


def marks_of(study: Study, table: Table) -> dict[str, Mark]:
    """A mark for each `what` of an experiment, the same in all panels."""
    return marks(s.case.what for s in study.of(table.experiment))


def curves(
    axis: Any,
    cases: Sequence[Scores],
    known: dict[str, Mark],
    point: Callable[[Scores], Point | None],
) -> None:
    """Draw a curve for each `what` over what was varied, or a line across if nothing was varied."""
    for what, mark in known.items():
        own = [s for s in cases if s.case.what == what]
        points = sorted(p for s in own if (p := point(s)) is not None)
        if not points:
            continue
        xs, ys, deviations = zip(*points, strict=True)
        if own[0].case.x is None:
            axis.axhline(ys[0], **mark.curve(marker="", label=name_of(what)))
        else:
            axis.errorbar(xs, ys, deviations, capsize=2, **mark.curve(label=name_of(what)))


def by_group(
    study: Study, table: Table, height: float = 2.9
) -> tuple[Any, list[tuple[Any, list[Scores]]]]:
    """A figure with a panel for each group of an experiment, and [(panel, the group's cases)]."""
    groups = [study.of(table.experiment, group) for group in study.groups(table.experiment)]
    figure, axes = panels([cases[0].title for cases in groups], height)
    return figure, list(zip(axes, groups, strict=True))


def show_metric(axis: Any, cases: Sequence[Scores]) -> None:
    """Label the vertical axis, which shows the cases' score."""
    task = cases[0].task
    axis.set_ylabel(f"{task.metric.replace('_', ' ')}, {task.unit}")


def show_varied(axis: Any, cases: Sequence[Scores], xlabel: str) -> None:
    """Label the horizontal axis, which shows what was varied."""
    ticks = sorted({s.case.x for s in cases if s.case.x is not None})
    axis.set(xscale="linear" if 0 in ticks else "log", xlabel=xlabel)
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.minorticks_off()


def over_x(study: Study, table: Table) -> Any:
    """Scores over what was varied, with a panel for each group."""
    figure, groups = by_group(study, table)
    known = marks_of(study, table)
    for axis, cases in groups:
        curves(axis, cases, known, lambda s: mean_at(s, s.case.x))
        show_metric(axis, cases)
        show_varied(axis, cases, table.x)
    legend(figure, figure.axes)
    return figure


def mean_at(scores: Scores, x: float | None) -> Point | None:
    """A case's point in a picture, or None if it diverged."""
    return None if scores.mean is None else (x or 0, scores.mean, scores.deviation or 0)


def choices(study: Study, table: Table) -> Any:
    """How each choice differs from the group's first case, with a mark for each seed."""
    tallest = max(len(study.of(table.experiment, g)) for g in study.groups(table.experiment))
    figure, groups = by_group(study, table, 1 + 0.2 * tallest)
    for axis, cases in groups:
        bars = [(s, s.better_than(study.reference(s))) for s in reversed(cases[1:])]
        bars = [(s, better) for s, better in bars if better is not None]
        lengths = [better for _, better in bars]
        axis.barh([s.case.what for s, _ in bars], lengths, color=pictures.SKY)
        usual, sign = cases[0], 1 if cases[0].task.higher_is_better else -1
        for place, (s, _) in enumerate(bars):
            each = [sign * (result["score"] - usual.mean) for result in s.results]
            axis.plot(each, [place] * len(each), "k|")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvspan(-(usual.deviation or 0), usual.deviation or 0, color="grey", alpha=0.2)
        axis.tick_params(axis="y", labelsize=8)
        axis.grid(axis="y", visible=False)
        against = f"change against\n'{usual.case.what}'"
        axis.set_xlabel(f"{against},\n{usual.task.unit}; right is better")
        axis.set_title(axis.get_title(), loc="right")  # names are left of the axis
        axis.set_title("")
    return figure


def loss_over_bytes(study: Study, table: Table) -> Any:
    """Training loss over what a worker has sent. Left of the line the loss was reached earlier."""
    figure, groups = by_group(study, table)
    for axis, cases in groups:
        for s in cases:
            mark = pictures.known(s.case.what)
            if mark:
                found = s.results[0]
                spent = [traffic / 1e6 for _, traffic in found["bytes"]]
                losses = [loss for _, loss in smooth(found["losses"])]
                style = mark.curve(label=name_of(s.case.what), markevery=0.12)
                axis.plot(spent, losses, **style)
        target = study.target(cases[0])
        if target is not None:
            axis.axhline(target, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="MB sent per worker", ylabel="training loss")
    legend(figure, figure.axes, 4)
    return figure


def bounded(study: Study, table: Table) -> Any:
    """A worker's largest residue over the steps, and its expected bound."""
    figure, (axis,) = panels(["the largest residue of a worker, and its bound (dashed)"], 4)
    cases = {f"{s.case.group}, {s.case.what}": s for s in study.of(table.experiment)}
    for label, mark in marks(cases).items():
        s = cases[label]
        norms = s.results[0]["norms"]
        steps, largest = [step for step, *_ in norms], [norm for _, norm, _ in norms]
        axis.plot(steps, largest, **mark.curve(linestyle="-", label=label, markevery=0.12))
        axis.axhline(s.bound, color=mark.colour, linestyle="--")
    axis.set(yscale="log", xlabel="step", ylabel="norm")
    axis.legend()
    return figure


def local(study: Study, table: Table) -> Any:
    """Scores over what is sent: a curve for each choice and quantiser along H, the points' number.

    In the experiment "local", only what is chosen counts, without what is sent whole.
    """
    compressed = table.experiment == "local"
    figure, groups = by_group(study, table, 4.2)
    known = marks_of(study, table)
    for axis, cases in groups:

        def point(s: Scores) -> Point | None:
            part = compressed and s.case.what != "sent whole"
            return mean_at(s, NUMBERS["kB compressed" if part else "kB per step"](study, s))

        curves(axis, cases, known, point)
        for s in cases:
            if (place := point(s)) is not None:
                axis.annotate(f"{s.case.x:g}", place[:2], fontsize=7)
        axis.set(
            xscale="log", xlabel=f"kB per worker and step{', compressed' if compressed else ''}"
        )
        show_metric(axis, cases)
    legend(figure, figure.axes)
    return figure


PICTURES: dict[str, Callable[[Study, Table], Any]] = {
    "defaults": choices,
    "momentum": over_x,
    "rivals": choices,
    "bytes": loss_over_bytes,
    "bounded": bounded,
    "local": local,
    "widths": over_x,
    "meetings": local,
}


def draw(study: Study, folder: Path) -> None:
    """Draw the pictures of all tables that have runs."""
    for name, make in PICTURES.items():
        if study.of(TABLES[name].experiment):
            pictures.save(make(study, TABLES[name]), folder / f"{name}.png")
