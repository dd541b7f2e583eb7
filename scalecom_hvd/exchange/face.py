"""What uses an exchange: an optimizer, DDP's hook, sharded gradients, local steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from scalecom_hvd.exchange.bucket import Groups
from scalecom_hvd.exchange.unused_averages import UnusedAverages

Told = Mapping[str, Any]
"""What one rank tells all others when they agree. The values are JSON."""


class Options(NamedTuple):
    """How an exchange works, which is the same on all ranks.

    Attributes:
        groups: lists of names that share a bucket. None: buckets of about config.bucket_bytes, in
            the order in which gradients arrive on rank 0.
        is_scaled: whether gradients carry the method's loss scale. Changes of parameters do not.
        drops_unused: whether ranks tell each other which tensors have gradients, by a flag that
            travels with the values. A tensor sends nothing if no rank has a gradient for it, and
            its residue waits. Use this if averages of such tensors are thrown away.
        zeros_count: with `drops_unused`, whether a gradient of zeros is one.
        unused: what knows which averages the script has thrown away. None: nobody looks.
    """

    groups: Groups | None = None
    is_scaled: bool = True
    drops_unused: bool = False
    zeros_count: bool = True
    unused: UnusedAverages | None = None


class Face:
    """What uses an exchange. A face that has nothing to say uses this as it is."""

    def tell(self) -> Told:
        """What this rank tells the others when they agree, besides what the exchange tells."""
        return {}

    def hear(self, everyone: Sequence[Told], elsewhere: Collection[str]) -> None:
        """Hear what all ranks told.

        Args:
            everyone: what each rank told.
            elsewhere: names of the tensors that travel in another way from now on, on all ranks.

        Raises:
            RuntimeError: on all ranks, if something that they told must not differ.
        """

    def layout(self) -> list[list[str]]:
        """Names of the gradients that lie side by side in memory, the same on all ranks.

        In this order, steps that are sent whole average them there. Empty: all are copied.
        """
        return []

    def average_others(self) -> Iterable[torch.Tensor]:
        """Wait for the averages that travel in another way. Returns their values.

        If some are not finite, which is the same on all ranks, the step does not count.
        """
        return ()

    def aborted(self, restarted: bool) -> None:
        """Forget the step in progress, which was given up.

        restarted: whether ranks were started anew (elastic runs), so that all must be agreed again.
        """
