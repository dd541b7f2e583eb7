"""Remembers what an optimizer may change in a step, so that the step can be undone.

An optimizer that calls its closure several times (LBFGS) has changed parameters and state before
it learns that a gradient cannot be used. Optimizers with local steps use this. Imports nothing of
this package.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

Entries = dict[Any, Any]


class Remembered:
    """Tensors as they are now, with the dicts and lists that they are in.

    `put_back` restores the same objects, because others may hold them too: an optimizer finds a
    state by its parameter, and a parameter by its identity. A value that is no tensor, dict, list
    or tuple is assumed never to change in place.

    Args:
        roots: the objects to remember, with everything in them.
    """

    def __init__(self, *roots: object) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dicts: dict[int, tuple[Entries, Entries]] = {}
        self._lists: dict[int, tuple[list[Any] | collections.deque[Any], list[Any]]] = {}
        for root in roots:
            self._remember(root)

    def _remember(self, value: object) -> None:
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
        """Make everything what it was when it was remembered."""
        for mapping, entries in self._dicts.values():
            mapping.clear()
            mapping.update(entries)
        for sequence, items in self._lists.values():
            sequence.clear()
            sequence.extend(items)
        for tensor, copy in self._tensors.values():
            tensor.copy_(copy)
