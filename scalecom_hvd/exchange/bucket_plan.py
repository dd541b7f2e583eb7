"""Which tensors share a bucket.

Ranks decide it together, once, at the end of the first backward. Imports residue, gradients
and bucket_layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from scalecom_hvd.bucket_layout import split
from scalecom_hvd.exchange.gradients import wide_dtype
from scalecom_hvd.exchange.residue import Residues

Groups = Sequence[Sequence[str]]
"""Names of tensors that are to share a bucket."""


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        names: of its tensors: all those of some buckets.
        is_last: whether it ends the step.
    """

    names: Collection[str]
    is_last: bool


def plan_buckets(
    parameters: Mapping[str, torch.Tensor],
    residues: Residues,
    arrived: Sequence[str],
    groups: Groups | None,
    loaded: Groups | None,
    sparse: Collection[str],
) -> list[list[str]]:
    """Names per bucket.

    These are the groups that were asked for; or the buckets of the loaded state, if they still
    fit; or tensors in the order of arrival, cut where a bucket is full. These are then in the order
    in which they are complete: on a channel none begins before the one in front of it, and the
    bucket of biases, which come from all layers, would keep all others until backward's end.

    Args:
        parameters: {name: parameter} of all that are trained, in the model's order.
        residues: of those that are compressed.
        arrived: names in the order in which gradients arrived on rank 0. Others come last.
        groups: what was asked for.
        loaded: the buckets of a state that was loaded.
        sparse: names of those whose gradients are sparse, and in no bucket.
    """
    wanted = parameters.keys() - set(sparse)
    late = [name for name in reversed(list(parameters)) if name not in arrived]
    in_order = [name for name in [*arrived, *late] if name in wanted]
    if groups is not None:
        members = [[name for name in group if name in wanted] for group in groups]
        return [part for group in members for part in _split(parameters, residues, group, None)]
    if loaded and wanted == {name for names in loaded for name in names}:
        parts = [_split(parameters, residues, names, None) for names in loaded]
        if all(len(part) == 1 for part in parts):
            return [list(names) for names in loaded]
    place = {name: i for i, name in enumerate(in_order)}
    cut = _split(parameters, residues, in_order, residues.config.bucket_bytes)
    return sorted(cut, key=lambda names: max(place[name] for name in names))


def _split(
    parameters: Mapping[str, torch.Tensor],
    residues: Residues,
    names: Sequence[str],
    limit: int | None,
) -> list[list[str]]:
    def kind_of(name: str) -> tuple[torch.device, torch.dtype, torch.dtype]:
        parameter, tensor = parameters[name], residues.tensors.get(name)
        wide = wide_dtype(parameter)
        return parameter.device, tensor.wire_dtype if tensor else wide, wide

    def bytes_of(name: str) -> int:
        return parameters[name].numel() * parameters[name].element_size()

    return split(names, kind_of, bytes_of, limit)
