"""How tensors share collectives: which go into one bucket, where their offsets and values lie in its buffers, and what that costs.

Framework-free: the exchanges of every framework cut and count alike. Imports lanes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalecom_hvd.lanes import Lanes


def cut(sizes: Sequence[int], names: Sequence[str], limit: int) -> list[list[str]]:
    """Names in order, cut where the next does not fit into `limit`, nor into half of what is left; none is much smaller than an eighth.

    The last buckets are smaller: what arrives last has nothing to hide behind.
    """
    buckets: list[list[str]] = []
    left, filled = sum(sizes), 0
    for name, size in zip(names, sizes, strict=True):
        full = filled + size > max(min(limit, left / 2), limit / 8) and left - filled >= limit / 8
        if not buckets or (filled and full):
            left -= filled
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


class Layout:
    """Where the offsets and values of several tensors lie in the buffers they share, so that one collective carries them.

    offsets: {name: slice, in bytes}, of `offsets_bytes` in all.    values: {name: slice, in elements}, of `n_values`.
    """

    def __init__(self, geometries: Mapping[str, Lanes]) -> None:
        self.offsets: dict[str, slice] = {}
        self.values: dict[str, slice] = {}
        self.offsets_bytes = self.n_values = 0
        # Wider offsets first: every tensor's slice is then aligned.
        for name in sorted(geometries, key=lambda name: -geometries[name].offset_dtype.itemsize):
            start = self.offsets_bytes
            self.offsets_bytes += geometries[name].k * geometries[name].offset_dtype.itemsize
            self.offsets[name] = slice(start, self.offsets_bytes)
        for name, geometry in geometries.items():
            self.values[name] = slice(self.n_values, self.n_values + geometry.k)
            self.n_values += geometry.k


def traffic(n_workers: int, broadcast: int, averaged: int, gathered: int = 0) -> int:
    """Bytes that a rank sends on a ring, on average over ranks, for so many bytes broadcast, all-reduced, and gathered (its own)."""
    n = max(n_workers, 1)
    return round((n - 1) / n * (broadcast + 2 * averaged)) + (n - 1) * gathered
