"""ScaleCom, and every other method, as a communication hook of DistributedDataParallel.

DDP calls the hook with buckets of its own making, in the same order on all ranks, while backward
goes on. Each bucket's gradients are reported to the exchange, which has buckets of its own; so it
does not matter that DDP makes its buckets anew after the first step. When the last one has come, a
thread waits for the other ranks, and the futures that DDP waits for are given their averages: in
the hook nothing blocks. Imports process_group_collectives, and exchange, methods,
background_thread and optimizers of exchange/.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with types.

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives, check_devices
from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.methods import Method, ScaleCom
from scalecom_hvd.exchange.optimizers import SHARDED, check_not_sharded
from scalecom_hvd.exchange.unused_averages import UnusedAverages
from scalecom_hvd.saved_state import Saved


class ScaleComState:
    """What `scalecom_hook` keeps of a model: the method, and this rank's residues.

    Every rank has to make one at the same time, and for each model one.

    Args:
        model: the model, wrapped by DistributedDataParallel or not.
        compression: a method's class, or an instance: ScaleCom, RandomK, LocalTopK, GTopK,
            GlobalTopK, ECQSGD.
        process_group: default: that of DDP's wrapper, or all ranks.
        collectives: how ranks reach each other: a transport of your own (see
            scalecom_hvd.exchange.Collectives), among the ranks of DDP's group. None:
            torch.distributed's.
        **settings: what the class takes: fields of ScaleComConfig, config=, loss_scale= (a
            GradScaler), diagnostics=, quantiser=.

    Attributes:
        compression: the method.

    Raises:
        ValueError, TypeError: settings that cannot work, torch.distributed was not started, or the
            model is sharded (FSDP, DTensor).

    Example:
        >>> model = DistributedDataParallel(model)
        >>> state = ScaleComState(model)
        >>> model.register_comm_hook(state, scalecom_hook)
        >>> torch.save(state.state_dict(), f"residues.{dist.get_rank()}.pt")
    """

    def __init__(
        self,
        model: nn.Module,
        compression: type[Method] | Method = ScaleCom,
        *,
        process_group: dist.ProcessGroup | None = None,
        collectives: Collectives | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(compression, Method) and settings:
            raise TypeError(
                f"{', '.join(settings)}: settings belong to the method: give "
                f"compression={type(compression).__name__}({', '.join(settings)}=...)"
            )
        self.compression = (
            compression
            if isinstance(compression, Method)
            else compression(**{"model": model, **settings})
        )
        self._begin()
        self.attach(model, process_group, collectives=collectives)

    def _begin(self) -> None:
        self._names: dict[str, nn.Parameter] = {}
        self._stand_ins: dict[torch.Tensor, nn.Parameter] = {}
        self._alone = False
        self._exchange: Exchange | None = None
        self._reduced: list[_Reduced] = []
        # Parameters whose gradients this backward has not brought yet.
        self._missing: set[nn.Parameter] = set()
        self._thread = BackgroundThread(self)
        self._unused = UnusedAverages()

    def attach(
        self,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        loss_scale: Any = None,
        collectives: Collectives | None = None,
    ) -> None:
        """Serve a model: this is done already, unless the state was unpickled.

        Args:
            model, process_group, loss_scale, collectives: as when it is made. All ranks do so
                together.
        """
        wrapper = _wrapper_of(model)
        check_model(model, wrapper)
        if collectives is None:
            check_devices(model.parameters())
        elif process_group is not None:
            raise ValueError("collectives= brings the ranks with it: leave process_group out")
        if loss_scale is not None:
            self.compression.loss_scale = loss_scale
        parameters = averaged_parameters(model)
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        if process_group is None and wrapper is not None:
            process_group = wrapper.process_group
        # DDP throws the average of a parameter away that no rank used, where it looks for those. Of
        # a model that is not wrapped yet nobody knows.
        drops = wrapper is None or wrapper.find_unused_parameters or wrapper.static_graph
        # DDP hands out gradients in buckets, which are not p.grad. Stand-ins have them as theirs.
        stand_ins = {name: nn.Parameter(p.detach()) for name, p in parameters.items()}
        if collectives is None:
            collectives = ProcessGroupCollectives(process_group)
        # DDP made parameters the same when it wrapped the model. Ranks may be at different ones
        # when they first average: sharpness-aware steps go there under no_sync().
        self._exchange = Exchange(
            stand_ins,
            self.compression,
            collectives,
            asks_for_use=drops,
            compares_parameters=False,
        )
        self.compression.watch(model)  # for one that was unpickled
        if self.compression.ahead is not None:
            self.compression.ahead.serve(parameters, self.compression.residues, 1.0)
        self._alone = collectives.size == 1
        self._names = parameters
        self._stand_ins = {p: stand_ins[name] for name, p in parameters.items()}
        self._missing = set(stand_ins.values())

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank's last step; see Method.stats."""
        return self.compression.stats()

    def state_dict(self) -> Saved:
        """This rank's residues, step and settings, for its checkpoint; see Method.state_dict.

        After a backward that failed they are those from before it.
        """
        self._give_up()
        return self.compression.state_dict()

    def load_state_dict(self, state: Saved) -> None:
        """Take up what this rank saved, by whatever face; see Method.load_state_dict."""
        self._give_up()
        self.compression.load_state_dict(state)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Report a bucket's gradients; gives a future of their averages, in the bucket's buffer."""
        if self._exchange is None:
            raise RuntimeError(
                "this ScaleComState was unpickled and serves no model yet: call "
                "state.attach(model) on every rank before training goes on"
            )
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError(
                "sparse gradients cannot be compressed under DistributedDataParallel: make the "
                "embedding with sparse=False"
            )
        reduced = _Reduced(buffer, list(self._with_gradients(bucket)))
        if self._alone:  # there is nothing to average
            reduced.given.set_result(buffer)
            return reduced.future
        if not self._missing.issuperset(reduced.stand_ins):
            self._give_up()  # DDP is asked to go on after an error, and begins anew
        if not self._reduced:
            self._unused.begin()
        self._reduced.append(reduced)
        self._missing.difference_update(reduced.stand_ins)
        for stand_in in reduced.stand_ins:
            self._exchange.ready(stand_in)
        # DDP numbers buckets, and says which is the last, but not in the first pass of a static
        # graph. So the step is over when all parameters have come.
        if not self._missing:
            everything, self._reduced = self._reduced, []
            self._missing = set(self._stand_ins.values())
            self._thread.submit(_finish, self._exchange, everything, self._unused)
        elif bucket.is_last():
            self._refuse_missing()
        return reduced.future

    def _refuse_missing(self) -> None:
        missing = [name for name, p in self._names.items() if self._stand_ins[p] in self._missing]
        self._give_up()
        raise RuntimeError(
            f"DistributedDataParallel ignores {', '.join(missing[:5])}, which the model trained "
            "when ScaleComState was made: make the state when the model has been wrapped, and all "
            "parameters to be ignored are known"
        )

    def _with_gradients(self, bucket: dist.GradBucket) -> Iterator[nn.Parameter]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter not in self._stand_ins:
                raise RuntimeError(
                    "a gradient came of a parameter that the model did not have, or that was not "
                    "trained, when ScaleComState was made: make both, DistributedDataParallel and "
                    "the state, anew when the model has changed"
                )
            stand_in = self._stand_ins[parameter]
            if gradient.dtype != stand_in.dtype:
                raise RuntimeError(
                    f"DistributedDataParallel reduces gradients in {gradient.dtype} where "
                    f"parameters are {stand_in.dtype}, which no residue could make up for: leave "
                    "out mixed_precision=, and take wire_dtype='float16' or torch.autocast"
                )
            stand_in.grad = gradient
            yield stand_in

    def _give_up(self) -> None:
        """Forget a step of which buckets are missing: backward ended in an error."""
        if self._reduced:
            self._exchange.abort()
            self._reduced = []
        self._missing = set(self._stand_ins.values())

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled with it: the method, but no process group, and no model."""
        return {"compression": self.compression}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.compression = state["compression"]
        self._begin()


def scalecom_hook(
    state: ScaleComState, bucket: dist.GradBucket, *others: Any
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients by the state's method.

    Args:
        state: made for this model.
        bucket: DDP's.

    Raises:
        TypeError: it was not DDP that called, or not with a ScaleComState.
    """
    if isinstance(bucket, tuple):
        raise TypeError(
            "torch._dynamo.config.optimize_ddp='python_reducer' hands out gradients one by one, "
            "and waits for each: leave it at its default, which torch.compile works with too"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(SHARDED)
    if not isinstance(state, ScaleComState):
        raise TypeError(
            "register_comm_hook(state, scalecom_hook) wants a ScaleComState, made of this model, "
            f"not {type(state).__name__}"
        )
    return state.reduce(bucket)


@dataclasses.dataclass
class _Reduced:
    """A bucket of DDP's, whose gradients were reported.

    Attributes:
        buffer: DDP's, of which each stand-in's gradient is a part.
        stand_ins: those of its parameters.
        given: is given the averages, or an error.
        future: what DDP waits for: the same, but that it can raise the error.
    """

    buffer: torch.Tensor
    stand_ins: Sequence[nn.Parameter]
    given: torch.futures.Future[torch.Tensor] = dataclasses.field(init=False)
    future: torch.futures.Future[torch.Tensor] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.given = torch.futures.Future()
        # Of one that was given an exception, DDP takes it for a tensor. Callbacks may raise.
        self.future = self.given.then(lambda given: given.value())


def _finish(exchange: Exchange, everything: Sequence[_Reduced], unused: UnusedAverages) -> None:
    """Wait for other ranks, and give DDP what it waits for: averages, or the error."""
    with torch.no_grad():
        try:
            exchange.finish()
            exchange.look()
            unused.end(exchange.has_sent)  # before DDP, and so the script, goes on
            for reduced in everything:
                for stand_in in reduced.stand_ins:
                    gradient, average = stand_in.grad, exchange.result(stand_in)
                    if average.data_ptr() != gradient.data_ptr():
                        gradient.copy_(average)
                    stand_in.grad = None
                reduced.given.set_result(reduced.buffer)
        except BaseException as error:
            for reduced in everything:
                if not reduced.given.done():
                    reduced.given.set_exception(error)  # type: ignore[arg-type]


def _wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    return model if isinstance(model, DistributedDataParallel) else None


def check_model(model: nn.Module, wrapper: DistributedDataParallel | None) -> None:
    """Raise an error where averages by a hook are not what training needs."""
    # Whose names of parameters may not show it.
    if any(type(m).__name__.endswith("FullyShardedDataParallel") for m in model.modules()):
        raise TypeError(SHARDED)
    check_not_sharded(model.named_parameters())
    if getattr(wrapper, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "with skip_all_reduce_unused_params=True DDP does not call the hook for all buckets: "
            "leave it out"
        )


def averaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of what is trained and averaged.

    Names are those of the model inside of its wrappers, so that states are those of the same model
    anywhere else.
    """
    ignored: Collection[str] = ()
    inside: Any = model
    while isinstance(inside, DistributedDataParallel) or hasattr(inside, "_orig_mod"):
        if isinstance(inside, DistributedDataParallel):
            ignored, inside = inside.parameters_to_ignore, inside.module
        else:
            inside = inside._orig_mod
    # What was asked for before the model is wrapped.
    ignored = {*ignored, *getattr(inside, "_ddp_params_and_buffers_to_ignore", ())}
    named = inside.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ignored}
