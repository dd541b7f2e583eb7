"""Random-k with a seed that all ranks share: no offsets travel, and nobody searches."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from scalecom_hvd.lanes import Lanes, Positions
from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.methods.base import Method, generator
from scalecom_hvd.torch.transport import Wait


class RandomK(Method):
    """Every step k places drawn at random, the same on all ranks, and one all-reduce of the values there; the rest stays in residues.

    One place of each lane; with selection="exact", any k places. Not scaled up to be unbiased: residues see to what is not sent
    (Stich et al., *Sparsified SGD with Memory*, 2018, arXiv 1809.07599, has it as rand_k).
    seed: the same on all ranks.  fields: of ScaleComConfig; leader, lookahead and wire_dtype mean nothing here.
    Traffic: 2(n-1)/n of 4k bytes, no offsets.
    """

    def __init__(self, *, seed: int = 0, **fields: Any) -> None:
        super().__init__(**fields)
        self.seed = int(seed)

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"seed": self.seed}

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        random = generator(self.seed, bucket.step, channel.bucket)
        places = bucket.places([draw(lanes, random) for lanes in bucket.geometries]).to(bucket.flat.device)
        values = bucket.flat[places]
        bucket.send(places, values)
        average = yield from channel.average(values, "values")
        bucket.receive(places, average)


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
