"""Local top-k with error feedback: every rank sends its own largest values to all others, so the average gets denser with every rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.transport import Wait


class LocalTopK(Method):
    """Each rank's own choice, by lanes or exact (`selection`), joined by an all-gather (Aji and Heafield, 2017, arXiv 1704.05021).

    fields: of ScaleComConfig; leader, lookahead and wire_dtype mean nothing here. It is not the same as Deep Gradient Compression, which
    adds momentum correction.
    Traffic: (n-1) times k values and offsets, which grows with the number of ranks n: it is the build-up that ScaleCom does without.
    """

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        offsets = bucket.choose()
        places = bucket.places_at(offsets)
        values = bucket.flat[places]
        bucket.send(places, values)
        everyone = yield from channel.gather(pack(values, offsets), "chosen")
        for payload in everyone:
            theirs, at = unpack(payload, values)
            bucket.receive(bucket.places_at(at), theirs * channel.share)


def pack(values: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Values, then bytes, in one buffer of bytes."""
    return torch.cat([values.view(torch.uint8), more])


def unpack(payload: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values, as many and of the dtype as in `like`, and the bytes after them."""
    cut = like.numel() * like.element_size()
    return payload[:cut].view(like.dtype), payload[cut:]
