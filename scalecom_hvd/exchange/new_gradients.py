"""Ranks find out together whether a synchronize() has anything to exchange.

Horovod's synchronize() reduces every parameter, even if no gradient came since the last call:
optimizer.step() calls it before its closure runs, and again after the script has called it. In
Horovod this is harmless, because averaging averages changes nothing. Residues would send values a
second time, and the script, which holds the first values, would throw the second ones away.

A rank has news if backward gave it gradients since the last exchange. In every synchronize(), which
all ranks call equally often, each tells the others whether it has (optimizer_gradients.py). If none
has, ranks compare what their scripts have in p.grad (`came_by_hand`).
"""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from scalecom_hvd.agreement import FIRST_MEETING, Names, compare_ranks
from scalecom_hvd.exchange.collectives import Collectives, Work, gather_objects
from scalecom_hvd.exchange.face import Told
from scalecom_hvd.exchange.gradients import (
    any_of,
    as_bytes,
    empty_sparse_gradient,
    flat_tensor,
    four_elements,
    wide_dtype,
)
from scalecom_hvd.exchange.unused_averages import end_step_by_error

log = logging.getLogger("scalecom_hvd")

SparseAverage = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Begins a sparse gradient's average, and returns a function that waits for the average."""

Standing = dict[str, list[Any]]
"""How one rank's gradients stand: {name: [digest of p.grad, whether the script put it there]}."""


class Found(enum.Enum):
    """What ranks without news have in p.grad."""

    THE_SAME = "the same on all ranks"
    SET_BY_HAND = "tensors that the script put there: gradients to be exchanged"
    CHANGED = (
        "what the last exchange left there, and the script changed since, otherwise on every rank"
    )


class Mark:
    """What a gradient was when its exchange began. It shows whether a script changed it since.

    A change in place raises the gradient's version. But PyTorch hides some changes (those of
    `.data`, and a GradScaler's unscaling), and versions say nothing if gradients share a storage.
    So four elements are compared too: `sample`, if the host would have to wait for their device.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._grad = TensorWeakRef(parameter.grad)
        self._now = _state_of(parameter.grad)
        self.sample = sample_of(parameter.grad)

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient is still what it was."""
        grad = parameter.grad
        same = grad is not None and grad is self._grad()
        return same and _state_of(grad) == self._now


def sample_of(grad: torch.Tensor) -> torch.Tensor | None:
    """Four elements of a dense gradient on a device, as integers (NaN equals NaN); else None."""
    if grad.is_cpu or grad.is_sparse or not grad.numel():
        return None
    flat = grad.detach().reshape(-1)
    return flat[:: max(flat.numel() // 4, 1)].view(_INTEGERS[grad.element_size()]).clone()


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _state_of(grad: torch.Tensor) -> tuple[int, bytes]:
    version = -1 if grad.is_inference() else grad._version
    if grad.is_sparse:
        return version, b""
    # Views of one storage share a version: accumulating into one raises the version of all.
    if grad.untyped_storage().nbytes() > grad.numel() * grad.element_size():
        version = -1
    return version, four_elements(grad)  # on a device, see sample_of


CHANGED = (
    "gradients were changed on some rank between backward() and step(), while they were being "
    "averaged, so the change would be lost. Call optimizer.synchronize() after backward(), then "
    "change gradients (clip_grad_norm_, scaler.unscale_(optimizer), ...), and call step() inside "
    "`with optimizer.skip_synchronize():`. If DistributedDataParallel wraps the model, it averages "
    "gradients itself: leave the wrapper out, or keep it and use its hook with a plain optimizer "
    "(model.register_comm_hook(ScaleComState(model), scalecom_hook))"
)


class NewGradients:
    """What ranks find out about one optimizer's gradients, besides their averages."""

    def __init__(
        self, collectives: Collectives, names: Names, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._collectives, self._names, self._parameters = collectives, names, parameters
        self._warned = False
        self._left: dict[str, TensorWeakRef] = {}
        self._marks: dict[str, Mark] = {}
        # Replaced gradients. They are kept, because a device's stream may still read them.
        self._replaced: list[torch.Tensor] = []

    def mark(self, name: str) -> None:
        """Remember this parameter's gradient, which is about to be averaged; see Mark."""
        self._marks[name] = Mark(self._parameters[name])

    def changed(self) -> list[str]:
        """The names of gradients that have changed since they were marked. Waits for devices."""
        found = [n for n, mark in self._marks.items() if not mark.fits(self._parameters[n])]
        samples: dict[object, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        for name in self._marks.keys() - set(found):
            then, now = self._marks[name].sample, sample_of(self._parameters[name].grad)
            if then is not None and now is not None:
                samples.setdefault((now.device, now.dtype), {})[name] = then, now
        for own in samples.values():
            then, now = (torch.cat(parts) for parts in zip(*own.values(), strict=True))
            if not torch.equal(then, now):
                found += [name for name, (then, now) in own.items() if not torch.equal(then, now)]
        return found

    def ask_at_first(
        self, fresh: bool, changed: bool, sparse: Mapping[str, Callable[[], torch.Tensor]]
    ) -> bool:
        """Whether any rank has news (`fresh`), before ranks have agreed on a name.

        Waits for all ranks, which are in synchronize().

        Args:
            changed: whether this rank's gradients were changed after they were sent, or are no
                longer in the loss scale's units.
            sparse: {name: a function that waits for the average} of sparse gradients that travel.

        Raises:
            RuntimeError: on all ranks, if some take local steps, or have changed gradients.
        """
        # If another rank takes local steps, this is the first meeting of its LocalSteps.
        mine = {"settings": {}, "fresh": fresh, "changed": changed, "sparse": list(sparse)}
        everyone = gather_objects(self._collectives, mine, FIRST_MEETING)
        compare_ranks(everyone, ("settings",))
        if any(other["changed"] for other in everyone):
            # Wait for what all have sent, so that nothing sent later meets it.
            for name, wait in sparse.items():
                if all(name in other["sparse"] for other in everyone):
                    wait()
            raise RuntimeError(CHANGED)
        return any(other["fresh"] for other in everyone)

    def came_by_hand(self, sparse: Collection[str], send_sparse: SparseAverage | None) -> bool:
        """Whether scripts put gradients into p.grad, if backward gave no rank any; waits for all.

        If not, p.grad becomes what Horovod would make of it. sparse: names of sparse gradients.
        """
        found = self.compare(list(self._parameters))
        if found is Found.SET_BY_HAND:
            return True
        for name, parameter in self._parameters.items():
            fill_in(parameter, name in sparse)
        if found is Found.CHANGED:
            self._average_again(sparse, send_sparse)
        elif self._collectives.share == 1:  # the sum of what is the same on all ranks
            for parameter in self._parameters.values():
                self._replaced.append(parameter.grad)
                parameter.grad = parameter.grad * self._collectives.size
        self.end()
        return False

    @torch.no_grad()
    def _average_again(self, sparse: Collection[str], send_sparse: SparseAverage | None) -> None:
        dense = {name: p for name, p in self._parameters.items() if name not in sparse}
        waits = {name: send_sparse(self._parameters[name]) for name in sparse}
        averages = self.averages_of({name: flat_tensor(p.grad) for name, p in dense.items()})
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if name in waits:
                average = waits[name]()
            else:
                average = averages[name].view(grad.shape).to(grad.dtype)
            if grad.is_sparse:
                same = average if average.is_sparse else average.to_sparse(grad.sparse_dim())
                grad.zero_().add_(same)
            else:
                # A script may have set a tensor that cannot be written to, such as an expanded one.
                self._replaced.append(grad)
                parameter.grad = average

    def averages_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each tensor's uncompressed average, in a new wide tensor. Waits for all ranks."""
        works: dict[str, Work] = {}
        for name, tensor in tensors.items():
            copy = tensor.to(wide_dtype(tensor), copy=True)
            works[name] = self._collectives.all_reduce(copy, self._names(f"again.{name}"))
        return {name: work.wait() for name, work in works.items()}

    def compare(self, names: Sequence[str]) -> Found:
        """How p.grad of these parameters stands, if no rank has news and all call this to wait."""
        standing = self.standing(names)
        found = judge(gather_objects(self._collectives, standing, "agreement.gradients"))
        if found is Found.CHANGED and not self._warned:
            log.warning(
                "gradients were changed differently on the ranks after synchronize(), so they are "
                "averaged again, uncompressed, as Horovod does. If they need no second average, "
                "call step() inside `with optimizer.skip_synchronize():`. If they are new "
                "gradients, put them into p.grad as new tensors"
            )
            self._warned = True
        return found

    def standing(self, names: Iterable[str]) -> Standing:
        """How p.grad of these parameters stands on this rank, for `judge`."""
        standing: Standing = {}
        for name in names:
            parameter = self._parameters[name]
            grad, left = parameter.grad, self._left.get(name)
            # Horovod puts tensors of zeros there too.
            by_hand = grad is not None and (left is None or grad is not left()) and any_of(grad)
            numbers = torch.zeros_like(parameter) if grad is None else grad
            standing[name] = [digest([numbers]), by_hand]
        return standing

    def begin(self) -> None:
        """The first gradient of a step came."""
        self._replaced.clear()

    def end(self) -> None:
        """Begin anew: the exchange is over, or none was needed, and p.grad holds the result."""
        self._marks.clear()
        grads = {name: parameter.grad for name, parameter in self._parameters.items()}
        self._left = {n: TensorWeakRef(grad) for n, grad in grads.items() if grad is not None}

    def give_up(self) -> None:
        """Forget the gradients of a step that was given up."""
        end_step_by_error()
        self._marks.clear()


def judge(everyone: Sequence[Standing]) -> Found:
    """What ranks without news have, given how every rank's gradients stand."""
    digests = [{name: digest for name, (digest, _) in theirs.items()} for theirs in everyone]
    if all(theirs == digests[0] for theirs in digests):
        return Found.THE_SAME
    any_by_hand = any(by_hand for theirs in everyone for _, by_hand in theirs.values())
    return Found.SET_BY_HAND if any_by_hand else Found.CHANGED


def fill_in(parameter: torch.Tensor, is_sparse: bool) -> None:
    """Make a missing gradient zero, because another rank may have one."""
    if parameter.grad is None:
        make = empty_sparse_gradient if is_sparse else torch.zeros_like
        parameter.grad = make(parameter)


def freshness(parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """A set to which backward adds names of parameters, for callers whom no hook tells."""
    fresh: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.is_leaf and parameter.is_floating_point():
            trained = parameter.requires_grad
            # A parameter that is frozen now may be thawed before the optimizer is made. torch
            # requires it to be trainable while the hook is put on.
            parameter.requires_grad_(True)
            # This hook is called before Horovod's hooks, which are on the node that accumulates.
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fresh.add(name))
            parameter.requires_grad_(trained)
    return fresh


def check_same_parameters(
    everyone: Sequence[Told], refuses: bool = True, of_shards: bool = False
) -> None:
    """Raise RuntimeError on all ranks (or warn) unless all told the same digest.

    everyone: what each rank told, or with `of_shards`, what each node's rank told.
    """
    digests = [other["parameters"] for other in everyone]
    if None not in digests and len(set(digests)) > 1:
        other = next(rank for rank, own in enumerate(digests) if own != digests[0])
        message = (
            f"ranks 0 and {other} have different parameters, and equal averages would never make "
            "them equal. Call broadcast_parameters on all ranks before the first step, after "
            "broadcast_optimizer_state, in which ranks without a state take a step. If a closure "
            "that optimizer.step() gets calls backward(), it must then call "
            "optimizer.synchronize(), or each rank steps by its own gradients"
        )
        if of_shards:
            message = (
                f"nodes 0 and {other} start from different parameters, and equal averages would "
                "never make them equal. Before the first step, call broadcast_parameters(model, "
                'process_group=mesh.get_group("replicate"))'
            )
        if refuses:
            raise RuntimeError(message)
        log.warning("%s", message)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of all numbers of tensors, which may be sparse, for ranks to compare."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        parts = [tensor]
        if tensor.is_sparse:
            tensor = tensor.coalesce()
            parts = [tensor.indices(), tensor.values()]
        for part in parts:
            found.update(as_bytes(part).numpy().data)
    return found.hexdigest()
