"""Names for the collectives that a script calls without one, and for those in their backward.

Horovod names an unnamed collective by a counter of all collectives of the process
(torch/mpi_ops_v2.cc, GetOpName). This counter includes the exchange's collectives. How many of
these a rank has submitted at a given moment of backward depends on when offsets arrived. So an
unnamed `hvd.allreduce(loss)` between backward() and step() would have a different name on every
rank, and would wait forever. The same holds for a differentiable collective in the middle of a
model, named or not: its backward calls unnamed ones (mpi_ops.py, HorovodAllgather).

Here the script's collectives have counters of their own. These start from zero whenever Horovod is
started again, as Horovod's does: in elastic runs, a new rank has called none yet.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from horovod.torch import mpi_ops

from scalecom_hvd.torch.horovod_collectives import restarts

_OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
_PREFIXES = ("", "grouped_")
_ENDINGS = ("", "_", "_async", "_async_")


def named_collectives() -> dict[str, Callable[..., Any]]:
    """{function name: a function that names its calls} of all collectives of horovod.torch."""
    is_restarted, counts = restarts(), collections.Counter[tuple[str, int]]()

    def number(*what: Any) -> int:
        """The number of a call, by name and process set, since Horovod started."""
        if is_restarted():
            counts.clear()
        counts[what] += 1
        return counts[what] - 1

    # Run Horovod's own code in a copy of its namespace, in which the backward of a differentiable
    # collective finds the functions below. Horovod's module stays unchanged.
    namespace = dict(vars(mpi_ops))
    for name, kind in vars(mpi_ops).items():
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            backward = staticmethod(_moved(kind.backward, namespace))
            namespace[name] = type(name, (kind,), {"backward": backward})
    named = {}
    for operation, prefix, ending in itertools.product(_OPERATIONS, _PREFIXES, _ENDINGS):
        name = prefix + operation + ending
        function = vars(mpi_ops).get(name)
        if function is not None:
            is_differentiable = not ending
            own = _moved(function, namespace) if is_differentiable else function
            named[name] = _named(own, name, number)
    namespace |= named
    return named


def _moved(function: Callable[..., Any], namespace: dict[str, Any]) -> Callable[..., Any]:
    """The same function, which looks up its global names in `namespace`."""
    moved = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.update_wrapper(moved, function)


def _named(
    function: Callable[..., Any], what: str, number: Callable[[str, int], int]
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("name") is None:
            # Count per process set: ranks outside of a set do not make its calls.
            process_set = getattr(given.arguments.get("process_set"), "process_set_id", 0)
            given.arguments["name"] = f"{what}.call.{number(what, process_set)}"
        return function(*given.args, **given.kwargs)

    return collective
