"""What a rank's saved state is, and whether it fits.

Every framework's load_state_dict makes these checks before it changes anything. Framework-free.
Imports config and lanes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.lanes import Lanes

STATE_VERSION = 1
# Settings that may differ between a checkpoint and the run that loads it: residues mean the same.
_FREE_SETTINGS = ("planned_steps", "flush")
# What ScaleCom may change besides. Other methods and quantisers may not: they draw, or choose,
# bucket by bucket. (Where leaders are staggered, they take other turns.)
_FREE_FOR_SCALECOM = ("bucket_bytes",)
# What states of this package's methods may hold besides the config.
_METHODS_SETTINGS = ("bits", "seed", "shared", "quantiser", "decay", "average")


def check_state(state: Mapping[str, Any], config: ScaleComConfig) -> None:
    """Check that this is a state of this version and of these settings.

    Args:
        state: what state_dict() gave.
        config: the settings of who loads it.

    Raises:
        ValueError: it is not; the error names what is wrong.
    """
    missing = {"version", "step", "config", "residues"} - set(state)
    if missing:
        raise ValueError(
            f"this is no ScaleCom state: it lacks {', '.join(sorted(missing))}; pass what "
            "ScaleCom.state_dict() gave"
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"this ScaleCom state has version {state['version']}, and this release reads version "
            f"{STATE_VERSION}"
        )
    mine, theirs = config.to_dict(), dict(state["config"])
    free = set(_FREE_SETTINGS)
    if not {"method", "quantiser"} & set(state):
        free.update(_FREE_FOR_SCALECOM)
    compared = (mine.keys() | theirs.keys()) - free
    different = sorted(name for name in compared if mine.get(name) != theirs.get(name))
    if different:
        raise ValueError(
            f"the residues were made with other settings: {_listed(different, theirs, mine)}. "
            "Start ScaleCom with the settings of the state, or, to change them, go on without "
            "loading it (the residues start at zero)"
        )


def check_method(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that this is a state of one method.

    Args:
        state: what state_dict() gave.
        settings: the method's, its name among them; {} for ScaleCom, whose states name no method.

    Raises:
        ValueError: it is a state of another method, or of other settings.
    """
    mine = {"method": "ScaleCom"} | dict(settings)
    names = dict.fromkeys([*mine, *(name for name in _METHODS_SETTINGS if name in state)])
    theirs = {"method": "ScaleCom"} | {name: state[name] for name in names if name in state}
    if theirs != mine:
        raise ValueError(
            "the residues were made by another method, or otherwise: "
            f"{_listed(names, theirs, mine)}. Go on without loading them (they start at zero)"
        )


def check_local_steps(state: Mapping[str, Any], local: bool) -> None:
    """Check that a state is of local steps, or not: changes of parameters are no gradients.

    Args:
        state: what state_dict() gave.
        local: whether the optimizer that loads it takes local steps.

    Raises:
        ValueError: the state was made the other way.
    """
    if local != ("local_steps" in state):
        made, now = "gradients", "changes of parameters (local_steps)"
        do = "leave local_steps out"
        if not local:
            made, now, do = now, made, "give local_steps"
        raise ValueError(
            f"the state's residues hold {made}, and this optimizer sends {now}: {do} as then, or "
            "do not load it"
        )


def check_finite(finite: Mapping[str, bool]) -> None:
    """Check that all elements of each residue are finite.

    Args:
        finite: {name: whether they are}.

    Raises:
        ValueError: some are not; the error names the residues.
    """
    spoilt = sorted(name for name, is_finite in finite.items() if not is_finite)
    if spoilt:
        more = ", ..." if len(spoilt) > 5 else ""
        raise ValueError(
            f"the state holds residues that are not finite, of {', '.join(spoilt[:5])}{more}: no "
            "step would count any more. Load the state of an earlier step, or go on without "
            "loading it (the residues start at zero)"
        )


def norms_of(state: Mapping[str, Any]) -> list[list[float]]:
    """The norms of the last three looks in a saved state, as training_warnings.Health keeps them.

    Args:
        state: what state_dict() gave; one that was saved before norms were has none.

    Returns:
        Norms of what waited, and of gradients (2, 3); zeros where there were none.

    Raises:
        ValueError: they are damaged.
    """
    norms = np.asarray(state.get("norms", np.zeros((2, 3))), np.float64)
    if norms.shape != (2, 3) or not np.isfinite(norms).all():
        raise ValueError(
            f"the state's norms are {norms.tolist()}, not three of residues and three of "
            "gradients: it is damaged; load an older one, or delete its norms"
        )
    return [list(map(float, row)) for row in norms]


def check_residues(
    saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that saved residues are those of the model's compressed tensors.

    Args:
        saved: {name: shape} in the state.
        expected: {name: shape} in the model.

    Raises:
        ValueError: they are not; the error names what differs.
    """
    complaints = [
        f"{name} is not in this model (or is sent whole)" for name in saved.keys() - expected.keys()
    ]
    complaints += [f"{name} is not in the state" for name in expected.keys() - saved.keys()]
    complaints += [
        f"{name} has shape {tuple(saved[name])} in the state and {tuple(shape)} in the model"
        for name, shape in expected.items()
        if name in saved and tuple(saved[name]) != tuple(shape)
    ]
    if complaints:
        raise ValueError(
            "these residues belong to another model: " + "; ".join(sorted(complaints)[:5])
        )


def check_offsets(offsets: Mapping[str, NDArray[Any]], lanes: Mapping[str, Lanes]) -> None:
    """Check that look-ahead's offsets are of these tensors, and that all lie in their lanes.

    Not every kernel looks at them again. Following wrong ones would send other elements than were
    chosen, some of them twice.

    Args:
        offsets: {name: offsets (k,) of the lanes' dtype, or their bytes as uint8}.
        lanes: {name: geometry} of all compressed tensors.

    Raises:
        ValueError: they are not, or do not; the error names the tensor.
    """
    for name, given in offsets.items():
        own = lanes.get(name)
        if (
            own is None
            or given.dtype not in (np.uint8, own.offset_dtype)
            or (given.ndim, given.nbytes) != (1, own.k * own.offset_dtype.itemsize)
        ):
            raise ValueError(
                f"look-ahead's offsets of {name} belong to another model, or are damaged: load "
                "another state"
            )
        if not own.fit(given.view(own.offset_dtype)):
            raise ValueError(
                f"look-ahead's offsets of {name} are damaged: they lie outside of their lanes. "
                "Load the state of another step, or go on without loading it (residues start at "
                "zero)"
            )


def _listed(names: Iterable[str], theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={theirs.get(name)!r} in the state and {mine.get(name)!r} now" for name in names
    )
