"""DistributedOptimizer over torch.distributed, for models without DDP's wrapper, and local steps.

The user's optimizer gets a class of its own, which averages gradients before each step, and has the
methods of Horovod's optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scalecom_hvd.ddp.fsdp_groups import FsdpGroups
from scalecom_hvd.ddp.nodes import check_averages, check_mesh, check_shards, peers_of, ranks_of_node
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives
from scalecom_hvd.ddp.sharded_optimizer import AveragesInBackward, ShardedGradients
from scalecom_hvd.exchange import faces
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.gradients import local_part
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.local.outer_step import Outer
from scalecom_hvd.exchange.local.recipes import everything_whole
from scalecom_hvd.exchange.methods import Method, ScaleCom
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.exchange.not_compiled import not_compiled
from scalecom_hvd.exchange.optimizer_gradients import OptimizerGradients
from scalecom_hvd.schedule import Schedule

_Compression: TypeAlias = Method | type[Method] | None


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: _Compression = ScaleCom,
    backward_passes_per_step: int = 1,
    op: Any = dist.ReduceOp.AVG,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_group: dist.ProcessGroup | None = None,
    local_steps: int | Mapping[int, int] | None = None,
    outer: Outer | None = None,
    overlap: int = 0,
    fragments: int = 1,
    clip_changes: float | None = None,
    collectives: Collectives | None = None,
    mesh: DeviceMesh | None = None,
) -> torch.optim.Optimizer:
    """An optimizer that averages gradients over ranks, compressed, before each of its steps.

    The model must not be wrapped by DistributedDataParallel. It must begin with the same parameters
    on all ranks, which `broadcast_parameters` ensures. Make the optimizer on all ranks at the same
    time.

    Args:
        optimizer: any of PyTorch's optimizers. Its state is kept.
        named_parameters: model.named_parameters().
        compression: a method (its class or an instance). None: everything is sent whole.
        backward_passes_per_step: how many backward passes add up before gradients are averaged.
        op: dist.ReduceOp.AVG, or SUM.
        groups: how many buckets there are, or lists of parameters that share one. Default: buckets
            are made by bucket_bytes.
        sparse_as_dense: whether sparse gradients are made dense. If not, they are refused.
        process_group: default: all ranks.
        local_steps: H, or {first step: H}. Every rank takes H steps on its own parameters. The
            method then averages the ranks' changes (Basu et al., 2019, arXiv 1906.02367). None:
            every step averages gradients.
        outer: with local steps, a function that makes an optimizer of the common parameters, such
            as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True). All ranks take the
            same step with it, and its gradient is the averaged change (DiLoCo, Douillard et al.,
            2023, arXiv 2311.08105). None: the average is subtracted.
        overlap: with local steps, how many steps a rank takes while an average travels; fewer than
            local_steps. What these steps change is part of the rank's next change (after Streaming
            DiLoCo, Douillard et al., 2025, arXiv 2501.18512). 0: ranks wait for the average.
        fragments: with local steps, how many parts of about equal size the model is cut into. They
            synchronise in turn, each once in every local_steps steps, so less travels at a time
            (also Streaming DiLoCo). `overlap` must then be less than local_steps // fragments.
        clip_changes: with local steps, the largest norm that a rank's change may have, as a
            multiple of the median norm of all ranks' changes, such as 2. Larger changes are scaled
            down to it, so a rank that diverges moves the others less. None: no limit.
        collectives: a transport of your own by which ranks reach each other (see
            scalecom_hvd.exchange.Collectives). It defines the ranks, and whether they sum, so leave
            out `op` and process_group. Make the parameters the same on all ranks by a seed, or by
            the transport's `broadcast`. None: torch.distributed's transport.
        mesh: a mesh of nodes times the ranks of each node, with dimensions named "replicate" and
            "shard", for a model that fully_shard (FSDP2) sharded over it. FSDP2 averages gradients
            whole inside a node, and this optimizer compresses them between nodes. p.grad is the
            average when backward returns, so nothing has to be synchronized. With tensor
            parallelism inside nodes, the dimensions after "replicate" may have other names. With
            local steps, a node's ranks step together, and the model may be sharded or wrapped by
            DistributedDataParallel over the node's ranks. None: each rank has the whole model.

    Returns:
        An optimizer with these additions. `compression` is the method with this rank's residues:
        save its `state_dict()` in checkpoints. `synchronize()` averages gradients now, for instance
        to clip them; put `skip_synchronize()` around the step that follows.
        `synchronize_parameters()` ends a round of local steps early: call it on all ranks at once.
        `outer` is the outer optimizer.

    Raises:
        ValueError, TypeError: a setting cannot work, or fits no parameter.

    Example:
        >>> from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, broadcast_parameters
        >>> broadcast_parameters(model)
        >>> named = model.named_parameters()
        >>> optimizer = DistributedOptimizer(optimizer, named, compression=ScaleCom())
    """
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise ValueError(
            "op must be dist.ReduceOp.AVG (the default) or SUM: other operations need all values"
        )
    faces.check_steps(
        backward_passes_per_step, local_steps, outer, overlap, fragments, clip_changes
    )
    if compression is None:
        compression = everything_whole()
    if not faces.is_method(compression):
        raise TypeError(
            "compression must be a method such as ScaleCom or RandomK(rate=100), or None, not "
            f"{compression!r}"
        )
    method = faces.method_of(compression, local_steps)
    parameters = faces.trained_parameters(optimizer, named_parameters, sharded=mesh is not None)
    _check_names(optimizer, parameters)
    named_groups = faces.names_of_groups(groups, parameters)
    node: Node | None = None
    own: ProcessGroupCollectives | None = None
    if mesh is not None:
        why_not = "the mesh says which ranks average together"
        settings = (
            (op != dist.ReduceOp.AVG, "op=SUM", "gradients are averaged inside nodes"),
            (sparse_as_dense, "sparse_as_dense", "FSDP2 has no sparse gradients"),
            (process_group is not None, "process_group", why_not),
            (collectives is not None, "collectives", why_not),
        )
        faces.check_left_out("mesh=", settings)
        peers, ranks = _peers_and_node(parameters, mesh, may_be_whole=local_steps is not None)
        collectives, node = peers, Node(ranks)
        if local_steps is None:
            rest = method, peers, node, named_groups, backward_passes_per_step
            with method.run.released_on_error():
                sharded = ShardedGradients(parameters, mesh, *rest)
            wrapped = _of_own_class(
                optimizer, (AveragesInBackward,), _gradients=sharded, _method=method
            )
            peers.end_with(wrapped)
            ranks.end_with(wrapped)
            return wrapped
    elif collectives is None:
        devices = {parameter.device for parameter in parameters.values()}
        sums = op == dist.ReduceOp.SUM
        collectives = own = ProcessGroupCollectives(process_group, sums, devices)
    elif op != dist.ReduceOp.AVG or process_group is not None:
        raise ValueError(
            "collectives= brings its own transport, but op and process_group belong to "
            "torch.distributed: leave op and process_group out"
        )
    members: dict[str, Any] = {}
    bases: tuple[type, ...] = (_Averaging,)
    if local_steps is None:
        how = named_groups, sparse_as_dense, _refuse_sparse
        gradients = OptimizerGradients(parameters, method, collectives, *how)
    else:
        who = parameters, method, collectives, Schedule(local_steps, fragments), named_groups
        more = lambda: faces.forget_state(this()), outer, overlap, clip_changes, node
        local = LocalSteps(*who, *more)
        members, bases = faces.local_members(local, type(optimizer), parameters.values()), ()
    with method.run.released_on_error():
        fsdp = FsdpGroups(parameters.values(), mesh)
        wrapped = _of_own_class(optimizer, bases, members, _method=method, _fsdp=fsdp)
        if local_steps is None:
            # A single rank has nothing to average.
            trained = parameters.values() if collectives.size > 1 else ()
            wrapped._begin(gradients, trained, backward_passes_per_step)
            # Local steps may still submit something when the optimizer is gone.
            if own is not None:
                own.end_with(wrapped)
    this: Callable[[], Any] = weakref.ref(wrapped)
    return wrapped


def _peers_and_node(
    parameters: Mapping[str, torch.Tensor], mesh: DeviceMesh, may_be_whole: bool
) -> tuple[ProcessGroupCollectives, ProcessGroupCollectives]:
    """This rank's peers, and its node's ranks, which hold shards unless all `may_be_whole`."""
    is_whole = may_be_whole and not any(hasattr(p, "placements") for p in parameters.values())
    check_mesh(mesh, sharded=not is_whole)
    devices = {parameter.device for parameter in parameters.values()}
    if not is_whole:
        check_shards(parameters, mesh)
        if "shard" in mesh.mesh_dim_names:
            # With CPUOffloadPolicy, FSDP2 averages on the mesh's device. Parameters are elsewhere.
            own = next((d for d in devices if d.type == mesh.device_type), None)
            check_averages(mesh.get_group("shard"), own or torch.device(mesh.device_type))
    return peers_of(mesh, devices), ranks_of_node(mesh, devices)


def _of_own_class(
    optimizer: torch.optim.Optimizer,
    bases: tuple[type, ...],
    members: Mapping[str, Any] = types.MappingProxyType({}),
    **attributes: Any,
) -> Any:
    """The optimizer with all that it holds, of a subclass with these bases and members."""
    kind = type(optimizer)
    method = property(lambda self: self._method, doc="The method, with stats() and state_dict().")
    members = {"compression": method, **members}
    wrapped: Any = object.__new__(type(kind.__name__, (*bases, _LoadsInPlace, kind), members))
    # Leave out `step`: a learning-rate scheduler may have put a wrapper around it, which calls the
    # step of the original optimizer.
    vars(wrapped).update({name: own for name, own in vars(optimizer).items() if name != "step"})
    vars(wrapped).update(attributes)
    return wrapped


def broadcast_parameters(
    model: torch.nn.Module | dict[str, Any] | list[Any],
    root_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Give all ranks the parameters and buffers of one rank.

    If a rank's loaded state is from the middle of a round of local steps, the root sends the common
    parameters. Ranks without a state begin from these. Ranks with a state get their own parameters
    back afterwards.

    Args:
        model: the model, which may differ between ranks only in its numbers; or its state_dict(),
            or a list of (name, tensor) or of tensors.
        root_rank: the rank that sends, by its position in the group.
        process_group: default: all ranks. For a sharded model, give the ranks that have the same
            shards, mesh.get_group("replicate").

    Raises:
        ValueError: the model is sharded, and ranks of different shards would get the same values.
    """
    state: Any = model
    if isinstance(model, torch.nn.Module):  # whose state lacks buffers that are not persistent
        state = {**dict(model.named_buffers()), **model.state_dict()}
    items = state.values() if isinstance(state, dict) else state
    root = dist.get_process_group_ranks(process_group or dist.group.WORLD)[root_rank]
    with faces.common_parameters(state):
        for item in items:
            tensor = item[1] if isinstance(item, tuple) else item
            if hasattr(tensor, "to_local") and process_group is None:
                raise ValueError(
                    "the model is sharded, so only ranks with the same shards can share values. "
                    'Give the group of these ranks: process_group=mesh.get_group("replicate")'
                )
            if isinstance(tensor, torch.Tensor):
                _broadcast(local_part(tensor.detach()), root, process_group)


def _broadcast(tensor: torch.Tensor, root: int, group: dist.ProcessGroup | None) -> None:
    """Send a tensor of any layout. Gloo itself takes every tensor for a contiguous one."""
    # An expanded tensor has only one element in memory where it shows several.
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    own = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for _, stride in sizes)]
    whole = own.contiguous()
    dist.broadcast(whole, root, group=group)
    if whole.data_ptr() != own.data_ptr():
        own.copy_(whole)


class _LoadsInPlace:
    """Loads a state into what it shares with the optimizer that it was made from.

    A schedule that was made before has that one's groups.
    """

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        shared = dict(vars(self))
        super().__setstate__(state)  # type: ignore[misc]
        if "param_groups" in shared:
            owned = [*shared["param_groups"], shared["state"]]
            for own, new in zip(owned, map(dict, [*self.param_groups, self.state]), strict=True):
                own.clear()
                own.update(new)
            self.param_groups, self.state = shared["param_groups"], shared["state"]


class _Averaging:
    """What an optimizer that averages gradients has besides its own class, the next base."""

    def _begin(
        self, gradients: OptimizerGradients, parameters: Iterable[torch.Tensor], passes: int
    ) -> None:
        self._gradients, self._passes = gradients, passes
        # How many backward passes each gradient lacks. 0: it was reported, and is not averaged yet.
        self._left = dict.fromkeys(parameters, passes)
        self._synchronized, self._should_synchronize = False, True
        self._step_supports_amp_scaling = False  # a GradScaler must look at averages
        itself = weakref.ref(self)
        # The hooks are on the nodes that accumulate gradients, like Horovod's. So hooks that a
        # script puts on a parameter, even later, run first. Autograd does not keep such nodes
        # alive, so this list does.
        self._nodes = []
        for parameter in self._left:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(functools.partial(_report, itself, parameter))
            self._nodes.append(node)

    @not_compiled
    def synchronize(self) -> None:
        """Average all gradients now, if any rank has some that were not averaged yet."""
        if self._left:
            groups = self.param_groups  # type: ignore[attr-defined]
            faces.check_parameters(groups, self._left, "average")
        try:
            if self._left and self._gradients.must_exchange(fresh=self._fresh):
                for parameter in [p for p, left in self._left.items() if left]:
                    self._gradients.ready(parameter)
                for parameter in self._left:
                    _put(parameter, self._gradients.result(parameter))
        finally:  # after an error the exchange has given the step up
            self._forget()
        self._synchronized = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up this many backward passes from now on. Not allowed in the middle of a step."""
        self._passes = passes
        self._forget()

    @property
    def _fresh(self) -> bool:
        """Whether backward gave any gradient since the last exchange, in however many passes."""
        return any(left != self._passes for left in self._left.values())

    def _forget(self) -> None:
        self._left = dict.fromkeys(self._left, self._passes)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() use gradients as they are, after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def synchronize_parameters(self) -> None:
        """Do nothing: parameters are the same on all ranks after every step."""

    @not_compiled
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Average gradients, except inside skip_synchronize(), and take a step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() was called after optimizer.synchronize(), so ranks look once "
                    "more for new gradients. Call step() in `with optimizer.skip_synchronize():`",
                    stacklevel=3,  # not_compiled's is between
                )
            self.synchronize()
        self._synchronized = False
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        self._synchronized = False  # a closure may have synchronized
        return result

    # The next base's step() calls the hooks of a step.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients as usual, but refuse while they are being averaged."""
        if self._fresh:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): gradients would be lost"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as usual. A step under way is forgotten, and residues are as before it."""
        self._gradients.start_over()
        self._forget()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]


@not_compiled
def _report(optimizer: Callable[[], Any], parameter: torch.Tensor, *_: Any) -> None:
    """A gradient has been accumulated."""
    self = optimizer()
    if self is None:
        return  # it was deleted, and its parameters are still in use
    if self._left[parameter] == 0:
        raise AssertionError(
            "gradients were computed more than backward_passes_per_step times before "
            f"optimizer.step() or synchronize(): give backward_passes_per_step={self._passes + 1} "
            "or more to accumulate them"
        )
    self._left[parameter] -= 1
    if self._left[parameter] == 0:
        self._gradients.ready(parameter)


@torch.no_grad()
def _put(parameter: torch.Tensor, average: torch.Tensor) -> None:
    """Make the average p.grad's numbers. The tensor stays, because scripts may hold it."""
    if parameter.grad.is_sparse:
        parameter.grad.zero_().add_(average.to_sparse(parameter.grad.sparse_dim()))
    else:
        parameter.grad.data = average


def _refuse_sparse(parameter: torch.Tensor) -> Callable[[], torch.Tensor]:
    raise RuntimeError(
        "torch.distributed does not average sparse gradients: give "
        "DistributedOptimizer(..., sparse_as_dense=True), or make the embedding with sparse=False"
    )


def _check_names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    named = set(map(id, parameters.values()))
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if any(id(p) not in named for p in trained):
        raise ValueError(
            "the optimizer trains parameters that named_parameters does not name, or names twice. "
            "Give named_parameters=model.named_parameters() of the whole model"
        )
