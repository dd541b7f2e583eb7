"""The gradients of the step in progress, as they were reported to an exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from scalecom_hvd.exchange.devices import uploaded
from scalecom_hvd.exchange.gradients import any_of


class Gradient(NamedTuple):
    """A gradient that was reported.

    If its parameter is not trained, and all elements are zero, its residue waits.
    """

    flat: torch.Tensor | None  # (N,); None: this rank has none, or it travels in another way
    trained: bool  # whether its parameter is trained


_NONE = Gradient(None, True)


class Reported(dict[str, Gradient]):
    """{name: gradient}, in the order in which they were reported, and what all are `like`."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._like = like

    def flats(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """{name: (N,)}, with zeros for what did not arrive on this rank."""
        flats = {}
        for name in names:
            flat, like = self.get(name, _NONE).flat, self._like[name]
            flats[name] = like.detach().new_zeros(like.numel()) if flat is None else flat
        return flats

    def idle(self, flats: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of untrained tensors. If a script gave one a gradient, the gradient counts."""
        trained = {name: self.get(name, _NONE).trained for name in flats}
        return [name for name, flat in flats.items() if not (trained[name] or any_of(flat))]

    def used(self, flats: Mapping[str, torch.Tensor], zeros_count: bool) -> torch.Tensor:
        """(number of tensors,): which this rank has; zeros only if they `count`. No host waits."""
        if not zeros_count:
            return torch.stack([flat.any() for flat in flats.values()])
        has = [self.get(name, _NONE).flat is not None for name in flats]
        return uploaded(np.array(has), next(iter(flats.values())).device)
