"""The questions that the method's reviewers asked, and how each is answered: a verdict and its
numbers, which follow from the runs.

An answer is a function of the Study; it gives None where its experiment was not run. Words are
chosen by the numbers beside them. Changes are signed so that + is better, of accuracy and of bits
alike. A case of which any run came apart has no mean, and loses every comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import scaling_model
from study_questions import BETAS, RATE

if TYPE_CHECKING:
    from study_page import Scores, Study

# Differences below this are called noise: of accuracy in percentage points, and of bits per
# character.
NOISE = {"%": 0.3, "bits": 0.02}

# scores, and by how much they are better than what they are compared with; infinite if one came
# apart
Pair = tuple["Scores", float]


def change(scores: Scores, better: float) -> str:
    """A signed difference; + is better."""
    if math.isinf(better):
        return "the other came apart" if better > 0 else "came apart"
    return f"{better:+.{scores.task.digits}f}"


def in_words(scores: Scores, better: float) -> str:
    unit = "points" if scores.task.unit == "%" else scores.task.unit
    if math.isinf(better):
        return change(scores, better)
    if abs(better) < NOISE.get(scores.task.unit, 0):
        return f"no more than noise ({change(scores, better)} {unit})"
    return f"{abs(better):.{scores.task.digits}f} {unit} {'better' if better > 0 else 'worse'}"


def compare(study: Study, one: str, other: str) -> list[Pair]:
    """Experiment 1, for every task: a method's scores, and by how much they are better than
    another's.
    """
    found = []
    for task in study.tasks:
        mine, theirs = (
            study.get("accuracy", f"{task}: {one}"),
            study.get("accuracy", f"{task}: {other}"),
        )
        if (
            mine is not None
            and theirs is not None
            and (better := mine.better_than(theirs)) is not None
        ):
            found.append((mine, better))
    return found


def count(pairs: Iterable[Pair]) -> tuple[int, int, int]:
    """How many are better, worse, and no more than noise apart."""
    pairs = list(pairs)
    better = sum(value > NOISE.get(scores.task.unit, 0) for scores, value in pairs)
    worse = sum(value < -NOISE.get(scores.task.unit, 0) for scores, value in pairs)
    return better, worse, len(pairs) - better - worse


def listed(pairs: Iterable[Pair]) -> str:
    return "; ".join(f"{scores.task.title}: {in_words(scores, better)}" for scores, better in pairs)


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table's lines; none for no rows."""
    return (
        [
            f"| {' | '.join(head)} |",
            "|" + "---|" * len(head),
            *(f"| {' | '.join(map(str, row))} |" for row in rows),
        ]
        if rows
        else []
    )


def per_cent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.0f} %"


def keeps_accuracy(study: Study) -> str | None:
    pairs = compare(study, f"ScaleCom {RATE}x", "dense")
    if not pairs:
        return None
    sends = ", ".join(f"{scores.run.steps / RATE:.1f}" for scores, _ in pairs)
    return (
        f"At {RATE}x, against dense: {listed(pairs)}. These runs are short, {sends} sends per "
        "coordinate; what counts is steps / rate."
    )


def what_the_task_can_tell(study: Study) -> str | None:
    controls = ("residues thrown away", "compressed tensors frozen")
    found = [
        f"{control}: {listed(pairs)}"
        for control in controls
        if (pairs := compare(study, control, "dense"))
    ]
    return f"Controls against dense. {'. '.join(found)}." if found else None


def better_than_random(study: Study) -> str | None:
    pairs = [
        pair
        for rate in study.rates
        for pair in compare(study, f"ScaleCom {rate}x", f"RandomK {rate}x")
    ]
    if not pairs:
        return None
    better, worse, equal = count(pairs)
    verdict = "Yes" if better > worse + equal else "No" if worse >= better else "Sometimes"
    at = compare(study, f"ScaleCom {RATE}x", f"RandomK {RATE}x")
    return (
        f"{verdict}: of {len(pairs)} tasks and rates {better} better, {worse} worse, {equal} "
        f"equal within noise. At {RATE}x, {listed(at)}."
    )


def true_top_k(study: Study) -> str | None:
    pairs = compare(study, f"ScaleCom {RATE}x", f"GlobalTopK {RATE}x")
    if not pairs:
        return None
    seen = [
        f"{label.partition(':')[0]}, {per_cent(scores.typical('distance_to_top_k'))} (energy left "
        f"behind: {per_cent(scores.typical('contraction'))}, by the true top-k "
        f"{per_cent(scores.typical('contraction_top_k'))})"
        for label, scores in study.of("similarity")
        if label.endswith("beta 1")
    ]
    missed = (
        f" Of the leader's choice, outside of the true top-k: {'; '.join(seen)}." if seen else ""
    )
    return f"ScaleCom against the oracle at {RATE}x: {listed(pairs)}.{missed}"


def taper(study: Study) -> str | None:
    lines = []
    for task in study.tasks:
        dense, shown = study.get("accuracy", f"{task}: dense"), []
        for rate in study.rates:
            scores = study.get("accuracy", f"{task}: ScaleCom {rate}x")
            if scores is not None and (better := scores.better_than(dense)) is not None:
                shown.append(
                    f"{rate}x {change(scores, better)} for {dense.bytes / scores.bytes:.0f} times "
                    "fewer bytes"
                )
        if shown:
            lines.append(f"{dense.task.title}: {', '.join(shown)}")
    return (
        f"Against dense (+ is better), by rate. {'; '.join(lines)}. In models this small, what is "
        "sent whole limits the bytes."
        if lines
        else None
    )


def small_batches(study: Study) -> str | None:
    lines = []
    for setting in ("batch of 16", "batch of 2"):
        cases = {
            m: study.get("similarity", f"{setting}: {m}")
            for m in ("dense", "ScaleCom", "RandomK", "LocalTopK")
        }
        if None in cases.values():
            continue
        mine = cases["ScaleCom"]
        lines.append(
            f"{setting} per worker: dense {cases['dense'].text()}, ScaleCom {mine.text()}, local "
            f"top-k {cases['LocalTopK'].text()}, random-k {cases['RandomK'].text()}; of the "
            f"leader's choice {per_cent(mine.typical('distance_to_top_k'))} is outside of the true "
            "top-k"
        )
    return f"{'. '.join(lines)}." if lines else None


def unlike_shards(study: Study) -> str | None:
    usual, unlike = (
        study.get("similarity", "batch of 16: ScaleCom"),
        study.get("similarity", "unlike shards: ScaleCom"),
    )
    dense, local, random = (
        study.get("similarity", f"unlike shards: {m}") for m in ("dense", "LocalTopK", "RandomK")
    )
    if unlike is None or dense is None or (better := unlike.better_than(dense)) is None:
        return None
    return (
        f"Every worker with labels of its own, against dense: {in_words(unlike, better)} (dense "
        f"{dense.text()}, ScaleCom {unlike.text()}, local top-k {local.text()}, random-k "
        f"{random.text()}). The leader's choice misses "
        f"{per_cent(unlike.typical('distance_to_top_k'))} of the true top-k, with alike shards "
        f"{per_cent(usual.typical('distance_to_top_k'))}."
    )


def similar(study: Study) -> str | None:
    found = [
        f"{label.replace(': ', ', ')} {value:.2f}"
        for label, scores in study.of("similarity")
        if ": beta" in label and (value := scores.typical("residue_distance")) is not None
    ]
    return (
        f"Mean cosine distance of residues, second half: {'; '.join(found)}. 0 is the same "
        "direction, 1 none in common."
        if found
        else None
    )


def rescues(study: Study) -> str | None:
    lines = []
    for setting in (
        "large learning rate, group norm",
        "batch of 256, group norm",
        "large learning rate, batch norm",
        "standard",
    ):
        one, tenth, dense = (
            study.get("large", f"{setting}: {what}") for what in ("beta 1", "beta 0.1", "dense")
        )
        if one is not None and tenth is not None and (better := tenth.better_than(one)) is not None:
            lines.append(
                f"{setting}: {in_words(tenth, better)} (dense {dense.text()}, beta 1 {one.text()}, "
                f"beta 0.1 {tenth.text()})"
            )
    return f"Beta 0.1 against beta 1. {'. '.join(lines)}." if lines else None


def beta_sensitivity(study: Study) -> str | None:
    lines = []
    for setting in dict.fromkeys(label.rpartition(": ")[0] for label, _ in study.of("large")):
        found = {
            beta: scores
            for beta in BETAS
            if (scores := study.get("large", f"{setting}: beta {beta:g}")) is not None
        }
        alive = {beta: scores for beta, scores in found.items() if scores.mean is not None}
        if not alive:
            continue
        first = next(iter(alive.values()))
        best = (max if first.task.higher_is_better else min)(
            alive.values(), key=lambda scores: scores.mean
        )
        near = [
            beta
            for beta, scores in alive.items()
            if -scores.better_than(best) <= NOISE.get(scores.task.unit, 0)
        ]
        lines.append(f"{setting}: {', '.join(f'{beta:g}' for beta in near)}")
    return f"The best beta, and those within noise of it. {'; '.join(lines)}." if lines else None


def just_momentum(study: Study) -> str | None:
    lines, same = [], []
    for setting in ("large learning rate, group norm", "batch of 256, group norm"):
        filtered, own, one, dense = (
            study.get("large", f"{setting}: {what}")
            for what in (
                "beta 1, gradients filtered",
                "beta 0.1",
                "beta 1",
                "dense, gradients filtered",
            )
        )
        if filtered is None or own is None or (better := filtered.better_than(own)) is None:
            continue
        same.append(better >= -NOISE["%"])
        lines.append(
            f"{setting}: residues filtered {own.text()}, gradients filtered {filtered.text()}, "
            f"neither {one.text()} (dense, gradients filtered: {dense.text()})"
        )
    if not lines:
        return None
    verdict = (
        "It does what a momentum on gradients would do here"
        if all(same)
        else "No"
        if not any(same)
        else "In part"
    )
    return (
        f"{verdict}. The same filter, 0.1, on residues or on every gradient before ScaleCom "
        f"with beta 1. {'. '.join(lines)}."
    )


def bounded(study: Study) -> str | None:
    from study_page import bound_of

    lines, steps = [], 0
    for label, scores in study.of("bounded"):
        recorded = [(m, g) for _, m, g in scores.results[0]["norms"] if math.isfinite(m)]
        half = len(recorded) // 2
        if not half:
            continue
        before, after = (max(m for m, _ in part) for part in (recorded[:half], recorded[half:]))
        used = max(m for m, _ in recorded) / (bound_of(scores) * max(g for _, g in recorded))
        trend = "no longer growing" if after <= 1.05 * before else "still growing"
        lines.append(
            f"{label}: {trend} (largest {before:.3g} in the first half, {after:.3g} in the "
            f"second), {100 * used:.1f} % of the bound"
        )
        steps = scores.run.steps
    return f"Over {steps} steps at a constant learning rate, {'; '.join(lines)}." if lines else None


def synchronisation(study: Study) -> str:
    hops = ", ".join(
        f"{math.ceil(math.log2(n))} hops beside {2 * (n - 1)} on {n} workers" for n in (8, 64)
    )
    answer = (
        "Offsets add an eighth to the bytes of the values' all-reduce, and their broadcast "
        f"{hops}; look-ahead hides it."
    )
    c = study.speeds.constants
    if c is None:
        return f"{answer} Times need what `make bench` measures: run it, and this study again."
    # Only what the network takes: the fitted processor times of both differ by more than the
    # broadcast costs.
    own = dataclasses.replace(
        scaling_model.own_cores(c),
        step=dict.fromkeys(c.step, 0.0),
        megabyte=dict.fromkeys(c.megabyte, 0.0),
    )
    costs = []
    for n in (8, 64, 512, 4096):
        s = scaling_model.Setting(n, 10, 150)
        exposed = scaling_model.predict("ScaleCom staggered", s, own) - scaling_model.predict(
            "ScaleCom look-ahead", s, own
        )
        costs.append(f"{exposed:.1f} ms on {n}")
    return (
        f"{answer} Exposed at 10 Gbit/s, by the model fitted to `make bench` (24.8 M "
        f"parameters): {', '.join(costs)} workers."
    )


def on_a_ring(study: Study) -> str | None:
    if not counts(study):
        return None
    rows, growth = [], {}
    for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
        sent = [
            scores.bytes / 1000
            for n in counts(study)
            if (scores := study.get("workers", f"{n}: {method}")) is not None
        ]
        rows.append(f"{method} {' / '.join(f'{kilobytes:.0f}' for kilobytes in sent)}")
        growth[method] = sent[-1] / sent[0]
    return (
        f"An all-reduce of values at shared places: from {counts(study)[0]} to {counts(study)[-1]} "
        f"workers its bytes grow {growth['ScaleCom']:.1f} times (as any all-reduce's do, by "
        f"2(n-1)/n), those of an all-gather {growth['LocalTopK']:.1f} times. kB per worker and "
        f"step on {' / '.join(map(str, counts(study)))}: {'; '.join(rows)}."
    )


def counts(study: Study) -> list[int]:
    """The numbers of workers that were tried."""
    return sorted({int(label.partition(": ")[0]) for label, _ in study.of("workers")})


def from_local_top_k(study: Study) -> str | None:
    pairs = compare(study, f"ScaleCom {RATE}x", f"LocalTopK {RATE}x")
    if not pairs:
        return None
    ratios = []
    for n in counts(study):
        local, mine = (
            study.get("workers", f"{n}: {method}") for method in ("LocalTopK", "ScaleCom")
        )
        if local is not None and mine is not None:
            ratios.append(f"{local.bytes / mine.bytes:.1f} on {n} workers")
    more = f" Bytes of local top-k for one of ScaleCom: {', '.join(ratios)}." if ratios else ""
    return (
        f"ScaleCom against local top-k at {RATE}x: {listed(pairs)}.{more} No setting has to "
        "change: beta 1 is the same error feedback."
    )


def best_by_time(study: Study) -> str | None:
    from study_page import named, reached, seconds_to

    lines = []
    for task in study.tasks:
        found = [row for row in reached(study, task) if not math.isnan(row[2])]
        if not {"dense", "ScaleCom"} <= {method for method, *_ in found}:
            continue
        parts = []
        for gbit in (1, 10):
            times = {
                method: seconds_to(study, scores, steps, spent, gbit)
                for method, scores, steps, spent in found
            }
            best = min(times, key=times.get)
            own = (
                f", ScaleCom {times['dense'] / times['ScaleCom']:.1f}" if best != "ScaleCom" else ""
            )
            parts.append(
                f"at {gbit} Gbit/s {named(best)} ({times['dense'] / times[best]:.1f} times as fast "
                f"as dense{own})"
            )
        lines.append(f"{found[0][1].task.title}: {', '.join(parts)}")
    return (
        f"{'; '.join(lines)}. Time is compute and bytes on the wire; what choosing costs the "
        "processor is left out."
        if lines
        else None
    )


def defaults(study: Study) -> str | None:
    tried = (
        "nothing sent whole",
        "no dense warm-up",
        "output layer compressed",
        "the library's defaults",
        "first layer whole too",
        "look-ahead",
        "staggered leaders",
        "float16 values",
    )
    lines = []
    for task in dict.fromkeys(label.partition(": ")[0] for label, _ in study.of("choices")):
        usual = study.get("choices", f"{task}: as recommended")
        shown = []
        for what in tried:
            scores = study.get("choices", f"{task}: {what}")
            if scores is not None and (better := scores.better_than(usual)) is not None:
                shown.append(f"{what} {change(scores, better)}")
        if shown:
            lines.append(
                f"{usual.task.title} ({usual.text()} {usual.task.unit}): {', '.join(shown)}"
            )
    return (
        "One choice at a time, against the output layer and a tenth of the steps whole; + is "
        f"better. {'. '.join(lines)}."
        if lines
        else None
    )


QUESTIONS = [
    ("Does it keep accuracy?", keeps_accuracy, "accuracy"),
    ("Could these tasks tell a poor compressor?", what_the_task_can_tell, "accuracy"),
    ("Is it better than random-k with a shared seed?", better_than_random, "accuracy"),
    ("How near is it to the true top-k?", true_top_k, "similarity"),
    ("Where does the gain taper?", taper, "accuracy"),
    ("At small batches?", small_batches, "similarity"),
    ("When workers' data is unlike?", unlike_shards, "similarity"),
    ("How alike are workers' residues?", similar, "similarity"),
    ("When does the filter rescue, and what does it cost otherwise?", rescues, "large"),
    ("How sensitive is beta, and must it change with the model?", beta_sensitivity, "large"),
    ("Is the filter just momentum?", just_momentum, "large"),
    ("Are residues bounded?", bounded, "bounded"),
    (
        "What does the additional synchronisation cost with many workers?",
        synchronisation,
        "workers",
    ),
    ("Which way of doing it on a ring is best?", on_a_ring, "workers"),
    ("What changes when I come from local top-k?", from_local_top_k, "workers"),
    ("What is soonest at a given loss?", best_by_time, "bytes"),
    ("What do the defaults rest on?", defaults, "choices"),
]
