"""Quantises values of a bucket, and exchanges them between ranks, for methods with few bits."""

from __future__ import annotations

from scalecom_hvd.exchange.bucket_step import BucketStep, Places
from scalecom_hvd.exchange.collectives import Step
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.quantisers import Quantiser


def average_at(
    bucket: BucketStep,
    collectives: BucketCollectives,
    places: Places,
    quantiser: Quantiser,
) -> Step[None]:
    """Average the accumulators at indices that all ranks know.

    The bucket sends and receives what the quantiser makes of these values. They are gathered or
    summed, whichever is less traffic.
    """
    values, counts = bucket.sendable(places), bucket.counts
    payload = quantiser.pack(values, counts)
    sent = quantiser.unpack(payload, values, counts)
    bucket.send(places, sent)
    if quantiser.is_gathered(payload, sent, collectives.size):
        for theirs in (yield from collectives.gather(payload, "values")):
            bucket.receive(places, quantiser.unpack(theirs, sent, counts) * collectives.share)
    else:
        average = yield from collectives.average(sent, "values")
        bucket.receive(places, average)
