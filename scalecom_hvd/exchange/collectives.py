"""What an exchange asks of a transport: a contract that one class fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

import torch

from scalecom_hvd.agreement import Numbers

LAST = sys.maxsize

Result = TypeVar("Result")


class CollectiveError(RuntimeError):
    """A collective cannot be completed: a rank failed, or ranks asked for different things."""


class Work(Protocol):
    """A collective that this rank has submitted."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""

    def wait(self) -> torch.Tensor:
        """Block until all ranks have submitted it, and return its result.

        If it is called again, it returns the same result. It raises an error if the collective
        failed, for example because a rank was lost.
        """


class Collectives(Protocol):
    """The collectives of one set of ranks.

    Which calls meet: calls with the same name. Every rank must submit each collective, with buffers
    of equal dtype and shape. Collectives of several buckets may be submitted in a different order
    on each rank (`channel`), and from any thread. No two with the same name may be under way at a
    time. A rank uses a name again when its own `Work.wait` has returned, which may be before
    another rank's has.

    Which calls block: only `Work.wait`. A rank that calls it must be sure that all ranks submit the
    collective without waiting for something that this rank does later. For an accelerator's
    tensors, `wait` may make the current stream wait, and return at once. `done` is then true from
    the start.

    Who owns a buffer: after `broadcast` or `all_reduce`, the transport owns the buffer until the
    work is done, and nobody else reads or writes it. `gather` leaves its tensor as it is, and the
    caller must leave it as it is until the work is done. Ranks may share the result of `gather`, so
    nobody writes to it.

    What travels: contiguous tensors, on the parameters' device or on the CPU. Some of them are
    views. `all_reduce` is asked for float32, float64 and int32. `broadcast` is asked for
    bytes (uint8), floats and what a method brings. `gather` is asked for these and int64.

    When a rank fails, the `wait` of all others must raise an error, such as CollectiveError.
    Otherwise they would wait for ever. The transport itself decides on a time limit for ranks that
    hang. It also decides how it ends, after the last step on all ranks. (One that wraps
    ProcessGroupCollectives calls its `end_with(optimizer)`.)

    Attributes:
        spins: whether waiting may keep a core busy, which is quickest, but takes the core from
            kernels and from the thread that sends. The exchange sets it. A transport may ignore it.
        is_ordered: whether collectives of all channels together meet in the order in which ranks
            submit them, as on an accelerator's streams. Buckets then take turns.
    """

    spins: bool
    is_ordered: bool

    @property
    def size(self) -> int:
        """How many ranks there are; 0 if this process is none of them."""

    @property
    def position(self) -> int:
        """This rank's position, 0 to size - 1."""

    @property
    def share(self) -> float:
        """What `all_reduce` multiplies the sum over ranks by: 1 / size, or 1 for sums."""

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go while training goes on."""

    @property
    def numbers(self) -> Numbers:
        """Counts the exchanges of this process, so that each has names of its own once they agree.

        So let one transport serve all optimizers. It has `agreement.NUMBERS`, or if several ranks
        are in one process, a `Numbers()`.
        """

    def channel(self) -> Collectives:
        """The same ranks, for the collectives of some buckets' steps.

        On a channel, every rank submits the same collectives in the same order, so a transport need
        not look at names. All ranks ask for a channel together. The channel may be this object.
        """

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        """Send the buffer of the rank at position `root` to all ranks, in place."""

    def all_reduce(self, buffer: torch.Tensor, name: str) -> Work:
        """Multiply the sum of all ranks' buffers by `share`, in place.

        int32 is only summed, and may wrap around: words of fields (integers.py) have no sign.
        """

    def gather(self, tensor: torch.Tensor, name: str) -> Work:
        """Join all ranks' tensors along the first dimension, in order of position."""

    def restarts(self) -> Callable[[], bool]:
        """A function that tells whether ranks were started anew since it was last called.

        If they were, there may be other ranks, and nothing is under way any more (elastic runs).
        """


class Wait(Generic[Result]):
    """What a bucket's step yields when it waits; `result = yield from wait` gives the result.

    Args:
        what: a name for profiles.
        work: what is waited for: a collective, or a kernel.
        round: a rank may submit this collective only after it has waited for `round - 1` earlier
            ones of the same step. 0: it needs nothing that other ranks do in this step. LAST: only
            the step's end follows, so nobody hurries to look.
        then: a function that makes this wait's result of the work's result. None: the work's result
            is returned as it is.

    Attributes:
        is_over: whether the result was returned.
    """

    def __init__(
        self, what: str, work: Work, round: int, then: Callable[[Any], Result] | None = None
    ) -> None:
        self.what, self.work, self.round, self.then = what, work, round, then
        self.is_over = False

    def __iter__(self) -> Generator[Wait[Any], None, Result]:
        yield self
        return self.now()

    def now(self) -> Result:
        """The result; blocks until it is there."""
        result: Any = self.work.wait()
        self.is_over = True
        return result if self.then is None else self.then(result)


Step = Generator[Wait[Any], None, Result]
"""One bucket's step, or a part of it: it yields what it waits for, and returns its result."""


def finished(step: Step[Result]) -> Result:
    """The result of a step that waits for nothing, such as a move of a bucket without a thread."""
    try:
        next(step)
    except StopIteration as end:
        return end.value
    raise AssertionError("there is something to wait for")


def gather_objects(collectives: Collectives, value: Any, name: str) -> list[Any]:
    """Every rank's JSON value, in order of position. Blocks until all ranks have called it.

    The name has no exchange's number, because ranks may not have agreed on the number yet.
    """
    payload = json.dumps(value).encode()
    length = torch.tensor([len(payload)], device="cpu")
    lengths = collectives.gather(length, f"scalecom.{name}.sizes").wait().tolist()
    longest = max(lengths)
    padded = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8)
    joined = collectives.gather(padded, f"scalecom.{name}").wait()
    # JSON ignores the spaces at the end.
    return [json.loads(part.numpy().tobytes()) for part in joined.split(longest)]
