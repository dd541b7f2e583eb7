"""torch.distributed's collectives, as an exchange asks for them. Without Horovod, and without MPI.

torch.distributed knows no names: in a process group those collectives meet that ranks submitted as
their n-th. So every exchange has a group of its own, which no script submits to, and so has every
bucket: in a bucket's step all ranks submit the same ones in the same order, whatever other buckets
do meanwhile.

These groups are made past torch.distributed.new_group: it counts all groups of a process, so that
two exchanges that agree at once, each on its thread, would meet in each other's groups; it does
not hand on the script's time limit; and a group lives until the process ends. Here a group is found
by its name, and goes with its last collective.

What ranks say to each other lies on the CPU, and travels by Gloo. Tensors of an accelerator travel
by the backend that the script's own group has for them, such as NCCL. Its collectives are enqueued
on streams: the host waits for none of them, and all ranks must submit them in one order. So all
buckets then share one group, which is made when it is first used. If the script's group has Gloo
for the accelerator too, Gloo takes a copy through the host, and the host waits.

A group that goes earlier waits for its collectives, which other ranks may never submit: those of a
step that was given up. Python's garbage collector let them go wherever it came by, while the other
ranks waited for this one. So a group is held until all that was submitted to it is done; what never
is stays, also when the process ends.

Imports agreement, and collectives of exchange/.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
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
        # Of all but Gloo's the current stream waits, and the host does not.
        self._is_enqueued = not isinstance(group, dist.ProcessGroupGloo)
        self._work: dist.Work | None = work
        self._result, self._then = result, then
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether waiting would return at once."""
        return self._is_enqueued or self._work is None or self._work.is_completed()

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
                if not self._is_enqueued:
                    _held.pop(id(work), None)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait_for(self, work: dist.Work) -> None:
        if self._is_enqueued:
            work.wait()  # with a time limit NCCL's keeps the host
            return
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
        devices: of the tensors.

    Raises:
        ValueError: torch.distributed was not started, or has no backend for a device.
    """

    numbers = NUMBERS
    elastic = False  # torchrun starts all ranks again, each in a new process
    spins = True

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        sums: bool = False,
        devices: Iterable[torch.device] = (),
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed was not started: call torch.distributed.init_process_group() "
                "first, and launch with torchrun"
            )
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.size, self.position = len(ranks), dist.get_rank(group)
        self._sums = sums
        self._backends = {device.type: _backend_for(device, group) for device in devices}
        self._timeout = _timeout_of(group, self._backends)
        self.is_ordered = any(name != "gloo" for name in self._backends.values())
        self._name = f"scalecom/{'-'.join(map(str, ranks))}/{_made[ranks]}"
        _made[ranks] += 1
        # A connection of its own: who waits for other ranks keeps a store from all other threads.
        store: Any = distributed_c10d._get_default_store()  # torch's types lack `clone`
        self._store = store.clone()
        self._channels = 0
        self._begin(self._name)

    def _begin(self, name: str) -> None:
        # {backend: its group}; torch's types lack its methods
        self._groups: dict[str, Any] = {"gloo": self._new_gloo(name)}
        self._name_of_groups = name

    def _group_for(self, tensor: torch.Tensor) -> Any:
        """Where a tensor travels. Ranks are asked for it in one order."""
        backend = self._backends.get(tensor.device.type, "gloo")
        if backend not in self._groups:
            store = dist.PrefixStore(f"{self._name_of_groups}/{backend}", self._store)
            rest = store, self.position, self.size, self._timeout
            self._groups[backend] = _new_group(backend, *rest)
        return self._groups[backend]

    def _new_gloo(self, name: str) -> Any:
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
        channel._begin(f"{self._name}/{self._channels}")
        self._channels += 1
        return channel

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> ProcessGroupWork:
        """Send the buffer of the rank at position `root` to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        group = self._group_for(buffer)
        return ProcessGroupWork(name, group, group.broadcast([buffer], options), buffer)

    def all_reduce(self, buffer: torch.Tensor, name: str) -> ProcessGroupWork:
        """Average over ranks in place; of SUMMED the sum."""
        divides = not self._sums and buffer.dtype not in SUMMED
        then = (lambda total: total.mul_(self.share)) if divides else None
        group = self._group_for(buffer)
        return ProcessGroupWork(name, group, group.allreduce([buffer]), buffer, then)

    def gather(self, tensor: torch.Tensor, name: str) -> ProcessGroupWork:
        """Join all ranks' tensors along the first dimension, in order of position."""
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size, *tensor.shape))
        group = self._group_for(tensor)
        work = group.allgather([list(parts)], [tensor])
        return ProcessGroupWork(name, group, work, parts, lambda parts: parts.flatten(0, 1))


def _backend_for(device: torch.device, group: dist.ProcessGroup | None) -> str:
    """What moves a device's tensors in the script's group, such as "nccl".

    Raises:
        ValueError: nothing does.
    """
    if device.type == "cpu":
        return "gloo"  # whatever the script's group has: MPI's has no groups of threads
    # Such as "cpu:gloo,cuda:nccl".
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    backend = backends.get(device.type)
    if backend not in ("gloo", *_NEW_GROUPS) and backend not in _plugins():
        raise ValueError(
            f"parameters are on {device}, and the process group has {backends}, of which nothing "
            f"serves {device.type}: leave the backend out of torch.distributed."
            "init_process_group(), which then takes the usual one for each device"
        )
    return backend


def _new_group(
    backend: str, store: dist.Store, position: int, size: int, timeout: datetime.timedelta
) -> Any:
    """A group of a backend of PyTorch's, or of one that was registered there."""
    if backend in _NEW_GROUPS:
        kind = getattr(dist, _NEW_GROUPS[backend])
        options = kind.Options()
        options._timeout = timeout
        return kind(store, position, size, options)
    return _plugins()[backend].creator_fn(store, position, size, timeout)


_NEW_GROUPS = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}


def _plugins() -> dict[str, Any]:
    """The backends that were registered with torch.distributed, by their names."""
    return {name.lower(): plugin for name, plugin in dist.Backend._plugins.items()}


def _timeout_of(group: dist.ProcessGroup | None, devices: Iterable[str]) -> datetime.timedelta:
    """What the script gave to init_process_group or new_group."""
    for device in ("cpu", *devices):  # a group of NCCL alone has no backend for a CPU
        with contextlib.suppress(AttributeError, RuntimeError):
            backend = (group or dist.group.WORLD)._get_backend(torch.device(device))
            return backend.options._timeout
    return distributed_c10d.default_pg_timeout
