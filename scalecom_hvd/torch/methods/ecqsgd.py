"""Quantisation with error feedback: every element travels, in few bits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch.nn.functional import pad

from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.methods.base import Method, generator
from scalecom_hvd.torch.methods.local_topk import pack, unpack
from scalecom_hvd.torch.transport import Wait

# Elements that share a scale.
CHUNK = 512


class ECQSGD(Method):
    """Error-compensated quantised SGD (Wu et al., 2018, arXiv 1806.08054), with all of the error fed back (the paper's alpha = beta = 1).

    bits: 2, 4 or 8. An element becomes one of 2s + 1 levels, s = 2**(bits-1) - 1, of the largest magnitude in its chunk of 512, rounded up
    or down at random so that it is right on average; what rounding changed stays in the residue.
    seed: of the rounding, which differs from rank to rank.  fields: of ScaleComConfig; rate and rates only say, by being above 1, which
    tensors are quantised; leader, lookahead, wire_dtype and selection mean nothing.
    Traffic: (n-1) N bits, gathered, since Horovod sums nothing narrower than 16 bits: it grows with n, and is less than dense's while
    n bits < 64.
    """

    unused = (*Method.unused, "selection")
    sends_all = True

    def __init__(self, *, bits: int = 4, seed: int = 0, **fields: Any) -> None:
        super().__init__(**fields)
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, which fill bytes, not {bits!r}")
        self.bits, self.seed = bits, int(seed)

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"bits": self.bits, "seed": self.seed}

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        chunks = pad(bucket.flat, (0, -len(bucket.flat) % CHUNK)).view(-1, CHUNK)
        random = torch.rand(chunks.shape, generator=generator(self.seed, bucket.step, channel.bucket, channel.position))
        scales, levels = quantise(chunks, self.bits, random.to(chunks))
        bucket.send(slice(None), dequantise(scales, levels, self.bits).view(-1)[: len(bucket.flat)])
        everyone = yield from channel.gather(pack(scales, pack_levels(levels, self.bits)), "levels")
        for payload in everyone:
            theirs, packed = unpack(payload, scales)
            values = dequantise(theirs, unpack_levels(packed, self.bits).view(levels.shape), self.bits)
            bucket.receive(slice(None), values.view(-1)[: len(bucket.flat)] * channel.share)


def quantise(chunks: torch.Tensor, bits: int, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each chunk's largest magnitude (chunks,), and levels from -s to s, int8. random: uniform in [0, 1)."""
    s = 2 ** (bits - 1) - 1
    scales = chunks.abs().amax(1)
    # A chunk of zeros has scale 0, and one of denormals a scale by which nothing can be divided.
    safe = scales.clamp_min(torch.finfo(chunks.dtype).tiny)
    levels = (chunks / safe[:, None] * s + random).floor().clamp_(-s, s)
    return scales, levels.to(torch.int8)


def dequantise(scales: torch.Tensor, levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Values (chunks, CHUNK) of levels, in the dtype of the scales."""
    return levels.to(scales.dtype) / (2 ** (bits - 1) - 1) * scales[:, None]


def pack_levels(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Several levels in a byte, two's complement, the first in the lowest bits."""
    each = 8 // bits
    fields = (levels.view(-1, each) & (2**bits - 1)).to(torch.uint8)
    packed = fields[:, 0].clone()
    for i in range(1, each):
        packed |= fields[:, i] << (bits * i)
    return packed


def unpack_levels(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_levels`: int8."""
    shifts = torch.arange(0, 8, bits, device=packed.device)
    fields = (packed[:, None].to(torch.int16) >> shifts).to(torch.int16) & (2**bits - 1)
    return torch.where(fields >= 2 ** (bits - 1), fields - 2**bits, fields).to(torch.int8).view(-1)
