"""Checks what ranks that take local steps must have in common, given what each told all others.

All ranks see the same list, so all raise or none does. local_steps.py calls this.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger("scalecom_hvd")

Told = Sequence[Mapping[str, Any]]
"""What every rank told, in order of position; see LocalSteps."""


def check_not_overwritten(everyone: Told) -> None:
    """Raise RuntimeError if a rank's own parameters, which it held, were overwritten."""
    lost = [rank for rank, other in enumerate(everyone) if other["overwritten"]]
    if lost:
        raise RuntimeError(
            f"parameters of rank {', '.join(map(str, lost))} were changed after loading a state "
            "from the middle of a round of local steps, so they are no longer that rank's own. "
            "Load the compressor's state last, or call broadcast_parameters of scalecom_hvd.torch "
            "after loading the model: it leaves every rank its own parameters. To begin from other "
            "parameters, save after optimizer.synchronize_parameters(), when no round is under way"
        )


def latest_ranks(everyone: Told) -> tuple[list[int], int]:
    """The positions of the ranks that have trained furthest, and how many steps they took.

    In elastic runs a rank may have committed a step that others have not. Newcomers are left out,
    so there are no positions if all ranks are newcomers.
    """
    taken = {rank: other["taken"] for rank, other in enumerate(everyone) if other["knows"]}
    latest = max(taken.values(), default=0)
    return [rank for rank, steps in taken.items() if steps == latest], latest


def check_same_start(everyone: Told) -> None:
    """Raise RuntimeError unless these ranks begin from the same common parameters."""
    if len({other["parameters"] for other in everyone}) > 1:
        raise RuntimeError(
            "ranks begin local steps from different parameters, and local steps would never make "
            "them equal. Call broadcast_parameters on all ranks before the first step (with "
            'process_group=mesh.get_group("replicate") if the model is sharded), and load states '
            "of the same step. If the model was saved in the middle of a round, load the "
            "compressor's state too"
        )
    check_same_outer(everyone)


def check_same_outer(everyone: Told) -> None:
    """Raise RuntimeError unless these ranks' outer optimizers step alike."""
    groups = [other["outer_groups"] for other in everyone]
    if any(other != groups[0] for other in groups):
        raise RuntimeError(
            f"ranks' outer optimizers differ: {groups}. Step the scheduler of optimizer.outer, or "
            "load its state, in the same way on every rank. If the scheduler follows a metric, "
            "give it the same value on all ranks"
        )


def check_same_steps(everyone: Told) -> None:
    """Raise RuntimeError unless ranks that synchronise now have taken equally many steps."""
    steps = [other["taken"] for other in everyone]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"ranks synchronise after different numbers of steps, {steps}. Let every rank take "
            "every step, and call synchronize_parameters() on all ranks after the same step"
        )
    check_same_outer(everyone)


def warn_of_same_steps(everyone: Told) -> None:
    """Log a warning if something else has averaged the gradients of all workers' first steps."""
    if len(everyone) > 1 and everyone[0]["moved"] and all(one == everyone[0] for one in everyone):
        log.warning(
            "all %d workers took the same local steps, so their gradients were averaged in every "
            "step, and local steps save no traffic. If DistributedDataParallel wraps the model, "
            "leave it out, or for nodes give it process_group=mesh.get_group('shard'). If all "
            "workers read the same data, give each its own",
            len(everyone),
        )
