"""How tensors share collectives: which go into one bucket, where they lie in it, what it costs.

Framework-free: all exchanges, of PyTorch and of TensorFlow, cut, group and count in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from scalecom_hvd.integers import blocks_of
from scalecom_hvd.lanes import Lanes

Unit = TypeVar("Unit")
Array = Any
Stats = dict[str, Any]
"""Numbers of a step by their names, for users; see Method.stats."""


def group_names(
    groups: int | Sequence[Sequence[Hashable]] | None, names: Mapping[Any, str]
) -> list[list[str]] | None:
    """Horovod's `groups` as lists of names.

    Args:
        groups: a number of groups, or lists of keys of `names`. None: no groups. A key in no list
            becomes a group of its own, and a key without a name is left out.
        names: {key: name} of all tensors, in the model's order.
    """
    if groups is None:
        return None
    if isinstance(groups, int):
        listed = list(names.values())
        return [[listed[i] for i in part] for part in np.array_split(range(len(listed)), groups)]
    grouped = [[names[key] for key in group if key in names] for group in groups]
    in_a_group = {key for group in groups for key in group}
    rest = [[name] for key, name in names.items() if key not in in_a_group]
    return [group for group in grouped if group] + rest


def split(
    names: Iterable[str],
    kind_of: Callable[[str], Hashable],
    bytes_of: Callable[[str], int],
    limit: int | None,
) -> list[list[str]]:
    """The names in each bucket. Its tensors are of one kind: one device, one dtype on the wire.

    Args:
        names: in the order in which gradients arrive.
        kind_of, bytes_of: give a tensor's kind, and the size of its gradient.
        limit: about how many bytes a bucket has; None: one bucket for each kind.
    """
    kinds: dict[Hashable, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    if limit is None:
        return list(kinds.values())
    return [part for kind in kinds.values() for part in cut(list(map(bytes_of, kind)), kind, limit)]


def cut(sizes: Sequence[int], names: Sequence[str], limit: int) -> list[list[str]]:
    """Names in order. A part ends before it would exceed `limit`, or half of what is left.

    No part is much smaller than an eighth of the limit. The last parts are smaller than the others,
    because there is nothing left to hide their collectives behind.
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


def divide(sizes: Sequence[int], units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """Tensors, or groups of them, in order, cut into fragments of about one size. None is empty.

    Raises:
        ValueError: there are fewer units.
    """
    if len(units) < count:
        raise ValueError(
            f"{len(units)} tensors, or groups, cannot be cut into {count} fragments: give fewer "
            "fragments"
        )
    parts: list[list[Unit]] = []
    begin = 0
    for left in range(count, 0, -1):
        share = sum(sizes[begin:]) / left
        end, filled = begin + 1, sizes[begin]
        # Go to the nearest cut, and leave at least one unit for each fragment to come.
        while end <= len(units) - left and filled + sizes[end] / 2 <= share:
            filled += sizes[end]
            end += 1
        parts.append(list(units[begin:end]))
        begin = end
    return parts


class Layout:
    """Where offsets and values of several tensors lie in the buffers they share.

    Args:
        geometries: {name: lanes} of the tensors.
        has_scales: whether values are integers (integers.py). Their scales travel with the offsets.

    Attributes:
        scales, offsets: {name: slice, in bytes}, of `offsets_bytes` in all. Scales come first, and
            take `scales_bytes`.
        narrow_bytes: how many bytes at the end hold offsets of lanes of at most 16 rows, which
            travel two to a byte.
        message_bytes: how many bytes travel for all scales and offsets.
        values: {name: slice, in elements}, of `n_values` in all.
    """

    def __init__(self, geometries: Mapping[str, Lanes], has_scales: bool = False) -> None:
        scales = {name: 4 * blocks_of(own.k) * has_scales for name, own in geometries.items()}
        self.scales, self.scales_bytes = _side_by_side(scales)
        # Wider offsets first: every tensor's slice is then aligned.
        ordered = sorted(geometries.items(), key=lambda item: -item[1].offset_bits)
        offsets = {name: own.k * own.offset_width for name, own in ordered}
        self.offsets, self.offsets_bytes = _side_by_side(offsets, self.scales_bytes)
        self.narrow_bytes = sum(own.k for own in geometries.values() if own.offset_bits == 4)
        self.message_bytes = self.offsets_bytes - self.narrow_bytes // 2
        self.values, self.n_values = _side_by_side({name: g.k for name, g in geometries.items()})


def _side_by_side(sizes: Mapping[str, int], begin: int = 0) -> tuple[dict[str, slice], int]:
    """Slices of these sizes, one after the other from `begin` on, and where they end."""
    slices = {}
    for name, size in sizes.items():
        slices[name] = slice(begin, begin + size)
        begin += size
    return slices, begin


def pack_halves(rows: Array, packed: Array) -> None:
    """packed (ceil(n / 2),) <- offsets below 16 (n,): of lanes l and l + ceil(n / 2); all uint8."""
    half = len(packed)
    packed[:] = rows[:half]
    packed[: len(rows) - half] |= rows[half:] << 4


def unpack_halves(packed: Array, rows: Array) -> None:
    """The inverse of `pack_halves`."""
    half = len(packed)
    rows[:half] = packed & 15
    rows[half:] = packed[: len(rows) - half] >> 4


def traffic(n_workers: int, broadcast: int, averaged: int, gathered: int = 0) -> int:
    """Bytes that a rank sends on a ring, on average over ranks, for bytes it handed over."""
    n = max(n_workers, 1)
    return round((n - 1) / n * (broadcast + 2 * averaged)) + (n - 1) * gathered


def step_stats(
    n_workers: int,
    leader: int,
    elements: Mapping[str, int],
    chosen: Mapping[str, int],
    collectives: int,
    **handed_over: int,
) -> Stats:
    """What `stats()` says about the last step, the same for every exchange.

    Args:
        n_workers, collectives: how many ranks and collectives there were.
        leader: the position of the rank that chose.
        elements: {name: elements} of all dense gradients.
        chosen: {name: elements sent} of the compressed ones.
        handed_over: bytes as offsets, values, dense and, by some methods, gathered.
    """
    averaged = handed_over["values"] + handed_over["dense"]
    gathered = handed_over.get("gathered", 0)
    sent = dict(elements) | {name: k for name, k in chosen.items() if name in elements}
    return {
        "leader": leader,
        **{f"bytes_{what}": count for what, count in handed_over.items()},
        "bytes_traffic": traffic(n_workers, handed_over["offsets"], averaged, gathered),
        "rate": sum(elements.values()) / max(sum(sent.values()), 1),
        "collectives": collectives,
    }
