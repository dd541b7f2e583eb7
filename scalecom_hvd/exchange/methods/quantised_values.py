"""Quantises values of a bucket, and exchanges them between ranks, for methods with few bits."""

from __future__ import annotations

from collections.abc import Sequence

from scalecom_hvd.exchange.bucket_step import BucketStep, Places
from scalecom_hvd.exchange.collectives import Step
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.quantisers import Quantiser


def average_at(
    bucket: BucketStep,
    collectives: BucketCollectives,
    places: Places,
    quantiser: Quantiser,
    everyone: Sequence[Places] | None = None,
) -> Step[None]:
    """Average the accumulators at indices that all ranks know.

    The bucket sends and receives what the quantiser makes of these values. They are gathered or
    summed, whichever is less traffic.

    Args:
        places: the indices of this rank.
        everyone: the indices of each rank, so that values are gathered. None: all have the same.
    """
    values, counts = bucket.sendable(places), bucket.counts
    payload = quantiser.pack(values, counts)
    sent = quantiser.unpack(payload, values, counts)
    bucket.send(places, sent)
    if everyone is not None or quantiser.is_gathered(payload, sent, collectives.size):
        gathered = yield from collectives.gather(payload, "values")
        for at, theirs in zip(everyone or [places] * len(gathered), gathered, strict=True):
            bucket.receive(at, quantiser.unpack(theirs, sent, counts) * collectives.share)
    else:
        average = yield from collectives.average(sent, "values")
        bucket.receive(places, average)
