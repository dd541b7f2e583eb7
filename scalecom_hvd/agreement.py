"""Ranks compare what they were started with, once, before it could hang or diverge.

Framework-free: the caller gathers every rank's plain description and passes the list in; all ranks see the same list, so all
raise or none.
"""

from __future__ import annotations

from typing import Any

JOIN_REFUSED = (
    "hvd.join() cannot be used with ScaleCom: a rank that joined cannot take part in the leader's broadcast. Give every rank the "
    "same number of steps instead (drop_last=True with a DistributedSampler, or cut the longer ranks short), or train the uneven "
    "part with compression=hvd.Compression.none"
)


def compare_ranks(per_rank: list[dict[str, Any]], topics: tuple[str, ...]) -> None:
    """Raise RuntimeError that names the first difference to rank 0 in any of the topics of the ranks' descriptions."""
    for topic in topics:
        first = per_rank[0][topic]
        for rank, description in enumerate(per_rank):
            other = description[topic]
            if other != first:
                raise RuntimeError(
                    f"ScaleCom's {topic} differ between ranks, which would hang or diverge: {_difference(first, other, rank)}. Start every "
                    "rank with the same model, arguments, SCALECOM_ environment and scalecom_hvd version"
                )


def _difference(first: Any, other: Any, rank: int) -> str:
    if isinstance(first, dict) and isinstance(other, dict):
        key = next(k for k in [*first, *other] if k not in first or k not in other or first[k] != other[k])
        return f"{key} is {first.get(key, 'missing')} on rank 0 and {other.get(key, 'missing')} on rank {rank}"
    return f"{first} on rank 0 and {other} on rank {rank}"
