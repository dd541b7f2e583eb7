"""Residues as they were before a step whose averages a script may throw away.

A step that counts leaves the unsent part of its gradients in the residues. If the script then
throws its averages away (unused_averages.py), that part must not train anything either, so residues
and the method's own states become what they were. Copies of residues are made in the first
exchanges, in which such a script shows itself, and later only if the script did.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.unused_averages import GOES_BACK, LOST, listed

log = logging.getLogger("scalecom_hvd")

TRIAL = 10
"""In how many of the first exchanges residues are copied, to see what the script does."""
GIVEN_BACK = (
    "no optimizer step used the averages of %s: the script threw them away. So the residues become "
    "what they were before that backward, now and later. This takes a copy of the residues"
)


class ResidueCopies:
    """Copies of a method's residues, and how many exchanges' averages were `thrown_away`."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._copies: dict[str, torch.Tensor] = {}
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        self._left, self._is_needed = TRIAL, False
        # Whether values leave residues, in the last step and in this one.
        self._sent = self._sends = False
        self._is_counted, self.thrown_away = True, 0
        self._begun_at = -1  # after so many steps, the last step began

    def begin_step(self, sends: bool) -> None:
        """A step begins. sends: whether its values leave residues."""
        self._sent, self._sends = self._sends, sends
        self._left -= sends
        residues = self._method.residues
        now = residues.step + residues.skipped_steps
        if now != self._begun_at:  # or the step before was given up, and begins again
            self._begun_at, self._is_counted, residues.given_back = now, False, set()
        if not (self._is_needed or self._left >= 0):
            self.forget()

    def begin_bucket(self, names: Collection[str], thrown_away: Collection[str]) -> None:
        """A bucket's step begins: residues become what they were, and are copied.

        names: its compressed tensors, and those of them whose last averages were thrown away.
        """
        returning = [name for name in names if name in thrown_away] if self._sent else []
        if thrown_away:
            self._note(thrown_away, [name for name in returning if name not in self._copies])
        tensors, states = self._method.residues.tensors, self._method.run.tensor_states
        equal = self._method.equal_state
        for name in returning:
            if name in self._copies:
                tensors[name].residue.copy_(self._copies[name])
                new = {what: value for what, value in states[name].items() if what in equal}
                states[name] = {**self._states[name], **new}
                self._method.residues.given_back.add(name)
                self.thrown_away += not self._is_counted
                self._is_counted = True
        for name in names if self._sends and (self._is_needed or self._left >= 0) else ():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensors[name].residue)
            self._copies[name].copy_(tensors[name].residue)
            self._states[name] = {w: v for w, v in states[name].items() if w not in equal}

    def _note(self, names: Collection[str], lost: list[str]) -> None:
        if lost:
            log.warning(LOST, listed(lost), "" if self._is_needed else GOES_BACK)
        elif not self._is_needed:
            log.info(GIVEN_BACK, listed(names))
        self._is_needed = True

    def forget(self) -> None:
        """Forget all copies: other residues were loaded, or a step was given up."""
        self._copies, self._states = {}, {}
