"""What ranks must have in common, and what cannot be asked of ScaleCom at all.

Ranks compare what they were started with once, before a difference could make them hang or diverge.
Framework-free: the caller gathers every rank's plain description and passes the list in. All ranks
see the same list, so either all raise or none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from scalecom_hvd import __version__

log = logging.getLogger("scalecom_hvd")

JOIN_REFUSED = (
    "hvd.join() cannot be used with ScaleCom: a rank that joined cannot take part in the leader's "
    "broadcast. Give every rank the same number of steps instead (drop_last=True with a "
    "DistributedSampler, or cut the longer ranks short), or train the uneven part with "
    "compression=hvd.Compression.none"
)
# The collective by which ranks first meet in step(), whether they average gradients or take local
# steps. With two names, ranks that were started differently would wait for each other forever.
FIRST_MEETING = "agreement.first"

Settings = dict[str, Any]
"""{name: JSON value} that ranks compare."""


class Numbers:
    """Counts the exchanges that one process has named."""

    def __init__(self) -> None:
        self._next = 0

    def claim(self) -> int:
        """A number that this process has not used."""
        self._next += 1
        return self._next - 1

    def use(self, number: int) -> None:
        """Note that every rank uses this number: from now on, only larger ones are claimed."""
        self._next = max(self._next, number + 1)


# This process's exchanges, of all frameworks.
NUMBERS = Numbers()


class Names:
    """The names of one exchange's collectives. They carry its number, so no two exchanges collide.

    Each rank claims one of its process's `numbers`. All ranks agree on the largest, and use it.
    """

    def __init__(self, numbers: Numbers = NUMBERS) -> None:
        self.numbers = numbers
        self.number = 0

    def __call__(self, name: str) -> str:
        """The full name of a collective of this exchange."""
        return f"scalecom.{name}" if self.number == 0 else f"scalecom.{self.number}.{name}"

    def use(self, number: int) -> None:
        """Take this number, on which all ranks agreed."""
        self.numbers.use(number)
        self.number = number


def is_elastic() -> bool:
    """Whether ranks may come and go: as in Horovod, whether HOROVOD_ELASTIC is a number but 0."""
    value = os.environ.get("HOROVOD_ELASTIC", "0")
    return value.isdecimal() and int(value) != 0


def check_arguments(optimizer: object, has: str, framework: str, compression: object) -> None:
    """Raise TypeError for wrong arguments of a DistributedOptimizer, on one rank as on many.

    Horovod notices wrong ones when it sends the first gradient, which a single process never does.
    has: an attribute of the framework's optimizers.
    """
    if not hasattr(optimizer, has):
        kind = type(optimizer)
        raise TypeError(
            f"this DistributedOptimizer wraps optimizers of {framework}, not "
            f"{kind.__module__}.{kind.__qualname__}: import hvd from scalecom_hvd.torch for "
            "PyTorch, and from scalecom_hvd.tensorflow.keras for Keras"
        )
    check_compression(compression)


def check_compression(compression: object) -> None:
    """Raise TypeError for anything but a method or a compressor, for example for "scalecom"."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            "compression must be hvd.ScaleCom, hvd.ScaleCom(rate=...), or one of Horovod's "
            f"compressors, such as hvd.Compression.none, not {compression!r}"
        )


def check_operation(op: object, predivide: float, horovod: ModuleType) -> None:
    """Raise ValueError unless ScaleCom can do what an optimizer is asked to do.

    op, predivide: Horovod's Average, Sum or Adasum, and gradient_predivide_factor.
    """
    if op == horovod.Adasum:
        raise ValueError(
            "ScaleCom averages values, but Adasum does not. Use op=hvd.Average (the default), or "
            "Adasum without compression"
        )
    if op not in (horovod.Average, horovod.Sum):
        raise ValueError(
            "ScaleCom works with op=hvd.Average and op=hvd.Sum only. Any other operation needs all "
            "values, so use it without compression"
        )
    if predivide != 1.0 and op != horovod.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


def digest_of(offsets: Mapping[str, NDArray[Any]]) -> str | None:
    """A digest of arrays and their names, for ranks to compare. None if there are no arrays."""
    if not offsets:
        return None
    digest = hashlib.sha256()
    for name in sorted(offsets):
        digest.update(name.encode())
        digest.update(offsets[name].tobytes())
    return digest.hexdigest()


def describe(
    config: Mapping[str, Any], settings: Mapping[str, Any], tensors: Mapping[str, Sequence[Any]]
) -> Settings:
    """What every rank must have in common with all others: {topic: what to compare}, for JSON."""
    return {
        "version": __version__,
        # The first difference is told, so the method comes before what follows from it.
        "settings": {**settings, **config, **settings},
        "tensors": {name: list(tensors[name]) for name in sorted(tensors)},
    }


def agree(everyone: Sequence[Mapping[str, Any]], topics: Sequence[str], names: Names) -> int:
    """The step at which all ranks go on, which have described the same exchange. Names it, too.

    Args:
        everyone: every rank's description: the topics, its "name" (a number that it claimed) and
            its "step".
        topics: keys that must be equal on all ranks. If not, all raise RuntimeError alike.
        names: of this exchange. They take a number that is new to all ranks.
    """
    compare_ranks(everyone, topics)
    names.use(max(theirs["name"] for theirs in everyone))
    return latest_step([theirs["step"] for theirs in everyone])


def latest_step(steps: Sequence[int]) -> int:
    """The step at which all ranks go on: the latest. Logs a warning if ranks' steps differ."""
    if len(set(steps)) > 1:
        log.warning(
            "ranks come from different steps %s: going on at step %d. New ranks start with zero "
            "residues, and the others keep the residues of their own step. Model and optimizer "
            "must be the same on all ranks: broadcast them, or load the same on every rank",
            steps,
            max(steps),
        )
    return max(steps)


def compare_ranks(per_rank: Sequence[Mapping[str, Any]], topics: Sequence[str]) -> None:
    """Raise RuntimeError, with the first difference to rank 0, unless some topics are equal."""
    for topic in topics:
        first, *others = (description[topic] for description in per_rank)
        for rank, other in enumerate(others, 1):
            if other != first:
                advice = _NUMBERED if _numbered_otherwise(first, other) else _ALIKE
                raise RuntimeError(
                    f"ScaleCom's {topic} differ between ranks, so training would hang or diverge: "
                    f"{_difference(first, other, rank)}. {advice}"
                )


def check_residues_of(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise RuntimeError if two ranks have loaded the residues of the same rank."""
    taken: dict[tuple[int, ...], int] = {}
    for rank, other in enumerate(everyone):
        # Of how many ranks, and of which one, it has loaded residues. JSON has no tuples.
        of = tuple(other["residues_of"] or ())
        if of and of in taken:
            raise RuntimeError(
                f"ranks {taken[of]} and {rank} have both loaded the residues of rank {of[1]}, so "
                "these residues would be sent twice. Every rank has its own residues: save one "
                "file on every rank, and load a different file on each. To begin with empty "
                "residues, load no file"
            )
        taken[of] = rank


_ALIKE = (
    "Start every rank with the same model, arguments, SCALECOM_ environment and scalecom_hvd "
    "version"
)
_NUMBERED = (
    "Keras numbers unnamed layers by how many the process has made before, and this count differs "
    'between ranks. Give the layers names (tf.keras.layers.Dense(10, name="head")), or make the '
    "same models in the same order on every rank, or call tf.keras.backend.clear_session() on "
    "every rank before you make the model"
)


def _numbered_otherwise(first: object, other: object) -> bool:
    """Whether these are tensors whose names differ only in the numbers of Keras' layers."""
    if not (isinstance(first, dict) and isinstance(other, dict)) or first.keys() == other.keys():
        return False
    plain = [sorted(re.sub(r"_\d+/", "/", name) for name in names) for names in (first, other)]
    return plain[0] == plain[1]


def _difference(first: object, other: object, rank: int) -> str:
    if isinstance(first, dict) and isinstance(other, dict):
        # A key that only one rank has comes at its place there: local_steps before its beta.
        place: dict[object, int] = {}
        for number, key in (*enumerate(first), *enumerate(other)):
            place.setdefault(key, number)
        for key in sorted(place, key=lambda key: (place[key], key in first and key in other)):
            mine, theirs = first.get(key, "missing"), other.get(key, "missing")
            if (key in first) != (key in other) or mine != theirs:
                return f"{key} is {mine} on rank 0 and {theirs} on rank {rank}"
    return f"{first} on rank 0 and {other} on rank {rank}"
