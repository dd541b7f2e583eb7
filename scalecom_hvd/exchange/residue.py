"""Residues: one per compressed tensor.

`CompressedTensor` is one tensor's residue with its lanes. `Residues` holds all residues of one
optimizer, and the number of steps. What a step does to them is in bucket_step.py. run.py saves and
loads them.
Imports kernels/choice and the framework-free rooms.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.lanes import Lanes, geometry
from scalecom_hvd.recent_norms import RecentNorms
from scalecom_hvd.training_warnings import (
    LOOK_EVERY,
    Health,
    check_run,
    growth_limit,
)

log = logging.getLogger("scalecom_hvd")


def torch_dtype(name: str | np.dtype) -> torch.dtype:
    """torch.float32 for "float32" or np.dtype("float32"), and so on."""
    return getattr(torch, str(name))


def every_step(steps: int) -> int:
    """How many synchronisations there are in this many steps, if every step makes one."""
    return steps


class CompressedTensor:
    """One compressed parameter on this rank: its lanes and its residue.

    Attributes:
        residue: (N,) float32 or float64, zero at the start.
        geometry: its lanes in the coming step (`Residues.enter_stage`).
        wire_dtype, offset_dtype: the dtypes of values and offsets. Values have the residue's, or
            int8, which stands for integers of few bits; several of them share a word (integers.py).
        levels: L of those integers. 0: values travel as numbers.
        beta: the low-pass filter's beta.
        extra: how many times more of what waits is sent at indices where the gradient agrees.
        norms: of its recent gradients.
    """

    def __init__(
        self, name: str, parameter: torch.Tensor, rate: float, config: ScaleComConfig
    ) -> None:
        self.name = name
        self.shape = parameter.shape
        after = geometry(parameter.numel(), rate, config.selection)
        first = geometry(parameter.numel(), config.rate_in_warmup(rate), config.selection)
        self._lanes = first, after
        self.geometry = after
        dtype = torch_dtype(config.residue_dtype_for(str(parameter.dtype).removeprefix("torch.")))
        self.residue = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        self.levels = config.levels
        self.wire_dtype = torch.int8 if self.levels else dtype
        self.beta, self.extra = config.beta, config.extra
        self.norms = RecentNorms()
        # A wrong SCALECOM_KERNEL is refused here, not in a hook.
        kernel_for(parameter.device, parameter.dtype, dtype, self.geometry)

    @property
    def offset_dtype(self) -> torch.dtype:
        """The dtype in which offsets are kept."""
        return torch_dtype(self.geometry.offset_dtype)

    def lanes(self, warms_up: bool) -> Lanes:
        """The lanes of the warm-up, or of the steps after it."""
        return self._lanes[not warms_up]


class Residues:
    """All residues of one optimizer on this rank, with the number of steps taken.

    Attributes:
        tensors: {parameter's name: CompressedTensor}.
        step: how many steps have counted.
        skipped_steps: how many did not, because a gradient was not finite on some rank.
        buckets: the names in each bucket, once ranks have agreed on them.
        ranks, rank: how many ranks there are, and which one this is, once this is known.
        rates: {name: rate} of all parameters, once they are known.
        given_back: names of those that became what they were before the step before, because its
            averages were thrown away, when the last step began.
    """

    def __init__(self, config: ScaleComConfig) -> None:
        self.config = config.resolved()
        self.step = 0
        self.skipped_steps = 0
        self.tensors: dict[str, CompressedTensor] = {}
        self.buckets: list[list[str]] | None = None
        self.ranks: int | None = None
        self.rank: int | None = None
        self.rates: dict[str, float] = {}
        self.given_back: set[str] = set()
        # Whether all gradients that this rank was seen to have were zero.
        self.is_idle = True
        self.health = Health()
        # How many synchronisations there are in a number of steps: fewer with local steps.
        self.synchronisations_in: Callable[[int], int] = every_step

    @property
    def warmup(self) -> int:
        """How many of the first steps are the warm-up."""
        return self.synchronisations_in(self.config.warmup_steps)

    @property
    def whole_steps(self) -> int:
        """How many of the first steps are sent whole."""
        return self.synchronisations_in(self.config.whole_steps)

    def last_rate(self, name: str) -> float:
        """The rate at which a parameter was sent in the last step. 1: whole."""
        last = self.step - 1
        if last < self.whole_steps:
            return 1.0
        rate = self.rates[name]
        return self.config.rate_in_warmup(rate) if last < self.warmup else rate

    def enter_stage(self) -> bool:
        """Give tensors the lanes of the coming step. Return whether some had others before.

        This depends only on the step, so all ranks do it at the same step.
        """
        new = self.lanes_at(self.step)
        changes = any(tensor.geometry != new[name] for name, tensor in self.tensors.items())
        for name, tensor in self.tensors.items():
            tensor.geometry = new[name]
        return changes

    def lanes_at(self, step: int) -> dict[str, Lanes]:
        """{name: lanes} of the compressed tensors in a step."""
        warms_up = step < self.warmup
        return {name: tensor.lanes(warms_up) for name, tensor in self.tensors.items()}

    def attach(
        self,
        parameters: Mapping[str, torch.Tensor],
        whole: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Learn the parameters, and make a residue for each that is compressed.

        Args:
            parameters: all that are trained, in the model's order.
            whole: {name: shape} of the tensors that these parameters are shards of. With them, all
                ranks of a node decide alike what is compressed. None: the parameters are whole.

        Raises:
            ValueError: a glob matches nothing.
            TypeError: a parameter is complex.
        """
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise TypeError(
                    f"{name} has dtype {parameter.dtype}, which ScaleCom cannot average over "
                    "ranks. Train it as two real parameters, or leave it out of this optimizer"
                )
        shapes = dict(whole or {name: tuple(p.shape) for name, p in parameters.items()})
        self.rates = self.config.rates_for(shapes)
        self.tensors = {
            name: CompressedTensor(name, parameter, self.rates[name], self.config)
            for name, parameter in parameters.items()
            if self.rates[name] > 1 and parameter.numel()  # a shard may be empty
        }
        self.enter_stage()
        total = self.config.total_steps
        total = None if total is None else self.synchronisations_in(total)
        check_run(self.config, self.rates, shapes, total, self.warmup)

    def detach(self) -> None:
        """Forget the parameters."""
        self.tensors, self.rates, self.synchronisations_in = {}, {}, every_step

    def norms_due(self) -> bool:
        """Whether this is a step in which norms are looked at."""
        return self.step % LOOK_EVERY == 0

    def look(self, norms: Sequence[tuple[float, float]]) -> None:
        """See whether residues grow, given each bucket's norms of residues and gradients."""
        residues, grads = (math.hypot(*(pair[which] for pair in norms)) for which in (0, 1))
        waits, limit = residues / self.config.beta, growth_limit(self.rates.values(), self.config)
        if grads or any(tensor.norms.count for tensor in self.tensors.values()):
            self.is_idle = False
        self.health.look(self.step, waits, grads, limit, self.is_idle)

    def scale_after_outliers(self, norms: Mapping[str, float]) -> None:
        """Scale residues down whose tensors had an outlier in this step. See config.outliers.

        norms: {name: norm of this rank's gradient}.
        """
        for name, norm in norms.items():
            own = self.tensors[name]
            longest = own.norms.longest
            share = own.norms.share(norm, self.config.outliers, self.config.max_norm)
            if share < 1:
                own.residue.mul_(share)
                log.info(
                    "step %d: a gradient of %s has the norm %.3g, the longest recent one %.3g, so "
                    "its residue is multiplied by %g",
                    self.step,
                    name,
                    norm,
                    longest,
                    share,
                )

    def note_ranks(self, ranks: int, rank: int) -> bool:
        """Note how many ranks there are. If the number has changed, log this, and return True."""
        others = self.ranks not in (None, ranks)
        if others:
            log.warning(
                "resuming on %d ranks, after training on %d ranks. New ranks start with empty "
                "residues; the residues of ranks that are gone are lost",
                ranks,
                self.ranks,
            )
        self.ranks, self.rank = ranks, rank
        return others

    def note_skipped_step(self) -> None:
        """Count a skipped step: a gradient was not finite on some rank."""
        self.skipped_steps += 1
        log.info(
            "step %d is skipped: a gradient was not finite on some rank (%d skipped so far)",
            self.step,
            self.skipped_steps,
        )
        self.health.skip(self.step)

    def note_step(self) -> None:
        """Note that a step counted."""
        self.step += 1
        self.health.take()

    def norm(self) -> float:
        """The Euclidean norm of all residues together; reads them all."""
        wide = torch.float64
        norms = [torch.linalg.vector_norm(t.residue, dtype=wide) for t in self.tensors.values()]
        return math.hypot(*map(float, norms))


def describe_tensors(
    parameters: Mapping[str, torch.Tensor], residues: Residues
) -> dict[str, list[Any]]:
    """What ranks must have in common, tensor by tensor: shape, dtype, kind of device and rate."""
    return {
        name: [list(p.shape), str(p.dtype), p.device.type, f"rate {residues.rates[name]:g}"]
        for name, p in parameters.items()
    }
