"""How all pictures of the project look: one style, and one mark for each method in all of them.

A mark is a colour of Okabe and Ito's palette, which the colour-blind can distinguish. Its marker,
line and hatch say the same without colour. Fonts are legible if a page shows the picture 700 pixels
wide, so no picture is wider than two panels.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend must be chosen first

WIDTH = 7.3  # inches, which are 700 pixels of a page
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
DARK, GREY, LIGHT = "#595959", "#999999", "#D9D9D9"

plt.rc("font", size=9)
plt.rc("axes", titlesize=9, labelsize=9, grid=True, axisbelow=True)
plt.rc("axes.spines", top=False, right=False)
plt.rc("legend", fontsize=8, frameon=False)
plt.rc("grid", color="0.9")
plt.rc("lines", linewidth=1.5, markersize=5)
plt.rc("hatch", linewidth=0.7)
plt.rc("savefig", dpi=160, facecolor="white")
plt.rc("svg", fonttype="path", hashsalt="scalecom_hvd")


class Mark(NamedTuple):
    """What distinguishes one thing from another, with colour and without."""

    colour: str
    marker: str = ""
    line: Any = "-"
    hatch: str = ""

    def curve(self, **more: Any) -> dict[str, Any]:
        """Keywords for plot() and errorbar()."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line} | more

    def bar(self, **more: Any) -> dict[str, Any]:
        """Keywords for bar() and barh()."""
        plain = {"edgecolor": "white", "linewidth": 0}
        return {"facecolor": self.colour, "hatch": self.hatch} | plain | more


MARKS = {
    "dense": Mark(BLACK, "s", "--"),
    "fp16": Mark(DARK, "P", ":", "||||"),
    "ScaleCom": Mark(BLUE, "o"),
    "ScaleCom look-ahead": Mark(SKY, "D", "-", "\\\\\\\\"),
    "local top-k": Mark(VERMILION, "^", "-.", "////"),
    "random-k": Mark(GREEN, "X", (0, (5, 1)), "xxxx"),
    "gTop-k": Mark(ORANGE, "v", (0, (3, 1, 1, 1)), "----"),
    "global top-k": Mark(PURPLE, "p", (0, (1, 1)), "++++"),
    "PowerSGD": Mark(GREY, "*", (0, (4, 2)), "//--"),
}
# For things that are not methods. Three of Tol's colours come first.
SPARE = (
    Mark("#882255", "h", (0, (6, 1, 1, 1))),
    Mark("#332288", ">", (0, (2, 1))),
    Mark("#999933", "<", (0, (8, 2))),
    *reversed(MARKS.values()),
)
# Other names of the same methods in docs/*.csv.
SAME = {
    "ScaleCom cyclic": "ScaleCom",
    "the defaults": "ScaleCom",
    "local top-k, rate 100": "local top-k",
    "DDP, dense": "dense",
    "DDP's fp16 hook": "fp16",
    "PowerSGD, rank 2": "PowerSGD",
}
# The parts of a step.
PARTS = {
    "compute": Mark(LIGHT),
    "select": Mark(BLUE),
    "offsets": Mark(PURPLE, hatch="////"),
    "values": Mark(ORANGE),
    "scatter": Mark(GREEN, hatch="||||"),
    "other": Mark(DARK, hatch="xxxx"),
}


def known(name: str) -> Mark | None:
    """A method's mark, if it has one."""
    return MARKS.get(SAME.get(name, name))


def marks(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each name. A name that is no known method gets one that no other name has."""
    names = list(dict.fromkeys(names))
    found = {name: mark for name in names if (mark := known(name))}
    spares = itertools.cycle(mark for mark in SPARE if mark not in found.values())
    return {name: found.get(name) or next(spares) for name in names}


def panels(titles: Sequence[str], height: float = 2.9) -> tuple[Any, Any]:
    """A figure with a panel for each title, in rows of two. Returns the figure and its axes."""
    columns = min(len(titles), 2)
    rows = -(-len(titles) // columns)
    size = (WIDTH, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(titles) :]:
        axis.remove()
    for axis, title in zip(axes.flat, titles, strict=False):
        axis.set_title(textwrap.fill(title, 92 // columns))
    return figure, axes.flat[: len(titles)]


def legend(figure: Any, axes: Iterable[Any], columns: int = 3) -> None:
    """Draw one legend above all panels, for what any of them shows."""
    found = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found, loc="outside upper center", ncols=columns)


def save(figure: Any, path: Path) -> None:
    """Write a picture, in the format of its suffix. The same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
