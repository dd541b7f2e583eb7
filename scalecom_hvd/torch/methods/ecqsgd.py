"""Quantisation with error feedback: every element travels, in few bits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.quantisers import CHUNK, QSGD, average_values
from scalecom_hvd.torch.transport import Wait


class ECQSGD(Method):
    """Error-compensated quantised SGD (Wu et al., 2018, arXiv 1806.08054), with all of the error fed back (the paper's alpha = beta = 1).

    bits: 2, 4 or 8. An element becomes one of 2s + 1 levels, s = 2**(bits-1) - 1, of the largest magnitude in its chunk of 512, rounded up
    or down at random so that it is right on average; what rounding changed stays in the residue.
    seed: of the rounding, which differs from rank to rank.  fields: of ScaleComConfig; rate and rates only say, by being above 1, which
    tensors are quantised; leader, lookahead, wire_dtype and selection mean nothing.
    Traffic: (n-1) N bits, gathered, since Horovod sums nothing narrower than 16 bits; where that is no less than dense's, from n bits = 64
    on, the rounded values are summed as they are.
    """

    unused = (*Method.unused, "selection")
    sends_all = True

    def __init__(self, *, bits: int = 4, seed: int = 0, **fields: Any) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, which fill bytes, not {bits!r}")
        super().__init__(**fields)
        # The paper's rounding: not scaled down, however few the levels.
        self.quantiser = QSGD(2 ** (bits - 1) - 1, chunk=CHUNK, scaled=False, seed=seed)
        self.bits, self.seed = bits, int(seed)

    @property
    def settings(self) -> dict[str, Any]:
        return {"method": type(self).__name__, "bits": self.bits, "seed": self.seed}

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        yield from average_values(bucket, channel, slice(None), self.quantiser, counts=[len(bucket.flat)])
