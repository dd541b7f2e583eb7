"""Moves on accumulators, acc = m + g: the algorithm as the paper writes it.

A bucket calls these functions for methods that send any values at any indices. Imports residue and
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scalecom_hvd.exchange.kernels import Count, add_usable
from scalecom_hvd.exchange.residue import CompressedTensor


def accumulate(
    tensors: Sequence[CompressedTensor],
    grads: Sequence[torch.Tensor],
    scale: float,
    frozen: Sequence[bool],
    accumulators: Sequence[torch.Tensor],
) -> Count:
    """acc <- m + scale*g; zero for frozen tensors.

    Returns how many elements of g are bad. Bad elements count as zero.
    """
    bad: Count = 0
    for tensor, grad, is_frozen, own in zip(tensors, grads, frozen, accumulators, strict=True):
        if is_frozen:
            own.zero_()
        else:
            bad = bad + add_usable(grad, tensor.residue, scale, own)
    return bad


def commit(
    tensors: Sequence[CompressedTensor],
    kept: Sequence[torch.Tensor],
    averages: Sequence[torch.Tensor],
    scale: float,
    frozen: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> None:
    """m <- (1 - beta)*m + beta*(acc - sent), and g <- the average, in the gradients' units.

    Args:
        kept: acc - sent. It is overwritten.
    """
    for tensor, own, average, is_frozen, grad in zip(
        tensors, kept, averages, frozen, grads, strict=True
    ):
        if not is_frozen and tensor.beta == 1:
            tensor.residue.copy_(own)
        elif not is_frozen:
            # Each operation must be rounded separately. On some processors add_ with alpha fuses
            # both, and residues would then differ in bits.
            tensor.residue.mul_(1 - tensor.beta).add_(own.mul_(tensor.beta))
        grad.copy_(average if scale == 1 else average / scale)
