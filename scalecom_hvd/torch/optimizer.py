"""The drop-in DistributedOptimizer: Horovod's own, with the exchange instead of its all-reduces.

Horovod makes its optimizer's class from a copy of `_DistributedOptimizer.__dict__`, and that copy's
methods call `super(self.__class__, self)`, so the class cannot be subclassed (0.28.1,
optimizer.py:598). This module makes its class in the same way, with Horovod's reduce method
replaced. Hooks, accumulation, clipping, closures and state remain Horovod's. synchronize and
load_state_dict do too, but they look at the exchange first. With local steps there are no hooks,
and `step` is replaced as well.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import horovod.torch as horovod
import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch import functions
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.compression import Compression, Compressor

from scalecom_hvd.agreement import check_arguments, check_operation
from scalecom_hvd.exchange import faces
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.local.outer_step import Outer
from scalecom_hvd.exchange.local.recipes import everything_whole
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.exchange.not_compiled import not_compiled
from scalecom_hvd.exchange.optimizer_gradients import OptimizerGradients
from scalecom_hvd.schedule import Schedule
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives, where_it_ends
from scalecom_hvd.torch.horovod_nodes import peers_and_node

_Compression: TypeAlias = Compressor | type[Compressor] | Method | type[Method]


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: _Compression = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = horovod.global_process_set,
    local_steps: int | Mapping[int, int] | None = None,
    outer: Outer | None = None,
    overlap: int = 0,
    fragments: int = 1,
    clip_changes: float | None = None,
    collectives: Collectives | None = None,
    nodes: bool | int = False,
) -> torch.optim.Optimizer:
    """horovod.torch.DistributedOptimizer, which also takes ScaleCom and other methods.

    The methods are ScaleCom, RandomK and LocalTopK. With any other compression and no local steps,
    this calls Horovod's own function unchanged.

    Arguments that are not listed below work as in Horovod.

    Args:
        compression: a method (its class or an instance), or one of Horovod's compressors.
        op: with a method, hvd.Average or hvd.Sum.
        groups: as in Horovod. It says which tensors share a bucket.
        local_steps, outer, overlap, fragments, clip_changes: as in
            scalecom_hvd.ddp.DistributedOptimizer. They also work with Compression.none.
        collectives: with a method, a transport of your own by which ranks reach each other (see
            scalecom_hvd.exchange.Collectives). It defines the ranks, and whether they sum, so leave
            out `op`, gradient_predivide_factor and process_set. None: Horovod's transport.
        nodes: with a method, which ranks form a node. True: the ranks of a host. A number: that
            many nodes, of consecutive ranks. Gradients are averaged whole inside a node and
            compressed between nodes. Each rank exchanges 1 / (ranks of a node) of each tensor.
            With local steps, a node's ranks step together. Nodes need
            hvd.init(process_sets="dynamic"). False: every rank is a node of its own.

    Returns:
        An optimizer like Horovod's, with these additions. `compression` is the method with this
        rank's residues: save its `state_dict()` in checkpoints, and read from its `stats()` what
        was sent. `synchronize_parameters()` ends a round of local steps early: call it on all ranks
        at once, before the model is evaluated or saved. `outer` is the outer optimizer.

        With local steps, `synchronize()` and `skip_synchronize()` do nothing, so a script that
        clips between them clips local gradients.

    Raises:
        ValueError: the method does not support an argument (Adasum, operations other than Average
            and Sum), or a setting fits no parameter.
        TypeError: parameters are complex or sharded, `optimizer` is no optimizer, or `compression`
            is no compression.

    Example:
        >>> import scalecom_hvd.torch as hvd
        >>> optimizer = hvd.DistributedOptimizer(
        ...     optimizer,
        ...     named_parameters=model.named_parameters(),
        ...     compression=hvd.ScaleCom(),
        ... )
        >>> torch.save(optimizer.compression.state_dict(), f"residues.{hvd.rank()}.pt")
    """
    check_arguments(optimizer, "param_groups", "PyTorch", compression)
    faces.check_steps(
        backward_passes_per_step, local_steps, outer, overlap, fragments, clip_changes
    )
    averaging = backward_passes_per_step, op, gradient_predivide_factor
    if local_steps is not None:
        compression = _with_local_steps(compression)
    if not faces.is_method(compression):
        rest = num_groups, groups, sparse_as_dense, process_set
        make = horovod_optimizer.DistributedOptimizer
        return make(optimizer, named_parameters, compression, *averaging, *rest)

    check_operation(op, gradient_predivide_factor, horovod)
    is_everyone = process_set is horovod.global_process_set
    if nodes is not False:
        why_not = "gradients are always averaged, inside a node and between nodes"
        predivides = gradient_predivide_factor != 1.0
        settings = (
            (op != horovod.Average, "op", why_not),
            (predivides, "gradient_predivide_factor", "gradients are averaged in two stages"),
            (not is_everyone, "process_set", "nodes consist of all ranks"),
            (collectives is not None, "collectives", "nodes are Horovod's process sets"),
        )
        faces.check_left_out("nodes=", settings)
    is_own_transport = collectives is not None and collectives.size > 1
    if collectives is None:
        collectives = HorovodCollectives(process_set, op, gradient_predivide_factor)
    elif (op, gradient_predivide_factor, is_everyone) != (horovod.Average, 1.0, True):
        raise ValueError(
            "collectives= brings its own transport, but op, gradient_predivide_factor and "
            "process_set belong to Horovod: leave these three out"
        )
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups

    compression = method = faces.method_of(compression, local_steps)
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    parameters = faces.trained_parameters(optimizer, named_parameters)
    node = None
    if nodes is not False:
        collectives, node, inside = peers_and_node(nodes, local_steps is not None)
    named_groups = faces.names_of_groups(groups, parameters)
    if local_steps is None:
        gradients = OptimizerGradients(
            parameters,
            method,
            collectives,
            named_groups,
            sparse_as_dense,
            send_sparse=lambda p: _send_sparse(this(), p),
            node=node,
            refuses=False,
        )
        members = _members(gradients)
    else:
        who = parameters, method, collectives, Schedule(local_steps, fragments), named_groups
        more = lambda: faces.forget_state(this()), outer, overlap, clip_changes, node
        local = LocalSteps(*who, *more)
        members = _members(None) | faces.local_members(local, type(optimizer), parameters.values())
        if node is not None:
            members = _averaging_in_node(members, method)
            compression, process_set = Compression.none, inside
    # Refuse everything that may be refused before Horovod puts hooks on the parameters: nothing
    # removes these hooks again.
    base = type(optimizer)
    with method.run.released_on_error():
        wrapped = type(base.__name__, (base,), members)(
            optimizer.param_groups,
            named_parameters,
            compression,
            *averaging,
            # The exchange's buckets serve as groups. Horovod's own grouping would need real
            # handles, but the exchange gives results.
            None,
            sparse_as_dense,
            process_set,
        )
    # A script may keep the method. So the method must not keep a deleted optimizer alive: the
    # optimizer's hooks would go on.
    this: Callable[[], Any] = weakref.ref(wrapped)
    # With only one rank, Horovod registers no hooks (optimizer.py:110). But the script's own
    # transport may have more ranks.
    if is_own_transport and local_steps is None and not wrapped._requires_update:
        wrapped._register_hooks()
    return wrapped


def broadcast_parameters(params: dict[str, Any] | list[Any], root_rank: int) -> None:
    """horovod.torch.broadcast_parameters, which also works for models with local steps.

    If a rank's loaded state is from the middle of a round of local steps, the root sends the common
    parameters. Ranks without a state begin from these. Ranks with a state get their own parameters
    back afterwards.

    Args:
        params: a state_dict, or a list of (name, tensor) or of tensors.
        root_rank: the rank whose parameters are sent.
    """
    with faces.common_parameters(params):
        functions.broadcast_parameters(params, root_rank)


@not_compiled
def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], None]:
    """Report a gradient. Returns the function that Horovod's synchronize() calls for the result.

    Horovod calls handles that are callable (optimizer.py:284).
    """
    self._gradients.ready(p)
    return functools.partial(self._gradients.result, p), None


def _send_sparse(self: Any, p: torch.Tensor) -> Callable[[], torch.Tensor]:
    wait = self._sparse_allreduce_grad_async(p, self._parameter_names[p])[0]
    return lambda: where_it_ends(wait, p.device)  # Horovod divides there


@not_compiled
def _synchronize(self: Any) -> None:
    """Do what Horovod's method does, unless no rank has gradients that are not exchanged yet."""
    if self._requires_update:
        faces.check_parameters(self.param_groups, self._gradients.trained, "average")
    try:
        # No hooks means: there is only one rank, or this rank is not in the process set.
        if not self._requires_update or self._gradients.must_exchange(fresh=bool(self._handles)):
            horovod_optimizer._DistributedOptimizer.__dict__["synchronize"](self)
    except BaseException:  # the exchange has given the step up; Horovod would refuse the next one
        self._handles.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        raise
    self._synchronized = True


@not_compiled
def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Do what Horovod's method does: average gradients, and call the next base's step()."""
    result = horovod_optimizer._DistributedOptimizer.__dict__["step"](self, closure)
    self._synchronized = False  # a closure may have synchronized
    return result


# The next base's step() calls the hooks of a step, when gradients are averaged.
_step.hooked = True  # type: ignore[attr-defined]


def _load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    """Drop what is under way, as Horovod does (elastic restores load states), and load."""
    self._gradients.start_over()
    horovod_optimizer._DistributedOptimizer.__dict__["load_state_dict"](self, *args, **kwargs)


_COMPRESSION = "This optimizer's ScaleCom, or other method, with stats() and state_dict()."


def _members(gradients: OptimizerGradients | None) -> dict[str, Any]:
    """The members of Horovod's class, with the reduce method replaced."""
    # __module__ stays Horovod's: broadcast_optimizer_state looks at it (functions.py:105).
    return dict(horovod_optimizer._DistributedOptimizer.__dict__) | {
        "_gradients": gradients,
        "_allreduce_grad_async": _allreduce_grad_async,
        "synchronize": _synchronize,
        "step": _step,
        "load_state_dict": _load_state_dict,
        "synchronize_parameters": lambda self: None,  # they are the same after every step
        "compression": property(lambda self: self._compression, doc=_COMPRESSION),
    }


def _averaging_in_node(members: dict[str, Any], method: Method) -> dict[str, Any]:
    """`members` of local steps, for an optimizer whose gradients Horovod averages in the node."""
    take_local_step = members["step"]

    @not_compiled
    def step(self: Any, closure: None = None) -> Any:
        """Average gradients inside the node, and take a local step."""
        if closure is not None:
            raise ValueError(
                "nodes= with local_steps= takes no closure, because gradients have to be averaged "
                "inside the node before the step: call backward() before step()"
            )
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return take_local_step(self)

    step.hooked = True  # type: ignore[attr-defined]
    stays = ("_local", "outer", "_step_supports_amp_scaling", "synchronize_parameters")
    own = {name: members[name] for name in stays}
    own |= {"step": step, "compression": property(lambda self: method, doc=_COMPRESSION)}
    return dict(horovod_optimizer._DistributedOptimizer.__dict__) | own


def _with_local_steps(compression: _Compression) -> Method | type[Method]:
    """The method that local steps send changes through."""
    if compression is Compression.none:
        return everything_whole()
    if faces.is_method(compression):
        return compression
    raise ValueError(
        "local_steps send changes of parameters through ScaleCom, another method with error "
        "feedback, or Compression.none, but not through "
        f"{getattr(compression, '__name__', type(compression).__name__)}. To send fewer bits, give "
        "hvd.ScaleCom(bits=8)"
    )
