"""What an exchange asks of a transport, as a contract. A new transport is one class that fits it.

`Collectives` is what the core knows of other ranks: horovod_collectives.py in scalecom_hvd/torch
has Horovod's, simulator.py those of simulated ranks. `Wait` is what a bucket's step yields.
Imports agreement only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

import torch

from scalecom_hvd.agreement import Numbers

LAST = sys.maxsize
# Of these dtypes `all_reduce` gives the sum, whatever the optimizer asks for.
SUMMED = (torch.float16, torch.int32)

Result = TypeVar("Result")


class CollectiveError(RuntimeError):
    """A collective cannot be completed: a rank failed, or ranks asked for different things."""


class Work(Protocol):
    """A collective that this rank has submitted."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        ...

    def wait(self) -> torch.Tensor:
        """Block until all ranks have submitted it, and give its result; the same when asked again.

        Raises an error where it failed, such as for a rank that was lost.
        """
        ...


class Collectives(Protocol):
    """The collectives of one set of ranks.

    Which meet: those of one name. Every rank must submit each, with buffers of equal dtype and
    shape. Those of several buckets may be submitted in another order on each rank (`channel`), from
    any thread, but not two of one name at a time: a name is used again when this rank's
    `Work.wait` has returned, which may be before another's has.

    Which block: none. Only `Work.wait` does, so a rank that may wait for others calls that, and
    must be sure that all of them submit the collective without waiting for something that this
    rank does later. Of an accelerator's tensors `wait` may have the current stream wait, and return
    at once; then `done` is true from the start.

    Who owns a buffer: from `broadcast` and `all_reduce` until the work is done the transport does;
    nobody reads or writes it. `gather` leaves its tensor as it is, and so must the caller until
    then; the result may be one that ranks share, and is not written to.

    What travels: contiguous tensors, on the parameters' device or on the CPU, some of them views.
    `all_reduce` is asked for float16, float32, float64 and int32, `broadcast` for bytes (uint8),
    floats and what a method brings, `gather` for these and int64.

    When a rank fails, the `wait` of all others must raise an error, such as CollectiveError: they
    would wait for ever. A time limit for ranks that hang is the transport's affair, and so is its
    end, after the last step on all ranks.

    Attributes:
        spins: set by the exchange, False before: whether waiting may keep a core busy. That is
            quickest, but takes the core from kernels, and from the thread that is to send. A
            transport may ignore it.
        is_ordered: whether collectives meet in the order in which ranks submit them, those of all
            channels together, as on an accelerator's streams. Buckets then take turns.
    """

    spins: bool
    is_ordered: bool

    @property
    def size(self) -> int:
        """How many ranks there are; 0 where this process is none of them."""
        ...

    @property
    def position(self) -> int:
        """This rank's place, 0 to size - 1."""
        ...

    @property
    def share(self) -> float:
        """What `all_reduce` multiplies the sum over ranks by: 1 / size, or 1 for sums."""
        ...

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go while training goes on."""
        ...

    @property
    def numbers(self) -> Numbers:
        """Counts the exchanges of this process, so that each has names of its own.

        `agreement.NUMBERS`; where several ranks live in one process, a `Numbers()` for each.
        """
        ...

    def channel(self) -> Collectives:
        """The same ranks, for the collectives of some buckets' steps.

        In these, every rank submits the same ones in the same order, so that a transport need not
        look at names. All ranks ask for it together. It may be this object.
        """
        ...

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        """Send the buffer of the rank at position `root` to all, in place."""
        ...

    def all_reduce(self, buffer: torch.Tensor, name: str) -> Work:
        """Multiply the sum of all ranks' buffers by `share`, in place.

        Of SUMMED it is the sum itself, and the caller multiplies when it has made other numbers of
        it: dividing in float16 would lose what is small for good, and words of fields
        (integers.py) cannot be divided. Their sums may wrap around: a word has no sign.
        """
        ...

    def gather(self, tensor: torch.Tensor, name: str) -> Work:
        """Join all ranks' tensors along the first dimension, in order of position."""
        ...

    def restarts(self) -> Callable[[], bool]:
        """A function that tells whether ranks were started anew since it was last called.

        Then there may be other ranks, and nothing is under way any more (elastic runs).
        """
        ...


class Wait(Generic[Result]):
    """What a bucket's step yields when it waits; `result = yield from wait` gives the result.

    Args:
        what: for profiles.
        work: what is waited for: a collective, or a kernel.
        round: how many collectives of this step others must have waited for before they submit
            this one, itself included. 0: it needs nothing that others do in this step. LAST:
            nothing but the step's end follows, so that nobody hurries to look.
        then: what is made of the work's result; None: it is given as it is.

    Attributes:
        is_over: whether its result was given.
    """

    def __init__(
        self,
        what: str,
        work: Work,
        round: int,
        then: Callable[[Any], Result] | None = None,
    ) -> None:
        self.what, self.work, self.round, self._then = what, work, round, then
        self.is_over = False

    def __iter__(self) -> Generator[Wait[Any], None, Result]:
        yield self
        return self.now()

    def now(self) -> Result:
        """The result; blocks until it is there."""
        result: Any = self.work.wait()
        self.is_over = True
        return result if self._then is None else self._then(result)


Step = Generator[Wait[Any], None, Result]
"""One bucket's step, or a part of it: it yields what it waits for, and returns what it gives."""


def finished(step: Step[Result]) -> Result:
    """What a step gives that waits for nothing, as moves of a bucket without a thread do not."""
    try:
        next(step)
    except StopIteration as end:
        return end.value
    raise AssertionError("there is something to wait for")


def gather_objects(collectives: Collectives, value: Any, name: str) -> list[Any]:
    """Every rank's JSON value, in order of position. Blocks: all ranks must be here.

    The name carries no exchange's number, as ranks may not have agreed on it yet.
    """
    payload = json.dumps(value).encode()
    length = torch.tensor([len(payload)], device="cpu")
    lengths = collectives.gather(length, f"scalecom.{name}.sizes").wait().tolist()
    longest = max(lengths)
    padded = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8)
    joined = collectives.gather(padded, f"scalecom.{name}").wait()
    # JSON does not mind the spaces behind it.
    return [json.loads(part.numpy().tobytes()) for part in joined.split(longest)]
