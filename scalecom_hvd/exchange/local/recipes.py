"""Settings of papers, by name, as arguments of every face's DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.methods import LocalTopK, Method, ScaleCom
from scalecom_hvd.exchange.quantisers import BinMeans

Arguments = dict[str, Any]
"""Arguments of DistributedOptimizer."""


def everything_whole() -> Method:
    """A method that sends every tensor whole, whatever ScaleCom's environment variables say."""
    # bits and rate are those in states of earlier releases.
    return ScaleCom(config=ScaleComConfig(rate=100, bits=32, dense=("*",)))


def diloco(local_steps: int | Mapping[int, int] = 500) -> Arguments:
    """DiLoCo (Douillard et al., 2023, arXiv 2311.08105), for DistributedOptimizer.

    Every rank takes H steps of its own, with AdamW in the paper. The ranks' changes are sent whole
    and averaged. The average is the gradient of an outer SGD with Nesterov's momentum 0.9 and a
    learning rate of 0.7.

    Args:
        local_steps: H, which is 500 in most of the paper; see DistributedOptimizer.

    Returns:
        The arguments compression, local_steps and outer of DistributedOptimizer. You may change
        them.

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

    Every rank takes H steps of its own, with AdamW in the paper. It adds its change to 0.95 of what
    it has not sent before. Of the sum, it sends the largest elements, which it chooses by itself,
    in two bits. For each element, the average over the ranks that sent it is subtracted. Residues
    replace the outer momentum. All tensors with at least min_numel elements are compressed.

    Two details differ from the paper. Of every `rate` elements, the largest is sent; the paper
    sends the 64 largest of every 4096. The levels of the two bits are those of BinMeans.

    Args:
        local_steps: H, which is 15 to 250 in the paper; see DistributedOptimizer.
        rate: one in `rate` elements is sent. The paper uses 33 to 100.

    Returns:
        The arguments compression and local_steps of DistributedOptimizer. You may change them.

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
