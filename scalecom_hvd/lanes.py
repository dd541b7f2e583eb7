"""The geometry of lanes: how a flat tensor is cut into chunks, each of which sends one element.

A chunk is a lane. Lanes are interleaved, so that a search through lanes reads neighbours in memory
side by side, and a lane is spread over many rows of a weight matrix. Lanes are grouped by `LANES`.
A full group owns `LANES * rate` consecutive elements, seen as an array of `rate` rows. A lane is
one of its columns. The last group holds what is left. If the rate is not a whole number, the whole
tensor is one group of k lanes.

Framework-free. Everything above imports this module, which imports only NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LANES = 64


@dataclass(frozen=True)
class Lanes:
    """The lanes of a tensor: exactly `k = ceil(numel / rate)` of them.

    Args:
        numel: how many elements the tensor has.
        rate: the compression rate, elements per element sent; at least 1.

    Raises:
        ValueError: there are no such lanes.
    """

    numel: int
    rate: float

    def __post_init__(self) -> None:
        if self.numel < 0 or self.rate < 1:
            raise ValueError(
                f"lanes need numel >= 0 and rate >= 1, not numel={self.numel}, rate={self.rate}"
            )

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
        """Rows of a full group: the longest lane's length. Every offset is smaller."""
        if self.rate == int(self.rate):
            return int(self.rate)
        return -(-self.numel // max(self.k, 1))

    @property
    def full_lanes(self) -> int:
        """Lanes in full groups; the other `k - full_lanes` (1 to `width`) make the last group."""
        return (self.k - 1) // self.width * self.width if self.k else 0

    @property
    def offset_dtype(self) -> np.dtype[np.integer]:
        """The smallest dtype that holds every offset and that Horovod broadcasts."""
        if self.rows <= 2**8:
            return np.dtype(np.uint8)
        return np.dtype(np.int16) if self.rows <= 2**15 else np.dtype(np.int32)

    @property
    def offset_width(self) -> int:
        """Bytes of an offset in a buffer; 0 if each lane has one element: then there are none."""
        return 0 if self.width and self.rows <= 1 else self.offset_dtype.itemsize

    @property
    def offset_bits(self) -> int:
        """How many bits of an offset travel: 0, 4, 8, 16 or 32."""
        return 4 if 1 < self.rows <= 16 and self.width else 8 * self.offset_width

    def indices(self, offsets: NDArray[np.integer]) -> NDArray[np.int64]:
        """The flat positions (k,) of the elements at row `offsets[lane]` of each lane."""
        starts, strides = self.starts_and_strides()
        return starts + offsets.astype(np.int64) * strides if self.offset_width else starts

    def starts_and_strides(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each lane's first element and the distance between its elements, (k,) both."""
        lane = np.arange(self.k, dtype=np.int64)
        starts = np.where(
            lane < self.full_lanes,
            lane // self.width * self.width * self.rows + lane % self.width,
            self.full_lanes * self.rows + lane - self.full_lanes,
        )
        strides = np.where(lane < self.full_lanes, self.width, self.k - self.full_lanes)
        return starts, strides

    def lengths(self) -> NDArray[np.int64]:
        """How many elements each lane has (k,): some of the last group may have one less."""
        starts, strides = self.starts_and_strides()
        return np.minimum(self.rows, (self.numel - starts - 1) // strides + 1)

    def fit(self, offsets: NDArray[np.integer]) -> bool:
        """Whether all offsets (k,) lie in their lanes."""
        if not self.offset_width:
            return not offsets.any()
        return bool(((offsets >= 0) & (offsets < self.lengths())).all())

    def groups(self) -> list[tuple[slice, int, int]]:
        """The tensor as at most two blocks: all full groups together, then the last group.

        Returns:
            (elements, groups, width) of each. A block of full groups has shape (groups, rows,
            width). The last group's last row may be partial.
        """
        cut = self.full_lanes * self.rows
        full = [(slice(0, cut), self.full_lanes // self.width, self.width)] if cut else []
        return [*full, (slice(cut, self.numel), 1, self.k - self.full_lanes)] if self.k else []


@dataclass(frozen=True)
class Positions(Lanes):
    """The geometry of exact selection: the k offsets are flat positions, in ascending order.

    It takes the arguments of Lanes, and raises ValueError from 2**31 elements on.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.numel >= 2**31:
            raise ValueError(
                f"{self.numel} elements are too many for exact selection, which sends 32-bit "
                "indices: use selection='lanes'"
            )

    width = 0  # there are no lanes
    offset_dtype = np.dtype(np.int32)

    def starts_and_strides(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Those with which `indices` gives the positions themselves."""
        return np.zeros(self.k, np.int64), np.ones(self.k, np.int64)

    def fit(self, offsets: NDArray[np.integer]) -> bool:
        """Whether all are positions in the tensor, ascending and so without repeats."""
        steps = np.diff(offsets.astype(np.int64), prepend=-1, append=self.numel)
        return bool((steps > 0).all())


def geometry(numel: int, rate: float, selection: str) -> Lanes:
    """The geometry of a tensor. selection: "lanes" or "exact", as in ScaleComConfig."""
    return Positions(numel, rate) if selection == "exact" else Lanes(numel, rate)
