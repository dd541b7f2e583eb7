"""Residues: one per compressed tensor, with its lanes, and all of one optimizer's together.

What a step does to them is in bucket_step.py. run.py saves and loads them.
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
from scalecom_hvd.integers import levels_of
from scalecom_hvd.lanes import Lanes, geometry
from scalecom_hvd.recent_norms import RecentNorms
from scalecom_hvd.stages import LADDER, START, WHOLE, Stage
from scalecom_hvd.training_warnings import LOOK_EVERY, Health, check_run, growth_limit

log = logging.getLogger("scalecom_hvd")


def torch_dtype(name: str | np.dtype) -> torch.dtype:
    """torch.float32 for "float32" or np.dtype("float32"), and so on."""
    return getattr(torch, str(name))


class CompressedTensor:
    """One compressed parameter on this rank: its lanes and its residue.

    Attributes:
        residue: (N,) float32 or float64, zero at the start.
        own_rate: its rate in all stages but the rung "whole". None: the stage says it.
        rate, geometry, levels: its rate, its lanes and L of its integers (0: none) in the coming
            step.
        few_bits: whether values may be integers in some stage.
        beta, extra: of the filter; how often more what waits is sent where the gradient agrees.
        norms: of its recent gradients.
    """

    def __init__(
        self, name: str, parameter: torch.Tensor, own_rate: float | None, config: ScaleComConfig
    ) -> None:
        self.name = name
        self.shape = parameter.shape
        self.own_rate, self._selection = own_rate, config.selection
        dtype = torch_dtype(config.residue_dtype_for(str(parameter.dtype).removeprefix("torch.")))
        self.residue = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        self.few_bits = config.levels > 0
        self.enter(config.stages[0][1])
        self.beta, self.extra = config.beta, config.extra
        self.norms = RecentNorms()
        # A wrong SCALECOM_KERNEL is refused here, not in a hook.
        kernel_for(parameter.device, parameter.dtype, dtype, self.geometry)

    def enter(self, stage: Stage) -> None:
        """Take the rate, the lanes and the bits of a stage."""
        self.rate, self.levels = self._rate_in(stage), levels_of(stage.bits)
        self.geometry = self.lanes(stage)

    def lanes(self, stage: Stage) -> Lanes:
        """Its lanes in a stage."""
        return geometry(self.residue.numel(), self._rate_in(stage), self._selection)

    def _rate_in(self, stage: Stage) -> float:
        # Its first step on this rung sends all that waits, and the others need no rate.
        is_rung_whole = stage is LADDER[WHOLE]
        return stage.rate if self.own_rate is None or is_rung_whole else self.own_rate


class Residues:
    """All residues of one optimizer on this rank, with the number of steps taken.

    Attributes:
        tensors: {parameter's name: CompressedTensor}.
        step, skipped_steps: how many steps counted, and how many did not, because a gradient was
            not finite on some rank.
        buckets, ranks, rank: the names in each bucket, the number of ranks, and this one, once
            known.
        rates: {name: own rate} of all parameters, once they are known; see config.own_rates_for.
        last_rates: {name: rate > 1} of what the last step sent, and no momentum has mixed since.
        rung, rung_since: of rate="auto" (stages.py), and the first step on it. None: a given rate.
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
        self.rates: dict[str, float | None] = {}
        self.rung = START if self.config.rate == "auto" else None
        self.rung_since = 0
        self._stage: Stage | None = None
        self.last_rates: dict[str, float] = {}
        self.given_back: set[str] = set()
        self.health = Health()
        # How many synchronisations there are in a number of steps: fewer with local steps.
        self.synchronisations_in: Callable[[int], int] = int

    @property
    def sends_whole(self) -> bool:
        """Whether the coming step is sent whole."""
        return self.is_whole_at(self.step)

    def is_whole_at(self, step: int) -> bool:
        """Whether a step is sent whole. On that rung, the first step also sends all that waits."""
        in_warmup = step < self.synchronisations_in(self.config.warmup_steps)
        return in_warmup or (self.rung == WHOLE and step != self.rung_since)

    def stage_at(self, step: int) -> Stage:
        """What compressed tensors send in a step, on the present rung."""
        if self.rung is not None:
            return LADDER[self.rung]
        stages, exchanges_in = self.config.stages, self.synchronisations_in
        begun = [stage for first, stage in stages[1:] if exchanges_in(first) <= step]
        return begun[-1] if begun else stages[0][1]

    def take_rung(self, rung: int) -> None:
        """Go on on this rung from the coming step on."""
        if rung != self.rung:
            self.rung, self.rung_since = rung, self.step

    def enter_stage(self) -> bool:
        """Give tensors the lanes of the coming step. Returns whether some had others before.

        This depends only on the step and the rung, so all ranks do it at the same step.
        """
        stage, before = self.stage_at(self.step), self._stage
        if stage == before:
            return False
        self._stage = stage
        for tensor in self.tensors.values():
            tensor.enter(stage)
        return before is not None

    def attach(
        self,
        parameters: Mapping[str, torch.Tensor],
        whole: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Learn the parameters, in the model's order, and make residues for those compressed.

        whole: {name: shape} of the tensors that these parameters are shards of, by which all ranks
        of a node decide alike what is compressed. None: the parameters are whole.

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
        self.rates = self.config.own_rates_for(shapes)
        self.tensors = {
            name: CompressedTensor(name, parameter, self.rates[name], self.config)
            for name, parameter in parameters.items()
            if self.rates[name] != 1 and parameter.numel()  # a shard may be empty
        }
        self._stage = None
        self.enter_stage()
        check_run(self.config, self.rates, shapes, self.synchronisations_in)

    def norms_due(self) -> bool:
        """Whether this is a step in which norms are looked at."""
        return self.step % LOOK_EVERY == 0

    def look(self, norms: Sequence[tuple[float, float]]) -> None:
        """See whether residues grow, given each bucket's norms of residues and gradients."""
        residues, grads = (math.hypot(*(pair[which] for pair in norms)) for which in (0, 1))
        limit = growth_limit([tensor.rate for tensor in self.tensors.values()], self.config)
        self.health.look(self.step, residues / self.config.beta, grads, limit)

    def scale_after_outliers(self, norms: Mapping[str, float]) -> None:
        """Scale down residues whose gradients' norms {name: norm} are outliers."""
        for name, norm in norms.items():
            own = self.tensors[name]
            longest = own.norms.longest
            share = own.norms.share(norm, self.config.outliers)
            if share < 1:
                own.residue.mul_(share)
                said = (
                    "step %d: a gradient of %s has the norm %.3g, the longest recent one %.3g, so "
                    "its residue is multiplied by %g"
                )
                log.info(said, self.step, name, norm, longest, share)

    def note_ranks(self, ranks: int, rank: int) -> bool:
        """Note how many ranks there are. Returns whether the number has changed, and logs it."""
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
        late = {} if self.sends_whole else self.tensors
        self.last_rates = {name: tensor.rate for name, tensor in late.items() if tensor.rate != 1}
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
    rates = {
        n: "compressed" if own is None else f"rate {own:g}" for n, own in residues.rates.items()
    }
    return {
        name: [list(p.shape), str(p.dtype), p.device.type, rates[name]]
        for name, p in parameters.items()
    }
