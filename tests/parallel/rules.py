"""What the oracle does for a PyTorch compressor, with the random numbers that it draws.

Every test that compares a compressor with the oracle uses this.
"""

import torch
from oracles import methods as oracle

from scalecom_hvd import exchange as hvd
from scalecom_hvd.exchange.methods.random_k import draw
from scalecom_hvd.exchange.quantisers import generator


def uniform(compressor):
    """Random numbers in [0, 1) of a compressor's quantiser, as the oracle asks for them."""

    def give(bucket, worker, shape):
        return torch.rand(
            shape,
            generator=generator(compressor.quantiser.seed, bucket.step, bucket.number, worker),
        ).numpy()

    return give


def rounding(quantiser):
    """The oracle's function for a quantiser, or None if values are not rounded."""
    if isinstance(quantiser, hvd.QSGD):
        return oracle.qsgd(
            quantiser.levels,
            quantiser.block,
            quantiser.norm,
            1 + quantiser.variance if quantiser.scaled else 1.0,
        )
    if isinstance(quantiser, hvd.Sign):
        return oracle.sign(quantiser.block)
    if isinstance(quantiser, hvd.BinMeans):
        return oracle.bin_means(quantiser.block)
    return None


def sending(compressor):
    """The oracle's function for a method.

    A quantiser may round the values of ScaleCom, LocalTopK and RandomK. ScaleCom rounds them itself
    in few bits.
    """
    if compressor.config.levels:
        return oracle.few_bits(compressor.config.levels)

    def places(bucket, worker):
        random = generator(
            compressor.seed, bucket.step, bucket.number, *(() if compressor.shared else (worker, 0))
        )
        return [draw(lanes, random).numpy() for lanes, _ in bucket.tensors]

    rules = {
        hvd.ScaleCom: oracle.leaders,
        hvd.LocalTopK: oracle.own,
        hvd.RandomK: oracle.drawn(places),
    }
    (chosen,) = [rule for kind, rule in rules.items() if isinstance(compressor, kind)]
    return oracle.sending(chosen, rounding(compressor.quantiser), uniform(compressor))
