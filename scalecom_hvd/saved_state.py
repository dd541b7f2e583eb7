"""What a rank's saved state is, and whether it fits.

Every framework's load_state_dict makes these checks before it changes anything. `state` is what
state_dict() gave. Each check raises ValueError, which names what is wrong and what to do.
Framework-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.lanes import Lanes

Saved = Mapping[str, Any]
"""What a state_dict() gives."""

STATE_VERSION = 2
WITHOUT = "go on without loading the state (the residues start at zero)"
# Settings that may differ between a checkpoint and the run that loads it: residues mean the same.
# Settings of earlier versions, which do not matter either.
_GONE = ("step_ahead", "wire_dtype", "warmup_rate", "max_norm")
_FREE_SETTINGS = ("warmup_steps", *_GONE, "total_steps", "flush", "nu", "outliers")
# Settings that may also differ for ScaleCom. They may not for other methods, which draw, or choose,
# bucket by bucket. (If leaders are staggered, they take other turns.)
_FREE_FOR_SCALECOM = ("bucket_bytes", "rate", "bits")
# What lanes depend on, besides `rates`.
_OF_LANES = ("warmup_steps", "rate", "bits")


def check_state(
    state: Mapping[str, Any], config: ScaleComConfig, settings: Mapping[str, Any]
) -> None:
    """Check that a state is of the method, settings and config of the run that loads it."""
    missing = {"version", "step", "config", "residues", "settings"} - set(state)
    if state.get("version", STATE_VERSION) != STATE_VERSION:
        raise ValueError(
            f"this ScaleCom state has version {state['version']}, but this release reads only "
            f"version {STATE_VERSION}. Load it with the release that saved it (version 1: 0.2.0), "
            f"or {WITHOUT}"
        )
    if missing:
        raise ValueError(
            f"this is not a ScaleCom state: it lacks {', '.join(sorted(missing))}. Pass what "
            "ScaleCom.state_dict() gave"
        )
    theirs = state["settings"]
    if theirs != settings:
        names = dict.fromkeys([*settings, *theirs])
        others = [name for name in names if theirs.get(name) != settings.get(name)]
        raise ValueError(
            "the residues were made by another method, or with other settings of the method: "
            f"{_listed(others, theirs, settings)}. Give the method and settings of the state, or "
            f"{WITHOUT}"
        )
    mine, saved = config.to_dict(), state["config"]
    is_scalecom = settings == {"method": "ScaleCom"}
    sends_all = config.has_fixed_rate and {mine["rate"], *dict(mine["rates"] or ()).values()} == {1}
    if sends_all and state["residues"] and is_scalecom:
        raise ValueError(
            "with rate=1 there are no residues, so what those of the state hold would be lost. To "
            "send them, too, give this package's PyTorch optimizers and hook a schedule that ends "
            f"with 1: rate={{0: 8, {max(state['step'], 1)}: 1}}, bits=32. Or {WITHOUT}"
        )
    free = {*_FREE_SETTINGS, *(_FREE_FOR_SCALECOM if is_scalecom else ())}
    compared = (mine.keys() | saved.keys()) - free
    different = sorted(name for name in compared if mine.get(name) != saved.get(name))
    if different:
        raise ValueError(
            f"the residues were made with other settings: {_listed(different, saved, mine)}. Give "
            f"the settings of the state, or, to change settings, {WITHOUT}"
        )


def without_choice(state: Saved, config: ScaleComConfig) -> dict[str, Any]:
    """The state. If lanes may differ in this run, look-ahead's choice is left out."""
    mine, saved = config.to_dict(), state["config"]
    if all(mine[name] == saved.get(name, mine[name]) for name in _OF_LANES):
        return dict(state)
    kept = {key: value for key, value in state.items() if key != "offsets"}
    if "method_state" in state:
        tensors = {k: v for k, v in state["method_state"]["tensors"].items() if k != "scales"}
        kept["method_state"] = {**state["method_state"], "tensors": tensors}
    return kept


def check_shard(state: Mapping[str, Any], shard: tuple[int, int]) -> None:
    """Check that residues are of this rank's part of each tensor: (its number, of how many)."""
    saved = tuple(state.get("shard", (0, 1)))
    if saved != shard and state["residues"]:
        raise ValueError(
            f"the state's residues are of shard {saved[0]} of {saved[1]} of each tensor, but this "
            f"rank holds shard {shard[0]} of {shard[1]}. Give every rank the state that it saved, "
            "with as many ranks in each node as the saved run had, or load no state on any rank "
            "(the residues start at zero)"
        )


def check_local_steps(state: Mapping[str, Any], *, local: bool) -> None:
    """Check that a state is one of local steps, or not: changes of parameters are not gradients."""
    if local != ("local_steps" in state):
        kinds = "gradients", "changes of parameters (local_steps)"
        made, now = kinds if local else kinds[::-1]
        do = "leave local_steps out" if local else "give local_steps"
        raise ValueError(
            f"the state's residues hold {made}, but this optimizer sends {now}: {do} as the saved "
            "run did, or do not load the state"
        )


Shapes = Mapping[str, tuple[int, ...]]


def check_rounds(state: Mapping[str, Any], common: Shapes, own: Shapes) -> None:
    """Check that a state of LocalSteps belongs to what is averaged, and what the rank has."""
    if ("common" in state) != ("local" in state):
        raise ValueError(
            "the state's local steps follow another kind of schedule: give the same local_steps, "
            "or go on without loading the state"
        )
    for part in ("common", "local", "sent_from", "averages"):
        saved = {name: tuple(tensor.shape) for name, tensor in (state.get(part) or {}).items()}
        shapes = own if part == "local" else common
        # If there are several fragments, these are of one.
        some = saved.keys() if part in ("sent_from", "averages") or not saved else shapes
        if saved != {name: shapes.get(name) for name in some}:
            raise ValueError(f"the state's local steps ({part}) belong to another model")


def check_finite(finite: Mapping[str, bool]) -> None:
    """Check that all elements of each residue are finite, from {name: whether they are}."""
    spoilt = sorted(name for name, is_finite in finite.items() if not is_finite)
    if spoilt:
        more = ", ..." if len(spoilt) > 5 else ""
        raise ValueError(
            f"the state's residues of {', '.join(spoilt[:5])}{more} are not finite, so every "
            f"further step would be skipped. Load the state of an earlier step, or {WITHOUT}"
        )


def norms_of(state: Mapping[str, Any]) -> list[list[float]]:
    """The norms of the last three looks in a saved state, as training_warnings.Health keeps them.

    They are (2, 3), of what waited and of gradients; zeros if there were none, or a user deleted
    them.
    """
    norms = np.asarray(state.get("norms", np.zeros((2, 3))), np.float64)
    if norms.shape != (2, 3) or not np.isfinite(norms).all():
        raise ValueError(
            f"the state is damaged: its norms are {norms.tolist()}, not three of residues and "
            "three of gradients. Load an older state, or delete the norms from this one"
        )
    return [list(map(float, row)) for row in norms]


def check_residues(
    saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that saved residues, {name: shape}, are those of the model's compressed tensors."""
    complaints = []
    for name in saved.keys() | expected.keys():
        theirs, mine = saved.get(name), expected.get(name)
        if mine is None:
            complaints.append(f"{name} is not in this model (or is sent uncompressed)")
        elif theirs is None:
            complaints.append(f"{name} is not in the state")
        elif tuple(theirs) != tuple(mine):
            shapes = f"{tuple(theirs)} in the state and {tuple(mine)} in the model"
            complaints.append(f"{name} has shape {shapes}")
    if complaints:
        raise ValueError(
            "these residues belong to another model: " + "; ".join(sorted(complaints)[:5])
        )


def check_offsets(offsets: Mapping[str, NDArray[Any]], lanes: Mapping[str, Lanes]) -> None:
    """Check that look-ahead's offsets are of these tensors, and that all lie in their lanes.

    Not every kernel checks them again. With wrong offsets, other elements than the chosen ones
    would be sent, some of them twice.

    Args:
        offsets: {name: offsets (k,) of the lanes' dtype; (0,) if each lane has one element}.
        lanes: {name: geometry} of all compressed tensors.
    """
    for name, given in offsets.items():
        own = lanes.get(name)
        shape = (own.k * bool(own.offset_width) if own else 0,)
        if own is None or (given.dtype, given.shape) != (own.offset_dtype, shape):
            raise ValueError(
                f"look-ahead's offsets of {name} belong to another model, or are damaged. Load "
                "another state"
            )
        if not own.fit(given):
            raise ValueError(
                f"look-ahead's offsets of {name} are damaged: they lie outside of their lanes. "
                f"Load the state of another step, or {WITHOUT}"
            )


def check_scales(scales: Mapping[str, NDArray[Any]], blocks: Mapping[str, int]) -> None:
    """Check that the scales (blocks,) that come with look-ahead's offsets are of these tensors.

    blocks: {name: how many blocks of values a compressed tensor has}.
    """
    for name, given in scales.items():
        if given.shape != (blocks.get(name),) or not (np.isfinite(given) & (given >= 0)).all():
            raise ValueError(
                f"look-ahead's scales of {name} belong to another model, or are damaged. Load "
                "another state"
            )


def _listed(names: Iterable[str], theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={theirs.get(name)!r} in the state and {mine.get(name)!r} now" for name in names
    )
