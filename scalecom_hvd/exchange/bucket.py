"""A bucket: tensors that share collectives, with the buffers and kernels that they use.

It is made once per plan, and what lives for one step is in bucket_step.py. If buffers were made
anew, the allocator might return memory to the system and fetch it again (0.1 of a step's time).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.exchange.accumulators import Accumulators
from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.choices import Choices
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.exchange.kernels.base import Kernel, TensorSlot, scale_blocks_, scale_numbers
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.residue import CompressedTensor
from scalecom_hvd.exchange.values import IntegerValues, Values, ValuesInPlace

# With this many elements, a pass over them takes longer (about 0.1 ms) than handing it to a thread.
WORTH_A_THREAD = 2**19


class Bucket:
    """Tensors that share one broadcast and one all-reduce.

    Args:
        number: the bucket's position among the buckets.
        names: the names of its tensors. They are on one device, and have one dtype on the wire.
        like: {name: tensor} of at least these, with their shapes, dtypes and devices.
        tensors: {name: CompressedTensor} of at least those that send offsets and values. Without
            any, all gradients are sent whole.
        ranks: how many ranks there are.
        share: the factor that turns a sum over ranks into the average. Integers are summed.
        thread: runs kernels that need no Python while backward runs. None: no thread does.
        has_flags: whether ranks may tell each other which tensors they use.
        has_vote: whether a rank may tell the others a number besides.
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
        self.layout = Layout(geometries, has_scales=self.levels > 0)
        self.slots = [
            TensorSlot(
                tensor.residue,
                tensor.geometry,
                self.layout.offsets[tensor.name].start,
                self.layout.values[tensor.name].start,
                self.levels,
                self.layout.scales[tensor.name].start,
            )
            for tensor in self.tensors
        ]
        by_name = dict(zip(self.compressed, self.slots, strict=True))
        self.choices = Choices(by_name, self.layout, self._device)
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

    def drop_whole_values(self) -> None:
        """Free the buffer of steps that are sent whole: there are no more such steps."""
        vars(self).pop("whole_values", None)

    @functools.cached_property
    def accumulators(self) -> Accumulators:
        """The accumulators, for methods that need them."""
        return Accumulators(self.tensors, self.slots)

    def averages(self, offsets: torch.Tensor) -> torch.Tensor:
        """The averages (k,) of values that were taken at these offsets, once they have arrived."""
        if isinstance(self.values, Values):
            return self.values.averages
        averages = self.values.averages_of(self.slots, offsets, self.share)
        if averages is None:
            averages = self.scaled(self.values.sums(), offsets).mul_(self.share)
        return averages

    def scaled(self, sums: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sums of integers (k,), times the scales that travel with the offsets."""
        values = sums.to(self.residue_dtype)
        if self._scale_of is not None:
            scales = offsets[: self.layout.scales_bytes].view(torch.float32)
            return values.mul_(scales.index_select(0, self._scale_of))
        for slot in self.slots:
            scale_blocks_(slot.values(values), slot.scales(offsets))
        return values
