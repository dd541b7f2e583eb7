"""The questions that the method's reviewers asked, and how each is answered: two lines that follow from the runs' numbers.

An answer is a function of the Study; it gives None where its experiment was not run. Sentences are chosen by the numbers in them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import scaling_model
from study_questions import BETAS, RATE

if TYPE_CHECKING:
    from study_page import Scores, Study

# Differences below this are no difference: of accuracy in percentage points, and of bits per character.
NOTHING = {"%": 0.3, "bits": 0.02}


def amount(scores: Scores, worse: float) -> str:
    """A loss, in words."""
    unit = "points" if scores.task.unit == "%" else scores.task.unit
    if abs(worse) < NOTHING.get(scores.task.unit, 0):
        return f"no more than noise ({-worse if scores.task.higher_is_better else worse:+.{scores.task.digits}f} {unit})"
    return f"{abs(worse):.{scores.task.digits}f} {unit} {'worse' if worse > 0 else 'better'}"


def compare(study: Study, one: str, other: str) -> list[tuple[Scores, float | None]]:
    """For every task: the scores of a method of experiment 1, and by how much they are worse than those of another."""
    found = []
    for task in study.tasks:
        mine, theirs = study.get("accuracy", f"{task}: {one}"), study.get("accuracy", f"{task}: {other}")
        if mine is not None and theirs is not None:
            found.append((mine, mine.loss_from(theirs)))
    return found


def listed(found: list[tuple[Scores, float | None]]) -> str:
    return "; ".join(f"{scores.task.title}: {'came apart' if worse is None else amount(scores, worse)}" for scores, worse in found)


def keeps_accuracy(study: Study) -> str | None:
    found = compare(study, f"ScaleCom {RATE}x", "dense")
    if not found:
        return None
    sends = ", ".join(f"{scores.task.title} {scores.run.steps / RATE:.1f}" for scores, _ in found)
    return (
        f"At {RATE}x, against dense: {listed(found)}. A coordinate is sent steps / rate times on average ({sends}): longer runs lose less."
    )


def what_the_task_can_tell(study: Study) -> str | None:
    controls = ("residues thrown away", "compressed tensors frozen")
    found = [f"{control}: {listed(pairs)}" for control in controls if (pairs := compare(study, control, "dense"))]
    return f"Controls against dense. {'. '.join(found)}." if found else None


def better_than_random(study: Study) -> str | None:
    pairs = [pair for rate in study.rates for pair in compare(study, f"ScaleCom {rate}x", f"RandomK {rate}x")]
    if not pairs:
        return None
    alive = [(scores, worse) for scores, worse in pairs if worse is not None]
    wins = sum(worse < -NOTHING.get(scores.task.unit, 0) for scores, worse in alive)
    losses = sum(worse > NOTHING.get(scores.task.unit, 0) for scores, worse in alive)
    verdict = "Yes" if wins > 2 * losses else "No" if losses > wins else "Not always"
    at = compare(study, f"ScaleCom {RATE}x", f"RandomK {RATE}x")
    return f"{verdict}: in {wins} of {len(pairs)} comparisons (tasks times rates) better, in {losses} worse. At {RATE}x, {listed(at)}."


def small_batches(study: Study) -> str | None:
    lines = []
    for setting in ("batch of 2", "batch of 16"):
        dense, mine, random, local = (study.get("similarity", f"{setting}: {m}") for m in ("dense", "ScaleCom", "RandomK", "LocalTopK"))
        if dense is None or mine is None or mine.mean is None or dense.mean is None:
            return None
        distance = mine.typical("distance_to_top_k")
        lines.append(
            f"{setting} per worker: dense {dense.text()}, ScaleCom {mine.text()}, local top-k {local.text()}, random-k {random.text()}; "
            f"{100 * distance:.0f} % of the leader's choice is outside of the true top-k"
        )
    return ". ".join(lines) + "."


def unlike_shards(study: Study) -> str | None:
    usual, unlike = study.get("similarity", "batch of 16: ScaleCom"), study.get("similarity", "unlike shards: ScaleCom")
    dense, local, random = (study.get("similarity", f"unlike shards: {m}") for m in ("dense", "LocalTopK", "RandomK"))
    if unlike is None or dense is None:
        return None
    distances = [f"{100 * s.typical('distance_to_top_k'):.0f} %" for s in (usual, unlike)]
    worse = unlike.loss_from(dense)
    verdict = "it came apart" if worse is None else f"it is {amount(unlike, worse)} than dense"
    return (
        f"Every worker with labels of its own: dense {dense.text()}, ScaleCom {unlike.text()}, local top-k {local.text()}, random-k "
        f"{random.text()}: {verdict}. The leader's choice misses {distances[1]} of the true top-k, with alike shards {distances[0]}."
    )


def taper(study: Study) -> str | None:
    lines = []
    for task in study.tasks:
        dense, shown = study.get("accuracy", f"{task}: dense"), []
        for rate in study.rates:
            scores = study.get("accuracy", f"{task}: ScaleCom {rate}x")
            if scores is not None:
                worse = scores.loss_from(dense)
                change = "came apart" if worse is None else signed_loss(scores, worse)
                shown.append(f"{rate}x {change} for {dense.bytes / scores.bytes:.0f} times fewer bytes")
        if shown:
            lines.append(f"{dense.task.title}: {', '.join(shown)}")
    return (
        f"Change against dense, by rate. {'; '.join(lines)}. In models this small, what is sent whole limits the bytes." if lines else None
    )


def signed_loss(scores: Scores, worse: float) -> str:
    return f"{-worse if scores.task.higher_is_better else worse:+.{scores.task.digits}f}"


def synchronisation(study: Study) -> str:
    hops = ", ".join(f"{math.ceil(math.log2(n))} hops beside {2 * (n - 1)} on {n} workers" for n in (8, 64))
    answer = f"Offsets add an eighth to the bytes of the values' all-reduce, and their broadcast {hops}; look-ahead hides it."
    c = study.speeds.constants
    if c is None:
        return f"{answer} Times need what `make bench` measures: run it, and this study again."
    own, lines = scaling_model.own_cores(c), []
    for n in (8, 64, 512):
        s = scaling_model.Setting(n, 10, 150)
        cost = scaling_model.predict("ScaleCom staggered", s, own) - scaling_model.predict("ScaleCom look-ahead", s, own)
        lines.append(f"{cost:.1f} ms on {n}")
    return f"{answer} By the model fitted to `make bench`, at 10 Gbit/s it costs {', '.join(lines)} workers."


def beta_sensitivity(study: Study) -> str | None:
    lines = []
    settings = list(dict.fromkeys(label.rpartition(": ")[0] for label, _ in study.of("large")))
    for setting in settings:
        found = {beta: study.get("large", f"{setting}: beta {beta:g}") for beta in BETAS}
        found = {beta: s for beta, s in found.items() if s is not None}
        alive = {beta: s for beta, s in found.items() if s.mean is not None and not s.diverged}
        if not alive:
            continue
        best = min(alive, key=lambda beta: -alive[beta].mean if alive[beta].task.higher_is_better else alive[beta].mean)
        others = ", ".join(f"{beta:g}: {s.text()}" for beta, s in found.items())
        lines.append(f"{setting}: best {best:g} ({others})")
    return f"{'. '.join(lines)}." if lines else None


def rescues(study: Study) -> str | None:
    lines = []
    for setting in ("large learning rate, group norm", "batch of 256, group norm", "large learning rate, batch norm", "standard"):
        dense, one, tenth = (study.get("large", f"{setting}: {what}") for what in ("dense", "beta 1", "beta 0.1"))
        if dense is not None and one is not None and tenth is not None:
            lines.append(f"{setting}: dense {dense.text()}, beta 1 {one.text()}, beta 0.1 {tenth.text()}")
    return f"{'. '.join(lines)}." if lines else None


def just_momentum(study: Study) -> str | None:
    lines = []
    for setting in ("large learning rate, group norm", "batch of 256, group norm"):
        dense = study.get("large", f"{setting}: dense")
        filtered = [(beta, s) for beta in (0.3, 0.1) if (s := study.get("large", f"{setting}: dense, filtered by {beta:g}"))]
        if dense is not None and filtered:
            shown = ", ".join(f"by {beta:g} {s.text()}" for beta, s in filtered)
            lines.append(f"{setting}: dense {dense.text()}, dense with every gradient through the same filter {shown}")
    if not lines:
        return None
    return (
        f"No: at rate 1 nothing stays in a residue, so the filter does nothing there. Applied to dense gradients, where it is a momentum: "
        f"{'. '.join(lines)}."
    )


def bounded(study: Study) -> str | None:
    from study_page import bound_of

    lines = []
    for label, scores in study.of("bounded"):
        recorded = scores.results[0]["norms"]
        half = len(recorded) // 2
        largest = max(g for *_, g in recorded)
        before, after = (max(m for _, m, _ in part) for part in (recorded[:half], recorded[half:]))
        used = max(m for _, m, _ in recorded) / (bound_of(scores) * largest)
        trend = (
            "no longer growing" if after <= 1.05 * before else f"still growing ({before:.3g} in the first half, {after:.3g} in the second)"
        )
        lines.append(f"{label}: {trend}, at most {100 * used:.1f} % of the bound")
    steps = study.of("bounded")[0][1].run.steps if lines else 0
    return f"Over {steps} steps at a constant learning rate, {'; '.join(lines)}." if lines else None


def from_local_top_k(study: Study) -> str | None:
    pairs = compare(study, f"ScaleCom {RATE}x", f"LocalTopK {RATE}x")
    if not pairs:
        return None
    grown = []
    for n in counts(study):
        local, mine = (study.get("workers", f"{n}: {method}") for method in ("LocalTopK", "ScaleCom"))
        if local is not None and mine is not None:
            grown.append(f"{local.bytes / mine.bytes:.1f} times on {n} workers")
    more = f" Local top-k sends more: {', '.join(grown)}." if grown else ""
    return f"ScaleCom against local top-k at {RATE}x: {listed(pairs)}.{more} No setting has to change: beta 1 is the same error feedback."


def on_a_ring(study: Study) -> str | None:
    if not counts(study):
        return None
    rows = []
    for method in ("dense", "ScaleCom", "LocalTopK", "RandomK"):
        sent = [study.get("workers", f"{n}: {method}") for n in counts(study)]
        rows.append(f"{method} {' / '.join(f'{scores.bytes / 1000:.0f}' for scores in sent if scores is not None)}")
    return (
        "One all-reduce of the values at shared places, whose bytes do not grow with n: kB per worker and step on "
        f"{' / '.join(map(str, counts(study)))} workers: {'; '.join(rows)}. Random-k needs no offsets, at the price in accuracy above."
    )


def counts(study: Study) -> list[int]:
    """The numbers of workers that were tried."""
    return sorted({int(label.partition(": ")[0]) for label, _ in study.of("workers")})


def true_top_k(study: Study) -> str | None:
    pairs = compare(study, f"ScaleCom {RATE}x", f"GlobalTopK {RATE}x")
    if not pairs:
        return None
    distances = [
        f"{label.partition(':')[0]} {100 * s.typical('distance_to_top_k'):.0f} %, with {100 * s.typical('contraction_top_k'):.0f} % of the "
        f"average's energy left by the true top-k and {100 * s.typical('contraction'):.0f} % by the leader's"
        for label, s in study.of("similarity")
        if label.endswith("beta 1") and s.typical("distance_to_top_k") is not None
    ]
    seen = f" Of the leader's choice, outside of the true top-k: {'; '.join(distances)}." if distances else ""
    return f"ScaleCom against the oracle at {RATE}x: {listed(pairs)}.{seen}"


def best_by_time(study: Study) -> str | None:
    from study_page import named, reached, seconds_to

    lines = []
    for task in study.tasks:
        found = [row for row in reached(study, task) if not math.isnan(row[2])]
        if not {"dense", "ScaleCom"} <= {method for method, *_ in found}:
            continue
        parts = []
        for gbit in (1, 10):
            times = {method: seconds_to(study, method, scores, steps, spent, gbit) for method, scores, steps, spent in found}
            best = min(times, key=times.get)
            own = f", ScaleCom {times['dense'] / times['ScaleCom']:.1f}" if best != "ScaleCom" else ""
            parts.append(f"at {gbit} Gbit/s {named(best)} ({times['dense'] / times[best]:.1f} times as fast as dense{own})")
        lines.append(f"{found[0][1].task.title}: {', '.join(parts)}")
    return f"{'; '.join(lines)}." if lines else None


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
            if scores is not None and (worse := scores.loss_from(usual)) is not None:
                shown.append(f"{what} {signed_loss(scores, worse)}")
        if shown:
            lines.append(f"{usual.task.title} ({usual.text()} {usual.task.unit}): {', '.join(shown)}")
    return f"One choice at a time, against what is recommended. {'. '.join(lines)}." if lines else None


def similar(study: Study) -> str | None:
    found = [
        f"{label.replace(': ', ', ')} {s.typical('residue_distance'):.2f}"
        for label, s in study.of("similarity")
        if s.typical("residue_distance") is not None and ": beta" in label
    ]
    return (
        f"Mean cosine distance of residues over the second half: {'; '.join(found)}. 0 is the same direction, 1 is none in common."
        if found
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
    ("What does the additional synchronisation cost with many workers?", synchronisation, "workers"),
    ("Which way of doing it on a ring is best?", on_a_ring, "workers"),
    ("What changes when I come from local top-k?", from_local_top_k, "workers"),
    ("What is soonest at a given loss?", best_by_time, "bytes"),
    ("What do the defaults rest on?", defaults, "choices"),
]
