"""torch.distributed's collectives in the form that an exchange needs, without Horovod and MPI.

In a process group, the n-th collectives that ranks submit belong together: they have no names. So
every exchange has a group of its own, to which no script submits, and so has every bucket, in whose
step all ranks submit the same collectives in the same order.

torch.distributed.new_group does not make these groups: it counts all groups of a process, so two
exchanges that agree at the same time, each on its thread, would meet in each other's groups; it
does not pass on the script's time limit; and its groups live until the process ends. Here a group
is found by its name, and goes with its last collective.

What ranks say to each other is on the CPU, and travels by Gloo. Tensors on an accelerator travel by
the backend that the script's own group has for them, such as NCCL. It enqueues collectives on
streams: the host does not wait for them, and all ranks must submit them in one order. So all
buckets then share one group, which is made when it is first used. With Gloo for the accelerator,
Gloo copies through the host, and the host waits.

A group that goes before its collectives are done waits for them. Other ranks may never submit them,
if the step was given up. So a group is held until all that was submitted to it is done, if need be
beyond the process's end. Groups go with the optimizer, or the state, for which they were made.
Exchanges are in reference cycles, so the garbage collector may delete them much later, and a thread
of each Gloo group wakes up a hundred times a second.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import gc
import logging
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from scalecom_hvd.agreement import NUMBERS
from scalecom_hvd.exchange.background_thread import SECONDS_TO_END
from scalecom_hvd.exchange.collectives import CollectiveError

log = logging.getLogger("scalecom_hvd")

# A group's threads do not live on in a forked child, such as a DataLoader's worker, and the child
# would crash when it deletes the group. There the garbage collector leaves alone what existed
# before the fork.
os.register_at_fork(after_in_child=gc.freeze)

SECONDS_TO_TELL = 60  # of waiting for others before a warning, as in Horovod
NOT_ALL_HERE = (
    "this rank has waited %d s for the other ranks to join a process group of ScaleCom's. Does "
    "every rank make its DistributedOptimizer or ScaleComState, in the same order? Has one ended?"
)

# How many exchanges each set of ranks has made, the same on all of them.
_made: collections.Counter[tuple[int, ...]] = collections.Counter()

# Each group with collectives that nobody has waited for yet, in order; all by their id().
_held: dict[int, tuple[Any, dict[int, dist.Work]]] = {}
_held_lock = threading.Lock()


def _hold(work: dist.Work, group: Any) -> None:
    with _held_lock:
        # Collectives of a step that was given up are done when other ranks have submitted them too.
        # A group completes its collectives in order. To ask each of them whether it is done would
        # take long, because NCCL asks the device, and hundreds are under way in a large model.
        for key, (_, works) in list(_held.items()):
            while works and works[oldest := next(iter(works))].is_completed():
                del works[oldest]
            if not works:
                del _held[key]
        _held.setdefault(id(group), (group, {}))[1][id(work)] = work


def _let_go(work: dist.Work, group: Any) -> None:
    with _held_lock:
        _, works = _held.get(id(group), (group, {}))
        works.pop(id(work), None)
        if not works:
            _held.pop(id(group), None)


@atexit.register
def _leave_behind() -> None:
    """When the process ends, do not wait for what will never be done."""
    given_up = time.monotonic() + SECONDS_TO_END
    for group, works in list(_held.values()):
        for work in list(works.values()):
            while not work.is_completed() and time.monotonic() < given_up:
                time.sleep(0.001)
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@dataclasses.dataclass(eq=False)
class ProcessGroupWork:
    """A collective that was submitted to torch.distributed. See `Work`."""

    _name: str
    _group: Any
    _work: dist.Work | None  # None: it was waited for
    _result: torch.Tensor
    _then: Callable[[torch.Tensor], torch.Tensor] | None = None  # makes the result of what arrived
    _error: Exception | None = None

    def __post_init__(self) -> None:
        _hold(self._work, self._group)
        # For all backends but Gloo, the current stream waits, and the host does not.
        self._is_enqueued = not isinstance(self._group, dist.ProcessGroupGloo)

    def done(self) -> bool:
        return self._is_enqueued or self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Return the result, or raise CollectiveError, for example because a rank was lost."""
        if self._work is not None:
            work, self._work = self._work, None
            try:
                self._wait_for(work)
            except RuntimeError as error:
                self._error = CollectiveError(
                    f"{self._name} failed. Most often another rank has ended with an error, or "
                    f"took fewer steps than this one. torch.distributed says: {error}"
                )
                self._error.__cause__ = error
            else:
                if self._then is not None:
                    self._result = self._then(self._result)
            finally:
                if not self._is_enqueued:
                    _let_go(work, self._group)
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
                    "this rank has waited %d s for other ranks to submit %s, and goes on waiting. "
                    "Does every rank take this step? If there are several optimizers, do all "
                    "ranks step them in the same order?",
                    SECONDS_TO_TELL,
                    self._name,
                )
            work.wait()  # raises the error, if it failed


class ProcessGroupCollectives:
    """Collectives among the ranks of a process group. See `Collectives`.

    Every rank of the group must make one at the same time, because ranks meet in it.

    Args:
        group: default: all ranks.
        sums: whether `all_reduce` gives sums.
        devices: where the tensors are. Those on the CPU need not be named.

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
        self.share = 1.0 if sums else 1 / self.size
        self._backends = {"cpu": "gloo"}
        self._backends |= {device.type: _backend_for(device, group) for device in devices}
        self._timeout = _timeout_of(group, self._backends)
        self.is_ordered = any(name != "gloo" for name in self._backends.values())
        self._name = f"scalecom/{'-'.join(map(str, ranks))}/{_made[ranks]}"
        _made[ranks] += 1
        # The store needs a connection of its own: a thread that waits for other ranks blocks a
        # store for all other threads.
        store: Any = distributed_c10d._get_default_store()  # torch's types lack `clone`
        self._store = store.clone()
        self._channels = 0
        self._all: weakref.WeakSet[ProcessGroupCollectives] = weakref.WeakSet()
        self._begin(self._name)

    def _begin(self, name: str) -> None:
        self._all.add(self)
        # {backend: its group}; torch's types lack its methods
        self._groups: dict[str, Any] = {"gloo": self._new_gloo(name)}
        self._name_of_groups = name

    def _group_for(self, tensor: torch.Tensor) -> Any:
        """The group in which a tensor travels. All ranks must ask for groups in the same order."""
        backend = self._backends.get(tensor.device.type)
        if backend is None:
            raise ValueError(
                f"a tensor is on {tensor.device}, but these collectives were made without "
                "devices=[...] of that kind"
            )
        if backend not in self._groups:
            store = dist.PrefixStore(f"{self._name_of_groups}/{backend}", self._store)
            rest = store, self.position, self.size, self._timeout
            self._groups[backend] = _new_group(backend, *rest)
        return self._groups[backend]

    def _new_gloo(self, name: str) -> Any:
        store = dist.PrefixStore(name, self._store)
        # Gloo waits for all ranks, and nothing else would say that some are missing.
        tells = threading.Timer(SECONDS_TO_TELL, log.warning, (NOT_ALL_HERE, SECONDS_TO_TELL))
        tells.daemon = True
        tells.start()
        try:
            group: Any = dist.ProcessGroupGloo(store, self.position, self.size, self._timeout)
        except RuntimeError as error:
            if "open files" not in str(error):
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise RuntimeError(
                f"this process may have {limit} files and connections open, but needs more: each "
                "optimizer, or hook, has up to 10 process groups, and each group needs about "
                f"{self.size + 3}. Run `ulimit -n 65536` before torchrun, in the shell or the "
                "job's script"
            ) from error
        finally:
            tells.cancel()
            tells.join()  # a DataLoader may fork next
        # This rank may drop the group at once, while others still connect: they would fail. So it
        # is held until all have.
        _hold(group.allreduce([torch.zeros(1, device="cpu")]), group)
        return group

    def restarts(self) -> Callable[[], bool]:
        """A function that returns False: ranks are never restarted within a process."""
        return lambda: False

    def channel(self) -> ProcessGroupCollectives:
        """The same ranks, in a group of their own."""
        channel = object.__new__(type(self))
        vars(channel).update(vars(self))
        channel._begin(f"{self._name}/{self._channels}")
        self._channels += 1
        return channel

    def end_with(self, owner: object) -> None:
        """When `owner` is gone, give up all groups, once what it has submitted is complete."""
        weakref.finalize(owner, _give_up_groups, self._all).atexit = False

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> ProcessGroupWork:
        options = dist.BroadcastOptions()
        options.rootRank = root
        group = self._group_for(buffer)
        return ProcessGroupWork(name, group, group.broadcast([buffer], options), buffer)

    def all_reduce(self, buffer: torch.Tensor, name: str) -> ProcessGroupWork:
        divides = self.share != 1 and buffer.dtype != torch.int32
        then = (lambda total: total.mul_(self.share)) if divides else None
        group = self._group_for(buffer)
        return ProcessGroupWork(name, group, group.allreduce([buffer]), buffer, then)

    def gather(self, tensor: torch.Tensor, name: str) -> ProcessGroupWork:
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size, *tensor.shape))
        group = self._group_for(tensor)
        work = group.allgather([list(parts)], [tensor])
        return ProcessGroupWork(name, group, work, parts, lambda parts: parts.flatten(0, 1))


def _give_up_groups(everything: Iterable[ProcessGroupCollectives]) -> None:
    for collectives in list(everything):
        vars(collectives).pop("_groups", None)  # an exchange that still submitted would be a bug


def _backend_for(device: torch.device, group: dist.ProcessGroup | None) -> str:
    """The backend of the group for a device, such as "nccl". Raises ValueError if none."""
    if device.type == "cpu":
        return "gloo"  # whatever the script's group has: MPI's has no groups of threads
    # Such as "cpu:gloo,cuda:nccl".
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    backend = backends.get(device.type)
    if backend not in ("gloo", *_NEW_GROUPS) and backend not in _plugins():
        raise ValueError(
            f"parameters are on {device}, but no backend of the process group ({backends}) serves "
            f"{device.type}. Leave the backend out of torch.distributed.init_process_group(), "
            "which then takes the usual backend for each device"
        )
    return backend


def _new_group(
    backend: str, store: dist.Store, position: int, size: int, timeout: datetime.timedelta
) -> Any:
    """A group of one of PyTorch's backends, or of a backend that was registered with PyTorch."""
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
    """The time limit that the script gave to init_process_group or new_group."""
    for device in ("cpu", *devices):  # a group with only NCCL has none for CPUs
        with contextlib.suppress(AttributeError, RuntimeError):
            backend = (group or dist.group.WORLD)._get_backend(torch.device(device))
            return backend.options._timeout
    return distributed_c10d.default_pg_timeout
