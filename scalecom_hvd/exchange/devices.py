"""The streams on which an exchange works on accelerators. On a CPU there is nothing to do.

An accelerator runs what the host enqueues on a stream in order, and later. An exchange enqueues all
its moves and collectives on its own streams, one for each device, so they run while backward does.
They wait for the stream that has the gradients, and every stream that uses averages or residues
waits for them. The host waits for a device only at the end of a step.

Freed memory may be reused at once by later work of the stream that had it. So gradients are kept
until the current stream waits for the exchange's, and averages are recorded where they are used.

A process that makes a GPU current, even for a moment, gets a context there, which takes memory. A
new thread begins on GPU 0, which is another rank's. So own threads make their own GPU current
first.

Only torch.accelerator and torch.Stream are used, so the same code serves CUDA, ROCm and XPU, and
tests can bring their own device. Imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch


class Streams:
    """One stream on each of these devices of the parameters. A CPU has none.

    Raises:
        ValueError: this PyTorch has no streams that work the same on any device.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = [device for device in dict.fromkeys(devices) if device.type not in _HOSTS]
        if devices and not hasattr(getattr(torch, "accelerator", None), "device_index"):
            raise ValueError(
                f"parameters are on {devices[0]}, which needs PyTorch 2.8 or newer, but this is "
                f"PyTorch {torch.__version__}. Update PyTorch, or train on CPUs"
            )
        self._streams = [torch.Stream(device=device) for device in devices]
        self._outside: list[torch.Stream] = []

    def entered(self, joins: bool = True) -> AbstractContextManager[None]:
        """Inside, work is enqueued on these streams, behind what the current streams hold so far.

        joins: whether the current streams wait for it at the end, which backward's hooks need not.
        """
        # Every gradient's hook calls this, also on CPUs.
        return self._entered(joins) if self._streams else _NOTHING

    @contextlib.contextmanager
    def _entered(self, joins: bool) -> Iterator[None]:
        with self.at_their_device():
            current = [torch.accelerator.current_stream(own.device) for own in self._streams]
            apart = [(s, c) for s, c in zip(self._streams, current, strict=True) if s != c]
            before, self._outside = self._outside, current
            for own, other in apart:
                own.wait_stream(other)
            try:
                with self.continued():
                    yield
            finally:  # after an error, others use what was rolled back
                self._outside = before
                for own, other in apart if joins else ():
                    other.wait_stream(own)

    def at_their_device(self) -> AbstractContextManager[None]:
        """Inside, their device is current. A thread of this package first has another one."""
        return _current(self._streams[0].device) if self._streams else _NOTHING

    def left(self) -> AbstractContextManager[None]:
        """Inside, the streams that were current when `entered` began are current again.

        The host may wait for them: they hold no collective that another rank has yet to submit.
        """
        return _on(self._outside) if self._outside else _NOTHING

    def continued(self) -> AbstractContextManager[None]:
        """Inside, work is enqueued on these streams. For own threads, with nothing to wait for."""
        return _on(self._streams) if self._streams else _NOTHING


@contextlib.contextmanager
def _on(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Make these streams the current ones of this thread.

    `with stream` stores the previously current stream in the stream itself, so two threads, or two
    blocks, would mix it up (github.com/pytorch/pytorch/issues/176560).
    """
    with _current(streams[0].device):
        before = [torch.accelerator.current_stream(own.device) for own in streams]
        try:
            for own in streams:
                torch.accelerator.set_stream(own)
            yield
        finally:
            for other in before:
                torch.accelerator.set_stream(other)


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Inside, this device is current. The way back to the one before makes no context there."""
    return torch.accelerator.device_index(device.index)


def recorded(made: torch.Tensor) -> torch.Tensor:
    """Let the current stream use, and free, what another one may have made."""
    if made.device.type not in _HOSTS and not made.is_sparse:
        made.record_stream(torch.accelerator.current_stream(made.device))
    return made


def uploaded(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a table to the device, in pinned memory that torch reuses. The host does not wait."""
    if device.type in _HOSTS:
        return torch.from_numpy(table)
    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)


def stream_id(device: torch.device) -> int:
    """The id of the device's current stream, to which cached tensors belong; 0 on a CPU."""
    if device.type in _HOSTS:
        return 0
    return torch.accelerator.current_stream(device).stream_id


class Point:
    """How far the current stream of a tensor's device has come. A CPU does everything at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = None
        if tensor.device.type not in _HOSTS:
            self._device = tensor.device
            self._event = torch.Event(tensor.device)
            with _current(self._device):  # torch records in the current device's stream
                self._event.record()

    def done(self) -> bool:
        """Whether the device has done what was enqueued before this point."""
        return self._event is None or self._event.query()

    def let_stream_wait(self) -> None:
        """Let further work of that device's current stream wait for this point."""
        if self._event is not None:
            with _current(self._device):
                self._event.wait()


class Timer:
    """How long is waited between `start` and `stop`: by the host, or on accelerators by streams."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type not in _HOSTS]

    def start(self) -> None:
        """Begin to wait: the current streams hold everything that is not to be counted."""
        self._first = self._now()

    def stop(self) -> None:
        """Note that the wait is over: the current streams hold all that was waited for."""
        self._last = self._now()

    def seconds(self) -> float:
        """How long it took. The host waits for the devices, which have mostly finished."""
        (began, first), (ended, last) = self._first, self._last
        for event in last:
            event.synchronize()
        waited = [one.elapsed_time(other) / 1000 for one, other in zip(first, last, strict=True)]
        return max(waited, default=ended - began)

    def _now(self) -> tuple[float, list[torch.Event]]:
        now, events = time.perf_counter(), []
        for device in self._devices:
            events.append(torch.Event(device, enable_timing=True))
            with _current(device):
                events[-1].record()
        return now, events


class HostCopy(Point):
    """A copy of a tensor on its way to the host, and the point at which it is there; see Work."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # From an accelerator this takes pinned memory, and returns at once.
        self._copy = tensor.to("cpu", non_blocking=True)
        super().__init__(tensor)

    def wait(self) -> torch.Tensor:
        """Let the host wait for the device, and return the copy."""
        if not self.done():
            self._event.synchronize()
        return self._copy


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU. All copies are enqueued before the host waits for the last."""
    copies = [HostCopy(tensor) for tensor in tensors]
    # When the last copy of a device is done, so are the others.
    return [copy.wait() for copy in reversed(copies)][::-1]


_HOSTS = ("cpu", "meta")
_NOTHING = contextlib.nullcontext()
