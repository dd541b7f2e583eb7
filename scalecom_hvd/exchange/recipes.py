"""What papers train with, by name: arguments of every face's DistributedOptimizer.

Imports methods and quantisers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.methods import LocalTopK, Method, ScaleCom
from scalecom_hvd.exchange.quantisers import BinMeans

Arguments = dict[str, Any]
"""Of DistributedOptimizer."""


def everything_whole() -> Method:
    """A method that sends all of every tensor, whatever the environment says of ScaleCom."""
    # With bits and rate as states of earlier releases have them.
    return ScaleCom(config=ScaleComConfig(rate=100, bits=32, dense=("*",)))


def diloco(local_steps: int | Mapping[int, int] = 500) -> Arguments:
    """DiLoCo (Douillard et al., 2023, arXiv 2311.08105), for DistributedOptimizer.

    Every rank takes H steps of its own, with AdamW in the paper. The averaged change, sent whole,
    is the gradient of an outer SGD with Nesterov's momentum 0.9 and a learning rate of 0.7.

    Args:
        local_steps: H, 500 in most of the paper; see DistributedOptimizer.

    Returns:
        Its arguments compression, local_steps and outer, to be changed as you like.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(
        ...     torch.optim.AdamW(model.parameters(), lr=4e-4),
        ...     named_parameters=model.named_parameters(),
        ...     **hvd.diloco(100),
        ... )
    """
    return {
        "compression": everything_whole(),
        "local_steps": local_steps,
        "outer": lambda common: torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True),
    }


def sparseloco(local_steps: int | Mapping[int, int] = 30, rate: float = 64) -> Arguments:
    """SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706), for DistributedOptimizer.

    Every rank takes H steps of its own, with AdamW in the paper. Of its change, and 0.95 of what
    it did not send before, it sends its own largest elements, in two bits. Their average, over
    those who sent something at a place, is subtracted: residues take the place of the outer
    momentum. All tensors from min_numel on are compressed.

    It is not to the letter: of every `rate` elements the largest is sent, where the paper sends the
    64 largest of every 4096; and the two bits' levels are those of BinMeans.

    Args:
        local_steps: H, 15 to 250 in the paper; see DistributedOptimizer.
        rate: one element in so many is sent; 33 to 100 in the paper.

    Returns:
        Its arguments compression and local_steps, to be changed as you like.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(
        ...     torch.optim.AdamW(model.parameters(), lr=4e-4),
        ...     named_parameters=model.named_parameters(),
        ...     **hvd.sparseloco(30),
        ... )
    """
    config = ScaleComConfig(rate=rate, beta=1.0)
    return {
        "compression": LocalTopK(
            config=config, decay=0.95, average="contributors", quantiser=BinMeans()
        ),
        "local_steps": local_steps,
    }
