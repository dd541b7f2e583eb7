"""The drop-in DistributedOptimizer: Horovod's own, with its two reduce methods replaced by the
bucketed exchange, or with local steps.

Horovod makes its optimizer's class from a copy of `_DistributedOptimizer.__dict__`, and that copy's
methods call `super(self.__class__, self)`, so it cannot be subclassed (0.28.1, optimizer.py:598).
Here the same is done with two entries changed; hooks, synchronize, accumulation, clipping, closures
and state stay Horovod's. With local steps there are no hooks, and `step` is replaced as well.
Imports compressor, reducer, local_steps and undo.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.compression import Compression

from scalecom_hvd.agreement import check_operation, warn_of_half_sums
from scalecom_hvd.bucket_layout import group_names
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.local_steps import LocalSteps, NotFinite, check_gradients
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.exchange.undo import Remembered
from scalecom_hvd.schedule import Schedule
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives
from scalecom_hvd.torch.per_tensor import ScaleCom, without_ties


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = horovod.global_process_set,
    local_steps: int | Mapping[int, int] | Sequence[int] | None = None,
) -> torch.optim.Optimizer:
    """horovod.torch.DistributedOptimizer, which besides Horovod's compressors takes `ScaleCom` and
    the methods beside it (RandomK, LocalTopK, GTopK, GlobalTopK, ECQSGD), the class or an instance.

    With any other compression this is Horovod's own function, untouched. All arguments mean what
    they mean there; `groups` says which tensors share a bucket. The returned optimizer has one
    attribute more, `compression`: the ScaleCom with this rank's residues, whose `state_dict()`
    belongs into checkpoints and whose `stats()` tell what was sent.

    local_steps: H, {first step: H} or [H of each rank]: every rank takes H steps on its own
    parameters, with its own gradients and its own state of the optimizer; then the change since the
    last time goes through the compressor, is averaged, and every rank goes on from the same
    parameters (Basu et al., 2019, arXiv 1906.02367). Also with Compression.none. `synchronize()`
    and `skip_synchronize()` then do nothing, so that scripts that clip between them clip local
    gradients; `synchronize_parameters()`, on all ranks at once, ends a round early, before the
    model is evaluated or saved. None: every step averages gradients, as in Horovod.

    Raises ValueError for what ScaleCom cannot do (Adasum, operations other than Average and Sum)
    and for settings that fit no parameter, TypeError for complex parameters.
    """
    if local_steps is not None:
        compression = _with_local_steps(compression)
    if not (
        isinstance(compression, Method)
        or (isinstance(compression, type) and issubclass(compression, Method))
    ):
        return horovod_optimizer.DistributedOptimizer(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            sparse_as_dense,
            process_set,
        )

    check_operation(op, gradient_predivide_factor, horovod)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups

    compressor = compression() if isinstance(compression, type) else compression
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    parameters = _trained_parameters(optimizer, named_parameters)
    collectives = HorovodCollectives(process_set, op, gradient_predivide_factor)
    in_groups = _group_names(groups, parameters)
    if local_steps is not None:
        local = LocalSteps(
            parameters,
            compressor,
            collectives,
            Schedule(local_steps),
            in_groups,
            start_anew=lambda: _zero_state(this()),
        )
        members = _members(local.exchange) | _local_members(local, type(optimizer), parameters)
    else:
        exchange = Exchange(
            parameters,
            compressor,
            collectives,
            groups=in_groups,
            sparse_as_dense=sparse_as_dense,
            send_sparse=lambda p: _send_sparse(this(), p),
            asks_for_news=True,
        )
        compressor.attach(parameters, exchange)
        members = _members(exchange)
    # All that may be refused is refused before Horovod puts hooks on the parameters, which nothing
    # takes off again.
    warn_of_half_sums(compressor.sums_halves, horovod)
    try:
        base = type(optimizer)
        wrapped = type(base.__name__, (base,), members)(
            optimizer.param_groups,
            named_parameters,
            compressor,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            # Groups are this exchange's buckets; Horovod's own grouping would ask for real handles
            # where the exchange gives results.
            None,
            sparse_as_dense,
            process_set,
        )
    except BaseException:
        compressor.detach()
        raise
    # The compressor, which a script may keep, must not keep an optimizer that was deleted: its
    # hooks would go on.
    this = weakref.ref(wrapped)
    return wrapped


def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Callable[[], torch.Tensor], None]:
    """Replaces Horovod's: report the gradient; a callable handle is what its synchronize() calls
    for the result (optimizer.py:284).
    """
    self._exchange.ready(p)
    return functools.partial(self._exchange.result, p), None


def _send_sparse(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> Callable[[], torch.Tensor]:
    name = optimizer._parameter_names[p]
    return optimizer._sparse_allreduce_grad_async(p, name)[0]


def _grouped_allreduce_grad_async(self, ps: Any) -> None:
    raise RuntimeError(
        "Horovod grouped gradients although scalecom_hvd does so itself: is this Horovod 0.28.1?"
    )


def _synchronize(self) -> None:
    """Horovod's; but where no rank has gradients that were not exchanged yet, there is nothing to
    do.
    """
    # Without hooks there is one rank, or this one is in another process set.
    if not self._requires_update or self._exchange.must_exchange(fresh=bool(self._handles)):
        horovod_optimizer._DistributedOptimizer.__dict__["synchronize"](self)
    self._synchronized = True


def _load_state_dict(self, *args: Any, **kwargs: Any) -> None:
    """Horovod's drops what is in flight when a state is loaded (elastic restores do that); so does
    the exchange.
    """
    if self._exchange.in_step():
        self._exchange.abort()
    horovod_optimizer._DistributedOptimizer.__dict__["load_state_dict"](self, *args, **kwargs)


def _members(exchange: Exchange) -> dict[str, Any]:
    """Of Horovod's class, with the reduce methods replaced."""
    # __module__ stays Horovod's: broadcast_optimizer_state looks at it (functions.py:105).
    return dict(horovod_optimizer._DistributedOptimizer.__dict__) | {
        "_exchange": exchange,
        "_allreduce_grad_async": _allreduce_grad_async,
        "_grouped_allreduce_grad_async": _grouped_allreduce_grad_async,
        "synchronize": _synchronize,
        "load_state_dict": _load_state_dict,
        "synchronize_parameters": lambda self: None,  # they are the same after every step
        "compression": property(
            lambda self: self._compression,
            doc="The ScaleCom, or other method, of this optimizer: stats(), state_dict().",
        ),
    }


def _local_members(
    local: LocalSteps, base: type, parameters: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """What local steps replace besides: gradients are not averaged, so there are no hooks, and
    nothing to wait for before a step.
    """
    known = {id(p) for p in parameters.values()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on this rank's own parameters, and a synchronisation with the other ranks if one
        is due.

        Every rank has to take every step. A gradient that is not finite, in any evaluation of the
        closure, makes the step one that changes nothing on this rank.
        """
        trained = [p for group in self.param_groups for p in group["params"]]
        if any(p.requires_grad and id(p) not in known for p in trained):
            raise RuntimeError(
                "a parameter was added, or made trainable, after DistributedOptimizer was made, "
                "and ranks would never synchronise it: make the DistributedOptimizer anew, with "
                "all parameters that shall be trained"
            )
        # A GradScaler leaves skipping and unscaling to an optimizer that says it can. Did it skip a
        # step, this rank would miss its turn.
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            scale = float(scale)
            for grad in (p.grad for p in trained if p.grad is not None):
                grad.div_(scale)
        if found is not None:
            self.grad_scale = self.found_inf = None  # for the base class, which may know them too

        def checked() -> Any:
            result = closure()
            check_gradients(trained, result)
            return result

        def take() -> Any:
            if found is not None and float(found):
                raise NotFinite
            if closure is None:
                check_gradients(trained)
                return base.step(self)
            # The gradient that is bad may be that of a later evaluation, when parameters and state
            # were changed already.
            before = Remembered(self.param_groups, self.state)
            try:
                return base.step(self, checked)
            except NotFinite:
                before.put_back()
                raise

        return local.step(take)

    # Else torch would call a step's hooks twice, and first with gradients that are still scaled:
    # base.step calls them.
    step.hooked = True
    return {
        "_local": local,
        "_step_supports_amp_scaling": True,
        "_register_hooks": lambda self: None,
        "step": step,
        "synchronize": _nothing_to_synchronize,
        "skip_synchronize": _skip_nothing,
        "synchronize_parameters": _synchronize_parameters,
    }


def _zero_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer forget momentum and moments."""
    if any(
        isinstance(value, list) for state in optimizer.state.values() for value in state.values()
    ):
        # a history, as LBFGS has: of zeros it would make no step ever again
        optimizer.state.clear()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def _nothing_to_synchronize(self) -> None:
    """Gradients are this rank's own: nothing is averaged before a step. See synchronize_parameters."""


@contextlib.contextmanager
def _skip_nothing(self) -> Iterator[None]:
    """Nothing is skipped: step() averages parameters when its turn has come."""
    yield


def _synchronize_parameters(self) -> None:
    """Average the parameters' changes now, whatever the schedule says; all ranks must call it after
    the same step.

    Afterwards all ranks have the same parameters: to be evaluated, or saved. A residue still holds
    what the compressor held back.
    """
    self._local.synchronise()


def _with_local_steps(compression: Any) -> Any:
    """The compressor that local steps send changes through: for Compression.none, one that sends
    all of them whole.
    """
    if compression is Compression.none:
        # whatever the environment says of ScaleCom
        return ScaleCom(config=ScaleComConfig(dense=["*"], warmup_steps=0))
    if isinstance(compression, Method) or (
        isinstance(compression, type) and issubclass(compression, Method)
    ):
        return compression
    raise ValueError(
        "local_steps send changes of parameters through ScaleCom, another method with error "
        "feedback, or Compression.none, not through "
        f"{getattr(compression, '__name__', type(compression).__name__)}: for half precision give "
        "hvd.ScaleCom(quantiser=hvd.Float16())"
    )


def _trained_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: list | None
) -> dict[str, torch.Tensor]:
    """{name: parameter} of what the optimizer trains, in the order of named_parameters, which is
    that of the model's layers.
    """
    trained = {
        # Horovod's name for a nameless parameter (optimizer.py:49)
        id(p): (f"allreduce.noname.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad
    }
    if named_parameters is None:
        return dict(trained.values())
    # Horovod refuses what is no (name, parameter), and names that come twice; its words are clear.
    return dict(
        without_ties(
            [
                item
                for item in named_parameters
                if isinstance(item, tuple) and id(item[1]) in trained
            ]
        )
    )


def _group_names(
    groups: int | list | None, parameters: dict[str, torch.Tensor]
) -> list[list[str]] | None:
    """Horovod's `groups` as lists of names."""
    names = {id(p): name for name, p in parameters.items()}
    if groups is None or not isinstance(groups, list):
        if groups is not None and not groups > 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor."
            )
        return group_names(groups, names)
    listed = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(p) for p in listed}) < len(listed):
        raise ValueError("A parameter can only appear once in groups.")
    return group_names([[id(p) for p in group] for group in groups], names)
