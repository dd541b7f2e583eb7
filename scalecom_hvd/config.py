"""ScaleComConfig: every hyper-parameter, validated once, and the policy that says which tensor is compressed at which rate.

Framework-free and immutable; compressors of every framework, the reference and the command line read the same object.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ENVIRONMENT_PREFIX = "SCALECOM_"
# Environment variables with the prefix that are not fields: they choose how the library runs, not what it computes.
OTHER_VARIABLES = ("SCALECOM_KERNEL",)


@dataclass(frozen=True, eq=False)
class ScaleComConfig:
    """The hyper-parameters of ScaleCom (Chen et al., NeurIPS 2020). Raises ValueError or TypeError for what cannot work."""

    # N/k: one element in `rate` is sent. Higher: less traffic, and each coordinate is sent more rarely (steps / rate times).
    rate: float = 100
    # The low-pass filter on the residue (eq. 5), 0 < beta <= 1. 1: classic error feedback. Lower: stabler with large batches
    # and large learning rates, but what was not sent arrives later, over about rate / beta steps.
    beta: float = 1.0
    # Tensors with fewer elements are sent whole: biases and norms cost nothing and matter much.
    min_numel: int = 2048
    # Globs on parameter names sent whole; "auto:first" and "auto:output" stand for the first and the last layer. A model with tied
    # weights does not list its output layer last, so there name it: dense=["embedding.*"]. A model of one layer has neither.
    # By default the output layer, which costs little and matters most (make study); where it is large, see what the log says.
    dense: tuple[str, ...] = ("auto:output",)
    # {glob on the parameter's name: rate}, first match wins; others get `rate`. What `dense` names is sent whole all the same.
    rates: Mapping[str, float] | None = None
    # That many first steps are sent whole. A tenth to a fifth of a short run prevents most accuracy loss (make study).
    warmup_steps: int = 100
    # "lanes": the largest element of each lane (fast). "exact": the true top-k (slow; for studies).
    selection: str = "lanes"
    # "cyclic": one leader for all buckets, t mod n. "staggered": (t + b) mod n for bucket b, so all ranks share the selecting.
    leader: str = "cyclic"
    # The leader chooses for step t+1 at the end of step t: the broadcast hides behind forward and backward.
    lookahead: bool = False
    # "float16": values are summed in half the bytes; their rounding error stays in the residue, that of the sum (2**-11) is lost.
    # None: as the residue.
    wire_dtype: str | None = None
    # Gradient bytes per bucket: more buckets overlap better with backward, fewer cost fewer negotiations.
    bucket_bytes: int = 25 * 2**20
    # None: float64 for float64 gradients, float32 for all others.
    residue_dtype: str | None = None
    # How many steps the whole run will have, if you say so: a warning is logged if they are too few for the rate.
    planned_steps: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()

    def _check_types(self) -> None:
        def fix(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("rate", "beta"):
            fix(name, _number(name, getattr(self, name)))
        for name in ("min_numel", "warmup_steps", "bucket_bytes"):
            fix(name, _integer(name, getattr(self, name)))
        if self.planned_steps is not None:
            fix("planned_steps", _integer("planned_steps", self.planned_steps))
        if not isinstance(self.lookahead, bool):
            raise TypeError(f"lookahead must be True or False, not {self.lookahead!r}")
        if isinstance(self.dense, str) or not isinstance(self.dense, Iterable) or not all(isinstance(g, str) for g in self.dense):
            raise TypeError(f"dense must be a list of globs on parameter names, such as ['head.*'], not {self.dense!r}")
        fix("dense", tuple(self.dense))
        if self.rates is not None:
            if not isinstance(self.rates, Mapping) and not _are_pairs(self.rates):
                raise TypeError(f"rates must map globs on parameter names to rates, such as {{'conv*': 50}}, not {self.rates!r}")
            fix("rates", {str(glob): _number(f"rates[{glob!r}]", rate) for glob, rate in dict(self.rates).items()})

    def _check_ranges(self) -> None:
        for name, rate in {"rate": self.rate, **{f"rates[{g!r}]": r for g, r in (self.rates or {}).items()}}.items():
            if not (1 <= rate < math.inf):
                raise ValueError(f"{name} is N/k, the number of elements of which one is sent: at least 1 (all), not {rate}")
        if not 0 < self.beta <= 1:
            raise ValueError(f"beta must be in (0, 1], not {self.beta}: 1 is classic error feedback, 0.1 suits large batches")
        for name, least in (("min_numel", 0), ("warmup_steps", 0), ("bucket_bytes", 1), ("planned_steps", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, choices in (
            ("selection", ("lanes", "exact")),
            ("leader", ("cyclic", "staggered")),
            ("wire_dtype", (None, "float16")),
            ("residue_dtype", (None, "float32", "float64")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(self, name)!r}")
        unknown = [glob for glob in self.dense if glob.startswith("auto:") and glob not in ("auto:first", "auto:output")]
        if unknown:
            raise ValueError(f"dense knows 'auto:first' and 'auto:output', not {unknown[0]!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScaleComConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict()))

    def replace(self, **fields: Any) -> ScaleComConfig:
        """A copy with other values; a misspelt field is named together with the nearest right one."""
        _check_names(fields, "ScaleCom has no setting")
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as stored in checkpoints and compared between ranks; `ScaleComConfig(**d)` reads it."""
        fields = dataclasses.asdict(self)
        fields["dense"] = list(self.dense)
        # As pairs: the first match wins, so their order matters, and dicts are equal in any order.
        fields["rates"] = None if self.rates is None else [list(pair) for pair in self.rates.items()]
        return fields

    @classmethod
    def from_env(cls, base: ScaleComConfig | None = None) -> ScaleComConfig:
        """`base` (or the defaults) overridden by SCALECOM_RATE, SCALECOM_BETA, ...: one variable per field, YAML values.

        Lists may be written with commas: SCALECOM_DENSE='auto:output,embed.*'. Unknown SCALECOM_ variables raise ValueError.
        """
        found = {}
        for variable, text in os.environ.items():
            if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES:
                found[variable.removeprefix(ENVIRONMENT_PREFIX).lower()] = (variable, text)
        _check_names(dict.fromkeys(found), "the environment sets", lambda name: f"{ENVIRONMENT_PREFIX}{name.upper()}")
        fields = {}
        for name, (variable, text) in found.items():
            if name == "dense" and not text.lstrip().startswith("["):
                fields[name] = [part.strip() for part in text.split(",") if part.strip()]
                continue
            try:
                fields[name] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{variable}={text!r} is not a value in YAML: {error}") from error
        return (base or cls()).replace(**fields)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ScaleComConfig:
        """Settings from a YAML file, over the defaults; the environment overrides the file."""
        try:
            fields = yaml.safe_load(Path(path).read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {error}") from error
        if not isinstance(fields, dict):
            raise TypeError(f"{path} must hold settings as 'name: value' lines, not {fields!r}")
        _check_names(fields, f"{path} sets")
        return cls.from_env(cls(**fields))

    def residue_dtype_for(self, grad_dtype: str) -> str:
        """The residue's dtype for gradients of the dtype named: never less than float32."""
        return self.residue_dtype or ("float64" if grad_dtype == "float64" else "float32")

    def rates_for(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
        """The rate of every tensor, given all names and shapes in the order of the model's layers; 1 means sent whole.

        Raises ValueError for a glob in `dense` or `rates` that matches no name.
        """
        whole = set()
        for glob in self.dense:
            matched = _automatic(glob, shapes) if glob.startswith("auto:") else _matching(glob, shapes, "dense")
            whole.update(matched)
        chosen = {}
        for glob, rate in (self.rates or {}).items():
            for name in _matching(glob, shapes, "rates"):
                chosen.setdefault(name, rate)
        return {
            name: 1.0 if name in whole or math.prod(shape) < max(self.min_numel, 1) else chosen.get(name, self.rate)
            for name, shape in shapes.items()
        }


@functools.cache
def float16_limit(n_workers: int, factor: int = 1) -> float:
    """The largest magnitude sent as float16: n such values, times `factor`, still have a finite sum. What is cut off stays in the residue.

    The sum is made in float16, in any order, and every addition but the last may round up by 16, half of the widest gap between float16s.
    (For more than 2000 workers that need not be counted: values below 16 are lost in sums that are that large.)
    """

    def below(limit: float) -> float:
        rounded = np.float16(limit)
        return float(rounded if rounded <= limit else np.nextafter(rounded, np.float16(0)))

    return below(below(max(65504 - 16 * max(n_workers - 2, 0), 65504 / 2) / n_workers) / factor)


def largest_gradient(residue_dtype: str) -> float:
    """The largest magnitude of a gradient element, in the residue's units, that a residue of this dtype takes up.

    Beyond it an element is as bad as one that is not finite: finite gradients, too, can add up to an infinite residue, which would make
    every later step one that does not count. With these limits a residue cannot overflow at all: adding 2**100 to a float32 from 2**125 on,
    or 2**960 to a float64 from 2**1014 on, is lost in rounding.
    """
    return {"float32": 2.0**100, "float64": 2.0**960}[residue_dtype]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value != int(value):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value)


def _check_names(fields: Mapping[str, Any], complaint: str, spell=lambda name: name) -> None:
    known = [field.name for field in dataclasses.fields(ScaleComConfig)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {spell(near[0])}?" if near else f"it knows {', '.join(map(spell, known))}"
            raise ValueError(f"{complaint} {spell(str(name))}; {hint}")


def _matching(glob: str, shapes: Mapping[str, Any], setting: str) -> list[str]:
    matched = [name for name in shapes if fnmatchcase(name, glob)]
    if not matched:
        near = difflib.get_close_matches(glob, shapes, n=3, cutoff=0.4) or list(shapes)[:3]
        raise ValueError(f"{setting} names {glob!r}, which matches no parameter; the model has {', '.join(near)}, ...")
    return matched


def _automatic(glob: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters of the first or the last layer that has a weight (two dimensions or more), in the order given."""

    def layer(name: str) -> str:
        # conv1.weight and, in TensorFlow, conv1/kernel. What differs in a last number alone (members of a ParameterList, TensorFlow's
        # second variable of a name, Horovod's names for nameless parameters) shares a prefix without sharing a layer.
        cut = max(name.rfind("."), name.rfind("/"))
        return name if cut < 0 or name[cut + 1 :].isdigit() else name[:cut]

    weights = [name for name, shape in shapes.items() if len(shape) >= 2]
    if len({layer(name) for name in weights}) < 2:
        return []  # else nothing would be left to compress
    wanted = layer(weights[0] if glob == "auto:first" else weights[-1])
    return [name for name in shapes if layer(name) == wanted]
