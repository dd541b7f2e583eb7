"""What a method knows about one bucket from earlier steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from scalecom_hvd.exchange.collectives import Wait

TensorStates = Mapping[str, Mapping[str, torch.Tensor]]
"""{name of a compressed tensor: {what: tensor}}."""


@dataclasses.dataclass(frozen=True)
class State:
    """What `Method.step` is given, and returns anew for the next step.

    It changes nothing in place, because the step may still be skipped. The next State is dropped
    then.

    Attributes:
        step: the number of this step.
        tensors: {name: {what: tensor}} of this bucket's compressed tensors. A tensor that is
            missing from the next State keeps what it has.
        method: {what: tensor or number} of the whole method. All buckets of a step are given the
            same. If several buckets change it, the last bucket's values are kept, so `steps + 1`
            counts steps.
        whole_next: whether the next step is sent whole. If it is, look-ahead does not choose for
            it.
        arrives: the collective that completes the State in the next step, if the method left one
            under way, as look-ahead does.
    """

    step: int
    tensors: TensorStates
    method: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    whole_next: bool = False
    arrives: Wait[torch.Tensor] | None = None
