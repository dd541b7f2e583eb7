"""ScaleCom, and every other method, as a communication hook of DistributedDataParallel.

DDP calls the hook with its own buckets, in the same order on all ranks, while backward goes on. The
hook reports their gradients to the exchange, which has buckets of its own, so DDP may rebuild its
buckets after the first step. After the last bucket, a thread waits for the other ranks, and gives
the averages to the futures that DDP waits for. Nothing blocks in the hook. With a mesh of nodes,
buckets go through a NodeExchange.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with types.

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp.nodes import check_mesh, check_same_ranks, peers_of, ranks_of_node
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives
from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.face import Face, Options
from scalecom_hvd.exchange.faces import SHARDED, check_no_engine, check_not_sharded
from scalecom_hvd.exchange.gradients import current_backward, flat_tensor, wide_dtype
from scalecom_hvd.exchange.methods import Method, ScaleCom
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.node_exchange import NodeExchange
from scalecom_hvd.exchange.not_compiled import not_compiled
from scalecom_hvd.exchange.unused_averages import UnusedAverages
from scalecom_hvd.saved_state import Saved


class ScaleComState:
    """What `scalecom_hook` keeps for a model: the method, and this rank's residues.

    Make one for each model, on all ranks at the same time.

    Args:
        model: the model, wrapped by DistributedDataParallel or not.
        compression: a method (its class or an instance): ScaleCom, RandomK or LocalTopK.
        process_group: default: the group of DDP's wrapper, or all ranks.
        collectives: a transport of your own by which ranks reach each other (see
            scalecom_hvd.exchange.Collectives). Its ranks are those of DDP's group. None:
            torch.distributed's transport.
        mesh: a mesh of nodes times the ranks of each node, with dimensions named "replicate" and
            "shard". Gradients are averaged whole inside a node and compressed between nodes. A
            residue has 1 / (ranks of a node) of its parameter's elements. None: every rank is a
            node of its own.
        **settings: what the method's class takes: fields of ScaleComConfig, config=, loss_scale= (a
            GradScaler), diagnostics=, and for LocalTopK quantiser=.

    Attributes:
        compression: the method.

    Raises:
        ValueError, TypeError: a setting cannot work, torch.distributed was not started, or the
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
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(compression, Method) and settings:
            raise TypeError(
                "ScaleComState was given a finished method and the settings "
                f"{', '.join(settings)}. Give the settings to the method: "
                f"compression={type(compression).__name__}({', '.join(settings)}=...)"
            )
        if not isinstance(compression, Method):
            compression = compression(**settings)
        self.compression = compression
        self._begin()
        self.attach(model, process_group, collectives=collectives, mesh=mesh)

    def _begin(self) -> None:
        self._names: dict[str, nn.Parameter] = {}
        self._exchange: Exchange | None = None
        # With a mesh, this is in front of the exchange.
        self._in_node: NodeExchange | None = None
        self._reduced: list[_Reduced] = []
        # Names of parameters whose gradients this backward has not brought yet.
        self._missing: set[str] = set()
        self._layout = _Layout()
        self._thread = BackgroundThread(self)

    def attach(
        self,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        collectives: Collectives | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Serve a model. This is needed only for a state that was unpickled.

        All ranks must call this together, with arguments as in the constructor. A pickle has no
        loss scale: set state.compression.loss_scale.
        """
        unwrapped = getattr(model, "_orig_mod", model)  # torch.compile's
        wrapper = unwrapped if isinstance(unwrapped, DistributedDataParallel) else None
        check_model(model, wrapper)
        if mesh is not None:
            if process_group is not None or collectives is not None:
                raise ValueError(
                    "mesh= already says which ranks average together: leave process_group and "
                    "collectives out"
                )
            check_mesh(mesh)
            check_same_ranks(mesh, wrapper.process_group if wrapper else None)
        if collectives is not None and process_group is not None:
            raise ValueError(
                "collectives= already says which ranks average together: leave process_group out"
            )
        parameters = averaged_parameters(model)
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        if process_group is None and wrapper is not None:
            process_group = wrapper.process_group
        # If DDP looks for unused parameters, it throws away the average of a parameter that no rank
        # used. For a model that is not wrapped yet, nobody knows whether DDP will look.
        drops = wrapper is None or wrapper.find_unused_parameters or wrapper.static_graph
        devices = {parameter.device for parameter in parameters.values()}
        if self.compression.run.averager is None:
            self.compression.settle(every_step=True)
        # DDP made parameters the same on all ranks when it wrapped the model. They may still differ
        # between ranks when ranks first average: sharpness-aware steps move them under no_sync().
        # So nothing compares them.
        self._unused = UnusedAverages(parameters)
        options = Options(drops_unused=drops, zeros_count=False, unused=self._unused)
        if mesh is not None:
            collectives, ranks = peers_of(mesh, devices), ranks_of_node(mesh, devices)
            collectives.end_with(self)
            ranks.end_with(self)
            self._in_node = NodeExchange(
                parameters, self.compression, collectives, Node(ranks), options
            )
            self._exchange = self._in_node.exchange
        else:
            if collectives is None:
                collectives = ProcessGroupCollectives(process_group, devices=devices)
                collectives.end_with(self)
            # A method that does something in whole steps does it with buckets of its own.
            acts = type(self.compression).whole_step not in (Method.whole_step, ScaleCom.whole_step)
            narrow = any(wide_dtype(p) != p.dtype for p in parameters.values())
            copies = acts or narrow or self.compression.config.lookahead
            face = None if copies else self._layout
            self._exchange = Exchange(parameters, self.compression, collectives, options, face=face)
        self.compression.mix_momentum(parameters, collectives, by_hook=True)
        self._alone = collectives.size == 1
        self._names = parameters
        self._name_of: dict[torch.Tensor, str] = {p: name for name, p in parameters.items()}
        self._places = {name: place for place, name in enumerate(parameters)}
        self._missing = set(parameters)

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank's last step; see Method.stats."""
        return self.compression.stats()

    def state_dict(self) -> Saved:
        """This rank's residues, step and settings, as before a backward that failed; see Method."""
        self._give_up()
        return self.compression.state_dict()

    def load_state_dict(self, state: Saved) -> None:
        """Load what this rank saved, through whichever interface; see Method.load_state_dict."""
        self._give_up()
        self.compression.load_state_dict(state)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Report a bucket's gradients. Returns a future of their averages, in its buffer."""
        if self._exchange is None:
            raise RuntimeError(
                "this ScaleComState was unpickled and serves no model yet: call "
                "state.attach(model) on every rank before you go on training"
            )
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError(
                "sparse gradients cannot be compressed under DistributedDataParallel: make the "
                "embedding with sparse=False"
            )
        if self._alone and self._in_node is None:  # there is nothing to average
            return _Reduced(buffer, {}).give({})
        # In the first backward, DDP's only bucket may hold all gradients, in the model's order. The
        # exchange makes its buckets in the order in which gradients come, and backward goes in the
        # reverse order.
        given = dict(self._with_gradients(bucket))  # side by side in the buffer
        gradients = {n: given[n] for n in sorted(given, key=self._places.__getitem__, reverse=True)}
        if not self._missing.issuperset(gradients):
            self._give_up()  # after an error, DDP begins anew
        reduced = _Reduced(buffer, given)
        with self._exchange.streams.entered(joins=False):
            if self._in_node is not None:
                self._in_node.bring(buffer, gradients, f"bucket.{len(self._reduced)}")
            else:
                self._exchange.ready_all({n: flat_tensor(g) for n, g in gradients.items()})
            self._reduced.append(reduced)
            self._missing.difference_update(gradients)
        # DDP numbers buckets and says which is the last, except in the first pass of a static
        # graph. So the step is over when all parameters have come.
        if not self._missing:
            everything, self._reduced = self._reduced, []
            self._layout.buckets = [list(reduced.gradients) for reduced in everything]
            self._missing = set(self._names)
            # A rank that has joined (model.join()) calls this outside of any backward.
            has_joined = current_backward() == -1
            self._thread.submit(self._finish, everything, has_joined)
        elif bucket.is_last():
            self._refuse_missing()
        return reduced.future

    @torch.no_grad()
    def _finish(self, everything: Sequence["_Reduced"], has_joined: bool) -> None:
        """Wait for other ranks, and give DDP what it waits for: averages, or the error."""
        with self._exchange.streams.at_their_device():
            try:
                averages = (self._in_node or self._exchange).finish()
                if has_joined:  # the other ranks' steps use them
                    self._unused.forget()
                # Averages may be copied here, so from the stream whose memory they are in.
                with self._exchange.streams.entered():
                    for reduced in everything:
                        reduced.give(averages)
            except BaseException as error:
                for reduced in everything:
                    if not reduced.given.done():
                        reduced.given.set_exception(error)  # type: ignore[arg-type]

    def _refuse_missing(self) -> None:
        missing = [name for name in self._names if name in self._missing]
        self._give_up()
        raise RuntimeError(
            f"DistributedDataParallel ignores {', '.join(missing[:5])}, but the model trained "
            "these parameters when ScaleComState was made. Wrap the model and name all parameters "
            "to be ignored first, then make the state"
        )

    def _with_gradients(self, bucket: dist.GradBucket) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter not in self._name_of:
                raise RuntimeError(
                    "a gradient came from a parameter that the model did not have, or did not "
                    "train, when ScaleComState was made. When the model has changed, make "
                    "DistributedDataParallel and the state again"
                )
            if gradient.dtype != parameter.dtype:
                raise RuntimeError(
                    f"DistributedDataParallel reduces gradients in {gradient.dtype}, but "
                    f"parameters are {parameter.dtype}. No residue could make up for this loss of "
                    "precision. Leave out mixed_precision= and fp16_compress_wrapper, and use "
                    "torch.autocast"
                )
            # The bucket's view takes every gradient for a contiguous one. But memory is laid out as
            # the parameter, if that has no gaps (channels_last): as empty_like would make it.
            if not parameter.is_contiguous():
                strides = torch.empty_like(parameter, device="meta").stride()
                gradient = gradient.as_strided(parameter.shape, strides)
            yield self._name_of[parameter], gradient

    def _give_up(self) -> None:
        """Forget a step in which buckets are missing because backward ended in an error."""
        if self._reduced:
            self._exchange.abort()
            self._reduced = []
            if self._in_node is not None:
                self._in_node.forget()
        self._missing = set(self._names)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the method, but neither a process group nor the model."""
        return {"compression": self.compression}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.compression = state["compression"]
        self._begin()


@not_compiled
def scalecom_hook(
    state: ScaleComState, bucket: dist.GradBucket, *others: Any
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients by the state's method.

    Args:
        state: the ScaleComState of this model.
        bucket: DDP's bucket.

    Raises:
        TypeError: the caller is not DDP, or `state` is not a ScaleComState.
    """
    if isinstance(bucket, tuple):
        raise TypeError(
            "torch._dynamo.config.optimize_ddp='python_reducer' hands out gradients one by one, "
            "and waits for each. Leave it at its default, which also works with torch.compile"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(SHARDED)
    if not isinstance(state, ScaleComState):
        raise TypeError(
            "register_comm_hook(state, scalecom_hook) needs a ScaleComState made from this model, "
            f"not {type(state).__name__}"
        )
    return state.reduce(bucket)


class _Layout(Face):
    """DDP's buckets in the last backward. DDP takes others after its first step."""

    def __init__(self) -> None:
        self.buckets: list[list[str]] = []

    def layout(self) -> list[list[str]]:
        return self.buckets


class _Reduced:
    """One of DDP's buckets, a buffer that holds each gradient, while it is averaged.

    `given` is a future that gets the averages, or an error. `future`, which DDP waits for, raises
    it.
    """

    def __init__(self, buffer: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
        self.buffer, self.gradients = buffer, gradients
        devices: list[Any] = [] if buffer.device.type == "cpu" else [buffer.device]
        self.given: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        # If a future was given an exception, DDP takes the exception for a tensor. But a callback
        # of a future can raise it.
        self.future = self.given.then(lambda given: given.value())

    def give(self, averages: Mapping[str, torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        """Give the future the buffer with these averages. DDP throws away what no rank has used."""
        for name in self.gradients.keys() & averages.keys():
            gradient, average = self.gradients[name], averages[name]
            if average.data_ptr() != gradient.data_ptr():
                gradient.copy_(average.view(gradient.shape))
        self.given.set_result(self.buffer)
        return self.future


def check_model(model: nn.Module, wrapper: DistributedDataParallel | None) -> None:
    """Raise an error if averages by a hook are not what training needs."""
    check_no_engine(model)
    # Names of parameters may not show that FSDP shards them.
    if any(type(m).__name__.endswith("FullyShardedDataParallel") for m in model.modules()):
        raise TypeError(SHARDED)
    check_not_sharded(model.named_parameters())
    if getattr(wrapper, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "with skip_all_reduce_unused_params=True DDP does not call the hook for every bucket: "
            "leave that argument out"
        )


def averaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter}, by names inside wrappers, of all that are trained and averaged."""
    ignored: Collection[str] = ()
    inside: Any = model
    while isinstance(inside, DistributedDataParallel) or hasattr(inside, "_orig_mod"):
        if isinstance(inside, DistributedDataParallel):
            ignored, inside = inside.parameters_to_ignore, inside.module
        else:
            inside = inside._orig_mod
    # Parameters that a script told DDP to ignore before it wrapped the model.
    ignored = {*ignored, *getattr(inside, "_ddp_params_and_buffers_to_ignore", ())}
    named = inside.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ignored}
