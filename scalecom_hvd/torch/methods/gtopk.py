"""gTop-k: the largest sums of the ranks' own choices, found by merging two at a time, so that no more than k places are left."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.kernels import largest
from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.methods.local_topk import pack, unpack
from scalecom_hvd.torch.transport import Wait


class GTopK(Method):
    """gTop-k S-SGD (Shi et al., 2019, arXiv 1901.04359): ranks' top-k are added pairwise along a tree, and each sum keeps its k largest.

    The k of a bucket is that of all its tensors together, wherever in the bucket they are.
    Departures: the paper sends each merge to the next rank, 2 k log2(n) places and values in all. Horovod has no messages between two
    ranks, so here all choices are gathered and every rank merges them alike; the result is the paper's, the traffic, (n-1) k of both, is
    not. And in the paper what a merge drops is kept by its rank only if nobody else's value of that place gets through; here always, so
    that nothing is lost.
    fields: of ScaleComConfig; leader, lookahead, wire_dtype and selection (always exact) mean nothing here.
    """

    unused = (*Method.unused, "selection")

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        k = sum(bucket.counts)
        places = largest(bucket.flat, k)
        values = bucket.flat[places]
        everyone = yield from channel.gather(pack(values, places.to(torch.int32).view(torch.uint8)), "chosen")
        choices = []
        for payload in everyone:
            theirs, at = unpack(payload, values)
            choices.append((at.view(torch.int32).long(), theirs))
        (chosen, sums), mine = merge(choices, k, channel.position)
        bucket.send(mine, bucket.flat[mine])
        bucket.receive(chosen, sums * channel.share)


Choice = tuple[torch.Tensor, torch.Tensor]  # places, ascending, and values


def merge(choices: list[Choice], k: int, position: int) -> tuple[Choice, torch.Tensor]:
    """The k largest sums along the tree, and the places at which the rank at `position` has a part in them."""
    mine = choices[position][0]
    while len(choices) > 1:
        pairs = [choices[i : i + 2] for i in range(0, len(choices), 2)]
        choices = [add(*pair, k) if len(pair) == 2 else pair[0] for pair in pairs]
        position //= 2
        mine = mine[torch.isin(mine, choices[position][0])]
    return choices[0], mine


def add(one: Choice, other: Choice, k: int) -> Choice:
    """The k largest sums of two choices."""
    places, which = torch.cat([one[0], other[0]]).unique(return_inverse=True)
    sums = torch.zeros(len(places), dtype=one[1].dtype, device=one[1].device).index_add_(0, which, torch.cat([one[1], other[1]]))
    kept = largest(sums, k)
    return places[kept], sums[kept]
