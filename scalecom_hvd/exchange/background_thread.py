"""A thread that works while backward runs: it runs kernels that need no Python, and it waits.

After every kernel, the thread lets the exchange go on. Between two bursts of gradients, backward
may compute for long without calling a hook, and what has become possible meanwhile must not wait.
DDP's hook uses such a thread to wait for other ranks. If a script drops an owner that must still
submit something, the thread keeps the owner alive until this is done. Imports nothing of this
package.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
POLL_SECONDS = 3e-4

Jobs = queue.SimpleQueue  # of (job, function, arguments); None: the owner is gone

# {jobs of a thread: its owner}, for owners that are kept alive until they have nothing left to do.
_kept: dict[Jobs, object] = {}
_kept_lock = threading.Lock()


# All threads that were started, and their jobs.
_started: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()
SECONDS_TO_END = 2  # to wait for what is on its way when the process ends


@atexit.register
def _end_threads() -> None:
    """When the process ends, let threads finish, but wait for no other rank.

    Python ends a daemon thread at once. If it is then destroying an owner's process groups, C++
    calls abort().
    """
    given_up = time.monotonic() + SECONDS_TO_END
    wait_for_kept(given_up)
    for jobs in list(_started.values()):
        jobs.put(None)
    for thread in list(_started):
        thread.join(max(given_up - time.monotonic(), 0))


def wait_for_kept(given_up: float = math.inf) -> None:
    """Wait until no thread of this process keeps its owner alive, or until this time."""
    while _kept and time.monotonic() < given_up:
        time.sleep(POLL_SECONDS)


def alive(registry: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """The registered objects that still live. A WeakSet fails if another thread adds to it now."""
    return [one for ref in registry.valuerefs() if (one := ref()) is not None]


class Job(Future):
    """A function that is called on the thread."""

    wait = Future.result


class BackgroundThread:
    """One thread, started when it is first needed. It ends with its owner.

    `go_on`, a method of the owner, is called after every job, and again every POLL_SECONDS as long
    as it returns True. A second thread would not make kernels faster, because memory is the limit.
    """

    def __init__(self, owner: object, go_on: Callable[[], bool] | None = None) -> None:
        # The thread must not keep its owner alive.
        self._go_on = None if go_on is None else weakref.WeakMethod(go_on)
        self._jobs: Jobs = Jobs()
        self._thread: threading.Thread | None = None
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self._jobs.put, None)

    def submit(self, function: Callable[..., object], *arguments: object) -> Job:
        """Call a function on the thread, after the functions submitted before it."""
        if self._thread is None:
            # A daemon does not hold up a script that ends in the middle of a step.
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._go_on), name="scalecom", daemon=True
            )
            self._thread.start()
            _started[self._thread] = self._jobs
        future = Job()
        self._jobs.put((future, function, arguments))
        return future

    def keep_owner(self) -> None:
        """Keep the owner alive, and call go_on again and again, until go_on returns False."""
        with _kept_lock:
            _kept[self._jobs] = self._owner()
            self.submit(lambda: None)


def _serve(jobs: Jobs, go_on: weakref.WeakMethod[Callable[[], bool]] | None) -> None:
    again = False
    while True:
        try:
            job = jobs.get(timeout=POLL_SECONDS if again else None)
        except queue.Empty:
            pass
        else:
            if job is None:
                return
            _do(*job)
            del job  # it holds gradients
        owners = None if go_on is None else go_on()
        again = owners is not None and owners()
        del owners
        if not again:
            with _kept_lock:
                if jobs.empty():
                    _kept.pop(jobs, None)


def _do(future: Job, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
