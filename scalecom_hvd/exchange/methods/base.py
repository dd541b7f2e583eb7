"""What a method is: a class with one generator, `step`, that averages one bucket's gradients.

A new method is one new file: a subclass of `Method`. It is given the bucket (its moves, see
bucket.py), the collectives of this bucket, and its own state, and it yields what it waits for.
What the bucket was told is committed or rolled back with the step, and so is the state. Besides,
`Method` is what users pass as `compression=`: settings, residues, the loss scale, checkpoints.

Imports bucket, residue and the rooms below.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from scalecom_hvd.agreement import digest_of
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import LAST, Collectives, Result, Step, Wait, Work
from scalecom_hvd.exchange.gradients import as_bytes
from scalecom_hvd.exchange.quantisers import Float16, Quantiser, Unrounded, quantiser_of
from scalecom_hvd.exchange.residue import CompressedTensor, Residues, every_step
from scalecom_hvd.saved_state import check_local_steps, check_method
from scalecom_hvd.schedule import leader

log = logging.getLogger("scalecom_hvd")

TensorStates = Mapping[str, Mapping[str, torch.Tensor]]
"""{name of a compressed tensor: {what: tensor}}."""


@dataclasses.dataclass(frozen=True)
class State:
    """What a method knows of one bucket from the steps before.

    `Method.step` is given one, and gives the next one: it changes nothing in place, since the
    step may turn out not to count. Then the next one is dropped.

    Attributes:
        step: the number of this step.
        tensors: {name: {what: tensor}} of this bucket's compressed tensors.
        method: {what: tensor or number} of the whole method. All buckets of a step are given the
            same. Where several change it, the last bucket's counts.
        whole_next: whether the next step is sent whole. Look-ahead chooses for it only if not.
        arrives: the collective that completes the state in the next step, if the method left one
            under way, as look-ahead does.
    """

    step: int
    tensors: TensorStates
    method: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    whole_next: bool = False
    arrives: Wait[torch.Tensor] | None = None


class BucketCollectives:
    """The collectives of one bucket's step, for a method.

    Each is submitted when it is called, and waited for by `yield from`:
    `averages = yield from collectives.average(values)`. Every rank must ask for the same ones in
    the same order. Bytes are counted in `submitted`.

    Attributes:
        bucket: the bucket's number.
        step: the step's.
        size, position: the number of ranks, and this one's place.
        share: what a sum over ranks is multiplied by: 1 / size, or 1 for sums. `average` does it;
            who adds up what was gathered must.
        waits: all that was submitted.
    """

    def __init__(
        self,
        collectives: Collectives,
        name: Callable[[str], str],
        bucket: Bucket,
        step: int,
        staggered: bool,
        senders: Sequence[int] | None,
        submitted: dict[str, int],
    ) -> None:
        self._collectives, self._name, self._submitted = collectives, name, submitted
        self._bucket, self.step = bucket, step
        self._staggered, self._senders = staggered, senders
        self.waits: list[Wait[Any]] = []
        self.sent_values = False
        self.bucket = bucket.number
        self.size, self.position = collectives.size, collectives.position
        self.share = collectives.share

    def leader(self, later: int = 0) -> int:
        """The position of the rank that chooses for this bucket, now or so many steps later."""
        turn = self.step + later
        return leader(turn, self.bucket, self.size, self._staggered, self._senders)

    def leads(self, later: int = 0) -> bool:
        """Whether that is this rank."""
        return self.leader(later) == self.position

    def broadcast(self, offsets: torch.Tensor, root: int) -> Wait[torch.Tensor]:
        """The offsets, or anything else, of the rank at position `root`, in place.

        Others bring a buffer of the same size and dtype, which is overwritten. One at a time: it
        has a fixed name.
        """
        work = self._collectives.broadcast(offsets, root, self._name(f"offsets.{self.bucket}"))
        return self._wait("offsets", work, "offsets", offsets)

    def average(
        self, values: torch.Tensor, name: str = "values", dtype: torch.dtype = torch.float32
    ) -> Wait[torch.Tensor]:
        """The average over ranks, or their sum where the optimizer asks for sums, in place.

        Args:
            values: any that need not be kept.
            name: one that no other collective of this step has.
            dtype: float16 is summed in float16, which no division would survive, so the result is
                a new tensor of this dtype. Others keep theirs.
        """

        def divided(total: torch.Tensor) -> torch.Tensor:
            return total.to(dtype) * self.share if total.dtype == torch.float16 else total

        work = self._collectives.average(values, self._name(f"{name}.{self.bucket}"))
        return self._wait(name, work, "values", values, divided)

    def average_values(self, values: torch.Tensor | None = None) -> Wait[torch.Tensor]:
        """What the bucket took in place, averaged, with the tensors that it sends whole behind it.

        Of values in float16 the result is the sum, as the bucket knows: give it to `receive`.

        Args:
            values: what `take` gave, which comes back as the result. None: nothing was taken.
        """
        bucket, works = self._bucket, []
        for ending, buffer in bucket.fill().items():
            name = self._name(f"{bucket.kind}.{self.bucket}{ending}")
            works.append(self._collectives.average(buffer, name))
            self._submitted["dense"] += buffer.numel() * buffer.element_size()
        self._submitted["dense"] -= bucket.values_bytes
        self._submitted["values"] += bucket.values_bytes
        self._submitted["collectives"] += len(works)
        self.sent_values = True
        work = works[0] if len(works) == 1 else _All(works)
        wait: Wait[torch.Tensor] = Wait("values", work, LAST, lambda _: values)
        self.waits.append(wait)
        return wait

    def gather(self, tensor: torch.Tensor, name: str) -> Wait[list[torch.Tensor]]:
        """Every rank's tensor, all of one shape, in order of position.

        Raises:
            ValueError: ranks brought tensors of other lengths.
        """

        def parts(joined: torch.Tensor) -> list[torch.Tensor]:
            if len(joined) != self.size * len(tensor):
                raise ValueError(
                    f"gather({name!r}): this rank brought {len(tensor)} rows, and all together "
                    f"{len(joined)}: bring as many on every rank, padded where there are fewer"
                )
            # Copies: bytes are viewed as other dtypes only where they begin on a word, and
            # simulated ranks share what is joined.
            return [part.clone() for part in joined.split(len(tensor))]

        work = self._collectives.gather(tensor, self._name(f"{name}.{self.bucket}"))
        return self._wait(name, work, "gathered", tensor, parts)

    def _wait(
        self,
        what: str,
        work: Work,
        kind: str,
        buffer: torch.Tensor,
        then: Callable[[Any], Result] | None = None,
    ) -> Wait[Result]:
        self._submitted[kind] += buffer.numel() * buffer.element_size()
        self._submitted["collectives"] += 1
        wait = Wait(what, work, len(self.waits) + 1, then)
        self.waits.append(wait)
        return wait


class _All:
    """Several collectives as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def wait(self) -> torch.Tensor:
        return [work.wait() for work in self._works][0]


class Averager(Protocol):
    """What a method asks of whoever averages for its optimizer."""

    def in_step(self) -> bool:
        """Whether gradients were reported that are not averaged yet."""
        ...

    def complete_state(self) -> None:
        """Wait for what the method's state still lacks; every rank submitted it."""
        ...

    def agree_anew(self) -> None:
        """Other residues were loaded: ranks compare at the next step."""
        ...

    def abort(self) -> None:
        """Forget a step that cannot be completed; nothing is lost from the residues."""
        ...

    def meet(self) -> None:
        """What all ranks do when they were started again, or newcomers have come."""
        ...

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step."""
        ...

    def watch(self, diagnostics: Diagnostics) -> None:
        """Look at steps from now on."""
        ...


class LocalRounds(Protocol):
    """What a method asks of local steps (local_steps.py), where there are any."""

    newcomer: bool

    @property
    def travels(self) -> bool:
        """Whether averages travel that were not waited for."""
        ...

    def synchronisations_in(self, steps: int) -> int:
        """How many synchronisations there are in this many first steps."""
        ...

    def collect(self) -> None:
        """Wait for averages that travel."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is saved of them."""
        ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless that fits."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up."""
        ...

    def meet(self) -> None:
        """What all ranks do when newcomers have come."""
        ...

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank's steps."""
        ...


# Settings that say how ScaleCom's leader chooses and sends.
_LEADERS_SETTINGS = ("leader", "lookahead", "wire_dtype")


class Method:
    """A way to average gradients with error feedback. One object serves one optimizer.

    Args:
        config: the settings; default: the defaults overridden by SCALECOM_RATE, SCALECOM_BETA,
            ... of the environment.
        loss_scale: a torch.amp.GradScaler, or a callable that gives the current scale, so that
            residues are kept in unscaled units.
        diagnostics: a number of steps, or Diagnostics: every so many steps see how alike workers
            are, and how good the choice is.
        quantiser: what the sent values become, None or one of quantisers.py.
        **fields: any field of ScaleComConfig, over `config`.

    Raises:
        ValueError, TypeError: settings that cannot work, or mean nothing to the method.
    """

    unused: ClassVar[tuple[str, ...]] = _LEADERS_SETTINGS
    """Fields of ScaleComConfig that this method has no use for."""
    has_leader: ClassVar[bool] = False
    """Whether one rank chooses for all, so that stats() name it."""
    sends_all: ClassVar[bool] = False
    """Whether every element travels, so that stats()["rate"] is 1."""
    takes_quantiser: ClassVar[bool] = False
    """Whether it takes a quantiser for its values."""
    always_gathers: bool = False
    """Whether ranks choose different places, so that no sum can be made of their values."""
    equal_state: ClassVar[tuple[str, ...]] = ()
    """What of its state, its tensors' or its own, is the same on all ranks. Where it is not,
    because one of them comes from another step, all ranks begin it anew."""

    def __init__(
        self,
        *,
        config: ScaleComConfig | None = None,
        loss_scale: Any = None,
        diagnostics: Diagnostics | int | None = None,
        quantiser: Quantiser | type[Quantiser] | None = None,
        **fields: Any,
    ) -> None:
        name = type(self).__name__
        if quantiser is not None and not self.takes_quantiser:
            raise ValueError(
                f"a quantiser means nothing to {name}: leave it out, or take ScaleCom, LocalTopK "
                "or RandomK (a method of your own: set takes_quantiser)"
            )
        config = config if config is not None else ScaleComConfig.from_env()
        self.config = self._checked(config.replace(**fields))
        defaults = ScaleComConfig()
        for field in self.unused:
            if getattr(self.config, field) != getattr(defaults, field):
                raise ValueError(
                    f"{field} means nothing to {name}: leave it out, and unset "
                    f"SCALECOM_{field.upper()} if it is set"
                )
        self.quantiser = quantiser_of(quantiser)
        self.residues = Residues(self.config)
        self.tensor_states: dict[str, dict[str, torch.Tensor]] = {}
        self.method_state: dict[str, Any] = {}
        self._read_scale = _scale_reader(loss_scale)
        self.diagnostics = Diagnostics.of(diagnostics)
        self._averager: Averager | None = None
        self._local: LocalRounds | None = None
        self._loaded: dict[str, Any] | None = None
        # What was loaded before it was attached, until the first step: (states, residues).
        self._waiting: tuple[dict[str, Any] | None, dict[str, torch.Tensor] | None] = (None, None)

    # What a new method says.

    def step(
        self, bucket: Bucket, collectives: BucketCollectives, state: State
    ) -> Step[State | None]:
        """Average a bucket's compressed tensors over ranks.

        Say what the bucket sends and receives (see bucket.py), the same on every rank, and yield
        what is waited for: `yield from` moves and collectives do so. What was not sent stays in
        the residue. A step may turn out not to count, so change nothing but the bucket.

        Returns:
            The next State, by dataclasses.replace(state, tensors=...), or None: it stays.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define step(self, bucket, collectives, state)"
        )

    def whole_step(
        self, bucket: Bucket, collectives: BucketCollectives, state: State
    ) -> Step[State | None]:
        """In a step that is sent whole this takes the place of `step`, before gradients travel.

        It sends no values, and leaves residues as they are. bucket.grads holds this rank's
        gradients; times bucket.scale they are in the residues' units. Returns the next state as
        `step` does.
        """
        return None
        yield  # which makes it a generator

    def init(self, tensor: CompressedTensor) -> dict[str, torch.Tensor]:
        """The state of a tensor at the start, {what: tensor}; the shapes are the same later on.

        Args:
            tensor: tensor.residue is m (N,), tensor.geometry its lanes, tensor.name its name.
        """
        return {}

    def init_method(self) -> dict[str, Any]:
        """The state of the whole method at the start, {what: tensor or number}."""
        return {}

    def is_ready(self, names: Collection[str]) -> bool:
        """Whether the state of these tensors allows a compressed step; else it is sent whole."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """What ranks, and a state and who loads it, must have in common besides the config."""
        return {"method": type(self).__name__} | self._quantiser_settings

    def check_tensor_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raise ValueError unless saved {what: {name: tensor}} fit these tensors."""
        expected = {
            name: {what: tuple(value.shape) for what, value in self.init(tensor).items()}
            for name, tensor in self.residues.tensors.items()
        }
        found: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in expected}
        for what, values in states.items():
            for name, value in values.items():
                found.setdefault(name, {})[what] = tuple(value.shape)
        if found != expected:
            name = next(n for n in [*found, *expected] if found.get(n) != expected.get(n))
            raise ValueError(
                f"the method's state of {name} is {found.get(name)} in the state and "
                f"{expected.get(name)} now: it belongs to another model, or another version of "
                f"{type(self).__name__}"
            )

    # What its settings come to.

    def _checked(self, config: ScaleComConfig) -> ScaleComConfig:
        """The settings as this method uses them; of those given to `__init__`."""
        return config

    @property
    def sums_halves(self) -> bool:
        """Whether float16 values are summed."""
        sums = isinstance(self.quantiser, Float16) and not self.always_gathers
        return self.config.wire_dtype == "float16" or sums

    @property
    def _quantiser_settings(self) -> dict[str, Any]:
        rounded = not isinstance(self.quantiser, Unrounded)
        return {"quantiser": repr(self.quantiser)} if rounded else {}

    @property
    def loss_scale(self) -> Callable[[], float]:
        """Gives the current loss scale; may be set to a GradScaler too."""
        return self._read_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: Any) -> None:
        self._read_scale = _scale_reader(loss_scale)

    # What optimizers ask.

    def attach(
        self,
        parameters: Mapping[str, torch.Tensor],
        averager: Averager,
        local: LocalRounds | None = None,
    ) -> None:
        """Bind to an optimizer's parameters; called by DistributedOptimizer.

        Args:
            parameters: {name: parameter} of all that are trained.
            averager: what averages their gradients.
            local: its local steps, whose common parameters these are.
        """
        if self._averager is not None:
            raise ValueError(
                f"this {type(self).__name__} already serves an optimizer; make one for each: "
                "their residues are different"
            )
        loaded, has_residues = self._loaded or {}, bool(self.residues.loaded)
        self._waiting = self._loaded, self.residues.loaded
        try:
            if self._loaded is not None:
                self._check_local(loaded, local)
            if self.diagnostics is not None:
                averager.watch(self.diagnostics)
            if local is not None:
                self.residues.synchronisations_in = local.synchronisations_in
            self.residues.attach(parameters)
            if has_residues:
                self._check_states(loaded)
            self._take_up_states(loaded)
            if local is not None and "local_steps" in loaded:
                local.load_state_dict(loaded["local_steps"])
        except BaseException:
            self.detach()
            raise
        self._averager, self._local, self._loaded = averager, local, None

    @staticmethod
    def _check_local(state: Mapping[str, Any], local: LocalRounds | None) -> None:
        check_local_steps(state, local is not None)
        if local is not None:
            local.check_state(state["local_steps"])

    def detach(self) -> None:
        """Serve nobody again, with what was loaded; called when no optimizer could be made."""
        self._averager = self._local = None
        self.residues.synchronisations_in = every_step
        self._loaded, residues = self._waiting
        self.residues.detach(residues)

    @property
    def local(self) -> LocalRounds | None:
        """The local steps, where the optimizer takes them."""
        return self._local

    def compress(self, tensor: Any = None) -> tuple[torch.Tensor, Any]:
        """Refused: Horovod's own optimizer asks for tensors one by one, and nobody may wait."""
        name = self.__name__ if isinstance(self, type) else type(self).__name__
        name = name if isinstance(self, (type, Method)) else "this method"
        raise TypeError(
            f"{name} works in this package's DistributedOptimizer only: import "
            "scalecom_hvd.torch as hvd. In horovod.torch's own, take "
            "ScaleCom(named_parameters=...)"
        )

    def decompress(self, tensor: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """The average as it is: this package's optimizer has made it before Horovod asks."""
        return tensor

    # What users ask.

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank; all ranks need not call it, and calling it sends nothing.

        Returns:
            step, skipped_steps (a gradient was not finite); leader, where there is one: the
            position of the rank that chose last (for the first bucket).

            bytes_offsets, bytes_values, bytes_dense, bytes_gathered: handed over in the last
            step, to be broadcast, all-reduced and (by some methods) gathered; bytes_traffic: what
            this rank sent for them on a ring, on average over ranks; rate: elements of the model
            per element sent; collectives per step (besides one of 4 bytes, by which ranks tell
            that there are gradients).

            residue_norm: Euclidean, over all residues (reads them all); residue_ratio: that of
            residues / beta, what waits, to that of gradients, when it was last looked at (every
            100 steps; None before).

            diagnostics, where they were asked for: the numbers of the last look, as
            diagnostics.look gives them, and its step (None before the first), the same on all
            ranks; what ranks gather for them is not counted in the bytes above.

            local_steps, steps_taken, steps_skipped, with local steps: the schedule, this rank's
            steps, and those of them left out because a gradient was not finite; changes_clipped,
            where they are: how many of this rank's. `step` counts synchronisations then, with
            fragments rounds, and bytes are those of the last one, or of the last fragment.

            quantiser, where there is one, and values: whether its values were "gathered" or
            "averaged" in the last step, or in some buckets this and in others that; None where
            all was sent whole.
        """
        residues = self.residues
        numbers: dict[str, Any] = {"step": residues.step, "skipped_steps": residues.skipped_steps}
        if self._averager is not None:
            numbers |= self._averager.stats()
        if self._local is not None:
            numbers |= self._local.stats()
        if not isinstance(self.quantiser, Unrounded):
            ways = {"gathered": "bytes_gathered", "averaged": "bytes_values"}
            travelled = [way for way, count in ways.items() if numbers.get(count)]
            values = " and ".join(travelled) or None
            numbers |= {"quantiser": repr(self.quantiser), "values": values}
        if not self.has_leader:
            numbers.pop("leader", None)
        if self.sends_all and "rate" in numbers:
            numbers["rate"] = 1.0
        ratio = residues.health.ratio
        return numbers | {"residue_norm": residues.norm(), "residue_ratio": ratio}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residues, step and state, to be saved by every rank with the model.

        Tensors are the ones in use, not copies; torch.load(..., weights_only=True) reads it.

        Returns:
            {"version", "step", "config", "residues": {name: tensor shaped like the parameter}},
            and what the method and local steps need.

        Raises:
            RuntimeError: called between backward() and step().
        """
        self._complete(
            "state_dict() was called between backward() and step(): call it after optimizer.step()"
        )
        state = self.residues.state_dict() | self.settings
        if self._loaded is not None:
            return state | self._loaded
        if self._local is not None:
            state["local_steps"] = self._local.state_dict()
        return state | self._states()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what this rank saved. Call it on every rank, before training goes on.

        Raises:
            ValueError: it does not fit: another model, method, setting, or version. Nothing is
                changed then.
        """
        self._complete(
            "load_state_dict() was called between backward() and step(): call it before backward()"
        )
        check_method(state, self.settings)
        if self._averager is not None:
            self._check_local(state, self._local)
        self.residues.check(state)
        if self._averager is not None:
            self._check_states(state)
        self.residues.load_state_dict(state)
        extra = {key: state[key] for key in (*_STATE_KEYS, "local_steps") if key in state}
        if self._averager is None:
            self._loaded = extra
        else:
            self._take_up_states(state)
            self._averager.agree_anew()
        if self._local is not None:
            self._local.load_state_dict(state["local_steps"])

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, or copied: settings and this rank's state; it serves nobody then.

        The loss scale is left out: give the script's GradScaler anew, as `loss_scale`.
        """
        nobody = {"_averager": None, "_local": None, "_loaded": None, "_waiting": (None, None)}
        left_out: dict[str, Any] = {
            "residues": None,
            "_read_scale": None,
            "tensor_states": {},
            "method_state": {},
        }
        return vars(self) | nobody | left_out | {"saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        vars(self).update(state)
        self.residues, self._read_scale = Residues(self.config), _scale_reader(None)
        self.load_state_dict(saved)

    def _complete(self, complaint: str) -> None:
        if self._averager is not None:
            if self._local is not None:
                self._local.collect()
            if self._averager.in_step():
                raise RuntimeError(f"{type(self).__name__}.{complaint}")
            self._averager.complete_state()

    # Its state.

    def _states(self) -> dict[str, Any]:
        """What of the state is saved. Look-ahead's offsets keep their old key."""
        by_kind: dict[str, dict[str, torch.Tensor]] = {}
        for name, state in self.tensor_states.items():
            for what, value in state.items():
                # A copy: it may be a view of a buffer that later steps use again.
                by_kind.setdefault(what, {})[name] = value.clone()
        saved: dict[str, Any] = {}
        if "offsets" in by_kind:
            saved["offsets"] = by_kind.pop("offsets")
        if by_kind or self.method_state:
            own = {what: _copied(value) for what, value in self.method_state.items()}
            saved["method_state"] = {"tensors": by_kind, "method": own}
        return saved

    def _check_states(self, state: Mapping[str, Any]) -> None:
        if not state.get("residues", True):
            return  # it was saved before the first step, or by a single process
        self.check_tensor_states(_saved_states(state))
        expected = {what: _shape(value) for what, value in self.init_method().items()}
        given = state.get("method_state", {}).get("method", {})
        found = {what: _shape(value) for what, value in given.items()}
        if found != expected:
            raise ValueError(
                f"the state of the whole method is {found} in the state and {expected} now: it "
                f"belongs to another version of {type(self).__name__}"
            )

    def _take_up_states(self, state: Mapping[str, Any]) -> None:
        """Begin with this saved state, or anew where there is none."""
        self.begin_state_anew()
        for what, values in _saved_states(state).items():
            for name, value in values.items():
                # A copy: it may be on another device, and the script may keep the state it read.
                own, residue = self.tensor_states[name], self.residues.tensors[name].residue
                dtype = own[what].dtype if what in own else value.dtype
                own[what] = value.to(own.get(what, residue).device, dtype, copy=True)
        for what, value in state.get("method_state", {}).get("method", {}).items():
            first = self.method_state[what]
            is_tensor = isinstance(first, torch.Tensor)
            self.method_state[what] = value.to(first, copy=True) if is_tensor else value

    def begin_state_anew(self) -> None:
        """All state is as at the start."""
        tensors = self.residues.tensors
        self.tensor_states = {name: dict(self.init(tensor)) for name, tensor in tensors.items()}
        self.method_state = dict(self.init_method())

    def compare_states(self, digests: Collection[str | None]) -> None:
        """Begin anew what must be the same on all ranks, if their digests say that it is not."""
        if len(set(digests)) > 1:
            log.warning("ranks come with different states of their method: all begin it anew")
            self.begin_equal_state_anew()

    def begin_equal_state_anew(self) -> None:
        """What must be the same on all ranks (`equal_state`) may not be: begin it anew."""
        first_own = self.init_method()
        self.method_state |= {w: first_own[w] for w in self.equal_state if w in first_own}
        for name, state in self.tensor_states.items():
            first = self.init(self.residues.tensors[name]) if self.equal_state else {}
            for what in self.equal_state:
                state.pop(what, None)
                if what in first:
                    state[what] = first[what]

    def take_state(self, states: Sequence[State]) -> None:
        """A step counted: what its buckets gave is the state now."""
        self._waiting = None, None
        before = dict(self.method_state)
        for state in states:
            for name, values in state.tensors.items():
                self.tensor_states[name] = dict(values)
            changed = {what: v for what, v in state.method.items() if v is not before[what]}
            self.method_state |= changed

    def digest_of_state(self) -> str | None:
        """For ranks to compare: of what must be the same on all; None where there is nothing."""
        states = self.tensor_states | {"": self.method_state}
        return digest_of(
            {
                f"{what} {name}": as_bytes(torch.as_tensor(state[what])).numpy()
                for name, state in states.items()
                for what in self.equal_state
                if what in state
            }
        )

    # Elastic runs; called by elastic states.

    def abort(self) -> None:
        """Forget a step that cannot be completed, and what is under way: a worker was lost.

        Nothing is lost from the residues.
        """
        if self._averager is not None:
            self._averager.abort()

    def meet(self) -> None:
        """What all ranks do when they were started again, or newcomers have come.

        They will go on at one step.
        """
        self._averager.meet()
        if self._local is not None:
            self._local.meet()


_STATE_KEYS = ("offsets", "method_state")


def _saved_states(state: Mapping[str, Any]) -> dict[str, Mapping[str, torch.Tensor]]:
    """{what: {name: tensor}} in a saved state."""
    by_kind = dict(state.get("method_state", {}).get("tensors", {}))
    return by_kind | ({"offsets": state["offsets"]} if state.get("offsets") else {})


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _scale_reader(loss_scale: Any) -> Callable[[], float]:
    if loss_scale is None:
        return lambda: 1.0
    reader = getattr(loss_scale, "get_scale", loss_scale)
    if not callable(reader):
        raise TypeError(
            "loss_scale must be a GradScaler or a callable that gives the current scale, not "
            f"{loss_scale!r}"
        )
    return reader
