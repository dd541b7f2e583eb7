"""Quantisation with error feedback: every element travels, in few bits."""

from __future__ import annotations

from typing import Any

from scalecom_hvd.agreement import Settings
from scalecom_hvd.exchange.methods.base import BucketCollectives, BucketStep, Method, State, Step
from scalecom_hvd.exchange.methods.quantised_values import average_at
from scalecom_hvd.exchange.quantisers import BLOCK, QSGD


class ECQSGD(Method):
    """Error-compensated quantised SGD (Wu et al., 2018, arXiv 1806.08054).

    All of the error is fed back (the paper's alpha = beta = 1). With s = 2**(bits-1) - 1, an
    element becomes one of 2s + 1 levels of the largest magnitude in its block of 512. It is rounded
    up or down at random, so that it is right on average. The rounding error stays in the residue.

    Traffic: (n-1) N values of `bits` bits. They are gathered, since Horovod sums nothing narrower
    than 16 bits. If gathering is no less traffic than dense, which is so from n * bits = 64 on, the
    rounded values are summed as they are.

    Args:
        bits: 2, 4 or 8.
        seed: the seed of the rounding, which differs from rank to rank.
        **fields: fields of ScaleComConfig. rate and rates only say which tensors are quantised:
            those with a rate above 1. leader, lookahead and selection mean nothing here.

    Raises:
        ValueError: `bits` is another number, or a setting means nothing here.
    """

    uses = ()
    sends_all = True

    def __init__(self, *, bits: int = 4, seed: int = 0, **fields: Any) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(
                f"bits must be 2, 4 or 8, so that values fill whole bytes, not {bits!r}"
            )
        super().__init__(**fields)
        # As in the paper, values are not scaled down, however few levels there are.
        self.quantiser = QSGD(2 ** (bits - 1) - 1, block=BLOCK, scaled=False, seed=seed)
        self.bits, self.seed = bits, int(seed)

    @property
    def settings(self) -> Settings:
        """What ranks must have in common besides the config."""
        return {"method": type(self).__name__, "bits": self.bits, "seed": self.seed}

    def step(self, bucket: BucketStep, collectives: BucketCollectives, state: State) -> Step[None]:
        """Round all accumulators, and average them."""
        everything, counts = slice(None), [len(bucket.accumulators)]
        yield from average_at(bucket, collectives, everything, self.quantiser, counts)
