"""torch.distributed's collectives, as an exchange asks for them. Without Horovod, and without MPI.

torch.distributed knows no names: in a process group those collectives meet that ranks submitted as
their n-th. So every exchange has a group of its own, which no script submits to, and so has every
bucket: in a bucket's step all ranks submit the same ones in the same order, whatever other buckets
do meanwhile.

These groups are made past torch.distributed.new_group: it counts all groups of a process, so that
two exchanges that agree at once, each on its thread, would meet in each other's groups; it does
not hand on the script's time limit; and a group lives until the process ends. Here a group is found
by its name, and goes with its last collective. They are Gloo's: nothing of this has run on a GPU.

A group that goes earlier waits for its collectives, which other ranks may never submit: those of a
step that was given up. Python's garbage collector let them go wherever it came by, while the other
ranks waited for this one. So a group is held until all that was submitted to it is done; what never
is stays, also when the process ends.

Imports agreement, and collectives of exchange/.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import datetime
import logging
import resource
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from scalecom_hvd.agreement import NUMBERS
from scalecom_hvd.exchange.collectives import SUMMED, CollectiveError

log = logging.getLogger("scalecom_hvd")

SECONDS_TO_TELL = 60  # that others are waited for, as Horovod does
SECONDS_TO_END = 2  # for what is on its way when the process ends

# How many exchanges each set of ranks has made, the same on all of them.
_made: collections.Counter[tuple[int, ...]] = collections.Counter()

# Collectives that nobody has waited for yet, each with its group, by their id().
_held: dict[int, tuple[dist.Work, Any]] = {}


def _hold(work: dist.Work, group: Any) -> None:
    # Those of a step that was given up are done when the other ranks submitted them too.
    for key, (other, _) in _held.copy().items():
        if other.is_completed():
            _held.pop(key, None)
    _held[id(work)] = work, group


@atexit.register
def _leave_behind() -> None:
    """The process ends, and nobody shall wait for what will never be done."""
    given_up = time.monotonic() + SECONDS_TO_END
    for work, group in list(_held.values()):
        while not work.is_completed() and time.monotonic() < given_up:
            time.sleep(0.001)
        if not work.is_completed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class ProcessGroupWork:
    """A collective that was submitted to torch.distributed. See `Work`.

    Args:
        name: of the collective.
        group: what it was submitted to.
        work: torch's.
        result: what its result is made of.
        then: makes it, when the collective is done.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        work: dist.Work,
        result: torch.Tensor,
        then: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        _hold(work, group)
        self._name = name
        self._work: dist.Work | None = work
        self._result, self._then = result, then
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether waiting would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait for it, and give its result.

        Raises:
            CollectiveError: it failed, such as for a rank that was lost.
        """
        if self._work is not None:
            work, self._work = self._work, None
            try:
                self._wait_for(work)
            except RuntimeError as error:
                self._error = CollectiveError(str(error))
                self._error.__cause__ = error
            else:
                if self._then is not None:
                    self._result = self._then(self._result)
            finally:
                _held.pop(id(work), None)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait_for(self, work: dist.Work) -> None:
        try:
            work.wait(datetime.timedelta(seconds=SECONDS_TO_TELL))
        except RuntimeError:
            if not work.is_completed():
                log.warning(
                    "this rank has waited %d s for others to submit %s, and goes on waiting. Does "
                    "every rank take this step? Are several optimizers stepped in the same order "
                    "everywhere?",
                    SECONDS_TO_TELL,
                    self._name,
                )
            work.wait()  # raises what failed, if it did


class ProcessGroupCollectives:
    """Collectives among the ranks of a process group. See `Collectives`.

    Every rank of the group has to make one at the same time: it is where they meet.

    Args:
        group: default: all ranks.
        sums: whether `all_reduce` gives sums.

    Raises:
        ValueError: torch.distributed was not started.
    """

    numbers = NUMBERS
    elastic = False  # torchrun starts all ranks again, each in a new process
    spins = True

    def __init__(self, group: dist.ProcessGroup | None = None, sums: bool = False) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed was not started: call torch.distributed.init_process_group() "
                "first, and launch with torchrun"
            )
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.size, self.position = len(ranks), dist.get_rank(group)
        self._sums, self._timeout = sums, _timeout_of(group)
        self._name = f"scalecom/{'-'.join(map(str, ranks))}/{_made[ranks]}"
        _made[ranks] += 1
        # A connection of its own: who waits for other ranks keeps a store from all other threads.
        store: Any = distributed_c10d._get_default_store()  # torch's types lack `clone`
        self._store = store.clone()
        self._channels = 0
        self._group = self._new_group(self._name)

    def _new_group(self, name: str) -> Any:  # torch's types lack its methods
        store = dist.PrefixStore(name, self._store)
        try:
            return dist.ProcessGroupGloo(store, self.position, self.size, self._timeout)
        except RuntimeError as error:
            if "open files" not in str(error):
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise RuntimeError(
                f"this process may have {limit} files and connections open, and needs more: each "
                f"optimizer, or hook, has up to 10 process groups of about {self.size + 3}. Say "
                "`ulimit -n 65536` before torchrun, in the shell or the job's script"
            ) from error

    @property
    def share(self) -> float:
        """What `all_reduce` multiplies the sum over ranks by."""
        return 1.0 if self._sums else 1 / self.size

    def restarts(self) -> Callable[[], bool]:
        """They are never started anew in one process."""
        return lambda: False

    def channel(self) -> ProcessGroupCollectives:
        """The same ranks, in a group of their own."""
        channel = object.__new__(ProcessGroupCollectives)
        vars(channel).update(vars(self))
        channel._group = self._new_group(f"{self._name}/{self._channels}")
        self._channels += 1
        return channel

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> ProcessGroupWork:
        """Send the buffer of the rank at position `root` to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = self._group.broadcast([buffer], options)
        return ProcessGroupWork(name, self._group, work, buffer)

    def all_reduce(self, buffer: torch.Tensor, name: str) -> ProcessGroupWork:
        """Average over ranks in place; of SUMMED the sum."""
        divides = not self._sums and buffer.dtype not in SUMMED
        then = (lambda total: total.mul_(self.share)) if divides else None
        work = self._group.allreduce([buffer])
        return ProcessGroupWork(name, self._group, work, buffer, then)

    def gather(self, tensor: torch.Tensor, name: str) -> ProcessGroupWork:
        """Join all ranks' tensors along the first dimension, in order of position."""
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size, *tensor.shape))
        work = self._group.allgather([list(parts)], [tensor])
        return ProcessGroupWork(name, self._group, work, parts, lambda parts: parts.flatten(0, 1))


def check_devices(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError where parameters are not on a CPU.

    NCCL's groups would need another order of collectives, and none of this has run on a GPU.
    """
    devices = {parameter.device for parameter in parameters}
    elsewhere = [device for device in devices if device.type != "cpu"]
    if elsewhere:
        raise ValueError(
            f"parameters are on {elsewhere[0]}: over torch.distributed this works on CPUs only so "
            "far. On GPUs scalecom_hvd.torch, launched with Horovod, takes them, but has not been "
            "run there"
        )


def _timeout_of(group: dist.ProcessGroup | None) -> datetime.timedelta:
    """What the script gave to init_process_group or new_group; of Gloo's groups."""
    try:
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
        return backend.options._timeout
    except (AttributeError, RuntimeError):
        return distributed_c10d.default_pg_timeout
