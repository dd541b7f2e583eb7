"""ScaleCom: what users pass as `compression=`, to this package's DistributedOptimizer or to Horovod's own.

In this package's optimizer the object holds settings, residues and the loss scale, and reducer.py does the work. In the stock
optimizer, which calls `compress` and `decompress` per tensor without saying which, stock.py does it with look-ahead.

`ErrorFeedback` is what ScaleCom shares with the other methods (methods/), which work in this package's optimizer alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import horovod.torch as horovod
import torch
from horovod.torch.compression import Compressor

from scalecom_hvd.agreement import warn_of_half_sums
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.diagnostics import Diagnostics
from scalecom_hvd.state import check_local_steps, check_method
from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.news import freshness
from scalecom_hvd.torch.quantisers import Float16, Quantiser, Unrounded, average_values, quantiser_of
from scalecom_hvd.torch.residues import Residues, every_step
from scalecom_hvd.torch.stock import StockExchange
from scalecom_hvd.torch.transport import Transport, Wait

_STOCK_NEEDS_PARAMETERS = (
    "in horovod.torch's own DistributedOptimizer ScaleCom must know the parameters: write "
    "compression=ScaleCom(named_parameters=model.named_parameters(), rate=100), or import scalecom_hvd.torch as hvd and use its "
    "DistributedOptimizer, which takes compression=hvd.ScaleCom"
)


class Exchange(Protocol):
    """What a method asks of whoever does the work: a Reducer or a StockExchange."""

    def in_step(self) -> bool: ...
    def settle(self) -> None: ...
    def agree_anew(self) -> None: ...
    def abort(self) -> None: ...
    def meet(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def watch(self, diagnostics: Diagnostics) -> None: ...


class Local(Protocol):
    """What a method asks of local steps (local_steps.py), where there are any."""

    newcomer: bool

    def exchanges_in(self, steps: int) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def check_state(self, state: dict[str, Any]) -> None: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def meet(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...


class ErrorFeedback(Compressor):
    """What every method here has in common: settings, residues, the loss scale, and the exchange that does the work for its optimizer.

    config: a ScaleComConfig; default: the defaults overridden by SCALECOM_RATE, SCALECOM_BETA, ... of the environment.
    loss_scale: a torch.amp.GradScaler, or a callable that gives the current scale, so that residues are kept in unscaled units.
    diagnostics: a number of steps, or Diagnostics: every so many steps see how alike workers are, and how good the choice is.
    quantiser: what the sent values become, None or one of quantisers.py.
    fields: any field of ScaleComConfig, over `config`.
    """

    # How a reducer averages compressed tensors by this method; None: as ScaleCom does.
    exchange: Any = None
    # Whether ranks choose different places, so that no sum can be made of their values.
    always_gathers = False

    def __init__(
        self,
        *,
        config: ScaleComConfig | None = None,
        loss_scale: Any = None,
        diagnostics: Diagnostics | int | None = None,
        quantiser: Quantiser | type[Quantiser] | None = None,
        **fields: Any,
    ) -> None:
        self.config = (config if config is not None else ScaleComConfig.from_env()).replace(**fields)
        self.residues = Residues(self.config)
        self.loss_scale = _scale_reader(loss_scale)
        self.diagnostics = Diagnostics.of(diagnostics)
        self.quantiser = quantiser_of(quantiser)
        self._exchange: Exchange | None = None
        self._local: Local | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What ranks, and a state and who loads it, must have in common beside the config."""
        return {"method": type(self).__name__} | self._quantised

    @property
    def sums_halves(self) -> bool:
        """Whether float16 values are summed."""
        return self.config.wire_dtype == "float16" or (isinstance(self.quantiser, Float16) and not self.always_gathers)

    @property
    def _quantised(self) -> dict[str, Any]:
        return {} if isinstance(self.quantiser, Unrounded) else {"quantiser": repr(self.quantiser)}

    def attach(self, parameters: dict[str, torch.Tensor], exchange: Exchange, local: Local | None = None) -> None:
        """Bind to an optimizer's parameters; called by DistributedOptimizer. local: its local steps, with the common parameters."""
        if self._exchange is not None:
            name = type(self).__name__
            raise ValueError(f"this {name} already serves an optimizer; make one for each: their residues are different")
        if self._loaded is not None:
            self._check_local(self._loaded, local)
        if self.diagnostics is not None:
            exchange.watch(self.diagnostics)
        self.residues.exchanges_in = every_step if local is None else local.exchanges_in
        self.residues.attach(parameters)
        self._exchange, self._local = exchange, local
        if self._loaded is not None and local is not None:
            local.load_state_dict(self._loaded["local_steps"])
        self._loaded = None

    @staticmethod
    def _check_local(state: dict[str, Any], local: Local | None) -> None:
        check_local_steps(state, local is not None)
        if local is not None:
            local.check_state(state["local_steps"])

    def detach(self) -> None:
        """Serve nobody again; called when the optimizer could not be made."""
        self._exchange = self._local = None
        self.residues.exchanges_in = every_step

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank; all ranks must not call it, and calling it sends nothing.

        step, skipped_steps (a gradient was not finite); leader: the position of the rank that chose last (for the first bucket);
        bytes_offsets, bytes_values, bytes_dense, bytes_gathered: handed to Horovod in the last step, to be broadcast, all-reduced and
        (by methods other than ScaleCom) gathered; bytes_traffic: what this rank sent for them on a ring, on average over ranks; rate:
        elements of the model per element sent; collectives per step (besides one of 4 bytes, by which ranks tell that there are gradients);
        residue_norm: Euclidean, over all residues (reads them all); residue_ratio: that of residues to that of gradients, when it was last
        looked at (every 100 steps; None before).
        diagnostics, where they were asked for: the numbers of the last look, as diagnostics.look gives them, and its step (None before the
        first), the same on all ranks; what ranks gather for them is not counted in the bytes above.
        local_steps, steps_taken, steps_skipped, with local steps: the schedule, this rank's steps, and those of them left out because a
        gradient was not finite; `step` counts synchronisations then, and bytes are those of the last one.
        quantiser, where there is one, and values: whether its values were "gathered" or "averaged" in the last step, or in some buckets
        this and in others that; None where all was sent whole.
        """
        numbers = {"step": self.residues.step, "skipped_steps": self.residues.skipped_steps}
        if self._exchange is not None:
            numbers |= self._exchange.stats()
        if self._local is not None:
            numbers |= self._local.stats()
        if not isinstance(self.quantiser, Unrounded):
            ways = {"gathered": "bytes_gathered", "averaged": "bytes_values"}
            travelled = [way for way, count in ways.items() if numbers.get(count)]
            numbers |= {"quantiser": repr(self.quantiser), "values": " and ".join(travelled) or None}
        return numbers | {"residue_norm": self.residues.norm(), "residue_ratio": self.residues.health.ratio}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residues and step, to be saved by every rank beside the model; torch.load(..., weights_only=True) reads it.

        {"version", "step", "config", "residues": {name: tensor shaped like the parameter}}, and what look-ahead and local steps need.
        Tensors are the ones in use, not copies. Raises RuntimeError between backward() and step().
        """
        self._settle("state_dict() was called between backward() and step(): call it after optimizer.step()")
        state = self.residues.state_dict() | self.settings
        return state | ({"local_steps": self._local.state_dict()} if self._local is not None else self._loaded or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the residues that this rank saved. Call it on every rank, before training goes on.

        Raises ValueError, naming it, for what does not fit: another model, another method, other settings, another version.
        """
        self._settle("load_state_dict() was called between backward() and step(): call it before backward()")
        check_method(state, self.settings)
        if self._exchange is None:
            self._loaded = {name: state[name] for name in ("local_steps",) if name in state}
        else:
            self._check_local(state, self._local)
        self.residues.load_state_dict(state)
        if self._exchange is not None:
            self._exchange.agree_anew()
        if self._local is not None:
            self._local.load_state_dict(state["local_steps"])

    def _settle(self, complaint: str) -> None:
        if self._exchange is not None:
            if self._exchange.in_step():
                raise RuntimeError(f"{type(self).__name__}.{complaint}")
            self._exchange.settle()

    # Elastic runs; called by elastic.py.

    def abort(self) -> None:
        """Forget a step that cannot be completed, and what is in flight: a worker was lost. Nothing is lost from the residues."""
        if self._exchange is not None:
            self._exchange.abort()

    def meet(self) -> None:
        """What all ranks do when Horovod has been started again, or newcomers have come: they will go on at one step."""
        self._exchange.meet()
        if self._local is not None:
            self._local.meet()

    @property
    def local(self) -> Local | None:
        """The local steps, where the optimizer takes them."""
        return self._local


class ScaleCom(ErrorFeedback):
    """Cyclic local top-k compression with low-pass filtered residues (Chen et al., NeurIPS 2020).

    named_parameters: needed in the stock optimizer only: an iterable of (name, parameter), as model.named_parameters() gives.
    config: a ScaleComConfig; default: the defaults overridden by SCALECOM_RATE, SCALECOM_BETA, ... of the environment.
    loss_scale: a torch.amp.GradScaler, or a callable that gives the current scale, so that residues are kept in unscaled units.
    diagnostics: a number of steps, or Diagnostics: every so many steps see how alike workers are, and how good the choice is; in this
    package's optimizer alone.
    process_set: in the stock optimizer, the process set given to it.
    quantiser: what the values become before they travel: QSGD, Sign (of less than 16 bits: gathered, while that is less traffic; in this
    package's optimizer alone, without look-ahead), or Float16, which is wire_dtype="float16".
    fields: any field of ScaleComConfig, over `config`.

    One object serves one optimizer. Raises ValueError or TypeError for settings that cannot work.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        config: ScaleComConfig | None = None,
        loss_scale: Any = None,
        diagnostics: Diagnostics | int | None = None,
        process_set: Any = None,
        quantiser: Quantiser | type[Quantiser] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(config=config, loss_scale=loss_scale, diagnostics=diagnostics, quantiser=quantiser, **fields)
        if isinstance(self.quantiser, Float16):
            # Its values are summed in half precision, as they always could be.
            self.config = self.config.replace(wire_dtype="float16")
            self.residues = Residues(self.config)
        if self._quantised:
            for name in ("lookahead", "wire_dtype"):
                if getattr(self.config, name):
                    raise ValueError(f"{name} and a quantiser of less than 16 bits exclude each other: leave one of them out")
            self.exchange = self._exchange_rounded
        self._process_set = process_set
        self._named_parameters = _by_name(named_parameters) if named_parameters is not None else None
        self._trained = {name for name, p in (self._named_parameters or {}).items() if p.requires_grad}
        self._fresh = freshness(self._named_parameters or {})

    @property
    def _quantised(self) -> dict[str, Any]:
        return {} if isinstance(self.quantiser, Float16) else super()._quantised  # that is in the config

    @property
    def settings(self) -> dict[str, Any]:
        return self._quantised  # a state that names no method is ScaleCom's

    def _exchange_rounded(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        """ScaleCom's exchange with a quantiser: the leader's offsets, then everybody's rounded values there."""
        offsets = bucket.choose() if channel.position == channel.leader else bucket.new_choice()
        offsets = yield from channel.broadcast(offsets)
        yield from average_values(bucket, channel, bucket.places_at(offsets), self.quantiser)

    def compress(self, tensor: Any = None) -> tuple[torch.Tensor, Any]:
        """What the stock optimizer sends of a gradient: k values, or all of it. Called in backward's hooks; waits for nothing in them."""
        if not isinstance(self, ScaleCom):  # Horovod called it on the bare class, so `self` is the gradient
            raise TypeError(_STOCK_NEEDS_PARAMETERS)
        if not tensor.is_floating_point():
            raise TypeError(f"ScaleCom compresses floating-point gradients, not {tensor.dtype}: use hvd.Compression.none for this tensor")
        self._serve_stock()
        if not isinstance(self._exchange, StockExchange):
            raise TypeError(
                "this ScaleCom serves the optimizer it was given to, and compresses nothing else: use hvd.Compression.none for this tensor"
            )
        return self._exchange.compress(tensor)

    def _serve_stock(self) -> None:
        """Attach to the parameters given to this object, unless it serves an optimizer already. Needs Horovod to be running."""
        if self._exchange is None:
            if self._quantised:
                raise TypeError(
                    f"quantiser={self.quantiser!r} works in this package's DistributedOptimizer alone: import scalecom_hvd.torch as hvd"
                )
            if self._named_parameters is None:
                raise TypeError(_STOCK_NEEDS_PARAMETERS)
            # Horovod keeps to what was trained when its optimizer was made: between this object and the first step.
            parameters = {name: p for name, p in self._named_parameters.items() if p.requires_grad or name in self._trained}
            transport = Transport(self._process_set)
            if self.config.wire_dtype == "float16":
                self._check_predivision(transport.size)
            self.attach(parameters, StockExchange(parameters, self.residues, transport, self.loss_scale, self._fresh))
            warn_of_half_sums(self.sums_halves, horovod)

    def _check_predivision(self, ranks: int) -> None:
        """Raise ValueError where Horovod's optimizer divides float16 values before it sums them, so that what is small is lost for good.

        It does not tell a compressor by what, so it is looked for. Values travel times the number of ranks (stock.py): its divisors do.
        """
        for optimizer in gc.get_objects():
            if issubclass(type(optimizer), torch.optim.Optimizer) and getattr(optimizer, "_compression", None) is self:
                factor = getattr(optimizer, "gradient_predivide_factor", 1.0)
                if factor < 1 or ranks % factor:
                    raise ValueError(
                        f"gradient_predivide_factor={factor} and wire_dtype='float16' exclude each other in horovod.torch's own "
                        f"DistributedOptimizer, unless {ranks}, the number of ranks, is a multiple: what is small would be lost. Leave the "
                        "factor out (no sum overflows: what is too large stays in the residue), or import scalecom_hvd.torch as hvd"
                    )

    def decompress(self, tensor: Any, ctx: Any = None) -> torch.Tensor:
        """The averaged gradient for what `compress` gave; `ctx` None: nothing was compressed."""
        return tensor if ctx is None else self._exchange.decompress(tensor, ctx)

    def meet(self) -> None:
        self._serve_stock()
        super().meet()


def without_ties(named_parameters: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Each parameter with the first of its names: a tied one has several, and one gradient."""
    first = {id(item[1]): item for item in reversed(named_parameters)}
    return [item for item in named_parameters if first[id(item[1])] is item]


def _by_name(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """{name: parameter}; a tied parameter goes by the first of its names, on every rank alike."""
    named_parameters = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor) for item in named_parameters):
        raise ValueError("ScaleCom's named_parameters should be (name, parameter) tuples, as model.named_parameters() gives")
    distinct = without_ties(named_parameters)
    parameters = dict(distinct)
    twice = sorted({name for name, parameter in distinct if parameters[name] is not parameter})
    if twice:
        raise ValueError(f"names in ScaleCom's named_parameters must be unique, but {', '.join(twice)} stands for several parameters")
    return parameters


def _scale_reader(loss_scale: Any) -> Callable[[], float]:
    if loss_scale is None:
        return lambda: 1.0
    reader = getattr(loss_scale, "get_scale", loss_scale)
    if not callable(reader):
        raise TypeError(f"loss_scale must be a GradScaler or a callable that gives the current scale, not {loss_scale!r}")
    return reader
