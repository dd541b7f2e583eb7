"""One bucket, one step: its moves, and whether it counts.

Between its begin and its end, which the exchange decides, a method (methods/) makes the moves of a
BucketStep, its `bucket`. Nothing here communicates. If the step does not count, it is rolled back:
residues become what they were, up to rounding.

Moves come in two forms, and a method uses one of them. `select` and `take_and_accumulate` work in
place on the residues, with kernels that fuse what they do. They serve offsets that are the same on
all ranks, as ScaleCom's leader chooses them. The numbers (1) and (2) are those of reference.py.
`accumulators`, `choose`, `send` and `receive` serve any indices and values.

An *offset* is a row in a lane, as it travels. A *position* is an index into one tensor. `places`
are indices into the accumulators of the whole bucket.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.profiler import record_function

from scalecom_hvd.exchange.background_thread import Job
from scalecom_hvd.exchange.bucket import Accumulators, Bucket
from scalecom_hvd.exchange.collectives import Step, Wait
from scalecom_hvd.exchange.devices import on_host
from scalecom_hvd.exchange.gradients import check_sizes
from scalecom_hvd.exchange.kernels.base import Count, Kernel, Wire, positions_of
from scalecom_hvd.exchange.kernels.native_kernel import NativeKernel
from scalecom_hvd.exchange.values import IntegerValues, Values, norm, norms_of

Places = torch.Tensor | slice
"""Flat positions in a bucket's accumulators: an index tensor without repeats, or slice(None)."""


class BucketStep:
    """One step of a bucket, whose gradients are all here. They are kept for a roll-back.

    Args:
        bucket: the bucket.
        scale: 1 / loss scale, which converts gradients to the residues' units.
        grads: {name: (N,) contiguous} of all its tensors. They become averages.
        whole: whether the step is sent whole.
        idle: names of tensors whose gradients are zero and whose residues stay as they are.
        used: (number of tensors,): which of them this rank uses. None: ranks do not tell.
        vote: what this rank tells the others besides. None: ranks tell nothing.

    Attributes:
        number, names, compressed, tensors, geometries, counts, sizes, choices: the bucket's.
        grads, scale, whole: see above. Gradients have their own dtype.
        frozen: one bool for each of `compressed`. True: it is idle.
        bad: how many elements of this step's gradients and values are not finite, or too large.
            They count as zero here, and all ranks skip the step.
        has_received: whether the step was told its averages.
        sound: () whether it counts, once it is checked.

    Raises:
        RuntimeError: a gradient differs from its tensor in size or device.
    """

    def __init__(
        self,
        bucket: Bucket,
        scale: float,
        grads: Mapping[str, torch.Tensor],
        whole: bool = False,
        idle: Collection[str] = (),
        used: torch.Tensor | None = None,
        vote: int | None = None,
    ) -> None:
        self._bucket = bucket
        self.number, self.names, self.choices = bucket.number, bucket.names, bucket.choices
        self.compressed, self.tensors = bucket.compressed, bucket.tensors
        self.geometries, self.counts, self.sizes = bucket.geometries, bucket.counts, bucket.sizes
        self.whole, self.scale, self._used, self._vote = whole, scale, used, vote
        self.grads = dict(grads)
        like = {tensor.name: tensor.residue for tensor in self.tensors} | bucket.values.whole
        check_sizes(self.grads, like)
        self.frozen = [name in idle for name in self.compressed]
        self.bad: Count = 0
        self.sound: torch.Tensor | None = None
        self.has_received = self._has_chosen = self._in_place = self._committed = False
        self._job: Job | None = None
        self._apart: Accumulators | None = None
        self._received: tuple[torch.Tensor, torch.Tensor] | None = None
        self._reduced: Values | IntegerValues | None = None
        self._averaged: torch.Tensor | None = None
        self._taken_at: torch.Tensor | None = None
        own = self._own_grads
        bucket.choose_kernels([grad.dtype for grad in own])
        for kernel, members in bucket.kernels:
            frozen = [self.frozen[i] for i in members]
            kernel.begin([own[i] for i in members], frozen, scale)

    @property
    def _own_grads(self) -> list[torch.Tensor]:
        return [self.grads[name] for name in self.compressed]

    # What a method asks for: moves in place.

    def new_offsets(self) -> torch.Tensor:
        """A buffer of bytes for this step's choice: the leader's, or that in which it arrives."""
        self._has_chosen = True
        return self.choices.new()

    def select(self) -> Step[torch.Tensor]:
        """Choose the offsets of the largest |m + g|, and the scales of integers there; m stays."""
        chosen = self.new_offsets()

        def choose(kernel: Kernel) -> Count:
            kernel.choose(self._bucket.extra, chosen)
            return 0  # bad elements are counted when values are taken

        yield from self._run("select", choose)
        return chosen

    def take_and_accumulate(
        self, offsets: torch.Tensor, choose: bool = False
    ) -> Step[torch.Tensor | None]:
        """(1) v = m[I] + g[I], m[I] <- m[I] - beta*v; then (2) m <- m + beta*g, in one pass.

        v is acc at I. With config.flush it is larger; see reference.py. It becomes `taken`.

        Args:
            offsets: I, the same on all ranks.
            choose: whether to return what `select` would return afterwards. There g stands for the
                next gradient.
        """
        self._refuse_whole("moves")
        self._taken_at = offsets
        wire = Wire(offsets, self.taken)
        chosen = self.new_offsets() if choose else None
        beta, extra = self._bucket.beta, self._bucket.extra
        yield from self._run(
            "take_and_accumulate", lambda own: own.take_and_accumulate(beta, extra, wire, chosen)
        )
        return chosen

    def _run(self, what: str, move: Callable[[Kernel], Count]) -> Step[None]:
        """Make a move, on the thread if no kernel needs Python and the move takes long enough."""
        assert self._apart is None, "a move in place was asked for after accumulators"
        self._in_place = True
        kernels, thread = self._bucket.kernels, self._bucket.thread

        def make() -> None:
            # Each call has its own range: two threads may make moves at the same time.
            with record_function(f"scalecom.{what}"):
                counts = [move(kernel) for kernel, _ in kernels]
            self.bad = sum(counts, self.bad)

        native = all(isinstance(kernel, NativeKernel) for kernel, _ in kernels)
        if thread is None or not (self._bucket.is_large and native):
            make()
        else:
            self._job = thread.submit(make)
            yield from Wait("kernel", self._job, round=0)

    @property
    def taken(self) -> torch.Tensor:
        """v (k,) as `take_and_accumulate` took it; int8 if values are integers.

        It must stay as it is until the step's end: `average_taken` sends a copy.
        """
        return self._bucket.values.compressed

    def averages_taken(self) -> torch.Tensor:
        """The averages (k,) of `taken`, once they have arrived."""
        if self._taken_at is None:
            return self.taken[:0]
        return self._bucket.averages(self._taken_at)

    # What a method asks for: moves on accumulators.

    @property
    def accumulators(self) -> torch.Tensor:
        """acc = m + g of all compressed tensors, one after the other, (N,) float32 or float64.

        For a frozen tensor acc is zero. `send` subtracts what was sent. A method may add something,
        such as momentum, before it chooses. What is not sent of it enters the residue, times beta.
        """
        return self._accumulated().flat

    @property
    def parts(self) -> list[torch.Tensor]:
        """`accumulators` as one view per tensor."""
        return self._accumulated().parts

    def _accumulated(self) -> Accumulators:
        if self._apart is None:
            assert not self._in_place, "accumulators were asked for after a move in place"
            self._apart = self._bucket.accumulators
            self.bad = self.bad + self._apart.begin(self._own_grads, self.scale, self.frozen)
        return self._apart

    def sendable(self, places: Places) -> torch.Tensor:
        """The values that this worker should send at these indices, as a new tensor.

        They are the accumulators there and, with config.flush, more of what waited, wherever the
        gradient does not point the other way.
        """
        values = self.accumulators[places].clone()
        if self._bucket.extra:
            waited = torch.cat([tensor.residue for tensor in self.tensors])[places]
            # acc - m is the gradient. For a frozen tensor acc is zero, so nothing is added.
            agrees = waited * (values - waited) >= 0
            values += torch.where(agrees, self._bucket.extra * waited, 0.0)
        return values

    def choose(self) -> torch.Tensor:
        """Choose the largest accumulators of each tensor. Returns their offsets."""
        buffer = self.new_offsets()
        self._accumulated().choose(buffer)
        return buffer

    def places_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """The indices into `accumulators`, (sum of counts,) int64, that offsets stand for."""
        slots = self._bucket.slots
        return self.places([positions_of(slot.geometry, slot.offsets(offsets)) for slot in slots])

    def places(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Convert positions in every tensor to indices into `accumulators`."""
        starts = itertools.accumulate(self.sizes[:-1], initial=0)
        return torch.cat([own + at for own, at in zip(positions, starts, strict=True)])

    def send(self, places: Places, values: torch.Tensor) -> None:
        """Note that this worker sent these values at these indices. The rest stays in its residue.

        No index may come twice. Raises ValueError if there are not as many values.
        """
        self._refuse_whole("sends")
        self._check_places(places, values)
        self.accumulators[places] -= values

    def receive(self, where: Places, averages: torch.Tensor) -> None:
        """Note the average over ranks: these values at these indices, and zero elsewhere.

        Args:
            where: indices. If one occurs several times, its values add up. After moves in place:
                the offsets at which values were taken.
            averages: one for each index, the same on every rank. After moves in place: the averages
                of `taken`.

        Raises:
            ValueError: there are more or fewer averages than indices.
        """
        self._refuse_whole("receives")
        if not self._in_place and isinstance(where, torch.Tensor) and where.dtype == torch.uint8:
            raise RuntimeError(
                "receive() of offsets must come after `yield from bucket.take_and_accumulate()`"
            )
        self.has_received = True
        if self._in_place:
            assert isinstance(where, torch.Tensor), "moves in place receive at offsets"
            self._received = where, averages
            return
        self._check_places(where, averages)
        average = self._accumulated().average
        if isinstance(where, slice):
            average[where] += averages
        else:
            average.index_add_(0, where, averages.to(average.dtype))

    def _refuse_whole(self, what: str) -> None:
        if self.whole:
            raise RuntimeError(f"an uncompressed step {what} nothing by a method: see whole_step")

    def _check_places(self, places: Places, values: torch.Tensor) -> None:
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"values must be a tensor, not {values!r}: is a `yield from` missing?")
        shape = self.accumulators[places].shape if isinstance(places, slice) else places.shape
        if values.shape != shape:
            raise ValueError(
                f"there are {tuple(values.shape)} values for {tuple(shape)} indices of bucket "
                f"{self.number}: each index needs one value"
            )

    def will_overwrite(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of memory that the next step writes to."""
        own = [] if self._apart is None else [self._apart.flat, self._apart.average]
        own += [*self.grads.values(), *(tensor.residue for tensor in self.tensors)]
        address = tensor.untyped_storage().data_ptr()
        return any(other.untyped_storage().data_ptr() == address for other in own)

    # What is all-reduced, and whether the step counts.

    def fill(self) -> list[torch.Tensor]:
        """What is all-reduced besides the method's own collectives.

        If gradients are averaged in their own memory, flags travel apart, after the gradients.
        """
        if self.tensors and not (self.whole or self._in_place):
            self._accumulated()  # a method may have asked for nothing
        values = self._bucket.whole_values if self.whole else self._bucket.values
        filled, *apart = values.fill(self.grads)
        if self._used is not None:
            values.flags[: len(self.names)] = self._used
        if self._vote is not None:
            values.flags[-1] = self._vote
        values.buffer[-1] = self.bad != 0
        _ = self.norms  # now, so that no pass is left for when averages have arrived
        skipped = 0 if self.whole or self._in_place else values.averages.numel()
        self._reduced, self._averaged = values, filled[skipped:]
        return [self._averaged, *apart]

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """(number of `compressed`,) of the gradients, in the residues' units, after all moves.

        The host does not wait for them. If the step is sent whole, there are none: (0,).
        """
        kernels = self._bucket.kernels
        in_c = [(own, members) for own, members in kernels if isinstance(own, NativeKernel)]
        if self.whole or self._taken_at is None or len(in_c) < len(kernels):
            return norms_of([] if self.whole else self._own_grads) * self.scale
        norms = torch.empty(len(self.compressed), dtype=torch.float64, device="cpu")
        for own, members in in_c:  # the C kernel has seen every gradient pass
            norms[members] = own.norms()
        return norms

    @property
    def values_bytes(self) -> int:
        """How many bytes of what `fill` gives are values of compressed tensors."""
        return 0 if self.whole or not self._in_place else self._bucket.values.averages.nbytes

    @property
    def kind(self) -> str:
        """A word for what `fill` gives, for the names of collectives."""
        return "whole" if self.whole else "values" if self._apart is None else "dense"

    @property
    def flags(self) -> torch.Tensor | None:
        """(number of tensors,): 0 for those that no rank uses. None: ranks do not tell."""
        return None if self._used is None else self._reduced.flags[: len(self.names)]

    def votes(self) -> torch.Tensor:
        """The sum of all ranks' votes, (), once all values have arrived."""
        total = self._reduced.flags[-1]
        return total / self._bucket.share if total.is_floating_point() else total

    def check(self) -> None:
        """Set `sound`, when the averages have arrived: whether the step counts, on all ranks alike.

        It does if all gradients, and averages in their dtype, are finite. No host waits.
        """
        averages = [self._averaged]
        if self._received is not None and self._bucket.levels:
            averages = [self._received[1]]
        if self._apart is not None and not self.whole:
            averages.append(self._apart.average)
        # If the smallest and the largest element are finite, all are. This takes one pass, and
        # makes nothing large.
        ends = [end for average in averages if average.numel() for end in torch.aminmax(average)]
        sound = torch.stack(ends).isfinite().all() if ends else torch.tensor(True, device="cpu")
        sound = sound & (self._reduced.buffer[-1] == 0)
        for average in self._averages_of_halves():
            sound = sound & average.half().isfinite().all()
        self.sound = sound

    def _averages_of_halves(self) -> Iterable[torch.Tensor]:
        """The averages of float16 gradients, in the gradients' units."""
        halves = [name for name, grad in self.grads.items() if grad.dtype == torch.float16]
        places = {name: i for i, name in enumerate(self.compressed) if halves}
        for name in halves:
            if name in self._reduced.whole:
                yield self._reduced.whole[name].float()
            elif self._apart is not None:
                yield self._apart.averages[places[name]].float() / self.scale
            else:
                slot = self._bucket.slots[places[name]]
                yield slot.values(self._received[1]).float() / self.scale

    def residue_norm(self) -> float:
        """The norm of the residues. Reads all."""
        return norm([tensor.residue for tensor in self.tensors])

    def gradient_norms(self) -> dict[str, float]:
        """{name: norm} of compressed gradients in residues' units, before the step is committed."""
        norms = dict(zip(self.compressed, self.norms.tolist(), strict=True))
        large = [name for name, own in norms.items() if math.isinf(own)]
        return norms | {name: norm([self.grads[name]]) * self.scale for name in large}

    # How it ends.

    def commit(self, unused: Collection[str] = ()) -> None:
        """Gradients become averages, and residues keep what was not sent.

        unused: names that no rank uses. Their residues stay, up to rounding, and averages are zero.
        """
        self._committed = True
        if self._has_chosen:
            self.choices.keep()
        spared = [name not in unused for name in self.compressed]
        if self._received is not None:
            for kernel, members in self._bucket.kernels if not all(spared) else ():
                kernel.roll_back(spared=[spared[i] for i in members])
            self.scatter({name: self.grads[name] for name in self.compressed})
        elif self._apart is not None and not self.whole:
            stay = [a or not b for a, b in zip(self.frozen, spared, strict=True)]
            self._apart.commit(self._own_grads, self.scale, stay)
        whole = self._reduced.whole if self._reduced is not None else {}
        apart = [name for name in whole if whole[name].data_ptr() != self.grads[name].data_ptr()]
        if apart:
            torch._foreach_copy_([self.grads[n] for n in apart], [whole[n] for n in apart])
        for name in unused:
            self.grads[name].zero_()

    def scatter(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Every output (N,) <- the averages received at I, in the gradient's units, zero elsewhere.

        outputs: {name: tensor}. If they are the gradients, nothing can be rolled back any more.
        """
        own = [outputs[name] for name in self.compressed]
        offsets, averages = self._received
        with record_function("scalecom.scatter"):
            for kernel, members in self._bucket.kernels:
                kernel.scatter([own[i] for i in members], offsets, averages)

    def spoil(self) -> None:
        """Make every gradient NaN: on all ranks, the step does not count."""
        for grad in self.grads.values():
            grad.fill_(float("nan"))

    def roll_back(self, keep_gradients: bool = False) -> None:
        """Undo this step's moves, unless the step is committed.

        With `keep_gradients`, residues keep the gradients from before a change.
        """
        if self._job is not None:
            self._job.exception()  # wait for a move that is still running
        if not self._committed:
            for kernel, _ in self._bucket.kernels:
                kernel.roll_back(keep_gradients)

    def release(self) -> None:
        """Release the gradients. Nothing can be rolled back any more."""
        for kernel, _ in self._bucket.kernels:
            kernel.release()


def outcome(
    steps: Sequence[BucketStep], others: Iterable[torch.Tensor], has_votes: bool
) -> tuple[bool, set[str], int]:
    """What all ranks see alike of a step whose values have arrived.

    Returns whether it is sound in all its buckets, also in the `others`, averages that travelled in
    another way; the names of tensors that no rank has used; and the sum of votes, if there are any.
    """
    sound = [step.sound for step in steps]
    sound += [values.isfinite().all() for values in others]
    told = [step for step in steps if step.flags is not None]
    asked = [*(step.norms for step in steps), *(step.flags for step in told)]
    voted = [step.votes() for step in steps[:1] if has_votes]
    # Here the host waits for its devices.
    known = iter(on_host([*asked, *voted, *sound]))
    for step in steps:
        step.norms = next(known)
    unused = {
        name
        for step in told
        for name, flag in zip(step.names, next(known).tolist(), strict=True)
        if not flag
    }
    votes = round(float(next(known))) if voted else 0
    return all(map(bool, known)), unused, votes
