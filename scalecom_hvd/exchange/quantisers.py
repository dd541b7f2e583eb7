"""Quantisers: chosen values travel in 1 to 8 bits, and what rounding changes stays in the residue.

LocalTopK gathers the bytes, and so may a method of one's own. They cannot be summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from scalecom_hvd.exchange.devices import uploaded

# How many values share a scale, unless the quantiser asks for fewer. A scale of 32 bits adds a
# sixteenth of a bit to each value.
BLOCK = 512

Counts = Sequence[int]  # how many of the values belong to each tensor
Rounded = tuple[torch.Tensor, torch.Tensor]  # scales and levels


class Quantiser:
    """Turns values (K,), float32 or float64, into bytes, and bytes into values of the same dtype.

    A subclass defines `quantise` and `restore`, which say what a block becomes.

    Attributes:
        bits: bits per value: 1, 2, 4 or 8.
        block: how many values of one tensor share scales, which travel in the values' dtype.
        scales: how many scales a block has.
    """

    bits: int
    block: int = BLOCK
    scales: int = 1

    def quantise(self, blocks: torch.Tensor, counts: torch.Tensor) -> Rounded:
        """Turn blocks of values into scales and levels.

        Args:
            blocks: the values (blocks, block).
            counts: (blocks,), how many values each block has. The rest of a block is zero.

        Returns:
            Scales (blocks, scales), and levels (blocks, block), int8, that fit into `bits` bits.
        """
        raise NotImplementedError

    def restore(self, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """The values (blocks, block) of scales (blocks, scales) and levels (blocks, block)."""
        raise NotImplementedError

    def pack(self, values: torch.Tensor, counts: Counts) -> torch.Tensor:
        """Turn values (K,) into the bytes that travel, uint8: scales, then levels."""
        blocks = _spread(values, counts, self.block)
        parts = [np.minimum(self.block, n - np.arange(0, n, self.block)) for n in counts]
        lengths = uploaded(np.concatenate(parts).astype(np.float64), values.device)
        scales, levels = self.quantise(blocks, lengths)
        # Both travel as bytes, which do not tell a dtype.
        expected = ((len(blocks), self.scales), values.dtype), (blocks.shape, torch.int8)
        given = (scales.shape, scales.dtype), (levels.shape, levels.dtype)
        if given != expected:
            raise ValueError(
                f"{type(self).__name__}.quantise gave scales and levels of {given}, but they must "
                f"be of {expected}"
            )
        own = scales.reshape(-1).view(torch.uint8)
        return torch.cat([own, pack_levels(_collect(levels, counts), self.bits)])

    def unpack(self, payload: torch.Tensor, like: torch.Tensor, counts: Counts) -> torch.Tensor:
        """The values, like those (K,) that `pack` was given, that its bytes stand for."""
        n_blocks = sum(-(-count // self.block) for count in counts)
        cut = n_blocks * self.scales * like.element_size()
        scales = payload[:cut].view(like.dtype).view(-1, self.scales)
        levels = unpack_levels(payload[cut:], self.bits)[: like.numel()]
        return _collect(self.restore(scales, _spread(levels, counts, self.block)), counts)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class BinMeans(Quantiser):
    """The mean of a value's bin, in two bits: its sign, and whether it is large in the block.

    A value is large if its magnitude is above the block's mean. The four means travel as scales. As
    in SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706), levels follow the values, but the bins are
    not the paper's.
    """

    bits, scales = 2, 4

    def __init__(self, *, block: int = BLOCK) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be a whole number of values, at least 1, not {block!r}")
        self.block = block

    def quantise(self, blocks: torch.Tensor, counts: torch.Tensor) -> Rounded:
        # In float64, no sum overflows, and the order of summands does not matter.
        size = blocks.abs().double()
        large = (size > (size.sum(1) / counts)[:, None]).to(torch.int8)
        levels = torch.where(blocks < 0, -1 - large, large)
        inside = torch.arange(blocks.shape[1], device=blocks.device) < counts[:, None]
        means = []
        for level in (0, 1, -2, -1):  # in the order of their two bits
            members = (levels == level) & inside
            total = torch.where(members, size, 0.0).sum(1)
            means.append(total / members.sum(1).clamp_min(1) * (-1 if level < 0 else 1))
        return torch.stack(means, 1).to(blocks.dtype), levels

    def restore(self, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        return scales.gather(1, (levels & 3).long())


class Unrounded(Quantiser):
    """Leaves values as they are. quantiser=None stands for it."""

    def pack(self, values: torch.Tensor, counts: Counts) -> torch.Tensor:
        return values.view(torch.uint8)

    def unpack(self, payload: torch.Tensor, like: torch.Tensor, counts: Counts) -> torch.Tensor:
        return payload.view(like.dtype)


def quantiser_of(value: Quantiser | type[Quantiser] | None) -> Quantiser:
    """The Quantiser that a user's quantiser= stands for.

    Raises:
        TypeError: it is no Quantiser, class of one, or None, which leaves values as they are.
        ValueError: the quantiser's bits do not fill bytes.
    """
    if value is None:
        return Unrounded()
    if isinstance(value, type) and issubclass(value, Quantiser):
        value = value()
    if isinstance(value, Quantiser):
        if value.bits not in (1, 2, 4, 8) and type(value).pack is Quantiser.pack:
            raise ValueError(
                f"{type(value).__name__}.bits must be 1, 2, 4 or 8, so that values fill whole "
                f"bytes, not {value.bits!r}"
            )
        return value
    raise TypeError(
        f"quantiser must be hvd.BinMeans(), an hvd.Quantiser of your own, or None, not {value!r}"
    )


def pack_levels(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack levels of 1, 2, 4 or 8 bits into bytes, the first in the lowest bits.

    Levels are int8, and fields two's complement. Zeros fill the last byte.
    """
    each = 8 // bits
    fields = levels.view(torch.uint8) & (2**bits - 1)
    fields = torch.nn.functional.pad(fields, (0, -fields.numel() % each)).view(-1, each)
    packed = fields[:, 0].clone()
    for i in range(1, each):
        packed |= fields[:, i] << (bits * i)
    return packed


def unpack_levels(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_levels`: int8, as many as the bytes hold."""
    # Shifting signed bytes left, then right, extends the sign.
    shifts = [8 - bits - i for i in range(0, 8, bits)]
    fields = torch.stack([packed << shift for shift in shifts], 1)
    return fields.view(torch.int8).view(-1) >> (8 - bits)


def _spread(values: torch.Tensor, counts: Counts, block: int) -> torch.Tensor:
    """Values, or levels, (K,) as (blocks, block). Zeros fill the last block of each tensor."""
    pad = torch.nn.functional.pad
    parts = [pad(own, (0, -own.numel() % block)) for own in values.split(list(counts))]
    return torch.cat(parts).view(-1, block)


def _collect(blocks: torch.Tensor, counts: Counts) -> torch.Tensor:
    """The inverse of `_spread`."""
    parts = blocks.split([-(-count // blocks.shape[1]) for count in counts])
    flat = [own.reshape(-1)[:count] for own, count in zip(parts, counts, strict=True)]
    return torch.cat(flat)
