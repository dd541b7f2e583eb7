"""Quantises values of a bucket, and exchanges them between ranks, for methods with few bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scalecom_hvd.exchange.bucket_step import BucketStep, Places
from scalecom_hvd.exchange.collectives import Step
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.quantisers import Quantiser, generator


def rounded(
    quantiser: Quantiser,
    values: torch.Tensor,
    counts: Sequence[int],
    collectives: BucketCollectives,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that this rank sends for its values in this step, and the values they stand for."""
    numbers = quantiser.seed, collectives.step, collectives.bucket, collectives.position
    payload = quantiser.pack(values, counts, generator(*numbers))
    return payload, quantiser.unpack(payload, values, counts)


def average_at(
    bucket: BucketStep,
    collectives: BucketCollectives,
    places: Places,
    quantiser: Quantiser,
    counts: Sequence[int] | None = None,
) -> Step[None]:
    """Average the accumulators at indices that are the same on all ranks.

    The bucket sends and receives what the quantiser makes of these values. They are gathered or
    summed, whichever is less traffic.

    Args:
        counts: how many of the indices belong to each tensor. Default: as many as it chooses.
    """
    counts = bucket.counts if counts is None else counts
    values = bucket.sendable(places)
    payload, sent = rounded(quantiser, values, counts, collectives)
    bucket.send(places, sent)
    if quantiser.is_gathered(payload, sent, collectives.size):
        for theirs in (yield from collectives.gather(payload, "values")):
            average = quantiser.unpack(theirs, sent, counts) * collectives.share
            bucket.receive(places, average)
    else:
        average = yield from collectives.average(sent, "values")
        bucket.receive(places, average)
