"""Local top-k with error feedback: every rank sends its own largest values to all others."""

from __future__ import annotations

from typing import Any

import torch

from scalecom_hvd.agreement import Settings
from scalecom_hvd.config import checked_number
from scalecom_hvd.exchange.methods.base import BucketCollectives, BucketStep, Method, State, Step
from scalecom_hvd.exchange.quantisers import Quantiser, quantiser_of


class LocalTopK(Method):
    """Every rank sends its own choice, in an all-gather (Aji and Heafield, 2017, arXiv 1704.05021).

    A rank chooses by lanes or exactly (`selection`). The method is not Deep Gradient Compression,
    which adds momentum correction.

    Traffic: (n-1) times k values and offsets. It grows with the number of ranks n. This is the
    build-up that ScaleCom avoids.

    Args:
        quantiser: what rounds the values: None, or one of quantisers.py.
        decay: what residues are multiplied by before a gradient or change is added:
            `acc = decay * m + g` (SparseLoCo, Sarfi et al., 2025, arXiv 2508.15706). What waits
            long fades, and the part that fades is lost. A decay below 1 needs beta=1.
        average: over which ranks the values of an element are averaged: "all" ranks, or the
            "contributors", which sent a value other than zero for it. With "contributors", an
            element that one rank chose moves n times as far, so what is sent and kept no longer
            adds up to what came in.
        **fields: see `Method`.

    Raises:
        ValueError, TypeError: a setting cannot work.
    """

    def __init__(
        self,
        *,
        quantiser: Quantiser | type[Quantiser] | None = None,
        decay: float = 1.0,
        average: str = "all",
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        self.quantiser = quantiser_of(quantiser)
        if average not in ("all", "contributors"):
            raise ValueError(f'average must be "all" or "contributors", not {average!r}')
        self.decay, self.average = checked_number("decay", decay), average
        if not 0 <= decay <= 1:
            raise ValueError(
                f"decay must be from 0 (no residue is kept) to 1 (all of it is kept), not {decay}"
            )
        if decay < 1 and self.config.beta != 1:
            raise ValueError(
                f"decay and beta's filter exclude each other: give beta=1, not {self.config.beta:g}"
            )

    @property
    def settings(self) -> Settings:
        """What ranks must have in common besides the config."""
        own = {"quantiser": repr(self.quantiser), "decay": self.decay, "average": self.average}
        plain = {"quantiser": repr(quantiser_of(None)), "decay": 1.0, "average": "all"}
        return super().settings | {name: own[name] for name in own if own[name] != plain[name]}

    def step(self, bucket: BucketStep, collectives: BucketCollectives, state: State) -> Step[None]:
        """Choose, send to all, add up."""
        if self.decay < 1:
            for tensor, part, frozen in zip(
                bucket.tensors, bucket.parts, bucket.frozen, strict=True
            ):
                if not frozen:
                    part.sub_(tensor.residue, alpha=1 - self.decay)
        offsets = bucket.choose()
        places, counts = bucket.places_at(offsets), bucket.counts
        values = bucket.sendable(places)
        payload = self.quantiser.pack(values, counts)
        sent = self.quantiser.unpack(payload, values, counts)
        bucket.send(places, sent)
        # Values come first: they are viewed as words, so they must begin on one.
        everyone = yield from collectives.gather(torch.cat([payload, offsets]), "chosen")

        def read(theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at = bucket.places_at(theirs[len(payload) :].clone())
            return at, self.quantiser.unpack(theirs[: len(payload)], sent, counts)

        contributors: torch.Tensor | None = None
        if self.average == "contributors":
            contributors = torch.zeros_like(bucket.accumulators)
            for at, received in map(read, everyone):
                contributors[at] += received != 0
        for at, received in map(read, everyone):
            share: float | torch.Tensor = collectives.share
            if contributors is not None:
                share = share * collectives.size / contributors[at].clamp_(min=1)
            bucket.receive(at, received * share)
