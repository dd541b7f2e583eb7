"""n simulated workers in one process: the very same Reducer, over collectives that never leave memory.

Every rank is a thread, but one runs at a time: until it waits for another rank, and then the next one goes on. So a run gives the same
results every time, and ranks that wait for what nobody will ever submit are found at once: that is an error, never a hang. Collectives
meet by name, as in Horovod; sums are made in the order of ranks.

For studies with more workers than there are machines, and for tests. Imports compressor, reducer and local_steps.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as horovod
import torch

from scalecom_hvd.agreement import NamedExchange
from scalecom_hvd.schedule import Schedule
from scalecom_hvd.torch.compressor import ErrorFeedback, ScaleCom
from scalecom_hvd.torch.local_steps import LocalSteps
from scalecom_hvd.torch.reducer import Groups, Reducer

Gradients = Mapping[str, torch.Tensor | None]


class Meeting:
    """One collective: what every rank brings to it. It is complete when all have come; `error` says why it failed then."""

    def __init__(self) -> None:
        self.brought: dict[int, tuple[tuple, Any]] = {}
        self.complete = False
        self.error: str | None = None
        self.result: Any = None

    def finish(self, combine: Callable[[list[Any]], Any]) -> None:
        ranks = sorted(self.brought)
        first = self.brought[0][0]
        different = [rank for rank in ranks if self.brought[rank][0] != first]
        if different:
            self.error = f"rank 0 submitted {first}, and rank {different[0]} {self.brought[different[0]][0]}"
        else:
            self.result = combine([self.brought[rank][1] for rank in ranks])
        self.brought.clear()
        self.complete = True


class Network:
    """Where the simulated ranks meet, and who of them runs.

    Threads that a reducer keeps beside backward may submit too, but never wait, so a lock guards meetings and nothing else.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.exchanges = [itertools.count() for _ in range(n)]  # how many each rank has named
        self._lock = threading.Lock()
        self._meetings: dict[str, Meeting] = {}
        self._handles: dict[int, Meeting] = {}
        self._numbers = itertools.count()
        self._running: int | None = None
        self._ready: deque[int] = deque()
        self._waiting: dict[int, Meeting] = {}
        self._unfinished = 0
        self._functions: Sequence[Callable[[], Any]] | None = ()
        self._results: list[Any] = []
        self._failure: BaseException | None = None
        # A closed gate per rank, and one for the caller: who holds the turn opens the next one's.
        self._gates = [threading.Lock() for _ in range(n + 1)]
        for gate in self._gates:
            gate.acquire()
        for rank in range(n):
            threading.Thread(target=self._serve, args=(rank,), name=f"simulated rank {rank}", daemon=True).start()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run a function on every rank, and give what they returned. An error on one ends all, and is raised here."""
        self._functions, self._results, self._failure = functions, [None] * self.n, None
        self._unfinished = self.n
        self._ready.extend(range(self.n))
        self._next()
        self._gates[-1].acquire()
        results, failure = self._results, self._failure
        self._functions, self._results, self._failure = (), [], None
        if failure is not None:
            self._meetings.clear()
            self._handles.clear()
            raise failure
        return results

    def close(self) -> None:
        """End the threads."""
        if self._functions is not None:
            self._functions = None
            for gate in self._gates[:-1]:
                gate.release()

    def submit(self, rank: int, name: str, what: tuple, payload: Any, combine: Callable[[list[Any]], Any]) -> int:
        """Bring something to the meeting of this name; `what` must be the same on all ranks. Gives a handle."""
        with self._lock:
            meeting = self._meetings.setdefault(name, Meeting())
            if rank in meeting.brought:
                raise ValueError(f"Duplicate tensor name {name}: rank {rank} submitted it again before all ranks had submitted it once")
            meeting.brought[rank] = (what, payload)
            handle = next(self._numbers)
            self._handles[handle] = meeting
            if len(meeting.brought) == self.n:
                del self._meetings[name]
                meeting.finish(combine)
                self._wake([rank for rank, awaited in self._waiting.items() if awaited is meeting])
        return handle

    def done(self, handle: int) -> bool:
        return self._handles[handle].complete

    def wait(self, rank: int, handle: int, forget: bool = True) -> Any:
        """Let others run until the meeting is complete; gives its result."""
        meeting = self._handles.pop(handle) if forget else self._handles[handle]
        while not meeting.complete:
            if self._failure is not None:
                raise horovod.HorovodInternalError(f"another rank failed: {self._failure}") from self._failure
            if self._running != rank:
                raise RuntimeError(f"simulated rank {rank} waits outside of a step for what other ranks have not submitted")
            with self._lock:
                if meeting.complete:
                    break
                self._waiting[rank] = meeting
            self._next()
            self._gates[rank].acquire()
        if meeting.error is not None:
            raise horovod.HorovodInternalError(f"ranks submitted different collectives by one name: {meeting.error}")
        return meeting.result

    def _serve(self, rank: int) -> None:
        while True:
            self._gates[rank].acquire()
            if self._functions is None:
                return
            if self._failure is None:
                try:
                    self._results[rank] = self._functions[rank]()
                except BaseException as error:
                    self._fail(error)
            self._unfinished -= 1
            self._next()

    def _next(self) -> None:
        """Hand the turn on; it comes back to the caller when all ranks have finished."""
        if not self._ready and self._unfinished:
            names = sorted(name for name, meeting in self._meetings.items() if meeting in self._waiting.values())
            self._fail(RuntimeError(f"simulated ranks wait for each other for ever; not all have submitted {', '.join(names)}"))
        self._running = self._ready.popleft() if self._ready else None
        self._gates[-1 if self._running is None else self._running].release()

    def _wake(self, ranks: Sequence[int]) -> None:
        for rank in sorted(ranks):
            del self._waiting[rank]
            self._ready.append(rank)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            self._wake(list(self._waiting))


class SimulatedTransport(NamedExchange):
    """What transport.Transport is to a real rank: the collectives of one simulated rank. op, predivide: as there."""

    included = True
    spins = True

    def __init__(self, network: Network, position: int, op: Any = horovod.Average, predivide: float = 1.0) -> None:
        self._network = network
        self.position = position
        self.size = network.n
        self._reduction = (op, predivide)

    @property
    def share(self) -> float:
        return 1 / self.size if self._reduction[0] == horovod.Average else 1.0

    def restarted(self) -> bool:
        return False

    def listen(self) -> Callable[[], bool]:
        return self.restarted

    def claim_name(self) -> int:
        """As in a process per rank: each rank numbers its exchanges for itself."""
        return next(self._network.exchanges[self.position])

    def use_name(self, number: int) -> None:
        exchanges = self._network.exchanges
        exchanges[self.position] = itertools.count(max(number + 1, next(exchanges[self.position])))
        self._prefix = "scalecom" if number == 0 else f"scalecom.{number}"

    def broadcast(self, buffer: torch.Tensor, root: int, name: str) -> int:
        what = ("broadcast", root, buffer.dtype, tuple(buffer.shape))
        return self._submit(name, what, buffer, functools.partial(_broadcast, root=root))

    def average(self, buffer: torch.Tensor, name: str) -> int:
        op, predivide = self._reduction
        what = ("average", op, predivide, buffer.dtype, tuple(buffer.shape))
        divide = op == horovod.Average and buffer.dtype != torch.float16
        return self._submit(name, what, buffer, functools.partial(_reduce, divide=divide, predivide=predivide))

    def total(self, number: int, name: str) -> int:
        return self._submit(name, ("total",), torch.tensor([number], dtype=torch.int32), sum)

    def gather(self, tensor: torch.Tensor, name: str) -> int:
        return self._submit(name, ("gather", tensor.dtype, tuple(tensor.shape[1:])), tensor, _gather)

    def done(self, handle: int) -> bool:
        return self._network.done(handle)

    def until_done(self, handle: int) -> None:
        self._network.wait(self.position, handle, forget=False)

    def wait(self, handle: int) -> torch.Tensor | None:
        return self._network.wait(self.position, handle)

    def exchange_objects(self, value: Any, name: str) -> list[Any]:
        handle = self._network.submit(self.position, f"scalecom.{name}", ("objects",), json.dumps(value), _read)
        return self._network.wait(self.position, handle)

    def send_to_all(self, tensor: torch.Tensor, root: int, name: str) -> None:
        what = ("broadcast", root, tensor.dtype, tuple(tensor.shape))
        handle = self._network.submit(self.position, f"scalecom.{name}", what, tensor, functools.partial(_broadcast, root=root))
        self._network.wait(self.position, handle)

    def _submit(self, name: str, what: tuple, buffer: torch.Tensor, combine: Callable[[list[torch.Tensor]], Any]) -> int:
        return self._network.submit(self.position, f"{self._prefix}.{name}", what, buffer, combine)


def _broadcast(buffers: list[torch.Tensor], root: int) -> None:
    for rank, buffer in enumerate(buffers):
        if rank != root:
            buffer.copy_(buffers[root])


def _reduce(buffers: list[torch.Tensor], divide: bool, predivide: float) -> None:
    if divide and predivide != 1:
        for buffer in buffers:
            buffer.div_(predivide)
    total = buffers[0]
    for buffer in buffers[1:]:
        total.add_(buffer)
    if divide:
        if predivide != 1:
            total.mul_(predivide)
        total.div_(len(buffers))
    for buffer in buffers[1:]:
        buffer.copy_(total)


def _gather(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tensors)


def _read(texts: list[str]) -> list[Any]:
    return [json.loads(text) for text in texts]


class Simulation:
    """n ranks, each with its parameters, its compressor and its Reducer.

    make_parameters: gives a rank's {name: torch.nn.Parameter}, in the model's order; called with the rank.
    compression: the method.  fields: what it takes: config=, loss_scale=, and fields of ScaleComConfig.
    local_steps: as in DistributedOptimizer; then `take_steps` takes the place of `step`, and every rank needs parameters of its own.
    With many ranks, torch.set_num_threads(1) is much faster: every rank's thread would have a pool of its own.
    """

    def __init__(
        self,
        n: int,
        make_parameters: Callable[[int], dict[str, torch.Tensor]],
        *,
        op: Any = horovod.Average,
        predivide: float = 1.0,
        groups: Groups | None = None,
        sparse_as_dense: bool = False,
        compression: Callable[..., ErrorFeedback] = ScaleCom,
        local_steps: int | Mapping[int, int] | Sequence[int] | None = None,
        **fields: Any,
    ) -> None:
        self.network = Network(n)
        weakref.finalize(self, self.network.close)
        self.transports = [SimulatedTransport(self.network, rank, op, predivide) for rank in range(n)]
        self.parameters = [make_parameters(rank) for rank in range(n)]
        self.compressors = [compression(**fields) for _ in range(n)]
        self.reducers: list[Reducer] = []
        self.locals: list[LocalSteps] = []
        for parameters, compressor, transport in zip(self.parameters, self.compressors, self.transports, strict=True):
            if local_steps is not None:
                self.locals.append(LocalSteps(parameters, compressor, transport, Schedule(local_steps), groups))
                self.reducers.append(self.locals[-1].reducer)
                continue
            reducer = Reducer(
                parameters,
                compressor.residues,
                transport,
                groups=groups,
                sparse_as_dense=sparse_as_dense,
                loss_scale=compressor.loss_scale,
                method=compressor.exchange,
                settings=compressor.settings,
            )
            compressor.attach(parameters, reducer)
            self.reducers.append(reducer)

    def step(self, grads: Sequence[Gradients], order: Sequence[Sequence[str]] | None = None) -> list[dict[str, torch.Tensor]]:
        """One step on all ranks: every rank's gradients in, every rank's averages out (NaN, if some gradient was not finite).

        The tensors given become p.grad, and hold the averages then. A gradient that is None or not there did not arrive on this rank.
        order: the names in which each rank's gradients arrive; default: as in backward, the last layer first.
        An error on any rank ends the step on all, takes it back, and is raised.
        """
        names = list(reversed(self.parameters[0])) if order is None else None
        return self._run([functools.partial(self._step, rank, grads[rank], names or order[rank]) for rank in range(self.network.n)])

    def take_steps(self, takes: Sequence[Callable[[], Any]]) -> list[Any]:
        """One local step on all ranks, and their synchronisation if it is due: every rank's own optimizer's step in, what it gave out."""
        return self._run([functools.partial(local.step, take) for local, take in zip(self.locals, takes, strict=True)])

    def synchronise(self) -> None:
        """End the round of local steps on all ranks."""
        self._run([local.synchronise for local in self.locals])

    def _run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        try:
            return self.network.run(tasks)
        except Exception:
            for reducer in self.reducers:
                reducer.abort()
            raise

    def _step(self, rank: int, grads: Gradients, order: Sequence[str]) -> dict[str, torch.Tensor]:
        parameters, reducer = self.parameters[rank], self.reducers[rank]
        for name, parameter in parameters.items():
            parameter.grad = grads.get(name)
        arrived = [name for name in order if parameters[name].grad is not None]
        # Horovod's synchronize() reports what did not arrive, before it asks for the first result.
        missing = [name for name in parameters if name not in arrived]
        for name in (*arrived, *missing):
            reducer.ready(parameters[name])
        for parameter in parameters.values():
            parameter.grad = reducer.result(parameter)
        return {name: parameter.grad for name, parameter in parameters.items()}
