"""Random-k with a seed that all ranks share: no offsets travel, and nobody searches."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from scalecom_hvd.lanes import Lanes, Positions
from scalecom_hvd.torch.accumulators import Accumulators, Channel, generator
from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.quantisers import Quantiser, average_values, rounded
from scalecom_hvd.torch.transport import Wait


class RandomK(Method):
    """Every step k places drawn at random, the same on all ranks, and one all-reduce of the values there; the rest stays in residues.

    One place of each lane; with selection="exact", any k places. Not scaled up to be unbiased: residues see to what is not sent
    (Stich et al., *Sparsified SGD with Memory*, 2018, arXiv 1809.07599, has it as rand_k).
    seed: the same on all ranks.  shared: False draws other places for each rank, which all ranks can draw; their values are gathered.
    quantiser: of the values, None or one of quantisers.py.  fields: of ScaleComConfig; leader, lookahead and wire_dtype mean nothing here.
    Traffic: 2(n-1)/n of 4k bytes, no offsets; (n-1) 4k if not shared; less with a quantiser.
    """

    rounds = True

    def __init__(self, *, seed: int = 0, shared: bool = True, quantiser: Quantiser | None = None, **fields: Any) -> None:
        super().__init__(quantiser=quantiser, **fields)
        self.seed, self.shared = int(seed), bool(shared)
        self.always_gathers = not self.shared

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"seed": self.seed} | ({} if self.shared else {"shared": False})

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        if self.shared:
            places = self._draw(bucket, generator(self.seed, bucket.step, channel.bucket))
            yield from average_values(bucket, channel, places, self.quantiser)
            return
        # A number more than rounding has, so that the two do not draw alike.
        everyone = [generator(self.seed, bucket.step, channel.bucket, rank, 0) for rank in range(channel.size)]
        places = [self._draw(bucket, random) for random in everyone]
        payload, sent = rounded(self.quantiser, bucket.flat[places[channel.position]], bucket.counts, bucket, channel)
        bucket.send(places[channel.position], sent)
        for at, theirs in zip(places, (yield from channel.gather(payload, "values")), strict=True):
            bucket.receive(at, self.quantiser.unpack(theirs, sent, bucket.counts) * channel.share)

    def _draw(self, bucket: Accumulators, random: torch.Generator) -> torch.Tensor:
        return bucket.places([draw(lanes, random) for lanes in bucket.geometries]).to(bucket.flat.device)


def draw(geometry: Lanes, random: torch.Generator) -> torch.Tensor:
    """k positions (int64) in a tensor, at random: one in each lane, uniformly; in exact geometry any, without repeats."""
    if isinstance(geometry, Positions):
        return torch.randperm(geometry.numel, generator=random)[: geometry.k]
    starts, strides, rows = _lanes(geometry)
    row = (torch.rand(geometry.k, generator=random, dtype=torch.float64).numpy() * rows).astype(np.int64)
    return torch.from_numpy(starts + row * strides)


@functools.lru_cache(maxsize=1024)
def _lanes(geometry: Lanes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each lane's first element, the distance between its elements, and how many it has."""
    return (*geometry.starts_and_strides(), geometry.lengths())
