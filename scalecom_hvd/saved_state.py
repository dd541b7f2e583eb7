"""What a rank's saved state is, and whether it fits: the checks that every framework's load_state_dict makes before it changes anything.

Framework-free. Imports config and lanes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.lanes import Lanes

STATE_VERSION = 1
# Settings that may differ between a checkpoint and the run that loads it: they change no result.
_FREE_SETTINGS = ("planned_steps",)
# And what ScaleCom may change besides, but not other methods or quantisers, which draw, or choose, bucket by bucket. (Where leaders are
# staggered, they take other turns.)
_FREE_FOR_SCALECOM = ("bucket_bytes",)
# What states of this package's methods may hold beside the config.
_METHODS_SETTINGS = ("bits", "seed", "shared", "quantiser")


def check_state(state: Mapping[str, Any], config: ScaleComConfig) -> None:
    """Raise ValueError that names what is wrong, unless this is a state of this version and of these settings."""
    missing = {"version", "step", "config", "residues"} - set(state)
    if missing:
        raise ValueError(f"this is no ScaleCom state: it lacks {', '.join(sorted(missing))}; pass what ScaleCom.state_dict() gave")
    if state["version"] != STATE_VERSION:
        raise ValueError(f"this ScaleCom state has version {state['version']}, and this release reads version {STATE_VERSION}")
    mine, theirs = config.to_dict(), dict(state["config"])
    free = _FREE_SETTINGS if {"method", "quantiser"} & set(state) else _FREE_SETTINGS + _FREE_FOR_SCALECOM
    different = [key for key in mine.keys() | theirs.keys() if key not in free and mine.get(key) != theirs.get(key)]
    if different:
        listed = ", ".join(f"{key}={theirs.get(key)!r} in the state and {mine.get(key)!r} now" for key in sorted(different))
        raise ValueError(
            f"the residues were made with other settings: {listed}. Start ScaleCom with the settings of the state, or, to change them, "
            "go on without loading it (the residues start at zero)"
        )


def check_method(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless the state is one of the method with these settings ({} is ScaleCom, whose states name no method)."""
    mine = {"method": "ScaleCom"} | dict(settings)
    names = dict.fromkeys([*mine, *(name for name in _METHODS_SETTINGS if name in state)])
    theirs = {"method": "ScaleCom"} | {name: state[name] for name in names if name in state}
    if theirs != mine:
        listed = ", ".join(f"{name}={theirs.get(name)!r} in the state and {mine.get(name)!r} now" for name in names)
        raise ValueError(
            f"the residues were made by another method, or otherwise: {listed}. Go on without loading them (they start at zero)"
        )


def check_local_steps(state: Mapping[str, Any], local: bool) -> None:
    """Raise ValueError for a state of local steps where there are none, or the other way round: changes of parameters are no gradients."""
    if local != ("local_steps" in state):
        made, now = ("gradients", "changes of parameters (local_steps)")[:: 1 if local else -1]
        raise ValueError(f"the state's residues hold {made}, and this optimizer sends {now}: give local_steps as then, or do not load it")


def check_finite(finite: Mapping[str, bool]) -> None:
    """Raise ValueError that names the residues, unless all elements of each are finite."""
    spoilt = sorted(name for name, is_finite in finite.items() if not is_finite)
    if spoilt:
        raise ValueError(
            f"the state holds residues that are not finite, of {', '.join(spoilt[:5])}{', ...' if len(spoilt) > 5 else ''}: no step would "
            "count any more. Load the state of an earlier step, or go on without loading it (the residues start at zero)"
        )


def check_residues(saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError that names what differs between the shapes of saved residues and those of the model's compressed tensors."""
    complaints = [f"{name} is not in this model (or is sent whole)" for name in saved.keys() - expected.keys()]
    complaints += [f"{name} is not in the state" for name in expected.keys() - saved.keys()]
    complaints += [
        f"{name} has shape {tuple(saved[name])} in the state and {tuple(shape)} in the model"
        for name, shape in expected.items()
        if name in saved and tuple(saved[name]) != tuple(shape)
    ]
    if complaints:
        raise ValueError("these residues belong to another model: " + "; ".join(sorted(complaints)[:5]))


def check_offsets(offsets: Mapping[str, np.ndarray], lanes: Mapping[str, Lanes]) -> None:
    """Raise ValueError that names the tensor, unless look-ahead's offsets are of these tensors and all lie in their lanes.

    They are of the lanes' dtype, or its bytes. Not every kernel looks at them again, and following wrong ones would send other elements
    than were chosen, some of them twice.
    """
    for name, given in offsets.items():
        own = lanes.get(name)
        fits = own is not None and given.dtype in (np.uint8, own.offset_dtype)
        if not fits or (given.ndim, given.nbytes) != (1, own.k * own.offset_dtype.itemsize):
            raise ValueError(f"look-ahead's offsets of {name} belong to another model, or are damaged: load another state")
        if not own.fit(given.view(own.offset_dtype)):
            raise ValueError(
                f"look-ahead's offsets of {name} are damaged: they lie outside of their lanes. Load the state of another step, or go on "
                "without loading it (residues start at zero)"
            )
