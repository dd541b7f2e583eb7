"""What the oracle does for a PyTorch compressor, with the random numbers that it draws.

Every test that compares a compressor with the oracle uses this.
"""

import torch
from oracles import methods as oracle

from scalecom_hvd import exchange as hvd
from scalecom_hvd.exchange.methods.random_k import draw, generator


class Sign(hvd.Quantiser):
    """A quantiser as a user writes it: the sign, times the mean magnitude in the block."""

    bits = 1

    def __init__(self, block=512):
        self.block = block

    def quantise(self, blocks, counts):
        # Summed in float64, so that the order of summands does not matter.
        scales = blocks.abs().double().sum(1) / counts
        return scales.to(blocks.dtype)[:, None], -(blocks < 0).to(torch.int8)

    def restore(self, scales, levels):
        return torch.where(levels < 0, -scales, scales)


def rounding(quantiser):
    """The oracle's function for a quantiser, or None if values are not rounded."""
    if isinstance(quantiser, Sign):
        return oracle.sign(quantiser.block)
    if isinstance(quantiser, hvd.BinMeans):
        return oracle.bin_means(quantiser.block)
    return None


def sending(compressor):
    """The oracle's function for a method.

    A quantiser may round the values of LocalTopK. ScaleCom rounds them itself in few bits.
    """
    if compressor.config.levels:
        return oracle.few_bits(compressor.config.levels)

    def places(bucket):
        random = generator(compressor.seed, bucket.step, bucket.number)
        return [draw(lanes, random).numpy() for lanes, _ in bucket.tensors]

    rules = {
        hvd.ScaleCom: oracle.leaders,
        hvd.LocalTopK: oracle.own,
        hvd.RandomK: oracle.drawn(places),
    }
    (chosen,) = [rule for kind, rule in rules.items() if isinstance(compressor, kind)]
    return oracle.sending(chosen, rounding(getattr(compressor, "quantiser", None)))
