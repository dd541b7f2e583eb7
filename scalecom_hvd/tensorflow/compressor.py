"""ScaleCom: the object that users pass as `compression=` to this package's optimizers and tapes.

It holds the settings, the residues and the loss scale; exchange.py builds the graph. A new tape is
made for every step, so the residues live here, by variable.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from scalecom_hvd.agreement import is_elastic
from scalecom_hvd.bucket_layout import step_stats
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.saved_state import (
    STATE_VERSION,
    check_finite,
    check_residues,
    check_state,
    norms_of,
)
from scalecom_hvd.tensorflow.exchange import Exchange, have_met, meet, take_agreement
from scalecom_hvd.tensorflow.residues import (
    CompressedTensor,
    Progress,
    Tracked,
    set_value,
    value_of,
)
from scalecom_hvd.tensorflow.transport import Arguments, refuse_graphs_of_tensorflow_1

_NEEDS_DROP_IN = (
    "ScaleCom must know which variable a gradient belongs to, but horovod.tensorflow does not say "
    "so. Write `import scalecom_hvd.tensorflow as hvd` (or `import scalecom_hvd.tensorflow.keras "
    "as hvd`) and use its DistributedOptimizer or DistributedGradientTape. For collectives of your "
    "own use hvd.Compression.none"
)

_NEEDS_KERAS_OPTIMIZER = (
    "with a tape, ScaleCom cannot make momentum quasi-hyperbolic. Leave nu out, and make a "
    "ScaleCom that serves no optimizer; or use hvd.DistributedOptimizer with an optimizer of Keras"
)

MAKE_IT_ONCE = (
    "make the ScaleCom once, outside of the training step, and pass the same object to every "
    "DistributedGradientTape"
)

# A Keras LossScaleOptimizer, or a callable that gives the current scale.
LossScale: TypeAlias = (
    tf.keras.mixed_precision.LossScaleOptimizer | Callable[[], float | tf.Tensor | tf.Variable]
)

# What a saved state must match besides the config; see saved_state.check_state.
SETTINGS = {"method": "ScaleCom"}

# For several exchanges, stats() gives the largest of these numbers, and the sum of all others.
_LARGEST_COUNTS = ("step", "rate", "leader", "residue_ratio")
# The numbers of a single process, and of every process before its first step.
_NOTHING_SENT: dict[str, int | float | None] = step_stats(
    1, 0, {}, {}, 0, offsets=0, values=0, dense=0
) | {"step": 0, "skipped_steps": 0, "rate": 1.0, "residue_ratio": None}

# All ScaleComs of this process, in the order in which they were made.
_objects: list[weakref.ref[ScaleCom]] = []


class _Stream(Tracked):
    """The state of one series of gradients.

    There are several if a persistent tape is asked several times in a step for gradients of the
    same variables.
    """

    def __init__(self) -> None:
        super().__init__()
        self.residues: dict[str, tf.Variable] = {}  # by name
        self.recent_norms: dict[str, tf.Variable] = {}  # by name
        self.progress: dict[str, Progress] = {}  # of its exchanges, by label


class _Settings(tf.train.experimental.PythonState):
    """The settings, and the rank that the residues belong to, in a tf.train.Checkpoint.

    Attributes:
        config: the settings. What they leave open is provisional until it is settled.
        place: `_place` of the rank whose residues were loaded, or of this rank.
    """

    def __init__(self, given: ScaleComConfig, streams: Sequence[_Stream]) -> None:
        self._given: ScaleComConfig | None = given  # until it is settled
        self._streams = streams
        self.config = given.resolved()
        self.place: Mapping[str, int] = {}

    def settle(self, mixes_momentum: bool) -> None:
        """Settle what the settings leave open, as config.resolved. What was settled first stays."""
        self.config, self._given = self._settled(mixes_momentum), None

    def _settled(self, mixes_momentum: bool) -> ScaleComConfig:
        return self._given.resolved(mixes_momentum) if self._given else self.config

    def check(self, state: Mapping[str, Any], has_residues: bool) -> None:
        """Check a saved state. If it has residues, it settles what is still open."""
        saved = state.get("config", {})
        if saved:  # versions before 0.3.0 had look-ahead, whose residues mean the same
            saved = {**saved, "lookahead": False}
            state = {**state, "config": saved}
        if not has_residues:  # perhaps saved when nothing said yet what beta is
            state = {**state, "config": {**saved, "beta": self.config.beta}}
            check_state(state, self.config, SETTINGS)
            return
        # Until there was nu, "step_ahead" said whether beta was 1 by default.
        mixes_momentum = bool(saved.get("step_ahead", saved.get("nu") != 1))
        check_state(state, self._settled(mixes_momentum), SETTINGS)
        self.settle(mixes_momentum)

    def serialize(self) -> str:
        saved = {"version": STATE_VERSION, "config": self.config.to_dict()}
        return json.dumps(saved | _place(any(stream.residues for stream in self._streams)))

    def deserialize(self, string_value: str) -> None:
        saved = {"step": 0, "settings": SETTINGS, **json.loads(string_value)}
        has_residues = "ranks" in saved  # TensorFlow restores their values by itself
        self.check(saved | {"residues": has_residues}, has_residues)
        self.note_place(saved)

    def note_place(self, state: Mapping[str, Any]) -> None:
        self.place = {key: state[key] for key in ("rank", "ranks") if key in state}


class _Bound:
    """What a ScaleCom knows about variables and a checkpoint must not contain."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}  # by variable.ref()
        # Of all variables seen so far, by name.
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: dict[str, CompressedTensor] = {}  # of all streams, by _in_stream
        self.exchanges: dict[tuple[int, tuple[str, ...]], Exchange] = {}  # by stream and names
        self.last: dict[Any, Exchange] = {}  # what last averaged a variable, by variable.ref()
        self.loaded: dict[str, Any] | None = None  # not taken up by all variables yet


class ScaleCom(Tracked, Compressor):
    """Cyclic local top-k compression with low-pass filtered residues (Chen et al., NeurIPS 2020).

    Make one object outside the training step, because it keeps the residues. It may serve an
    optimizer, or the tapes of all steps. tf.train.Checkpoint tracks it. Globs in `dense` and
    `rates` match variables' names without ":0", such as "dense/kernel".

    Args:
        config: the settings. Default: the default settings, overridden by SCALECOM_RATE,
            SCALECOM_BETA, ... of the environment.
        loss_scale: for gradients that arrive scaled, as in
            LossScaleOptimizer(hvd.DistributedOptimizer(...)): a Keras LossScaleOptimizer, or a
            callable that returns the current scale (in a traced function: as a tensor or variable).
            Residues are then kept in unscaled units.
        fields: any fields of ScaleComConfig. They override `config`.

    Raises:
        ValueError, TypeError: a setting cannot work, or the object is made in a traced function.
            Ranks may trace that function again at different times, and each time it would be
            another object.
        RuntimeError: it is made in a graph of TensorFlow 1.
    """

    def __init__(
        self,
        *,
        config: ScaleComConfig | None = None,
        loss_scale: LossScale | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        refuse_graphs_of_tensorflow_1()
        if tf.inside_function():
            raise ValueError(
                f"a ScaleCom was made while a function was being traced: {MAKE_IT_ONCE}"
            )
        config = config if config is not None else ScaleComConfig.from_env()
        self._streams: list[_Stream] = []
        self._settings = _Settings(config.replace(**fields), self._streams)
        if not self.config.has_fixed_rate:
            raise ValueError(
                f"rate={self.config.rate!r} with bits={self.config.bits} works only in PyTorch, "
                "because a graph has one rate: give a number above 1, with warmup_steps for a "
                "warm-up that is sent whole"
            )
        if self.config.lookahead:
            raise ValueError("lookahead works only in PyTorch: unset it, or SCALECOM_LOOKAHEAD")
        self.knows_loss_scale = loss_scale is not None
        self.current_loss_scale = scale_reader(loss_scale)
        self._bound = _Bound()
        self._streams.append(_Stream())  # a checkpoint would not restore into a new list
        _objects.append(weakref.ref(self, _objects.remove))

    @classmethod
    def as_published(cls, rate: float = 100, beta: float = 0.1, **settings: Any) -> ScaleCom:
        """The paper's own algorithm: values of 32 bits, its filter, and the optimizer as it is.

        Args:
            rate, beta: see ScaleComConfig.
            settings: what the class takes besides.

        Example:
            >>> ScaleCom.as_published(rate=400)
        """
        return cls(rate=rate, beta=beta, bits=32, flush=False, nu=1, outliers=None, **settings)

    @property
    def config(self) -> ScaleComConfig:
        """The settings. The first optimizer or tape that takes the object settles nu and beta."""
        return self._settings.config

    def serve(self, mixes_momentum: bool) -> None:
        """Serve a Keras optimizer, whose momentum is mixed, or a tape, for which nu must be 1."""
        self._settings.settle(mixes_momentum)
        if not mixes_momentum and self.config.nu != 1:
            raise ValueError(_NEEDS_KERAS_OPTIMIZER)

    @staticmethod
    def compress(tensor: Any) -> Any:
        """Raise TypeError: horovod.tensorflow itself does not say for which variable it calls."""
        raise TypeError(_NEEDS_DROP_IN)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """As `compress`."""
        raise TypeError(_NEEDS_DROP_IN)

    def exchange_for(
        self,
        stream: int,
        variables: Sequence[tf.Variable],
        present: Sequence[tf.Variable],
        sparse: Sequence[tf.Variable | tf.Tensor],
        arguments: Arguments,
    ) -> tuple[Exchange, list[str]]:
        """The exchange of these variables, on which all ranks agreed, and their names in it.

        Blocks until all ranks have called it, unless they agreed on the exchange before.

        Args:
            stream: the number of this series of gradients, if these variables have several.
            variables, arguments: of the optimizer or tape.
            present: the variables among them that have a gradient on this rank.
            sparse: other variables, whose gradients are sparse.
        """
        known = self._bound.exchanges
        names = [self._name_of(variable) for variable in variables]
        given = {self._name_of(variable) for variable in present}
        sparse_names = sorted(v.name for v in sparse if isinstance(v, tf.Variable))
        key = (stream, tuple(names))
        exchange = known.get(key)
        named = dict(zip(names, variables, strict=True))
        make = functools.partial(self._make_exchange, stream, named, arguments, sparse_names)
        if exchange is None:
            if is_elastic() and not have_met():
                meet(all_exchanges())
            if (agreed := take_agreement(_label(stream, names))) is not None:
                known[key] = exchange = make()
                exchange.join(agreed, given)
        if exchange is None or exchange.arguments != arguments or exchange.lacks(given):
            members = set() if exchange is None else exchange.members
            exchange, place = make(), self._settings.place
            of = (place["ranks"], place["rank"]) if place and not is_elastic() else None
            exchange.agree(sorted(given | members), of)
            self._settings.note_place(_place(True))
            known[key] = exchange
        self._bound.last.update((variable.ref(), exchange) for variable in variables)
        return exchange, names

    def last_exchange(self, variable: tf.Variable) -> tuple[Exchange | None, float]:
        """The exchange that last averaged a variable's gradients, and the variable's rate."""
        exchange = self._bound.last.get(variable.ref())
        return exchange, exchange.rates[self._name_of(variable)] if exchange else 1.0

    def _make_exchange(
        self,
        stream: int,
        variables: dict[str, tf.Variable],
        arguments: Arguments,
        sparse: Sequence[str],
    ) -> Exchange:
        for name, variable in variables.items():
            if not variable.dtype.is_floating:
                raise TypeError(
                    f"{name} has dtype {variable.dtype.name}, which ScaleCom cannot average over "
                    "ranks. Train it as two real variables, or leave it out of this optimizer"
                )
            if not variable.shape.is_fully_defined():
                raise TypeError(f"{name} has the shape {variable.shape}, which must be known")
        while len(self._streams) <= stream:
            self._streams.append(_Stream())
        rates, tensors, kept = self._rates_of(variables), self._bound.tensors, self._streams[stream]
        keys = {name: _in_stream(stream, name) for name in variables if rates[name] > 1}
        new = {
            key: CompressedTensor(name, variables[name], rates[name], self.config)
            for name, key in keys.items()
            if key not in tensors
        }
        self._take_up_residues(new)
        tensors.update(new)
        for tensor in new.values():
            kept.residues[tensor.name] = tensor.residue
            kept.recent_norms[tensor.name] = tensor.recent
        mine = {name: tensors[key] for name, key in keys.items()}
        label = _label(stream, list(variables))
        if label not in kept.progress:
            kept.progress[label] = self._make_progress(stream, label, variables)
        progress = kept.progress[label]
        return Exchange(variables, mine, rates, progress, self.config, arguments, sparse)

    def _make_progress(self, stream: int, label: str, names: Iterable[str]) -> Progress:
        progress = Progress(label)
        self._take_up_progress(progress)
        # If variables were frozen or thawed, this is a new exchange of the same training.
        related = [
            exchange.progress
            for (other, its_names), exchange in self._bound.exchanges.items()
            if other == stream and not set(names).isdisjoint(its_names)
        ]
        if related:
            set_value(progress.step, max(value_of(other.step) for other in (progress, *related)))
        return progress

    def _rates_of(self, variables: Mapping[str, tf.Variable]) -> dict[str, float]:
        """Their rates. Globs may match any variable seen so far."""
        bound = self._bound
        bound.shapes |= {name: tuple(variable.shape) for name, variable in variables.items()}
        rates = self.config.rates_for(bound.shapes)
        return {name: rates[name] for name in variables}

    def _name_of(self, variable: tf.Variable) -> str:
        """The variable's name without ":0". A second variable of that name gets ".1", and so on."""
        names = self._bound.names
        if variable.ref() not in names:
            stem = variable.name.partition(":")[0]
            taken = set(names.values())
            numbered = (f"{stem}.{n}" if n else stem for n in itertools.count())
            names[variable.ref()] = next(name for name in numbered if name not in taken)
        return names[variable.ref()]

    # What users ask.

    def exchanges(self) -> list[Exchange]:
        """The exchanges that this object takes part in: one for each set of variables."""
        return list(self._bound.exchanges.values())

    def stats(self) -> dict[str, int | float | None]:
        """Numbers of this rank. The call sends nothing, so not all ranks have to make it.

        Do not call it in a traced function. If there are several exchanges (such as for the two
        models of a GAN), step, rate, leader and residue_ratio are the largest, and the rest is
        summed. If variables are frozen and thawed again, the old exchange goes on at its own step,
        so "step" is too low.

        Returns:
            A dict, in which keys mean what they do in scalecom_hvd.torch.ScaleCom.stats(): step,
            skipped_steps, leader, bytes_offsets, bytes_values, bytes_dense, bytes_traffic, rate,
            collectives, residue_norm, residue_ratio and outliers.
        """
        found = [exchange.stats() for exchange in self.exchanges()] or [_NOTHING_SENT]
        numbers: dict[str, int | float | None] = {}
        for key in _NOTHING_SENT:
            known = [stats[key] for stats in found if stats[key] is not None]
            numbers[key] = max(known, default=None) if key in _LARGEST_COUNTS else sum(known)
        tensors = self._bound.tensors.values()
        residues = (value_of(tensor.residue).astype(np.float64) for tensor in tensors)
        norms = map(float, map(np.linalg.norm, residues))
        outliers = sum(int(value_of(tensor.recent)[2]) for tensor in tensors)
        return numbers | {"residue_norm": math.hypot(*norms), "outliers": outliers}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residues and steps. Every rank has to save them with the model.

        Save them with numpy.savez, pickle or the like. tf.train.Checkpoint(scalecom=compression)
        saves the same.

        Returns:
            Arrays and numbers: {"version", "step", "config", "settings": the method's, "residues":
            {name: array shaped like the variable}, "recent_norms": {name: [longest, count]},
            "exchanges": what else each exchange needs}. If there are residues, "rank" and "ranks"
            say whose they are.
        """
        # A loaded state that no variable has taken up yet must be saved, too.
        loaded = self._bound.loaded or {"step": 0, "residues": {}}
        tensors = self._bound.tensors
        residues = {name: value_of(own.residue).reshape(own.shape) for name, own in tensors.items()}
        recent = {name: value_of(own.recent)[:2].tolist() for name, own in tensors.items()}
        exchanges = loaded.get("exchanges", {}) | {
            label: progress.as_dict()
            for stream in self._streams
            for label, progress in stream.progress.items()
        }
        step = max((exchange["step"] for exchange in exchanges.values()), default=loaded["step"])
        return {
            "version": STATE_VERSION,
            "step": step,
            "config": self.config.to_dict(),
            "settings": SETTINGS,
            "residues": loaded["residues"] | residues,
            "recent_norms": loaded.get("recent_norms", {}) | recent,
            "exchanges": exchanges,
        } | _place(bool(loaded["residues"] or residues))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what this rank saved. Call it on every rank, before training continues.

        Args:
            state: what `state_dict` gave.

        Raises:
            ValueError: the state does not fit. The error names what is wrong: another model, other
                settings, another version, or residues that are not finite.
        """
        saved = dict(state.get("residues", {}))
        check_finite({name: bool(np.isfinite(residue).all()) for name, residue in saved.items()})
        self._settings.check(state, bool(state.get("residues", True)))
        known = {name: tensor.shape for name, tensor in self._bound.tensors.items()}
        if saved and known:  # without residues, it was saved before the first step
            # Of an earlier state, some may wait for a variable that takes them up.
            waiting = (self._bound.loaded or {"residues": {}})["residues"].keys() - known.keys()
            found = {name: np.shape(saved[name]) for name in saved.keys() - waiting}
            check_residues(found, known)
        for exchange in state.get("exchanges", {}).values():
            norms_of(exchange)
        self._bound.loaded = dict(state) | {"residues": saved}
        self._settings.note_place(state)
        self._take_up_residues(self._bound.tensors)
        for kept in self._streams:
            for progress in kept.progress.values():
                self._take_up_progress(progress)
        if known and saved.keys() <= known.keys():
            self._bound.loaded = None

    def _take_up_residues(self, tensors: Mapping[str, CompressedTensor]) -> None:
        """Give tensors, by `_in_stream`, the residues that were loaded for them."""
        if self._bound.loaded is None or not tensors:
            return
        saved = self._bound.loaded["residues"]
        if saved:
            # Variables that join later may have been frozen when the state was saved.
            joins_later = bool(self._bound.tensors)
            shapes = {name: own.shape for name, own in tensors.items()}
            found = {name: np.shape(saved[name]) for name in shapes.keys() & saved.keys()}
            check_residues(found, {name: shapes[name] for name in found} if joins_later else shapes)
        norms = self._bound.loaded.get("recent_norms", {})
        for name, tensor in tensors.items():
            set_value(tensor.residue, saved.get(name, np.zeros(tensor.shape)))
            set_value(tensor.recent, [*norms.get(name, (0, 0)), 0])

    def _take_up_progress(self, progress: Progress) -> None:
        """Give an exchange the step that was loaded for it."""
        loaded = self._bound.loaded
        if loaded is not None:
            saved = loaded.get("exchanges", {})
            progress.take_up(saved.get(progress.label, {"step": loaded["step"]}))


def objects() -> list[ScaleCom]:
    """All ScaleComs of this process, in the order in which they were made."""
    return [compressor for ref in _objects if (compressor := ref()) is not None]


def all_exchanges() -> list[Exchange]:
    """All exchanges of this process, in the order in which their ScaleComs were made."""
    return [exchange for compressor in objects() for exchange in compressor.exchanges()]


@functools.cache
def shared() -> ScaleCom:
    """The object of all tapes of the process that are given the class itself."""
    with tf.init_scope():
        return ScaleCom()


def is_scalecom(compression: Any) -> bool:
    """Whether `compression` is this class or one of its objects."""
    kind = compression if isinstance(compression, type) else type(compression)
    return issubclass(kind, ScaleCom)


def scale_reader(loss_scale: LossScale | None) -> Callable[[], tf.Tensor | None]:
    """A function that gives the loss scale as a tensor, or None for 1."""
    if loss_scale is None:
        return lambda: None
    if not (callable(loss_scale) or hasattr(loss_scale, "loss_scale")):
        raise TypeError(
            "loss_scale must be a LossScaleOptimizer or a callable that gives the current scale, "
            f"not {loss_scale!r}"
        )

    def read() -> tf.Tensor:
        scale = loss_scale() if callable(loss_scale) else loss_scale.loss_scale
        if not tf.executing_eagerly() and not isinstance(scale, (tf.Tensor, tf.Variable)):
            raise TypeError(
                "in a traced function loss_scale must give a tf.Tensor or tf.Variable, such as "
                f"`lambda: optimizer.loss_scale`. With a number ({scale!r}), the scale would never "
                "change again"
            )
        return tf.cast(scale, tf.float64)

    return read


def _place(has_residues: bool) -> dict[str, int]:
    """The rank and the number of ranks, for a state; empty if the state has no residues."""
    known = has_residues and horovod.is_initialized()
    return {"rank": horovod.rank(), "ranks": horovod.size()} if known else {}


def _label(stream: int, names: Sequence[str]) -> str:
    """An exchange's name in checkpoints: the same whenever the same variables are trained."""
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]
    return f"{stream}-{len(names)}-{digest}"


def _in_stream(stream: int, name: str) -> str:
    return name if stream == 0 else f"{name}#{stream}"
