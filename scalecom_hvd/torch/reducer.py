"""The exchange of the drop-in optimizer: which bucket does what when, and its overlap with backward.

One step, per bucket (DESIGN 5):

    cyclic      all gradients are here -> leader: filter + choose, broadcast;  others: broadcast, filter while it travels
                offsets are here       -> gather, all-reduce
    look-ahead  all gradients are here -> gather at the offsets that came during the last step, all-reduce;
                                          filter while it travels, in which the next leader chooses, and its broadcast
    sent whole  all gradients are here -> all-reduce (the dense warm-up, and the first step of look-ahead)
    methods     all gradients are here -> what the method does (methods/), then the all-reduce of what is sent whole
    finish      all values are here    -> every rank sees whether any gradient was not finite; scatter, or take the step back

A bucket's step is a generator (`_exchange`) that yields what it has to wait for: its own kernel, which runs on a thread beside backward
where it can, or other ranks. Hooks let every bucket go on as far as it can without waiting.

Why this cannot deadlock: a rank waits for others only in `finish`, and there first submits everything that needs nothing of this step's
from them (all buckets' broadcasts, or all-reduces), then what needs the offsets; `settle` waits only for what every rank submitted in
its last step. Nothing is waited for in a hook, so ranks may see their gradients in any order, or not at all (those take part with zeros).

The optimizer calls `ready` from its hooks and `result` from synchronize(). Imports probe, bucket, transport and the rooms below.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import record_function

import scalecom_hvd
from scalecom_hvd.agreement import compare_ranks, latest_step
from scalecom_hvd.buckets import cut, traffic
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.beside import Beside
from scalecom_hvd.torch.bucket import Bucket, empty_sparse_gradient, flat_gradient
from scalecom_hvd.torch.moves import Moves
from scalecom_hvd.torch.news import Found, News
from scalecom_hvd.torch.probe import Probe
from scalecom_hvd.torch.residues import Residues, describe
from scalecom_hvd.torch.transport import Transport, Wait, wait_for

Groups = Sequence[Sequence[str]]
# How a method other than ScaleCom averages one bucket: it submits, and yields what it waits for (see methods/base.py).
Exchange = Callable[[Accumulators, Channel], Iterator[Wait]]


class Reducer:
    """The exchange of one optimizer's gradients. All ranks' reducers make the same collectives by the same names.

    parameters: {name: parameter} of all that are trained, in the model's order (residues are attached to them).
    groups: names that shall share a bucket, None: buckets of about config.bucket_bytes in the order in which gradients arrive on rank 0.
    loss_scale: gives the current loss scale.
    method: how compressed tensors are averaged, if not by ScaleCom.  settings: what ranks must have in common beside the config.
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        residues: Residues,
        transport: Transport,
        *,
        groups: Groups | None = None,
        sparse_as_dense: bool = False,
        loss_scale: Callable[[], float] = lambda: 1.0,
        send_sparse: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = None,
        method: Exchange | None = None,
        settings: dict[str, Any] | None = None,
        news: News | None = None,
    ) -> None:
        self.residues = residues
        self.config: ScaleComConfig = residues.config
        self.buckets: list[Bucket] = []
        # The places of the ranks that have something to send, where that changes from step to step; None: all, always.
        self.present: list[int] | None = None
        self._parameters = parameters
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._transport = transport
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._loss_scale = loss_scale
        self._send_sparse = send_sparse
        self._method = method
        self._settings = dict(settings or {})
        self._news = news
        self._probe: Probe | None = None
        # Hooks run on autograd's threads, one per device.
        self._lock = threading.RLock()
        self._beside = Beside(self._go_on)
        self._failure: BaseException | None = None
        self._finishing = False
        self._agreed = False
        self._bucket_of: dict[str, Bucket] = {}
        self._arrived: dict[str, None] = {}
        self._sparse: dict[str, Callable[[], torch.Tensor] | None] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._whole = False
        self._submitted = {"offsets": 0, "values": 0, "gathered": 0, "dense": 0, "collectives": 0}

    # What the optimizer calls.

    def must_exchange(self, fresh: bool) -> bool:
        """Whether a synchronize() that begins now has gradients to exchange; the optimizer then reports all of them, and asks for results.

        fresh: whether backward gave this rank any since the last exchange. Where it gave none to any rank, gradients become what Horovod's
        average (or sum) of them is, and residues, leader and step stay as they are.
        """
        with self._lock:
            try:
                self._notice_restart()
                anywhere = (fresh or self._news.ask()) if self._agreed else self._news.meet(fresh)
                return anywhere or self._came_by_hand()
            except BaseException:
                self._abort()
                raise

    def _came_by_hand(self) -> bool:
        """Backward gave no rank a gradient: whether scripts did. If not, make of p.grad what Horovod would."""
        found = self._news.compare(list(self._parameters))
        if found is Found.SET_BY_HAND:
            return True
        for name in self._parameters:
            self._fill_in(name)
        if found is Found.CHANGED:
            self._average_again()
        elif self._transport.share == 1:  # the sum of what is the same on all ranks
            for parameter in self._parameters.values():
                parameter.grad = parameter.grad * self._transport.size
        self._news.end()
        return False

    @torch.no_grad()
    def _average_again(self) -> None:
        handles = {}
        for name, parameter in self._parameters.items():
            if name in self._sparse:
                handles[name] = self._send_sparse(parameter)
            else:
                flat = flat_gradient(parameter)
                whole = flat.to(torch.float64 if flat.dtype == torch.float64 else torch.float32, copy=True)
                handles[name] = self._transport.average(whole, f"again.{name}")
        for name, handle in handles.items():
            parameter = self._parameters[name]
            grad = parameter.grad
            average = handle() if name in self._sparse else self._transport.wait(handle).view(grad.shape).to(grad.dtype)
            if grad.is_sparse:
                grad.zero_().add_(average if average.is_sparse else average.to_sparse(grad.sparse_dim()))
            else:
                parameter.grad = average  # a script may have set one that cannot be written to, such as an expanded one

    def _fill_in(self, name: str) -> None:
        """A gradient that there is not becomes zero: another rank may have it."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = empty_sparse_gradient(parameter) if name in self._sparse else torch.zeros_like(parameter)

    def ready(self, parameter: torch.Tensor) -> None:
        """A gradient is complete on this rank; called from backward's hooks, so it starts what it can and waits for nothing."""
        name = self._names[parameter]
        with self._lock:
            try:
                self._notice_restart()
                if not self._arrived:
                    self._begin_step()
                self._arrived[name] = None
                self._fill_in(name)
                if name in self._sparse and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)
                if name in self._sparse or (parameter.grad.is_sparse and not self._sparse_as_dense and not self._agreed):
                    self._sparse[name] = self._send_sparse(parameter)
                elif self._agreed:
                    bucket = self._bucket_of[name]
                    bucket.waiting.discard(name)
                    if not bucket.waiting:
                        bucket.start(self._exchange(bucket))
                self._advance()
            except BaseException:
                self._abort()
                raise

    def result(self, parameter: torch.Tensor) -> torch.Tensor:
        """The averaged gradient; called when every gradient of this rank was reported, so the whole exchange can be completed."""
        name = self._names[parameter]
        with self._lock:
            if name not in self._outputs:
                self._finishing = True
                try:
                    self._finish()
                except BaseException:
                    self._abort()
                    raise
                finally:
                    self._finishing = False
            return self._outputs.pop(name)

    def in_step(self) -> bool:
        """Whether gradients were reported that are not exchanged yet."""
        return bool(self._arrived)

    def settle(self) -> None:
        """Wait for the look-ahead broadcast in flight, if any. Every rank submitted it at the end of its last step."""
        with self._lock:
            self._notice_restart()
            for bucket in self.buckets:
                self._take_offsets(bucket)

    def agree_anew(self) -> None:
        """Other residues were loaded: ranks compare, and make buckets, at the next step."""
        with self._lock:
            self.buckets, self._bucket_of, self._agreed = [], {}, False

    def meet(self) -> None:
        """Ranks of an elastic run come together. Nothing to do: after a restart this exchange agrees anew at the next step."""

    def abort(self) -> None:
        """Forget the step in progress; its moves are taken back, so that nothing is lost from the residues."""
        with self._lock:
            self._abort()

    def watch(self, diagnostics: Diagnostics) -> None:
        """Look at steps from now on, and have `stats` tell what was seen."""
        self._probe = Probe(diagnostics)
        self._settings |= diagnostics.settings

    def leader(self, bucket: int, step: int) -> int:
        """The position of the rank that chooses for a bucket at a step."""
        turn = step + (bucket if self.config.leader == "staggered" else 0)
        if self.present is None:
            return turn % (self._transport.size or 1)
        # Drawn, the same on all ranks: where the same ones are present every other time, some would never have their turn.
        return self.present[random.Random(turn).randrange(len(self.present))]

    def _notice_restart(self) -> None:
        """Elastic runs start Horovod again when workers come or go: with other ranks, and nothing that was in flight is."""
        if self._transport.restarted():
            self._abort()

    # One step.

    def _advance(self) -> None:
        """Let every bucket go on as far as it can without waiting."""
        if self._failure is not None:
            raise self._failure
        for bucket in self.buckets:
            bucket.advance()

    def _go_on(self) -> bool:
        """The same on the thread beside backward; gives whether some bucket waits for others, so that it is worth to look again soon."""
        if not self._lock.acquire(blocking=False):
            return not self._finishing  # a hook has it for a moment, or `_finish` till the step's end
        try:
            self._advance()
            return any(bucket.waits_for_others for bucket in self.buckets)
        except BaseException as error:
            self._failure = error  # raised where the user's thread comes by
            return False
        finally:
            self._lock.release()

    def _begin_step(self) -> None:
        self._outputs.clear()
        self._scale = 1 / float(self._loss_scale())
        self._whole = self._must_send_whole()
        self._submitted = dict.fromkeys(self._submitted, 0)
        if self._news is not None and self._agreed:
            self._news.tell()

    def _must_send_whole(self) -> bool:
        no_offsets = self.config.lookahead and self.residues.tensors and not self.residues.chosen_ahead
        return bool(self.residues.step < self.residues.warmup or no_offsets)

    def _exchange(self, bucket: Bucket) -> Iterator[Wait]:
        """One bucket's step from its gradients to its all-reduce; yields what it waits for. All gradients are here."""
        if self._whole:
            self._exchange_whole(bucket)
        elif self._method is not None and bucket.compressed:
            yield from self._exchange_by_method(bucket)
        elif self.config.lookahead:
            yield from self._exchange_with_lookahead(bucket)
        elif bucket.compressed:
            yield from self._exchange_with_offsets_of_now(bucket)
        else:
            bucket.begin(False, self._scale)
            self._send_values(bucket)

    def _look_due(self) -> bool:
        return self._probe is not None and self._probe.due(self.residues.step) and not self._whole

    def _begin(self, bucket: Bucket) -> None:
        bucket.begin(False, self._scale)
        if self._look_due():
            self._probe.before(bucket, self._scale)

    def _exchange_whole(self, bucket: Bucket) -> None:
        bucket.begin(True, self._scale)
        offsets_follow = self.config.lookahead and self.residues.step + 1 >= self.residues.warmup
        if offsets_follow and self.leader(bucket.number, self.residues.step + 1) == self._transport.position:
            bucket.choose_without_filter(bucket.next_offsets)  # before the gradients are averaged in place
        self._send_values(bucket)
        if offsets_follow:
            self._broadcast_ahead(bucket)

    def _exchange_with_lookahead(self, bucket: Bucket) -> Iterator[Wait]:
        if bucket.offsets_handle is not None:
            # Every rank submitted this at the end of its last step.
            yield self._offsets_of(bucket, needs_others=False)
        self._take_offsets(bucket)
        self._begin(bucket)
        # Gather first: the next leader chooses on residues from which this step's values are gone. The filter comes before the
        # all-reduce because it counts non-finite gradients; both are one pass, and counting alone would cost another.
        chooses = self.leader(bucket.number, self.residues.step + 1) == self._transport.position
        yield from self._run(bucket, bucket.gather_and_filter, self._transport.size, bucket.next_offsets if chooses else None)
        self._send_values(bucket)
        self._broadcast_ahead(bucket)

    def _exchange_with_offsets_of_now(self, bucket: Bucket) -> Iterator[Wait]:
        self._begin(bucket)
        leader = self.leader(bucket.number, self.residues.step)
        if leader == self._transport.position:
            yield from self._run(bucket, bucket.filter, bucket.offsets)
            self._broadcast(bucket, bucket.offsets, leader)
        else:
            self._broadcast(bucket, bucket.offsets, leader)
            yield from self._run(bucket, bucket.filter)
        yield self._offsets_of(bucket, needs_others=True)
        self._transport.wait(bucket.offsets_handle)
        bucket.offsets_handle = None
        yield from self._run(bucket, bucket.gather, self._transport.size)
        self._send_values(bucket)

    def _exchange_by_method(self, bucket: Bucket) -> Iterator[Wait]:
        self._begin(bucket)
        accumulators = bucket.moves
        accumulators.step, bucket.bad = self.residues.step, accumulators.bad
        leader = self.leader(bucket.number, self.residues.step)
        yield from self._method(accumulators, Channel(self._transport, bucket.number, leader, self._submitted))
        self._send_values(bucket)

    def _run(self, bucket: Bucket, move: Callable[..., None], *arguments: Any) -> Iterator[Wait]:
        """Make a move of a bucket, beside backward where its kernel needs no Python."""
        if not bucket.runs_beside_python:
            move(*arguments)
            return
        bucket.job = self._beside.submit(move, *arguments)
        yield Wait("kernel", bucket.job.done, bucket.job.result, needs_others=False)
        bucket.job.result()

    def _offsets_of(self, bucket: Bucket, needs_others: bool) -> Wait:
        return wait_for(self._transport, "offsets", bucket.offsets_handle, needs_others)

    def _take_offsets(self, bucket: Bucket) -> None:
        """Look-ahead: the offsets that the last step's end broadcast become this step's."""
        if self.config.lookahead and bucket.offsets_handle is not None:
            self._transport.wait(bucket.offsets_handle)
            bucket.offsets_handle = None
            bucket.offsets, bucket.next_offsets = bucket.next_offsets, bucket.offsets
            for tensor in bucket.compressed.values():
                self.residues.chosen_ahead[tensor.name] = bucket.offsets_of(tensor, bucket.offsets)

    def _broadcast_ahead(self, bucket: Bucket) -> None:
        if bucket.compressed:
            self._broadcast(bucket, bucket.next_offsets, self.leader(bucket.number, self.residues.step + 1))

    def _broadcast(self, bucket: Bucket, buffer: torch.Tensor, leader: int) -> None:
        bucket.offsets_handle = self._transport.broadcast(buffer, leader, f"offsets.{bucket.number}")
        self._submitted["offsets"] += buffer.numel()
        self._submitted["collectives"] += 1

    def _send_values(self, bucket: Bucket) -> None:
        kind = "whole" if self._whole else "values" if self._method is None else "dense"
        averaged = bucket.fill()
        bucket.values_handles = [self._transport.average(buffer, f"{kind}.{bucket.number}{ending}") for ending, buffer in averaged.items()]
        values = 0 if self._whole else bucket.values_bytes()
        self._submitted["values"] += values
        self._submitted["dense"] += sum(buffer.numel() * buffer.element_size() for buffer in averaged.values()) - values
        self._submitted["collectives"] += len(averaged)

    def _finish(self) -> None:
        """Submit what is left, wait for everything, and write the averages into the gradients, or take the step back."""
        if not self._arrived:
            raise RuntimeError("the optimizer asked for averaged gradients before it reported any: this is a bug in scalecom_hvd")
        if not self._agreed:
            self._agree()
        self._advance()
        for bucket in self.buckets:
            bucket.start(self._exchange(bucket))
        for needs_others in (False, True):
            for bucket in self.buckets:
                bucket.advance(patient=True, needs_others=needs_others)
        with record_function("scalecom.wait for values"):
            for bucket in self.buckets:
                for handle in bucket.values_handles:
                    self._transport.wait(handle)
        sparse = {name: handle() for name, handle in self._sparse.items()}
        # All this was reduced or gathered, so it is the same on all ranks, and they decide alike.
        sound = [bucket.is_sound().cpu() for bucket in self.buckets] + [g._values().isfinite().all().cpu() for g in sparse.values()]
        if all(map(bool, sound)):
            if self.residues.look_due() and not self._whole:
                self.residues.look([bucket.norms() for bucket in self.buckets if bucket.compressed])
            for bucket in self.buckets:
                bucket.scatter()
            looks = self._look_due()
            self._end_step()
            if looks:
                self._probe.look(self.residues.step - 1, self.buckets, self._transport)
        else:
            self._skip_step()
        for bucket in self.buckets:
            self._outputs.update(bucket.end())
        self._outputs.update(sparse)
        self._sparse = dict.fromkeys(self._sparse)
        self._arrived.clear()
        if self._news is not None:
            self._news.end()

    def _end_step(self) -> None:
        self.residues.note_step()
        if self._whole and self.residues.step >= self.residues.warmup:
            if self.config.lookahead:
                self.settle()
            for bucket in self.buckets:
                bucket.drop_whole_buffer()

    def _skip_step(self) -> None:
        """A gradient was not finite on some rank: for ScaleCom this step never happened, and gradients are NaN on every rank."""
        self.residues.note_skipped_step()
        for bucket in self.buckets:
            bucket.undo()
            bucket.spoil()
            if self.config.lookahead and bucket.offsets_handle is not None:
                # What the next leader chose in the meantime is dropped; the next step uses this step's offsets again.
                self._transport.wait(bucket.offsets_handle)
                bucket.offsets_handle = None

    def _abort(self) -> None:
        """A collective failed in mid-step: take this step's moves back, so that nothing is lost from the residues, and forget it."""
        for bucket in self.buckets:
            bucket.stop()
            bucket.undo()
            bucket.forget()
            bucket.offsets_handle = None
        self._failure = None
        if self._news is not None:
            self._news.forget()
        self.residues.chosen_ahead.clear()
        self._arrived.clear()
        self._sparse = dict.fromkeys(self._sparse)
        self._outputs.clear()
        # Ranks may have submitted different parts of the step: with new buffers and new names, none of it meets what comes next.
        self.agree_anew()

    # The agreement, once, at the end of the first backward.

    def _agree(self) -> None:
        """Compare settings and tensors of all ranks, and settle on buckets, names and the step; raises RuntimeError on every rank alike."""
        mine = {
            "version": scalecom_hvd.__version__,
            "settings": self.config.to_dict() | self._settings | {"sparse_as_dense": self._sparse_as_dense},
            "tensors": describe(self._parameters, self.residues),
            "groups": [list(group) for group in self._groups] if self._groups is not None else None,
            "sparse": list(self._sparse),
            "arrived": list(self._arrived),
            "name": self._transport.claim_name(),
            "step": self.residues.step,
            "buckets": self.residues.buckets,
            "chosen_ahead": self.residues.digest_ahead(),
        }
        everyone = self._transport.exchange_objects(mine, "agreement")
        compare_ranks(everyone, ("version", "settings", "tensors", "groups"))
        self._transport.use_name(max(other["name"] for other in everyone))

        self.residues.step = latest_step([other["step"] for other in everyone])
        if len({other["chosen_ahead"] for other in everyone}) > 1:
            self.residues.chosen_ahead.clear()
        # What was asked at the step's begin was asked before all this was known.
        self._whole = self._must_send_whole()

        for name in sorted({name for other in everyone for name in other["sparse"]}):
            if self._sparse.get(name) is None:  # the gradient did not arrive here, so it takes part as an empty one
                parameter = self._parameters[name]
                parameter.grad = parameter.grad.to_sparse(1)
                self._sparse[name] = self._send_sparse(parameter)
        plan = self._plan(everyone[0]["arrived"], everyone[0]["buckets"])
        # Which of its devices a rank uses is its own affair, but not which tensors share one.
        compare_ranks(self._transport.exchange_objects({"buckets": plan}, "agreement.buckets"), ("buckets",))
        self._make_buckets(plan)
        self.residues.note_ranks(self._transport.size)
        self._agreed = True

    def _plan(self, arrived: list[str], loaded: Groups | None) -> list[list[str]]:
        """Names per bucket, one device and wire dtype in each: the groups asked for, else the buckets of the loaded state if they still
        fit, else tensors in the order given (late ones last), cut where a bucket is full."""
        wanted = self._parameters.keys() - self._sparse.keys()
        if self._groups is not None:
            return [part for group in self._groups for part in self._split([name for name in group if name in wanted], None)]
        if (
            loaded
            and wanted == {name for names in loaded for name in names}
            and all(len(self._split(names, None)) == 1 for names in loaded)
        ):
            return [list(names) for names in loaded]
        late = [name for name in reversed(self._parameters) if name not in arrived]
        return self._split([name for name in [*arrived, *late] if name in wanted], self.config.bucket_bytes)

    def _split(self, names: list[str], limit: int | None) -> list[list[str]]:
        """Buckets of at most `limit` bytes of gradients, where tensors are not larger themselves; one of each kind, without a limit."""
        kinds: dict[Any, list[str]] = {}
        for name in names:
            parameter = self._parameters[name]
            tensor = self.residues.tensors.get(name)
            dense_dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            kinds.setdefault((parameter.device, tensor.wire_dtype if tensor else dense_dtype, dense_dtype), []).append(name)
        if limit is None:
            return list(kinds.values())
        sizes = {name: self._parameters[name].numel() * self._parameters[name].element_size() for name in names}
        return [bucket for kind in kinds.values() for bucket in cut([sizes[name] for name in kind], kind, limit)]

    def _make_buckets(self, plan: list[list[str]]) -> None:
        self.residues.buckets = plan
        make_moves = Moves if self._method is None else Accumulators
        share = self._transport.share
        self.buckets = [Bucket(b, names, self._parameters, self.residues, make_moves, share) for b, names in enumerate(plan)]
        if self._probe is not None:
            self._probe.draw(self.buckets)
        # Kernels beside Python, and Horovod's thread, need the cores that spinning would take.
        self._transport.spins = not any(bucket.large for bucket in self.buckets)
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        for bucket in self.buckets:
            for name, tensor in bucket.compressed.items():
                loaded = self.residues.chosen_ahead.get(name)
                if loaded is not None:
                    bucket.offsets_of(tensor, bucket.offsets).copy_(loaded)

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step taken; see ScaleCom.stats."""
        dense = {name: p.numel() for name, p in self._parameters.items() if name not in self._sparse}
        sent = dense if self._whole else dense | {name: t.geometry.k for name, t in self.residues.tensors.items() if name in dense}
        submitted = self._submitted
        return {
            "leader": self.leader(0, max(self.residues.step - 1, 0)),
            "bytes_offsets": submitted["offsets"],
            "bytes_values": submitted["values"],
            "bytes_dense": submitted["dense"],
            "bytes_gathered": submitted["gathered"],
            "bytes_traffic": traffic(
                self._transport.size, submitted["offsets"], submitted["values"] + submitted["dense"], submitted["gathered"]
            ),
            "rate": sum(dense.values()) / max(sum(sent.values()), 1),
            "collectives": submitted["collectives"],
        } | ({"diagnostics": self._probe.last} if self._probe is not None else {})
