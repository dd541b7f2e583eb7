"""The ways that race: how a user may train over a slow network.

Each way follows its documentation's advice. PowerSGD begins after a tenth of the steps, as in
PyTorch's example. A larger batch has a learning rate of its own. ScaleCom runs with its defaults.
DDP's bf16 hook is left out, because it needs NCCL. The control is a rank that trains alone, on its
own data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import scalecom_hvd.ddp as ddp
from scalecom_hvd.exchange.pace import Pace

Hook = tuple[Any, Any]
"""A state and a communication hook of DistributedDataParallel."""

# Steps in which the learning rate rises; in short runs, a quarter of the steps.
WARMUP = 100
# Steps of an inner optimizer between two synchronisations. Papers take 15 to 500; a run of the race
# has hundreds of steps.
LOCAL_STEPS = 20


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        steps: the share of dense training's steps that it takes; fewer steps if each has more data.
        lengths: factors of the number of steps. The first factor counts with which the way ends
            where dense training does; if none does, the first of all.
        microbatches: in a step.
        hook: makes a hook from the model, the number of steps and settings of ScaleCom; None: DDP's
            own.
        local: makes the arguments of DistributedOptimizer, without DDP; None: the way uses DDP.
        timed_as: bench_worker.py's name of the way's step.
        alone: whether every rank trains alone. Rank 0 is evaluated.
        begins: the share of the steps that come first and are dense, in one bucket.
        rate: a factor of the learning rates that are tried. With AdamW, a batch m times as large
            has sqrt(m) times the rate if noise dominates.
    """

    timed_as: str
    steps: float = 1.0
    lengths: tuple[float, ...] = (1.0, 1.25, 1.5)
    microbatches: int = 1
    hook: Callable[..., Hook] | None = None
    local: Callable[[], dict[str, Any]] | None = None
    alone: bool = False
    begins: float = 0.0
    rate: float = 1.0

    @property
    def trains_as(self) -> tuple[Any, ...]:
        """What determines a run of it, besides its name."""
        return (
            self.steps,
            self.microbatches,
            self.begins,
            LOCAL_STEPS if self.local else 0,
            WARMUP,
        )

    @property
    def timed(self) -> list[str]:
        """The steps that must be measured for it."""
        more = ["DDP dense, one bucket"] * (self.begins > 0)
        return [self.timed_as, *more, *["forward and backward"] * (self.microbatches > 1)]


def _scalecom(model: DistributedDataParallel, steps: int, **settings: Any) -> Hook:
    return ddp.ScaleComState(model, **settings), ddp.scalecom_hook


def _auto(model: DistributedDataParallel, steps: int, rungs: dict[int, int], **_: Any) -> Hook:
    """rate="auto", whose rungs ({first step: rung}) were found where the network is slow."""

    def vote(pace: Pace) -> int:
        coming = pace._residues.step + 1
        return 1 + rungs[max(n for n in rungs if n <= coming)] if dist.get_rank() == 0 else 0

    Pace.vote = vote  # type: ignore[method-assign]
    return ddp.ScaleComState(model, rate="auto"), ddp.scalecom_hook


def _power_sgd(rank: int) -> Way:
    def hook(model: DistributedDataParallel, steps: int, **settings: Any) -> Hook:
        start = max(2, round(POWER_SGD_BEGINS * steps))
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        return state, powerSGD_hook

    return Way(f"DDP PowerSGD, rank {rank}", hook=hook, begins=POWER_SGD_BEGINS)


POWER_SGD_BEGINS = 0.1
DENSE, OURS = "DDP, dense", "ScaleCom"
# With the defaults, or with other settings.
WITH_SETTINGS = (OURS, "ScaleCom, auto", "ScaleCom, 4 times the batch")
WAYS = {
    DENSE: Way("DDP dense", lengths=(1.0,)),
    "one worker alone": Way("no communication", alone=True),
    OURS: Way("DDP ScaleCom cyclic", hook=_scalecom),
    "ScaleCom, auto": Way("DDP ScaleCom, auto", hook=_auto),
    "DDP's fp16 hook": Way(
        "DDP fp16 hook",
        hook=lambda model, steps, **settings: (None, default_hooks.fp16_compress_hook),
    ),
    "PowerSGD, rank 1": _power_sgd(1),
    "PowerSGD, rank 2": _power_sgd(2),
    "PowerSGD, rank 4": _power_sgd(4),
    "dense, 4 times the batch": Way("DDP dense", steps=1 / 2, microbatches=4, rate=2.0),
    "ScaleCom, 4 times the batch": Way(
        "DDP ScaleCom cyclic", steps=1 / 2, microbatches=4, rate=2.0, hook=_scalecom
    ),
    "dense, 16 times the batch": Way("DDP dense", steps=1 / 4, microbatches=16, rate=4.0),
    "DiLoCo": Way(f"DiLoCo, H = {LOCAL_STEPS}", local=lambda: ddp.diloco(LOCAL_STEPS)),
    "SparseLoCo": Way(f"SparseLoCo, H = {LOCAL_STEPS}", local=lambda: ddp.sparseloco(LOCAL_STEPS)),
}


def wrapped(
    way: Way,
    model: torch.nn.Module,
    steps: int,
    settings: dict[str, Any],
    bucket_mb: float | None = None,
) -> torch.nn.Module:
    """The model, wrapped for this way. settings: of ScaleCom. bucket_mb: of DDP."""
    if way.alone or way.local is not None:
        return model
    # PowerSGD's hook submits collectives when others have ended. Over Gloo, that order may differ
    # between ranks, so the hook dies if there is more than one bucket.
    cap = 1000 if "PowerSGD" in way.timed_as else bucket_mb
    called = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if way.hook is not None:
        called.register_comm_hook(*way.hook(called, steps, **settings))
    return called
