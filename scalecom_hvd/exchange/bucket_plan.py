"""Which tensors share a bucket.

Ranks decide it together, once, at the end of the first backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from scalecom_hvd.bucket_layout import split
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.exchange.residue import Residues

Groups = Sequence[Sequence[str]]
"""For each group, the names of the tensors that should share a bucket."""


class Part(NamedTuple):
    """A part of a step."""

    names: Collection[str]  # of its tensors: all tensors of one or more buckets
    is_last: bool  # whether the part ends the step


def plan_buckets(
    parameters: Mapping[str, torch.Tensor],
    residues: Residues,
    arrived: Sequence[str],
    groups: Groups | None,
    loaded: Groups | None,
    elsewhere: Collection[str],
) -> list[list[str]]:
    """Decide which tensors each bucket holds, as names per bucket.

    The groups that were asked for become the buckets. Otherwise those of a loaded state are kept if
    they still fit. Otherwise tensors are taken in the order of arrival, cut where a bucket is full,
    and sorted by when the bucket is complete. On a channel, no bucket begins before the one in
    front of it, so without sorting, the bucket of biases, which come from all layers, would hold up
    all others.

    Args:
        parameters: {name: parameter} of all trained parameters, in the model's order.
        residues: the residues of the compressed tensors.
        arrived: names in the order in which gradients arrived on rank 0. Other names come last.
        groups, loaded: the groups that were asked for, and the buckets of a loaded state.
        elsewhere: names of the tensors that are in no bucket, such as those with sparse gradients.
    """

    def kind_of(name: str) -> tuple[torch.device, torch.dtype, torch.dtype]:
        parameter, tensor = parameters[name], residues.tensors.get(name)
        wide = wide_dtype(parameter)
        values = wide if tensor is None else tensor.residue.dtype
        return parameter.device, torch.int8 if tensor and tensor.few_bits else values, wide

    def bytes_of(name: str) -> int:
        return parameters[name].numel() * parameters[name].element_size()

    wanted = parameters.keys() - set(elsewhere)
    late = [name for name in reversed(list(parameters)) if name not in arrived]
    in_order = [name for name in [*arrived, *late] if name in wanted]
    if groups is not None:
        members = [[name for name in group if name in wanted] for group in groups]
        return [part for group in members for part in split(group, kind_of, bytes_of, None)]
    if loaded and wanted == {name for names in loaded for name in names}:
        parts = [split(names, kind_of, bytes_of, None) for names in loaded]
        if all(len(part) == 1 for part in parts):
            return [list(names) for names in loaded]
    place = {name: i for i, name in enumerate(in_order)}
    cut = split(in_order, kind_of, bytes_of, residues.config.bucket_bytes)
    return sorted(cut, key=lambda names: max(place[name] for name in names))
