"""The optimizer's momentum, made quasi-hyperbolic, so that a late gradient is not late twice.

Error feedback sends a gradient up to `rate` steps late. Momentum then spreads it over further
steps. So each step goes along (1 - kappa) * b + kappa * g instead of b, where b is the optimizer's
momentum and g the averaged gradient as optimizer.step() finds it (QHM and QHAdam, Ma and Yarats,
"Quasi-hyperbolic momentum and Adam for deep learning", ICLR 2019, arXiv 1810.06801, with nu = 1 -
kappa). b and g are the same on all ranks, so parameters are too, whenever anybody looks.

Any optimizer will do whose momentum is linear in the gradients. Before its step, the buffer b of
the last step becomes (1 - kappa) * b + kappa * a * g, where a * g is what b would be if every
gradient had been g. The optimizer's update keeps the mix, so its step goes along (1 - kappa) * b +
kappa * a * g of this step. Afterwards b is solved for, so state_dict() holds the momentum itself.
Weight decay that the optimizer adds to gradients is not late, and acts as without ScaleCom; in the
buffer, its part is 1 / (1 - kappa) times as large.

Faces make a QuasiHyperbolic for the parameters that the user's optimizer steps. PyTorch's public
hooks on optimizers' steps do the rest.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as every_optimizer

from scalecom_hvd.exchange.background_thread import alive
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.gradients import local_part
from scalecom_hvd.exchange.not_compiled import not_compiled
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.quasi_hyperbolic import UNKNOWN, kappa_of

log = logging.getLogger("scalecom_hvd")

# After this many steps of the optimizer without any exchange, a warning is logged.
UNUSED = 20
LARGE = 2**16  # elements: a momentum that a processor's cache does not keep between two passes
NOTHING_EXCHANGED = (
    "the optimizer has taken %d steps, and ScaleCom has exchanged nothing. If "
    "DistributedDataParallel wraps the model, call model.register_comm_hook(state, scalecom_hook)"
)

Kept = Mapping[str, Any]
"""What an optimizer keeps: a group's settings, or a parameter's state."""

Size = float | torch.Tensor
"""a: how many times a gradient a momentum is, if all gradients are equal."""


class Momentum(NamedTuple):
    """How a kind of optimizer keeps its momentum."""

    key: str  # its name in the optimizer's state of a parameter
    # Gives `Size` after a number of steps: from the parameter's group and state, and from the steps
    # for optimizers that do not count them.
    size: Callable[[Kept, Kept, int], Size]
    is_mixed: bool = True  # also if the script gives no nu


def _of_sgd(group: Kept, state: Kept, steps: int) -> Size:
    """SGD begins with g, and then b <- mu * b + (1 - dampening) * g."""
    mu, own = float(group["momentum"]), 1 - float(group["dampening"])
    begun = mu ** max(steps - 1, 0)
    return begun + own * (1 - begun) / (1 - mu) if mu < 1 else 0.0


def _of_adam(group: Kept, state: Kept, steps: int) -> Size:
    """Adam averages from zero on, b <- b1 * b + (1 - b1) * g, and counts its steps."""
    counted = state.get("step", group.get("step", steps))
    if isinstance(counted, torch.Tensor) and counted.device.type == "cpu":
        counted = float(counted)  # on a device, the host does not wait for it
    return 1 - float(group["betas"][0]) ** counted


_ADAM = Momentum("exp_avg", _of_adam)
MOMENTA = {
    "SGD": Momentum("momentum_buffer", _of_sgd),
    # It makes all directions of its momentum equally long, also those that a sparse gradient adds.
    # Mixed, it trained worse (docs/results.md).
    "Muon": Momentum("momentum_buffer", lambda group, _, n: 1 - group["momentum"] ** n, False),
    "Lion": Momentum("exp_avg", lambda group, _, n: 1 - float(group["betas"][1]) ** n),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb", "LAMB", "Adan"), _ADAM),
}
"""{name of an optimizer's class: its momentum}. A subclass is taken for its base."""


class QuasiHyperbolic:
    """Makes the momentum of these parameters quasi-hyperbolic, whichever optimizer steps them.

    If two objects have the same parameter, the one that was made last has it.

    Args:
        parameters, residues: what the user's optimizer steps, and the method's, by the same names.
        collectives: the ranks between which gradients are compressed.
        by_hook: whether gradients come through a hook, which the script may forget to register.
        calls_step_twice: whether PyTorch calls hooks of every step twice, one inside the other:
            stock Horovod's step() averages gradients, and calls that of the class it was made from.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        residues: Residues,
        collectives: Collectives,
        by_hook: bool = False,
        calls_step_twice: bool = False,
    ) -> None:
        self._residues, self._collectives = residues, collectives
        self._names = {parameter: name for name, parameter in parameters.items()}
        for other in alive(_everyone):
            for parameter in parameters.values():
                other._names.pop(parameter, None)
        self._by_hook, self._unused = by_hook, 0
        self._calls_step_twice = calls_step_twice
        self._unknown: set[str] = set()
        _everyone[id(self)] = self

    def mixes_of(self, optimizer: torch.optim.Optimizer, is_outer: bool) -> list[_Mix]:
        """How momenta are mixed in the step that begins; `is_outer`: see _is_outer."""
        residues = self._residues
        if self._is_idle() or (self._calls_step_twice and is_outer):
            return []
        if not residues.step:
            self._note_step_without_exchange(optimizer)
        if residues.step < 2:  # what the first step sends is not late
            return []
        momentum, mixes = _momentum_of(optimizer), []
        for group in optimizer.param_groups:
            by_rate: dict[float, list[_Pair]] = {}
            for parameter in group["params"]:
                name, grad = self._names.get(parameter), parameter.grad
                if name is None or grad is None or grad.is_sparse:
                    continue
                state = optimizer.state.get(parameter)
                if (
                    name in residues.last_rates
                    and momentum is not None
                    and (momentum.is_mixed or residues.config.nu)
                    and state
                    and _fits(state.get(momentum.key), parameter)
                ):
                    by_rate.setdefault(residues.last_rates.pop(name), []).append(_Pair(grad, state))
            for rate, pairs in by_rate.items():
                kappa = kappa_of(rate, residues.config.nu)
                mixes.append(_Mix(pairs, group, momentum, kappa, residues.step, residues))
        return mixes

    def _note_step_without_exchange(self, optimizer: torch.optim.Optimizer) -> None:
        everything = (p for group in optimizer.param_groups for p in group["params"])
        has_gradients = any(p in self._names and p.grad is not None for p in everything)
        self._unused += has_gradients and self._by_hook and not self._residues.skipped_steps
        if self._by_hook and self._unused == UNUSED:
            self._by_hook = False  # said once
            log.warning(NOTHING_EXCHANGED, UNUSED)

    def forget(self) -> None:
        """The step that gradients were averaged for has failed."""
        _averaging.clear()

    def _is_idle(self) -> bool:
        return self._residues.config.nu == 1 or self._collectives.size < 2

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over, and with it those inside it: what none has mixed is mixed no more.

        The run may be over, and another optimizer go on.
        """
        if not self._residues.last_rates:  # all were mixed
            return
        unknown = type(optimizer).__name__ if _momentum_of(optimizer) is None else None
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if self._residues.last_rates.pop(self._names.get(parameter), None) and unknown:
                has_one = {"exp_avg", "momentum_buffer"} & optimizer.state.get(parameter, {}).keys()
                if has_one and not self._is_idle() and unknown not in self._unknown:
                    self._unknown.add(unknown)
                    log.warning(UNKNOWN, unknown)


def _momentum_of(optimizer: torch.optim.Optimizer) -> Momentum | None:
    if optimizer.defaults.get("max_grad_norm"):
        return None  # LAMB and Adan clip gradients in their step, where nobody sees it
    names = (kind.__name__ for kind in type(optimizer).__mro__)
    return next((MOMENTA[name] for name in names if name in MOMENTA), None)


class _Pair(NamedTuple):
    """A parameter's gradient, and what the optimizer keeps for the parameter."""

    gradient: torch.Tensor
    state: Kept


class _Mix(NamedTuple):
    """Momenta of one of an optimizer's groups, in one step, that are mixed alike."""

    pairs: list[_Pair]
    group: Kept
    momentum: Momentum
    kappa: float
    step: int
    residues: Residues
    versions: Sequence[tuple[int, ...]] = ()  # once they are mixed; see _versions_of

    def kept(self, changes: bool) -> _Mix:
        """The same mix, with copies of the gradients if they may change before the step's end.

        changes: whether the script put hooks on the optimizer, which come before ours.
        """
        # With foreach, the default on GPUs, Nesterov's SGD adds its momentum to p.grad.
        if not (changes or self.group.get("nesterov")):
            return self
        return self._replace(pairs=[_Pair(g.detach().clone(), state) for g, state in self.pairs])


@torch.no_grad()
def _mix(mixes: list[_Mix], back: bool) -> None:
    """Mix kappa of the gradients into momenta, or take it out again."""
    by_share: dict[tuple[float, float], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pairs, group, momentum, kappa, step, *_ in mixes:
        # (b - kappa * g) / (1 - kappa) is the same mix with this share.
        share = -kappa / (1 - kappa) if back else kappa
        sign = -1 if group.get("maximize") else 1  # with which the optimizer takes gradients
        size: Size | None = None
        for grad, state in pairs:
            buffer, gradient = _own(state[momentum.key]), _own(grad)
            if gradient.dtype != buffer.dtype:
                gradient = gradient.to(buffer.dtype)
            if size is None or "step" in state:  # some count the steps of each parameter
                size = sign * momentum.size(group, state, step if back else step - 1)
            if isinstance(size, torch.Tensor):
                buffer.lerp_(gradient * size, share)
            elif size and size != 1 and _is_large(buffer, gradient):
                # The product with a single 1 takes one pass over the memory, and foreach two.
                keep, one = 1 - share, buffer.new_ones(1)
                buffer.view(-1, 1).addr_(gradient.view(-1), one, beta=keep, alpha=share * size)
            elif size:
                by_share.setdefault((share, size), []).append((buffer, gradient))
    for (share, size), both in by_share.items():
        buffers, gradients = map(list, zip(*both, strict=True))
        if size == 1:
            torch._foreach_lerp_(buffers, gradients, share)
        else:
            torch._foreach_mul_(buffers, 1 - share)
            torch._foreach_add_(buffers, gradients, alpha=share * size)


def _is_large(buffer: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the CPU's memory is what a mix waits for, and two vectors can be made of both."""
    is_plain = buffer.is_contiguous() and gradient.is_contiguous()
    return buffer.device.type == "cpu" and is_plain and buffer.numel() >= LARGE


def _fits(buffer: object, parameter: torch.Tensor) -> bool:
    """Whether this is an ordinary momentum. Some optimizers keep theirs in few bits."""
    if not isinstance(buffer, torch.Tensor):
        return False
    own = _own(buffer)
    return (
        type(own) in (torch.Tensor, torch.nn.Parameter)
        and own.is_floating_point()
        and own.shape == _own(parameter).shape
    )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """local_part(tensor), or the tensor itself, which takes a microsecond less."""
    return tensor if type(tensor) is torch.Tensor else local_part(tensor)


_everyone: weakref.WeakValueDictionary[int, QuasiHyperbolic] = weakref.WeakValueDictionary()
# The mixes of optimizers whose steps have begun. Horovod's optimizer calls, in its step, the step
# of the class that it is made from, and PyTorch calls the hooks of both.
_begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Mix]] = weakref.WeakKeyDictionary()
# Hooks that are on an optimizer for one step.
_last: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
# Optimizers that average gradients in their step. What serves them may be made meanwhile.
_averaging: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _is_outer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Horovod's optimizer will average gradients, and call the step of its base, now."""
    will_average = getattr(optimizer, "_should_synchronize", False)
    if will_average and optimizer not in _averaging:
        _averaging.add(optimizer)
        return True
    _averaging.discard(optimizer)
    return False


def _begin(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Gradients are here: mix them into the momenta, unless they are mixed already."""
    if optimizer in _begun:
        return
    is_outer = _is_outer(optimizer)
    mixes = [mix for each in alive(_everyone) for mix in each.mixes_of(optimizer, is_outer)]
    if mixes and _takes_step(optimizer):
        changes = bool(getattr(optimizer, "_optimizer_step_post_hooks", False))
        mixes = [mix.kept(changes) for mix in mixes]
        _mix(mixes, back=False)
        _begun[optimizer] = [mix._replace(versions=_versions_of(mix)) for mix in mixes]


def _versions_of(mix: _Mix) -> list[tuple[int, ...]]:
    """The version of each gradient, and of each momentum. Changes in place raise it."""
    pairs = [(gradient, state[mix.momentum.key]) for gradient, state in mix.pairs]
    return [tuple(-1 if t.is_inference() else t._version for t in pair) for pair in pairs]


def _take_back(mixes: list[_Mix]) -> None:
    """A step has failed. Momenta become what they were, or what the step had made of them.

    If a gradient was overwritten since, its momentum remains mixed.
    """
    for mix in mixes:
        found = zip(mix.pairs, mix.versions, _versions_of(mix), strict=True)
        left = [(pair, then[1] != now[1]) for pair, then, now in found if then[0] == now[0]]
        for has_stepped in (False, True):
            own = mix._replace(
                pairs=[pair for pair, stepped in left if stepped == has_stepped],
                step=mix.step - (not has_stepped),
            )
            _mix([own], back=True)


@torch.no_grad()
def _takes_step(optimizer: Any) -> bool:
    """Whether the step will count. Gradients are then unscaled.

    A GradScaler leaves both to an optimizer that can do them. The host waits for its answer here.
    """
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and float(found):
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for gradient in (p.grad for p in group["params"] if p.grad is not None):
                local_part(gradient).div_(scale)
        optimizer.grad_scale = None
    return True


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    mixes = _begun.get(optimizer, ())
    if any(mix.residues.step != mix.step for mix in mixes):  # there are new averages
        _take_back(_begun.pop(optimizer))
    if optimizer in _begun:
        return None
    first, *rest = args  # the optimizer
    closure = {"closure": rest[0] if rest else None, **kwargs}["closure"]
    if not callable(closure):
        _release(optimizer)
        if getattr(optimizer, "_optimizer_step_pre_hooks", False):
            # The optimizer's own hooks come after this one, and may clip gradients.
            _last[optimizer] = optimizer.register_step_pre_hook(not_compiled(_begin))
        else:
            _begin(optimizer)
        return None

    @functools.wraps(closure)
    def closed(*own: Any, **named: Any) -> Any:
        """Compute gradients; optimizers call this before they use any."""
        result = closure(*own, **named)
        _begin(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closed}
    return (first, closed, *rest[1:]), kwargs


def _release(optimizer: torch.optim.Optimizer) -> None:
    if (own := _last.pop(optimizer, None)) is not None:
        own.remove()


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _release(optimizer)
    _averaging.discard(optimizer)
    mixes = _begun.pop(optimizer, None)
    if mixes:
        _mix(mixes, back=True)
    for each in alive(_everyone):
        each.end_step(optimizer)


every_optimizer.register_optimizer_step_pre_hook(not_compiled(_before_step))
every_optimizer.register_optimizer_step_post_hook(not_compiled(_after_step))
