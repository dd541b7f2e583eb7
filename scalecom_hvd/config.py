"""ScaleComConfig: every hyper-parameter, validated once, and which tensor is sent at which rate.

Framework-free and immutable. Compressors of every framework, the reference and the command line
read the same object. Imports integers and stages.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from scalecom_hvd.integers import levels_of
from scalecom_hvd.stages import LADDER, START, Stage

ENVIRONMENT_PREFIX = "SCALECOM_"
# Variables with the prefix that are not fields: they choose how the library runs, not what it
# computes.
OTHER_VARIABLES = ("SCALECOM_KERNEL",)
# Arguments of DistributedOptimizer that a user may look for here.
OPTIMIZERS_ARGUMENTS = ("local_steps", "outer", "overlap", "fragments", "clip_changes")


@dataclass(frozen=True, eq=False)
class ScaleComConfig:
    """The hyper-parameters of ScaleCom (Chen et al., NeurIPS 2020, arXiv 2104.11125).

    Raises:
        TypeError: a field has a type that cannot work.
        ValueError: a field has a value that cannot work.
    """

    rate: float | Mapping[int, float] | Literal["auto"] = cast(float, None)
    """One element in `rate` is sent (N/k).

    Each element is sent about steps / rate times. From scratch, less than 5 times (60 for language
    models) costs accuracy, so lower the rate for short runs. 1: everything is sent, in few bits if
    you give `bits`, and whole otherwise. None: 8 with few bits, 100 with 32.

    {0: 4, 300: 16} is a schedule: rate 4 from step 0 on, and rate 16 from step 300 on. "auto" finds
    the rate, and the bits, during training. Schedules and "auto" work in PyTorch.
    """

    beta: float = cast(float, None)
    """The low-pass filter on the residue (paper, eq. 5), 0 < beta <= 1.

    If `flush` is False, or a new gradient points against what waits at its index, this share of
    what waits is sent. 1 is classic error feedback: everything is sent, however stale. A lower beta
    is more stable, but what was not sent arrives later, over up to rate / beta steps. None: 0.2
    with nu=1, with local steps, and with TensorFlow's tapes; otherwise 1. These three leave the
    optimizer's momentum as it is, and beta=1 would then break training without batch norm.
    """

    nu: float | None = None
    """The momentum's share of an optimizer's step, 0 < nu <= 1, for tensors that are compressed.

    Compression sends gradients late, and momentum would spread them over further steps. So a step
    goes along nu * momentum + (1 - nu) * gradient (QHM and QHAdam, Ma and Yarats, ICLR 2019, arXiv
    1810.06801). This works for SGD with momentum, for Adam and its relatives, for Lion and, if you
    give nu, for Muon. Other optimizers keep their momentum. 1: every optimizer keeps its momentum.
    None: by the rate, or 1 with local steps and TensorFlow's tapes.
    """

    flush: bool = True
    """Whether all that waits at a chosen index is sent, unless the new gradient points against it.

    True: all that waits, or the share `beta` of it if the new gradient points against it. So a low
    beta hardly harms short runs. False: always the share `beta`, which is the paper's filter.
    """

    outliers: float | None = 4.0
    """How many times the largest recent norm on its rank the norm of a tensor's gradient may be.

    If the norm is larger, the tensor's residue is scaled down by the power of two that would
    bring the gradient below this bound. What is cut off is lost. So one batch with a huge loss does
    not fill the steps after it, even if the script clips gradients. None: residues keep everything.
    """

    min_numel: int = 2048
    """Tensors with fewer elements are sent whole. Biases and norms cost little and matter much."""

    dense: Sequence[str] = ()
    """Globs on the names of parameters that are sent whole. They win over `rates`.

    With 32 bits the output layer matters most: `dense=["fc.*"]`, if that is its name.
    """

    rates: Mapping[str, float] | None = None
    """Rates of some parameters, by globs on their names.

    An example is {"conv*": 25, "embed.*": 400}. The first match wins, and other parameters get
    `rate`. With 1, a parameter is sent whole.
    """

    total_steps: int | None = None
    """How many steps the whole run will have, resumed parts included.

    If there are too few steps for the rate, a warning is logged. If a run becomes longer than
    planned, resume with the new number.
    """

    warmup_steps: int = 0
    """How many first steps are sent whole.

    A warm-up costs traffic, and few bits do not need one. With 32 bits, take a tenth of the run's
    steps. For a warm-up at a low rate, give a schedule: `rate={0: 4, 300: 16}`.
    """

    selection: Literal["lanes", "exact"] = "lanes"
    """How the leader chooses.

    "lanes": the largest element of each lane, which is fast. "exact": the true top-k, which is
    slow, and meant for studies.
    """

    leader: Literal["cyclic", "staggered"] = "cyclic"
    """Who leads at step t.

    "cyclic": one leader for all buckets, t mod n. "staggered": (t + b) mod n for bucket b, so that
    all ranks share the work of choosing.
    """

    lookahead: bool = False
    """Whether the leader chooses for step t + 1 at the end of step t. This works only in PyTorch.

    The broadcast then hides behind forward and backward. On Horovod, this took up to a sixth off a
    step, but under DDP's hook it made steps on two hosts slower (docs/speed.md). The choice is made
    without the gradient of step t + 1, which costs accuracy. With nu=1 and a beta near 1, training
    without batch norm breaks, and a warning is logged. Then give a lower beta (0.1).
    """

    bits: int = cast(int, None)
    """How many bits a sent value has.

    2 to 8: a value is an integer times a scale. The leader gives every 512 values one scale. (With
    4 bits, integers are -7 to 7, and 7 stands for 3.5 times the values' mean magnitude.) Many more
    values then travel at the same cost: with four workers, 4 bits at rate 8 cost as much as 32 bits
    at rate 33. The rounding error stays in the residue. Bytes grow with the logarithm of the number
    of workers. 32: values travel as the residue has them, as in the paper. None: 4, but 32 with a
    method that does not support few bits. With rate="auto", leave `bits` out.
    """

    bucket_bytes: int = 25 * 2**20
    """Gradient bytes per bucket.

    Smaller buckets overlap better with backward. Larger ones need fewer negotiations.
    """

    residue_dtype: Literal["float32", "float64"] | None = None
    """The dtype in which residues are kept.

    None: float64 for float64 gradients, float32 for all others. "float64": less rounding, twice the
    memory, and twice the bytes of values.
    """

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()

    def _check_types(self) -> None:
        def fix(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        may_be_none = ("rate", "bits", "beta", "nu", "outliers", "total_steps")
        for names, checked in (
            (("rate",), _rate),
            (("beta", "nu", "outliers"), checked_number),
            (("min_numel", "bits", "bucket_bytes", "total_steps", "warmup_steps"), checked_integer),
        ):
            for name in names:
                if getattr(self, name) is not None or name not in may_be_none:
                    fix(name, checked(name, getattr(self, name)))
        for name in ("lookahead", "flush"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        listed = isinstance(self.dense, Iterable) and not isinstance(self.dense, str)
        fix("dense", tuple(self.dense) if listed else self.dense)
        if not listed or not all(isinstance(glob, str) for glob in self.dense):
            raise TypeError(
                "dense must be a list of globs on parameter names, such as ['head.*'], "
                f"not {self.dense!r}"
            )
        if self.rates is not None:
            try:
                rates = dict(self.rates)  # a state has pairs
            except (TypeError, ValueError):
                raise TypeError(
                    "rates must map globs on parameter names to rates, such as {'conv*': 50}, "
                    f"not {self.rates!r}"
                ) from None
            fix("rates", {str(g): checked_number(f"rates[{g!r}]", r) for g, r in rates.items()})

    def _check_ranges(self) -> None:
        self._check_rates()
        if self.outliers is not None and not 1 <= self.outliers < math.inf:
            raise ValueError(
                f"outliers must be at least 1 and finite, or None, not {self.outliers}. It is how "
                "many times as long as its longest recent one a gradient may be"
            )
        shares = {
            "nu": "It is the momentum's share of a step; 1 leaves the optimizer as it is",
            "beta": "1 is classic error feedback; a lower beta is more stable",
        }
        for name, meaning in shares.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {value}. {meaning}")
        least = {"min_numel": 0, "warmup_steps": 0, "bucket_bytes": 1, "total_steps": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")
        choices = {
            "selection": ("lanes", "exact"),
            "leader": ("cyclic", "staggered"),
            "residue_dtype": (None, "float32", "float64"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {listed}, not {value!r}")
        if self.bits not in (None, 32, *range(2, 9)):
            raise ValueError(
                f"bits must be from 2 to 8, or 32 (values are not quantised), not {self.bits}. "
                "The default is 4"
            )
        self._check_stages()

    def _check_rates(self) -> None:
        for glob in (*self.dense, *(self.rates or ())):
            if glob.startswith("auto:"):
                raise ValueError(
                    f"dense and rates no longer accept {glob!r}: name the output layer, or the "
                    "layer that you mean, such as 'fc.*'"
                )
        if isinstance(self.rate, Mapping) and min(self.rate, default=1) != 0:
            raise ValueError(
                "rate as a schedule must map first steps to rates, from step 0 on, such as "
                f"{{0: 4, 300: 16}}, not {dict(self.rate)!r}"
            )
        rates = {f"rates[{glob!r}]": rate for glob, rate in (self.rates or {}).items()}
        if isinstance(self.rate, Mapping):
            rates |= {f"rate[{step}]": rate for step, rate in self.rate.items()}
        elif isinstance(self.rate, float):
            rates["rate"] = self.rate
        for name, rate in rates.items():
            if not 1 <= rate < math.inf:
                raise ValueError(
                    f"{name} must be at least 1 and finite, not {rate}. It is the number of "
                    "elements of which one is sent (1: all are sent)"
                )

    def _check_stages(self) -> None:
        """Raise ValueError for settings that rate="auto", or every element in few bits, exclude."""
        if self.rate == "auto":
            others = {
                f"bits={self.bits}": self.bits not in (None, LADDER[START].bits),
                "lookahead=True": self.lookahead,
                f"warmup_steps={self.warmup_steps}": self.warmup_steps > 0,
            }
            if excluded := [setting for setting, is_given in others.items() if is_given]:
                raise ValueError(
                    f"rate='auto' chooses by itself what {excluded[0]} would set: leave that out, "
                    "or give a rate"
                )
        rates = self.rate.values() if isinstance(self.rate, Mapping) else [self.rate]
        in_few_bits = 1 in rates and self.bits not in (None, 32) and "*" not in (self.rates or ())
        if self.selection == "exact" and ("auto" in rates or in_few_bits):
            raise ValueError(
                "selection='exact' has nothing to choose where every element is sent: leave it "
                "out, or give a rate above 1"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScaleComConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict()))

    def replace(self, **fields: Any) -> ScaleComConfig:
        """A copy with other values of any fields. The errors are those of the class.

        A misspelt name is a ValueError that names the nearest right one.
        """
        _check_names(fields, "there is no setting")
        return dataclasses.replace(self, **fields)

    def resolved(self, mixes_momentum: bool = False, knows_bits: bool = True) -> ScaleComConfig:
        """A copy with numbers instead of None, to train with.

        mixes_momentum: whether the optimizer's momentum can be made quasi-hyperbolic: nu may then
        stay None, which lets each tensor's rate decide. knows_bits: whether values can be integers.
        """
        rate, rates, bits, nu, beta = self.rate, self.rates, self.bits, self.nu, self.beta
        warmup = self.warmup_steps
        if isinstance(rate, Mapping):
            # A start at which all is sent whole is a warm-up.
            while len(rate) > 1 and rate[0] == 1 and bits in (None, 32):
                _, (step, second), *later = sorted(rate.items())
                warmup, rate = max(warmup, step), {0: second, **dict(later)}
            if len(rate) == 1:
                rate = rate[0]
        if nu is None and not mixes_momentum:
            nu = 1.0
        if bits is None:
            if rate == 1:  # without bits, it means whole
                rates = {**(rates or {}), "*": 1.0}
            bits = 4 if knows_bits else 32
        if rate is None:
            rate = 8.0 if bits < 32 else 100.0
        if beta is None:
            beta = 0.2 if nu == 1 else 1.0
        found: dict[str, Any] = {"rate": rate, "rates": rates, "bits": bits, "nu": nu, "beta": beta}
        found["warmup_steps"] = warmup
        if all(getattr(self, name) == value for name, value in found.items()):
            return self
        return dataclasses.replace(self, **found)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, which `ScaleComConfig(**d)` reads.

        Checkpoints store them, and ranks compare them.
        """
        fields = dataclasses.asdict(self)
        fields["dense"] = list(self.dense)
        for name in ("rate", "rates"):  # as pairs: JSON has no numbers as keys, and order matters
            if isinstance(given := getattr(self, name), Mapping):
                fields[name] = [list(pair) for pair in given.items()]
        return fields

    @property
    def stages(self) -> list[tuple[int, Stage]]:
        """The first step of each stage, and what it sends. With rate="auto": of the first rung."""
        own = self.resolved() if None in (self.rate, self.bits) else self
        if own.rate == "auto":
            return [(0, LADDER[START])]
        rates = own.rate if isinstance(own.rate, Mapping) else {0: own.rate}
        return [(step, Stage(rate, own.bits)) for step, rate in sorted(rates.items())]

    @property
    def has_fixed_rate(self) -> bool:
        """Whether one rate holds in the whole run. If it is 1, all must be sent whole."""
        rate = self.resolved().rate
        all_in_few_bits = rate == 1 and "*" not in (self.rates or ()) and self.levels > 0
        return isinstance(rate, float) and not all_in_few_bits

    @property
    def levels(self) -> int:
        """L: values are integers from -L to L times a scale; 0: they travel as they are."""
        return levels_of(self.resolved().bits if self.bits is None else self.bits)

    @property
    def extra(self) -> float:
        """The multiple of a residue that is sent besides acc where everything waiting is sent."""
        beta = self.resolved().beta if self.beta is None else self.beta
        return 1 / beta - 1 if self.flush else 0.0

    @classmethod
    def from_env(cls, base: ScaleComConfig | None = None) -> ScaleComConfig:
        """Settings of the environment, over those of `base`: SCALECOM_RATE, SCALECOM_BETA, ...

        There is one variable per field, with a value in YAML. Lists may also be written with
        commas: SCALECOM_DENSE='fc.*,embed.*'.

        Raises:
            TypeError: a variable's value has a type that cannot work.
            ValueError: a variable with the prefix is unknown, or its value cannot work.
        """
        found = {
            variable.removeprefix(ENVIRONMENT_PREFIX).lower(): (variable, text)
            for variable, text in os.environ.items()
            if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES
        }
        _check_names(
            found, "the environment sets", lambda name: f"{ENVIRONMENT_PREFIX}{name.upper()}"
        )
        fields: dict[str, Any] = {}
        for name, (variable, text) in found.items():
            if name == "dense" and not text.lstrip().startswith("["):
                fields[name] = [part.strip() for part in text.split(",") if part.strip()]
                continue
            try:
                fields[name] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{variable}={text!r} is not a value in YAML: {error}") from error
        try:
            return (base or cls()).replace(**fields)
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{variable}={text!r}" for variable, text in found.values())
            raise type(error)(f"{error}. The environment sets {given}") from error

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ScaleComConfig:
        """Settings of a YAML file of "name: value" lines; the environment overrides the file.

        Raises:
            OSError: the file cannot be read.
            TypeError: it holds something other than such lines, or a type that cannot work.
            ValueError: it is not YAML, or holds a name or a value that cannot work.
        """
        try:
            fields = yaml.safe_load(Path(path).read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {error}") from error
        if not isinstance(fields, dict):
            raise TypeError(f"{path} must hold settings as 'name: value' lines, not {fields!r}")
        _check_names(fields, f"{path} sets")
        return cls.from_env(cls(**fields))

    def residue_dtype_for(self, grad_dtype: str) -> str:
        """The dtype of residues for gradients of this dtype. It is never less than float32."""
        return self.residue_dtype or ("float64" if grad_dtype == "float64" else "float32")

    def rates_for(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
        """The rate of every tensor in the run's last stage; see `own_rates_for`. 1: all of it."""
        rate = self.stages[-1][1].rate
        own = self.own_rates_for(shapes)
        return {name: rate if given is None else given for name, given in own.items()}

    def own_rates_for(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float | None]:
        """Every tensor's own rate: 1 if it is always sent whole, None if `rate` says it.

        Args:
            shapes: {name: shape} of all tensors.

        Raises:
            ValueError: a glob in `dense` or `rates` matches no name.
        """
        whole = {name for glob in self.dense for name in _matching(glob, shapes, "dense")}
        chosen: dict[str, float] = {}
        for glob, rate in (self.rates or {}).items():
            for name in _matching(glob, shapes, "rates"):
                chosen.setdefault(name, rate)
        least = max(self.min_numel, 1)  # an empty tensor has nothing to compress
        whole.update(name for name, shape in shapes.items() if math.prod(shape) < least)
        sends_all = all(stage.is_whole for _, stage in self.stages)
        rest = 1.0 if sends_all else None
        return {name: 1.0 if name in whole else chosen.get(name, rest) for name in shapes}


def largest_gradient(residue_dtype: str) -> float:
    """The largest magnitude of a gradient element that a residue takes up, in the residue's units.

    A larger element is as bad as one that is not finite. Finite gradients, too, can add up to an
    infinite residue, and then no later step would count. Within these limits a residue cannot
    overflow: adding 2**100 to a float32 of at least 2**125, or 2**960 to a float64 of at least
    2**1014, is lost in rounding.
    """
    return {"float32": 2.0**100, "float64": 2.0**960}[residue_dtype]


def checked_number(name: str, value: object) -> float:
    """The value of a setting of this name; raises TypeError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def _rate(name: str, value: object) -> float | dict[int, float] | str:
    if isinstance(value, Mapping | list | tuple):  # a state has pairs
        given = dict(value)
        return {
            checked_integer(f"a step of {name}", s): checked_number(name, given[s]) for s in given
        }
    if isinstance(value, str) and value != "auto":
        raise TypeError(
            f"{name} must be a number, a schedule such as {{0: 4, 300: 16}}, or 'auto', not "
            f"{value!r}"
        )
    return "auto" if value == "auto" else checked_number(name, value)


def checked_integer(name: str, value: object) -> int:
    """The value of a setting of this name; raises TypeError unless it is a whole number."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = cast(float, value)  # numbers.Real promises no __int__, but each has one
        if math.isfinite(number) and number == int(number):
            return int(number)
    raise TypeError(f"{name} must be a whole number, not {value!r}")


def _check_names(names: Iterable[str], complaint: str, spell: Callable[[str], str] = str) -> None:
    """Raise ValueError for the first name that is no field. spell: writes a name as it is there."""
    known = [field.name for field in dataclasses.fields(ScaleComConfig)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            listed = ", ".join(map(spell, known))
            hint = f"did you mean {spell(near[0])}?" if near else f"the settings are {listed}"
            hints = {
                "planned_steps": f"it is called {spell('total_steps')} now",
                "quantiser": "give bits= (ScaleCom), or take LocalTopK(quantiser=...)",
                "shared": "in RandomK, all ranks draw the same indices: leave it out",
                "warmup_rate": "a schedule does the same: rate={0: 4, 300: 16}",
                "wire_dtype": "values no longer travel in float16. Give "
                f"{spell('bits')}=8, which is less",
            } | dict.fromkeys(OPTIMIZERS_ARGUMENTS, "that is an argument of DistributedOptimizer")
            raise ValueError(f"{complaint} {spell(str(name))}; {hints.get(name, hint)}")


def _matching(glob: str, shapes: Mapping[str, tuple[int, ...]], setting: str) -> list[str]:
    matched = [name for name in shapes if fnmatchcase(name, glob)]
    if not matched:
        near = difflib.get_close_matches(glob, shapes, n=3, cutoff=0.4) or list(shapes)[:3]
        raise ValueError(
            f"{setting} names {glob!r}, which matches no parameter; the model has "
            f"{', '.join(near)}, ..."
        )
    return matched
