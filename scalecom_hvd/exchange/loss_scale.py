"""The script's loss scale, by which gradients are larger than what residues hold.

A GradScaler keeps its scale on a device. Hooks of backward must not wait for it, so the host reads
a copy, which begins when backward brings the first gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from scalecom_hvd.exchange.collectives import Wait
from scalecom_hvd.exchange.devices import HostCopy


class LossScale:
    """What a script gave as `loss_scale=`.

    Args:
        given: a torch.amp.GradScaler, a function that returns the current scale, or None.

    Raises:
        TypeError: it is something else.
    """

    def __init__(self, given: object) -> None:
        if given is not None and not callable(getattr(given, "get_scale", given)):
            raise TypeError(
                "loss_scale must be a GradScaler or a callable that gives the current scale, not "
                f"{given!r}"
            )
        self._given: Any = given

    def read(self) -> float | torch.Tensor:
        """The current scale: a number, or a tensor that may be on a device."""
        if self._given is None:
            return 1.0
        # A GradScaler's own tensor, because get_scale() would wait for it. None: there is none yet.
        is_scaler = isinstance(self._given, torch.amp.GradScaler)
        scale = getattr(self._given, "_scale", None) if is_scaler else None
        return getattr(self._given, "get_scale", self._given)() if scale is None else scale

    def inverse(self) -> Wait[float]:
        """1 / loss scale, once the host has it. It brings gradients into the residues' units.

        Raises:
            ValueError: the scale is not a finite number above 0. If the host does not have it yet,
                the Wait raises this.
        """
        scale = self.read()
        if not isinstance(scale, torch.Tensor):
            scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
        copy = HostCopy(scale)
        comes: Wait[float] = Wait("loss scale", copy, round=0, then=_inverse)
        if copy.done():  # so that a wrong scale is refused at once
            comes.now()
        return comes


def _inverse(scale: torch.Tensor) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(
            "loss_scale= must give a finite number above 0, such as a GradScaler's scale, not "
            f"{float(scale):g}"
        )
    return 1 / float(scale)
