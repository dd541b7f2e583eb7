"""The collectives of one exchange: all that is said to Horovod while training is said here.

The reducer and the compressor speak to this small interface, so that another transport can stand in its place. Names decide
which tensors meet, so all ranks must use the same; see `NamedExchange`. Imports agreement alone.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.torch as horovod
import torch
from horovod.torch import mpi_ops

from scalecom_hvd.agreement import JOIN_REFUSED, NamedExchange

SHORTEST_SLEEP, LONGEST_SLEEP = 1e-4, 1e-3  # seconds


class Wait(NamedTuple):
    """What a bucket's step waits for. needs_others: it ends only when other ranks have done something in this step."""

    what: str
    done: Callable[[], bool]
    wait: Callable[[], object]
    needs_others: bool


_alive: weakref.WeakSet[Transport] = weakref.WeakSet()


def exchanges_alive() -> bool:
    """Whether an optimizer of this process uses ScaleCom on more than one rank."""
    gc.collect()  # an optimizer that was deleted hangs in a cycle with its own class
    return any(transport.included and transport.size > 1 for transport in _alive)


class Restarts:
    """Tells whether Horovod was shut down and started again, as in elastic runs: with other ranks, and no handle from before is alive.

    A second `hvd.init()` without a shutdown looks the same, so all ranks must make it or none.
    """

    def __init__(self) -> None:
        self._started = mpi_ops._handle_map

    def noticed(self) -> bool:
        """Whether it was since this was last asked."""
        before, self._started = self._started, mpi_ops._handle_map  # every init() makes a new one (0.28.1, mpi_ops.py:71)
        return self._started is not before


class Transport(NamedExchange):
    """Horovod's collectives on a process set; `position` (0 .. size-1) is this rank's place in it.

    op, predivide: as in Horovod's DistributedOptimizer; what `average` does with the sum. Of float16 it gives the sum itself: Horovod would
    divide in float16, where what is small is lost for good.
    spins: whether it waits as Horovod does, or leaves the core to others meanwhile.
    """

    def __init__(self, process_set: Any = None, op: Any = horovod.Average, predivide: float = 1.0) -> None:
        self._process_set = process_set or horovod.global_process_set
        self._reduction = {
            "op": op,
            "prescale_factor": 1 / predivide if op == horovod.Average else 1.0,
            "postscale_factor": predivide if op == horovod.Average else 1.0,
            "process_set": self._process_set,
        }
        self.spins = True
        self._restarts = Restarts()
        _alive.add(self)

    def restarted(self) -> bool:
        """Whether Horovod was shut down and started again since this was last asked."""
        return self._restarts.noticed()

    def listen(self) -> Callable[[], bool]:
        """The same question for somebody else, who asks at other times."""
        return Restarts().noticed

    @property
    def included(self) -> bool:
        """Whether this rank is in the process set; size and position mean nothing where it is not."""
        return bool(self._process_set.included())

    @property
    def size(self) -> int:
        return self._process_set.size() if self.included else 0

    @property
    def position(self) -> int:
        return self._process_set.rank()

    @property
    def share(self) -> float:
        """What `average` multiplies a sum over ranks by, and who averages float16 must."""
        return 1 / self.size if self._reduction["op"] == horovod.Average else 1.0

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> int:
        """Start sending the buffer of the rank at position `root` to all; gives a handle."""
        # Horovod counts roots by global rank, also inside a process set.
        return horovod.broadcast_async_(buffer, self._process_set.ranks[root], f"{self._prefix}.{name}", self._process_set)

    def average(self, buffer: torch.Tensor, name: str) -> int:
        """Start the all-reduce of the buffer, in place; gives a handle. float16: the sum, which is not yet multiplied by `share`."""
        half = {"op": horovod.Sum, "prescale_factor": 1.0, "postscale_factor": 1.0} if buffer.dtype == torch.float16 else {}
        return horovod.allreduce_async_(buffer, name=f"{self._prefix}.{name}", **self._reduction | half)

    def total(self, number: int, name: str) -> int:
        """Start summing every rank's whole number; gives a handle, and `wait` the sum, (1,) int32."""
        mine = torch.tensor([number], dtype=torch.int32)
        return horovod.allreduce_async_(mine, name=f"{self._prefix}.{name}", op=horovod.Sum, process_set=self._process_set)

    def gather(self, tensor: torch.Tensor, name: str) -> int:
        """Start joining every rank's tensor along the first dimension, in order of position; `wait` gives the result."""
        return horovod.allgather_async(tensor, name=f"{self._prefix}.{name}", process_set=self._process_set)

    def done(self, handle: int) -> bool:
        """Whether waiting would return at once."""
        return bool(horovod.poll(handle))

    def until_done(self, handle: int) -> None:
        """Return when waiting would return at once.

        Horovod's own waiting spins: the quickest for what comes at once, but it takes the core from whoever is to send. So for large models
        this sleeps, each time for a tenth of what it has waited already.
        """
        begun = time.monotonic()
        while not self.done(handle):
            if self.spins:
                os.sched_yield()
            else:
                time.sleep(min(max((time.monotonic() - begun) / 10, SHORTEST_SLEEP), LONGEST_SLEEP))

    def wait(self, handle: int) -> torch.Tensor:
        """Wait for a collective, and give its result. Safe only for those that every rank surely submits without waiting for this
        rank's next one."""
        self.until_done(handle)
        try:
            return horovod.synchronize(handle)
        except horovod.HorovodInternalError as error:
            if "join" in str(error).lower():
                raise RuntimeError(JOIN_REFUSED) from error
            raise

    def exchange_objects(self, value: Any, name: str) -> list[Any]:
        """Every rank's JSON value, in order of position. Blocks: all ranks must be here."""
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = horovod.allgather(torch.tensor([payload.numel()]), name=f"scalecom.{name}.sizes", process_set=self._process_set)
        joined = horovod.allgather(payload, name=f"scalecom.{name}", process_set=self._process_set)
        return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes.tolist())]

    def send_to_all(self, tensor: torch.Tensor, root: int, name: str) -> None:
        """The tensor of the rank at position `root`, in place. Blocks: all ranks must be here. As with objects, they may not have agreed on
        this exchange's name yet."""
        horovod.broadcast_(tensor, self._process_set.ranks[root], f"scalecom.{name}", self._process_set)


def wait_for(transport: Transport, what: str, handle: int, needs_others: bool) -> Wait:
    """Waiting for a collective that this rank has submitted."""
    done, wait = (functools.partial(f, handle) for f in (transport.done, transport.until_done))
    return Wait(what, done, wait, needs_others)
