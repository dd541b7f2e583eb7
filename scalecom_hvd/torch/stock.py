"""The exchange inside Horovod's own DistributedOptimizer: every tensor its own all-reduce, one broadcast for all offsets.

Horovod calls `compress` for every gradient, in any order, some of them in hooks, where a rank must not wait: ranks may miss
different gradients, and one that waits there for a broadcast waits for ever. So this is look-ahead: the next leader's offsets are
broadcast when the last result of a step came, and needed when the next step's first gradient comes; every rank has submitted
them by then without waiting for another rank's hooks. The first step is sent whole, since no offsets are known yet.

Horovod averages here, in the dtype of what it is given: of float16 values it divides the sum by n in float16, where what is small is
lost for good. So they travel times n: what is small then is a multiple of n of float16's units, and dividing it leaves nothing over.

Horovod's synchronize() compresses every gradient again where no rank has a new one (news.py). Those are sent as they are, and averaged, as
without compression, and residues, leader and step stay. Only before ranks have agreed for the first time can that not be known at the
step's begin: then the step is taken back at its end.

Used by compressor.py alone; imports news, residues, transport and the rooms below.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

import scalecom_hvd
from scalecom_hvd.agreement import compare_ranks, latest_step
from scalecom_hvd.buckets import traffic
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.torch.bucket import is_frozen
from scalecom_hvd.torch.moves import Moves, OffsetLayout
from scalecom_hvd.torch.news import Found, News, judge
from scalecom_hvd.torch.residues import CompressedTensor, Residues, describe
from scalecom_hvd.torch.transport import Transport


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """What decompress must know about a tensor: Horovod carries it from compress to decompress."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    moves: Moves | None  # None: sent whole


class StockExchange:
    """Compresses and decompresses one optimizer's gradients, tensor by tensor.

    parameters: {name: parameter}, as the user gave them; they may be more than the optimizer trains.
    fresh: names whose gradients backward gave since this was last emptied (news.freshness).
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        residues: Residues,
        transport: Transport,
        loss_scale: Callable[[], float],
        fresh: set[str],
    ) -> None:
        self._parameters = parameters
        self._residues = residues
        self._moves: dict[str, Moves] = {}
        self._transport = transport
        self._loss_scale = loss_scale
        self._usual_order = list(reversed(parameters))
        self._seen: list[str] = []
        self._members: set[str] = set()
        self._bad: list[torch.Tensor] = []
        self._lock = threading.RLock()  # hooks run on autograd's threads, one per device
        # What was sent and has not come back. Horovod holds it, and drops all of it when the optimizer loads a state.
        self._pending: dict[str, weakref.ref[Sent]] = {}
        self._agreed = False
        self._news = News(transport, parameters)
        self._fresh = fresh
        # Whether no rank has a gradient that was not averaged yet, and until ranks have agreed: how this one stands, and what it gave out.
        self._idle = False
        self._standing: dict[str, Any] = {}
        self._given: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # Per device: where offsets lie, those of this step and those of the next, and the broadcast that brings the latter.
        self._layouts: dict[torch.device, OffsetLayout] = {}
        self._next: dict[torch.device, torch.Tensor] = {}
        self._handles: dict[torch.device, int] = {}
        self._bytes = {"offsets": 0, "values": 0, "dense": 0}
        self._factor = 1

    def in_step(self) -> bool:
        return any(sent() is not None for sent in self._pending.values())

    def settle(self) -> None:
        """The offsets that the last step's end broadcast become this step's."""
        self._notice_restart()
        for device, handle in self._handles.items():
            self._transport.wait(handle)
            layout, buffer = self._layouts[device], self._next[device]
            self._residues.chosen_ahead.update({t.name: layout.view(t, buffer) for t in layout.tensors})
            # The views keep this buffer; the next offsets arrive in a new one. Tensors that do not come in a step keep theirs.
            self._next[device] = buffer.clone()
        self._handles.clear()

    def agree_anew(self) -> None:
        """Other residues were loaded: ranks compare at the next step's end."""
        self._agreed = False

    def _notice_restart(self) -> None:
        """Elastic runs start Horovod again when workers come or go: with other ranks, and nothing that was in flight is."""
        if self._transport.restarted():
            self.abort()

    def watch(self, diagnostics: Diagnostics) -> None:
        """Refused: tensors come one by one here, in any order, and no step is seen whole."""
        raise ValueError(
            "diagnostics are not seen in horovod.torch's own DistributedOptimizer: use scalecom_hvd.torch's DistributedOptimizer (import "
            "scalecom_hvd.torch as hvd), or leave out diagnostics"
        )

    def abort(self) -> None:
        """Forget the step in progress and the offsets in flight; its moves are taken back, so that nothing is lost from the residues."""
        with self._lock:
            for moves in self._moves.values():
                moves.undo()
            self._pending.clear()
            for device in self._handles:  # what is in flight may still arrive where it was to
                self._next[device] = torch.zeros_like(self._next[device])
            self._handles.clear()
            self._residues.chosen_ahead.clear()
            self._agreed = False
            self._news.forget()
            self._given.clear()

    def meet(self) -> None:
        """Ranks of an elastic run come together: they agree on the step, as no hook can wait for that. All ranks of the
        process set must be here."""
        if not self._transport.included:
            return
        self._notice_restart()
        mine = {"step": self._residues.step, "chosen_ahead": self._residues.digest_ahead()}
        everyone = self._transport.exchange_objects(mine, "elastic")
        self._residues.step = latest_step([other["step"] for other in everyone])
        if len({other["chosen_ahead"] for other in everyone}) > 1:
            self._residues.chosen_ahead.clear()
        self._residues.ranks = self._transport.size
        self._agreed = False

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
        moves = self._moves.get(name)
        # Horovod moves the gradient's tensor onto the result's memory; this alias keeps the gradient until the step's end.
        flat = grad.detach().contiguous().view(-1)
        if moves is not None:
            moves.begin([flat], self._scale, [is_frozen(self._parameters[name])])
        if moves is None or self._whole:
            wire = torch.float64 if flat.dtype == torch.float64 else torch.float32
            # A copy where the gradient is needed at the step's end, since Horovod reduces in place.
            whole = flat.to(wire, copy=moves is not None)
            self._bytes["dense"] += whole.numel() * whole.element_size()
            return whole, Sent(name, grad.shape, grad.dtype, None)

        tensor = self._residues.tensors[name]
        values = torch.empty(tensor.geometry.k, dtype=tensor.wire_dtype, device=flat.device)
        chosen = self._next_offsets(tensor) if self._i_choose() else None
        try:
            bad = moves.gather_and_filter(self._offsets(tensor), values, self._transport.size, chosen, self._factor)
        except BaseException:
            # Of this tensor nothing is sent; the others' values may be on their way already.
            moves.undo()
            self._seen.remove(name)
            raise
        if self._factor != 1:
            values.mul_(self._factor)
        # One NaN tells every rank, through the average, that this gradient was not finite somewhere.
        values[:1].masked_fill_(torch.as_tensor(bad != 0, device=values.device), float("nan"))
        self._bytes["values"] += values.numel() * values.element_size()
        return values, Sent(name, grad.shape, grad.dtype, moves)

    def decompress(self, result: torch.Tensor, sent: Sent) -> torch.Tensor:
        """The averaged gradient, in the gradient's shape and dtype; NaN everywhere if a worker's was not finite."""
        with self._lock:
            return self._decompress(result, sent)

    def _decompress(self, result: torch.Tensor, sent: Sent) -> torch.Tensor:
        if sent.moves is None:
            in_its_dtype = result.to(sent.dtype)
        else:
            tensor, share = self._residues.tensors[sent.name], 1 / self._factor
            in_its_dtype = (result.to(tensor.residue.dtype) * (share / self._scale)).to(sent.dtype)
        bad = ~in_its_dtype.isfinite().all()
        self._bad.append(bad)
        if sent.moves is None:
            output = in_its_dtype.view(sent.shape)
        else:
            flat = torch.empty(sent.shape.numel(), dtype=sent.dtype, device=result.device)
            sent.moves.scatter([flat], self._offsets(tensor), result, share)
            output = flat.masked_fill_(bad, float("nan")).view(sent.shape)
            if not self._agreed:
                self._given[sent.name] = flat, sent.moves.grads[0]
        self._pending.pop(sent.name, None)
        if not self._pending:
            self._end_step()
        return output

    def _begin_step(self) -> None:
        self.settle()
        residues = self._residues
        if residues.note_ranks(self._transport.size):
            # Newcomers have no offsets, and this is no place to wait for any, so nobody uses them.
            residues.chosen_ahead.clear()
        if not self._next:
            self._moves = {name: Moves([tensor]) for name, tensor in residues.tensors.items()}
            self._make_buffers()
        self._seen, self._bad = [], []
        self._bytes = {"offsets": 0, "values": 0, "dense": 0}
        self._scale = 1 / float(self._loss_scale())
        self._factor = self._transport.size if residues.config.wire_dtype == "float16" else 1
        self._idle = self._agreed and not self._has_news()
        if not self._agreed:
            # Which of the parameters this optimizer trains is known when all have come.
            self._standing = {"fresh": set(self._fresh), "grads": self._news.standing(self._parameters)}
        self._whole = self._idle or residues.step < residues.config.warmup_steps or not residues.chosen_ahead
        # Until ranks have agreed: where this one gathers in this step.
        self._gathers_at = None if self._whole or self._agreed else residues.digest_ahead()

    def _has_news(self) -> bool:
        """Whether some rank has gradients that were not averaged yet. Waits for others only in synchronize(), never in a hook."""
        if not self._members.isdisjoint(self._fresh):
            self._news.tell()
            return True
        members = [name for name in self._parameters if name in self._members]
        return self._news.ask() or self._news.compare(members) is Found.SET_BY_HAND

    def _end_step(self) -> None:
        """The last result has come. Every rank comes here without waiting for what others do later."""
        self._usual_order = self._seen
        residues = self._residues
        if not self._agreed:
            self._agree()
        if not self._members.intersection(self._seen):
            raise ValueError("this ScaleCom serves another optimizer; make one for each: ScaleCom(named_parameters=...)")
        seen = [name for name in self._seen if name in residues.tensors]
        self._news.end()
        self._fresh.clear()
        if self._idle:
            for name in seen:
                self._moves[name].undo()
            self._average_again()
        self._given.clear()
        if self._idle:
            return
        if any(map(bool, self._bad)):
            residues.note_skipped_step()
            for name in seen:
                self._moves[name].undo()
            return
        if residues.look_due() and not self._whole:
            residues.look([self._moves[name].norms() for name in seen])
        last_whole = self._whole and residues.step + 1 >= residues.config.warmup_steps
        for name in seen:
            if last_whole and self._i_choose():
                self._moves[name].choose_without_filter(self._next_offsets(residues.tensors[name]))
            self._moves[name].finish()
        if last_whole or not self._whole:
            leader = self._next_leader()
            for number, (device, buffer) in enumerate(self._next.items()):
                self._handles[device] = self._transport.broadcast(buffer, leader, f"offsets.{number}")
                self._bytes["offsets"] += buffer.numel()
        residues.note_step()

    def _average_again(self) -> None:
        """Values were sent in a step that had nothing to send: gradients become what they would be without compression."""
        wires = {name: grad.to(self._residues.tensors[name].residue.dtype, copy=True) for name, (_, grad) in self._given.items()}
        handles = {name: self._transport.average(wire, f"again.{name}") for name, wire in wires.items()}
        for name, (output, _) in self._given.items():
            parameter = self._parameters[name]
            output.copy_(self._transport.wait(handles[name]))  # it is p.grad's memory
            if parameter.grad.is_sparse:
                parameter.grad.zero_().add_(output.view(parameter.shape).to_sparse())

    def _next_leader(self) -> int:
        return (self._residues.step + 1) % self._transport.size

    def _i_choose(self) -> bool:
        """Whether this rank chooses for the next step."""
        return self._next_leader() == self._transport.position

    def _offsets(self, tensor: CompressedTensor) -> torch.Tensor:
        """This step's offsets, as bytes."""
        return self._residues.chosen_ahead[tensor.name].view(torch.uint8)

    def _next_offsets(self, tensor: CompressedTensor) -> torch.Tensor:
        device = tensor.residue.device
        return self._layouts[device].view(tensor, self._next[device]).view(torch.uint8)

    def _make_buffers(self) -> None:
        """For all tensors, also those that never come here (sparse ones, which Horovod does not compress): the same on every rank."""
        by_device: dict[torch.device, list[CompressedTensor]] = {}
        for tensor in self._residues.tensors.values():
            by_device.setdefault(tensor.residue.device, []).append(tensor)
        self._layouts = {device: OffsetLayout(members) for device, members in by_device.items()}
        self._next = {device: layout.new_buffer(device) for device, layout in self._layouts.items()}

    def _agree(self) -> None:
        """Compare settings and tensors of all ranks; raises RuntimeError on every rank alike."""
        mine = {
            "version": scalecom_hvd.__version__,
            "settings": self._residues.config.to_dict(),
            "tensors": describe(self._parameters, self._residues),
            "name": self._transport.claim_name(),
            "look-ahead offsets": self._gathers_at,
            "step": self._residues.step,
            "fresh": not self._standing["fresh"].isdisjoint(self._seen),
            "grads": {name: self._standing["grads"][name] for name in self._seen},
        }
        everyone = self._transport.exchange_objects(mine, "agreement")
        news = any(other["fresh"] for other in everyone)
        self._idle = not news and judge([other["grads"] for other in everyone]) is not Found.SET_BY_HAND
        try:
            compare_ranks(everyone, ("version", "settings", "tensors", "look-ahead offsets"))
        except RuntimeError:
            self.abort()
            raise
        self._transport.use_name(max(other["name"] for other in everyone))
        self._residues.step = latest_step([other["step"] for other in everyone])
        self._members = set(self._seen)
        self._agreed = True

    def _name_of(self, grad: torch.Tensor) -> str:
        """Which parameter's gradient this is: Horovod does not say, but passes p.grad itself."""
        position = len(self._seen) if self._pending else 0
        if position < len(self._usual_order) and self._parameters[self._usual_order[position]].grad is grad:
            return self._usual_order[position]
        for name, parameter in self._parameters.items():
            if parameter.grad is grad:
                return name
        # sparse_as_dense: a dense copy of a sparse p.grad
        candidates = [
            name
            for name, p in self._parameters.items()
            if p.grad is not None and p.grad.is_sparse and p.shape == grad.shape and not (self._pending and name in self._seen)
        ]
        if len(candidates) == 1:
            return candidates[0]
        raise TypeError(
            f"ScaleCom cannot tell whose gradient this tensor of shape {tuple(grad.shape)} is: it compresses the gradients of the "
            "parameters in ScaleCom(named_parameters=...), inside a DistributedOptimizer. For other tensors use hvd.Compression.none; for "
            "several sparse embeddings of one shape with sparse_as_dense use scalecom_hvd.torch.DistributedOptimizer"
        )

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step; see ScaleCom.stats. The first `compress` made this object, so there was one."""
        whole = {name: self._parameters[name].numel() for name in self._seen}
        compressed = {name: t.geometry.k for name, t in self._residues.tensors.items() if name in whole and not self._whole}
        return {
            "leader": self._residues.step % max(self._transport.size, 1),
            "bytes_offsets": self._bytes["offsets"],
            "bytes_values": self._bytes["values"],
            "bytes_dense": self._bytes["dense"],
            "bytes_traffic": traffic(self._transport.size, self._bytes["offsets"], self._bytes["values"] + self._bytes["dense"]),
            "rate": sum(whole.values()) / max(sum((whole | compressed).values()), 1),
            "collectives": len(self._seen) + len(self._handles),
        }
