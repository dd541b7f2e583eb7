"""Applies averaged changes to the common parameters of local steps: x <- outer(x, average).

outer is a torch optimizer that all ranks step alike, with the average as its gradient (DiLoCo,
Douillard et al., 2023, arXiv 2311.08105). Its state is the same on all ranks; newcomers take over
the state of the others. Without an outer optimizer, the average is subtracted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.saved_state import Saved

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the common parameters."""
Group = dict[str, Any]
"""Settings of a group of parameters, or the state of one parameter; JSON values."""


class OuterStep:
    """The common parameters, and the outer optimizer that steps them, made by `make` if given.

    Attributes:
        common: {name: x}, float32 or float64, because half precision would round away parts of
            averages, which must not be lost.
        optimizer: the outer optimizer, or None.

    Raises:
        TypeError: `make` gives no optimizer of the common parameters, or one that wants a closure.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], make: Outer | None) -> None:
        self.common = {
            name: torch.nn.Parameter(p.detach().to(wide_dtype(p), copy=True), p.requires_grad)
            for name, p in parameters.items()
        }
        self.optimizer = None if make is None else _made(make, self.common)

    def take(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Apply each average to its x, in the same way on every rank."""
        if self.optimizer is None:
            for name, average in averages.items():
                self.common[name].sub_(average)
            return
        for name, x in self.common.items():
            # A tensor that no rank changed, such as a frozen one, stays as it is: no momentum moves
            # it. So does a tensor of another fragment.
            average = averages.get(name)
            x.grad = average if average is not None and bool(average.any()) else None
        self.optimizer.step()
        for x in self.common.values():
            x.grad = None

    def settings(self) -> dict[str, str]:
        """What ranks must have in common; {} without an outer optimizer."""
        if self.optimizer is None:
            return {}
        return {"outer": f"{type(self.optimizer).__name__}({self.optimizer.defaults})"}

    def groups(self) -> list[Group]:
        """Each group's settings for JSON, such as the learning rate, which a scheduler changes."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            {key: _plain(value) for key, value in group.items() if _is_setting(value)}
            for group in groups
        ]

    def take_groups(self, groups: Sequence[Group]) -> None:
        """Take over what another rank's `groups` gave."""
        if self.optimizer is None:
            return
        for own, others in zip(self.optimizer.param_groups, groups, strict=False):
            for key, value in others.items():
                if isinstance(own.get(key), torch.Tensor):
                    own[key].fill_(value)
                else:
                    own[key] = tuple(value) if isinstance(value, list) else value

    def state_dict(self) -> Saved:
        """What is saved: the optimizer's state and its class's name. {} without an optimizer."""
        if self.optimizer is None:
            return {}
        return {"outer": self.optimizer.state_dict(), "outer_kind": type(self.optimizer).__name__}

    def check_state(self, state: Saved) -> None:
        """Raise ValueError unless this holds what `state_dict` of such an optimizer gives."""
        if ("outer" in state) != (self.optimizer is not None):
            has = "without an outer optimizer, so leave out outer="
            if "outer" in state:
                has = "with an outer optimizer, so give the same outer="
            raise ValueError(f"the state was made {has}")
        if self.optimizer is None:
            return
        own, saved = self.optimizer.state_dict(), state["outer"]
        kind = type(self.optimizer).__name__
        counts, found = (
            [len(group["params"]) for group in one["param_groups"]] for one in (own, saved)
        )
        if state.get("outer_kind", kind) != kind or found != counts:
            raise ValueError(
                f"the state's outer optimizer is not a {kind} of these parameters: give the outer= "
                "of the saved run"
            )

    def load_state_dict(self, state: Saved) -> None:
        """Load what `state_dict` gave."""
        if self.optimizer is not None:
            # The optimizer keeps the tensors that it is given.
            self.optimizer.load_state_dict(copy.deepcopy(state["outer"]))

    def tensors(self) -> list[torch.Tensor]:
        """The common parameters, and the optimizer's state."""
        values = [state[key] for state in self._states() for key in sorted(state)]
        state = [value for value in values if isinstance(value, torch.Tensor)]
        return [*self.common.values(), *state]

    def describe(self) -> list[Group]:
        """Each common parameter's state for JSON: {key: (shape, dtype) of a tensor, or number}."""

        def shape_of(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            return [list(value.shape), str(value.dtype).removeprefix("torch.")]

        return [{key: shape_of(state[key]) for key in sorted(state)} for state in self._states()]

    def broadcast(
        self, collectives: Collectives, root: int, described: Sequence[Mapping[str, Any]]
    ) -> None:
        """Give all ranks x and the state of the rank `root`, where `describe` gave `described`."""
        for x, own in zip(self.common.values(), described, strict=False):
            state = dict(own)
            for key, (shape, dtype) in ((k, v) for k, v in own.items() if isinstance(v, list)):
                now = self.optimizer.state.get(x, {}).get(key)
                if not (isinstance(now, torch.Tensor) and list(now.shape) == shape):
                    device = x.device if shape else "cpu"  # steps are counted on the CPU
                    now = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                state[key] = now
            self.optimizer.state.pop(x, None)
            if state:
                self.optimizer.state[x] = state
        for i, tensor in enumerate(self.tensors()):
            whole = tensor.detach().contiguous().view(-1)  # as Horovod needs it
            collectives.broadcast(whole, root, f"scalecom.local_steps.{i}").wait()
            tensor.detach().copy_(whole.view(tensor.shape))

    def _states(self) -> list[Group]:
        if self.optimizer is None:
            return []
        return [self.optimizer.state.get(x, {}) for x in self.common.values()]


def _made(make: Outer, common: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    outer = make(list(common.values())) if callable(make) else None
    if not isinstance(outer, torch.optim.Optimizer) or {
        x for group in outer.param_groups for x in group["params"]
    } != set(common.values()):
        raise TypeError(
            "outer must be a function that takes the common parameters and returns a torch "
            "optimizer of them, such as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, "
            "nesterov=True)"
        )
    try:
        inspect.signature(outer.step).bind()
    except TypeError as error:
        raise TypeError(
            f"outer must be an optimizer that steps without a closure, not {type(outer).__name__}. "
            "A closure would have no loss to evaluate, only averages"
        ) from error
    return outer


def _is_setting(value: object) -> bool:
    """Whether this is a setting, such as a number, and not a group's parameters."""
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_number or isinstance(value, bool | int | float | str | None)


def _plain(value: object) -> object:
    """A setting as a JSON value."""
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, torch.Tensor) else value
