"""What all faces' optimizers have in common: local steps, and names of parameters and groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from scalecom_hvd.bucket_layout import group_names
from scalecom_hvd.exchange.gradients import NotFinite, have_finite_gradients
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.local.rounds_alive import rounds_of
from scalecom_hvd.exchange.methods import Method
from scalecom_hvd.exchange.not_compiled import not_compiled
from scalecom_hvd.exchange.unused_averages import end_step_by_error


def local_members(
    local: LocalSteps, base: type[torch.optim.Optimizer], parameters: Iterable[torch.Tensor]
) -> dict[str, Any]:
    """The members that local steps give an optimizer. Nothing is averaged, so no hooks."""
    known = set(parameters)

    @not_compiled
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on this rank's own parameters, and synchronise if that is due.

        Every rank has to take every step. If a gradient is not finite, the step changes nothing on
        this rank. Of a closure, only the first evaluation is checked.
        """
        # A GradScaler leaves unscaling and skipping to an optimizer that says it can do both. If
        # the GradScaler skipped a step itself, this rank would miss its turn. It tells the scale in
        # these attributes, which are taken away at once: the base class may know them too, and
        # after a step that fails nobody else would delete them.
        scale, found = (vars(self).pop(name, None) for name in ("grad_scale", "found_inf"))
        check_parameters(self.param_groups, known, "synchronise")
        trained = [p for group in self.param_groups for p in group["params"]]
        if scale is not None:
            scale = float(scale)
            for grad in (p.grad for p in trained if p.grad is not None):
                grad.div_(scale)

        def check(result: object = None) -> None:
            bad = found is not None and bool(float(found))
            if local.worker.any(bad or not have_finite_gradients(trained), local.taken):
                raise NotFinite(result)

        def take() -> Any:
            if closure is None:
                check()
                return base.step(self)

            is_first = True

            def checked() -> Any:
                nonlocal is_first
                result = closure()
                if is_first:  # later, the optimizer has changed parameters, and must go on
                    is_first = False
                    check(result)
                return result

            return base.step(self, checked)

        result = local.step(take)
        if found is not None:
            self.grad_scale = self.found_inf = None  # for the GradScaler to delete
        return result

    members: dict[str, Any] = {
        "_local": local,
        "outer": local.outer,
        "_step_supports_amp_scaling": True,
        "_register_hooks": lambda self: None,
        "step": step,
        # Not Horovod's: that forgets what is under way, which is not this optimizer's state.
        "load_state_dict": base.load_state_dict,
        "synchronize": lambda self: None,  # gradients are this rank's own
        "skip_synchronize": skip_nothing,
        "synchronize_parameters": _synchronize_parameters,
    }
    # base.step calls the step's hooks. Without this mark, torch would call them here too, when
    # gradients are still scaled.
    members["step"].hooked = True
    return members


def check_steps(
    passes: int, local_steps: object, outer: object, overlap: int, fragments: int, clip: object
) -> None:
    """Raise ValueError if an argument is wrong, or means nothing without local steps."""
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if local_steps is not None:
        return
    for given, name, what in (
        (outer is not None, "outer", "applies the changes that local steps made"),
        (overlap != 0, "overlap", "lets local steps go on while their changes are averaged"),
        (fragments != 1, "fragments", "has parts of the local steps' changes averaged in turn"),
        (clip is not None, "clip_changes", "clips the changes that local steps made"),
    ):
        if given:
            raise ValueError(
                f"{name}= needs local_steps=, because it {what}. Give local_steps=H too, such as 30"
            )


def check_left_out(argument: str, settings: Iterable[tuple[bool, str, str]]) -> None:
    """Raise ValueError if a setting that excludes an argument was given: (given, name, why)."""
    for given, what, why in settings:
        if given:
            raise ValueError(f"{what} cannot be used with {argument}: {why}. Leave {what} out")


def check_parameters(
    groups: Iterable[Mapping[str, Any]], known: Collection[torch.Tensor], what: str
) -> None:
    """Raise RuntimeError if groups train a parameter not known, so ranks never do `what`."""
    trained = (p for group in groups for p in group["params"] if p.requires_grad)
    if any(p not in known for p in trained):
        end_step_by_error()
        raise RuntimeError(
            "a parameter was added, or made trainable, after DistributedOptimizer was made, so "
            f"ranks would never {what} it. Make a new DistributedOptimizer with all parameters "
            "that are to be trained"
        )


def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer forget momentum and moments: its next step is a first one."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        return
    for state in optimizer.state.values():  # Adagrad makes its state when it is made
        for value in state.values():
            value.zero_()


@contextlib.contextmanager
def skip_nothing(self: object) -> Iterator[None]:
    """Skip nothing: gradients were averaged when backward returned, or are never averaged."""
    yield


def _synchronize_parameters(self: Any) -> None:
    """Average the parameters' changes now. All ranks must call it after the same step.

    All then have the same parameters. A residue still holds what the method held back.
    """
    self._local.synchronise()


@contextlib.contextmanager
def common_parameters(params: dict[str, object] | list[object]) -> Iterator[None]:
    """For a broadcast of a state_dict or a list, show the common parameters of local steps."""
    held = [local for local in rounds_of(params) if local.own.held]
    for local in held:
        local.show_common()
    try:
        yield
    finally:
        for local in held:
            local.own.put_back()


def is_method(compression: object) -> bool:
    """Whether this is a method: its class or an instance."""
    kind = compression if isinstance(compression, type) else type(compression)
    return issubclass(kind, Method)


def method_of(compression: Method | type[Method], local_steps: object) -> Method:
    """The method that an optimizer was given, or one of the given class."""
    method = compression() if isinstance(compression, type) else compression
    if method.run.averager is None:
        method.settle(every_step=local_steps is None)
    return method


SHARDED = (
    "the model's parameters are sharded, but here every rank must hold all parameters in full. If "
    "fully_shard (FSDP2) or parallelize_module (tensor parallelism) sharded them, use "
    "scalecom_hvd.ddp.DistributedOptimizer(..., mesh=mesh). FullyShardedDataParallel (FSDP1) is "
    "not supported: use fully_shard, or DistributedDataParallel"
)

# They average gradients themselves. What else these packages have, such as DeepSpeed's optimizers
# in deepspeed.ops, may be trained.
ENGINES = (
    "deepspeed.runtime.",
    "megatron.core.distributed.",
    "megatron.core.optimizer.",
    "megatron_fsdp.",
)


def check_no_engine(thing: object) -> None:
    """Raise TypeError if a model or an optimizer is one of DeepSpeed's or Megatron's engines."""
    for kind in type(thing).__mro__:
        if kind.__module__.startswith(ENGINES):
            raise TypeError(
                f"{kind.__module__}.{kind.__name__} averages gradients itself, and nothing can "
                "take its place. Use DistributedDataParallel or fully_shard (FSDP2), and an "
                "optimizer that no engine has wrapped"
            )


def check_not_sharded(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise TypeError if parameters are sharded, so that other ranks have the rest of them."""
    for name, p in named_parameters:
        # FSDP2 has placements; the other two are FSDP1 with flat, and with original, parameters.
        flat = getattr(p, "_is_flat_param", False) or "_flat_param" in str(name)
        if hasattr(p, "placements") or flat or "_fsdp_wrapped_module" in str(name):
            raise TypeError(SHARDED)


def trained_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    sharded: bool = False,
) -> dict[str, torch.Tensor]:
    """{name: parameter} of what the optimizer trains, in the order of named_parameters.

    Raises:
        TypeError: they are sharded and may not be, or the optimizer averages gradients already.
    """
    check_no_engine(optimizer)
    if hasattr(optimizer, "skip_synchronize"):
        raise TypeError(
            "this optimizer already averages gradients: wrap the optimizer that it was made from"
        )
    trained = {
        # Horovod's name for a nameless parameter (optimizer.py:49).
        id(p): (f"allreduce.noname.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p.requires_grad
    }
    if named_parameters is None:
        found = dict(trained.values())
    else:
        # Horovod refuses items that are no (name, parameter), and names that come twice. Its errors
        # are clear.
        pairs = [item for item in named_parameters if isinstance(item, tuple)]
        found = dict(without_ties([pair for pair in pairs if id(pair[1]) in trained]))
    if not sharded:
        check_not_sharded(found.items())
    return found


def names_of_groups(
    groups: int | list[list[torch.Tensor]] | None, parameters: Mapping[str, torch.Tensor]
) -> list[list[str]] | None:
    """Horovod's `groups` as lists of names."""
    names = {id(p): name for name, p in parameters.items()}
    if not isinstance(groups, list):
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


def without_ties(
    named_parameters: Sequence[tuple[str, torch.Tensor]],
) -> list[tuple[str, torch.Tensor]]:
    """Each parameter with its first name. A tied one has several names, but one gradient."""
    first = {id(item[1]): item for item in reversed(named_parameters)}
    return [item for item in named_parameters if first[id(item[1])] is item]
