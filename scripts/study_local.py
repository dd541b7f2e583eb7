"""The study's last experiment, local steps and quantised values: its table, its picture and its
answers.

After Qsparse-local-SGD (Basu et al., 2019): H local steps, then the change since the last
synchronisation, sparsified and quantised.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from study_answers import change, count, listed, markdown
from study_questions import QUANTISERS, RATES, SELECTIONS, WIDTHS

if TYPE_CHECKING:
    from study_page import Scores, Study

LEGEND = {
    "H": (
        "local steps between two synchronisations: SGD with momentum on every worker's own "
        "parameters; H = 1 sends every step's change."
    ),
    "leader top-k": (
        "all workers send their values at the places that ScaleCom's leader, another one each "
        "time, chose."
    ),
    "local top-k": "every worker sends its own largest, with their places.",
    "none": "32-bit values.",
    "sign": "one bit for each value, and the mean magnitude of every 512.",
    "2, 4, 8 bits": (
        "QSGD with s = 1, 7, 127 levels of the largest magnitude in a chunk (64, 256, 512 "
        "values), rounded at random."
    ),
    "kB": (
        "what a worker sends on a ring at a synchronisation after the warm-up, with places and "
        "what is sent whole, divided by H."
    ),
    "loss": (
        "1.05 times what the leader's 32-bit values end with at the largest H; bits to it include "
        "the dense warm-up."
    ),
}


def found(study: Study) -> dict[str, dict[tuple[int, str, str], Scores]]:
    """{task: {(H, selection, quantiser): scores}}."""
    by_task: dict[str, dict[tuple[int, str, str], Scores]] = {}
    for label, scores in study.of("local"):
        task, _, rest = label.partition(": ")
        local_steps, selection, quantiser = rest.removeprefix("H = ").split(", ")
        by_task.setdefault(task, {})[int(local_steps), selection, quantiser] = scores
    return by_task


def target(schemes: dict[tuple[int, str, str], Scores]) -> float | None:
    """A training loss that ScaleCom's values come to as they are, at every H."""
    ends = [
        statistics.mean(loss for _, loss in result["losses"][-3:])
        for (_, selection, quantiser), scores in schemes.items()
        if (selection, quantiser) == ("leader", "none") and not scores.diverged
        for result in scores.results
    ]
    return 1.05 * max(ends) if ends else None


def spent(scores: Scores, loss: float | None) -> tuple[float, float]:
    """Megabits that a worker had sent when its training loss came to this: all, and of them those
    of compressed tensors after the dense warm-up, which is most of the others; NaN: it never did.
    """
    if loss is None or scores.diverged or (steps := scores.reaches(loss, "steps")) is None:
        return math.nan, math.nan
    whole = (scores.run.warmup or 0) * scores.run.steps
    return 8e-6 * scores.reaches(loss, "bytes"), 8e-6 * compressed(scores) * max(steps - whole, 0)


def compressed(scores: Scores) -> float:
    """Bytes per step without what is sent whole."""
    return scores.bytes - scores.results[0]["bytes_whole_per_step"]


def table(study: Study) -> list[str]:
    rows = []
    for schemes in found(study).values():
        loss = target(schemes)
        for (local_steps, selection, quantiser), scores in schemes.items():
            bits, after = spent(scores, loss)
            chosen = selection != "dense"
            rows.append(
                [
                    scores.task.title,
                    str(local_steps),
                    "sent whole" if selection == "dense" else f"{selection} top-k",
                    quantiser,
                    scores.text(),
                    f"{scores.bytes / 1000:.2f}",
                    f"{compressed(scores) / 1000:.2f}" if chosen else "",
                    "not reached" if math.isnan(bits) else f"{bits:.1f}",
                    f"{after:.3g}" if chosen and not math.isnan(after) else "",
                ]
            )
    if not rows:
        return []
    head = [
        "task",
        "H",
        "choice",
        "values",
        "acc9 / bits",
        "kB per worker and step",
        "of compressed tensors",
        "Mbit to the loss",
        "of compressed tensors after the warm-up",
    ]
    legend = [f"- **{what}**: {meaning}" for what, meaning in LEGEND.items()]
    return [*legend, "", *markdown(head, rows), *widths_table(study)]


def widths_table(study: Study) -> list[str]:
    """What s and k do together."""
    by_rate = {
        rate: [study.get("widths", f"{rate}x, {width}") for width in WIDTHS] for rate in RATES
    }
    rows = [
        [f"{rate}x", *(f"{s.text()}, {s.bytes / 1000:.2f} kB" for s in scores)]
        for rate, scores in by_rate.items()
        if all(scores)
    ]
    title = "Digits, leader top-k, H = 4: accuracy, and kB per worker and step, by rate and values."
    return ["", title, "", *markdown(["rate", *WIDTHS], rows)] if rows else []


def draw(study: Study, path: Path) -> Path | None:
    """Accuracy over what is sent, a curve for each selection and quantiser along H; what each means
    is written beside it.
    """
    tasks = found(study)
    if not tasks:
        return None
    figure, axes = plt.subplots(
        1,
        len(tasks) + 1,
        figsize=(5.2 * (len(tasks) + 1), 4.6),
        layout="constrained",
        squeeze=False,
    )
    for axis, schemes in zip(axes[0], tasks.values(), strict=False):
        kinds = list(dict.fromkeys((selection, quantiser) for _, selection, quantiser in schemes))
        for selection, quantiser in kinds:
            points = [
                (h, s)
                for (h, *kind), s in schemes.items()
                if kind == [selection, quantiser] and s.mean is not None
            ]
            style = {"leader": "o-", "local": "s--", "dense": "k^:"}[selection]
            colour = {} if selection == "dense" else {"color": f"C{QUANTISERS.index(quantiser)}"}
            shown = "sent whole" if selection == "dense" else f"{selection} top-k, {quantiser}"
            sizes = [(s.bytes if selection == "dense" else compressed(s)) / 1000 for _, s in points]
            axis.plot(
                sizes, [s.mean for _, s in points], style, markersize=5, label=shown, **colour
            )
            for size, (h, scores) in zip(sizes, points, strict=True):
                axis.annotate(
                    str(h),
                    (size, scores.mean),
                    textcoords="offset points",
                    xytext=(4, 3),
                    fontsize=6,
                )
        task = next(iter(schemes.values())).task
        axis.set(
            title=task.title,
            xscale="log",
            xlabel="kB per worker and step, compressed",
            ylabel=f"{task.metric}, {task.unit}",
        )
    text = axes[0][-1]
    text.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    text.legend(handles, labels, loc="upper left", fontsize=8, frameon=False)
    words = "\n".join(
        f"{what}: {meaning}" for what, meaning in ({"the number at a point": "H."} | LEGEND).items()
    )
    text.text(0, 0, words, fontsize=7, va="bottom", wrap=True, transform=text.transAxes)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


# Answers.


def local_steps_cost(study: Study) -> str | None:
    """What H costs, and what it saves."""
    shown = []
    for schemes in found(study).values():
        first = min(h for h, *_ in schemes)
        usual = schemes[first, "leader", "none"]
        for h in sorted({h for h, *_ in schemes} - {first}):
            scores = schemes[h, "leader", "none"]
            if (better := scores.better_than(usual)) is not None:
                shown.append(
                    f"{usual.task.title}: H = {h} {change(scores, better)} for "
                    f"{usual.bytes / scores.bytes:.1f} times fewer bytes"
                )
    return (
        f"With the leader's choice, against H = {first} (+ is better): {'; '.join(shown)}."
        if shown
        else None
    )


def quantisation_gains(study: Study) -> str | None:
    """What quantisation gives on top of sparsification."""
    shown = []
    for schemes in found(study).values():
        loss = target(schemes)
        h = 4 if any(steps == 4 for steps, *_ in schemes) else min(steps for steps, *_ in schemes)
        for selection in SELECTIONS:
            usual = schemes[h, selection, "none"]
            _, usual_bits = spent(usual, loss)
            for quantiser in QUANTISERS[1:]:
                scores = schemes.get((h, selection, quantiser))
                if scores is None or (better := scores.better_than(usual)) is None:
                    continue
                _, bits = spent(scores, loss)
                to_loss = (
                    "and does not come to the loss"
                    if math.isnan(bits)
                    else f"{usual_bits / bits:.1f} times fewer to the loss"
                )
                if math.isnan(usual_bits):
                    to_loss = "which do not come to the loss"
                fewer = (
                    f"{compressed(usual) / compressed(scores):.1f} times fewer compressed bits "
                    "a step"
                )
                shown.append(
                    f"{usual.task.title}, {selection} top-k, {quantiser}: "
                    f"{change(scores, better)}, {fewer}, {to_loss}"
                )
    return (
        f"At H = {h}, against 32-bit values of the same choice (+ is better): {'; '.join(shown)}. "
        "Places, a byte each, are counted, and not quantised; not counted are the warm-up and "
        "what is sent whole (the output layer, vectors)."
        if shown
        else None
    )


def which_choice(study: Study) -> str | None:
    """The workers' own choices against the leader's."""
    pairs, more = [], []
    for schemes in found(study).values():
        for (h, selection, quantiser), scores in schemes.items():
            own = schemes.get((h, "local", quantiser))
            if (
                selection == "leader"
                and own is not None
                and (better := scores.better_than(own)) is not None
            ):
                pairs.append((scores, better))
                more.append(own.bytes / scores.bytes)
    if not pairs:
        return None
    better, worse, equal = count(pairs)
    at = [
        pair
        for pair in pairs
        if pair[0].run.local_steps == 4 and "quantiser" not in dict(pair[0].run.options)
    ]
    return (
        f"Leader against own choices, of {len(pairs)} schemes: {better} better, {worse} worse, "
        f"{equal} equal within noise; own choices send {min(more):.1f} to {max(more):.1f} times "
        f"the bytes with 4 workers. At H = 4, 32-bit values: {listed(at)}."
    )


def levels_and_rate(study: Study) -> str | None:
    """The interplay of s and k: how few bits a lower k leaves room for."""
    shown = []
    for rate in RATES:
        scores = {width: study.get("widths", f"{rate}x, {width}") for width in WIDTHS}
        if not all(scores.values()) or scores["none"].mean is None:
            continue
        lost = {width: scores[width].better_than(scores["none"]) for width in WIDTHS[1:]}
        shown.append(
            f"{rate}x: " + ", ".join(f"{width} {value:+.2f}" for width, value in lost.items())
        )
    if not shown:
        return None
    return (
        "Digits, leader, H = 4, against 32-bit values of the same k (+ is better): "
        f"{'; '.join(shown)}. The second table has the bytes: what fewer bits save can be spent on "
        "a larger k."
    )


QUESTIONS = [
    ("What do local steps cost, and what do they save?", local_steps_cost, "local"),
    ("What does quantisation gain on top of sparsification?", quantisation_gains, "local"),
    ("Own choices or the leader's, under local steps and few bits?", which_choice, "local"),
    ("How do the levels s and the number k of values play together?", levels_and_rate, "local"),
]
