"""A rank's own parameters, held while it resumes in the middle of a round of local steps.

They must be in place before the first forward, even if a model is loaded or broadcast meanwhile. So
they are put in place with the state, and after every call of the face's `broadcast_parameters`. If
something else has overwritten them, all ranks refuse to go on. Imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass
class OwnParameters:
    """The values that one optimizer's parameters on this rank must have at its next step."""

    parameters: Mapping[str, torch.Tensor]  # all that are trained
    values: dict[str, torch.Tensor] | None = None  # that are held; None: nothing is held

    @property
    def held(self) -> bool:
        """Whether values are held, so that the parameters stay this rank's own."""
        return self.values is not None

    @torch.no_grad()
    def hold(self, values: Mapping[str, torch.Tensor] | None = None) -> None:
        """Hold copies of these values. None: hold copies of the parameters as they are."""
        values = self.parameters if values is None else values
        self.values = {
            name: torch.empty_like(p).copy_(values[name]) for name, p in self.parameters.items()
        }

    def let_go(self) -> None:
        """Hold nothing any more: training goes on."""
        self.values = None

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the parameters this rank's own again."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.values[name])

    def in_place(self) -> bool:
        """Whether the parameters equal what is held. True if nothing is held."""
        # In a round that went wrong, parameters may be NaN.
        return self.values is None or all(
            torch.allclose(parameter, self.values[name], rtol=0, atol=0, equal_nan=True)
            for name, parameter in self.parameters.items()
        )
