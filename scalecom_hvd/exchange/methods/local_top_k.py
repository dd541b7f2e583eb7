"""Local top-k with error feedback: every rank sends its own largest values to all others."""

from __future__ import annotations

import torch

from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import Step
from scalecom_hvd.exchange.methods.base import BucketCollectives, Method, State
from scalecom_hvd.exchange.methods.quantised_values import rounded


class LocalTopK(Method):
    """Each rank's own choice, joined by an all-gather (Aji and Heafield, 2017, arXiv 1704.05021).

    It chooses by lanes or exactly (`selection`). It is not the same as Deep Gradient Compression,
    which adds momentum correction.

    Traffic: (n-1) times k values and offsets, which grows with the number of ranks n: it is the
    build-up that ScaleCom avoids.

    Args:
        quantiser: of the values, None or one of quantisers.py; with Sign it is Qsparse's SignTop-k
            (Basu et al., 2019, arXiv 1906.02367).
        **fields: of ScaleComConfig; leader, lookahead and wire_dtype mean nothing here.
    """

    takes_quantiser = always_gathers = True

    def step(self, bucket: Bucket, collectives: BucketCollectives, state: State) -> Step[None]:
        """Choose, send to all, add up."""
        offsets = bucket.choose()
        places, counts = bucket.places_at(offsets), bucket.counts
        values = bucket.sendable(places)
        payload, sent = rounded(self.quantiser, values, counts, collectives)
        bucket.send(places, sent)
        # Values first: they are viewed as words, and so must begin on one.
        everyone = yield from collectives.gather(torch.cat([payload, offsets]), "chosen")
        for theirs in everyone:
            at = bucket.places_at(theirs[len(payload) :].clone())
            received = self.quantiser.unpack(theirs[: len(payload)], sent, counts)
            bucket.receive(at, received * collectives.share)


def pack(values: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Values, then bytes, in one buffer of bytes."""
    return torch.cat([values.view(torch.uint8), more])


def unpack(payload: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values, as many and of the dtype as in `like`, and the bytes after them."""
    cut = like.numel() * like.element_size()
    return payload[:cut].view(like.dtype), payload[cut:]
