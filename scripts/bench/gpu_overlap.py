"""Reads from a profile how the exchange's kernels on a GPU overlap with the model's.

Used by bench_gpu_steps.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Overlap(NamedTuple):
    """Numbers for all steps in the profile together.

    Attributes:
        kernels: how many kernels and copies ran on the exchange's stream.
        milliseconds: how long they ran.
        beside: the share of that time in which the model's kernels ran, too.
    """

    kernels: int
    milliseconds: float
    beside: float


def overlap_of(events: Iterable[Any]) -> Overlap | None:
    """The overlap in torch.profiler's events; None: they lack the model's kernels, or ours."""
    spans: dict[int, list[tuple[float, float]]] = {}
    own = None
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        stream, span = event.device_resource_id, event.time_range
        if event.is_user_annotation:  # a range of ours, from its first kernel to its last
            own = stream if event.name.startswith("scalecom.take") else own
        else:
            spans.setdefault(stream, []).append((span.start, span.end))
    if own not in spans or len(spans) < 2:
        return None
    model = max(spans.keys() - {own}, key=lambda stream: len(spans[stream]))
    # Kernels of one stream do not overlap.
    both = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in spans[own]
        for other_start, other_end in spans[model]
    )
    busy = sum(end - start for start, end in spans[own])
    return Overlap(len(spans[own]), busy / 1e3, both / busy)
