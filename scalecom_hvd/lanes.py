"""The geometry of lanes: how a flat tensor is cut into chunks, of which one element each is sent.

A chunk is a lane: elements are interleaved, so that a search runs over neighbours in memory side by side, and a lane is spread
over many rows of a weight matrix. Lanes are grouped by `LANES`; a full group owns `LANES * rate` consecutive elements, seen as
an array of `rate` rows, and a lane is one of its columns. The last group holds what is left. With a rate that is no whole
number, the whole tensor is one group of k lanes.

Framework-free: everything above imports this; this imports NumPy alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LANES = 64


@dataclass(frozen=True)
class Lanes:
    """The lanes of a tensor of `numel` elements at compression rate `rate`: exactly `k = ceil(numel / rate)` of them."""

    numel: int
    rate: float

    def __post_init__(self) -> None:
        if self.numel < 0 or self.rate < 1:
            raise ValueError(f"lanes need numel >= 0 and rate >= 1, not numel={self.numel}, rate={self.rate}")

    @property
    def k(self) -> int:
        """How many elements are sent: one per lane."""
        if self.rate == int(self.rate):
            return -(-self.numel // int(self.rate))
        return min(self.numel, math.ceil(self.numel / self.rate))

    @property
    def width(self) -> int:
        """Lanes in a full group, and so the distance from one row to the next."""
        return LANES if self.rate == int(self.rate) else max(self.k, 1)

    @property
    def rows(self) -> int:
        """Rows of a full group: the longest lane's length, above every offset."""
        return int(self.rate) if self.rate == int(self.rate) else -(-self.numel // max(self.k, 1))

    @property
    def full_lanes(self) -> int:
        """Lanes in full groups; the remaining `k - full_lanes` (1 to `width`) make the last group."""
        return (self.k - 1) // self.width * self.width if self.k else 0

    @property
    def offset_dtype(self) -> np.dtype:
        """The smallest dtype that holds every offset and that Horovod broadcasts."""
        if self.rows <= 2**8:
            return np.dtype(np.uint8)
        return np.dtype(np.int16) if self.rows <= 2**15 else np.dtype(np.int32)

    def indices(self, offsets: np.ndarray) -> np.ndarray:
        """Flat positions (int64, shape (k,)) of the elements at row `offsets[lane]` of each lane."""
        starts, strides = self.starts_and_strides()
        return starts + offsets.astype(np.int64) * strides

    def starts_and_strides(self) -> tuple[np.ndarray, np.ndarray]:
        """Each lane's first element and the distance between its elements (int64, shape (k,) both)."""
        lane = np.arange(self.k, dtype=np.int64)
        starts = np.where(
            lane < self.full_lanes,
            lane // self.width * self.width * self.rows + lane % self.width,
            self.full_lanes * self.rows + lane - self.full_lanes,
        )
        strides = np.where(lane < self.full_lanes, self.width, self.k - self.full_lanes)
        return starts, strides

    def lengths(self) -> np.ndarray:
        """How many elements each lane has (int64, shape (k,)): some of the last group may be shorter by one."""
        starts, strides = self.starts_and_strides()
        return np.minimum(self.rows, (self.numel - starts - 1) // strides + 1)

    def fit(self, offsets: np.ndarray) -> bool:
        """Whether all offsets (k,) lie in their lanes."""
        return bool(((offsets >= 0) & (offsets < self.lengths())).all())

    def groups(self) -> list[tuple[slice, int, int]]:
        """The tensor as at most two blocks `(elements, groups, width)`: all full groups together, then the last group.

        A block of full groups has shape (groups, rows, width). The last group's last row may be partial.
        """
        cut = self.full_lanes * self.rows
        full = [(slice(0, cut), self.full_lanes // self.width, self.width)] if cut else []
        return [*full, (slice(cut, self.numel), 1, self.k - self.full_lanes)] if self.k else []


@dataclass(frozen=True)
class Positions(Lanes):
    """The geometry of exact selection: the k offsets are the flat positions themselves, in ascending order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.numel >= 2**31:
            raise ValueError(f"exact selection sends 32-bit positions; {self.numel} elements are too many: use selection='lanes'")

    @property
    def width(self) -> int:
        """No lanes: the native kernel reads a width of 0 as 'offsets are positions'."""
        return 0

    @property
    def offset_dtype(self) -> np.dtype:
        return np.dtype(np.int32)

    def starts_and_strides(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(self.k, np.int64), np.ones(self.k, np.int64)

    def fit(self, offsets: np.ndarray) -> bool:
        """Whether all are positions in the tensor, ascending and so without repeats."""
        return bool((np.diff(offsets.astype(np.int64), prepend=-1, append=self.numel) > 0).all())


def geometry(numel: int, rate: float, selection: str) -> Lanes:
    """The geometry that `selection` ("lanes" or "exact") uses for a tensor."""
    return Positions(numel, rate) if selection == "exact" else Lanes(numel, rate)
