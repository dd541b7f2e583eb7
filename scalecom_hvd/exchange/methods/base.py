"""What a method is: a class with one generator, `step`, that averages one bucket's gradients.

A new method is one new file with a subclass of `Method`; all that it imports is here. What its
`step` told the bucket (bucket_step.py) is committed or rolled back with the step, and so is the
state. Users pass a `Method` as `compression=`. It holds settings; its run holds residues and states
(run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch

from scalecom_hvd.agreement import Settings
from scalecom_hvd.bucket_layout import Stats
from scalecom_hvd.config import ScaleComConfig, checked_integer
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Collectives, Step
from scalecom_hvd.exchange.gradients import LossScale
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.methods.state import State
from scalecom_hvd.exchange.momentum import QuasiHyperbolic
from scalecom_hvd.exchange.residue import CompressedTensor, Residues
from scalecom_hvd.exchange.run import Run
from scalecom_hvd.saved_state import Saved

OPTIONAL = ("bits", "leader", "lookahead", "selection")
"""Settings that not every method has a use for."""


class Method:
    """A way to average gradients with error feedback. One object serves one optimizer.

    Args:
        config: the settings. Default: the default settings, overridden by SCALECOM_RATE,
            SCALECOM_BETA, ... of the environment.
        loss_scale: a torch.amp.GradScaler, or a callable that returns the current scale. Residues
            are then kept in unscaled units.
        diagnostics: a number of steps, the same on all ranks. Once every so many steps, ranks
            measure how alike workers are, and how good the choice is.
        **fields: those fields of ScaleComConfig that the method uses. They override `config`.

    Attributes:
        quasi_hyperbolic: mixes the optimizer's momentum. None: no optimizer is served yet.
        scaling: the loss scale.

    Raises:
        ValueError, TypeError: a setting cannot work, or means nothing to the method.
    """

    uses: ClassVar[tuple[str, ...]] = ("selection",)
    """Those of OPTIONAL that this method has a use for: "leader" if one rank chooses for all, and
    "bits" if values may be integers, which bucket.take_and_accumulate() makes."""
    equal_state: ClassVar[tuple[str, ...]] = ()
    """The parts of the method's state, and of its tensors' states, that are the same on all ranks.
    If they differ, because some come from another step, all ranks begin them anew."""

    def __init__(
        self,
        *,
        config: ScaleComConfig | None = None,
        loss_scale: object = None,
        diagnostics: int | None = None,
        **fields: Any,
    ) -> None:
        name = type(self).__name__
        if unknown := {*self.uses} - {*OPTIONAL}:
            raise TypeError(f"{name}.uses names {sorted(unknown)}, but knows only {OPTIONAL}")
        config = (config or ScaleComConfig.from_env()).replace(**fields)
        # Settings that depend on whether every step averages gradients; see `settle`.
        self._open = [name for name in ("beta", "nu") if getattr(config, name) is None]
        if config.rate == "auto" and "bits" not in self.uses:
            raise ValueError("rate='auto' needs ScaleCom: give a rate")
        self.run = Run(self, self._resolved(config))
        defaults = self._resolved(ScaleComConfig())
        for field in sorted({*OPTIONAL} - {*self.uses}):
            if getattr(self.config, field) != getattr(defaults, field):
                raise ValueError(
                    f"{field} means nothing to {name}: leave it out, and unset "
                    f"SCALECOM_{field.upper()} if it is set"
                )
        if diagnostics is not None and checked_integer("diagnostics", diagnostics) < 1:
            raise ValueError(f"diagnostics must be at least 1, not {diagnostics}")
        self.diagnostics = None if diagnostics is None else int(diagnostics)
        self.scaling = LossScale(loss_scale)
        self.quasi_hyperbolic: QuasiHyperbolic | None = None

    # What a new method defines.

    def step(
        self, bucket: BucketStep, collectives: BucketCollectives, state: State
    ) -> Step[State | None]:
        """Average a bucket's compressed tensors over ranks.

        Tell the bucket what it sends and what it receives (bucket_step.py). Every rank must receive
        the same. Yield what must be waited for: `yield from` does so for moves and collectives.
        What is not sent stays in the residue. A step may still be skipped, so change nothing but
        the bucket.

        Returns:
            The next State, made by dataclasses.replace(state, tensors=...). None keeps the current
            one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define step(self, bucket, collectives, state)"
        )

    def whole_step(
        self, bucket: BucketStep, collectives: BucketCollectives, state: State
    ) -> Step[State | None]:
        """In a step that is sent whole this replaces `step`, before gradients travel.

        It sends no values, and leaves residues as they are. bucket.grads holds this rank's
        gradients; times bucket.scale they are in the residues' units. Returns the next state as
        `step` does.
        """
        return None
        yield  # which makes it a generator

    def init(self, tensor: CompressedTensor) -> dict[str, torch.Tensor]:
        """The state of a tensor at the start, {what: tensor}. Shapes stay the same later on.

        `tensor` has the residue m (N,) as tensor.residue, and its lanes as tensor.geometry.
        """
        return {}

    def init_method(self) -> dict[str, Any]:
        """The state of the whole method at the start, {what: tensor or number}."""
        return {}

    def is_ready(self, names: Collection[str]) -> bool:
        """Whether the state of these tensors allows a compressed step; else it is sent whole."""
        return True

    @property
    def settings(self) -> Settings:
        """What must be the same on all ranks, and in a loaded state, besides the config.

        The values are JSON. A method adds its own to them: super().settings | {"mu": self.mu}.
        """
        return {"method": type(self).__name__}

    # What follows from its settings.

    @property
    def config(self) -> ScaleComConfig:
        """The settings. Its residues hold them."""
        return self.residues.config

    @property
    def loss_scale(self) -> Callable[[], float | torch.Tensor]:
        """A function that returns the current loss scale. It may be set to a GradScaler too."""
        return self.scaling.read

    @loss_scale.setter
    def loss_scale(self, loss_scale: Any) -> None:
        self.scaling = LossScale(loss_scale)

    def settle(self, every_step: bool) -> None:
        """Settle what the settings leave open.

        every_step: whether every step of the optimizer averages gradients. Only then is its
        momentum made quasi-hyperbolic.
        """
        if self.run.averager is not None:
            raise RuntimeError("settle() comes before the method serves an exchange")
        config = self.config.replace(**dict.fromkeys(self._open))
        self.residues.config = self._resolved(config, every_step)

    def mix_momentum(
        self, parameters: Mapping[str, torch.Tensor], collectives: Collectives, **how: bool
    ) -> None:
        """Faces call this, once the method serves an optimizer. See QuasiHyperbolic."""
        self.quasi_hyperbolic = QuasiHyperbolic(parameters, self.residues, collectives, **how)

    def _resolved(self, config: ScaleComConfig, every_step: bool = False) -> ScaleComConfig:
        return config.resolved(every_step, knows_bits="bits" in self.uses)

    # What users, and elastic states, call. The run does it.

    @property
    def residues(self) -> Residues:
        """This rank's residues, and the number of steps."""
        return self.run.residues

    def stats(self) -> Stats:
        """Numbers of this rank. The call sends nothing, so not all ranks have to make it.

        Returns:
            A dict. step: how many steps have counted. skipped_steps: how many were skipped,
            because a gradient was not finite. leader, if the method has one: the position of the
            rank that chose last (for the first bucket).

            bytes_offsets, bytes_values, bytes_dense and bytes_gathered: the bytes handed over in
            the last step, to be broadcast, all-reduced and (by some methods) gathered.
            bytes_traffic: what this rank sent for them on a ring, averaged over ranks. rate:
            elements of the model per element sent. collectives: how many there are per step, not
            counting one of 24 bytes by which ranks tell each other that there are gradients.
            outliers: how many gradients of a tensor were longer than config.outliers allows, on
            this rank. averages_thrown_away: how many exchanges there were whose averages no step
            used, so that residues became what they were before them.

            residue_norm: the Euclidean norm of all residues. Computing it reads them all.
            residue_ratio: the norm of residues / beta, which is what waits, divided by the norm of
            gradients. It is measured every 100 steps, and is None before the first measurement.

            With rate="auto": rung (its number on the ladder of stages.py, 0 for whole) and stage
            (the same in words) of the coming step, and on rank 0 rung_reason.

            If diagnostics were asked for: diagnostics, which are the numbers of the last look, as
            diagnostics.look gives them, and its step. These are the same on all ranks, and None
            before the first look. The bytes above do not include what ranks gather for diagnostics.

            With local steps: local_steps (the schedule), local_steps_taken (by this rank) and
            local_steps_skipped (how many of those were left out because a gradient was not
            finite). If changes are clipped: changes_clipped (how many of this rank's were). `step`
            then counts synchronisations, or rounds if there are fragments. The bytes are those of
            the last synchronisation, or of the last fragment.

            If LocalTopK has a quantiser: quantiser, its name.
        """
        return self.run.stats()

    def state_dict(self) -> Saved:
        """This rank's residues, step and state. Every rank has to save them with the model.

        The tensors are the ones in use, not copies. torch.load(..., weights_only=True) can read
        them.

        Returns:
            {"version", "step", "config", "settings": the method's name and its own settings,
            "residues": {name: tensor shaped like the parameter}}, and what else the method and
            local steps need.

        Raises:
            RuntimeError: it was called between backward() and step().
        """
        return self.run.state_dict()

    def load_state_dict(self, state: Saved) -> None:
        """Load what this rank saved. Call it on every rank, before training continues.

        Raises:
            ValueError: the state does not fit, because it has another model, method, setting or
                version. Nothing is changed then.
        """
        self.run.load_state_dict(state)

    def rejoin(self) -> None:
        """All ranks call this when an elastic run was started again, or newcomers have come."""
        self.run.averager.rejoin()

    def compress(self, tensor: object = None) -> tuple[torch.Tensor, None]:
        """Refuse: Horovod's own optimizer asks for tensors one by one, and nobody may wait then."""
        name = self.__name__ if isinstance(self, type) else type(self).__name__
        name = name if isinstance(self, (type, Method)) else "this method"
        raise TypeError(
            f"{name} works only in this package's DistributedOptimizer: import scalecom_hvd.torch "
            "as hvd. In horovod.torch's own DistributedOptimizer use ScaleCom(named_parameters=...)"
        )

    def decompress(self, tensor: torch.Tensor, ctx: object = None) -> torch.Tensor:
        """The average as it is, because this package's optimizer makes it before Horovod asks."""
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, or copied: settings and this rank's state. A copy serves no optimizer.

        The loss scale is left out: give the copy the script's GradScaler as `loss_scale`.
        """
        left_out = {"run": None, "scaling": None, "quasi_hyperbolic": None}
        return vars(self) | left_out | {"config": self.config, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        config, saved = state.pop("config"), state.pop("saved")
        vars(self).update(state)
        self.run, self.scaling = Run(self, config), LossScale(None)
        self.load_state_dict(saved)
