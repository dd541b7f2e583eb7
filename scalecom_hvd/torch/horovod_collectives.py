"""Horovod's collectives in the form that an exchange needs: all calls of Horovod in training.

Horovod matches tensors by name, so all ranks must use the same names.

For a tensor on a GPU, Horovod reads what the current stream had enqueued when the tensor was
submitted (0.28.1, torch/ready_event.cc: it records an event there). It reports a collective as done
when the device has done it (common/ops/gpu_operations.cc, FinalizeGPUQueue: a thread waits for its
events). The exception is work that Horovod then does itself on the default stream; see
`_ENDS_ON_DEFAULT_STREAM`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops

from scalecom_hvd.agreement import JOIN_REFUSED, NUMBERS, is_elastic
from scalecom_hvd.exchange.background_thread import alive

TWO_THREADS = (
    "two optimizers of this process take their first steps, or find no new gradients, at the same "
    "time on two threads, so Horovod cannot tell their collectives apart. Train both models on one "
    "thread, or start a process for each model"
)
SHORTEST_SLEEP, LONGEST_SLEEP = 1e-4, 1e-3  # seconds
# On ROCm, Horovod divides in the callback (torch/mpi_ops.py, Average). With asynchronous
# completion, only the callback waits for the device (torch/mpi_ops_v2.cc).
_ENDS_ON_DEFAULT_STREAM = bool(torch.version.hip) or os.environ.get(
    "HOROVOD_ENABLE_ASYNC_COMPLETION", "0"
) not in ("", "0")

_alive: weakref.WeakValueDictionary[int, HorovodCollectives] = weakref.WeakValueDictionary()


def exchanges_alive() -> bool:
    """Whether an optimizer of this process uses ScaleCom on more than one rank."""
    gc.collect()  # a deleted optimizer stays in a cycle with its own class
    return any(collectives.size > 1 for collectives in alive(_alive))


def restarts() -> Callable[[], bool]:
    """A function that tells whether Horovod was restarted since its last call, as in elastic runs.

    After a restart the ranks may be others, and handles from before it are gone. A second
    `hvd.init()` without a shutdown looks like a restart, so either all ranks must call it or none.
    """
    started = mpi_ops._handle_map

    def noticed() -> bool:
        nonlocal started
        # Every init() makes a new handle map (0.28.1, mpi_ops.py:71).
        before, started = started, mpi_ops._handle_map
        return started is not before

    return noticed


def where_it_ends(read: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Call `read`, which waits for Horovod and may compute, on the stream of Horovod's work."""
    if device.type != "cuda" or not _ENDS_ON_DEFAULT_STREAM:
        return read()
    default = torch.cuda.default_stream(device)
    with torch.cuda.stream(default):
        result = read()
    torch.cuda.current_stream(device).wait_stream(default)
    return result


class HorovodWork:
    """A collective that was submitted to Horovod. See `Work`."""

    def __init__(self, collectives: HorovodCollectives, handle: int, owner: torch.Tensor) -> None:
        self._collectives = collectives
        self._handle: int | None = handle
        self._owner: torch.Tensor | None = owner
        self._result: torch.Tensor | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._handle is None or bool(horovod.poll(self._handle))

    def wait(self) -> torch.Tensor:
        """Wait for the collective, and return its result.

        Horovod's own wait spins. That is fastest for results that come at once, but it takes the
        core from threads that have to send. So for large models this method sleeps, each time for a
        tenth of the time that it has already waited.

        Raises:
            RuntimeError: the collective failed because a rank called hvd.join().
            HorovodInternalError: it failed for another reason, such as a lost worker.
        """
        begun = time.monotonic()
        while not self.done():
            if self._collectives.spins:
                os.sched_yield()
            else:
                waited = time.monotonic() - begun
                time.sleep(min(max(waited / 10, SHORTEST_SLEEP), LONGEST_SLEEP))
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                read = functools.partial(horovod.synchronize, handle)
                self._result = where_it_ends(read, self._owner.device)
            except horovod.HorovodInternalError as error:
                self._error = error
                if "join" in str(error).lower():
                    self._error = RuntimeError(JOIN_REFUSED)
                    self._error.__cause__ = error
            self._owner = None
        if self._error is not None:
            raise self._error
        return self._result


class HorovodCollectives:
    """Horovod's collectives on a process set, by default that of all ranks. See `Collectives`.

    op, predivide: `op` (Average or Sum) and gradient_predivide_factor of its DistributedOptimizer.
    """

    numbers = NUMBERS
    is_ordered = False
    restarts = staticmethod(restarts)

    def __init__(
        self,
        process_set: ProcessSet | None = None,
        op: int = horovod.Average,
        predivide: float = 1.0,
    ) -> None:
        self._process_set = process_set or horovod.global_process_set
        factors = {"prescale_factor": 1 / predivide, "postscale_factor": predivide}
        self._reduction = {"op": op, "process_set": self._process_set, **factors}
        self._sum = {"op": horovod.Sum, "process_set": self._process_set}
        self.spins = True
        self._size = 0
        _alive[id(self)] = self

    @property
    def elastic(self) -> bool:
        return is_elastic()

    @property
    def size(self) -> int:
        """How many ranks the process set has; 0 if this rank is not in it."""
        # When a rank has ended, Horovod forgets all process sets except that of all ranks.
        with contextlib.suppress(ValueError):
            self._size = self._process_set.size() if self._process_set.included() else 0
        return self._size

    @property
    def position(self) -> int:
        return self._process_set.rank()

    @property
    def share(self) -> float:
        return 1 / self.size if self._reduction["op"] == horovod.Average else 1.0

    def channel(self) -> HorovodCollectives:
        """This object itself: Horovod matches collectives by name, in any order."""
        return self

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> HorovodWork:
        # Horovod counts roots by global rank, also inside a process set.
        root = self._process_set.ranks[root]
        return self._submit(horovod.broadcast_async_, buffer, root, name, self._process_set)

    def all_reduce(self, buffer: torch.Tensor, name: str) -> HorovodWork:
        reduction = self._sum if buffer.dtype == torch.int32 else self._reduction
        return self._submit(horovod.allreduce_async_, buffer, name=name, **reduction)

    def gather(self, tensor: torch.Tensor, name: str) -> HorovodWork:
        where = self._process_set
        return self._submit(horovod.allgather_async, tensor, name=name, process_set=where)

    def _submit(
        self, collective: Callable[..., int], tensor: torch.Tensor, *arguments: Any, **more: Any
    ) -> HorovodWork:
        owner = _owner_in_cpp(tensor)
        try:
            return HorovodWork(self, collective(tensor, *arguments, **more), owner)
        except ValueError as error:
            if "same name" in str(error):
                raise RuntimeError(TWO_THREADS) from error
            raise


def _owner_in_cpp(tensor: torch.Tensor) -> torch.Tensor:
    """An object that owns the tensor in C++ for as long as the object lives.

    When a rank ends or is lost, Horovod on the other ranks drops all pending tensors under a lock.
    A thread that submits a tensor needs this lock too (0.28.1, process_set.cc,
    ProcessSetTable::Finalize). Since PyTorch 2.13 at the latest, a thread that drops the last owner
    in C++ of a tensor that Python owns too takes Python's lock, which the submitting thread holds.
    Then both would wait forever. So Horovod must not be the last owner.
    """
    owner = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    owner.grad = tensor
    return owner
