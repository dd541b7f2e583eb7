"""Random-k with a seed that all ranks share: no offsets travel, and no rank searches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from scalecom_hvd.agreement import Settings
from scalecom_hvd.exchange.methods.base import BucketCollectives, BucketStep, Method, State, Step
from scalecom_hvd.lanes import Lanes, Positions


class RandomK(Method):
    """Averages the values at k random indices in one all-reduce. Every step draws new indices.

    One index is drawn from each lane. With selection="exact", any k indices are drawn. Values are
    not scaled up to be unbiased, because residues keep what is not sent. Stich et al. call this
    rand_k (*Sparsified SGD with Memory*, 2018, arXiv 1809.07599).

    Traffic: 2(n-1)/n of 4k bytes, and no offsets.

    Args:
        seed: the seed of the draw, which must be the same on all ranks.
        **fields: see `Method`.
    """

    def __init__(self, *, seed: int = 0, **fields: Any) -> None:
        super().__init__(**fields)
        self.seed = int(seed)

    @property
    def settings(self) -> Settings:
        """What ranks must have in common besides the config."""
        return super().settings | {"seed": self.seed}

    def step(self, bucket: BucketStep, collectives: BucketCollectives, state: State) -> Step[None]:
        """Draw, and average the values there."""
        random = generator(self.seed, collectives.step, collectives.bucket)
        places = bucket.places([draw(lanes, random) for lanes in bucket.geometries])
        places = places.to(bucket.accumulators.device)
        values = bucket.sendable(places)
        bucket.send(places, values)
        average = yield from collectives.average(values)
        bucket.receive(places, average)


def draw(geometry: Lanes, random: torch.Generator) -> torch.Tensor:
    """k random positions (int64) in a tensor.

    One is drawn uniformly from each lane. In exact geometry, any are drawn, without repeats.
    """
    if isinstance(geometry, Positions):
        return torch.randperm(geometry.numel, generator=random, device="cpu")[: geometry.k]
    starts, strides, rows = _lanes(geometry)
    share = torch.rand(geometry.k, generator=random, dtype=torch.float64, device="cpu").numpy()
    return torch.from_numpy(starts + (share * rows).astype(np.int64) * strides)


@functools.lru_cache(maxsize=1024)
def _lanes(geometry: Lanes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each lane's first element, the distance between its elements, and how many it has."""
    return (*geometry.starts_and_strides(), geometry.lengths())


def generator(*numbers: int) -> torch.Generator:
    """A generator that draws the same wherever it gets the same numbers (seed, step, bucket)."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)
