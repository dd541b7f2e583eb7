"""What one step does to the residues of a bucket's tensors, and the kernels that do it.

A kernel is made once for tensors that share their buffers of offsets and values (one `TensorSlot`
for each tensor). It makes every move for all these tensors at once. kernel_choice.py picks the
kernel. All kernels give the same results, to the bit, and the results of reference.py. Imports
devices, gradients, lanes, native and integers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.devices import stream_id
from scalecom_hvd.exchange.gradients import limit_of
from scalecom_hvd.integers import BLOCK, SMALLEST_SCALE, blocks_of, scale_divisor
from scalecom_hvd.lanes import Lanes, Positions

Count = int | torch.Tensor
"""A number, or a 0-dimensional tensor on devices where reading a number would wait."""


@dataclass(frozen=True)
class TensorSlot:
    """A compressed tensor's residue, and the tensor's position in the buffers that it shares.

    Attributes:
        residue: (N,) float32 or float64.
        geometry: its lanes.
        offsets_at: where its k offsets begin, in bytes.
        values_at: where its k values begin, in elements.
        levels: L, if values travel as integers (integers.py). 0: they travel as numbers.
        scales_at: where the scales of integers begin, in bytes of the buffer of offsets.
    """

    residue: torch.Tensor
    geometry: Lanes
    offsets_at: int
    values_at: int
    levels: int = 0
    scales_at: int = 0

    def offsets(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor's offsets (k,), geometry.offset_dtype, in a buffer of bytes."""
        dtype = getattr(torch, str(self.geometry.offset_dtype))
        end = self.offsets_at + self.geometry.k * dtype.itemsize
        return buffer[self.offsets_at : end].view(dtype)

    def scales(self, buffer: torch.Tensor) -> torch.Tensor:
        """The scales (blocks,) of this tensor's values, float32, in a buffer of offsets."""
        count = blocks_of(self.geometry.k) if self.levels else 0
        return buffer[self.scales_at : self.scales_at + 4 * count].view(torch.float32)

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor's values (k,) in a buffer of values."""
        return buffer[self.values_at : self.values_at + self.geometry.k]


class Wire(NamedTuple):
    """Where values are taken, and the buffers in which they travel.

    Attributes:
        offsets: the bytes of the chosen offsets, and of the scales of integers.
        values: what is sent, in the residues' dtype, or integers, int8. It must stay until the
            step counts, so what travels is a copy.
    """

    offsets: torch.Tensor
    values: torch.Tensor


Taken = tuple[float, Wire]
"""(beta, wire): what a step's move was made with, for a roll-back."""


class Kernel(Protocol):
    """The moves of one step, numbered as in reference.py.

    m is the residue. g is the gradient times `scale`, which is 1 / loss scale, with zero for bad
    elements. An element is good if |g| <= config.largest_gradient. I stands for the indices.

    The buffers `offsets` and `chosen` hold bytes. The C and Triton kernels allocate nothing as
    large as these in a step. A frozen tensor is no longer trained: its residue stays as it is, and
    zeros are sent.
    """

    def __init__(self, slots: Sequence[TensorSlot], grad_dtypes: Sequence[torch.dtype]) -> None: ...

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        """Begin a step with its gradients: each (N,), contiguous, of its dtype in `grad_dtypes`.

        The gradients must stay alive until the step's last move.
        """
        ...

    def choose(self, extra: float, chosen: torch.Tensor) -> None:
        """Chosen <- the winners of |m + g|, and the scales of what would be sent there.

        Nothing else changes. extra: see `take_and_accumulate`.
        """
        ...

    def take_and_accumulate(
        self, beta: float, extra: float, wire: Wire, chosen: torch.Tensor | None = None
    ) -> Count:
        """(1) values <- v = m[I] + g[I]; m[I] <- m[I] - beta*values. (2) m <- m + beta*g.

        With `levels`, v is rounded to integers times scales.

        Args:
            beta: the beta of the low-pass filter.
            extra: v is larger by `extra` times m, if m and g do not have opposite signs.
            wire: where values are taken from, and where they go.
            chosen: then takes what `choose` gives, with m as it is afterwards. None: nothing.

        Returns:
            How many elements of g are bad, and how many values are not finite, which are sent as
            zero.
        """
        ...

    def scatter(
        self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, averages: torch.Tensor
    ) -> None:
        """Every output <- averages / scale at I, zero elsewhere.

        Outputs are (N,), of the gradient's dtype. They may be the gradients. Averages have the
        residues' dtype.
        """
        ...

    def roll_back(self, keep_gradients: bool = False, spared: Sequence[bool] = ()) -> None:
        """Undo what was done to residues since `begin`, up to rounding.

        This is m[I] <- m[I] + beta*values, then m <- m - beta*g. The second is left out with
        `keep_gradients`, for gradients that are no longer what they were. Each kernel keeps track
        of its moves itself, because a move may fail halfway. Offsets and values must be what they
        were.

        Args:
            keep_gradients: see above.
            spared: which tensors are left as they are. Empty: none.
        """
        ...

    def release(self) -> None:
        """Release the gradients. Nothing can be rolled back any more."""
        ...


@dataclass
class _Step:
    """One tensor's step, and what was done to its residue in it.

    accumulated: the beta of its accumulation. 0: there was no accumulation.
    taken: what its values were taken with. None: no values were taken.
    """

    slot: TensorSlot
    grad: torch.Tensor
    frozen: bool
    accumulated: float = 0.0
    taken: Taken | None = None


class TorchKernel:
    """Plain torch, for any device, dtype and way to choose.

    It is used if there is no compiler, and for tensors that the other kernels do not know.
    """

    def __init__(self, slots: Sequence[TensorSlot], grad_dtypes: Sequence[torch.dtype]) -> None:
        self._slots = slots
        self._steps: list[_Step] = []
        self._scale = 1.0

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        self._steps = [_Step(*own) for own in zip(self._slots, grads, frozen, strict=True)]
        self._scale = scale

    def choose(self, extra: float, chosen: torch.Tensor) -> None:
        for step in self._steps:
            g, _ = usable(step.grad, step.slot.residue, self._scale)
            _choose(step.slot, g, extra, chosen)

    def take_and_accumulate(
        self, beta: float, extra: float, wire: Wire, chosen: torch.Tensor | None = None
    ) -> Count:
        bad: Count = 0
        for step in self._steps:
            slot, residue, part = step.slot, step.slot.residue, step.slot.values(wire.values)
            g, n_bad = usable(step.grad, residue, self._scale)
            bad = bad + n_bad
            if step.frozen:
                part.zero_()
            else:
                positions = _checked_positions(slot, wire.offsets)
                value = sendable(residue[positions], g[positions], extra)
                finite = value.isfinite()
                value.masked_fill_(~finite, 0)
                if slot.levels:
                    value = integers_of(value, slot.scales(wire.offsets), slot.levels)
                part.copy_(value)
                residue[positions] -= _sent(slot, wire) * beta
                step.taken = beta, wire
                residue.add_(g * beta)
                step.accumulated = beta
                bad = bad + (finite.numel() - finite.count_nonzero())
            if chosen is not None:
                _choose(slot, g, extra, chosen)
        return bad

    def scatter(
        self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, averages: torch.Tensor
    ) -> None:
        for slot, output in zip(self._slots, outputs, strict=True):
            kind = torch.float64 if output.dtype == torch.float64 else torch.float32
            positions = _checked_positions(slot, offsets)
            output.zero_()
            scaled = slot.values(averages).to(kind) * (1 / self._scale)
            output[positions] = scaled.to(output.dtype)

    def roll_back(self, keep_gradients: bool = False, spared: Sequence[bool] = ()) -> None:
        for step, is_spared in zip(self._steps, spared or [False] * len(self._steps), strict=True):
            if is_spared:
                continue
            slot, residue = step.slot, step.slot.residue
            if step.taken is not None:
                beta, wire = step.taken
                positions = positions_of(slot.geometry, slot.offsets(wire.offsets))
                residue[positions] += _sent(slot, wire) * beta
                step.taken = None
            if step.accumulated and not keep_gradients:
                g, _ = usable(step.grad, residue, self._scale)
                residue.sub_(g.mul_(step.accumulated))
            step.accumulated = 0.0

    def release(self) -> None:
        self._steps = []


def sendable(m: torch.Tensor, g: torch.Tensor, extra: float) -> torch.Tensor:
    """v: m + g, and `extra` times m besides, where m and g do not have opposite signs."""
    return m + g + torch.where(m * g >= 0, extra * m, 0.0)


def _choose(slot: TensorSlot, g: torch.Tensor, extra: float, chosen: torch.Tensor) -> None:
    """Chosen <- the winners of |m + g|, and the scales of integers there."""
    choose_by_torch(slot.residue + g, slot.geometry, slot.offsets(chosen))
    if slot.levels:
        positions = positions_of(slot.geometry, slot.offsets(chosen))
        values = sendable(slot.residue[positions], g[positions], extra)
        slot.scales(chosen).copy_(scales_of(values, slot.levels))


def scales_of(values: torch.Tensor, levels: int) -> torch.Tensor:
    """The scales (blocks,) of the leader's values (k,), as in reference.scales."""
    size = torch.where(values.isfinite(), values.abs().double(), 0.0)
    padded = torch.nn.functional.pad(size, (0, -size.numel() % BLOCK)).view(-1, BLOCK)
    counts = torch.full((len(padded),), float(BLOCK), dtype=torch.float64, device=size.device)
    counts[-1:] -= padded.numel() - size.numel()
    mean = padded.sum(1) / (counts * scale_divisor(levels))
    short = mean.clamp_max(torch.finfo(torch.float32).max).float()
    short = (short.view(torch.int32) & -0x10000).view(torch.float32)
    return torch.where(short >= SMALLEST_SCALE, short, 0.0)


def integers_of(values: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """Values (k,) as integers (k,) of the values' dtype, as in reference.integers."""
    per_scale = torch.where(scales > 0, 2 / scales.to(values.dtype), 0.0)
    halves = scale_blocks_(values.abs(), per_scale).clamp_max_(2 * levels).int()
    return torch.copysign(((halves + 1) >> 1).to(values.dtype), values)


def scale_blocks_(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply values (k,) by the scale of their block, in place."""
    cut = values.numel() // BLOCK * BLOCK
    values[:cut].view(-1, BLOCK).mul_(scales[: cut // BLOCK, None])
    if cut < values.numel():
        values[cut:].mul_(scales[-1])
    return values


def scale_numbers(counts: Sequence[int]) -> torch.Tensor:
    """(sum of counts,) int32, on the CPU: the index of each value's scale among all scales.

    Args:
        counts: the k of each tensor. The tensors' scales lie one after the other.
    """
    lengths = [min(BLOCK, k - first) for k in counts for first in range(0, k, BLOCK)]
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
    return numbers.repeat_interleave(torch.tensor(lengths, device="cpu"))


def _sent(slot: TensorSlot, wire: Wire) -> torch.Tensor:
    """What this rank sent (k,), in its residue's dtype."""
    sent = slot.values(wire.values).to(slot.residue.dtype, copy=True)
    return scale_blocks_(sent, slot.scales(wire.offsets)) if slot.levels else sent


def _checked_positions(slot: TensorSlot, offsets: torch.Tensor) -> torch.Tensor:
    """The flat positions (k,) that a tensor's offsets stand for.

    With exact selection, raises RuntimeError if a position lies outside of the tensor or occurs
    twice. Only the CPU checks this, because elsewhere the check would wait for the device.
    """
    own = slot.offsets(offsets)
    checks = own.device.type == "cpu" and isinstance(slot.geometry, Positions)
    if checks and not slot.geometry.fit(own.numpy()):
        raise RuntimeError(native.OFFSETS_OUTSIDE)
    return positions_of(slot.geometry, own)


def choose_by_torch(accumulator: torch.Tensor, geometry: Lanes, offsets: torch.Tensor) -> None:
    """offsets (k,) <- the winners of |accumulator| (N,).

    The winner of a lane is its largest, and the first of equals. With exact selection, the winners
    are the k largest of all, in ascending order.
    """
    if isinstance(geometry, Positions):
        offsets.copy_(largest(accumulator, geometry.k))
        return
    size, lane = accumulator.abs(), 0
    for elements, groups, width in geometry.groups():
        block = size[elements]
        rows = -(-block.numel() // (groups * width))
        padding = groups * width * rows - block.numel()
        if padding:
            block = torch.cat([block, block.new_full((padding,), -1)])
        winners = block.view(groups, rows, width).argmax(1).view(-1)
        offsets[lane : lane + groups * width] = winners
        lane += groups * width


class NativeKernel:
    """The C kernel (native/lanes.c), for CPU tensors of lanes.

    Each move is one call. It is made for all tensors or refused for all, and needs no Python.
    """

    def __init__(self, slots: Sequence[TensorSlot], grad_dtypes: Sequence[torch.dtype]) -> None:
        self._library = native.library()
        self._slots = slots
        self._table = np.zeros(len(slots), native.TENSOR)
        for row, slot, dtype in zip(self._table, slots, grad_dtypes, strict=True):
            lanes = slot.geometry
            row["residue"], row["dtype"] = slot.residue.data_ptr(), native.DTYPES[dtype_name(dtype)]
            row["numel"], row["k"] = lanes.numel, lanes.k
            row["width"], row["rows"] = lanes.width, lanes.rows
            row["offset_width"] = lanes.offset_dtype.itemsize
            row["offsets_at"], row["values_at"] = slot.offsets_at, slot.values_at
            row["levels"], row["scales_at"] = slot.levels, slot.scales_at
        self._tensors = self._table.ctypes.data, len(slots)
        self._grads: Sequence[torch.Tensor] = ()
        self._scale = 1.0
        self._taken: Taken | None = None

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        self._table["grad"] = [grad.data_ptr() for grad in grads]
        self._table["frozen"] = frozen
        self._grads, self._scale = grads, scale
        self._taken = None

    def release(self) -> None:
        self._grads, self._taken = (), None

    def choose(self, extra: float, chosen: torch.Tensor) -> None:
        self._library.scalecom_choose(*self._tensors, self._scale, extra, chosen.data_ptr())

    def take_and_accumulate(
        self, beta: float, extra: float, wire: Wire, chosen: torch.Tensor | None = None
    ) -> int:
        arguments = beta, self._scale, extra, *_addresses(wire)
        to = None if chosen is None else chosen.data_ptr()
        move = self._library.scalecom_take_and_accumulate
        bad = native.checked(move(*self._tensors, *arguments, to))
        self._taken = beta, wire
        return bad

    def scatter(
        self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, averages: torch.Tensor
    ) -> None:
        grads = self._table["grad"].copy()
        self._table["grad"] = [output.data_ptr() for output in outputs]
        arguments = 1 / self._scale, offsets.data_ptr(), averages.data_ptr()
        try:
            native.checked(self._library.scalecom_scatter(*self._tensors, *arguments))
        finally:
            self._table["grad"] = grads

    def roll_back(self, keep_gradients: bool = False, spared: Sequence[bool] = ()) -> None:
        if self._taken is not None:
            if spared:
                self._table["frozen"] |= np.array(spared)
            beta, wire = self._taken
            arguments = beta, self._scale, *_addresses(wire), keep_gradients
            native.checked(self._library.scalecom_roll_back(*self._tensors, *arguments))
            self._taken = None


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name outside of torch: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def usable(grad: torch.Tensor, residue: torch.Tensor, scale: float) -> tuple[torch.Tensor, Count]:
    """scale*g in the residue's dtype, with zero for bad elements, and the number of bad elements.

    The tensor is new.
    """
    g = grad.to(residue.dtype, copy=True)
    if scale != 1:
        g.mul_(scale)
    if g.device.type == "cpu" and g.numel():
        # The usual case is quick: if the smallest and the largest are good, all are.
        low, high = torch.aminmax(g)
        if float(low) >= -limit_of(g.dtype) and float(high) <= limit_of(g.dtype):
            return g, 0
    good = g.abs() <= limit_of(residue.dtype)
    return g.masked_fill_(~good, 0), good.numel() - good.count_nonzero()


def add_usable(grad: torch.Tensor, residue: torch.Tensor, scale: float, out: torch.Tensor) -> Count:
    """out <- residue + scale*g, with zero for bad elements. Returns the number of bad elements."""
    if grad.device.type == "cpu" and grad.dtype == residue.dtype and scale == 1 and grad.numel():
        # The usual case needs no copies: if the smallest and the largest are good, all are.
        low, high = torch.aminmax(grad)
        limit = limit_of(residue.dtype)
        if float(low) >= -limit and float(high) <= limit:
            torch.add(grad, residue, out=out)
            return 0
    g, bad = usable(grad, residue, scale)
    torch.add(g, residue, out=out)
    return bad


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the k largest magnitudes, in ascending order; the first of equals.

    They are the same on every device, although topk itself promises no order.
    """
    size = values.abs()
    smallest = size.topk(k, sorted=False).values.min()
    above = (size > smallest).nonzero().view(-1)
    equal = (size == smallest).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, equal]).sort().values


@functools.lru_cache(maxsize=1024)
def _starts_and_strides(
    geometry: Lanes, device: torch.device, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    starts, strides = geometry.starts_and_strides()
    return (
        torch.from_numpy(np.ascontiguousarray(starts)).to(device),
        torch.from_numpy(np.ascontiguousarray(strides)).to(device),
    )


def positions_of(geometry: Lanes, offsets: torch.Tensor) -> torch.Tensor:
    """The flat positions (k,), int64, that offsets (k,) stand for."""
    device = offsets.device
    starts, strides = _starts_and_strides(geometry, device, stream_id(device))
    return starts + offsets.long() * strides


def _addresses(wire: Wire) -> tuple[int, int]:
    return wire.offsets.data_ptr(), wire.values.data_ptr()
