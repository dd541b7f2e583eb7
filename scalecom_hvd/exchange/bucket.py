"""A bucket: tensors that share collectives, the buffers they use, and the moves of one step.

The exchange says when a step begins, and whether it counts. In between, a method (methods/) makes
the moves. Nothing here communicates. A step that does not count is rolled back: residues become
what they were, up to rounding.

Moves come in two forms, and a method uses one of them. `select` and `take_and_accumulate` work in
place on the residues, with kernels that fuse what they do. They serve offsets that are the same on
all ranks, as ScaleCom's leader chooses them. The numbers (1) and (2) are those of reference.py.
`accumulators`, `choose`, `send` and `receive` serve any indices and values.
They are simple rather than fast, and use two tensors as large as the bucket.

An *offset* is a row in a lane, as it travels. A *position* is an index into one tensor. `places`
are indices into the accumulators of the whole bucket.

Imports accumulators, values, integer_values, residue and the rooms below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.profiler import record_function

from scalecom_hvd.bucket_layout import Layout, pack_halves, unpack_halves
from scalecom_hvd.exchange.accumulators import accumulate, commit
from scalecom_hvd.exchange.background_thread import BackgroundThread, Job
from scalecom_hvd.exchange.collectives import Step, Wait
from scalecom_hvd.exchange.gradients import (
    check_sizes,
    wide_dtype,
)
from scalecom_hvd.exchange.integer_values import IntegerValues
from scalecom_hvd.exchange.kernel_choice import kernel_for
from scalecom_hvd.exchange.kernels import (
    Count,
    Kernel,
    NativeKernel,
    TensorSlot,
    Wire,
    positions_of,
    scale_blocks_,
    scale_numbers,
)
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.exchange.values import Values, norm

# With this many elements, a pass over them takes longer (about 0.1 ms) than handing it to a thread.
WORTH_A_THREAD = 2**19

Places = torch.Tensor | slice
"""Flat positions in a bucket's accumulators: an index tensor without repeats, or slice(None)."""


class Bucket:
    """Tensors that share one broadcast and one all-reduce.

    Args:
        number: the bucket's position among the buckets.
        names: the names of its tensors. They are on one device, and have one dtype on the wire.
        like: {name: tensor} of at least these, with their shapes, dtypes and devices.
        residues: the residues of the compressed tensors.
        ranks: how many ranks there are.
        share: the factor that turns a sum over ranks into the average. Integers are summed.
        thread: runs kernels that need no Python while backward runs. None: no thread does.
        copies: whether a step that is sent whole leaves gradients as they are until it counts.
        has_flags: whether ranks may tell each other which tensors they use.

    Attributes:
        compressed: {name: CompressedTensor} of the tensors that send offsets and values.
        geometries, counts: the lanes and the k of each compressed tensor.
        sizes: how many elements each compressed tensor has.
        grads: {name: (N,)} of this step, in the gradients' dtype. Multiplied by `scale`, they are
            in the residues' units.
        scale: 1 / loss scale, which converts gradients to the residues' units.
        whole: whether this step is sent whole.
        frozen: one bool for each of `compressed`. True: the tensor is no longer trained, so its
            residue stays as it is.
        bad: how many elements of this step's gradients and values are not finite, or too large.
            They count as zero here, and all ranks skip the step.
        has_received: whether the bucket was told this step's averages.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        like: Mapping[str, torch.Tensor],
        residues: Residues,
        ranks: int,
        share: float = 1.0,
        thread: BackgroundThread | None = None,
        copies: bool = False,
        has_flags: bool = False,
    ) -> None:
        self.number = number
        self.names = list(names)
        self._like = {name: like[name] for name in names}
        self.compressed = {n: residues.tensors[n] for n in names if n in residues.tensors}
        self.tensors = list(self.compressed.values())
        self.geometries = [tensor.geometry for tensor in self.tensors]
        self.counts = [geometry.k for geometry in self.geometries]
        self.sizes = [tensor.residue.numel() for tensor in self.tensors]
        self._starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.grads: dict[str, torch.Tensor] = {}
        self.scale = 1.0
        self.whole = False
        self.bad: Count = 0
        self.is_large = sum(self.sizes) >= WORTH_A_THREAD
        self._thread, self._copies = thread, copies
        self._job: Job | None = None

        first = like[names[0]]
        self._device = first.device
        wide = wide_dtype(first)
        self._dense_dtype = wide
        wire = next((tensor.wire_dtype for tensor in self.tensors), wide)
        dense = {name: like[name] for name in names if name not in self.compressed}
        # Tensors sent whole are averaged in their own dtype, so no narrow values join them.
        assert not dense or wire == wide, "integers and tensors sent whole share no bucket"
        self._share = share

        self._levels = self.tensors[0].levels if self.tensors else 0
        geometries = {tensor.name: tensor.geometry for tensor in self.tensors}
        self._layout = Layout(geometries, has_scales=self._levels > 0)
        self._slots = [
            TensorSlot(
                tensor.residue,
                tensor.geometry,
                self._layout.offsets[tensor.name].start,
                self._layout.values[tensor.name].start,
                self._levels,
                self._layout.scales[tensor.name].start,
            )
            for tensor in self.tensors
        ]
        self._beta = self.tensors[0].beta if self.tensors else 1.0
        self._extra = self.tensors[0].extra if self.tensors else 0.0
        # All residues of a bucket have one dtype, in which values travel if not made narrower.
        self._residue_dtype = self.tensors[0].residue.dtype if self.tensors else wide
        # These buffers are made once. If they were allocated in every step, the allocator could
        # return the script's memory to the system and fetch it again (0.1 of a step's time).
        n_bytes = self._layout.offsets_bytes
        self._offsets = [
            torch.zeros(n_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        ]
        is_packed = self._layout.narrow_bytes > 0
        self._message = self._offsets[0].new_empty(self._layout.message_bytes if is_packed else 0)
        self._has_chosen = False
        self._n_flags = len(names) * has_flags
        lengths = self._layout.n_values, self._n_flags
        self._values: Values | IntegerValues
        if self._levels:
            self._values = IntegerValues(*lengths, self._levels, ranks, self._device)
        else:
            self._values = Values(*lengths, dense, wire, self._device)
        # The index of each value's scale. A CPU is faster without it, tensor by tensor.
        has_index = self._levels and self._device.type != "cpu"
        self._scale_of = scale_numbers(self.counts).to(self._device) if has_index else None
        self._kernels: list[tuple[Kernel, list[int]]] = []
        self._grad_dtypes: list[torch.dtype] | None = None
        self._whole_values: Values | None = None
        self._flat: torch.Tensor | None = None
        self._average: torch.Tensor | None = None
        self._chooser: Kernel | None = None
        self.frozen: list[bool] = []
        self._used: torch.Tensor | None = None
        # These describe the step in progress; see `forget`.
        self._averaged: dict[str, torch.Tensor]
        self._reduced: Values | IntegerValues | None
        self._received: tuple[torch.Tensor, torch.Tensor] | None
        self._taken_at: torch.Tensor
        self._in_place: bool
        self._has_accumulators: bool
        self._committed: bool
        self.forget()

    def averages_taken(self) -> torch.Tensor:
        """The averages (k,) of the values taken, once they have arrived."""
        if isinstance(self._values, Values):
            return self._values.averages
        if self.whole:
            return self._values.compressed
        return self.scaled(self._values.sums()).mul_(self._share)

    def scaled(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of integers (k,), times the scales that `take_and_accumulate` used for them."""
        values = sums.to(self._residue_dtype)
        if self._scale_of is not None:
            scales = self._taken_at[: self._layout.scales_bytes].view(torch.float32)
            return values.mul_(scales.index_select(0, self._scale_of))
        for slot in self._slots:
            scale_blocks_(slot.values(values), slot.scales(self._taken_at))
        return values

    # What a method asks for: offsets.

    def new_offsets(self) -> torch.Tensor:
        """A buffer of bytes for this step's choice in the lanes of all tensors.

        Ranks that do not lead pass it to the broadcast. State may hold views of the last step's
        buffer.
        """
        self._has_chosen = True
        return self._offsets[0]

    def split_offsets(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """{name: offsets (k,)} of a choice, as views of it."""
        return {
            tensor.name: slot.offsets(buffer)
            for tensor, slot in zip(self.tensors, self._slots, strict=True)
        }

    def split_choice(self, buffer: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """{name: {"offsets": (k,)}} of a choice. For integers it includes "scales" (blocks,)."""
        choice = {name: {"offsets": own} for name, own in self.split_offsets(buffer).items()}
        for tensor, slot in zip(self.tensors, self._slots, strict=True):
            if self._levels:
                choice[tensor.name]["scales"] = slot.scales(buffer)
        return choice

    def join_choice(self, choice: Mapping[str, Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """The inverse of `split_choice`. It copies nothing if all are views of one buffer."""
        parts = [choice[tensor.name]["offsets"] for tensor in self.tensors]
        storage = parts[0].untyped_storage()  # views of another dtype do not know what they view
        starts = [storage.data_ptr() + slot.offsets_at for slot in self._slots]
        whole = storage.nbytes() == self._layout.offsets_bytes
        if whole and starts == [part.data_ptr() for part in parts]:
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        buffer = self._offsets[1]  # no state views this one, or it would have been found above
        for tensor, slot, part in zip(self.tensors, self._slots, parts, strict=True):
            slot.offsets(buffer).copy_(part.view(slot.offsets(buffer).dtype))
            if self._levels:
                slot.scales(buffer).copy_(choice[tensor.name]["scales"])
        return buffer

    def pack(self, choice: torch.Tensor) -> torch.Tensor:
        """The bytes that travel for a choice. Narrow offsets travel two to a byte."""
        narrow = self._layout.narrow_bytes
        if not narrow:
            return choice
        cut = len(choice) - narrow
        self._message[:cut] = choice[:cut]
        pack_halves(choice[cut:], self._message[cut:])
        return self._message

    def unpack(self, message: torch.Tensor, choice: torch.Tensor) -> None:
        """The inverse of `pack`: choice <- what travelled."""
        narrow = self._layout.narrow_bytes
        if narrow:
            cut = len(choice) - narrow
            choice[:cut] = message[:cut]
            unpack_halves(message[cut:], choice[cut:])

    # What a method asks for: moves in place.

    def select(self) -> Step[torch.Tensor]:
        """Choose the offsets of the largest |m + g|, and the scales of integers there; m stays."""
        chosen = self.new_offsets()

        def choose(kernel: Kernel) -> Count:
            kernel.choose(self._extra, chosen)
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
        beta, extra = self._beta, self._extra
        yield from self._run(
            "take_and_accumulate", lambda own: own.take_and_accumulate(beta, extra, wire, chosen)
        )
        return chosen

    @property
    def taken(self) -> torch.Tensor:
        """v (k,) as `take_and_accumulate` took it; int8 if values are integers.

        It must stay as it is until the step's end: `average_taken` sends a copy.
        """
        return self._values.compressed

    # What a method asks for: moves on accumulators.

    @property
    def accumulators(self) -> torch.Tensor:
        """acc = m + g of all compressed tensors, one after the other, (N,) float32 or float64.

        For a frozen tensor acc is zero. `send` subtracts what was sent. A method may add something
        to acc before it chooses, such as momentum. The part of it that is not sent enters the
        residue, times beta.
        """
        if not self._has_accumulators:
            assert not self._in_place, "accumulators were asked for after a move in place"
            self._accumulate_apart()
        return self._flat

    @property
    def parts(self) -> list[torch.Tensor]:
        """`accumulators` as one view per tensor."""
        return list(self.accumulators.split(self.sizes))

    def sendable(self, places: Places) -> torch.Tensor:
        """The values that this worker should send at these indices, as a new tensor.

        They are the accumulators there. With config.flush they also include all that waited,
        wherever the gradient does not point the other way.
        """
        values = self.accumulators[places].clone()
        if self._extra:
            waited = torch.cat([tensor.residue for tensor in self.tensors])[places]
            # acc - m is the gradient. For a frozen tensor acc is zero, so nothing is added.
            agrees = waited * (values - waited) >= 0
            values += torch.where(agrees, self._extra * waited, 0.0)
        return values

    def choose(self) -> torch.Tensor:
        """Choose the largest accumulators of each tensor. Returns their offsets."""
        buffer, parts = self.new_offsets(), self.parts
        dtype = self._residue_dtype
        if self._chooser is None:
            slots = [
                TensorSlot(part, slot.geometry, slot.offsets_at, slot.values_at)
                for part, slot in zip(parts, self._slots, strict=True)
            ]
            kernel = kernel_for(self._device, dtype, dtype, self.geometries[0])
            self._chooser = kernel(slots, [dtype] * len(slots))
        # Accumulators replace residues here, and zero times accumulators is added to them.
        self._chooser.begin(parts, [False] * len(parts), 0.0)
        self._chooser.choose(0.0, buffer)
        self._chooser.release()
        return buffer

    def places_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """The indices into `accumulators`, (sum of counts,) int64, that offsets stand for."""
        return self.places(
            [positions_of(slot.geometry, slot.offsets(offsets)) for slot in self._slots]
        )

    def places(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Convert positions in every tensor to indices into `accumulators`."""
        return torch.cat([own + at for own, at in zip(positions, self._starts, strict=True)])

    def send(self, places: Places, values: torch.Tensor) -> None:
        """Note that this worker sent these values at these indices. The rest stays in its residue.

        Args:
            places: indices, none of them twice.
            values: one for each index.

        Raises:
            ValueError: there are more or fewer values than indices.
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
        if isinstance(where, slice):
            self._average[where] += averages
        else:
            self._average.index_add_(0, where, averages.to(self._residue_dtype))

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
        own = [t for t in (self._flat, self._average) if t is not None]
        address = tensor.untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == address for t in [*own, *self.grads.values()])

    # What the exchange asks for.

    def begin(
        self,
        scale: float,
        grads: Mapping[str, torch.Tensor],
        whole: bool = False,
        idle: Collection[str] = (),
        used: torch.Tensor | None = None,
    ) -> None:
        """Begin a step whose gradients are all here. They are kept until it ends, for a roll-back.

        Args:
            scale: 1 / loss scale.
            grads: {name: (N,) contiguous} of all its tensors.
            whole: whether the step is sent whole.
            idle: names of tensors whose gradients are zero and whose residues stay as they are.
            used: (number of tensors,): which of them this rank uses. None: ranks do not tell.

        Raises:
            RuntimeError: a gradient differs from its tensor in size or device.
        """
        self.whole, self.scale, self.bad, self._used = whole, scale, 0, used
        self._has_chosen = False
        self.grads = dict(grads)
        like = {tensor.name: tensor.residue for tensor in self.tensors} | self._values.whole
        check_sizes(self.grads, like)
        own = [self.grads[name] for name in self.compressed]
        self.frozen = [name in idle for name in self.compressed]
        dtypes = [grad.dtype for grad in own]
        if dtypes != self._grad_dtypes:  # torch allows gradients of another dtype than p has
            self._choose_kernels(dtypes)
        for kernel, members in self._kernels:
            frozen = [self.frozen[i] for i in members]
            kernel.begin([own[i] for i in members], frozen, scale)

    def fill(self) -> dict[str, torch.Tensor]:
        """What is all-reduced besides the method's own collectives, {end of its name: tensor}.

        This is the values buffer, completed with the tensors sent whole, the flags and the count.
        In a step that is sent whole, it is the gradients themselves, unless they must travel in a
        wider dtype, or must stay as they are, or flags travel.
        """
        self._reduced = None
        is_wide = all(grad.dtype == self._dense_dtype for grad in self.grads.values())
        if self.whole and is_wide and not self._copies and self._used is None:
            # No count is needed: if a gradient is not finite, neither is the average.
            self._averaged = {f".{name}": grad for name, grad in self.grads.items()}
            return self._averaged
        if self.whole and self._whole_values is None:
            rest = self._n_flags, self._like, self._dense_dtype, self._device
            self._whole_values = Values(0, *rest)
        if self.tensors and not (self.whole or self._in_place):
            self.accumulators  # noqa: B018 (a method may have asked for nothing)
        self._reduced = self._whole_values if self.whole else self._values
        bad = self._reduced.fill(self.grads)
        if self._used is not None:
            self._reduced.flags.copy_(self._used)
        self._reduced.buffer[-1] = (self.bad + bad) != 0
        skipped = 0 if self.whole or self._in_place else self._layout.n_values
        self._averaged = {"": self._reduced.buffer[skipped:]}
        return self._averaged

    @property
    def values_bytes(self) -> int:
        """How many bytes of what `fill` gives are values of compressed tensors."""
        return 0 if self.whole or not self._in_place else self._values.averages.nbytes

    @property
    def kind(self) -> str:
        """A word for what `fill` gives, for the names of collectives."""
        return "whole" if self.whole else "dense" if self._has_accumulators else "values"

    @property
    def flags(self) -> torch.Tensor | None:
        """(number of tensors,): 0 for those that no rank uses, once all values have arrived.

        It is the same on all ranks. None: ranks have not told.
        """
        return None if self._used is None else self._reduced.flags

    def is_sound(self) -> torch.Tensor:
        """Whether the step counts, as a 0-dimensional tensor that is the same on all ranks.

        The step counts if all workers' gradients are finite, and all averages are finite in the
        gradients' dtype.
        """
        averages = list(self._averaged.values())
        if self._levels and not self.whole:
            averages = [self._received[1]]
        if self._has_accumulators and not self.whole:
            averages.append(self._average)
        # If the smallest and the largest element are finite, all are. This takes one pass, and
        # makes nothing large.
        ends = [end for average in averages if average.numel() for end in torch.aminmax(average)]
        sound = torch.stack(ends).isfinite().all() if ends else torch.tensor(True, device="cpu")
        if self._reduced is None:
            return sound
        sound = sound & (self._reduced.buffer[-1] == 0)
        for average in self._averages_of_halves():
            sound = sound & average.half().isfinite().all()
        return sound

    def _averages_of_halves(self) -> Iterable[torch.Tensor]:
        """The averages of float16 gradients, in the gradients' units."""
        halves = [name for name, grad in self.grads.items() if grad.dtype == torch.float16]
        if halves and not self.whole:
            compressed = dict(zip(self.compressed, self._compressed_averages(), strict=True))
        for name in halves:
            if self.whole or name not in self.compressed:
                yield self._reduced.whole[name].float()
            else:
                yield compressed[name].float() / self.scale

    def _compressed_averages(self) -> Iterable[torch.Tensor]:
        if self._has_accumulators:
            return self._average.split(self.sizes)
        return [slot.values(self._received[1]) for slot in self._slots]

    def norms(self) -> tuple[float, float]:
        """The norms of residues and of this step's gradients, in residues' units. Reads all."""
        grads = norm([self.grads[name] for name in self.compressed])
        return norm([tensor.residue for tensor in self.tensors]), grads * self.scale

    def commit(self, unused: Collection[str] = ()) -> None:
        """Commit the step: gradients become averages, and residues keep what was not sent.

        Args:
            unused: names of tensors that no rank uses: their residues become what they were before
                the step, up to rounding, and their averages zero.
        """
        self._committed = True
        if self._has_chosen:
            self._offsets.reverse()
        spared = [name not in unused for name in self.compressed]
        if self._in_place and not all(spared):
            for kernel, members in self._kernels:
                kernel.roll_back(spared=[spared[i] for i in members])
        if self._received is not None:
            self.scatter({name: self.grads[name] for name in self.compressed})
        elif self._has_accumulators and not self.whole:
            averages = self._average.split(self.sizes)
            grads = [self.grads[name] for name in self.compressed]
            stay = [a or not b for a, b in zip(self.frozen, spared, strict=True)]
            commit(self.tensors, self.parts, averages, self.scale, stay, grads)
        if isinstance(self._reduced, Values) and self._reduced.whole:
            self._reduced.copy_to(self.grads)
        for name in unused:
            self.grads[name].zero_()

    def scatter(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Every output (N,) <- the averages received at I, in the gradient's units, zero elsewhere.

        Args:
            outputs: {name: tensor}. If they are the gradients, nothing can be rolled back any more.
        """
        own = [outputs[name] for name in self.compressed]
        offsets, averages = self._received
        with record_function("scalecom.scatter"):
            for kernel, members in self._kernels:
                kernel.scatter([own[i] for i in members], offsets, averages)

    def spoil(self) -> None:
        """Make every gradient NaN. This shows on all ranks that the step does not count."""
        for grad in self.grads.values():
            grad.fill_(float("nan"))

    def roll_back(self, keep_gradients: bool = False) -> None:
        """Undo this step's moves, unless the step is committed.

        Set `keep_gradients` if gradients were changed since. Residues then keep the gradients from
        before the change, so nothing is lost.
        """
        if self._job is not None:
            self._job.exception()  # wait for a move that is still running
        if not self._committed:
            for kernel, _ in self._kernels:
                kernel.roll_back(keep_gradients)

    def end(self) -> dict[str, torch.Tensor]:
        """Close the step. Returns {name: average (N,)}."""
        averages = self.grads
        self.forget()
        return averages

    def forget(self) -> None:
        """Prepare for another step, and release this step's gradients."""
        for kernel, _ in self._kernels:
            kernel.release()
        self.grads = {}
        self._averaged = {}
        self._reduced = self._received = None
        self._in_place = self._has_accumulators = self._committed = False
        self.has_received = False
        self._job = None

    def drop_whole_buffer(self) -> None:
        """Free the buffer of steps that are sent whole: there are no more such steps."""
        self._whole_values = None

    # How moves are made.

    def _choose_kernels(self, dtypes: list[torch.dtype]) -> None:
        members: dict[type[Kernel], list[int]] = {}
        for i, (slot, dtype) in enumerate(zip(self._slots, dtypes, strict=True)):
            kind = kernel_for(self._device, dtype, slot.residue.dtype, slot.geometry)
            members.setdefault(kind, []).append(i)
        self._kernels = [
            (kernel([self._slots[i] for i in chosen], [dtypes[i] for i in chosen]), chosen)
            for kernel, chosen in members.items()
        ]
        self._grad_dtypes = dtypes

    def _run(self, what: str, move: Callable[[Kernel], Count]) -> Step[None]:
        """Make a move, on the thread if no kernel needs Python and the move takes long enough."""
        assert not self._has_accumulators, "a move in place was asked for after accumulators"
        self._in_place = True

        def make() -> None:
            # Each call has its own range: two threads may make moves at the same time.
            with record_function(f"scalecom.{what}"):
                counts = [move(kernel) for kernel, _ in self._kernels]
            self.bad = sum(counts, self.bad)

        native = all(isinstance(kernel, NativeKernel) for kernel, _ in self._kernels)
        if self._thread is None or not (self.is_large and native):
            make()
        else:
            self._job = self._thread.submit(make)
            yield from Wait("kernel", self._job, round=0)

    def _accumulate_apart(self) -> None:
        if self._flat is None:
            n = sum(self.sizes)
            self._flat = torch.empty(n, dtype=self._residue_dtype, device=self._device)
            self._average = torch.empty_like(self._flat)
        self._average.zero_()
        self._has_accumulators = True
        grads = [self.grads[name] for name in self.compressed]
        bad = accumulate(self.tensors, grads, self.scale, self.frozen, self.parts)
        self.bad = self.bad + bad
