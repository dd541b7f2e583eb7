"""Local steps: every worker takes some optimizer steps on its own parameters, and then their *change* is averaged, not a gradient.

Qsparse-local-SGD (Basu et al., 2019, arXiv 1906.02367), algorithm 1 (all ranks synchronise after the same steps) and 2 (each rank after its
own). x: the common parameters; x_i: worker i's; m_i: its residue.

    H times:   x_i <- optimizer_i(x_i, gradient_i)
    then:      acc_i = m_i + (x - x_i)        sent_i = what the compressor makes of acc_i        m_i <- acc_i - sent_i
               x <- x - (1/n) * sum_i sent_i  x_i <- x

The exchange is the Reducer's as it is, made on the common parameters with their changes in the place of gradients: buckets, residues,
leaders, warm-up, void steps and checks are the same. Optimizers' states are each worker's own, and never averaged.

Which rank waits for whom: `step` waits for all ranks at the first step, where they compare, and after each step at which the schedule has
any rank synchronise. Both depend on how many steps were taken alone, so every rank has to take every step, also one with a bad gradient.

Used by optimizer.py and simulator.py; imports compressor, reducer and the rooms below.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scalecom_hvd.agreement import compare_ranks
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.health import Health
from scalecom_hvd.schedule import Schedule
from scalecom_hvd.torch.compressor import ErrorFeedback
from scalecom_hvd.torch.reducer import Groups, Reducer
from scalecom_hvd.torch.transport import Transport

log = logging.getLogger("scalecom_hvd")

Tensors = dict[str, torch.Tensor]


class LocalSteps:
    """The local steps of one optimizer on this rank, and the exchange that joins them.

    parameters: {name: parameter} of all that are trained, in the model's order.  schedule: when ranks synchronise.
    common: {name: x}, float32 or float64, the same on all ranks once they agreed.  taken: how many steps were taken.
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        compressor: ErrorFeedback,
        transport: Transport,
        schedule: Schedule,
        groups: Groups | None = None,
    ) -> None:
        if schedule.asynchronous and compressor.config.lookahead:
            raise ValueError("lookahead needs to know who synchronises next: give all ranks the same local_steps, or leave lookahead out")
        self.schedule = schedule
        self.taken = 0
        self.skipped = 0
        self.common = {name: _wide(parameter) for name, parameter in parameters.items()}
        self._parameters = parameters
        self._changes = {name: torch.zeros_like(x) for name, x in self.common.items()}
        # What this rank's parameters were at its last synchronisation; with one schedule for all the common ones still are.
        self._start = {name: torch.zeros_like(x) for name, x in self.common.items()} if schedule.asynchronous else self.common
        self._transport = transport
        self._restarted = transport.listen()
        self._health = Health()
        # Whether this rank has taken steps since its last synchronisation.
        self._under_way = False
        self._agreed = False
        # Whether x comes from this rank's training, or a loaded state, so that a newcomer's gives way.
        self._knows = False
        self._loaded: dict[str, Tensors] = {}
        compressor.residues.exchanges_in = schedule.synchronisations
        self.reducer = Reducer(
            self.common,
            compressor.residues,
            transport,
            groups=groups,
            method=compressor.exchange,
            settings=compressor.settings | {"local_steps": schedule.describe()},
        )
        self._residues = compressor.residues
        compressor.attach(self.common, self.reducer, self)

    @property
    def active(self) -> bool:
        """Whether there is anybody to synchronise with."""
        return self._transport.included and (self._transport.size > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")

    def step(self, take: Callable[[], Any], sound: bool = True) -> Any:
        """One step of this rank's own optimizer, `take()`, and the synchronisation if one is due; gives what `take` returned.

        sound: whether the gradients are finite. If not, `take` is not called, and the step counts as one that changed nothing.
        """
        if self.active:
            self._begin()
        result = None
        if sound:
            result = take()
            self._health.take()
        else:
            self.skipped += 1
            log.info("local step %d is skipped on this rank: a gradient is not finite (%d skipped so far)", self.taken, self.skipped)
            self._health.skip(self.taken)
        self.taken += 1
        if self.active:
            self._under_way = True
            due = self.schedule.due(self.taken, self._transport.size)
            if due:
                self._synchronise(due)
        return result

    def synchronise(self) -> None:
        """Synchronise now, whatever the schedule says. All ranks must call it after the same step; the schedule goes on as before."""
        if not self.active:
            return
        self._begin()
        # With one schedule for all, ranks know alike whether there is anything to send.
        if self._under_way or self.schedule.asynchronous:
            self._synchronise(range(self._transport.size))

    @torch.no_grad()
    def _begin(self) -> None:
        """Before a step: see that ranks agree, and that x is where this round begins."""
        if self._restarted():
            self._agreed = False
        if not self._agreed:
            self._agree()
        elif not self._under_way:
            # Whoever loads a model, or clips its weights, between two rounds means the common parameters.
            self._take_up_parameters()

    def _take_up_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            x = self.common[name]
            if not torch.equal(x.to(parameter.dtype), parameter):
                x.copy_(parameter)
            if self._start is not self.common:
                self._start[name].copy_(x)

    @torch.no_grad()
    def _synchronise(self, due: Sequence[int]) -> None:
        """Average the changes of the ranks at these places; the others send nothing, and go on as they are."""
        mine = self._transport.position in due
        for name, parameter in self._parameters.items():
            x, change = self.common[name], self._changes[name]
            if mine:
                # In the parameter's dtype it began where x was rounded to.
                change.copy_(self._start[name].to(parameter.dtype)).sub_(parameter)
            else:
                change.zero_()
            # A frozen tensor sends nothing, and its residue stays as it is: so it is with a rank that has no synchronisation point. One
            # that was frozen in the middle of a round has a change to send.
            x.requires_grad_(mine and (parameter.requires_grad or bool(change.any())))
            x.grad = change
        self.reducer.present = list(due)
        skipped = self._residues.skipped_steps
        for x in reversed(self.common.values()):
            self.reducer.ready(x)
        averages = {name: self.reducer.result(x) for name, x in self.common.items()}
        if self._residues.skipped_steps > skipped:
            self._void(mine)
            return
        self._knows = True
        for name, parameter in self._parameters.items():
            x = self.common[name]
            x.sub_(averages[name])
            if mine:
                parameter.copy_(x)
                if self._start is not self.common:
                    self._start[name].copy_(x)
        if mine:
            self._under_way = False

    def _void(self, mine: bool) -> None:
        """Some rank's change was not finite, so nothing was exchanged: that rank goes back to where it began, the others keep what they
        have, and send it with the next synchronisation."""
        changes = ((self._start[name] - parameter, parameter) for name, parameter in self._parameters.items())
        if mine and not all(bool((change.abs() <= largest_gradient(_name(change.dtype))).all()) for change, _ in changes):
            log.warning(
                "step %d: this rank's parameters are not finite, or changed by more than 2**100, since its last synchronisation: they are "
                "those of then again. Look at the loss of every rank, or lower the learning rate",
                self.taken,
            )
            for name, parameter in self._parameters.items():
                parameter.copy_(self._start[name])

    # The agreement, before the first step.

    def _agree(self) -> None:
        """Compare schedules, steps and common parameters of all ranks; newcomers take up those of who was there before."""
        self.schedule.check_ranks(self._transport.size)
        self._take_up_loaded()
        mine = {
            "settings": {"local_steps": self.schedule.describe()},
            "taken": self.taken,
            "knows": self._knows,
            "parameters": digest(self.common),
        }
        everyone = self._transport.exchange_objects(mine, "local_steps")
        compare_ranks(everyone, ("settings",))
        known = [rank for rank, other in enumerate(everyone) if other["knows"]]
        compared = [everyone[rank] for rank in known] or everyone
        if len({(other["taken"], other["parameters"]) for other in compared}) > 1:
            steps = sorted({other["taken"] for other in compared})
            raise RuntimeError(
                f"ranks begin local steps from different parameters (at steps {steps}), which local steps would keep apart for ever: call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) on all ranks before the first step, and load states of one step"
            )
        if len({other["parameters"] for other in everyone}) > 1:
            self._send_common(root=known[0], keeps=self._knows)
        self.taken = compared[0]["taken"]
        self._agreed = self._knows = True

    def _take_up_loaded(self) -> None:
        if self._loaded:
            for name, parameter in self._parameters.items():
                self.common[name].copy_(self._loaded["common"][name])
                parameter.copy_(self._loaded["local"][name])
                if self._start is not self.common:
                    self._start[name].copy_(self._loaded["start"][name])
            self._under_way, self._loaded = True, {}
        elif not self._under_way:
            self._take_up_parameters()

    def _send_common(self, root: int, keeps: bool) -> None:
        """All ranks get the common parameters of the rank at place `root`; those that do not keep their own begin from them."""
        for i, (name, parameter) in enumerate(self._parameters.items()):
            x = self.common[name]
            self._transport.send_to_all(x.data, root, f"local_steps.{i}")
            if not keeps:
                parameter.copy_(x)
        if not keeps:
            self._under_way = False
            log.warning("this rank begins from the common parameters of rank %d, in the middle of a round of local steps", root)

    # What the compressor asks.

    def meet(self) -> None:
        """Ranks of an elastic run come together: they compare before the next step."""
        self._agreed = False

    def state_dict(self) -> dict[str, Any]:
        """{"taken": steps}, and where x is not the model's parameters also {"common": {name: x}, "local": {name: x_i}}: after steps since
        the last synchronisation, and in half precision. "start" too where every rank has its own schedule. Tensors are the ones in use."""
        if self._loaded:
            return {"taken": self.taken, **self._loaded}
        state: dict[str, Any] = {"taken": self.taken}
        narrow = any(parameter.dtype != self.common[name].dtype for name, parameter in self._parameters.items())
        if self.taken and (self._under_way or narrow or self.schedule.asynchronous):
            state["common"] = {name: x.detach() for name, x in self.common.items()}
            state["local"] = {name: parameter.detach() for name, parameter in self._parameters.items()}
            if self._start is not self.common:
                state["start"] = dict(self._start)
        return state

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless this is a state of `state_dict` of these parameters."""
        parts = [part for part in ("common", "local", "start") if part in state]
        if ("common" in state) != ("local" in state) or ("common" in state and ("start" in state) != self.schedule.asynchronous):
            raise ValueError("the state's local steps are of another kind of schedule: give the same local_steps, or go on without it")
        for part in parts:
            shapes = ({name: tuple(tensor.shape) for name, tensor in of.items()} for of in (state[part], self.common))
            if len({tuple(sorted(one.items())) for one in shapes}) > 1:
                raise ValueError(f"the state's local steps ({part}) belong to another model")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of `state_dict`, before the next step: what is broadcast or loaded until then does not spoil it."""
        self.taken = int(state["taken"])
        self._loaded = {part: state[part] for part in ("common", "local", "start") if part in state}
        self._under_way = self._agreed = False
        # A state of before the first step knows no more than a newcomer does.
        self._knows = self.taken > 0

    def stats(self) -> dict[str, Any]:
        """local_steps: the schedule; steps_taken: of this rank's optimizer; steps_skipped: those left out for a bad gradient."""
        return {"local_steps": self.schedule.describe(), "steps_taken": self.taken, "steps_skipped": self.skipped}


def gradients_are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients that there are, are finite. One pass, and one wait for a device."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    ends = [end.to(values[0].device, torch.float64) for value in values if value.numel() for end in torch.aminmax(value)]
    return not ends or bool(torch.stack(ends).isfinite().all())


def digest(tensors: Tensors) -> str:
    """The same for the same numbers, for ranks to compare."""
    found = hashlib.blake2b()
    for tensor in tensors.values():
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _wide(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A place for the common parameter: what half precision would round away of averages must not be lost."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype, requires_grad=False), requires_grad=parameter.requires_grad)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
