"""ScaleCom in Horovod's own DistributedOptimizer, with one all-reduce for each tensor.

Horovod calls `compress` for every gradient, in any order, and in part from hooks. In a hook a rank
must not wait: ranks may miss different gradients, so it may wait forever. So this module uses
look-ahead. When the last result of a step has come, the next leader's offsets are broadcast, all in
one. When they are needed, every rank has submitted this. The first step is sent whole.

Here Horovod does the averaging, in the dtype of what it is given, so values have 32 bits.

If no rank has a new gradient, Horovod's synchronize() compresses every gradient again
(news.py). Then the gradients are sent and averaged as without compression, and residues,
leader and step stay as they are. Before ranks have agreed for the first time, they cannot know this
when a step begins. Then they roll the step back at its end.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scalecom_hvd.agreement import Names, latest_step
from scalecom_hvd.bucket_layout import Layout, step_stats
from scalecom_hvd.exchange import methods
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Collectives, Work, finished, gather_objects
from scalecom_hvd.exchange.gradients import any_of, wide_dtype
from scalecom_hvd.exchange.new_gradients import CHANGED, Found, Mark, judge
from scalecom_hvd.exchange.residue import CompressedTensor, torch_dtype
from scalecom_hvd.exchange.run import Averager
from scalecom_hvd.schedule import leader
from scalecom_hvd.torch.news import News


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """What decompress must know about a tensor. Horovod carries it there from compress."""

    name: str
    dtype: torch.dtype  # the gradient's, which need not be the parameter's
    choice: torch.Tensor | None  # None: it was sent whole


@dataclasses.dataclass
class Ahead:
    """The next choice for one device's tensors: its buffer, and the collective that brings it."""

    tensors: Sequence[CompressedTensor]
    layout: Layout
    buffer: torch.Tensor
    work: Work | None = None

    def of(self, tensor: CompressedTensor) -> torch.Tensor:
        """The offsets (k,) of a tensor's next choice."""
        dtype = torch_dtype(tensor.geometry.offset_dtype)
        return self.buffer[self.layout.offsets[tensor.name]].view(dtype)


class PerTensor(Averager):
    """Compresses and decompresses one optimizer's gradients, tensor by tensor.

    parameters: what the user named, which may be more than the optimizer trains.
    fresh: the names that got gradients from backward since this set was last emptied.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        method: methods.ScaleCom,
        collectives: Collectives,
        fresh: set[str],
    ) -> None:
        self._parameters = dict(parameters)
        self._method, self._run = method, method.run
        self._residues = method.residues
        self.collectives = collectives
        self._restarted = collectives.restarts()
        self._names = Names(collectives.numbers)
        self._buckets: dict[str, Bucket] = {}
        # The steps in progress of those whose gradients have come.
        self._steps: dict[str, BucketStep] = {}
        self._ahead: dict[torch.device, Ahead] = {}
        self._usual_order = list(reversed(self._parameters))
        self._seen: list[str] = []
        # What gradients were when they were compressed, and the names of those that have changed.
        self._marks: dict[str, Mark] = {}
        self._changed: list[str] = []
        self._members: set[str] = set()
        self._bad: list[torch.Tensor] = []
        self._lock = threading.RLock()  # hooks run on autograd's threads, one per device
        # What was sent and has not come back. Horovod holds it, and drops all of it when the
        # optimizer loads a state.
        self._pending: dict[str, weakref.ref[Sent]] = {}
        self._agreed = False
        self._news = News(collectives, self._names, self._parameters)
        self._fresh = fresh
        # Whether no rank has a gradient that was not averaged yet. Until ranks have agreed, also
        # how this rank's gradients stand, and what it gave out.
        self._idle = False
        self._standing: dict[str, Any] = {}
        self._given: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handed_over = {"offsets": 0, "values": 0, "dense": 0}
        self._whole = True
        self._run.begin(self._parameters, self)
        method.mix_momentum(self._parameters, collectives, calls_step_twice=True)

    # What the run asks.

    def in_step(self) -> bool:
        """Whether gradients were sent whose averages have not come back."""
        return any(sent() is not None for sent in self._pending.values())

    def complete_state(self) -> None:
        """Make the offsets that were broadcast at the last step's end those of this step."""
        self._notice_restart()
        for ahead in self._ahead.values():
            if ahead.work is None:
                continue
            ahead.work.wait()
            for tensor in ahead.tensors:
                self._run.tensor_states[tensor.name]["offsets"] = ahead.of(tensor)
            # The views keep this buffer alive; the next offsets arrive in a new one. A tensor that
            # does not come in a step keeps its offsets.
            ahead.buffer, ahead.work = ahead.buffer.clone(), None

    def agree_anew(self) -> None:
        """Note that other residues were loaded: ranks compare at the end of the next step."""
        self._agreed = False

    def abort(self) -> None:
        """Roll back the step in progress, and forget the offsets under way."""
        with self._lock:
            for step in self._steps.values():
                step.roll_back()
            self._pending.clear()
            # Collectives under way may still write into their buffers, so all buffers are made
            # anew.
            self._buckets, self._steps, self._ahead = {}, {}, {}
            self._run.begin_equal_state_anew()
            self._agreed = False
            self._news.give_up()
            self._news.meet(None)
            if self._method.quasi_hyperbolic is not None:
                self._method.quasi_hyperbolic.forget()
            self._marks.clear()
            self._given.clear()

    def rejoin(self) -> None:
        """Agree with the other ranks of an elastic run on the step: no hook can wait for this."""
        if not self.collectives.size:
            return
        self._notice_restart()
        residues, run = self._residues, self._run
        mine = {"step": residues.step, "state": run.digest_of_state()}
        everyone = gather_objects(self.collectives, mine, "elastic")
        residues.step = latest_step([other["step"] for other in everyone])
        run.compare_states([other["state"] for other in everyone])
        residues.ranks, residues.rank = self.collectives.size, self.collectives.position
        self._agreed = False

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step; see Method.stats. In elastic runs there may be none yet."""
        elements = {name: self._parameters[name].numel() for name in self._seen}
        tensors = {} if self._whole else self._residues.tensors
        chosen = {name: tensor.geometry.k for name, tensor in tensors.items()}
        size, step = self.collectives.size, self._residues.step
        who = leader(step, 0, max(size, 1), False)
        count = len(self._seen) + sum(ahead.work is not None for ahead in self._ahead.values())
        return step_stats(size, who, elements, chosen, count, **self._handed_over)

    # What Horovod asks.

    def compress(self, grad: torch.Tensor) -> tuple[torch.Tensor, Sent]:
        """What travels for a gradient: (k,) values, or all of it flat, in the wire dtype."""
        with self._lock:
            self._notice_restart()
            if self._pending and not self.in_step():
                self.abort()
            wire, sent = self._compress(grad)
            self._pending[sent.name] = weakref.ref(sent)
            return wire, sent

    def _compress(self, grad: torch.Tensor) -> tuple[torch.Tensor, Sent]:
        name = self._name_of(grad)
        if not self._pending:
            self._begin_step()
        self._seen.append(name)
        bucket = self._buckets.get(name)
        # Horovod makes the gradient's tensor use the result's memory. This alias keeps the
        # gradient's own memory until the step's end.
        flat = grad.detach().contiguous().view(-1)
        step = None
        if bucket is not None:
            is_idle = not (self._parameters[name].requires_grad or any_of(flat))
            rest = self._scale, {name: flat}, self._whole, [name] * is_idle
            step = self._steps[name] = BucketStep(bucket, *rest)
            self._marks[name] = Mark(self._parameters[name])
        if step is None or self._whole:
            # Copy the gradient if it is needed at the step's end: Horovod reduces in place.
            whole = flat.to(wide_dtype(flat), copy=step is not None)
            self._handed_over["dense"] += whole.numel() * whole.element_size()
            return whole, Sent(name, grad.dtype, None)

        try:
            choice = step.choices.join(self._run.tensor_states)
            chosen = finished(step.take_and_accumulate(choice, choose=self._chooses()))
        except BaseException:
            # Nothing of this tensor is sent; values of other tensors may be on their way already.
            self._steps.pop(name).roll_back()
            self._seen.remove(name)
            raise
        if chosen is not None:
            self._keep_choice(step, chosen)
        values = step.taken.clone()  # Horovod averages in place, and a roll-back needs them
        # One NaN in the values becomes one in the average, and so tells every rank that this
        # gradient was not finite on some rank.
        is_bad = torch.as_tensor(step.bad != 0, device=values.device)
        values[:1].masked_fill_(is_bad, float("nan"))
        self._handed_over["values"] += values.numel() * values.element_size()
        return values, Sent(name, grad.dtype, choice)

    def decompress(self, result: torch.Tensor, sent: Sent) -> torch.Tensor:
        """The averaged gradient, in its shape and dtype; all NaN if a rank's was not finite."""
        with self._lock:
            if self._marks:  # the first of the step: Horovod has put no average into p.grad yet
                marks, self._marks, own = self._marks, {}, self._parameters
                self._changed = [name for name, mark in marks.items() if not mark.fits(own[name])]
            if sent.choice is None:
                output = result.to(sent.dtype)
                bad = ~output.isfinite().all()
            else:
                output, bad = self._scattered(result, sent)
            self._bad.append(bad)
            self._pending.pop(sent.name, None)
            if not self._pending:
                self._end_step()
            return output.view(self._parameters[sent.name].shape)

    def _scattered(self, result: torch.Tensor, sent: Sent) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat averaged gradient, made of averaged values, and whether one is not finite."""
        if sent.name not in self._steps:
            raise RuntimeError(
                f"the step that sent {sent.name} failed, and was rolled back. Load a state, or "
                "call zero_grad() and backward() again"
            )
        step, tensor = self._steps[sent.name], self._residues.tensors[sent.name]
        average = result.to(tensor.residue.dtype) / self._scale
        flat = torch.empty_like(step.grads[sent.name])
        bad = ~average.to(flat.dtype).isfinite().all()
        step.receive(sent.choice, result)
        step.scatter({sent.name: flat})
        if self._news.channel is None:
            self._given[sent.name] = flat, step.grads[sent.name]
        return flat.masked_fill_(bad, float("nan")), bad

    # One step.

    def _notice_restart(self) -> None:
        if self._restarted():  # as in elastic runs: nothing is under way any more
            self.abort()

    def _begin_step(self) -> None:
        self.complete_state()
        residues = self._residues
        if residues.note_ranks(self.collectives.size, self.collectives.position):
            # New ranks have no offsets, and a rank must not wait for offsets here. So no rank uses
            # its own.
            self._run.begin_equal_state_anew()
        if not self._buckets:
            self._make_buckets()
        self._seen, self._bad, self._changed = [], [], []
        self._marks.clear()
        self._handed_over = dict.fromkeys(self._handed_over, 0)
        self._scale = self._method.scaling.inverse().now()
        has_met = self._news.channel is not None
        self._idle = has_met and not self._has_news()
        if not has_met:
            # Which of the parameters this optimizer trains is known only when all have come.
            grads = self._news.standing(self._parameters)
            self._standing = {"fresh": set(self._fresh), "grads": grads}
        has_offsets = any("offsets" in state for state in self._run.tensor_states.values())
        in_warmup = residues.step < residues.config.warmup_steps
        self._whole = self._idle or in_warmup or not has_offsets

    def _has_news(self) -> bool:
        """Whether some rank has gradients that were not averaged yet. Waits in no hook."""
        if self._news.ask(fresh=not self._members.isdisjoint(self._fresh)):
            return True
        members = [name for name in self._parameters if name in self._members]
        by_hand = self._news.compare(members) is Found.SET_BY_HAND
        if by_hand:
            self._news.unused.warn_of_replaced()
        return by_hand

    def _end_step(self) -> None:
        """The last result ends the step. Every rank gets here without waiting for later steps."""
        self._usual_order = self._seen
        residues = self._residues
        self._hear_from_ranks()
        if not self._members.intersection(self._seen):
            raise ValueError(
                "this ScaleCom serves another optimizer. Make one for each optimizer: "
                "ScaleCom(named_parameters=...)"
            )
        seen = {name: self._steps[name] for name in self._seen if name in self._steps}
        self._fresh.clear()
        void = any(map(bool, self._bad))
        self._news.end(has_sent=not (void or self._idle or self._whole))
        if self._idle or void:
            for step in seen.values():
                step.roll_back()
        if self._idle:
            self._average_again()
        elif void:
            residues.note_skipped_step()
        else:
            self._count_step(seen)
        self._given.clear()
        for step in seen.values():
            step.release()
        self._steps = {}

    def _hear_from_ranks(self) -> None:
        """Tell all ranks how this one stands. To refuse the step, all ranks raise RuntimeError.

        In the first step, and after some rank has loaded a state, ranks agree.
        """
        changed, alike = False, False
        try:
            if self._news.channel is not None:
                changed, alike = self._news.signal(bool(self._changed), self._agreed)
            if changed:
                raise RuntimeError(CHANGED)
            if not alike:
                self._agree()
        except RuntimeError:
            if self._changed:  # others may have changed unnoticed
                for step in self._steps.values():
                    step.roll_back(keep_gradients=True)
            self.abort()
            raise

    def _count_step(self, seen: Mapping[str, BucketStep]) -> None:
        residues = self._residues
        norms = {step: step.gradient_norms() for step in seen.values() if not self._whole}
        if residues.norms_due() and not self._whole:
            residues.look([(s.residue_norm(), math.hypot(*n.values())) for s, n in norms.items()])
        for own in norms.values():
            residues.scale_after_outliers(own)
        last_whole = self._whole and residues.step + 1 >= residues.config.warmup_steps
        if last_whole and self._chooses():
            for step in seen.values():
                self._keep_choice(step, finished(step.select()))
        if last_whole or not self._whole:
            root = self._next_leader()
            for number, ahead in enumerate(self._ahead.values()):
                name = self._names(f"offsets.{number}")
                ahead.work = self.collectives.broadcast(ahead.buffer, root, name)
                self._handed_over["offsets"] += ahead.buffer.numel()
        residues.note_step()
        self._run.take_state(())  # what was loaded need not be kept

    def _average_again(self) -> None:
        """Give gradients their uncompressed average: values were sent although nothing was new."""
        averages = self._news.averages_of({name: grad for name, (_, grad) in self._given.items()})
        for name, (output, _) in self._given.items():
            parameter = self._parameters[name]
            output.copy_(averages[name])  # it is p.grad's memory
            if parameter.grad.is_sparse:
                parameter.grad.zero_().add_(output.view(parameter.shape).to_sparse())

    def _next_leader(self) -> int:
        return leader(self._residues.step + 1, 0, self.collectives.size, staggered=False)

    def _chooses(self) -> bool:
        """Whether this rank chooses for the next step."""
        return self._next_leader() == self.collectives.position

    def _keep_choice(self, step: BucketStep, chosen: torch.Tensor) -> None:
        for name, own in step.choices.split(chosen).items():
            tensor = self._residues.tensors[name]
            self._ahead[tensor.residue.device].of(tensor).copy_(own["offsets"])

    def _make_buckets(self) -> None:
        """Make one bucket for each tensor, and room for the offsets of all.

        Also for sparse tensors, which never come here, so that it is the same on every rank.
        """
        tensors, size = self._residues.tensors, self.collectives.size
        by_device: dict[torch.device, list[CompressedTensor]] = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            by_device.setdefault(tensor.residue.device, []).append(tensor)
            self._buckets[name] = Bucket(number, [name], self._parameters, tensors, size)
        for device, own in by_device.items():
            geometries = {tensor.name: tensor.geometry for tensor in own}
            layout = Layout(geometries)
            buffer = torch.zeros(layout.offsets_bytes, dtype=torch.uint8, device=device)
            self._ahead[device] = Ahead(own, layout, buffer)

    def _agree(self) -> None:
        """Compare settings and tensors of all ranks; raises RuntimeError on every rank alike."""
        if self._news.channel is None:
            fresh = not self._standing["fresh"].isdisjoint(self._seen)
            grads = {name: self._standing["grads"][name] for name in self._seen}
        else:
            fresh, grads = not self._idle, {}
        run, everybody = self._run, (self._parameters, self.collectives, self._names)
        # The indices at which this step sent values.
        alike = {"look-ahead offsets": None if self._whole else run.digest_of_state()}
        told = {"changed": bool(self._changed), "fresh": fresh, "grads": grads}
        everyone = run.agree(*everybody, {}, alike, told)
        if any(other["changed"] for other in everyone):
            raise RuntimeError(CHANGED)
        found = judge([other["grads"] for other in everyone])
        news = any(other["fresh"] for other in everyone)
        self._idle = not news and found is not Found.SET_BY_HAND
        self._members = set(self._seen)
        self._news.meet(self.collectives)
        self._agreed = True

    def _name_of(self, grad: torch.Tensor) -> str:
        """Which parameter's gradient this is: Horovod does not say, but passes p.grad itself."""
        position = len(self._seen) if self._pending else 0
        for name in (*self._usual_order[position : position + 1], *self._parameters):
            if self._parameters[name].grad is grad:
                return name
        # sparse_as_dense: a dense copy of a sparse p.grad
        seen = self._seen if self._pending else ()
        candidates = [
            name
            for name, p in self._parameters.items()
            if p.grad is not None and p.grad.is_sparse
            if p.shape == grad.shape and name not in seen
        ]
        if len(candidates) == 1:
            return candidates[0]
        raise TypeError(
            "ScaleCom cannot tell which parameter's gradient this tensor of shape "
            f"{tuple(grad.shape)} is. It compresses the gradients of the parameters in "
            "ScaleCom(named_parameters=...), inside a DistributedOptimizer. For other tensors use "
            "hvd.Compression.none; for several sparse embeddings of one shape with sparse_as_dense "
            "use scalecom_hvd.torch.DistributedOptimizer"
        )
