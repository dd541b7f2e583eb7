"""Which averages a script has thrown away: no step of an optimizer used them.

A script may average gradients, and zero them before a step: FGSM, SAM, the generator's backward
through a GAN's discriminator, a step that is skipped because its gradient is too long. The residues
hold the unsent part of such gradients, which must not train anything. So residues and the method's
own states become what they were before. This takes copies, which are made in the first exchanges,
in which a script of this kind shows itself, and from then on only if it did.

An average waits until an optimizer with its parameter has ended a step. It was thrown away if
p.grad is None, or zero, when the next backward reaches a parameter whose average still waits. Steps
written by hand, and those of other libraries, call no hooks. So until an optimizer of PyTorch has
stepped a parameter, its average counts as thrown away only if no such parameter has moved.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim import optimizer as every_optimizer

from scalecom_hvd.exchange.background_thread import alive
from scalecom_hvd.exchange.gradients import local_part
from scalecom_hvd.exchange.not_compiled import not_compiled

if TYPE_CHECKING:
    from scalecom_hvd.exchange.methods.base import Method

log = logging.getLogger("scalecom_hvd")

LOST = (
    "no optimizer step used the averages of %s: the script threw them away. What was sent of these "
    "gradients is lost, and the rest stays in the residues%s. Compute such gradients with "
    "torch.autograd.grad, freeze the parameters for that backward (requires_grad_(False)), or call "
    "it under model.no_sync()"
)
GOES_BACK = "; from now on all goes back"
TRIAL = 10
"""In how many of the first exchanges residues are copied, to see what the script does."""
GIVEN_BACK = (
    "no optimizer step used the averages of %s: the script threw them away. So the residues become "
    "what they were before that backward, now and later. This takes a copy of the residues"
)


def listed(names: Collection[str]) -> str:
    """The first names, for a message."""
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _Steps:
    """Steps of this process's optimizers: how many have `begun`, and whose is `under_way`.

    Such a step may evaluate its closure, which averages, several times. If the script's own error
    ended a step, it stays under way until the next step ends.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.under_way: weakref.ref[torch.optim.Optimizer] | None = None
        self._with_gradients: set[torch.Tensor] = set()  # when the step began
        every_optimizer.register_optimizer_step_pre_hook(not_compiled(self._begins))
        every_optimizer.register_optimizer_step_post_hook(not_compiled(self._ends))

    def _begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.begun += 1
        self.under_way = weakref.ref(optimizer)
        self._with_gradients = _with_gradients(optimizer)

    def _ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.under_way = None
        # A closure may bring gradients, and some optimizers take them away.
        used, self._with_gradients = self._with_gradients | _with_gradients(optimizer), set()
        for each in alive(_everyone):
            each.note_step(used)


def _with_gradients(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    every = (p for group in optimizer.param_groups for p in group["params"])
    return {parameter for parameter in every if parameter.grad is not None}


def end_step_by_error() -> None:
    """Gradients are refused. The error also ends the step under way, if there is one."""
    _steps.under_way = None


class UnusedAverages:
    """The averages of one exchange that no step has used so far."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], calls_hooks: bool = False) -> None:
        self._own = dict(parameters)
        self._names = {parameter: name for name, parameter in parameters.items()}
        # Names of averages that wait for a step, perhaps those of several exchanges, and what the
        # next backward found in p.grad: nothing, or whether any is not zero. Backward tells of the
        # parameters in _hooked.
        self.waiting: set[str] = set()
        self._dropped: set[str] = set()
        self._found: dict[str, bool] = {}
        self._hooked: set[str] = set()
        # Names of parameters that no step has used so far, what each adds up to, and whether any
        # has moved all the same. If so, nobody knows by what, so those whose averages were dropped
        # are noted.
        self._unstepped: set[str] = set() if calls_hooks else set(parameters)
        self._sums: dict[str, float] = {}
        self._has_moved = False
        self._moved: set[str] = set()
        # The step in which gradients were last averaged. None: outside of a step.
        self._averaged_in: int | None = None
        self._has_warned = False
        itself = weakref.ref(self)
        for name, parameter in parameters.items():
            # FSDP2's sharded parameters get their gradients without this hook.
            if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
                hook = parameter.register_hook(functools.partial(_before_backward, itself, name))
                weakref.finalize(self, hook.remove).atexit = False
                self._hooked.add(name)
        _everyone[id(self)] = self

    def note_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer has ended a step with the gradients of these parameters, perhaps others'."""
        used = {name for p in parameters if (name := self._names.get(p)) is not None}
        self.waiting -= used
        self._unstepped -= used
        lost, self._moved = self._moved & used, self._moved - used
        if lost:  # an optimizer of PyTorch moves them, and did not do so then
            log.warning(LOST, listed(lost), GOES_BACK)

    def come(self, name: str) -> None:
        """Backward has a gradient, and is about to add it to p.grad."""
        if name not in self.waiting or name in self._found or name in self._dropped:
            return
        grad = self._own[name].grad
        if grad is None:
            self._dropped.add(name)
        else:
            self._found[name] = grad.is_sparse or bool(local_part(grad).any())

    def warn_of_replaced(self) -> None:
        """Warn, once, if a script puts gradients of its own in the place of averages that wait."""
        if self.waiting and not self._is_in_one_step() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the script put gradients of its own into p.grad, and no optimizer step has used "
                "the averages that were there. If the new gradients do not contain these averages, "
                "what was sent for them is lost: call step() under optimizer.skip_synchronize()"
            )

    def _is_in_one_step(self) -> bool:
        """A step may evaluate its closure several times, and uses all that this averages."""
        optimizer = None if _steps.under_way is None else _steps.under_way()
        if optimizer is None or self._averaged_in != _steps.begun:
            return False
        return any(p in self._names for group in optimizer.param_groups for p in group["params"])

    def note_dropped(self, name: str) -> None:
        """A face knows that p.grad is no longer what the last exchange left there."""
        self._dropped.add(name)

    def thrown_away(self, names: Iterable[str]) -> set[str]:
        """Those of these names whose last averages were thrown away. Each is told once.

        Call it when the next gradients of these names are complete.
        """
        if self._is_in_one_step():
            return set()
        here = self.waiting.intersection(names)
        for name in here & self._hooked:  # this rank's backward may not reach it
            self.come(name)
        thrown = self._dropped & here
        # An average may be zero, too. If the script zeroed gradients, it zeroed them all.
        if zero := {name for name in here if not self._found.get(name, True)}:
            for name in self.waiting & self._hooked:
                self.come(name)
            thrown |= set() if True in self._found.values() else zero
        self.waiting -= thrown
        unknown = thrown & self._unstepped
        if not (unknown and self._have_moved()):
            return thrown
        self._moved |= unknown
        return thrown - unknown

    def _have_moved(self) -> bool:
        sums = {name: own for name, own in self._sums.items() if name in self._unstepped}
        if not self._has_moved:
            self._has_moved = any(own != _sum(self._own[name]) for name, own in sums.items())
        return self._has_moved

    def forget(self) -> None:
        """Nothing is known of averages so far."""
        self.waiting, self._dropped, self._found = set(), set(), {}

    def end(self, names: Iterable[str]) -> None:
        """Gradients of these names were averaged. What waited before waits still."""
        self.waiting, self._dropped, self._found = self.waiting.union(names), set(), {}
        self._averaged_in = _steps.begun if _steps.under_way else None
        asked = set() if self._has_moved else self.waiting & self._unstepped
        self._sums = {name: _sum(self._own[name]) for name in asked}


class ResidueCopies:
    """Copies of a method's residues, and how many exchanges' averages were `thrown_away`."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._copies: dict[str, torch.Tensor] = {}
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        self._left, self._is_needed = TRIAL, False
        # Whether values leave residues, in the last step and in this one.
        self._sent = self._sends = False
        # Averages thrown away are counted once, if the step after that is given up and begins anew.
        self.thrown_away, self._counted_at = 0, -1

    def begin_step(self, sends: bool) -> None:
        """A step begins. sends: whether its values leave residues."""
        self._sent, self._sends = self._sends, sends
        self._left -= sends
        if not (self._is_needed or self._left >= 0):
            self.forget()

    def begin_bucket(
        self, names: Collection[str], thrown_away: Collection[str], waiting: Collection[str]
    ) -> None:
        """A bucket's step begins: residues become what they were, and are copied.

        names: its compressed tensors, those of them whose last averages were thrown away, and those
        whose averages of other exchanges wait for the same step.
        """
        has_left = self._copies.keys() | (names if self._sent else ())
        returning = [name for name in names if name in thrown_away and name in has_left]
        if thrown_away:
            self._note(thrown_away, [name for name in returning if name not in self._copies])
        residues, states = self._method.residues, self._method.run.tensor_states
        equal, now = self._method.equal_state, residues.step + residues.skipped_steps
        for name in returning:
            if name in self._copies:
                residues.tensors[name].residue.copy_(self._copies[name])
                new = {what: value for what, value in states[name].items() if what in equal}
                states[name] = {**self._states[name], **new}
                if self._counted_at != now:
                    self.thrown_away, self._counted_at = self.thrown_away + 1, now
                    residues.given_back = set()
                residues.given_back.add(name)
        # Of averages that wait, the copy is that from before the first.
        for name in [name for name in names if name not in waiting or name not in self._copies]:
            copy, residue = self._copies.pop(name, None), residues.tensors[name].residue
            if self._sends and (self._is_needed or self._left >= 0):
                copy = torch.empty_like(residue) if copy is None else copy
                self._copies[name] = copy.copy_(residue)
                self._states[name] = {w: v for w, v in states[name].items() if w not in equal}

    def _note(self, names: Collection[str], lost: list[str]) -> None:
        if lost:
            log.warning(LOST, listed(lost), "" if self._is_needed else GOES_BACK)
        elif not self._is_needed:
            log.info(GIVEN_BACK, listed(names))
        self._is_needed = True

    def forget(self) -> None:
        """Forget all copies: other residues were loaded, or the trial is over."""
        self._copies, self._states = {}, {}


def _sum(parameter: torch.Tensor) -> float:
    return float(local_part(parameter).detach().sum(dtype=torch.float64))


_everyone: weakref.WeakValueDictionary[int, UnusedAverages] = weakref.WeakValueDictionary()
_steps = _Steps()


@not_compiled
def _before_backward(
    averages: Callable[[], UnusedAverages | None], name: str, _: torch.Tensor
) -> None:
    own = averages()
    if own is not None:
        own.come(name)
