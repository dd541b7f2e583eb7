"""ScaleCom for Horovod's own DistributedOptimizer: a compressor, whose work per_tensor.py does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange import methods
from scalecom_hvd.exchange.faces import without_ties
from scalecom_hvd.exchange.new_gradients import freshness
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives
from scalecom_hvd.torch.per_tensor import PerTensor

_NEEDS_PARAMETERS = (
    "in horovod.torch's own DistributedOptimizer, ScaleCom must know the parameters. Write "
    "compression=ScaleCom(named_parameters=model.named_parameters()), or import scalecom_hvd.torch "
    "as hvd and use its DistributedOptimizer, which takes compression=hvd.ScaleCom"
)
_ELSEWHERE = (
    "{} works only in this package's DistributedOptimizer: import scalecom_hvd.torch as hvd, and "
    "leave named_parameters out of ScaleCom"
)


class ScaleCom(methods.ScaleCom):
    __doc__ = (
        methods.ScaleCom.__doc__
        + """
    In Horovod's own optimizer, ScaleCom takes two more arguments:

    Args:
        named_parameters: an iterable of (name, parameter), such as model.named_parameters(). It is
            required there, and only there: with it, values have 32 bits.
        process_set: the process set given to the optimizer.

    There, ScaleCom works with look-ahead and 32 bits, and takes no schedule of rates or
    diagnostics.
    """
    )

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        process_set: ProcessSet | None = None,
        **settings: Any,
    ) -> None:
        self._process_set = process_set
        self._named_parameters = None if named_parameters is None else _by_name(named_parameters)
        super().__init__(**settings)
        named = self._named_parameters or {}
        self._trained = {name for name, p in named.items() if p.requires_grad}
        self._fresh = freshness(named)

    def _resolved(self, config: ScaleComConfig, every_step: bool = False) -> ScaleComConfig:
        # Horovod's own optimizer sums floats, so values cannot be integers there.
        knows_bits = self._named_parameters is None or config.rate == "auto"
        return config.resolved(every_step, knows_bits)

    def compress(self, tensor: Any = None) -> tuple[torch.Tensor, Any]:
        """What Horovod's own optimizer sends for a gradient: k values, or all of it.

        Horovod calls this in backward's hooks, where it waits for nothing.
        """
        if not isinstance(self, ScaleCom):  # the bare class was called: `self` is the gradient
            raise TypeError(_NEEDS_PARAMETERS)
        if not tensor.is_floating_point():
            raise TypeError(
                f"ScaleCom compresses floating-point gradients, not {tensor.dtype}: use "
                "hvd.Compression.none for this tensor"
            )
        self._serve_horovod()
        averager = self.run.averager
        if not isinstance(averager, PerTensor):
            raise TypeError(
                "this ScaleCom serves the optimizer it was given to, and compresses nothing else. "
                "Use hvd.Compression.none for this tensor"
            )
        return averager.compress(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """The averaged gradient for what `compress` gave. `ctx` None: nothing was compressed."""
        if ctx is None:
            return tensor
        assert isinstance(self.run.averager, PerTensor), "only `compress` gives a ctx"
        return self.run.averager.decompress(tensor, ctx)

    def rejoin(self) -> None:
        """What all ranks do after a restart, or when new ranks have come."""
        self._serve_horovod()
        super().rejoin()

    def _serve_horovod(self) -> None:
        """Attach to the parameters given to this object, unless it serves an optimizer already."""
        if self.run.averager is not None:
            return
        if self._named_parameters is None:
            raise TypeError(_NEEDS_PARAMETERS)
        for asked, what in (
            (not self.config.has_fixed_rate, f"rate={self.config.rate!r}"),
            (self.config.bits < 32, f"bits={self.config.bits}"),
            (self.diagnostics is not None, "diagnostics=..."),
        ):
            if asked:
                raise TypeError(_ELSEWHERE.format(what))
        self.settle(every_step=True)
        # Horovod keeps to the parameters that were trained when its optimizer was made. That was
        # after this object was made, and before the first step.
        named, trained = self._named_parameters, self._trained
        known = {name: p for name, p in named.items() if p.requires_grad or name in trained}
        PerTensor(known, self, HorovodCollectives(self._process_set), self._fresh)


def _by_name(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """{name: parameter}. A tied parameter has the first of its names, the same on every rank."""
    named_parameters = list(named_parameters)
    if not all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)
        for item in named_parameters
    ):
        raise ValueError(
            "ScaleCom's named_parameters should be (name, parameter) tuples, as "
            "model.named_parameters() gives"
        )
    distinct = without_ties(named_parameters)
    parameters = dict(distinct)
    twice = sorted({name for name, parameter in distinct if parameters[name] is not parameter})
    if twice:
        raise ValueError(
            f"names in ScaleCom's named_parameters must be unique, but {', '.join(twice)} names "
            "several parameters"
        )
    return parameters
