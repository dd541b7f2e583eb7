"""Horovod's collectives, as an exchange asks for them: all that is said to Horovod while training.

Names decide which tensors meet, so all ranks must use the same.

Of a GPU's tensors Horovod reads what the current stream had enqueued when they were submitted
(0.28.1, torch/ready_event.cc: an event is recorded there). It calls a collective done when the
device has done it (common/ops/gpu_operations.cc, FinalizeGPUQueue: a thread waits for its events),
but for what it then does itself on the default stream; see `_ENDS_ON_DEFAULT_STREAM`. Imports
agreement, and collectives of exchange/.
"""

from __future__ import annotations

import contextlib
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
from scalecom_hvd.exchange.collectives import SUMMED

TWO_THREADS = (
    "two optimizers of this process take their first steps, or find no new gradients, at the same "
    "time on two threads, and Horovod cannot tell their collectives apart: let one thread train "
    "both models, or start a process for each"
)
SHORTEST_SLEEP, LONGEST_SLEEP = 1e-4, 1e-3  # seconds
# On ROCm it divides in the callback (torch/mpi_ops.py, Average), and with asynchronous completion
# the callback alone waits for the device (torch/mpi_ops_v2.cc).
_ENDS_ON_DEFAULT_STREAM = bool(torch.version.hip) or os.environ.get(
    "HOROVOD_ENABLE_ASYNC_COMPLETION", "0"
) not in ("", "0")

_alive: weakref.WeakSet[HorovodCollectives] = weakref.WeakSet()


def exchanges_alive() -> bool:
    """Whether an optimizer of this process uses ScaleCom on more than one rank."""
    gc.collect()  # an optimizer that was deleted hangs in a cycle with its own class
    return any(collectives.size > 1 for collectives in _alive)


class Restarts:
    """Tells whether Horovod was shut down and started again, as in elastic runs.

    Then there may be other ranks, and no handle from before is alive. A second `hvd.init()`
    without a shutdown looks the same, so all ranks must call it, or none.
    """

    def __init__(self) -> None:
        self._started = mpi_ops._handle_map

    def noticed(self) -> bool:
        """Whether that happened since this was last called."""
        # Every init() makes a new one (0.28.1, mpi_ops.py:71).
        before, self._started = self._started, mpi_ops._handle_map
        return self._started is not before


class HorovodWork:
    """A collective that was submitted to Horovod. See `Work`."""

    def __init__(self, collectives: HorovodCollectives, handle: int, owner: torch.Tensor) -> None:
        self._collectives = collectives
        self._handle: int | None = handle
        self._owner: torch.Tensor | None = owner
        self._result: torch.Tensor | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether waiting would return at once."""
        return self._handle is None or bool(horovod.poll(self._handle))

    def wait(self) -> torch.Tensor:
        """Wait for it, and give its result.

        Horovod's own waiting spins. That is quickest for what comes at once, but it takes the core
        from whoever is to send. So for large models this sleeps, each time for a tenth of what it
        has waited already.

        Raises:
            RuntimeError: it failed because a rank called hvd.join().
            HorovodInternalError: it failed otherwise, such as for a worker that was lost.
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
                self._result = horovod.synchronize(handle)
                if self._result.is_cuda and _ENDS_ON_DEFAULT_STREAM:
                    device = self._result.device
                    default = torch.cuda.default_stream(device)
                    torch.cuda.current_stream(device).wait_stream(default)
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
    """Horovod's collectives on a process set. See `Collectives`.

    Args:
        process_set: default: all ranks.
        op: hvd.Average or hvd.Sum: what `all_reduce` gives.
        predivide: the gradient_predivide_factor of Horovod's DistributedOptimizer.
    """

    numbers = NUMBERS
    is_ordered = False

    def __init__(
        self,
        process_set: ProcessSet | None = None,
        op: int = horovod.Average,
        predivide: float = 1.0,
    ) -> None:
        self._process_set = process_set or horovod.global_process_set
        averages = op == horovod.Average
        self._reduction = {
            "op": op,
            "prescale_factor": 1 / predivide if averages else 1.0,
            "postscale_factor": predivide if averages else 1.0,
            "process_set": self._process_set,
        }
        self._sum = {"op": horovod.Sum, "prescale_factor": 1.0, "postscale_factor": 1.0}
        self.spins = True
        self._size = 0
        _alive.add(self)

    def restarts(self) -> Callable[[], bool]:
        """Tells whether Horovod was shut down and started again since it was last called."""
        return Restarts().noticed

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go."""
        return is_elastic()

    @property
    def size(self) -> int:
        """How many ranks the process set has; 0 where this one is not in it."""
        # When a rank has ended, Horovod forgets all sets but the one of all ranks.
        with contextlib.suppress(ValueError):
            self._size = self._process_set.size() if self._process_set.included() else 0
        return self._size

    @property
    def position(self) -> int:
        """This rank's place in the process set."""
        return self._process_set.rank()

    @property
    def share(self) -> float:
        """What `all_reduce` multiplies a sum over ranks by."""
        return 1 / self.size if self._reduction["op"] == horovod.Average else 1.0

    def channel(self) -> HorovodCollectives:
        """Horovod's meet by name, in any order."""
        return self

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> HorovodWork:
        """Send the buffer of the rank at position `root` to all, in place."""
        # Horovod counts roots by global rank, also inside a process set.
        root = self._process_set.ranks[root]
        return self._submit(horovod.broadcast_async_, buffer, root, name, self._process_set)

    def all_reduce(self, buffer: torch.Tensor, name: str) -> HorovodWork:
        """Average over ranks (or sum) in place; of SUMMED the sum."""
        reduction = self._reduction | (self._sum if buffer.dtype in SUMMED else {})
        return self._submit(horovod.allreduce_async_, buffer, name=name, **reduction)

    def gather(self, tensor: torch.Tensor, name: str) -> HorovodWork:
        """Join all ranks' tensors along the first dimension, in order of position."""
        return self._submit(
            horovod.allgather_async, tensor, name=name, process_set=self._process_set
        )

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
    """An object that owns the tensor in C++, as long as it lives.

    When a rank ends or is lost, the others' Horovod drops all pending tensors under a lock that
    whoever submits wants too (0.28.1, process_set.cc, ProcessSetTable::Finalize). Since PyTorch
    2.13 at the latest, whoever drops the last owner in C++ of a tensor that Python has too takes
    Python's lock, and whoever submits has that one: both wait for ever. So Horovod's must not be
    the last.
    """
    owner = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    owner.grad = tensor
    return owner
