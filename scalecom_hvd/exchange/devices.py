"""The streams on which an exchange works on accelerators; on a CPU there is nothing to do.

An accelerator runs what the host enqueues on a stream in turn, and later. All moves and collectives
of an exchange are enqueued on streams of its own, one for each device, so that they run beside
backward. They wait for the stream that has the gradients, and whoever uses averages or residues
waits for them. The host itself waits for a device only where a step ends.

Memory that was freed may be used again at once by later work of the stream that had it. So
gradients are kept until the current stream waits for the exchange's, and averages that were made on
the exchange's stream are recorded on the one that uses them.

Written against torch.accelerator and torch.Stream alone, so that CUDA, ROCm and XPU are one code,
and tests can bring a device of their own. Imports nothing of this package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch


class Streams:
    """One stream on each of these devices.

    Args:
        devices: of the parameters. A CPU has no streams.

    Raises:
        ValueError: this PyTorch has no streams for any device alike.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = [device for device in dict.fromkeys(devices) if device.type not in _HOSTS]
        if devices and not hasattr(getattr(torch, "accelerator", None), "set_device_index"):
            raise ValueError(
                f"parameters are on {devices[0]}, which needs PyTorch 2.7 or newer, and this is "
                f"{torch.__version__}: update PyTorch, or train on CPUs"
            )
        self._streams = [torch.Stream(device=device) for device in devices]
        self._outside: list[torch.Stream] = []

    def entered(self, joins: bool = True) -> AbstractContextManager[None]:
        """What is enqueued here follows what the current streams hold so far.

        Args:
            joins: whether what current streams are given afterwards follows that. In backward's
                hooks it need not.
        """
        # Hooks of every gradient come here, also on CPUs.
        return self._entered(joins) if self._streams else _NOTHING

    @contextlib.contextmanager
    def _entered(self, joins: bool) -> Iterator[None]:
        current = [torch.accelerator.current_stream(own.device) for own in self._streams]
        apart = [(s, c) for s, c in zip(self._streams, current, strict=True) if s != c]
        before, self._outside = self._outside, current
        for own, other in apart:
            own.wait_stream(other)
        try:
            with self.continued():
                yield
        finally:  # also what an error has rolled back is used by others
            self._outside = before
            for own, other in apart if joins else ():
                other.wait_stream(own)

    def left(self) -> AbstractContextManager[None]:
        """For a moment back on the streams that were current where `entered` began.

        The host may wait for these: they hold no collective that another rank has yet to submit.
        """
        return _on(self._outside) if self._outside else _NOTHING

    def continued(self) -> AbstractContextManager[None]:
        """What is enqueued here follows what these streams hold: for threads of the package's own.

        Their current streams are those of a thread that just began, and have nothing to wait for.
        """
        return _on(self._streams) if self._streams else _NOTHING

    def give(self, made: torch.Tensor) -> torch.Tensor:
        """What may have been made on these streams, for the current one to use, and to free."""
        return recorded(made) if self._streams else made


@contextlib.contextmanager
def _on(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Make them the current ones of this thread.

    Not `with stream`: torch.Stream keeps what was current before in itself, so that two threads, or
    two `with` of one thread, would mix it up (github.com/pytorch/pytorch/issues/176560).
    """
    index = torch.accelerator.current_device_index()
    before = [torch.accelerator.current_stream(own.device) for own in streams]
    try:
        for own in streams:
            torch.accelerator.set_stream(own)
        yield
    finally:
        for other in before:
            torch.accelerator.set_stream(other)
        torch.accelerator.set_device_index(index)


def recorded(made: torch.Tensor) -> torch.Tensor:
    """What another stream made, for the current one to use: its memory is not free before that."""
    if made.device.type not in _HOSTS and not made.is_sparse:
        made.record_stream(torch.accelerator.current_stream(made.device))
    return made


def uploaded(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait.

    Pinned memory is taken anew every time: torch reuses it when the copy is over.
    """
    if device.type in _HOSTS:
        return torch.from_numpy(table)
    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)


def stream_id(device: torch.device) -> int:
    """Which stream is current there: of what is kept for later, another one would need to wait."""
    if device.type in _HOSTS:
        return 0
    return torch.accelerator.current_stream(device).stream_id


class Point:
    """How far the current stream of a tensor's device is. On a CPU everything is done at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = None
        if tensor.device.type not in _HOSTS:
            self._event = torch.Event(tensor.device)
            self._event.record()

    def is_past(self) -> bool:
        """Whether the device has done what was enqueued before."""
        return self._event is None or self._event.query()

    def let_stream_wait(self) -> None:
        """What the current stream is given from now on follows."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Keep the host until the device is past it."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class HostCopy:
    """A copy of a tensor on the host, under way: something to wait for. See collectives.Work.

    Args:
        tensor: on any device. It is copied behind what the current stream holds.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # From an accelerator this takes pinned memory, and returns at once.
        self._copy = tensor.to("cpu", non_blocking=True)
        self._end = Point(tensor)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._end.is_past()

    def wait(self) -> torch.Tensor:
        """Wait for the device, and give the copy."""
        self._end.wait()
        return self._copy


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """These tensors on the CPU. All copies are enqueued before the host waits for the first."""
    copies = [HostCopy(tensor) for tensor in tensors]
    return [copy.wait() for copy in copies]


_HOSTS = ("cpu", "meta")
_NOTHING = contextlib.nullcontext()
