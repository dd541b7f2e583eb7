"""A bucket: tensors that share collectives, with the buffers and kernels that they use.

It is made once per plan, and what lives for one step is in bucket_step.py. If buffers were made
anew, the allocator might return memory to the system and fetch it again (0.1 of a step's time).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from scalecom_hvd.bucket_layout import Layout, pack_halves, split, unpack_halves
from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.exchange.kernels.base import (
    Count,
    Kernel,
    TensorSlot,
    scale_blocks_,
    scale_numbers,
    usable,
)
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.residue import CompressedTensor, Residues
from scalecom_hvd.exchange.values import IntegerValues, Values, ValuesInPlace

# With this many elements, a pass over them takes longer (about 0.1 ms) than handing it to a thread.
WORTH_A_THREAD = 2**19

Groups = Sequence[Sequence[str]]
"""For each group, the names of the tensors that should share a bucket."""

Choice = Mapping[str, Mapping[str, torch.Tensor]]
"""{name of a tensor: {"offsets": (k,), and for integers "scales": (blocks,)}}."""


class Part(NamedTuple):
    """A part of a step."""

    names: Collection[str]  # of its tensors: all tensors of one or more buckets
    is_last: bool  # whether the part ends the step


class Choices:
    """The buffers of a bucket's choices, made once.

    There are two: state may hold views of the next step's choice while this step's is in use.
    """

    def __init__(
        self, slots: Mapping[str, TensorSlot], layout: Layout, device: torch.device
    ) -> None:
        self._slots, self._layout = slots, layout
        self._buffers = [
            torch.zeros(layout.offsets_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        is_packed = layout.narrow_bytes > 0
        self._message = self._buffers[0].new_empty(layout.message_bytes if is_packed else 0)

    def new(self) -> torch.Tensor:
        """The bytes that this step's choice will fill."""
        return self._buffers[0]

    def keep(self) -> None:
        """Keep this step's choice, because the step counts. The next one fills other bytes."""
        self._buffers.reverse()

    def split(self, buffer: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """A choice as views of its bytes."""
        choice = {name: {"offsets": slot.offsets(buffer)} for name, slot in self._slots.items()}
        for name, slot in self._slots.items():
            if slot.levels:
                choice[name]["scales"] = slot.scales(buffer)
        return choice

    def join(self, choice: Choice) -> torch.Tensor:
        """The inverse of `split`. It copies nothing if all are views of one buffer."""
        parts = [choice[name]["offsets"] for name in self._slots]
        storage = parts[0].untyped_storage()  # views of another dtype do not know what they view
        starts = [(storage.data_ptr(), slot.offsets_at) for slot in self._slots.values()]
        whole = storage.nbytes() == self._layout.offsets_bytes
        if whole and starts == [_place(part) for part in parts]:
            return torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(storage)
        buffer = self._buffers[1]  # no state views this one, or it would have been found above
        for (name, slot), part in zip(self._slots.items(), parts, strict=True):
            slot.offsets(buffer).copy_(part.view(slot.offsets(buffer).dtype))
            if slot.levels:
                slot.scales(buffer).copy_(choice[name]["scales"])
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


def _place(view: torch.Tensor) -> tuple[int, int]:
    """Where a view lies, even an empty one: its storage's address, and the bytes before it."""
    return view.untyped_storage().data_ptr(), int(view.storage_offset()) * view.element_size()


class Accumulators:
    """acc of a bucket's compressed tensors, for values at any indices. Simple rather than fast.

    `flat` (N,) is acc minus what was sent, in `parts` a view per tensor, and `average` (N,) is zero
    where nothing came.
    """

    def __init__(self, tensors: Sequence[CompressedTensor], slots: Sequence[TensorSlot]) -> None:
        self._tensors, self._slots = tensors, slots
        sizes = [tensor.residue.numel() for tensor in tensors]
        self.flat = tensors[0].residue.new_empty(sum(sizes))
        self.average = torch.empty_like(self.flat)
        self.parts = list(self.flat.split(sizes))
        self.averages = list(self.average.split(sizes))
        self._chooser: Kernel | None = None

    def begin(self, grads: Sequence[torch.Tensor], scale: float, frozen: Sequence[bool]) -> Count:
        """acc <- m + scale*g, or 0 where frozen. Returns how many g are bad, and count as 0."""
        self.average.zero_()
        bad: Count = 0
        for tensor, grad, is_frozen, own in zip(
            self._tensors, grads, frozen, self.parts, strict=True
        ):
            if is_frozen:
                own.zero_()
            else:
                g, n_bad = usable(grad, tensor.residue, scale)
                torch.add(g, tensor.residue, out=own)
                bad = bad + n_bad
        return bad

    def choose(self, buffer: torch.Tensor) -> None:
        """Write the offsets of the largest accumulators of each tensor to a buffer."""
        if self._chooser is None:
            slots = [
                TensorSlot(part, slot.geometry, slot.offsets_at, slot.values_at)
                for part, slot in zip(self.parts, self._slots, strict=True)
            ]
            dtype = self.flat.dtype
            kernel = kernel_for(self.flat.device, dtype, dtype, self._slots[0].geometry)
            self._chooser = kernel(slots, dtype)
        # Accumulators replace residues here, and zero times accumulators is added to them.
        self._chooser.begin(self.parts, [False] * len(self.parts), 0.0)
        self._chooser.choose(0.0, buffer)
        self._chooser.release()

    def commit(self, grads: Sequence[torch.Tensor], scale: float, stay: Sequence[bool]) -> None:
        """m <- (1 - beta)*m + beta*(acc - sent) unless it stays; g <- the average, in g's units."""
        for tensor, own, average, stays, grad in zip(
            self._tensors, self.parts, self.averages, stay, grads, strict=True
        ):
            if not stays and tensor.beta == 1:
                tensor.residue.copy_(own)
            elif not stays:
                # Each operation must be rounded separately. On some processors add_ with alpha
                # fuses both, and residues would then differ in bits.
                tensor.residue.mul_(1 - tensor.beta).add_(own.mul_(tensor.beta))
            grad.copy_(average if scale == 1 else average / scale)


class Bucket:
    """Tensors that share one broadcast and one all-reduce.

    Args:
        number: the bucket's position among the buckets.
        names: the names of its tensors. They are on one device, and have one dtype on the wire.
        like: {name: tensor} of at least these, with their shapes, dtypes and devices.
        tensors: {name: CompressedTensor} of at least those that send offsets and values.
        ranks, share: how many ranks there are; what makes a sum over them the average.
        thread: runs kernels that need no Python while backward runs. None: no thread does.
        has_flags, has_vote: whether ranks tell each other which tensors they use, and a number.
        in_place: whether the gradients are averaged in their own memory, if they are side by side.

    Attributes:
        compressed: {name: CompressedTensor}, and `tensors` in a list. All have the same `beta`,
            `extra`, `levels` and `residue_dtype`, in which values travel unless they are integers.
        geometries, counts, sizes, slots: each one's lanes, k, N, and place in the buffers.
        layout, choices, values: where what is, the buffers of choices, and what is all-reduced.
        kernels: the kernels, each with the positions of its tensors among `compressed`.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        like: Mapping[str, torch.Tensor],
        tensors: Mapping[str, CompressedTensor],
        ranks: int,
        share: float = 1.0,
        thread: BackgroundThread | None = None,
        has_flags: bool = False,
        has_vote: bool = False,
        in_place: bool = False,
    ) -> None:
        self.number = number
        self.names = list(names)
        self._like = {name: like[name] for name in names}
        self.compressed = {n: tensors[n] for n in names if n in tensors}
        self.tensors = list(self.compressed.values())
        self.geometries = [tensor.geometry for tensor in self.tensors]
        self.counts = [geometry.k for geometry in self.geometries]
        self.sizes = [tensor.residue.numel() for tensor in self.tensors]
        self.thread, self.share, self.in_place = thread, share, in_place

        first = like[names[0]]
        self._device, self._dense_dtype = first.device, wide_dtype(first)
        one = self.tensors[0] if self.tensors else None
        self.beta, self.extra = (one.beta, one.extra) if one else (1.0, 0.0)
        self.levels = one.levels if one else 0
        self.residue_dtype = one.residue.dtype if one else self._dense_dtype
        dense = {name: like[name] for name in names if name not in self.compressed}
        # Tensors sent whole are averaged in their own dtype, so no narrow values join them.
        apart = self.residue_dtype == self._dense_dtype and not (one and one.few_bits)
        assert not dense or apart, "integers share no bucket with whole tensors"

        geometries = {tensor.name: tensor.geometry for tensor in self.tensors}
        self.layout = at = Layout(geometries, has_scales=self.levels > 0)
        slots = {}
        for name, own in self.compressed.items():
            places = at.offsets[name].start, at.values[name].start
            scales = self.levels, at.scales[name].start
            slots[name] = TensorSlot(own.residue, own.geometry, *places, *scales)
        self.slots = list(slots.values())
        self.choices = Choices(slots, self.layout, self._device)
        self._n_flags = len(names) * has_flags + has_vote
        lengths = self.layout.n_values, self._n_flags
        self.values: Values | IntegerValues
        if in_place:
            self.values = ValuesInPlace(self._n_flags, dense, self._dense_dtype, self._device)
        elif self.levels:
            kind = self.residue_dtype
            self.values = IntegerValues(*lengths, self.levels, ranks, self._device, kind)
        else:
            self.values = Values(*lengths, dense, self.residue_dtype, self._device)
        # The index of each value's scale. A CPU is faster without it, tensor by tensor.
        has_index = self.levels and self._device.type != "cpu"
        self._scale_of = scale_numbers(self.counts).to(self._device) if has_index else None
        self.kernels: list[tuple[Kernel, list[int]]] = []
        self._grad_dtypes: list[torch.dtype] | None = None

    @property
    def is_large(self) -> bool:
        """Whether a pass over its residues takes longer than handing it to a thread."""
        return sum(self.sizes) >= WORTH_A_THREAD

    def choose_kernels(self, dtypes: list[torch.dtype]) -> None:
        """Take kernels for gradients of these dtypes. A tensor's may differ from its own."""
        if dtypes == self._grad_dtypes:
            return
        members: dict[tuple[type[Kernel], torch.dtype], list[int]] = {}
        for i, (slot, dtype) in enumerate(zip(self.slots, dtypes, strict=True)):
            kind = kernel_for(self._device, dtype, slot.residue.dtype, slot.geometry)
            members.setdefault((kind, dtype), []).append(i)
        self.kernels = [
            (kernel([self.slots[i] for i in chosen], dtype), chosen)
            for (kernel, dtype), chosen in members.items()
        ]
        self._grad_dtypes = dtypes

    @functools.cached_property
    def whole_values(self) -> Values | IntegerValues:
        """The buffer of steps that are sent whole."""
        if not self.tensors:
            return self.values
        return Values(0, self._n_flags, self._like, self._dense_dtype, self._device)

    @functools.cached_property
    def accumulators(self) -> Accumulators:
        """The accumulators, for methods that need them."""
        return Accumulators(self.tensors, self.slots)

    def averages(self, offsets: torch.Tensor) -> torch.Tensor:
        """The averages (k,) of values that were taken at these offsets, once they have arrived."""
        if isinstance(self.values, Values):
            return self.values.averages
        in_c = self.values.averages_of(self.slots, offsets, self.share)
        if in_c is not None:
            return in_c
        # Sums of integers, times the scales that travel with the offsets.
        averages = self.values.sums().to(self.residue_dtype)
        if self._scale_of is not None:
            scales = offsets[: self.layout.scales_bytes].view(torch.float32)
            averages.mul_(scales.index_select(0, self._scale_of))
        else:
            for slot in self.slots:
                scale_blocks_(slot.values(averages), slot.scales(offsets))
        return averages.mul_(self.share)


def plan_buckets(
    parameters: Mapping[str, torch.Tensor],
    residues: Residues,
    arrived: Sequence[str],
    groups: Groups | None,
    loaded: Groups | None,
    elsewhere: Collection[str],
) -> list[list[str]]:
    """Decide which tensors each bucket holds, as names per bucket.

    The `groups` that were asked for become the buckets. Otherwise those of a `loaded` state are
    kept if they still fit. Otherwise tensors are taken in the order in which they `arrived` on rank
    0, cut where a bucket is full, and sorted by when the bucket is complete. On a channel, no
    bucket begins before the one in front of it, so without sorting, the bucket of biases, which
    come from all layers, would hold up all others. Tensors that travel `elsewhere` are in no
    bucket.
    """

    def kind_of(name: str) -> tuple[torch.device, torch.dtype, torch.dtype]:
        parameter, tensor = parameters[name], residues.tensors.get(name)
        wide = wide_dtype(parameter)
        values = wide if tensor is None else tensor.residue.dtype
        return parameter.device, torch.int8 if tensor and tensor.few_bits else values, wide

    def bytes_of(name: str) -> int:
        return parameters[name].numel() * parameters[name].element_size()

    wanted = parameters.keys() - set(elsewhere)
    late = [name for name in reversed(list(parameters)) if name not in arrived]
    in_order = [name for name in [*arrived, *late] if name in wanted]
    if groups is not None:
        members = [[name for name in group if name in wanted] for group in groups]
        return [part for group in members for part in split(group, kind_of, bytes_of, None)]
    if loaded and wanted == {name for names in loaded for name in names}:
        parts = [split(names, kind_of, bytes_of, None) for names in loaded]
        if all(len(part) == 1 for part in parts):
            return [list(names) for names in loaded]
    place = {name: i for i, name in enumerate(in_order)}
    cut = split(in_order, kind_of, bytes_of, residues.config.bucket_bytes)
    return sorted(cut, key=lambda names: max(place[name] for name in names))
