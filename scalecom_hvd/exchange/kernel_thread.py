"""A thread for kernels that need no Python, so that they run while backward goes on.

After every kernel it lets the exchange go on. Gradients arrive in bursts, and between two of them
backward may compute for long without a hook: what became possible meanwhile (a kernel is done,
offsets have come) must not wait for the next one. Imports nothing of this package.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import MethodType
from typing import Any

POLL_SECONDS = 3e-4


class Job(Future):
    """A function that is called on the thread."""

    def wait(self) -> Any:
        """What it gave, or raised, when it has been called."""
        return self.result()


class KernelThread:
    """One thread, started when it is first needed. It ends with its owner.

    A second one would not be faster: memory is the limit.

    Args:
        go_on: a method of the owner, called after every job, and again every POLL_SECONDS as long
            as it gives True.
    """

    def __init__(self, go_on: Callable[[], bool]) -> None:
        assert isinstance(go_on, MethodType), "its owner is what it is bound to"
        self._go_on = weakref.WeakMethod(go_on)  # the thread must not keep its owner alive
        self._jobs: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(go_on.__self__, self._jobs.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Job:
        """Have a function called on the thread, after those submitted before."""
        if self._thread is None:
            # A daemon: a script that ends in mid-step is not held up.
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._go_on), name="scalecom", daemon=True
            )
            self._thread.start()
        future = Job()
        self._jobs.put((future, function, arguments))
        return future


def _serve(
    jobs: queue.SimpleQueue[tuple | None], go_on: weakref.WeakMethod[Callable[[], bool]]
) -> None:
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
        owners = go_on()
        again = owners is not None and owners()
        del owners


def _do(future: Job, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
