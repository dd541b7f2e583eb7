"""Warns of averages that no optimizer's step uses, because what was sent for them is lost.

A script may average gradients, and zero them before a step: FGSM, SAM, the generator's backward
through a GAN's discriminator. The values that were sent have then left the residues. A hook cannot
see that a script zeroes gradients, but it can see optimizers' steps. Imports nothing of this
package.
"""

from __future__ import annotations

import logging

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

log = logging.getLogger("scalecom_hvd")


class _Steps:
    """Steps of this process's optimizers.

    Attributes:
        begun, taken: how many steps began, and how many ended.
        under_way: whether a step is under way. It may evaluate its closure, which averages, several
            times. If the script's own error ended a step, this stays true until the next step ends.
    """

    def __init__(self) -> None:
        self.begun = self.taken = 0
        self.under_way = False
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)

    def _begins(self, *_: object) -> None:
        self.begun += 1
        self.under_way = True

    def _ends(self, *_: object) -> None:
        self.under_way = False
        self.taken += 1


_steps = _Steps()


def end_step_by_error() -> None:
    """Gradients are refused. The error also ends the step under way, if there is one."""
    _steps.under_way = False


class UnusedAverages:
    """Looks whether a step comes between one exchange's averages and its next ones."""

    def __init__(self) -> None:
        self._taken_before: int | None = None
        self._begun_before = 0
        self._has_warned = False

    def begin(self) -> None:
        """Gradients are about to be averaged."""
        in_one_step = _steps.under_way and self._begun_before == _steps.begun
        unused = self._taken_before == _steps.taken and not in_one_step
        # torch.compile, and steps written by hand, bypass the hooks that count steps.
        if unused and _steps.taken and not self._has_warned:
            self._has_warned = True
            log.warning(
                "gradients are averaged again, but no optimizer step has used the previous "
                "averages. If these averages were zeroed (zero_grad()), the part of the gradients "
                "that was sent is lost. Compute such gradients with torch.autograd.grad, freeze "
                "the parameters for that backward, or call it under model.no_sync(). To accumulate "
                "gradients, give backward_passes_per_step, or use no_sync() for all passes but the "
                "last"
            )

    def end(self, counts: bool) -> None:
        """Gradients were averaged.

        Args:
            counts: whether values have left residues, as in a compressed step that is not skipped.
        """
        self._taken_before = _steps.taken if counts else None
        self._begun_before = _steps.begun
