"""Computes step-ahead gradients: at the parameters as they would be with the residue applied.

Error feedback computes a gradient at x, and applies it, in part, many steps later. Here, rank i
computes it at x - lr * a * D(m_i) instead. m_i is what waits in its residue, and D is what the
optimizer makes of a gradient (Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed
Training with Compressed Gradient", AAAI 2021, arXiv 2008.05823). This sends nothing. If a rank's
values do not agree with the others' (alignment.py), momentum, which all ranks share, replaces m_i.
That part is ours, found by trying (docs/results.md).

From a training forward to the end of the exchange, a rank's parameters are its own, *ahead*. Hooks
on the model move them. A forward without gradients or in evaluation, state_dict() and the
optimizer's step get the *common* parameters, to the bit. If the model is sharded, each rank moves
its own shards. Imports gradients, loss_scale, moves_ahead and residue.
"""

from __future__ import annotations

import enum
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ParamSpec

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from scalecom_hvd.exchange.gradients import four_elements, local_part
from scalecom_hvd.exchange.loss_scale import LossScale
from scalecom_hvd.exchange.moves_ahead import make, move_by
from scalecom_hvd.exchange.residue import Residues

log = logging.getLogger("scalecom_hvd")

# After this many steps in a row without gradients computed ahead, a warning is logged.
MISSED = 3
# After this many steps of the optimizer without any exchange, a warning is logged.
UNUSED = 20
NOTHING_EXCHANGED = (
    "the optimizer has taken %d steps, and ScaleCom has exchanged nothing. If "
    "DistributedDataParallel wraps the model, call model.register_comm_hook(state, scalecom_hook)"
)
NEVER_AHEAD = (
    "step %d: gradients are not computed a step ahead, so training loses accuracy. Before these "
    "gradients, no watched module was called in training mode, or no torch.optim.Optimizer stepped "
    "its parameters. Call the model as model(x), or name the modules that the script calls: "
    "compression.compute_ahead(module). Or give step_ahead=0"
)
RETIRED = (
    "step %d: gradients are no longer computed a step ahead, because another ScaleCom moves the "
    "same model's parameters. Give each parameter to one optimizer, or give one of them "
    "step_ahead=0"
)
NO_LOSS_SCALE = (
    "a GradScaler steps this model's optimizer, but ScaleCom does not know the loss scale, so "
    "step-ahead gradients would be computed at wrong parameters. Give the method, or "
    "ScaleComState, loss_scale=scaler"
)
SCRIPTED = (
    "a model that torch.jit made calls no hooks, so its gradients cannot be computed a step ahead. "
    "Give the method, or ScaleComState, step_ahead=0"
)
NOT_IN_A_GRAPH = (
    "ScaleCom moves parameters a step ahead here, outside of graphs. With fullgraph=True, write "
    "model = torch.compile(model, fullgraph=True), not model.compile(fullgraph=True), or give the "
    "method, or ScaleComState, step_ahead=0"
)
WRITTEN_TO = (
    "{} was written to between a training forward and optimizer.step(), while step-ahead gradients "
    "had moved it ahead. Change parameters after optimizer.step(), or give step_ahead=0"
)


class Where(enum.Enum):
    """Which parameters the model has now, and which ones its spare copy has."""

    COMMON = "the common ones"
    AHEAD = "this rank's, ahead; the spare copy has the common ones"
    ASIDE = "the common ones, for a moment; the spare copy has those ahead"


class StepAhead:
    """The parameters of one rank, moved ahead while it computes gradients.

    Args:
        factor: how much of the way the parameters are moved.
        scale: the script's loss scale, if the method was given it.

    Attributes:
        where: which parameters the model has now.
    """

    def __init__(self, factor: float, scale: LossScale) -> None:
        self.factor = factor
        self._scale = scale
        self._models: weakref.WeakKeyDictionary[nn.Module, _Hook] = weakref.WeakKeyDictionary()
        # Whether it finds models by itself.
        self._looks = False
        self.where = Where.COMMON
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._residues: Residues | None = None
        self._of_node: Mapping[str, torch.Tensor] = {}
        self._ranks = 1.0
        self._by_hook = False
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # The optimizer whose step began last, and the parameters' versions at that time.
        self._stepping: tuple[torch.optim.Optimizer | None, list[int]] = None, []
        self._unused = 0
        # {name: the common values while the parameter is ahead, or the reverse}. Made once, as
        # large as what is compressed. After the optimizer's step it has the values from before.
        self._spare: dict[str, torch.Tensor] = {}
        # {name: the parameter's version when it had been moved}.
        self._moved: dict[str, int] = {}
        # {name: four of the parameter's elements after its model's last training forward}. PyTorch
        # hides changes of `.data` from versions. On a device these changes are not noticed, because
        # the host would have to wait.
        self._elements: dict[str, bytes] = {}
        self._was_ahead = False
        self._missed = 0
        self._is_retired = False
        # The parameter whose elements, but not its version, say that somebody wrote to it.
        self._written_to: str | None = None
        # How many training forwards of the models are running, one inside the other.
        self.forwards = 0
        _everyone.add(self)

    def look_for_models(self) -> None:
        """From `serve` on, watch the modules that have the parameters."""
        self._looks = True

    def watch(self, model: nn.Module) -> None:
        """Put hooks on a model, so that its training forwards move parameters ahead.

        Raises:
            TypeError: it is a ScriptModule.
        """
        if model in self._models:
            return
        if _is_scripted(model):
            raise TypeError(SCRIPTED)
        hook = self._models[model] = _Hook(self, model)
        hook.handles += [
            # This hook comes before all others, because FSDP2's hook gathers the model's shards.
            model.register_forward_pre_hook(hook.before_forward, prepend=True),
            model.register_forward_hook(hook.after_forward, always_call=True),
        ]
        for module in model.modules():  # scripts save what is inside a wrapped model
            if not _is_scripted(module):
                hook.handles += [
                    module.register_state_dict_pre_hook(hook.before_looking),
                    module.register_load_state_dict_pre_hook(hook.before_loading),
                ]

    def serve(
        self,
        parameters: Mapping[str, torch.Tensor],
        residues: Residues,
        ranks: float,
        of_node: Mapping[str, torch.Tensor] | None = None,
        by_hook: bool = False,
    ) -> None:
        """Serve these parameters, with this rank's residues of them.

        Args:
            parameters: {name: parameter}.
            residues: residues by the same names.
            ranks: by how much what is applied is larger than the average over ranks: 1 for
                averages, their number for sums.
            of_node: {name: (N,)}: what waits in a node, if this rank's residues are a part of it.
            by_hook: whether gradients come through a hook, which the script may forget to register.
        """
        self._parameters, self._residues, self._ranks = parameters, residues, ranks
        self._of_node = of_node or {}
        self._by_hook = by_hook
        for hook in self._models.values():
            hook.names = None
        # A script that makes its optimizer anew may keep the old method, and its hooks are on the
        # same model.
        own = self._moves()
        for other in list(_everyone):
            if other is not self and not own.isdisjoint(other._moves()):
                other.retire()
        if self._looks:
            # A model, what wraps it, and what it wraps: whatever the script calls, trains or saves.
            served = self._served
            found = _modules_with(served)
            whole = [module for module, has in found.items() if has == served]
            eager = [module for module in whole if not _is_scripted(module)]
            for module in eager or whole or _outermost(found):
                self.watch(module)

    def retire(self) -> None:
        """Restore common parameters, and move none again."""
        try:
            self.restore()
        finally:
            for hook in self._models.values():
                hook.remove()
            self._parameters, self._residues, self._of_node = {}, None, {}
            self._optimizers, self._spare, self._stepping = [], {}, (None, [])
            self._is_retired = True

    def _moves(self) -> set[torch.Tensor]:
        """The parameters that a model's forward moves, or will move once the model is found.

        Simulated workers have the same parameters, but no model.
        """
        served = set(self._parameters.values())
        watched = {p for model in self._models for p in _parameters_of(model)}
        return served if self._looks else served & watched

    def names_in(self, model: nn.Module) -> list[str]:
        """The names of what is compressed in a model."""
        own = _parameters_of(model)
        return [name for name in self._compressed if self._parameters[name] in own]

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer if it has some of the parameters. The last such optimizer counts."""
        if self._optimizers and self._optimizers[-1]() is optimizer:
            return
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if not own.isdisjoint(self._parameters.values()):
            others = [known for known in self._optimizers if known() is not optimizer]
            self._optimizers = [*others, weakref.ref(optimizer)]

    # The moves.

    @torch.no_grad()
    def move(self) -> None:
        """Move parameters ahead, unless they are ahead, or nothing has been exchanged yet."""
        if self.where is Where.ASIDE:
            self._exchange_with_spare()
            self.where = Where.AHEAD
        if self.where is Where.AHEAD:
            return
        if self._residues is None or not self._residues.step:
            return
        names, moves = [], []
        for name, parameter, group, state, optimizer in self._stepped():
            own = local_part(parameter)
            if name not in self._spare:
                self._spare[name] = own.clone()
            of_node = self._of_node.get(name)
            waits = self._residues.tensors[name].residue if of_node is None else of_node
            tensors = own, self._spare[name], waits
            moves.append(move_by(optimizer, *tensors, group, state, self.factor, self._ranks))
            names.append(name)
        if not names:  # no parameter is trained now, or none has been stepped
            return
        make(moves, self._residues.alignment.weight, self._residues.config.beta)
        self._moved = {name: self._parameters[name]._version for name in names}
        self.where, self._was_ahead = Where.AHEAD, True
        torch.clear_autocast_cache()  # it has copies of what was moved

    def forward_begins(self, names: list[str]) -> None:
        """A training forward begins, of a model that may write to these through `.data`."""
        self._note_writes(names)
        for name in names:
            self._elements.pop(name, None)
        self._scale.forward_begins()
        self.move()
        self.forwards += 1

    def forward_ended(self, names: list[str]) -> None:
        """A training forward of a model with these parameters has ended."""
        self.forwards = max(0, self.forwards - 1)
        if not self.forwards and self.where is Where.AHEAD:
            own = [name for name in names if name in self._moved]
            self._elements |= {name: self._four_elements(name) for name in own}

    def has_no_batch(self) -> None:
        """Note that this rank computes no gradient in this step, so that none can be ahead."""
        self._was_ahead = True

    def note_step(self, step: int) -> None:
        """Note that this step counts. Log a warning, once, if several in a row were not ahead."""
        if self._is_retired:
            log.warning(RETIRED, step)
            self._is_retired = False  # said once
        _graphs.end_era()
        missed = step > 0 and self._compressed and not self._was_ahead
        self._missed, self._was_ahead = self._missed + 1 if missed else 0, False
        if self._missed == MISSED:
            log.warning(NEVER_AHEAD, step)
        elif missed and self._looks:  # the script may call a model's parts instead
            others = _modules_with(self._served).keys() - self._models.keys()
            for part in _outermost([module for module in others if not _is_scripted(module)]):
                self.watch(part)

    @torch.no_grad()
    def restore(self) -> None:
        """Make the parameters the common ones, to the bit, until the next training forward.

        Raises:
            RuntimeError: something wrote to them meanwhile, as their versions say. If only their
                elements say so, perhaps on some ranks only, the optimizer's step raises it: the
                other ranks wait for this one until then.
        """
        self._note_writes(self._elements)
        moved, self._moved, self._elements = self._moved, {}, {}
        where, self.where, self.forwards = self.where, Where.COMMON, 0
        now = {name: self._parameters[name]._version for name in moved}
        if where is not Where.COMMON and moved:
            own = [local_part(self._parameters[name]) for name in moved]
            spare = [self._spare[name] for name in moved]
            if where is Where.AHEAD:
                torch._foreach_copy_(own, spare)
                torch.clear_autocast_cache()
            else:
                torch._foreach_copy_(spare, own)
        for name, version in moved.items():
            if now[name] != version:
                self._written_to = None
                raise RuntimeError(WRITTEN_TO.format(name))

    def forget_step(self) -> None:
        """Forget the optimizer's last step: parameters are loaded, and are no result of it."""
        self._spare.clear()

    @torch.no_grad()
    def step_aside(self) -> None:
        """Make the parameters the common ones for a moment. `move` brings the others back."""
        if self.where is Where.AHEAD:
            self._exchange_with_spare()
            self.where = Where.ASIDE

    def step_begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step. If it has some of the parameters, restore the common ones.

        Returns whether it has.
        """
        self.know(optimizer)
        is_known = any(known() is optimizer for known in self._optimizers)
        if is_known:
            for hook in self._models.values():  # errors may have ended their forwards
                hook.end_all()
            self.restore()
            written_to, self._written_to = self._written_to, None
            if written_to is not None:
                raise RuntimeError(WRITTEN_TO.format(written_to))
            if self._compressed and not self._scale.is_given and _is_called_by_a_scaler():
                raise RuntimeError(NO_LOSS_SCALE)
            self._stepping = optimizer, self._versions()
        return is_known

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer's step was like, if it changed parameters.

        If one optimizer wraps another, only the inner one counts.
        """
        stepping, before = self._stepping
        if stepping is not optimizer:
            return
        self._stepping = None, []
        if before == self._versions():
            return
        residues = self._residues
        if self._by_hook and residues is not None and not residues.step + residues.skipped_steps:
            self._unused += 1
            if self._unused == UNUSED:
                log.warning(NOTHING_EXCHANGED, UNUSED)

    @property
    def _served(self) -> set[torch.Tensor]:
        return {self._parameters[name] for name in self._compressed}

    @property
    def _compressed(self) -> Collection[str]:
        """The names of what is compressed, so that it can be moved."""
        return self._of_node or (self._residues.tensors if self._residues else ())

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters.values()]

    def _note_writes(self, names: Iterable[str]) -> None:
        """Note one of these parameters if it was written to since its model's last forward."""
        if self.where is Where.AHEAD:
            known = ((name, self._elements[name]) for name in names if name in self._elements)
            written_to = (name for name, was in known if was != self._four_elements(name))
            self._written_to = self._written_to or next(written_to, None)

    def _four_elements(self, name: str) -> bytes:
        return four_elements(local_part(self._parameters[name]))

    def _exchange_with_spare(self) -> None:
        torch.clear_autocast_cache()
        for name in self._moved:
            data = local_part(self._parameters[name])
            now = data.clone()
            data.copy_(self._spare[name])
            self._spare[name].copy_(now)

    def _stepped(
        self,
    ) -> Iterator[
        tuple[str, torch.Tensor, dict[str, Any], Mapping[str, Any], torch.optim.Optimizer]
    ]:
        """For each parameter that is compressed and stepped: name, parameter, and by what.

        That is the group, the state and the optimizer.
        """
        self._optimizers = [known for known in self._optimizers if known() is not None]
        if not self._optimizers:  # a resumed run: no step was seen in this process
            for found in gc.get_objects():
                if issubclass(type(found), torch.optim.Optimizer) and "param_groups" in vars(found):
                    self.know(found)
        known: dict[torch.Tensor, tuple[Any, ...]] = {}
        for optimizer in [known() for known in self._optimizers]:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    state = optimizer.state.get(p, {})
                    # If one optimizer wraps another, the one that steps has the state, unless it is
                    # SGD without momentum.
                    is_sgd = isinstance(optimizer, torch.optim.SGD)
                    counts = state or p not in known or (is_sgd and not known[p][1])
                    if p.requires_grad and counts:
                        known[p] = group, state, optimizer
        for name in self._compressed:
            parameter = self._parameters[name]
            if parameter in known:
                yield name, parameter, *known[parameter]


class _Hook:
    """The hooks of a model. If the model is copied or loaded, the new one's hooks do nothing.

    Args:
        ahead: what the hooks call. They do not keep it alive, nor the model.
        model: what has the hooks.

    Attributes:
        handles: what removes the hooks.
        is_compiled: whether torch.compile made the model.
    """

    def __init__(self, ahead: StepAhead | None, model: nn.Module | None) -> None:
        self.handles: list[RemovableHandle] = []
        self._ahead: Callable[[], StepAhead | None] = (
            weakref.ref(ahead, self.remove) if ahead else _nobody
        )
        self._model: Callable[[], nn.Module | None] = (
            weakref.ref(model) if model is not None else _nobody
        )
        # What each forward that is running did: whether it trains, and whether it stepped aside.
        self._running: list[tuple[bool, bool]] = []
        # The names of what is compressed in the model. None: not asked for yet.
        self.names: list[str] | None = None
        self.is_compiled = model is not None and _is_compiled(model)
        self._leading = 0  # how many forwards of this compiled model are running

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        if not _is_left_out(self):
            self._before_forward(module)

    def after_forward(self, module: nn.Module, *_: Any) -> None:
        if not _is_left_out(self):
            self._after_forward(module)

    def finds_compiled(self) -> bool:
        """Watch compiled models that are new. Whether one of them has this model inside.

        PyTorch calls this while it compiles one of them. Its graph keeps the answer.
        """
        model = self._model()
        if self._ahead() is None or model is None:
            return True
        for compiled in filter(_is_compiled, _modules()):
            inside = _inside(compiled)
            for ahead in list(_everyone):
                if compiled not in ahead._models and not inside.isdisjoint(ahead._models):
                    ahead.watch(compiled)
                    _graphs.new.add(compiled)
        return any(model in _inside(compiled) for compiled in _graphs.new)

    def end_all(self) -> None:
        """Note that no forward of this model is running."""
        self._lead(-self._leading)

    def _lead(self, change: int) -> None:
        """Note that a forward of this compiled model begins (1), or has ended (-1)."""
        if self.is_compiled:
            self._leading += change
            _graphs.leading += change
            _graphs.are_led = _graphs.leading > 0

    def _before_forward(self, module: nn.Module) -> None:
        self._lead(1)
        ahead = self._ahead()
        if ahead is None:
            return
        trains, was = module.training and torch.is_grad_enabled(), ahead.where
        # Inside another training forward, as a frozen part of its model, nothing steps aside: its
        # parameters are needed ahead in backward.
        steps_aside = not trains and not ahead.forwards and was is Where.AHEAD
        self._running.append((trains, steps_aside))
        if trains:
            if self.names is None:
                self.names = ahead.names_in(module)
            _not_compiled(StepAhead.forward_begins)(ahead, self.names)
        elif steps_aside:
            _not_compiled(StepAhead.step_aside)(ahead)
        if was is not ahead.where:
            _not_compiled(_reshard)(module)

    def _after_forward(self, module: nn.Module) -> None:
        """Move parameters that stepped aside ahead again: a backward may still be due."""
        if self._leading:
            self._lead(-1)
        ahead = self._ahead()
        if ahead is None or not self._running:
            return
        trained, stepped_aside = self._running.pop()
        if trained:
            _not_compiled(StepAhead.forward_ended)(ahead, self.names or [])
        if stepped_aside and ahead.where is Where.ASIDE:
            _not_compiled(StepAhead.move)(ahead)
            _not_compiled(_reshard)(module)

    def remove(self, *_: Any) -> None:
        """Remove the hooks from the model."""
        self.end_all()
        for handle in self.handles:
            handle.remove()

    def before_looking(self, *_: Any) -> None:
        ahead = self._ahead()
        if ahead is not None:
            ahead.restore()

    def before_loading(self, *_: Any) -> None:
        self.before_looking()
        ahead = self._ahead()
        if ahead is not None:
            ahead.forget_step()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, None)


class _Graphs:
    """What graphs of torch.compile depend on. PyTorch compiles anew if it changes.

    PyTorch does not notice whether a model's hooks change.

    Attributes:
        are_led: whether the forward of a compiled model is running, so that its own hooks, outside
            of the graph, do the work of those inside. leading: how many such forwards are running.
        new: compiled models whose first forward had begun before they were watched, so that no
            hook does the work. era: their first graphs are used until this changes. (A number
            would not be constant to PyTorch.)
    """

    def __init__(self) -> None:
        self.are_led, self.leading = False, 0
        self.new: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.era = "0"

    def end_era(self) -> None:
        """Give up the first graphs of new models."""
        if self.new:
            self.new.clear()
            self.era = str(int(self.era) + 1)


_graphs = _Graphs()


def _is_left_out(hook: _Hook) -> bool:
    """Whether a graph that is being compiled has nothing of this hook. PyTorch compiles this too.

    So graphs are not broken, and models may be compiled with fullgraph=True. A compiled model's own
    hooks are in a graph only if a compiled function calls it. They then break this graph.
    """
    if not torch.compiler.is_dynamo_compiling():
        return torch.compiler.is_compiling()  # torch.export traces with tensors without numbers
    if hook.is_compiled:
        return False
    return _graphs.are_led or (_graphs.era != "" and hook.finds_compiled())


def _inside(module: nn.Module) -> set[nn.Module]:
    return {part for part in nn.Module.modules(module) if part is not module}


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile returned this module."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 gather parameters anew.

    It keeps those of the outermost module until backward, even if no backward follows.
    """
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if hasattr(module, "unshard") and reshard is not None:
            reshard()


_Given = ParamSpec("_Given")


def _not_compiled(function: Callable[_Given, None]) -> Callable[_Given, None]:
    """The same function, which torch.compile leaves as it is, even in a model that it compiles."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


def _nobody() -> None:
    return None


def _parameters_of(model: nn.Module) -> set[torch.Tensor]:
    return set(nn.Module.parameters(model))  # a model's own method may be another


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _modules() -> list[nn.Module]:
    """All modules that are alive."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    return [module for module in modules if "_modules" in vars(module)]  # not half-made


def _modules_with(parameters: set[torch.Tensor]) -> dict[nn.Module, set[torch.Tensor]]:
    """All modules that have some of these parameters, and which they have."""
    found = {module: parameters & _parameters_of(module) for module in _modules()}
    return {module: has for module, has in found.items() if has}


def _outermost(modules: Collection[nn.Module]) -> list[nn.Module]:
    """Those that are not part of another one."""
    parts = {part for module in modules for part in nn.Module.modules(module) if part is not module}
    return [module for module in modules if module not in parts]


def _is_called_by_a_scaler() -> bool:
    """Whether the optimizer's step that begins was called by an enabled GradScaler."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(20):  # schedulers and wrappers lie between
        if frame is None:
            return False
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, torch.amp.GradScaler):
            return caller.is_enabled()
        frame = frame.f_back
    return False


def restore_all() -> None:
    """Restore common parameters, for code that reads or writes them without their model."""
    for ahead in list(_everyone):
        ahead.restore()


_everyone: weakref.WeakSet[StepAhead] = weakref.WeakSet()


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Restore common parameters before an optimizer's step, and after each closure that it calls.

    Returns the step's arguments with wrapped closures. Lightning computes all gradients in such
    closures.
    """
    concerned = [ahead for ahead in list(_everyone) if ahead.step_begins(optimizer)]

    def returning(closure: Any) -> Any:
        @functools.wraps(closure)
        def closed(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            for ahead in concerned:
                ahead.restore()
            return result

        return closed if concerned and callable(closure) else closure

    first, *rest = args  # the optimizer
    return (first, *map(returning, rest)), {
        name: returning(value) for name, value in kwargs.items()
    }


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for ahead in list(_everyone):
        ahead.step_ended(optimizer)


# These functions look into objects that only Python can see. torch.compiler.disable sets the same
# mark, but imports all of Dynamo.
for _function in (
    *(_not_compiled, _reshard, _Hook._before_forward, _Hook._after_forward),
    *(_before_step, _after_step),
):
    vars(_function)["_torchdynamo_disable"] = True
    vars(_function)["_torchdynamo_disable_msg"] = NOT_IN_A_GRAPH
# As torch.compiler.assume_constant_result does.
vars(_Hook.finds_compiled)["_dynamo_marked_constant"] = True

register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
