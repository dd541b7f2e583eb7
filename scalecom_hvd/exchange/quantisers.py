"""Quantisers: chosen values travel in 1 to 8 bits, and what rounding changes stays in the residue.

methods/quantised_values.py exchanges the bytes, however values were chosen. Horovod sums nothing
narrower than 16 bits, so they are gathered, as long as that is less traffic. Each rank then sends
its k values of b bits, scales included, n - 1 times; summed, 32 bits 2 (n-1)/n times. So gathering
is less traffic while n b < 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from scalecom_hvd.exchange.devices import uploaded

# How many values share a scale, unless the quantiser asks for fewer. A scale of 32 bits adds a
# sixteenth of a bit to each value.
BLOCK = 512

Counts = Sequence[int]  # how many of the values belong to each tensor
Random = Callable[[], torch.Tensor]  # see Quantiser.quantise
Rounded = tuple[torch.Tensor, torch.Tensor]  # scales and levels


class Quantiser:
    """Turns values (K,), float32 or float64, into bytes, and bytes into values of the same dtype.

    A subclass defines `quantise` and `restore`, which say what a block becomes.

    Attributes:
        bits: bits per value: 1, 2, 4 or 8.
        block: how many values of one tensor share scales, which travel in the values' dtype.
        scales: how many scales a block has.
        seed: the seed of random rounding, which differs from rank to rank.
        rounds: whether values change at all.
    """

    rounds: bool = True
    bits: int
    block: int = BLOCK
    scales: int = 1
    seed: int = 0

    def is_gathered(self, payload: torch.Tensor, sent: torch.Tensor, ranks: int) -> bool:
        """Whether gathering `payload` (uint8) is less traffic than summing the values `sent`."""
        return self.rounds and ranks * payload.numel() < 2 * sent.numel() * sent.element_size()

    def quantise(self, blocks: torch.Tensor, counts: torch.Tensor, random: Random) -> Rounded:
        """Turn blocks of values into scales and levels.

        Args:
            blocks: the values (blocks, block).
            counts: (blocks,), how many values each block has. The rest of a block is zero.
            random: a function that returns uniform numbers in [0, 1), shaped like the blocks.

        Returns:
            Scales (blocks,), or (blocks, scales) if a block has several; and levels
            (blocks, block), int8, that fit into `bits` bits.
        """
        raise NotImplementedError

    def restore(self, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """The values (blocks, block) of scales (blocks, scales) and levels (blocks, block)."""
        raise NotImplementedError

    def pack(self, values: torch.Tensor, counts: Counts, random: torch.Generator) -> torch.Tensor:
        """Turn values (K,) into the bytes that travel, uint8: scales, then levels."""
        blocks = _spread(values, counts, self.block)
        parts = [np.minimum(self.block, n - np.arange(0, n, self.block)) for n in counts]
        lengths = uploaded(np.concatenate(parts).astype(np.float64), values.device)

        def uniform() -> torch.Tensor:
            return torch.rand(blocks.shape, generator=random, device="cpu").to(values)

        scales, levels = self.quantise(blocks, lengths, uniform)
        # Both travel as bytes, which do not tell a dtype.
        shape = lengths.shape if self.scales == 1 else (len(lengths), self.scales)
        expected = (shape, values.dtype), (blocks.shape, torch.int8)
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


class _InBlocks(Quantiser):
    """A quantiser that is told how many values share scales."""

    def __init__(self, *, block: int = BLOCK) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be a whole number of values, at least 1, not {block!r}")
        self.block = block


class QSGD(_InBlocks):
    """Rounds to 2s + 1 levels of the block's norm, up or down at random.

    From Alistarh et al., 2017, arXiv 1610.02132.

    Args:
        levels: s, at most 127. Levels travel in the 2, 4 or 8 bits that hold them.
        norm: the norm that the levels divide. "max": the block's largest magnitude, as in that
            paper's experiments. 2: the block's Euclidean norm.
        block: how many values share a norm (32 bits). None: 64 to 512, the most that keep the
            variance below the values' energy (see `variance`), or 64 if none do.
        scaled: whether values are divided by 1 + `variance`. This makes any s a contraction;
            without one, error feedback can grow without bound. It also makes what is sent smaller
            than right on average (Basu et al., 2019, section 2). None: only if variance >= 1.
        seed: the seed of the rounding.

    Raises:
        ValueError: an argument has a value that cannot work.
    """

    def __init__(
        self,
        levels: int = 7,
        *,
        norm: str | int = "max",
        block: int | None = None,
        scaled: bool | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(levels, bool) or not isinstance(levels, int) or not 1 <= levels <= 127:
            raise ValueError(
                f"levels must be a whole number from 1 to 127, not {levels!r}. More levels do not "
                "fit into 8 bits"
            )
        if norm not in ("max", 2):
            raise ValueError(f'norm must be "max" or 2, not {norm!r}')
        self.levels, self.norm, self.seed = levels, norm, int(seed)
        small = (size for size in (512, 256, 128, 64) if self._variance(size) < 1)
        super().__init__(block=next(small, 64) if block is None else block)
        self.scaled = scaled if scaled is not None else self.variance >= 1

    @property
    def bits(self) -> int:  # type: ignore[override]  # what s asks for, and nobody sets it
        """The fewest bits that hold the levels: 2, 4 or 8."""
        return next(bits for bits in (2, 4, 8) if 2 ** (bits - 1) > self.levels)

    @property
    def variance(self) -> float:
        """What E |Q(x) - x|^2 / |x|^2 is at most, for x in one block of d values, without `scaled`.

        norm 2: min(d / s^2, sqrt(d) / s) (Alistarh et al., lemma 3.1). norm "max": the worst x has
        one element at the maximum and all others at a share u of the first level, where it is
        (d-1) u (1-u) / (s^2 + (d-1) u^2); over all u that is at most
        (sqrt(1 + (d-1) / s^2) - 1) / 2.
        """
        return self._variance(self.block)

    def _variance(self, d: int) -> float:
        s = self.levels
        if self.norm == 2:
            return min(d / s**2, math.sqrt(d) / s)
        return (math.sqrt(1 + (d - 1) / s**2) - 1) / 2

    def quantise(self, blocks: torch.Tensor, counts: torch.Tensor, random: Random) -> Rounded:
        if self.norm == 2:
            # In float64, no square overflows, and the order of summands does not matter.
            norms = blocks.double().square().sum(1).sqrt()
            scales = norms.clamp_max(torch.finfo(blocks.dtype).max).to(blocks.dtype)
        else:
            scales = blocks.abs().amax(1)
        # A block of zeros has scale 0. Nothing can be divided by that, nor by the scale of a block
        # of denormals.
        divisors = scales.clamp_min(torch.finfo(blocks.dtype).tiny)
        shares = blocks / divisors[:, None] * self.levels
        levels = (shares + random()).floor().clamp_(-self.levels, self.levels)
        if self.scaled:  # divided by a tensor, for the reason that `restore` gives
            scales = scales / scales.new_full((), 1 + self.variance)
        return scales, levels.to(torch.int8)

    def restore(self, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        # By a tensor, because CUDA divides by a number by multiplying with its rounded inverse.
        return levels.to(scales.dtype) / scales.new_full((), self.levels) * scales


class Sign(_InBlocks):
    """The sign, in one bit, times the mean magnitude in the block of values.

    With a top-k choice, this is Qsparse's SignTop-k (Basu et al., 2019, arXiv 1906.02367, section
    2, with the 1-norm). Its rounding is not random, and wrong on average. Residues make up for
    that.
    """

    bits = 1

    def quantise(self, blocks: torch.Tensor, counts: torch.Tensor, random: Random) -> Rounded:
        # Summed in float64, so that the order of summands does not matter.
        scales = blocks.abs().double().sum(1) / counts
        return scales.to(blocks.dtype), -(blocks < 0).to(torch.int8)

    def restore(self, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        return torch.where(levels < 0, -scales, scales)


class BinMeans(_InBlocks):
    """The mean of a value's bin, in two bits: its sign, and whether it is large in the block.

    A value is large if its magnitude is above the block's mean. The four means travel as scales. As
    in SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706), levels follow the values, but the bins are
    not the paper's.
    """

    bits, scales = 2, 4

    def quantise(self, blocks: torch.Tensor, counts: torch.Tensor, random: Random) -> Rounded:
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

    bits, rounds = 32, False

    def pack(self, values: torch.Tensor, counts: Counts, random: torch.Generator) -> torch.Tensor:
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
        f"quantiser must be hvd.QSGD(levels=...), hvd.Sign(), hvd.BinMeans() or None, not {value!r}"
    )


def pack_levels(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack levels of 1, 2, 4 or 8 bits into bytes, the first in the lowest bits.

    Levels are int8, and fields two's complement. Zeros fill the last byte.
    """
    each = 8 // bits
    fields = levels.view(torch.uint8) & (2**bits - 1)
    if each == 1:
        return fields
    fields = torch.nn.functional.pad(fields, (0, -fields.numel() % each)).view(-1, each)
    packed = fields[:, 0].clone()
    for i in range(1, each):
        packed |= fields[:, i] << (bits * i)
    return packed


def unpack_levels(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_levels`: int8, as many as the bytes hold."""
    # Shifting signed bytes left, then right, extends the sign.
    shifts = [8 - bits - i for i in range(0, 8, bits)]
    fields = torch.stack([packed << shift for shift in shifts], 1) if bits < 8 else packed
    return fields.contiguous().view(torch.int8).view(-1) >> (8 - bits)


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


def generator(*numbers: int) -> torch.Generator:
    """A generator that draws the same wherever it gets the same numbers (seed, step, bucket)."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)
