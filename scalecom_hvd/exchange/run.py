"""The ledger of one training run on one rank: residues, and the state of its method.

A `Method` says what its state is, and an `Averager` (Exchange, LocalSteps, and PerTensor in
scalecom_hvd/torch) makes the steps. A `Run` holds, saves and loads what both have to remember, and
compares it between ranks. Every method has a run from the start, because a state may be loaded
before there is an optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from scalecom_hvd import saved_state
from scalecom_hvd.agreement import Names, Settings, agree, check_residues_of, describe, digest_of
from scalecom_hvd.bucket_layout import Stats
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.collectives import Collectives, gather_objects
from scalecom_hvd.exchange.gradients import as_bytes
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.residue import Residues, describe_tensors
from scalecom_hvd.integers import blocks_of
from scalecom_hvd.recent_norms import RecentNorms
from scalecom_hvd.saved_state import STATE_VERSION, Saved
from scalecom_hvd.stages import START

if TYPE_CHECKING:
    from scalecom_hvd.exchange.methods.base import Method
    from scalecom_hvd.exchange.methods.state import State

log = logging.getLogger("scalecom_hvd")

# Keys that only some saved states have.
_EXTRA_KEYS = ("recent_norms", "offsets", "method_state", "local_steps", "shard")


class Averager:
    """What a run asks of the object that averages gradients, or changes of parameters, for it.

    `node` has the ranks that hold the other parts of each tensor, if any. `travels`: whether
    averages travel that nobody has waited for yet. `exchange` does what this averager leaves to it.
    """

    collectives: Collectives
    node: Node | None = None
    travels: bool = False
    exchange: Averager

    def in_step(self) -> bool:
        """Whether gradients were reported that are not averaged yet."""
        return self.exchange.in_step()

    def complete_state(self) -> None:
        """Wait for the missing parts of the method's state. Every rank has submitted them."""
        self.exchange.complete_state()

    def agree_anew(self) -> None:
        """Make ranks compare at the next step: other residues were loaded."""
        self.exchange.agree_anew()

    def abort(self) -> None:
        """Forget a step that cannot be completed; nothing is lost from the residues."""
        self.exchange.abort()

    def stats(self) -> Stats:
        """Numbers of the last step."""
        return self.exchange.stats()

    def collect(self) -> None:
        """Wait for averages that travel. Every rank has sent its part of them already."""

    def rejoin(self) -> None:
        """All ranks call this when they were started again, or when newcomers have come."""

    def synchronisations_in(self, steps: int) -> int:
        """How many averages there are in the optimizer's first `steps` steps."""
        return steps

    def state_dict(self) -> Saved:
        """What is saved besides the run's own state: {key in the complete state: value}."""
        return {}

    def check_state(self, state: Saved) -> None:
        """Raise ValueError unless this complete state fits."""
        saved_state.check_local_steps(state, local=False)

    def load_state_dict(self, state: Saved) -> None:
        """Load what `state_dict` gave, from a state that has passed `check_state`."""


class Run:
    """The residues, and the method's state, of one training run on this rank.

    Attributes:
        residues: of all compressed tensors, with the number of steps.
        tensor_states, method_state: {name: {what: tensor}}; {what: tensor or number} of the method.
        averager: what makes the steps. None: there is no optimizer yet.
    """

    def __init__(self, method: Method, config: ScaleComConfig) -> None:
        self._method = method
        self.residues = Residues(config)
        self.tensor_states: dict[str, dict[str, torch.Tensor]] = {}
        self.method_state: dict[str, Any] = {}
        self.averager: Averager | None = None
        # The state that was loaded before there were parameters. It is kept until a step counts: if
        # no optimizer can be made, the script may correct its mistake and try again.
        self._loaded: Saved | None = None
        # How many ranks there were, and which of them had these residues, when the residues were
        # loaded or ranks last agreed.
        self._loaded_from: tuple[int | None, int | None] = None, None

    def begin(self, parameters: Mapping[str, torch.Tensor], averager: Averager) -> None:
        """Serve these parameters, in the model's order. Every Averager calls this when it is made.

        Raises:
            ValueError: the method serves an optimizer already, its settings fit no parameter, or
                the state that was loaded does not fit.
            TypeError: a parameter is complex.
        """
        if self.averager is not None:
            raise ValueError(
                f"this {type(self._method).__name__} already serves an optimizer. Make one for "
                "each optimizer, because each has its own residues"
            )
        state = self._loaded
        with self.released_on_error():
            if state is not None:
                self._check(state, averager)
            self.residues.synchronisations_in = averager.synchronisations_in
            self.residues.attach(parameters, averager.node.whole if averager.node else None)
            if state is None:
                self.begin_state_anew()
            else:
                self._check_fits(state)
                self._take_up(state, averager)
        self.averager = averager

    def release(self) -> None:
        """No optimizer could be made: serve none, and keep the state that was loaded."""
        self.averager = None
        residues = self.residues
        residues.tensors, residues.rates, residues.synchronisations_in = {}, {}, int
        self.tensor_states, self.method_state = {}, {}

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """If this context fails, leave the method free for another optimizer."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    # What users call, through the method.

    def stats(self) -> Stats:
        """See Method.stats."""
        residues, method = self.residues, self._method
        numbers: Stats = {"step": residues.step, "skipped_steps": residues.skipped_steps}
        if self.averager is not None:
            numbers |= self.averager.stats()
        if "quantiser" in method.settings:
            numbers["quantiser"] = method.settings["quantiser"]
        if "leader" not in method.uses:
            numbers.pop("leader", None)
        ratio = residues.health.ratio
        outliers = sum(tensor.norms.outliers for tensor in residues.tensors.values())
        numbers |= {"residue_norm": residues.norm(), "residue_ratio": ratio}
        return numbers | {"outliers": outliers}

    def state_dict(self) -> Saved:
        """See Method.state_dict."""
        self._complete(
            "state_dict() was called between backward() and step(): call it after optimizer.step()"
        )
        residues, tensors = self.residues, self.residues.tensors
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "step": residues.step,
            "config": self.residues.config.to_dict(),
            "settings": self._method.settings,
            "residues": {name: t.residue.view(t.shape) for name, t in tensors.items()},
            "norms": residues.health.norms,
            "recent_norms": {n: [t.norms.longest, t.norms.count] for n, t in tensors.items()},
        }
        known = {"buckets": residues.buckets, "ranks": residues.ranks, "rank": residues.rank}
        if residues.rung is not None:
            known["rung"] = [residues.rung, residues.rung_since]
        state |= {key: value for key, value in known.items() if value is not None}
        if self.averager is not None:
            return {**state, **self.averager.state_dict(), **self._states()}
        waiting = ("residues", *_EXTRA_KEYS)
        return state | {k: v for k, v in (self._loaded or {}).items() if k in waiting}

    def load_state_dict(self, state: Saved) -> None:
        """See Method.load_state_dict."""
        self._complete(
            "load_state_dict() was called between backward() and step(): call it before backward()"
        )
        if self.averager is None:  # nothing is settled yet
            saved = state.get("config", {})
            # Until there was nu, "step_ahead" said whether beta was 1 by default.
            self._method.settle(every_step=bool(saved.get("step_ahead", saved.get("nu") != 1)))
        residues = self.residues
        self._check(state, self.averager)
        state = saved_state.without_choice(state, residues.config)
        saved_state.check_finite(
            {name: bool(r.isfinite().all()) for name, r in state["residues"].items()}
        )
        if self.averager is not None:
            self._check_fits(state)
        residues.step, residues.health.norms = int(state["step"]), saved_state.norms_of(state)
        if residues.rung is not None:
            # A state of a given rate has no rung.
            residues.rung, residues.rung_since = state.get("rung", (START, residues.step))
        residues.ranks, residues.rank = state.get("ranks"), state.get("rank")
        self._loaded_from = (residues.ranks, residues.rank) if state["residues"] else (None, None)
        # If buckets of another size are asked for, those of the state are not taken over.
        as_saved = state["config"]["bucket_bytes"] == residues.config.bucket_bytes
        residues.buckets = state.get("buckets") if as_saved else None
        if self.averager is None:
            self._loaded = state
        else:
            self._take_up(state, self.averager)
            self.averager.agree_anew()

    def _check(self, state: Saved, averager: Averager | None) -> None:
        """Raise ValueError if a state has another version, other settings, or another face."""
        config = self.residues.config
        if "config" in state and not state.get("residues", True):
            # It was saved before there was an optimizer, when nothing said what beta is.
            state = {**state, "config": {**state["config"], "beta": config.beta}}
        saved_state.check_state(state, config, self._method.settings)
        saved_state.norms_of(state)  # raises, if they are damaged
        if averager is not None:
            averager.check_state(state)
            node = averager.node
            saved_state.check_shard(state, (0, 1) if node is None else (node.position, node.size))
            theirs, mine = state.get("rank"), averager.collectives
            # Ranks of an elastic run change their positions, but keep their states. When ranks
            # agree, it is checked that no two of them have the same rank's residues.
            # A rank outside the process set has no position, and no residues.
            has_own = theirs is not None and not mine.elastic and state["residues"]
            is_own = not has_own or theirs == mine.position
            if not is_own:
                said = "rank %d of %d loads the residues that rank %s of %s saved"
                log.warning(said, mine.position, mine.size, theirs, state.get("ranks"))

    def _complete(self, complaint: str) -> None:
        if self.averager is not None:
            self.averager.collect()
            if self.averager.in_step():
                raise RuntimeError(f"{type(self._method).__name__}.{complaint}")
            self.averager.complete_state()

    # The method's state.

    def _states(self) -> Saved:
        """The parts of the state that are saved. Look-ahead's offsets have a key of their own."""
        by_kind: dict[str, dict[str, torch.Tensor]] = {}
        for name, state in self.tensor_states.items():
            for what, value in state.items():
                # A copy: it may be a view of a buffer that later steps use again.
                by_kind.setdefault(what, {})[name] = value.clone()
        saved: dict[str, Any] = {}
        if "offsets" in by_kind:
            saved["offsets"] = by_kind.pop("offsets")
        if by_kind or self.method_state:
            own = copy.deepcopy(self.method_state)
            saved["method_state"] = {"tensors": by_kind, "method": own}
        return saved

    def _check_fits(self, state: Saved) -> None:
        """Raise ValueError unless residues and the method's state belong to these tensors."""
        tensors = self.residues.tensors
        if not state["residues"]:
            return  # it was saved before the first step, or by a single process
        saved = {name: tuple(residue.shape) for name, residue in state["residues"].items()}
        saved_state.check_residues(saved, {name: tuple(t.shape) for name, t in tensors.items()})
        method, stage = self._method, self.residues.stage_at(int(state["step"]))
        lanes = {name: tensor.lanes(stage) for name, tensor in tensors.items()}
        given = {"": state.get("method_state", {}).get("method", {})}  # of the whole method
        for what, values in _saved_states(state).items():
            if what in ("offsets", "scales") and what in method.equal_state:
                # Look-ahead's choice does not exist at the start. Kernels access memory by it.
                arrays = {name: own.cpu().numpy() for name, own in values.items()}
                if what == "offsets":
                    saved_state.check_offsets(arrays, lanes)
                else:
                    blocks = {name: blocks_of(own.k) for name, own in lanes.items()}
                    saved_state.check_scales(arrays, blocks)
                continue
            for name, value in values.items():
                given.setdefault(name, {})[what] = value
        for name in {**tensors, **given}:
            first = method.init(tensors[name]) if name in tensors else {}
            expected = _shapes(first if name else method.init_method())
            found = _shapes(given.get(name, {}))
            if found != expected:
                whose = f"the method's state of {name}" if name else "the state of the whole method"
                raise ValueError(
                    f"{whose} is {found} in the loaded state, but should be {expected}. The loaded "
                    f"state belongs to another model, or another version of {type(method).__name__}"
                )

    def _take_up(self, state: Saved, averager: Averager) -> None:
        """Begin with this saved state, which fits. What it lacks begins anew."""
        for name, tensor in self.residues.tensors.items():
            if state["residues"]:
                tensor.residue.copy_(state["residues"][name].reshape(-1))
            else:  # saved before the first step, or by a single process: all of them were zero
                tensor.residue.zero_()
            tensor.norms = RecentNorms(*state.get("recent_norms", {}).get(name, ()))
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
        averager.load_state_dict(state)

    def begin_state_anew(self) -> None:
        """Set all state of the method to what it is at the start."""
        tensors = self.residues.tensors
        self.tensor_states = {name: dict(self._method.init(t)) for name, t in tensors.items()}
        self.method_state = dict(self._method.init_method())

    def begin_equal_state_anew(self) -> None:
        """Begin anew the state that must be equal on all ranks (`equal_state`): it may not be."""
        method = self._method
        first_own = method.init_method()
        self.method_state |= {w: first_own[w] for w in method.equal_state if w in first_own}
        for name, state in self.tensor_states.items():
            first = method.init(self.residues.tensors[name]) if method.equal_state else {}
            for what in method.equal_state:
                state.pop(what, None)
                if what in first:
                    state[what] = first[what]

    def take_state(self, states: Sequence[State]) -> None:
        """Keep the state that the buckets of a step gave, because the step counted."""
        self._loaded = None
        before = dict(self.method_state)
        for state in states:
            for name, values in state.tensors.items():
                self.tensor_states[name] = dict(values)
            changed = {what: v for what, v in state.method.items() if v is not before[what]}
            self.method_state |= changed

    # What ranks have in common.

    def agree(
        self,
        parameters: Mapping[str, torch.Tensor],
        collectives: Collectives,
        names: Names,
        settings: Settings,
        topics: Settings,
        told: Settings,
    ) -> list[Settings]:
        """Compare what all ranks were started with, and go on at one step. Waits for all ranks.

        Args:
            names: the names of the exchange's collectives, which get a number new to all ranks.
            settings, topics: what must be the same besides the config and the parameters.
            told: what else ranks tell each other.

        Returns:
            What every rank told, and as "state" its `digest_of_state`.

        Raises:
            RuntimeError: on all ranks, if something differs.
        """
        config = self.residues.config.to_dict()
        tensors = describe_tensors(parameters, self.residues)
        compared = {**describe(config, settings, tensors), **topics}
        is_known = None not in self._loaded_from and not collectives.elastic
        mine = compared | {
            "name": names.numbers.claim(),
            "step": self.residues.step,
            "rung": [self.residues.rung, self.residues.rung_since],
            "state": self.digest_of_state(),
            "residues_of": self._loaded_from if is_known else None,
            **told,
        }
        everyone = gather_objects(collectives, mine, "agreement")
        check_residues_of(everyone)
        self._loaded_from = collectives.size, collectives.position
        self.residues.step = agree(everyone, tuple(compared), names)
        latest = max(everyone, key=lambda other: other["step"])
        self.residues.rung, self.residues.rung_since = latest["rung"]
        return everyone

    def compare_states(self, digests: Collection[str | None]) -> None:
        """Begin anew what must be the same on all ranks, if their digests differ."""
        if len(set(digests)) > 1:
            log.warning(
                "ranks have different states of their method, so all ranks begin with a fresh one"
            )
            self.begin_equal_state_anew()

    def digest_of_state(self) -> str | None:
        """A digest of the state that must be equal, for ranks to compare. None: there is none."""
        states = self.tensor_states | {"": self.method_state}
        return digest_of(
            {
                f"{what} {name}": as_bytes(torch.as_tensor(state[what])).numpy()
                for name, state in states.items()
                for what in self._method.equal_state
                if what in state
            }
        )


def _saved_states(state: Saved) -> dict[str, Mapping[str, torch.Tensor]]:
    """{what: {name: tensor}} in a saved state."""
    by_kind = dict(state.get("method_state", {}).get("tensors", {}))
    return by_kind | ({"offsets": state["offsets"]} if state.get("offsets") else {})


def _shapes(state: Mapping[str, object]) -> dict[str, tuple[int, ...] | None]:
    return {w: tuple(v.shape) if isinstance(v, torch.Tensor) else None for w, v in state.items()}
