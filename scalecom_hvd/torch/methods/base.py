"""What a method other than ScaleCom is: a class with one generator, `exchange`. A new one is a subclass of `Method`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.compressor import ErrorFeedback
from scalecom_hvd.torch.transport import Wait

# Settings that say how ScaleCom's leader chooses and sends.
_SCALECOM_ALONE = ("leader", "lookahead", "wire_dtype")


class Method(ErrorFeedback):
    """A way to average gradients with error feedback, for this package's DistributedOptimizer.

    config, loss_scale, diagnostics, fields: as for ScaleCom. Raises ValueError for settings that mean nothing to the method (`unused`).
    """

    # Fields of ScaleComConfig that this method has no use for.
    unused: tuple[str, ...] = _SCALECOM_ALONE
    # Whether every element travels, so that stats()["rate"] is 1.
    sends_all = False
    # Whether it takes a quantiser for its values.
    rounds = False

    def __init__(self, **fields: Any) -> None:
        if fields.get("quantiser") is not None and not self.rounds:
            raise ValueError(f"a quantiser means nothing to {type(self).__name__}: leave it out, or take ScaleCom, LocalTopK or RandomK")
        super().__init__(**fields)
        meaningless = [name for name in self.unused if getattr(self.config, name) != getattr(ScaleComConfig(), name)]
        if meaningless:
            name = meaningless[0]
            raise ValueError(f"{name} means nothing to {type(self).__name__}: leave it out, and unset SCALECOM_{name.upper()} if it is set")

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        """Average a bucket's accumulators over ranks.

        bucket.flat (N,) holds them. Say what this rank sent, `bucket.send(places, values)`, and what the average is,
        `bucket.receive(places, values)`, with `yield from channel.average(...)` or `.gather(...)` in between, the same on every rank.
        What was not sent stays in the residue. A step may turn out not to count: nothing but `bucket` may be changed here.
        """
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """As ScaleCom's, without a leader."""
        numbers = {name: number for name, number in super().stats().items() if name != "leader"}
        return numbers | ({"rate": 1.0} if self.sends_all and "rate" in numbers else {})

    def compress(self, tensor: Any = None) -> tuple[torch.Tensor, Any]:
        """Refused: Horovod's own optimizer asks for tensors one by one, and gives no place to wait."""
        name = self.__name__ if isinstance(self, type) else type(self).__name__ if isinstance(self, Method) else "this method"
        raise TypeError(
            f"{name} works in this package's DistributedOptimizer alone: import scalecom_hvd.torch as hvd. In horovod.torch's own, take "
            "ScaleCom(named_parameters=...)"
        )

    def decompress(self, tensor: Any, ctx: Any = None) -> torch.Tensor:
        """The average as it is: this package's optimizer has exchanged it before Horovod asks."""
        return tensor
