"""Draws docs/pictures: four pictures of measured numbers, and three that explain ScaleCom.

    python scripts/pictures_of_docs.py

The numbers are in docs/: bench.csv is the steps.csv that `make bench` wrote, and race.csv the
curves.csv of `make race`. study.csv is the scores.csv of `make study`'s experiments defaults,
trials, rivals and rungs, and synchronisations.csv that of its experiment synchronisations.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pictures
from pictures import GREY, LIGHT, MARKS, PARTS, WIDTH, plt

from scalecom_hvd.lanes import Lanes

DOCS = Path(__file__).resolve().parents[1] / "docs"
EDGE = {"edgecolor": "black", "linewidth": 0.6}
Point = tuple[float, float]


def rows_of(name: str) -> list[dict[str, str]]:
    with (DOCS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def stacked(rows: int, height: float, **more: Any) -> tuple[Any, Any]:
    return plt.subplots(rows, 1, figsize=(WIDTH, height), layout="constrained", **more)


# measured

# Some methods are not measured everywhere.
METHODS = {
    "dense": "dense",
    "fp16": "Horovod's fp16",
    "local top-k": "local top-k",
    "ScaleCom cyclic": "ScaleCom",
    "ScaleCom look-ahead": "ScaleCom,\nlook-ahead",
}


def steps() -> Any:
    """How long a step takes, over slow and fast networks."""
    found = {(r["hosts"], r["mbit"], r["method"]): r for r in rows_of("bench.csv")}
    speeds = {"100": "100 Mbit/s", "1000": "1 Gbit/s", "": "unshaped"}
    places = [("2", mbit) for mbit in speeds] + [("4", "1000"), ("4", "")]
    figure, axes = plt.subplots(2, 3, figsize=(WIDTH, 4.6), layout="constrained")
    for axis, (hosts, mbit) in zip(axes.flat, places, strict=False):
        axis.set_title(f"{hosts} hosts, {speeds[mbit]}")
        step_bars(axis, {method: found.get((hosts, mbit, method)) for method in METHODS})
    for axis in axes[:, 1:].flat:
        axis.set_yticklabels([])
    legend = axes[-1, -1]
    legend.set_axis_off()
    bars = [legend.bar(0, 0, **mark.bar()) for mark in (PARTS["compute"], MARKS["dense"])]
    words = ["computing", "waiting for the exchange\n(in the method's colour)"]
    legend.legend(bars, words, loc="upper left", borderaxespad=0)
    said = (
        "milliseconds a step, and how many\ntimes as fast as dense; every\npanel has its own scale"
    )
    legend.text(0.03, 0.55, said, va="top", fontsize=8, transform=legend.transAxes)
    return figure


def step_bars(axis: Any, here: dict[str, dict[str, str] | None]) -> None:
    """A bar for each method: first computing, then waiting."""
    dense = float(here["dense"]["step_ms"])
    for place, (method, row) in enumerate(here.items()):
        if row is None:
            axis.text(0, place, " not run", va="center", fontsize=8, color=pictures.DARK)
            continue
        step, exposed = float(row["step_ms"]), float(row["exposed_ms"])
        axis.barh(place, step - exposed, height=0.7, **PARTS["compute"].bar())
        axis.barh(place, exposed, left=step - exposed, height=0.7, **pictures.known(method).bar())
        gain = "" if method == "dense" else f", {dense / step:.{1 if dense < 10 * step else 0}f}x"
        axis.text(step, place, f" {step:.0f}{gain}", va="center", fontsize=8)
    axis.set_yticks(range(len(here)), [METHODS[method] for method in here])
    axis.set_xlim(0, 1.5 * max(float(row["step_ms"]) for row in here.values() if row))
    axis.xaxis.set_major_locator(plt.MaxNLocator(3))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


# The ways to train that the picture of whole trainings shows, and the names for them.
RACED = {
    "DDP, dense": "dense",
    "DDP's fp16 hook": "PyTorch's fp16 hook",
    "PowerSGD, rank 2": "PowerSGD, rank 2",
    "dense, 4 times the batch": "dense, 4 times the batch",
    "ScaleCom": "ScaleCom",
    "ScaleCom, auto": 'ScaleCom(rate="auto")',
    "ScaleCom, 4 times the batch": "ScaleCom, 4 times the batch",
}


def race() -> Any:
    """How the loss falls over time, in whole trainings over slow and fast networks."""
    curves: dict[str, dict[str, list[Point]]] = {}
    for row in rows_of("race.csv"):
        by_way = curves.setdefault(row["mbit"], {})
        by_way.setdefault(row["way"], []).append((float(row["seconds"]), float(row["loss"])))
    speeds = {"100": "100 Mbit/s", "1000": "1 Gbit/s", "10000": "10 Gbit/s"}
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.9), layout="constrained", sharey=True)
    marks = pictures.marks(RACED)
    for axis, (mbit, title) in zip(axes, speeds.items(), strict=True):
        for way, label in RACED.items():
            mark = marks[way].curve(label=label, markevery=10, markersize=4)
            axis.plot(*zip(*curves[mbit][way], strict=True), **mark)
        last = curves[mbit]["DDP, dense"][-1][1]
        axis.axhline(last, color=GREY, linewidth=0.8)
        axis.set(title=title, xlabel="seconds", xscale="log", ylim=(2.0, 4.5), xlim=(4, 2500))
    axes[0].set_ylabel("held-out loss, nats a piece")
    pictures.legend(figure, axes[:1])
    return figure


def accuracy() -> Any:
    """What compression costs, in points of accuracy and in bits per character."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows_of("study.csv"):
        if row["experiment"] == "defaults":
            by_method = scores.setdefault(row["situation"], {})
            by_method.setdefault(row["what"], []).append(float(row["score"]))
    text = {name: scores[name] for name in scores if name.startswith(("LSTM", "Transformer"))}
    images = {name: scores[name] for name in scores if name not in text}
    figure, axes = stacked(2, 7, height_ratios=(len(images), len(text)))
    losses(axes[0], images, -1, "points of accuracy")
    losses(axes[1], text, 1, "bits per character")
    pictures.legend(figure, axes[:1])
    return figure


def losses(axis: Any, scores: dict[str, dict[str, list[float]]], sign: int, unit: str) -> None:
    """A row for each situation: every method's mean, and the range over its seeds."""
    compared = {"the defaults": "ScaleCom", "local top-k, rate 100": "local top-k"}
    axis.use_sticky_edges = False
    for place, by_method in enumerate(scores.values()):
        dense = statistics.mean(by_method["dense"])
        lost = {m: [sign * (score - dense) for score in own] for m, own in by_method.items()}
        least, most = min(lost["dense"]), max(lost["dense"])
        axis.barh(place, most - least, left=least, color=LIGHT)
        methods = [method for method in compared if method in by_method]
        for i, method in enumerate(methods):
            mean, y = statistics.mean(lost[method]), place + 0.2 * (i - (len(methods) - 1) / 2)
            around = [[mean - min(lost[method])], [max(lost[method]) - mean]]
            axis.errorbar(mean, y, xerr=around, **pictures.known(method).curve(linestyle="none"))
    for method, label in compared.items():
        axis.plot([], [], **pictures.known(method).curve(linestyle="none", label=label))
    axis.plot([], [], "s", color=LIGHT, markersize=8, label="dense, its seeds")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(scores)), scores)
    axis.set_ylim(len(scores) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"{unit} lost against dense training (further left is better)")


# What the picture of few synchronisations shows, and the names for it.
SENT = {
    "dense": "dense, every step",
    "32 bits, rate 100": "ScaleCom in 32 bits, every step",
    "DeMo, 3 %": "DeMo, every step",
    "plain average": "plain average",
    "DiLoCo": "DiLoCo",
    "SparseLoCo, 3 %": "SparseLoCo",
    "its choice, 3 %": "SparseLoCo over all",
}


def synchronisations() -> Any:
    """Bits over bytes, with workers that average what 4, 16 and 64 steps changed."""
    found: dict[str, dict[str, dict[int, list[Point]]]] = {}
    for row in rows_of("synchronisations.csv"):
        by_h = found.setdefault(row["situation"], {}).setdefault(row["sent"], {})
        by_h.setdefault(int(row["H"]), []).append((float(row["kilobytes"]), float(row["score"])))
    shown = [situation for situation in found if situation.endswith("4 workers")]
    figure, axes = pictures.panels(shown, 3.6)
    for axis, situation in zip(axes, shown, strict=True):
        for sent, mark in pictures.marks(SENT).items():
            runs = sorted(found[situation].get(sent, {}).items())
            means = {h: np.mean(points, axis=0) for h, points in runs}
            axis.plot(*zip(*means.values(), strict=True), **mark.curve(label=SENT[sent]))
            for h, place in means.items():
                axis.annotate(f" {h}", place, fontsize=7)
        axis.set(xscale="log", xlabel="kB per worker and step")
    axes[0].set_ylabel("bits per character")
    pictures.legend(figure, axes[:1], 4)
    return figure


# explained

# One tensor's elements on three ranks, in hundredths: gradients and residues.
GRADS = ((3, -6, 2, 4, -1, 5, -2, 1), (2, -7, 1, 2, -2, 6, -3, 2), (4, -3, 1, 5, -1, 3, -1, 1))
RESIDUES = ((-1, -1, 1, 0, 2, 1, -4, -1), (1, -1, 2, 1, 1, 0, -3, 0), (0, -2, 0, -2, 1, 1, -5, 1))
# What happens in a step, from top to bottom.
WORDS = {
    14.2: ("backward", "gradient g"),
    12: ("add", "m + g: residue, gradient"),
    9.6: ("choose, broadcast", "k offsets, half a byte each"),
    7: ("take", "m + g there, as integers"),
    4.9: ("keep", "the rest, in m (beta = 1)"),
    2.9: ("all-reduce", "the sum of k integers"),
    0.8: ("scatter", "the same on every rank"),
}


def blank(height: float, xlim: Point, ylim: Point) -> tuple[Any, Any]:
    """A figure to draw on, without axes."""
    figure, axis = plt.subplots(figsize=(WIDTH, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axis.set(xlim=xlim, ylim=ylim)
    axis.set_axis_off()
    return figure, axis


def arrow(axis: Any, begin: Point, end: Point, style: str) -> None:
    line = {"arrowstyle": style, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, begin, arrowprops=line)


def strip(axis: Any, x: float, y: float, values: Sequence[float], sent: Sequence[int] = ()) -> None:
    """A tensor's elements as bars. Elements that are sent stand out, and zeros are dots."""
    axis.plot([x - 0.3, x + len(values) - 0.7], [y, y], color=GREY, linewidth=0.8)
    for i, value in enumerate(values):
        mark = PARTS["values" if i in sent else "compute"]
        if value:
            axis.bar(x + i, value / 10, bottom=y, width=0.8, **mark.bar(**EDGE))


def step() -> Any:
    """One step of ScaleCom on three ranks, with a tensor of eight elements in two lanes."""
    grads, lanes, leader = np.array(GRADS), Lanes(8, 4), 1
    accumulators = grads + np.array(RESIDUES)
    lane = np.abs(accumulators[leader]).reshape(lanes.rows, lanes.k)  # a lane is a column
    offsets = lane.argmax(axis=0)
    sent = [int(i) for i in lanes.indices(offsets)]
    kept, averages = accumulators.copy(), np.zeros(8)
    kept[:, sent] = 0
    averages[sent] = accumulators[:, sent].mean(axis=0)

    figure, axis = blank(5.8, (0, 42), (-0.6, 16.4))
    columns = (10.5, 22, 33.5)
    for rank, x in enumerate(columns):
        name = f"rank {rank}" + (", leader of this step" if rank == leader else "")
        axis.text(x + 3.5, 15.9, name, ha="center", weight="bold")
        strip(axis, x, 14.2, grads[rank])
        strip(axis, x, 12, accumulators[rank])
        strip(axis, x, 7, accumulators[rank], sent)
        strip(axis, x, 4.9, kept[rank])
        strip(axis, x, 0.8, averages, sent)
    for y, (title, more) in WORDS.items():
        axis.text(0.2, y + 0.1, title, weight="bold", va="bottom")
        axis.text(0.2, y, more, va="top", fontsize=8)
    first, middle, last = (x + 3.5 for x in columns)
    arrow(axis, (middle, 11.1), (middle, 10.1), "->")
    arrow(axis, (middle, 9.6), (middle, 8.2), "->")
    for x in (first, last):
        arrow(axis, (middle, 9.6), (x, 9.6), "-")
        arrow(axis, (x, 9.6), (x, 8.2), "->")
    arrow(axis, (first - 3, 2.9), (last + 3, 2.9), "<->")
    box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "black"}
    style = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box}
    said = f"largest of each lane: rows {', '.join(map(str, offsets))}"
    axis.text(middle, 9.6, said, **style)
    axis.text(middle, 2.9, "average", **style)
    return figure


# The leader's |m + g| in a tensor of 20 elements.
SIZES = (2, 11, 10, 6, 16, 15, 7, 3, 9, 8, 4, 18, 13, 5, 12, 7, 19, 6, 5, 9)


def lanes() -> Any:
    """A tensor of 20 elements in four lanes, and the offsets of each lane's largest element."""
    geometry, size = Lanes(20, 5), np.array(SIZES) / 8
    offsets = size.reshape(geometry.rows, geometry.k).argmax(axis=0)
    winners = geometry.indices(offsets)
    kinds = [MARKS[name].bar(**EDGE) for name in ("ScaleCom", "local top-k", "random-k", "gTop-k")]
    figure, axis = blank(3.4, (-4.6, 20.2), (-3.3, 3.1))
    for i, height in enumerate(size):
        alpha = {} if i in winners else {"alpha": 0.35}
        axis.bar(i, height, width=0.8, **kinds[i % geometry.k], **alpha)
        for y, said in ((-0.1, i), (-0.55, i % geometry.k), (-1.0, i // geometry.k)):
            axis.text(i, y, f"{said}", ha="center", va="top", fontsize=8)
    for lane, i in enumerate(winners):
        axis.plot(i, size[i] + 0.2, "v", color="black", markersize=7)
        axis.bar(2.5 + 4.4 * lane, 0.9, bottom=-2.9, width=3.4, **kinds[lane], alpha=0.35)
        said = f"lane {lane}: row {offsets[lane]}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.text(2.5 + 4.4 * lane, -2.45, said, ha="center", va="center", fontsize=8, bbox=box)
    for y, said in ((-0.1, "element"), (-0.55, "lane"), (-1.0, "row")):
        axis.text(-0.8, y, said, ha="right", va="top", fontsize=8)
    axis.text(-0.8, 0.8, "|m + g|\nof the leader", ha="right", va="center")
    axis.text(-0.8, -2.45, "what is sent,\nhalf a byte each", ha="right", va="center")
    return figure


# Of each piece of a step: when it begins, how long it takes, and its bucket. The gradients of the
# three buckets are ready at 5, 8 and 10. The last bucket is smaller. {title: (the step's end,
# {part: pieces})}
TIMES = {
    "cyclic": (
        12.2,
        {
            "select": "5 .7 1, 6.3 .3 1, 8 .7 2, 9.3 .3 2, 10 .4 3, 11.1 .2 3",
            "offsets": "5.7 .6 1, 8.7 .6 2, 10.7 .4 3",
            "values": "6.6 1.1 1, 9.6 1.1 2, 11.3 .7 3",
            "scatter": "7.7 .3 1, 10.7 .3 2, 12 .2 3",
        },
    ),
    "look-ahead (1', 2', 3': offsets for the next step)": (
        11.6,
        {
            "select": "5 1 1, 8 1 2, 10 .6 3",
            "offsets": "7.1 .6 1', 10.1 .6 2', 11.4 .4 3'",
            "values": "6 1.1 1, 9 1.1 2, 10.7 .7 3",
            "scatter": "7.1 .3 1, 10.6 .3 2, 11.4 .2 3",
        },
    ),
}


def lookahead() -> Any:
    """The timing of a step with three buckets, cyclic and with look-ahead. It is not measured."""
    figure, axes = stacked(2, 4.4)
    for axis, (title, (end, parts)) in zip(axes, TIMES.items(), strict=True):
        model = f"0 3 forward, 3 7 backward, {end} {14 - end} forward"
        for part, pieces in {"compute": model, **parts}.items():
            row = {"compute": 2, "select": 1, "scatter": 1}.get(part, 0)
            for piece in pieces.split(", "):
                begin, length, said = piece.split()
                span(axis, row, float(begin), float(length), part, said)
        axis.plot([10, 10], [-0.5, 3], color="black", linewidth=0.8, linestyle=":")
        axis.plot([end, end], [-0.5, 3], color="black", linewidth=0.8, linestyle=":")
        arrow(axis, (10, 2.65), (end, 2.65), "<->")
        axis.text((10 + end) / 2, 2.75, "exposed", ha="center", va="bottom", fontsize=8)
        axis.set_yticks([0, 1, 2], ["network", "kernel", "model"])
        axis.tick_params(length=0)
        axis.set(xlim=(0, 14), ylim=(-0.5, 3.1), xticks=[])
        axis.set_title(title, loc="left", weight="bold")
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
    handles = [axes[1].bar(0, 0, **PARTS[part].bar()) for part in list(PARTS)[1:5]]
    words = ("choose, take", "broadcast of offsets", "all-reduce of values", "scatter")
    figure.legend(handles, words, loc="outside lower center", ncols=4)
    return figure


def span(axis: Any, row: int, begin: float, length: float, part: str, said: str) -> None:
    """Draw one piece of a time line."""
    axis.barh(row, length, left=begin, height=0.7, **PARTS[part].bar(**EDGE))
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    bare = {} if part == "compute" else {"bbox": box}
    axis.text(begin + length / 2, row, said, ha="center", va="center", fontsize=7, **bare)


DRAWN = (race, steps, accuracy, synchronisations, step, lanes, lookahead)


if __name__ == "__main__":
    for draw in DRAWN:
        pictures.save(draw(), DOCS / "pictures" / f"{draw.__name__}.svg")
