"""The script's loss scale, by which gradients are larger than what residues hold.

A GradScaler keeps its scale on a device, so the host must wait for a copy. Hooks of backward must
not wait. So if the model's forward has hooks (step_ahead.py), the copy begins there, and has mostly
arrived when backward brings the first gradient.

Imports collectives and devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from scalecom_hvd.exchange.collectives import Wait
from scalecom_hvd.exchange.devices import HostCopy


class LossScale:
    """What a script gave as `loss_scale=`.

    Args:
        given: a torch.amp.GradScaler, a function that returns the current scale, or None.

    Attributes:
        read: a function that returns the current scale, as a number or a tensor.

    Raises:
        TypeError: it is something else.
    """

    def __init__(self, given: object) -> None:
        self.give(given)

    def give(self, given: object) -> None:
        """From now on, this is the loss scale. Raises as the constructor does."""
        self.read = _reader(given)
        self._scaler = given if isinstance(given, torch.amp.GradScaler) else None
        # The scaler's tensor and its version, and a copy that is on its way to the host.
        self._copied: tuple[torch.Tensor | None, int, HostCopy | None] = None, 0, None

    @property
    def is_given(self) -> bool:
        """Whether there is a loss scale."""
        return self.read is not _unscaled

    def forward_begins(self) -> None:
        """Begin to copy a GradScaler's scale to the host: a training forward begins."""
        scale = getattr(self._scaler, "_scale", None)
        if scale is not None:  # otherwise nothing was scaled yet
            self._copy_of(scale)

    def inverse(self) -> Wait[float]:
        """1 / loss scale, once the host has it. It brings gradients into the residues' units.

        Raises:
            ValueError: the scale is not a finite number above 0. If the host does not have it yet,
                the Wait raises this.
        """
        scale = self.read()
        if not isinstance(scale, torch.Tensor):
            scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
        copy = HostCopy(scale) if self._scaler is None else self._copy_of(scale)
        comes: Wait[float] = Wait("loss scale", copy, round=0, then=_inverse)
        if copy.done():  # so that a wrong scale is refused at once
            comes.now()
        return comes

    def _copy_of(self, scale: torch.Tensor) -> HostCopy:
        """A copy of the scaler's tensor. A new one begins only if the tensor has changed."""
        of, version, copy = self._copied
        if of is not scale or version != scale._version:
            copy = HostCopy(scale)
            self._copied = scale, scale._version, copy
        return copy


def _reader(given: object) -> Callable[[], float | torch.Tensor]:
    if given is None:
        return _unscaled
    reader = getattr(given, "get_scale", given)
    if not callable(reader):
        raise TypeError(
            "loss_scale must be a GradScaler or a callable that gives the current scale, not "
            f"{given!r}"
        )

    def read() -> float | torch.Tensor:
        # A GradScaler's own tensor, for which get_scale() would wait. If it is None or missing, the
        # GradScaler has none yet.
        scale = getattr(given, "_scale", None)
        of_pytorch = isinstance(given, torch.amp.GradScaler) and scale is not None
        return scale if of_pytorch else reader()

    return read


def _inverse(scale: torch.Tensor) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(
            "loss_scale= must give a finite number above 0, such as a GradScaler's scale, not "
            f"{float(scale):g}"
        )
    return 1 / float(scale)


def _unscaled() -> float:
    return 1.0
