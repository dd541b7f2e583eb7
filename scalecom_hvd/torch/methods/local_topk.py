"""Local top-k with error feedback: every rank sends its own largest values to all others, so the average gets denser with every rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.quantisers import Quantiser, rounded
from scalecom_hvd.torch.transport import Wait


class LocalTopK(Method):
    """Each rank's own choice, by lanes or exact (`selection`), joined by an all-gather (Aji and Heafield, 2017, arXiv 1704.05021).

    quantiser: of the values, None or one of quantisers.py; with Sign it is Qsparse's SignTop-k (Basu et al., 2019, arXiv 1906.02367).
    fields: of ScaleComConfig; leader, lookahead and wire_dtype mean nothing here. It is not the same as Deep Gradient Compression, which
    adds momentum correction.
    Traffic: (n-1) times k values and offsets, which grows with the number of ranks n: it is the build-up that ScaleCom does without.
    """

    rounds = always_gathers = True

    def __init__(self, *, quantiser: Quantiser | None = None, **fields: Any) -> None:
        super().__init__(quantiser=quantiser, **fields)

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        offsets = bucket.choose()
        places = bucket.places_at(offsets)
        payload, sent = rounded(self.quantiser, bucket.flat[places], bucket.counts, bucket, channel)
        bucket.send(places, sent)
        # Values first: they are viewed as words, and so must begin on one.
        everyone = yield from channel.gather(torch.cat([payload, offsets]), "chosen")
        for theirs in everyone:
            values, at = theirs[: len(payload)], theirs[len(payload) :].clone()
            bucket.receive(bucket.places_at(at), self.quantiser.unpack(values, sent, bucket.counts) * channel.share)


def pack(values: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Values, then bytes, in one buffer of bytes."""
    return torch.cat([values.view(torch.uint8), more])


def unpack(payload: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values, as many and of the dtype as in `like`, and the bytes after them."""
    cut = like.numel() * like.element_size()
    return payload[:cut].view(like.dtype), payload[cut:]
