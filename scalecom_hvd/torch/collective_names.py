"""Names for the collectives that a script calls without one, and for those that their gradients
need.

Horovod names a nameless collective by a counter of all collectives of the process
(torch/mpi_ops_v2.cc, GetOpName), which counts the exchange's too. How many of those a rank has
submitted at some moment of backward depends on when offsets arrived, so a nameless
`hvd.allreduce(loss)` between backward() and step() would be called something else on every rank,
and wait for ever. So would
a differentiable collective in the middle of a model, named or not: its backward calls nameless ones
    (mpi_ops.py, HorovodAllgather).
Here they are counted by themselves, and from zero again whenever Horovod is started again, as
    Horovod counts: in elastic runs a newcomer has called none yet. Imports horovod_collectives
    only.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from horovod.torch import mpi_ops

from scalecom_hvd.torch.horovod_collectives import Restarts

_OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


def named_collectives() -> dict[str, Any]:
    """{function's name: the same function, which names what was not named} for all collectives of
    horovod.torch.
    """
    counts = _Counts()
    # Horovod's own code, in a namespace of its own: there the backward of a differentiable
    # collective finds the functions below. Horovod's module stays as it is.
    namespace = dict(vars(mpi_ops))
    for name, kind in vars(mpi_ops).items():
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            namespace[name] = type(
                name, (kind,), {"backward": staticmethod(_moved(kind.backward, namespace))}
            )
    named = {}
    for operation in _OPERATIONS:
        for name in (
            grouped + operation + form
            for grouped in ("", "grouped_")
            for form in ("", "_", "_async", "_async_")
        ):
            function = getattr(mpi_ops, name, None)
            if function is not None:
                differentiable = name.removeprefix("grouped_") == operation
                named[name] = _named(
                    _moved(function, namespace) if differentiable else function, name, counts
                )
    namespace |= named
    return named


def _moved(function: Callable[..., Any], namespace: dict[str, Any]) -> Callable[..., Any]:
    """The same code, for which names of the module mean what they mean in `namespace`."""
    moved = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.update_wrapper(moved, function)


class _Counts:
    """How often each collective was called without a name since Horovod started."""

    def __init__(self) -> None:
        self._restarts = Restarts()
        self._counts: collections.Counter = collections.Counter()

    def next(self, key: Any) -> int:
        if self._restarts.noticed():
            self._counts.clear()
        self._counts[key] += 1
        return self._counts[key] - 1


def _named(function: Callable[..., Any], what: str, counts: _Counts) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("name") is None:
            # Per process set: ranks outside one do not count its calls.
            members = getattr(given.arguments.get("process_set"), "process_set_id", 0)
            given.arguments["name"] = f"{what}.call.{counts.next((what, members))}"
        return function(*given.args, **given.kwargs)

    return collective
