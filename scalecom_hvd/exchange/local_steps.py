"""Local steps: workers step on their own parameters, and average the change, not gradients.

Qsparse-local-SGD (Basu et al., 2019, arXiv 1906.02367), algorithm 1 (all ranks synchronise after
the same steps) and 2 (each rank after its own). x: the common parameters; x_i: worker i's; m_i:
its residue.

    H times:   x_i    <- optimizer_i(x_i, gradient_i)
    then:      acc_i   = m_i + (x - x_i)
               sent_i  = what the method makes of acc_i
               m_i    <- acc_i - sent_i
               x      <- outer(x, (1/n) * sum_i sent_i)
               x_i    <- x

outer is a torch optimizer that all ranks step alike, with the average as the gradient (DiLoCo,
Douillard et al., 2023, arXiv 2311.08105); without one the average is subtracted.

With an overlap of tau steps the average travels while each worker takes tau more; d_i is what these
changed of x_i. Then x_i <- x + d_i: what a worker did meanwhile is part of its next change. The
idea is Streaming DiLoCo's (Douillard et al., 2025, arXiv 2501.18512). That paper mixes
x_i <- alpha x_i + (1 - alpha) x, which throws a share of d_i away, and where a residue keeps what
was not sent, counts a share of that twice.

The Exchange is used as it is, on the common parameters, with their changes in the place of
gradients: buckets, residues, leaders, warm-up, void steps and checks are the same. Every worker's
optimizer keeps its own state, which is never averaged.

Which rank waits for whom: `step` waits for all ranks at the first step, where they compare, and
after each step at which the schedule has any rank synchronise. Both depend only on how many steps
were taken, so every rank has to take every step, also one with a bad gradient.

A rank that resumes in the middle of a round has parameters of its own. They must be in place
before its first forward, whoever loads or broadcasts a model meanwhile. So they are held until the
first step: put in place with the state, and again after every `broadcast_parameters` of the face,
which sends the common ones to newcomers. Where they were overwritten otherwise, all ranks refuse
to go on.

Imports exchange, methods/base and the rooms below.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scalecom_hvd.agreement import compare_ranks
from scalecom_hvd.exchange.collectives import Collectives, gather_objects
from scalecom_hvd.exchange.exchange import Exchange, Groups
from scalecom_hvd.exchange.kernels import limit_of
from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.new_gradients import digest
from scalecom_hvd.schedule import Schedule
from scalecom_hvd.training_warnings import Health

log = logging.getLogger("scalecom_hvd")

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the common parameters."""


class NotFinite(Exception):  # noqa: N818 (not an error: the step is left out)
    """A step found a gradient that cannot be used, and has changed nothing.

    Args:
        result: what the step would have given.
    """

    def __init__(self, result: Any = None) -> None:
        super().__init__("a gradient is not finite, or larger than 2**100")
        self.result = result


@dataclass
class Journey:
    """A synchronisation between its departure and the step at which its averages count.

    Attributes:
        since: how many steps were taken before it.
        mine: whether this rank sent its change.
        whole: whether all ranks did.
        sent_from: {name: x_i then}, where this rank goes on meanwhile.
        averages: {name: the averaged change} once it was waited for; {}: it was void.
    """

    since: int
    mine: bool = True
    whole: bool = True
    sent_from: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] | None = None


_alive: weakref.WeakSet[LocalSteps] = weakref.WeakSet()
# Those whose averages travel, in the order of their departures, which is that of all ranks.
_departed: dict[int, Callable[[], LocalSteps | None]] = {}


def any_held() -> bool:
    """Whether some optimizer of this process holds parameters in the middle of a round."""
    return any(local.held for local in list(_alive))


def rounds_of(params: dict[str, Any] | list[Any]) -> list[LocalSteps]:
    """The local steps whose parameters are among these.

    Args:
        params: what broadcast_parameters takes: a state_dict, or a list of (name, tensor) or of
            tensors. Anything else, which Horovod refuses, has none.
    """
    if isinstance(params, dict):
        tensors = list(params.values())
    elif isinstance(params, list):
        tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    else:
        return []
    # A state_dict has other objects too.
    addresses = {tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}
    if any(local.trains(addresses) for local in list(_alive)):
        # An optimizer that was deleted hangs in a cycle with its own class, and where its
        # parameters were, another's may be now.
        gc.collect()
    return [local for local in list(_alive) if local.trains(addresses)]


class LocalSteps:
    """The local steps of one optimizer on this rank, and the Exchange that joins them.

    Args:
        parameters: {name: parameter} of all that are trained, in the model's order.
        method: how changes are averaged.
        collectives: the other ranks.
        schedule: when ranks synchronise.
        groups: see Exchange.
        start_anew: makes this rank's optimizer forget its momentum and the like, after its
            parameters had to go back.
        outer: makes the optimizer that steps the common parameters with the averaged change; the
            same on every rank. None: the average is subtracted.
        overlap: tau, how many steps are taken while an average travels.

    Attributes:
        common: {name: x}, float32 or float64, the same on all ranks once they agreed.
        exchange: averages the changes.
        taken: how many steps were taken.
        skipped: how many of them were left out on this rank, for a bad gradient.
        newcomer: whether this rank has taken no step yet, here or in a loaded state.
        outer: the outer optimizer, or None.

    Raises:
        ValueError: look-ahead, an overlap or an outer optimizer, where every rank has a schedule of
            its own; an overlap longer than a round.
        TypeError: `outer` gives no optimizer of the common parameters; the overlap is no number.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: Method,
        collectives: Collectives,
        schedule: Schedule,
        groups: Groups | None = None,
        start_anew: Callable[[], None] = lambda: None,
        outer: Outer | None = None,
        overlap: int = 0,
    ) -> None:
        schedule.check_overlap(overlap)
        for given, name, why in (
            (overlap > 0, "overlap", "has every rank wait at the same step"),
            (method.config.lookahead, "lookahead", "needs to know who synchronises next"),
            (outer is not None, "outer", "steps when all ranks synchronise"),
        ):
            if schedule.asynchronous and given:
                raise ValueError(
                    f"{name} {why}: give all ranks the same local_steps, or leave {name} out"
                )
        self.schedule = schedule
        self._overlap = overlap
        self._journey: Journey | None = None
        self.taken = 0
        self.skipped = 0
        self.newcomer = True
        addresses = {parameter.data_ptr() for parameter in parameters.values()}
        _collect_all(lambda other: other.trains(addresses))  # the script made its optimizer anew
        self.common = {name: _wide(parameter) for name, parameter in parameters.items()}
        self.outer = None if outer is None else _outer_of(outer, self.common)
        self._parameters = parameters
        self._changes = {name: torch.zeros_like(x) for name, x in self.common.items()}
        # What this rank's parameters were at its last synchronisation. With one schedule for all
        # ranks x is still that.
        self._start: Mapping[str, torch.Tensor] = self.common
        if schedule.asynchronous:
            self._start = {name: x.detach().clone() for name, x in self.common.items()}
        self._collectives = collectives
        self._restarted = collectives.restarts()
        self._start_anew = start_anew
        self._health = Health()
        # Whether this rank has taken steps since its last synchronisation, and whether any rank
        # has since the last one of all ranks.
        self._under_way = self._open = False
        # How many synchronisations before their time there were in the warm-up, which is counted
        # in steps.
        self._early = 0
        self._agreed = False
        # Whether x comes from training with others, or from a loaded state. A newcomer's x gives
        # way to it.
        self._knows = False
        # This rank's own parameters, from when a state was loaded until the first step.
        self._own: dict[str, torch.Tensor] | None = None
        self._residues = method.residues
        self.exchange = Exchange(
            self.common,
            method,
            collectives,
            groups=groups,
            settings=self._settings(),
            is_scaled=False,
        )
        method.attach(self.common, self.exchange, self)
        _alive.add(self)
        if overlap:
            # A script may end while averages travel. Whoever ends first shuts Horovod down, which
            # would fail the others. Registered after Horovod's own, this is called before it.
            atexit.unregister(_collect_all)
            atexit.register(_collect_all)

    @property
    def active(self) -> bool:
        """Whether there is anybody to synchronise with."""
        return self._collectives.size > (0 if self._collectives.elastic else 1)

    def synchronisations_in(self, steps: int) -> int:
        """How many synchronisations there are in this many first steps."""
        return self.schedule.synchronisations(steps) + self._early

    def step(self, take: Callable[[], Any]) -> Any:
        """Take one step of this rank's own optimizer, and synchronise if that is due.

        Args:
            take: makes the step. Where it raises NotFinite, the step counts as one that changed
                nothing on this rank.

        Returns:
            What `take` returned, or the result of its NotFinite.
        """
        if self.active:
            self._begin()
        self._own, self.newcomer = None, False
        try:
            result = take()
            self._health.take()
        except NotFinite as reason:
            result = reason.result
            self.skipped += 1
            log.info(
                "local step %d is skipped on this rank: %s (%d skipped so far)",
                self.taken,
                reason,
                self.skipped,
            )
            self._health.skip(self.taken)
        self.taken += 1
        if self.active:
            self._under_way = self._open = True
            if self._journey is not None:
                if self.taken >= self._journey.since + self._overlap:
                    self._arrive()
                else:
                    self.exchange.go_on()
            due = self.schedule.due(self.taken, self._collectives.size)
            if due:
                self._depart(due)
                if not self._overlap:
                    self._arrive()
        return result

    def synchronise(self) -> None:
        """Synchronise now, whatever the schedule says.

        All ranks must call it after the same step. The schedule goes on as before.

        Raises:
            RuntimeError: parameters cannot be made the same; on all ranks.
        """
        if not self.active:
            return
        self._begin()
        self._own = None
        if self._journey is not None:
            self._arrive()
        if not self._open:
            return
        everyone = range(self._collectives.size)
        # Where a rank's change is not finite, nothing is averaged, and that rank goes back. The
        # second time it works.
        for _ in range(2):
            self._depart(everyone)
            if self._arrive():
                break
        else:
            raise RuntimeError(
                "ranks cannot synchronise: their changes, or residues, add up to what is not "
                "finite. Lower the learning rate"
            )
        self._early += self.taken < self._residues.config.warmup_steps

    @torch.no_grad()
    def _begin(self) -> None:
        """Before a step: see that ranks agree, and that x is where this round begins."""
        self._notice_restart()
        if not self._agreed:
            self._agree()
            self._agreed = self._knows = True
        elif not self._under_way and not self.schedule.asynchronous:
            # Whoever loads a model, or clips its weights, between two rounds means the common
            # parameters. Where ranks have rounds of their own, only some are between two: there
            # it is part of the change.
            self._take_up_parameters()

    def _notice_restart(self) -> None:
        """Ranks were started anew (elastic runs): what travelled never arrives.

        It is the difference of parameters still, and is sent the next time.
        """
        if self._restarted():
            self._agreed = False
            if self.travels:
                self.exchange.abort()
                self._forget_journey()

    def _take_up_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            x = self.common[name]
            if not torch.equal(x.to(parameter.dtype), parameter):
                x.copy_(parameter)
            self._begin_at(name)

    def _begin_at(self, name: str) -> None:
        """This rank's next round begins at x."""
        if self._start is not self.common:
            self._start[name].copy_(self.common[name])

    @torch.no_grad()
    def _depart(self, due: Sequence[int]) -> None:
        """Send the changes of the ranks at these positions.

        The other ranks send nothing, and go on as they are.
        """
        mine = self._collectives.position in due
        for name, parameter in self._parameters.items():
            x, change = self.common[name], self._changes[name]
            if mine and parameter.dtype == change.dtype:
                torch.sub(self._start[name], parameter, out=change)
            elif mine:
                # In the parameter's dtype it began where x was rounded to.
                change.copy_(self._start[name].to(parameter.dtype)).sub_(parameter)
            else:
                change.zero_()
            # A frozen tensor sends nothing, and its residue stays as it is. That is right for a
            # rank that does not synchronise now. A tensor that was frozen in the middle of a
            # round has a change to send.
            x.requires_grad_(mine and (parameter.requires_grad or bool(change.any())))
            x.grad = change
        self.exchange.senders = list(due) if self.schedule.asynchronous else None
        for x in reversed(self.common.values()):
            self.exchange.ready(x)
        self._journey = Journey(self.taken, mine, len(due) == self._collectives.size)
        if self._overlap:
            _departed.pop(id(self), None)  # another's, which is gone
            # Ranks let go of an optimizer that is dropped at different times, and a process group's
            # end waits for what others then never submit. So it is kept.
            kept = getattr(self._collectives, "ends_waiting", False)
            _departed[id(self)] = (lambda: self) if kept else weakref.ref(self)
            self._journey.sent_from = {n: p.detach().clone() for n, p in self._parameters.items()}

    @property
    def travels(self) -> bool:
        """Whether averages travel that were not waited for."""
        return self._journey is not None and self._journey.averages is None

    @torch.no_grad()
    def collect(self) -> None:
        """Wait for averages that travel, which every rank has sent its part of.

        They count when their steps are over. A step of the exchange that was aborted is forgotten:
        its change is still the difference of parameters, and is sent the next time.
        """
        journey = self._journey
        if journey is None or journey.averages is not None:
            return
        if not self.exchange.in_step():
            self._forget_journey()
            return
        skipped = self._residues.skipped_steps
        _departed.pop(id(self), None)
        averages = {name: self.exchange.result(x) for name, x in self.common.items()}
        journey.averages = {} if self._residues.skipped_steps > skipped else averages

    def _forget_journey(self) -> None:
        self._journey = None
        _departed.pop(id(self), None)

    @torch.no_grad()
    def _arrive(self) -> bool:
        """Let the averages count; gives whether there were any."""
        self.collect()
        journey, self._journey = self._journey, None
        if journey is None:
            return False
        if not journey.averages:
            if journey.mine:
                self._go_back()
            return False
        self._take_outer_step(journey.averages)
        went_on = self.taken > journey.since
        if journey.mine:
            for name, parameter in self._parameters.items():
                x = self.common[name]
                if not went_on:
                    parameter.copy_(x)
                elif parameter.dtype == x.dtype:
                    parameter.sub_(journey.sent_from[name]).add_(x)
                else:
                    parameter.copy_(x + (parameter - journey.sent_from[name]))
                self._begin_at(name)
            self._under_way = went_on
        if journey.whole:
            self._open = went_on
        return True

    def _take_outer_step(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Let x become what the averages make of it, on every rank alike."""
        if self.outer is None:
            for name, x in self.common.items():
                x.sub_(averages[name])
            return
        for name, x in self.common.items():
            # What nobody changed, such as a frozen tensor, stays: no momentum moves it.
            x.grad = averages[name] if bool(averages[name].any()) else None
        self.outer.step()
        for x in self.common.values():
            x.grad = None

    def _go_back(self) -> None:
        """Some rank's change was not finite: that rank goes back to where its round began.

        Nothing was averaged. The others keep what they have, and send it the next time.
        """
        changes = (self._start[name] - parameter for name, parameter in self._parameters.items())
        if all(bool((change.abs() <= limit_of(change.dtype)).all()) for change in changes):
            return
        log.warning(
            "step %d: this rank's parameters are not finite, or changed by more than 2**100, "
            "since its last synchronisation: they are those of then again, and its optimizer's "
            "state is zero. Look at the loss of every rank, or lower the learning rate",
            self.taken,
        )
        for name, parameter in self._parameters.items():
            parameter.copy_(self._start[name])
        # Its momentum would spoil every synchronisation to come.
        self._start_anew()

    # The agreement, before the first step.

    @torch.no_grad()
    def _agree(self, early: bool = False) -> None:
        """Compare all ranks' schedules, steps and common parameters.

        Newcomers take up those of the ranks that were there before.

        Args:
            early: whether ranks that are all new may still differ, as the first step is not now.
        """
        self._notice_restart()
        self.collect()
        self.schedule.check_ranks(self._collectives.size)
        overwritten = not self._in_place()
        if not self._under_way and not overwritten:
            self._take_up_parameters()
        mine = {
            "settings": self._settings(),
            "taken": self.taken,
            "knows": self._knows,
            "open": self._under_way or self._open,
            "early": self._early,
            "overwritten": overwritten,
            "parameters": digest([*self.common.values(), *self._outer_tensors()]),
            "outer": self._outer_shapes(),
            "since": None if self._journey is None else self._journey.since,
        }
        everyone = gather_objects(self._collectives, mine, "local_steps")
        compare_ranks(everyone, ("settings",))
        lost = [rank for rank, other in enumerate(everyone) if other["overwritten"]]
        if lost:
            raise RuntimeError(
                f"parameters of rank {', '.join(map(str, lost))} were changed after a state in the "
                "middle of a round of local steps was loaded, and are no longer that rank's own: "
                "load the compressor's state last, or call broadcast_parameters of "
                "scalecom_hvd.torch when the model is loaded, which leaves every rank its own. To "
                "begin from other parameters, save after optimizer.synchronize_parameters(), when "
                "no round is under way"
            )
        # In elastic runs a rank may have committed a step that others have not.
        latest = max((other["taken"] for other in everyone if other["knows"]), default=0)
        are_latest = [other["knows"] and other["taken"] == latest for other in everyone]
        known = [rank for rank, is_latest in enumerate(are_latest) if is_latest]
        if early and not known:
            return
        if len({other["since"] for other in everyone}) > 1:
            # Newcomers know nothing of averages that travel: with those who do they count now.
            if self._collectives.position in known:
                self._arrive_where_held()
            self._forget_journey()
            self._agree(early)
            return
        compared = known or range(len(everyone))
        if len({everyone[rank]["parameters"] for rank in compared}) > 1:
            raise RuntimeError(
                "ranks begin local steps from different parameters, which local steps would keep "
                "apart for ever: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) "
                "on all ranks before the first step, and load states of one step"
            )
        if len({other["parameters"] for other in everyone}) > 1:
            root = known[0]
            self._send_common(root, keeps=self._collectives.position in known)
            self._send_outer(root, everyone[root]["outer"])
        if known:
            self.taken, self._early = latest, everyone[known[0]]["early"]
        self._open = any(everyone[rank]["open"] for rank in compared)

    def _arrive_where_held(self) -> None:
        """Let averages of a loaded state count before their time."""
        if self._journey is None:
            return
        if self._own is not None:
            self.put_back()
        self._arrive()
        if self._own is not None:
            self._own = {name: p.detach().clone() for name, p in self._parameters.items()}

    def _send_common(self, root: int, keeps: bool) -> None:
        """Give all ranks the common parameters of the rank at position `root`.

        Args:
            keeps: whether this rank keeps its own parameters. Otherwise it begins from these.
        """
        for i, (name, parameter) in enumerate(self._parameters.items()):
            x = self.common[name].detach()
            whole = x.contiguous()  # Horovod takes no other.
            self._collectives.broadcast(whole, root, f"scalecom.local_steps.{i}").wait()
            x.copy_(whole)
            if not keeps:
                parameter.copy_(x)
                self._begin_at(name)
        if not keeps:
            self._under_way, self._own = False, None
            if self._journey is not None:
                self._journey.sent_from = {n: p.clone() for n, p in self._parameters.items()}
            log.warning(
                "this rank begins from the common parameters of rank %d, in the middle of a "
                "round of local steps",
                root,
            )

    def _settings(self) -> dict[str, Any]:
        """What ranks must have in common."""
        settings: dict[str, Any] = {"local_steps": self.schedule.describe()}
        if self._overlap:
            settings["overlap"] = self._overlap
        if self.outer is not None:
            settings["outer"] = f"{type(self.outer).__name__}({self.outer.defaults})"
        return settings

    # The outer optimizer's state, which is the same on all ranks.

    def _outer_tensors(self) -> list[torch.Tensor]:
        if self.outer is None:
            return []
        states = [self.outer.state.get(x, {}) for x in self.common.values()]
        values = [state[key] for state in states for key in sorted(state)]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _outer_shapes(self) -> list[dict[str, Any]]:
        """Of each common parameter {key: (shape, dtype) of a tensor, or the number}, for JSON."""
        if self.outer is None:
            return []

        def describe(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return [list(value.shape), str(value.dtype).removeprefix("torch.")]

        states = [self.outer.state.get(x, {}) for x in self.common.values()]
        return [{key: describe(state[key]) for key in sorted(state)} for state in states]

    def _send_outer(self, root: int, shapes: Sequence[Mapping[str, Any]]) -> None:
        """Give all ranks the state of the rank at position `root`, which has these shapes."""
        for x, described in zip(self.common.values(), shapes, strict=False):
            state = {key: value for key, value in described.items() if not _is_shape(value)}
            for key in (key for key, value in described.items() if _is_shape(value)):
                shape, dtype = described[key]
                now = self.outer.state.get(x, {}).get(key)
                if not (isinstance(now, torch.Tensor) and list(now.shape) == shape):
                    device = x.device if shape else "cpu"  # steps are counted on the CPU
                    now = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                state[key] = now
            self.outer.state.pop(x, None)
            if state:
                self.outer.state[x] = state
        for i, tensor in enumerate(self._outer_tensors()):
            whole = tensor.detach().contiguous().view(-1)
            self._collectives.broadcast(whole, root, f"scalecom.local_steps.outer.{i}").wait()
            tensor.copy_(whole.view(tensor.shape))

    # What elastic states, broadcast_parameters and the method ask.

    def meet(self) -> None:
        """All ranks of an elastic run come together: newcomers take up what others have.

        So they have it before they compute a gradient. All compare again before the next step, as
        models may be loaded until then.
        """
        if self.active:
            self._agree(early=True)
        self._agreed = False

    def keep(self) -> None:
        """Hold this rank's own parameters until the next step, whatever is broadcast before."""
        if self._own is None and self.active and not self.newcomer:
            self._own = {name: p.detach().clone() for name, p in self._parameters.items()}

    @property
    def held(self) -> bool:
        """Whether this rank's parameters are to stay its own."""
        return self._own is not None

    def trains(self, addresses: set[int]) -> bool:
        """Whether some parameter is at one of these addresses."""
        return any(parameter.data_ptr() in addresses for parameter in self._parameters.values())

    @torch.no_grad()
    def show_common(self) -> None:
        """For a broadcast: the parameters are the common ones, until they are put back."""
        if self._under_way:
            for name, parameter in self._parameters.items():
                parameter.copy_(self.common[name])

    @torch.no_grad()
    def put_back(self) -> None:
        """The parameters are this rank's own again."""
        assert self._own is not None, "nothing is held"
        for name, parameter in self._parameters.items():
            parameter.copy_(self._own[name])

    def _in_place(self) -> bool:
        """Whether the parameters are those that are held, if any are."""
        # Of a round that went wrong they may be NaN.
        return self._own is None or all(
            torch.allclose(parameter, self._own[name], rtol=0, atol=0, equal_nan=True)
            for name, parameter in self._parameters.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """What this rank's method saves of local steps. Tensors are the ones in use.

        Returns:
            {"taken": steps, "early": synchronisations before their time}. Where x is not what the
            model holds (after steps since the last synchronisation, in half precision, or where
            ranks have schedules of their own) also {"common": {name: x}, "local": {name: x_i}},
            "under_way" and "open": whether this rank, and any rank, has taken steps since; and
            with schedules of their own "start": {name: what x_i was at its last synchronisation}.
            With an outer optimizer "outer": its state_dict(). While averages travel "since": the
            steps taken before, "averages": {name: average}, empty where there are none, and
            "sent_from": {name: x_i then}.
        """
        state: dict[str, Any] = {"taken": self.taken, "early": self._early}
        if self.outer is not None:
            state["outer"] = self.outer.state_dict()
        if not self.taken or not (self.held or self.active):
            return state
        narrow = any(p.dtype != self.common[name].dtype for name, p in self._parameters.items())
        if self._under_way or narrow or self.schedule.asynchronous:
            state |= {"under_way": self._under_way, "open": self._open}
            state["common"] = _detached(self.common)
            state["local"] = self._own or _detached(self._parameters)
            if self._start is not self.common:
                state["start"] = _detached(self._start)
        if self._journey is not None:
            state |= {"since": self._journey.since, "averages": dict(self._journey.averages)}
            state["sent_from"] = dict(self._journey.sent_from)
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless this is a state of `state_dict` for these parameters."""
        has_common, has_start = "common" in state, "start" in state
        if has_common != ("local" in state) or (
            has_common and has_start != self.schedule.asynchronous
        ):
            raise ValueError(
                "the state's local steps are of another kind of schedule: give the same "
                "local_steps, or go on without it"
            )
        if ("outer" in state) != (self.outer is not None):
            made, give = (
                ("with", "give the same outer=")
                if "outer" in state
                else ("without", "leave out outer=")
            )
            raise ValueError(f"the state was made {made} an outer optimizer: {give}")
        shapes = {name: x.shape for name, x in self.common.items()}
        for part in ("common", "local", "start", "sent_from", "averages"):
            saved = state.get(part) or self.common
            if {name: tensor.shape for name, tensor in saved.items()} != shapes:
                raise ValueError(f"the state's local steps ({part}) belong to another model")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of `state_dict`.

        One from the middle of a round puts this rank's own parameters in place at once.
        """
        if self.outer is not None:
            # It keeps the tensors that it is given.
            self.outer.load_state_dict(copy.deepcopy(state["outer"]))
        self.taken, self._early = int(state["taken"]), int(state.get("early", 0))
        self._under_way = self._open = self._agreed = False
        self._forget_journey()
        # A state of before the first step knows no more than a newcomer does.
        self._knows, self.newcomer, self._own = self.taken > 0, self.taken == 0, None
        if "common" in state:
            self._under_way = bool(state.get("under_way", True))
            self._open = bool(state.get("open", True))
            for name, x in self.common.items():
                x.copy_(state["common"][name])
                if self._start is not self.common:
                    self._start[name].copy_(state["start"][name])
            self._own = {
                name: torch.empty_like(p).copy_(state["local"][name])
                for name, p in self._parameters.items()
            }
            self.put_back()
        if "since" in state:
            self._journey = Journey(int(state["since"]))
            for part, like in (("averages", self.common), ("sent_from", self._parameters)):
                saved = {n: torch.empty_like(like[n]).copy_(t) for n, t in state[part].items()}
                setattr(self._journey, part, saved)

    def stats(self) -> dict[str, Any]:
        """What the method's `stats` say of local steps.

        Returns:
            "local_steps": the schedule; "steps_taken": by this rank's optimizer; "steps_skipped":
            those left out for a bad gradient.
        """
        return {
            "local_steps": self.schedule.describe(),
            "steps_taken": self.taken,
            "steps_skipped": self.skipped,
        }


def _collect_all(wanted: Callable[[LocalSteps], bool] = lambda local: True) -> None:
    for local in [found() for found in _departed.values()]:
        if local is not None and wanted(local):
            with contextlib.suppress(Exception):  # whoever failed has said so
                local.collect()


def check_gradients(parameters: Sequence[torch.Tensor], result: Any = None) -> None:
    """Raise NotFinite unless all gradients are finite, and small enough for a residue.

    A device is waited for once, not for every tensor.

    Args:
        parameters: those that have no gradient are passed over.
        result: what NotFinite shall carry.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    for dtype in (torch.float32, torch.float64):
        own = [value for value in values if value.numel() and _wide_dtype(value) == dtype]
        if own:
            ends = [end.to(own[0].device, torch.float64) for v in own for end in torch.aminmax(v)]
            if not bool((torch.stack(ends).abs() <= limit_of(dtype)).all()):
                raise NotFinite(result)


def _outer_of(make: Outer, common: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    outer = make(list(common.values()))
    if not isinstance(outer, torch.optim.Optimizer) or {
        x for group in outer.param_groups for x in group["params"]
    } != set(common.values()):
        raise TypeError(
            "outer must be a function of the common parameters that gives a torch optimizer of "
            "them, such as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"
        )
    return outer


def _is_shape(described: Any) -> bool:
    return isinstance(described, list)


def _wide(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A common parameter: what half precision would round away of averages must not be lost."""
    copy = parameter.detach().to(_wide_dtype(parameter), copy=True)
    return torch.nn.Parameter(copy, requires_grad=parameter.requires_grad)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
