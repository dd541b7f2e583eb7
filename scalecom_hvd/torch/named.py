"""Names for the collectives that a script calls without one.

Horovod names a nameless collective by a counter of all collectives of the process (torch/mpi_ops_v2.cc, GetOpName), which
counts the exchange's too. How many of those a rank has submitted when backward ends depends on when offsets arrived, so a
nameless `hvd.allreduce(loss)` between backward() and step() would be called something else on every rank, and wait for ever.
Here they are counted by themselves, and from zero again whenever Horovod is started again, as Horovod counts: in elastic runs a newcomer
has called none yet. Imports transport alone.
"""

from __future__ import annotations

import collections
import functools
import inspect
from types import ModuleType
from typing import Any

from scalecom_hvd.torch.transport import Restarts

_OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


def named_collectives(horovod: ModuleType) -> dict[str, Any]:
    """{function's name: the same function, which names what was not named} for all collectives of horovod.torch."""
    counts = _Counts()
    names = [
        grouped + operation + form
        for operation in _OPERATIONS
        for grouped in ("", "grouped_")
        for form in ("", "_", "_async", "_async_")
        if hasattr(horovod, grouped + operation + form)
    ]
    return {name: _named(getattr(horovod, name), name, counts) for name in names}


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


def _named(function: Any, what: str, counts: _Counts) -> Any:
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
