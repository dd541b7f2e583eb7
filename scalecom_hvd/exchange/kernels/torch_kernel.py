"""The kernel in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.kernels.base import (
    Count,
    Taken,
    TensorSlot,
    Wire,
    largest,
    positions_of,
    scale_blocks_,
    usable,
)
from scalecom_hvd.integers import BLOCK, SMALLEST_SCALE, scale_divisor
from scalecom_hvd.lanes import Lanes, Positions


@dataclass
class _Step:
    """One tensor's step, and what was done to its residue in it."""

    slot: TensorSlot
    grad: torch.Tensor
    frozen: bool
    accumulated: float = 0.0  # the beta of its accumulation; 0: there was none
    taken: Taken | None = None  # what its values were taken with; None: none were taken


class TorchKernel:
    """For any device, dtype and way to choose: what serves tensors that no other kernel knows."""

    def __init__(self, slots: Sequence[TensorSlot], grad_dtype: torch.dtype) -> None:
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
                positions = _checked_positions(slot, wire.offsets)
                residue[positions] += _sent(slot, wire) * beta
                step.taken = None
            if step.accumulated and not keep_gradients:
                g, _ = usable(step.grad, residue, self._scale)
                residue.sub_(g * step.accumulated)
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
        positions = _checked_positions(slot, chosen)
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


def _sent(slot: TensorSlot, wire: Wire) -> torch.Tensor:
    """What this rank sent (k,), in its residue's dtype."""
    sent = slot.values(wire.values).to(slot.residue.dtype, copy=True)
    return scale_blocks_(sent, slot.scales(wire.offsets)) if slot.levels else sent


def _checked_positions(slot: TensorSlot, offsets: torch.Tensor) -> torch.Tensor | slice:
    """The flat positions (k,) that a tensor's offsets stand for; a slice if these are all.

    With exact selection, raises RuntimeError if a position lies outside of the tensor or occurs
    twice. Only the CPU checks this, because elsewhere the check would wait for the device.
    """
    if not slot.geometry.offset_width:
        return slice(None)
    own = slot.offsets(offsets)
    checks = own.device.type == "cpu" and isinstance(slot.geometry, Positions)
    if checks and not slot.geometry.fit(own.numpy()):
        raise RuntimeError(native.OFFSETS_OUTSIDE)
    return positions_of(slot.geometry, own)


def choose_by_torch(accumulator: torch.Tensor, geometry: Lanes, offsets: torch.Tensor) -> None:
    """offsets (k,) <- the winners of |accumulator| (N,), as in reference.select."""
    if isinstance(geometry, Positions):
        offsets.copy_(largest(accumulator, geometry.k))
        return
    if not geometry.offset_width:
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
