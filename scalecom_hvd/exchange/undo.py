"""What an optimizer may change in a step, remembered so that the step can be undone.

An optimizer that calls its closure several times (LBFGS) has changed parameters and state before it
learns that a gradient cannot be used. Used by optimizers with local steps; imports nothing.
"""

from __future__ import annotations

import collections
from typing import Any

import torch


class Remembered:
    """Tensors, and the dicts and lists that they are in, as they are now; `put_back` makes the same
    objects so again.

    Others may hold them too: a state's tensors are told by their parameter, parameters by who they
    are. What is neither tensor, dict nor list is taken for a value that nobody changes in place.
    """

    def __init__(self, *roots: Any) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dicts: dict[int, tuple[dict, dict]] = {}
        self._lists: dict[int, tuple[Any, list]] = {}
        for root in roots:
            self._remember(root)

    def _remember(self, value: Any) -> None:
        if id(value) in self._tensors or id(value) in self._dicts or id(value) in self._lists:
            return
        if isinstance(value, torch.Tensor):
            self._tensors[id(value)] = value, value.detach().clone()
            return
        if isinstance(value, dict):
            self._dicts[id(value)] = value, dict(value)
            value = value.values()
        elif isinstance(value, (list, collections.deque)):
            self._lists[id(value)] = value, list(value)
        elif not isinstance(value, tuple):
            return
        for item in value:
            self._remember(item)

    @torch.no_grad()
    def put_back(self) -> None:
        """All is as it was."""
        for now, before in self._dicts.values():
            now.clear()
            now.update(before)
        for now, before in self._lists.values():
            now.clear()
            now.extend(before)
        for tensor, before in self._tensors.values():
            tensor.copy_(before)
