"""Residues: one per compressed tensor, and how all of a rank's residues are saved and loaded.

`CompressedTensor` is a tensor's residue with its geometry; `Residues` holds all those of one optimizer, with the step count. What a step
does to them is in moves.py. Used by everything above; imports kernels and the framework-free rooms.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scalecom_hvd.agreement import digest_of
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.health import LOOK_EVERY, Health, check_length, check_share_whole, growth_limit
from scalecom_hvd.lanes import geometry
from scalecom_hvd.state import STATE_VERSION, check_finite, check_offsets, check_residues, check_state
from scalecom_hvd.torch.kernels import kernel_for

log = logging.getLogger("scalecom_hvd")


def torch_dtype(name: Any) -> torch.dtype:
    """torch.float32 for "float32" or np.dtype("float32"), and so on."""
    return getattr(torch, str(name))


def every_step(steps: int) -> int:
    """How many exchanges there are in so many steps, if every step makes one."""
    return steps


def check_gradient(name: str, grad: torch.Tensor, like: torch.Tensor) -> None:
    """Raise RuntimeError unless a gradient has as many elements as `like`, on the same device: kernels follow addresses."""
    if grad.numel() != like.numel() or grad.device != like.device:
        raise RuntimeError(
            f"the gradient of {name} has {grad.numel()} elements on {grad.device}, and its parameter had {like.numel()} on {like.device} "
            "when the optimizer was made: make the DistributedOptimizer when the model has its final shapes and is on its device"
        )


class CompressedTensor:
    """One compressed parameter on this rank: its lanes and its residue, (N,) float32 or float64, zero at the start."""

    def __init__(self, name: str, parameter: torch.Tensor, rate: float, config: ScaleComConfig) -> None:
        self.name = name
        self.shape = parameter.shape
        self.geometry = geometry(parameter.numel(), rate, config.selection)
        residue_dtype = torch_dtype(config.residue_dtype_for(str(parameter.dtype).removeprefix("torch.")))
        self.residue = torch.zeros(parameter.numel(), dtype=residue_dtype, device=parameter.device)
        self.wire_dtype = torch_dtype(config.wire_dtype) if config.wire_dtype else residue_dtype
        self.offset_dtype = torch_dtype(self.geometry.offset_dtype)
        self.beta = config.beta
        kernel_for(parameter.device, parameter.dtype, residue_dtype)  # a wrong SCALECOM_KERNEL is refused here, not in a hook


class Residues:
    """All residues of one optimizer on this rank, by parameter name, with the number of steps taken.

    step: steps that happened.  skipped_steps: those that did not, because a gradient was not finite somewhere.
    chosen_ahead: in look-ahead, {name: offsets of the next step}.  buckets: names per bucket, and ranks: how many there are, once they
    agreed.
    """

    def __init__(self, config: ScaleComConfig) -> None:
        self.config = config
        self.step = 0
        self.skipped_steps = 0
        self.tensors: dict[str, CompressedTensor] = {}
        self.chosen_ahead: dict[str, torch.Tensor] = {}
        self.buckets: list[list[str]] | None = None
        self.ranks: int | None = None
        self.rates: dict[str, float] | None = None
        self.health = Health()
        # How many exchanges there are in so many steps of the optimizer: with local steps, fewer.
        self.exchanges_in: Callable[[int], int] = every_step
        self._loaded: dict[str, torch.Tensor] | None = None

    @property
    def warmup(self) -> int:
        """How many first exchanges are sent whole."""
        return self.exchanges_in(self.config.warmup_steps)

    def attach(self, parameters: dict[str, torch.Tensor]) -> None:
        """Learn the parameters (all that are trained, in the model's order), and make a residue for each that is compressed.

        Raises ValueError for globs that match nothing, for state loaded earlier that does not fit, TypeError for complex parameters.
        """
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise TypeError(
                    f"{name} has dtype {parameter.dtype}, which ScaleCom cannot average over ranks: train it as two real parameters, or "
                    "keep it out of this optimizer"
                )
        self.rates = self.config.rates_for({name: tuple(p.shape) for name, p in parameters.items()})
        self.tensors = {
            name: CompressedTensor(name, parameter, self.rates[name], self.config)
            for name, parameter in parameters.items()
            if self.rates[name] > 1
        }
        planned = self.config.planned_steps
        check_length(None if planned is None else self.exchanges_in(planned), self.warmup, self.rates.values())
        check_share_whole(self.rates, {name: parameter.numel() for name, parameter in parameters.items()})
        if self._loaded is not None:
            self._check_fits(self._loaded, self.chosen_ahead)
            self._copy_in(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, so that torch.load(..., weights_only=True) reads it. Tensors are not copied."""
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "step": self.step,
            "config": self.config.to_dict(),
            "residues": {name: t.residue.view(t.shape) for name, t in self.tensors.items()},
        }
        if self._loaded is not None:
            state["residues"] = self._loaded
        if self.chosen_ahead:
            state["offsets"] = {name: offsets.clone() for name, offsets in self.chosen_ahead.items()}
        if self.buckets is not None:
            state["buckets"] = self.buckets
        if self.ranks is not None:
            state["ranks"] = self.ranks
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of `state_dict`; raises ValueError that names what does not fit, and then changes nothing."""
        check_state(state, self.config)
        residues, offsets = dict(state["residues"]), dict(state.get("offsets", {}))
        check_finite({name: bool(residue.isfinite().all()) for name, residue in residues.items()})
        if self.rates is not None:
            self._check_fits(residues, offsets)
        self.step = int(state["step"])
        self.chosen_ahead = offsets
        if self.rates is None:
            self._loaded = residues
        else:
            self._copy_in(residues)
        self.ranks = state.get("ranks")
        # Who asks for buckets of another size gets them.
        self.buckets = state.get("buckets") if state["config"]["bucket_bytes"] == self.config.bucket_bytes else None

    def _check_fits(self, residues: dict[str, torch.Tensor], offsets: dict[str, torch.Tensor]) -> None:
        """Raise ValueError for residues, or look-ahead's offsets, of other tensors than these."""
        if residues:
            shapes = ({name: tuple(of[name].shape) for name in of} for of in (residues, self.tensors))
            check_residues(*shapes)
        check_offsets(
            {name: chosen.cpu().numpy() for name, chosen in offsets.items()},
            {name: tensor.geometry for name, tensor in self.tensors.items()},
        )

    def _copy_in(self, residues: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.tensors.items():
            if residues:
                tensor.residue.copy_(residues[name].reshape(-1))
            else:  # saved before the first step, or by a single process: all of them were zero
                tensor.residue.zero_()
        # A state may have been read onto another device.
        self.chosen_ahead = {name: chosen.to(self.tensors[name].residue.device) for name, chosen in self.chosen_ahead.items()}

    def digest_ahead(self) -> str | None:
        """For ranks to compare: where this one gathers in look-ahead's next step; None where nothing is chosen."""
        return digest_of({name: chosen.cpu().numpy() for name, chosen in self.chosen_ahead.items()})

    def look_due(self) -> bool:
        """Whether this is a step in which norms are looked at."""
        return self.step % LOOK_EVERY == 0

    def look(self, norms: Sequence[tuple[float, float]]) -> None:
        """See whether residues grow: norms of residues and of a step's gradients, bucket by bucket."""
        residues, grads = (math.hypot(*(pair[which] for pair in norms)) for which in (0, 1))
        self.health.look(self.step, residues, grads, growth_limit(self.rates.values()))

    def note_ranks(self, ranks: int) -> bool:
        """That is how many ranks there are; gives whether there were others before, which the log then says."""
        others = self.ranks not in (None, ranks)
        if others:
            log.warning(
                "resuming on %d ranks what ran on %d: newcomers start with empty residues, those of ranks that are gone are lost",
                ranks,
                self.ranks,
            )
        self.ranks = ranks
        return others

    def note_skipped_step(self) -> None:
        """A gradient was not finite on some rank: this step is counted, but did not happen."""
        self.skipped_steps += 1
        log.info("step %d is skipped: a gradient was not finite on some rank (%d skipped so far)", self.step, self.skipped_steps)
        self.health.skip(self.step)

    def note_step(self) -> None:
        """A step counted."""
        self.step += 1
        self.health.take()

    def norm(self) -> float:
        """The Euclidean norm of all residues together; reads them all."""
        norms = [float(torch.linalg.vector_norm(t.residue, dtype=torch.float64)) for t in self.tensors.values()]
        return math.hypot(*norms)


def describe(parameters: dict[str, torch.Tensor], residues: Residues) -> dict[str, Any]:
    """What ranks must have in common, tensor by tensor: shape, dtype, kind of device and rate."""
    return {name: [list(p.shape), str(p.dtype), p.device.type, f"rate {residues.rates[name]:g}"] for name, p in sorted(parameters.items())}
