"""ScaleCom: what users pass as `compression=` to this package's optimizers and tapes. It holds settings, residues and the loss scale; the
graph's part is reducer.py's.

Tapes are made anew every step, so residues live here, by variable. Imports reducer and residues.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from scalecom_hvd.agreement import Names
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.saved_state import STATE_VERSION, check_finite, check_residues, check_state
from scalecom_hvd.tensorflow.reducer import Arguments, Reducer, reduction
from scalecom_hvd.tensorflow.residues import CompressedTensor, Progress, runs_eagerly, set_value, shape_of, value_of
from scalecom_hvd.tensorflow.transport import Transport, is_elastic

log = logging.getLogger("scalecom_hvd")

_NEEDS_DROP_IN = (
    "ScaleCom must know whose gradient it compresses, which horovod.tensorflow does not say: write `import scalecom_hvd.tensorflow as hvd` "
    "(or `import scalecom_hvd.tensorflow.keras as hvd`) and use its DistributedOptimizer or DistributedGradientTape; for a collective of "
    "your own use hvd.Compression.none"
)

# Numbers of stats() of which, of several exchanges, the largest counts; others are summed.
_LARGEST_COUNTS = ("step", "rate", "leader", "residue_ratio")
_KEEPER_CHANGED = "a new ScaleCom serves the variables of this tape, so their residues start at zero"
_MAKE_IT_ONCE = "make the ScaleCom once, outside of the training step, and pass the same object to every DistributedGradientTape"

_numbers = itertools.count()
_alive: weakref.WeakSet[ScaleCom] = weakref.WeakSet()
# In an elastic run, what others agreed on before this process came, by label; None until ranks have met.
_agreed: dict[str, dict[str, Any]] | None = None


class _Settings(tf.train.experimental.PythonState):
    """The settings, beside the residues in a tf.train.Checkpoint: residues made with others are refused."""

    def __init__(self, config: ScaleComConfig) -> None:
        self._config = config

    def serialize(self) -> str:
        return json.dumps({"version": STATE_VERSION, "config": self._config.to_dict()})

    def deserialize(self, string_value: str) -> None:
        check_state({"step": 0, "residues": {}, **json.loads(string_value)}, self._config)


class _Stream(tf.Module):
    """The residues that one series of gradients needs, {name: variable}, and the progress of its exchanges, {label: Progress}.

    There is one stream, unless a persistent tape is asked for gradients of the same variables several times in a step: those are different
    series, and each keeps what was not sent of it.
    """

    def __init__(self) -> None:
        super().__init__(name="stream")
        self.residues: dict[str, tf.Variable] = {}
        self.progress: dict[str, Progress] = {}


@dataclass
class _Keeper:
    """Noted at a variable: which ScaleCom keeps its residue for tapes, since when in eager mode or not, and in how many calls."""

    who: weakref.ref[ScaleCom]
    eager: bool
    calls: int = 1


class _Bound:
    """What a ScaleCom knows of variables and must not be part of a checkpoint."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rates: dict[str, float] = {}
        self.tensors: list[dict[str, CompressedTensor]] = []
        self.reducers: dict[tuple, Reducer] = {}
        self.loaded: dict[str, Any] | None = None


class ScaleCom(tf.Module, Compressor):
    """Cyclic local top-k compression with low-pass filtered residues (Chen et al., NeurIPS 2020).

    config: a ScaleComConfig; default: the defaults overridden by SCALECOM_RATE, SCALECOM_BETA, ... of the environment.
    loss_scale: a Keras LossScaleOptimizer, or a callable that gives the current scale (in a traced function: as a tensor or variable),
        where gradients arrive scaled, as in LossScaleOptimizer(hvd.DistributedOptimizer(...)); residues are then kept in unscaled units.
    fields: any field of ScaleComConfig, over `config`.

    Make one object, outside of the training step: it keeps the residues. It may serve an optimizer, or the tapes of all steps, and is
    tracked by tf.train.Checkpoint. Globs in `dense` and `rates` match variables' names without ":0", such as "dense/kernel".
    Raises ValueError or TypeError for settings that cannot work.
    """

    def __init__(self, *, config: ScaleComConfig | None = None, loss_scale: Any = None, **fields: Any) -> None:
        super().__init__(name="scalecom")
        if "named_parameters" in fields:
            raise TypeError("named_parameters is for PyTorch: in TensorFlow ScaleCom learns variables from the optimizer or tape")
        self.config = (config if config is not None else ScaleComConfig.from_env()).replace(**fields)
        self.number = next(_numbers)
        self._loss_scale = _scale_reader(loss_scale)
        self._settings = _Settings(self.config)
        self._streams: list[_Stream] = []
        self._bound = _Bound()
        self._make_stream()
        _alive.add(self)

    @staticmethod
    def compress(tensor: Any) -> Any:
        """What horovod.tensorflow itself would call; it does not say for which variable. Raises TypeError."""
        raise TypeError(_NEEDS_DROP_IN)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        raise TypeError(_NEEDS_DROP_IN)

    def reduction(self, arguments: Arguments, name: str, calls_of: Any = None) -> Callable:
        """What an optimizer or tape calls instead of Horovod's `_allreduce_grads`. calls_of: {ref: how often}, of one tape."""

        def reducer_for(variables: Sequence[tf.Variable], *rest: Any) -> tuple[Reducer, list[str]]:
            stream = 0
            if calls_of is not None:
                if not calls_of:
                    self._notice_changed_keeper(variables)
                refs = [variable.ref() for variable in variables]
                stream = max((calls_of.get(ref, 0) for ref in refs), default=0)
                calls_of.update(dict.fromkeys(refs, stream + 1))
            return self._reducer_for(stream, variables, *rest)

        return reduction(arguments, reducer_for, self._loss_scale, name)

    def _reducer_for(
        self, stream: int, variables: Sequence[tf.Variable], present: Sequence[tf.Variable], sparse: Sequence[Any], arguments: Arguments
    ) -> tuple[Reducer, list[str]]:
        bound = self._bound
        names = [self._name_of(variable) for variable in variables]
        given = {self._name_of(variable) for variable in present}
        key = (stream, tuple(names))
        reducer = bound.reducers.get(key)
        sparse_names = sorted(v.name for v in sparse if isinstance(v, tf.Variable))

        def make() -> Reducer:
            while len(self._streams) <= stream:
                self._make_stream()
            return self._make_reducer(stream, dict(zip(names, variables, strict=True)), arguments)

        if reducer is None and (agreed := _agreed_on(_label(stream, names))) is not None:
            bound.reducers[key] = reducer = make()
            reducer.join(agreed, sparse_names, given)
        if reducer is None or reducer.arguments.comparable() != arguments.comparable() or reducer.lacks(given):
            known = set() if reducer is None else reducer.members
            reducer = make()
            reducer.agree(sorted(given | known), sparse_names)
            bound.reducers[key] = reducer
        return reducer, names

    def _make_reducer(self, stream: int, variables: dict[str, tf.Variable], arguments: Arguments) -> Reducer:
        for name, variable in variables.items():
            if not variable.dtype.is_floating:
                raise TypeError(
                    f"{name} has dtype {variable.dtype.name}, which ScaleCom cannot average over ranks: train it as two real variables, or "
                    "keep it out of this optimizer"
                )
            if not variable.shape.is_fully_defined():
                raise TypeError(f"{name} has the shape {variable.shape}; ScaleCom needs variables whose shape is known")
        rates = self._rates_of(variables)
        kept, tensors = self._streams[stream], self._bound.tensors[stream]
        mine = {
            name: tensors.get(name) or CompressedTensor(name, variable, rates[name], self.config)
            for name, variable in variables.items()
            if rates[name] > 1
        }
        self._take_up_residues(stream, {name: tensor for name, tensor in mine.items() if name not in tensors})
        tensors.update(mine)
        for name, tensor in mine.items():
            if name not in kept.residues:
                kept.residues[name] = tensor.residue
        label = _label(stream, list(variables))
        if label not in kept.progress:
            progress = Progress(label)
            # Variables that were frozen or thawed: the same training goes on.
            related = [r for (s, names), r in self._bound.reducers.items() if s == stream and not variables.keys().isdisjoint(names)]
            if self.config.lookahead:
                for tensor in mine.values():
                    progress.hold_offsets(tensor)
            self._take_up_progress(label, progress)
            if related and runs_eagerly():
                set_value(progress.step, max(value_of(p.step) for p in (progress, *(r.progress for r in related))))
            kept.progress[label] = progress
        return Reducer(variables, mine, rates, kept.progress[label], self.config, arguments)

    def _rates_of(self, variables: Mapping[str, tf.Variable]) -> dict[str, float]:
        """A variable's rate stays what it was when it was first seen; globs may match any variable seen so far."""
        bound = self._bound
        bound.shapes |= {name: shape_of(variable) for name, variable in variables.items()}
        bound.rates = self.config.rates_for(bound.shapes) | bound.rates
        return {name: bound.rates[name] for name in variables}

    def _make_stream(self) -> None:
        self._streams = [*self._streams, _Stream()]
        self._bound.tensors.append({})

    def _name_of(self, variable: tf.Variable) -> str:
        """The variable's name without ":0"; a second one of that name gets ".1" appended, and so on."""
        names = self._bound.names
        if variable.ref() not in names:
            stem = variable.name.partition(":")[0]
            same = sum(1 for ref in names if ref.deref().name.partition(":")[0] == stem)
            names[variable.ref()] = f"{stem}.{same}" if same else stem
        return names[variable.ref()]

    def _notice_changed_keeper(self, variables: Iterable[tf.Variable]) -> None:
        """A ScaleCom that is made in the training step is another one in every step, and loses what was not sent."""
        eager, warned = tf.executing_eagerly(), False
        for variable in variables:
            former = getattr(variable, "_scalecom_keeper", None)
            if former is not None and former.who() is self:
                former.calls += 1
                continue
            variable._scalecom_keeper = _Keeper(weakref.ref(self), eager)
            if former is None:
                continue
            if former.who() is None and former.calls == 1 and former.eager and eager:
                raise ValueError(f"{_KEEPER_CHANGED}. {_MAKE_IT_ONCE}")
            if not warned:
                log.warning("%s. If that is the same training: %s", _KEEPER_CHANGED, _MAKE_IT_ONCE)
                warned = True

    # What users ask.

    def reducers(self) -> list[Reducer]:
        return list(self._bound.reducers.values())

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank; all ranks must not call it, and calling it sends nothing. Not to be called in a traced function.

        step, skipped_steps (a gradient was not finite); leader: the position of the rank that chose last (for the first bucket);
        bytes_offsets, bytes_values, bytes_dense: handed to Horovod in the last step; bytes_traffic: what this rank sent for them on a
        ring, on average over ranks; rate: elements of the model per element sent; collectives per step; residue_norm: Euclidean,
        over all residues (reads them all); residue_ratio: that of residues to that of gradients, when it was last looked at (every 100
        steps; None before). Of several exchanges (the two models of a GAN), step is the largest and the rest is summed.
        """
        # What a single process sends, and every one before its first step.
        numbers: dict[str, Any] = dict.fromkeys(("step", "skipped_steps", "leader", "bytes_offsets", "bytes_values", "bytes_dense"), 0)
        numbers |= {"bytes_traffic": 0, "rate": 1.0, "collectives": 0, "residue_ratio": None}
        for n, reducer in enumerate(self.reducers()):
            own = reducer.stats()
            for key, value in own.items():
                if n == 0 or numbers[key] is None:
                    numbers[key] = value
                elif value is not None:
                    numbers[key] = max(numbers[key], value) if key in _LARGEST_COUNTS else numbers[key] + value
        norms = [float(np.linalg.norm(value_of(r).astype(np.float64))) for stream in self._streams for r in stream.residues.values()]
        return numbers | {"residue_norm": math.hypot(*norms)}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residues and steps as arrays and numbers, to be saved by every rank beside the model (numpy.savez, pickle, ...).

        {"version", "step", "config", "residues": {name: array shaped like the variable}}, and "exchanges", what each needs beside.
        tf.train.Checkpoint(scalecom=compression) saves the same.
        """
        # What was loaded and nobody has needed yet is still to be saved.
        loaded = self._bound.loaded or {"step": 0, "residues": {}}
        residues = dict(loaded["residues"]) | {
            _in_stream(s, name): value_of(tensor.residue).reshape(tensor.shape)
            for s, tensors in enumerate(self._bound.tensors)
            for name, tensor in tensors.items()
        }
        exchanges = loaded.get("exchanges", {}) | {
            label: progress.as_dict() for stream in self._streams for label, progress in stream.progress.items()
        }
        step = max((exchange["step"] for exchange in exchanges.values()), default=loaded["step"])
        return {"version": STATE_VERSION, "step": step, "config": self.config.to_dict(), "residues": residues, "exchanges": exchanges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what this rank saved. Call it on every rank, before training goes on.

        Raises ValueError, naming it, for what does not fit: another model, other settings, another version, residues that are not finite.
        """
        check_state(state, self.config)
        check_finite({name: bool(np.isfinite(residue).all()) for name, residue in state["residues"].items()})
        known = {_in_stream(s, name): t.shape for s, tensors in enumerate(self._bound.tensors) for name, t in tensors.items()}
        if state["residues"] and known:  # else saved before the first step, when all of them were zero, or not needed before it
            check_residues({name: np.shape(residue) for name, residue in state["residues"].items()}, known)
        for kept in self._streams:
            for label, progress in kept.progress.items():
                progress.check(state.get("exchanges", {}).get(label, {}))
        self._bound.loaded = dict(state)
        for stream, (kept, tensors) in enumerate(zip(self._streams, self._bound.tensors, strict=True)):
            self._take_up_residues(stream, tensors)
            for label, progress in kept.progress.items():
                self._take_up_progress(label, progress)
        if known:
            self._bound.loaded = None

    def _take_up_residues(self, stream: int, tensors: Mapping[str, CompressedTensor]) -> None:
        """Residues that were loaded, for tensors that want them."""
        if self._bound.loaded is None or not tensors:
            return
        saved = self._bound.loaded["residues"]
        shapes = {_in_stream(stream, name): tensor.shape for name, tensor in tensors.items()}
        if saved:
            found = {name: shape for name, shape in shapes.items() if name in saved}
            # Variables that come after others may have been frozen when the state was saved.
            check_residues({name: np.shape(saved[name]) for name in found}, found if any(self._bound.tensors) else shapes)
        for name, tensor in tensors.items():
            set_value(tensor.residue, saved.get(_in_stream(stream, name), np.zeros(tensor.shape)))

    def _take_up_progress(self, label: str, progress: Progress) -> None:
        """The step, and look-ahead's offsets, that were loaded for an exchange."""
        if self._bound.loaded is None:
            return
        progress.take_up(self._bound.loaded.get("exchanges", {}).get(label, {"step": self._bound.loaded["step"]}))

    def exchanges(self) -> dict[str, Reducer]:
        """The exchanges that go on, by label."""
        return {_label(stream, names): reducer for (stream, names), reducer in self._bound.reducers.items()}


def objects() -> list[ScaleCom]:
    """All ScaleComs of this process, in the order in which they were made."""
    return sorted(_alive, key=lambda compressor: compressor.number)


def alive() -> list[ScaleCom]:
    """Those that take part in an exchange."""
    return [compressor for compressor in objects() if compressor.reducers()]


# Elastic runs.


def meet() -> None:
    """What ranks of an elastic run do together first of all, whenever Horovod starts: who is in exchanges tells newcomers about them.

    Later nobody could: a function that was traced before the newcomers came is not traced again, so nobody would answer them there.
    Blocks until all ranks are here, and raises UnknownError where one is lost.
    """
    global _agreed
    _agreed = None
    mine: dict[str, Reducer] = {}
    for compressor in alive():
        for label, reducer in compressor.exchanges().items():
            same = sum(1 for other in mine if other.partition(".")[0] == label)
            mine[f"{label}.{same}" if same else label] = reducer
    transport = Transport(horovod.global_process_set, horovod.Average, 1.0, "", Names())
    everyone = transport.exchange_objects({label: reducer.agreement() for label, reducer in mine.items()}, "agreements")
    agreed: dict[str, dict[str, Any]] = {}
    for theirs in reversed(everyone):  # the first rank's word counts, like its weights
        agreed |= theirs
    for label, reducer in mine.items():
        ahead = agreed[label]["ahead"]
        reducer.go_on(agreed.pop(label)["step"], all(theirs.get(label, {}).get("ahead") == ahead for theirs in everyone))
    _agreed = agreed


def have_met() -> bool:
    """Whether ranks have met since Horovod started."""
    return _agreed is not None


def _agreed_on(label: str) -> dict[str, Any] | None:
    """What others agreed on about an exchange that this process is about to make, told once; None if it is new to them, too."""
    if is_elastic() and not have_met():
        meet()
    found = next((known for known in _agreed or {} if known.partition(".")[0] == label), None)
    return None if found is None else _agreed.pop(found)


@functools.cache
def shared() -> ScaleCom:
    """What the bare class stands for in a tape: one object for all tapes of the process, with defaults and the environment's settings."""
    return ScaleCom()


def is_scalecom(compression: Any) -> bool:
    """Whether `compression` is this class or one of its objects."""
    return isinstance(compression, ScaleCom) or (isinstance(compression, type) and issubclass(compression, ScaleCom))


def _label(stream: int, names: Sequence[str]) -> str:
    """An exchange's name in checkpoints: the same whenever the same variables are trained."""
    return f"{stream}-{len(names)}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:12]}"


def _in_stream(stream: int, name: str) -> str:
    return name if stream == 0 else f"{name}#{stream}"


def _scale_reader(loss_scale: Any) -> Callable[[], Any]:
    """A function that gives the loss scale as a tensor, or None for 1."""
    if loss_scale is None:
        return lambda: None
    if isinstance(loss_scale, tf.keras.mixed_precision.LossScaleOptimizer) or hasattr(loss_scale, "loss_scale"):
        return lambda: tf.convert_to_tensor(loss_scale.loss_scale)
    if not callable(loss_scale):
        raise TypeError(f"loss_scale must be a LossScaleOptimizer or a callable that gives the current scale, not {loss_scale!r}")

    def read() -> tf.Tensor:
        scale = loss_scale()
        if not tf.executing_eagerly() and not isinstance(scale, (tf.Tensor, tf.Variable)):
            raise TypeError(
                "in a traced function loss_scale must give a tf.Tensor or tf.Variable, such as `lambda: optimizer.loss_scale`: a number "
                f"({scale!r}) would stay what it is now for ever"
            )
        return tf.cast(scale, tf.float64)

    return read
