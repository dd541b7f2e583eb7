"""Draws docs/pictures: three pictures of measured numbers, and three that explain ScaleCom.

    python scripts/pictures_of_docs.py

The numbers are in docs/bench.csv, study.csv and meetings.csv. docs/bench.csv is the steps.csv that
`make bench` wrote. docs/study.csv is the scores.csv of `make study`'s experiments defaults, trials
and rivals, and docs/meetings.csv that of meetings.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pictures
from pictures import MARKS, PARTS, plt

from scalecom_hvd.lanes import Lanes

DOCS = Path(__file__).resolve().parents[1] / "docs"
# The methods' names for a reader, in the picture's order. Some are not measured everywhere.
METHODS = {
    "dense": "dense",
    "fp16": "Horovod's fp16",
    "local top-k": "local top-k",
    "ScaleCom cyclic": "ScaleCom",
    "ScaleCom look-ahead": "ScaleCom,\nlook-ahead",
}
# What the picture of few meetings shows, and the names for it.
SENT = {
    "dense": "dense, every step",
    "32 bits, rate 100": "ScaleCom in 32 bits, every step",
    "DeMo, 3 %": "DeMo, every step",
    "plain average": "plain average",
    "DiLoCo": "DiLoCo",
    "SparseLoCo, 3 %": "SparseLoCo",
    "its choice, 3 %": "SparseLoCo over all",
    "ScaleCom, 2 bits, 3 %": "leader top-k, 2 bits",
}
# What the picture of the defaults shows, and the names for it.
COMPARED = {
    "the defaults": "ScaleCom",
    "local top-k, rate 100": "local top-k",
}
# One tensor's elements on three ranks, in hundredths: gradients and residues.
GRADS = ((3, -6, 2, 4, -1, 5, -2, 1), (2, -7, 1, 2, -2, 6, -3, 2), (4, -3, 1, 5, -1, 3, -1, 1))
RESIDUES = ((-1, -1, 1, 0, 2, 1, -4, -1), (1, -1, 2, 1, 1, 0, -3, 0), (0, -2, 0, -2, 1, 1, -5, 1))
# The leader's |m + g| in a tensor of 20 elements.
SIZES = (2, 11, 10, 6, 16, 15, 7, 3, 9, 8, 4, 18, 13, 5, 12, 7, 19, 6, 5, 9)
# When each part begins, and how long it takes, in a step of three buckets. Their gradients are
# ready at 5, 8 and 10. The last bucket is smaller. {title: (the step's end, {part: [(begin, length,
# bucket)]})}
TIMES: dict[str, tuple[float, dict[str, list[tuple[float, float, str]]]]] = {
    "cyclic": (
        12.2,
        {
            "select": [
                *((5, 0.7, "1"), (6.3, 0.3, "1"), (8, 0.7, "2")),
                *((9.3, 0.3, "2"), (10, 0.4, "3"), (11.1, 0.2, "3")),
            ],
            "offsets": [(5.7, 0.6, "1"), (8.7, 0.6, "2"), (10.7, 0.4, "3")],
            "values": [(6.6, 1.1, "1"), (9.6, 1.1, "2"), (11.3, 0.7, "3")],
            "scatter": [(7.7, 0.3, "1"), (10.7, 0.3, "2"), (12, 0.2, "3")],
        },
    ),
    "look-ahead (1', 2', 3': offsets for the next step)": (
        11.6,
        {
            "select": [(5, 1, "1"), (8, 1, "2"), (10, 0.6, "3")],
            "offsets": [(7.1, 0.6, "1'"), (10.1, 0.6, "2'"), (11.4, 0.4, "3'")],
            "values": [(6, 1.1, "1"), (9, 1.1, "2"), (10.7, 0.7, "3")],
            "scatter": [(7.1, 0.3, "1"), (10.6, 0.3, "2"), (11.4, 0.2, "3")],
        },
    ),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --------------------------------------------------------------------------------------------------
# measured


def steps() -> Any:
    """How long a step takes, over slow and fast networks."""
    found = {(r["hosts"], r["mbit"], r["method"]): r for r in rows_of(DOCS / "bench.csv")}
    speeds = {"100": "100 Mbit/s", "1000": "1 Gbit/s", "": "unshaped"}
    # The sixth panel is for the legend.
    places = [("2", mbit) for mbit in speeds] + [("4", "1000"), ("4", "")]
    figure, axes = plt.subplots(2, 3, figsize=(pictures.WIDTH, 4.6), layout="constrained")
    for axis, (hosts, mbit) in zip(axes.flat, places, strict=False):
        axis.set_title(f"{hosts} hosts, {speeds[mbit]}")
        step_bars(axis, {method: found.get((hosts, mbit, method)) for method in METHODS})
    for axis in axes[:, 1:].flat:
        axis.set_yticklabels([])
    legend = axes[-1, -1]
    legend.set_axis_off()
    compute = legend.bar(0, 0, **PARTS["compute"].bar())
    words = ["computing", "waiting for the exchange\n(in the method's colour)"]
    waiting = legend.bar(0, 0, **MARKS["dense"].bar())
    legend.legend([compute, waiting], words, loc="upper left", borderaxespad=0)
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


def accuracy() -> Any:
    """What compression costs, in points of accuracy and in bits per character."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows_of(DOCS / "study.csv"):
        if row["experiment"] == "defaults":
            by_method = scores.setdefault(row["situation"], {})
            by_method.setdefault(row["what"], []).append(float(row["score"]))
    text = [name for name in scores if name.startswith(("LSTM", "Transformer"))]
    images = [name for name in scores if name not in text]
    figure, axes = plt.subplots(
        2,
        1,
        figsize=(pictures.WIDTH, 7),
        layout="constrained",
        height_ratios=(len(images), len(text)),
    )
    losses(axes[0], {name: scores[name] for name in images}, sign=-1)
    losses(axes[1], {name: scores[name] for name in text}, sign=1)
    axes[0].set_xlabel("points of accuracy lost against dense training (further left is better)")
    axes[1].set_xlabel("bits per character lost against dense training (further left is better)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(COMPARED) + 1)
    return figure


def meetings() -> Any:
    """Bits over bytes, with workers that average what 4, 16 and 64 steps changed."""
    found: dict[str, dict[str, dict[int, list[Any]]]] = {}
    for row in rows_of(DOCS / "meetings.csv"):
        by_h = found.setdefault(row["situation"], {}).setdefault(row["sent"], {})
        by_h.setdefault(int(row["H"]), []).append((float(row["kilobytes"]), float(row["score"])))
    shown = [situation for situation in found if situation.endswith("4 workers")]
    figure, axes = pictures.panels(shown, 3.6)
    known = pictures.marks(SENT)
    for axis, situation in zip(axes, shown, strict=True):
        for sent, mark in known.items():
            means = {
                h: [statistics.mean(column) for column in zip(*runs, strict=True)]
                for h, runs in sorted(found[situation].get(sent, {}).items())
            }
            axis.plot(*zip(*means.values(), strict=True), **mark.curve(label=SENT[sent]))
            for h, place in means.items():
                axis.annotate(f" {h}", place, fontsize=7)
        axis.set(xscale="log", xlabel="kB per worker and step")
    axes[0].set_ylabel("bits per character")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def losses(axis: Any, scores: dict[str, dict[str, list[float]]], sign: int) -> None:
    """A row for each situation: every method's mean, and the range over its seeds."""
    axis.use_sticky_edges = False
    for place, by_method in enumerate(scores.values()):
        dense = statistics.mean(by_method["dense"])
        own = [sign * (score - dense) for score in by_method["dense"]]
        axis.barh(place, max(own) - min(own), left=min(own), color=pictures.LIGHT)
        methods = [method for method in COMPARED if method in by_method]
        for i, method in enumerate(methods):
            lost = [sign * (score - dense) for score in by_method[method]]
            mean, y = statistics.mean(lost), place + 0.2 * (i - (len(methods) - 1) / 2)
            around = [[mean - min(lost)], [max(lost) - mean]]
            style = pictures.known(method).curve(linestyle="none")
            axis.errorbar(mean, y, xerr=around, **style)
    for method, label in COMPARED.items():
        mark = pictures.known(method)
        axis.plot([], [], **mark.curve(linestyle="none", label=label))
    axis.plot([], [], "s", color=pictures.LIGHT, markersize=8, label="dense, its seeds")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(scores)), scores)
    axis.set_ylim(len(scores) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


# --------------------------------------------------------------------------------------------------
# explained


def blank(height: float, xlim: tuple[float, float], ylim: tuple[float, float]) -> tuple[Any, Any]:
    """A figure to draw on, without axes."""
    figure, axis = plt.subplots(figsize=(pictures.WIDTH, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axis.set(xlim=xlim, ylim=ylim)
    axis.set_axis_off()
    return figure, axis


def arrow(axis: Any, begin: tuple[float, float], end: tuple[float, float], style: str) -> None:
    line = {"arrowstyle": style, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, begin, arrowprops=line)


def strip(axis: Any, x: float, y: float, values: Sequence[float], sent: Sequence[int]) -> None:
    """A tensor's elements as bars. Elements that are sent stand out, and zeros are dots."""
    axis.plot([x - 0.3, x + len(values) - 0.7], [y, y], color=pictures.GREY, linewidth=0.8)
    for i, value in enumerate(values):
        mark = PARTS["values" if i in sent else "compute"]
        if value:
            axis.bar(
                x + i, value / 10, bottom=y, width=0.8, **mark.bar(edgecolor="black", linewidth=0.6)
            )


def step() -> Any:
    """One step of ScaleCom on three ranks, with a tensor of eight elements in two lanes."""
    grads, residues, lanes = np.array(GRADS), np.array(RESIDUES), Lanes(8, 4)
    accumulators, leader = grads + residues, 1
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
        strip(axis, x, 14.2, grads[rank], [])
        strip(axis, x, 12, accumulators[rank], [])
        strip(axis, x, 7, accumulators[rank], sent)
        strip(axis, x, 4.9, kept[rank], [])
        strip(axis, x, 0.8, averages, sent)
    words = {
        14.2: ("backward", "gradient g"),
        12: ("add", "m + g: residue, gradient"),
        9.6: ("choose, broadcast", "k offsets, half a byte each"),
        7: ("take", "m + g there, as integers"),
        4.9: ("keep", "the rest, in m (beta = 1)"),
        2.9: ("all-reduce", "the sum of k integers"),
        0.8: ("scatter", "the same on every rank"),
    }
    for y, (title, more) in words.items():
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


def lanes() -> Any:
    """A tensor of 20 elements in four lanes, and the offsets of each lane's largest element."""
    geometry = Lanes(20, 5)
    size = np.array(SIZES) / 8
    table = size.reshape(geometry.rows, geometry.k)
    offsets = table.argmax(axis=0)
    winners = geometry.indices(offsets)
    kinds = [MARKS[name] for name in ("ScaleCom", "local top-k", "random-k", "gTop-k")]
    figure, axis = blank(3.4, (-4.6, 20.2), (-3.3, 3.1))
    for i, height in enumerate(size):
        style = kinds[i % geometry.k].bar(edgecolor="black", linewidth=0.6)
        alpha = {} if i in winners else {"alpha": 0.35}
        axis.bar(i, height, width=0.8, **style, **alpha)
        axis.text(i, -0.1, f"{i}", ha="center", va="top", fontsize=8)
        axis.text(i, -0.55, f"{i % geometry.k}", ha="center", va="top", fontsize=8)
        axis.text(i, -1.0, f"{i // geometry.k}", ha="center", va="top", fontsize=8)
    for lane, i in enumerate(winners):
        axis.plot(i, size[i] + 0.2, "v", color="black", markersize=7)
        style = kinds[lane].bar(edgecolor="black", linewidth=0.6)
        axis.bar(2.5 + 4.4 * lane, 0.9, bottom=-2.9, width=3.4, **style, alpha=0.35)
        said = f"lane {lane}: row {offsets[lane]}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.text(2.5 + 4.4 * lane, -2.45, said, ha="center", va="center", fontsize=8, bbox=box)
    for y, said in ((-0.1, "element"), (-0.55, "lane"), (-1.0, "row")):
        axis.text(-0.8, y, said, ha="right", va="top", fontsize=8)
    axis.text(-0.8, 0.8, "|m + g|\nof the leader", ha="right", va="center")
    axis.text(-0.8, -2.45, "what is sent,\nhalf a byte each", ha="right", va="center")
    return figure


def lookahead() -> Any:
    """The timing of a step with three buckets, cyclic and with look-ahead. It is not measured."""
    figure, axes = plt.subplots(2, 1, figsize=(pictures.WIDTH, 4.4), layout="constrained")
    for axis, (title, (end, pieces)) in zip(axes, TIMES.items(), strict=True):
        model = (0, 3, "forward"), (3, 7, "backward"), (end, 14 - end, "forward")
        for begin, length, said in model:
            span(axis, 2, begin, length, "compute", said)
        for part, own in pieces.items():
            row = 0 if part in ("offsets", "values") else 1
            for begin, length, bucket in own:
                span(axis, row, begin, length, part, bucket)
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
    style = PARTS[part].bar(edgecolor="black", linewidth=0.6)
    axis.barh(row, length, left=begin, height=0.7, **style)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    bare = {} if part == "compute" else {"bbox": box}
    axis.text(begin + length / 2, row, said, ha="center", va="center", fontsize=7, **bare)


DRAWN = (steps, accuracy, meetings, step, lanes, lookahead)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument(
        "--output", type=Path, default=DOCS / "pictures", help="folder (default: %(default)s)"
    )
    parser.add_argument("--kind", default="svg", choices=("svg", "png"), help="default: svg")
    args = parser.parse_args()
    for draw in DRAWN:
        pictures.save(draw(), args.output / f"{draw.__name__}.{args.kind}")


if __name__ == "__main__":
    main()
