"""n simulated workers in one process: the very same Exchange, with collectives in memory.

Every rank is a thread, but only one runs at a time, until it waits for another rank. So a run gives
the same results every time. If ranks wait for something that nobody will ever submit, this is an
error at once, never a hang. Collectives meet by name. Sums are made in the order of ranks. This is
for studies with more workers than there are machines, and for tests.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from scalecom_hvd.agreement import Numbers
from scalecom_hvd.exchange.bucket import Groups
from scalecom_hvd.exchange.collectives import CollectiveError
from scalecom_hvd.exchange.devices import Point, recorded
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Options
from scalecom_hvd.exchange.gradients import as_bytes, flat_tensor, unflat_gradient
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.local.outer_step import Outer
from scalecom_hvd.exchange.methods import Method, ScaleCom
from scalecom_hvd.exchange.new_gradients import fill_in
from scalecom_hvd.exchange.optimizer_gradients import StartsAlike
from scalecom_hvd.schedule import Schedule

Gradients = Mapping[str, torch.Tensor | None]
# Makes the result from what all ranks brought. Returns None if what they brought now holds it.
Combine = Callable[[list[torch.Tensor]], torch.Tensor | None]
Task = Callable[[], Any]  # what one rank has to do


class Meeting:
    """One collective: what every rank brings to it."""

    def __init__(self) -> None:
        # {rank: (what must be the same on all ranks, its tensor)}.
        self.brought: dict[int, tuple[tuple[object, ...], torch.Tensor]] = {}
        self.complete = False  # whether all ranks have come
        self.error: str | None = None  # why the collective then failed
        self.result: torch.Tensor | None = None  # what `Combine` gave
        # Points on the ranks' streams, if there are any: where what each brought is there, and
        # later where the result is.
        self.points: list[Point] = []

    def finish(self, combine: Combine) -> None:
        """All ranks have come: make the result, or the error."""
        brought = [self.brought[rank] for rank in sorted(self.brought)]
        first = brought[0][0]
        different = next((rank for rank, (what, _) in enumerate(brought) if what != first), None)
        if different is not None:
            self.error = f"rank 0 submitted {first}, and rank {different} {brought[different][0]}"
        else:
            for point in self.points:
                point.let_stream_wait()
            self.result = combine([tensor for _, tensor in brought])
            self.points = [Point(brought[0][1])]
        self.brought.clear()
        self.complete = True


class Network:
    """Where n simulated ranks meet, and which of them runs.

    An exchange's thread may submit too, but never waits. So a lock guards the meetings alone.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.numbers = [Numbers() for _ in range(n)]
        self._lock = threading.Lock()
        self._meetings: dict[str, Meeting] = {}
        self._running: int | None = None
        self._ready: deque[int] = deque()
        self._waiting: dict[int, Meeting] = {}
        self._unfinished = 0
        self._failure: BaseException | None = None
        # A closed gate per rank. The rank that has the turn opens the gate of the next.
        self._gates = [threading.Semaphore(0) for _ in range(n)]
        self._threads = ThreadPoolExecutor(n, "simulated rank")

    def run(self, functions: Sequence[Task]) -> list[Any]:
        """Run a function on every rank. Returns all results, or raises the first rank's error."""
        self._unfinished, self._failure = self.n, None
        self._ready.extend(range(self.n))
        tasks = [self._threads.submit(self._act, *each) for each in enumerate(functions)]
        self._next()
        results = [task.result() for task in tasks]
        failure, self._failure = self._failure, None
        if failure is not None:
            self._meetings.clear()
            raise failure
        return results

    def close(self) -> None:
        """End the threads now. Otherwise they end with this object."""
        self._threads.shutdown(wait=False)

    def submit(
        self, rank: int, name: str, what: tuple[object, ...], tensor: torch.Tensor, combine: Combine
    ) -> SimulatedWork:
        """Bring a tensor to the meeting of this name; `what` must be the same on all ranks."""
        with self._lock:
            meeting = self._meetings.setdefault(name, Meeting())
            if rank in meeting.brought:
                raise ValueError(
                    f"Duplicate tensor name {name}: rank {rank} submitted it again before all "
                    "ranks had submitted it once"
                )
            meeting.brought[rank] = what, tensor
            meeting.points.append(Point(tensor))
            if len(meeting.brought) == self.n:
                del self._meetings[name]
                meeting.finish(combine)
                self._wake([one for one, other in self._waiting.items() if other is meeting])
        return SimulatedWork(self, rank, meeting, tensor)

    def wait(self, rank: int, meeting: Meeting) -> None:
        """Let others run until the meeting is complete."""
        while not meeting.complete:
            if self._failure is not None:
                raise CollectiveError(f"another rank failed: {self._failure}") from self._failure
            if self._running != rank:
                raise RuntimeError(
                    f"simulated rank {rank} waits, outside of a step, for a collective that other "
                    "ranks have not submitted"
                )
            with self._lock:
                if meeting.complete:
                    break
                self._waiting[rank] = meeting
            self._next()
            self._gates[rank].acquire()
        if meeting.error is not None:
            raise CollectiveError(
                f"ranks submitted different collectives under the same name: {meeting.error}"
            )

    def _act(self, rank: int, function: Task) -> Any:
        """Call a rank's function when it has the turn for the first time."""
        self._gates[rank].acquire()
        try:
            return function() if self._failure is None else None
        except BaseException as error:
            return self._fail(error)
        finally:
            self._unfinished -= 1
            self._next()

    def _next(self) -> None:
        """Pass the turn on, if some rank has not finished."""
        if not self._ready and self._unfinished:
            self._fail(RuntimeError(self._who_waits()))
        self._running = self._ready.popleft() if self._ready else None
        if self._running is not None:
            self._gates[self._running].release()

    def _who_waits(self) -> str:
        lines = []
        for name, meeting in sorted(self._meetings.items()):
            if waiting := [rank for rank, one in sorted(self._waiting.items()) if one is meeting]:
                missing = [rank for rank in range(self.n) if rank not in meeting.brought]
                lines.append(f"ranks {waiting} wait for {name}, which {missing} have not submitted")
        return (
            f"simulated ranks wait for each other for ever: {'; '.join(lines)}. All ranks must "
            "submit the same collectives in the same order"
        )

    def _wake(self, ranks: Sequence[int]) -> None:
        for rank in sorted(ranks):
            del self._waiting[rank]
            self._ready.append(rank)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            self._wake(list(self._waiting))


@dataclass(frozen=True)
class SimulatedWork:
    """A collective to which one simulated rank has brought a tensor."""

    network: Network
    rank: int
    meeting: Meeting
    brought: torch.Tensor

    def done(self) -> bool:
        """Whether all ranks have submitted it."""
        return self.meeting.complete

    def wait(self) -> torch.Tensor:
        """Let other ranks run until all have submitted it. The result may be what was brought."""
        meeting = self.meeting
        self.network.wait(self.rank, meeting)
        for point in meeting.points:
            point.let_stream_wait()
        # The result was made on the stream of the rank that came last. That rank may drop it first.
        return self.brought if meeting.result is None else recorded(meeting.result)


class SimulatedCollectives:
    """The collectives of the simulated rank at a position of a network; `sums`: not averages."""

    elastic = False
    spins, is_ordered = True, False

    def __init__(self, network: Network, position: int, sums: bool = False) -> None:
        self._submit = functools.partial(network.submit, position)
        self.position = position
        self.size = network.n
        self.share = 1.0 if sums else 1 / network.n
        # Each rank numbers its own exchanges, as if it had a process of its own.
        self.numbers = network.numbers[position]
        self._sums = sums

    def restarts(self) -> Callable[[], bool]:
        """Simulated ranks are never started anew."""
        return lambda: False

    def channel(self) -> SimulatedCollectives:
        """This object: simulated collectives meet by name, in any order."""
        return self

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> SimulatedWork:
        """Send the root's buffer to all ranks, in place."""
        what = ("broadcast", root, buffer.dtype, tuple(buffer.shape))
        return self._submit(name, what, buffer, functools.partial(_broadcast, root=root))

    def all_reduce(self, buffer: torch.Tensor, name: str) -> SimulatedWork:
        """Average or sum all ranks' buffers, in place. int32 is always summed."""
        what = ("average", self._sums, buffer.dtype, tuple(buffer.shape))
        divide = not self._sums and buffer.dtype != torch.int32
        return self._submit(name, what, buffer, functools.partial(_reduce, divide=divide))

    def gather(self, tensor: torch.Tensor, name: str) -> SimulatedWork:
        """Join all ranks' tensors."""
        what = ("gather", tensor.dtype, tuple(tensor.shape[1:]))
        return self._submit(name, what, tensor, torch.cat)


def _broadcast(buffers: list[torch.Tensor], root: int) -> None:
    for rank, buffer in enumerate(buffers):
        if rank != root:
            buffer.copy_(buffers[root])


def _reduce(buffers: list[torch.Tensor], divide: bool) -> None:
    total = buffers[0]
    for buffer in buffers[1:]:
        total.add_(buffer)
    if divide:
        total.div_(len(buffers))
    for buffer in buffers[1:]:
        buffer.copy_(total)


class Simulation:
    """n simulated ranks, each with its parameters, its method and its Exchange.

    With many ranks, torch.set_num_threads(1) is much faster, because otherwise every rank's thread
    has a thread pool of its own.

    Args:
        n: the number of ranks.
        make_parameters: a function that is called with a rank, and returns its
            {name: torch.nn.Parameter} in the model's order.
        sums: whether gradients are summed instead of averaged.
        groups: see face.Options.
        compression: the method's class.
        local_steps, outer, overlap, fragments, clip_changes: as in DistributedOptimizer. With local
            steps, call `take_steps` instead of `step`, and give every rank parameters of its own.
        stepped: {name: parameter} that the script's optimizer steps by the averages. The method
            makes its momentum quasi-hyperbolic, as on real ranks. None: it stays as it is.
        **settings: what the method's class takes: config=, loss_scale=, and fields of
            ScaleComConfig.

    Attributes:
        parameters, compressors, collectives, exchanges: each rank's parameters, method, collectives
            and Exchange.
        locals: each rank's LocalSteps. Empty without local steps.

    Example:
        >>> simulation = Simulation(4, lambda rank: dict(make_model().named_parameters()))
        >>> averages = simulation.step([gradients_of(rank) for rank in range(4)])
    """

    def __init__(
        self,
        n: int,
        make_parameters: Callable[[int], dict[str, torch.Tensor]],
        *,
        sums: bool = False,
        groups: Groups | None = None,
        compression: Callable[..., Method] = ScaleCom,
        local_steps: int | Mapping[int, int] | None = None,
        outer: Outer | None = None,
        overlap: int = 0,
        fragments: int = 1,
        clip_changes: float | None = None,
        stepped: Mapping[str, torch.Tensor] | None = None,
        **settings: Any,
    ) -> None:
        self.network = Network(n)
        self.collectives = [SimulatedCollectives(self.network, rank, sums) for rank in range(n)]
        self.parameters = [make_parameters(rank) for rank in range(n)]
        self.compressors = [compression(**settings) for _ in range(n)]
        for method in self.compressors:
            method.settle(every_step=stepped is not None)
        self.exchanges: list[Exchange] = []
        self.locals: list[LocalSteps] = []
        ranks = zip(self.parameters, self.compressors, self.collectives, strict=True)
        more: dict[str, Any] = {"outer": outer, "overlap": overlap, "clip_changes": clip_changes}
        for who in ranks:
            if local_steps is None:
                exchange = Exchange(*who, Options(groups), face=StartsAlike(who[0]))
            else:
                local = LocalSteps(*who, Schedule(local_steps, fragments), groups, **more)
                self.locals.append(local)
                exchange = local.exchange
            self.exchanges.append(exchange)
        if stepped is not None:
            self.compressors[0].mix_momentum(stepped, self.collectives[0])

    def step(
        self, grads: Sequence[Gradients], order: Sequence[Sequence[str]] | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """Take one step on all ranks.

        Args:
            grads: every rank's gradients. The tensors become p.grad, and then hold the averages. A
                gradient that is None, or missing, did not arrive on this rank.
            order: for each rank, the names in the order in which gradients arrive. Default: as in
                backward, the last layer first.

        Returns:
            Every rank's averages. They are NaN if some gradient was not finite.

        Raises:
            Exception: what any rank raised. It ends the step on all ranks, and rolls it back.
            RuntimeError: ranks have different averages, which a method of your own may give them.
        """
        n = self.network.n
        orders = [list(reversed(self.parameters[0]))] * n if order is None else order
        steps = zip(range(n), grads, orders, strict=True)
        averages = self._run([functools.partial(self._step, *step) for step in steps])
        for rank, name in itertools.product(range(1, n), averages[0]):
            one, other = averages[0][name], averages[rank][name]
            if not (one.is_sparse or torch.equal(as_bytes(one), as_bytes(other))):
                raise RuntimeError(
                    f"the averages of {name} differ between ranks 0 and {rank}: every rank must "
                    "receive the same values at the same indices"
                )
        return averages

    def take_steps(self, takes: Sequence[Task]) -> list[Any]:
        """Take each rank's local step, and synchronise if it is due. Returns all results."""
        steps = zip(self.locals, takes, strict=True)
        return self._run([functools.partial(local.step, take) for local, take in steps])

    def synchronise(self) -> None:
        """End the round of local steps on all ranks."""
        self._run([local.synchronise for local in self.locals])

    def collect(self) -> None:
        """Wait on all ranks for averages that travel, before state_dict() is called.

        On real ranks state_dict() waits by itself, but simulated ranks cannot wait outside a step.
        """
        self._run([local.collect for local in self.locals])

    def _run(self, tasks: Sequence[Task]) -> list[Any]:
        try:
            return self.network.run(tasks)
        except Exception:
            for exchange in self.exchanges:
                exchange.abort()
            raise

    def _step(self, rank: int, grads: Gradients, order: Sequence[str]) -> dict[str, torch.Tensor]:
        parameters, exchange = self.parameters[rank], self.exchanges[rank]
        for name, parameter in parameters.items():
            parameter.grad = grads.get(name)
        arrived = [name for name in order if parameters[name].grad is not None]
        # Horovod's synchronize() reports what did not arrive, before it asks for the first result.
        for name in dict.fromkeys([*arrived, *parameters]):
            parameter = parameters[name]
            fill_in(parameter, is_sparse=False)
            exchange.ready(name, flat_tensor(parameter.grad), parameter.requires_grad)
        for name, flat in exchange.finish().items():
            parameters[name].grad = unflat_gradient(parameters[name], flat)
        return {name: parameter.grad for name, parameter in parameters.items()}
