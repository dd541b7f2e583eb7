"""gTop-k: the largest sums of the ranks' own choices, found by merging two at a time."""

from __future__ import annotations

import torch

from scalecom_hvd.exchange.kernels.base import largest
from scalecom_hvd.exchange.methods.base import BucketCollectives, BucketStep, Method, State, Step


class GTopK(Method):
    """gTop-k S-SGD (Shi et al., 2019, arXiv 1901.04359).

    The ranks' top-k are added pairwise along a tree, and each sum keeps its k largest elements. The
    k of a bucket is that of all its tensors together. The k elements may be anywhere in the bucket.

    Two things differ from the paper. First, the paper sends each merge to the next rank:
    2 k log2(n) indices and values in all. Horovod has no messages between two ranks, so all choices
    are gathered here, and every rank merges them in the same way. The result is the paper's, but
    the traffic is (n-1) k indices and values. Second, in the paper a rank keeps what a merge drops
    only if no other rank's value of that element gets through. Here the rank always keeps it, so
    nothing is lost.
    The choice is always exact. For the arguments, see `Method`.
    """

    uses = ()

    def step(self, bucket: BucketStep, collectives: BucketCollectives, state: State) -> Step[None]:
        """Gather all choices, and merge them."""
        k = sum(bucket.counts)
        places = largest(bucket.accumulators, k)
        values = bucket.sendable(places)
        own = values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)
        everyone = yield from collectives.gather(torch.cat(own), "chosen")
        parts = [theirs.split([len(part) for part in own]) for theirs in everyone]
        choices = [(at.view(torch.int32).long(), sent.view(values.dtype)) for sent, at in parts]
        (chosen, sums), mine = merge(choices, k, collectives.position)
        bucket.send(mine, values[torch.isin(places, mine)])
        bucket.receive(chosen, sums * collectives.share)


Choice = tuple[torch.Tensor, torch.Tensor]
"""Indices in ascending order, and their values."""


def merge(choices: list[Choice], k: int, position: int) -> tuple[Choice, torch.Tensor]:
    """The k largest sums along the tree.

    Also the indices at which the rank at `position` has a part in these sums.
    """
    mine = choices[position][0]
    while len(choices) > 1:
        pairs = [choices[i : i + 2] for i in range(0, len(choices), 2)]
        choices = [add(pair[0], pair[1], k) if len(pair) == 2 else pair[0] for pair in pairs]
        position //= 2
        mine = mine[torch.isin(mine, choices[position][0])]
    return choices[0], mine


def add(one: Choice, other: Choice, k: int) -> Choice:
    """The k largest sums of two choices."""
    places, which = torch.cat([one[0], other[0]]).unique(return_inverse=True)
    sums = one[1].new_zeros(len(places)).index_add_(0, which, torch.cat([one[1], other[1]]))
    kept = largest(sums, k)
    return places[kept], sums[kept]
