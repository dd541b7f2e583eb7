"""Ranks find out together whether a synchronize() has anything to exchange.

Each knows only its own gradients. Horovod's synchronize() reduces every parameter, also when no
gradient came since the last one: optimizer.step() calls it before its closure runs, and again
after the script has called it. There that is harmless, as the average of averages is what they
were. With residues it is not: values leave them a second time, and the script, which holds the
first ones, throws these away.

A rank has news when backward gave it gradients since the last exchange. It says so in its first
hook, and waits for nobody (`tell`). A rank without news asks (`ask`), and waits until all ranks
have said: that is safe, as it is in synchronize(), which all ranks call equally often. Where no
rank has news, all are in synchronize(), and may compare what they have (`compare`).

Imports collectives and gradients.
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
from scalecom_hvd.exchange.gradients import (
    any_of,
    as_bytes,
    empty_sparse_gradient,
    flat_gradient,
    wide_dtype,
)

log = logging.getLogger("scalecom_hvd")

# Not the name by which ranks gather objects: another optimizer's may be under way.
_NAME = "agreement.news"

SparseAverage = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Starts the average of a parameter's sparse gradient; what it gives waits for it."""

Standing = dict[str, list[Any]]
"""How one rank's gradients stand: {name: [digest of p.grad, whether the script put it there]}."""


class Found(enum.Enum):
    """What ranks without news have in p.grad."""

    THE_SAME = "the same on all ranks"
    SET_BY_HAND = "tensors that the script put there: gradients to be exchanged"
    CHANGED = (
        "what the last exchange left there, and the script changed since, otherwise on every rank"
    )


class NewGradients:
    """What ranks say to each other about one optimizer's gradients before they exchange them.

    Args:
        collectives: the other ranks.
        names: gives the full names of the optimizer's collectives.
        parameters: {name: parameter} of all that are trained.

    Attributes:
        channel: the other ranks, for what is said in hooks; set when ranks have agreed.
    """

    def __init__(
        self, collectives: Collectives, names: Names, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._collectives, self._names, self._parameters = collectives, names, parameters
        self.channel = collectives
        self._work: Work | None = None
        self._told = self._warned = False
        self._left: dict[str, TensorWeakRef] = {}

    def tell(self) -> None:
        """Say that this rank has news. Called in hooks: waits for nothing."""
        if not self._told:
            self._told, self._work = True, self._share(1)

    def ask(self) -> bool:
        """Say that this rank has no news; gives whether another has.

        Waits for all ranks, so it is not called in hooks.
        """
        self._told = True
        return bool(self._share(0).wait())

    def _share(self, news: int) -> Work:
        # Of the average over ranks only one thing counts: whether it is zero.
        mine = torch.tensor([news], dtype=torch.float32)
        return self.channel.all_reduce(mine, self._names(_NAME))

    def ask_at_first(self, fresh: bool) -> bool:
        """Whether any rank has news, before ranks have agreed on the name of their exchange.

        All are in synchronize(); waits for them.

        Args:
            fresh: whether this rank has.

        Raises:
            RuntimeError: some ranks take local steps; on all of them.
        """
        # Another rank may take local steps, whose first meeting this is then.
        everyone = gather_objects(
            self._collectives, {"settings": {}, "fresh": fresh}, FIRST_MEETING
        )
        compare_ranks(everyone, ("settings",))
        return any(other["fresh"] for other in everyone)

    def came_by_hand(self, sparse: Collection[str], send_sparse: SparseAverage | None) -> bool:
        """Whether scripts put gradients there, when backward gave no rank one.

        If they did not, p.grad becomes what Horovod would make of it. Waits for all ranks.

        Args:
            sparse: names of parameters whose gradients are sparse.
            send_sparse: averages those.
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
                parameter.grad = parameter.grad * self._collectives.size
        self.end()
        return False

    @torch.no_grad()
    def _average_again(self, sparse: Collection[str], send_sparse: SparseAverage | None) -> None:
        dense = {name: p for name, p in self._parameters.items() if name not in sparse}
        waits = {name: send_sparse(self._parameters[name]) for name in sparse}
        averages = self.averages_of({name: flat_gradient(p) for name, p in dense.items()})
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
                # A script may have set one that cannot be written to, such as an expanded one.
                parameter.grad = average

    def averages_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every tensor's average over ranks, uncompressed: new ones, in float32 or float64.

        Waits for all ranks.
        """
        works: dict[str, Work] = {}
        for name, tensor in tensors.items():
            copy = tensor.to(wide_dtype(tensor), copy=True)
            works[name] = self._collectives.all_reduce(copy, self._names(f"again.{name}"))
        return {name: work.wait() for name, work in works.items()}

    def compare(self, names: Sequence[str]) -> Found:
        """How p.grad of these parameters stands, where no rank has news and all are here.

        Waits for all ranks.
        """
        standing = self.standing(names)
        found = judge(gather_objects(self._collectives, standing, "agreement.gradients"))
        if found is Found.CHANGED and not self._warned:
            log.warning(
                "gradients were changed after synchronize(), on every rank in another way, and "
                "are averaged once more, as Horovod does: whole, not compressed. If they need not "
                "be, call step() inside `with optimizer.skip_synchronize():`; if they are new "
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
            # Horovod puts tensors there too, of zeros.
            by_hand = grad is not None and (left is None or grad is not left()) and any_of(grad)
            numbers = torch.zeros_like(parameter) if grad is None else grad
            standing[name] = [digest([numbers]), by_hand]
        return standing

    def end(self) -> None:
        """Begin anew: the exchange is over, or none was needed, and p.grad holds the result."""
        if self._work is not None:
            self._work.wait()
        self.forget()
        self._left = {
            name: TensorWeakRef(p.grad)
            for name, p in self._parameters.items()
            if p.grad is not None
        }

    def forget(self) -> None:
        """Begin anew, after an exchange that was given up."""
        self._told, self._work = False, None


def judge(everyone: Sequence[Standing]) -> Found:
    """What ranks without news have, given how every rank's gradients stand."""
    digests = [{name: digest for name, (digest, _) in theirs.items()} for theirs in everyone]
    if all(theirs == digests[0] for theirs in digests):
        return Found.THE_SAME
    any_by_hand = any(by_hand for theirs in everyone for _, by_hand in theirs.values())
    return Found.SET_BY_HAND if any_by_hand else Found.CHANGED


def fill_in(parameter: torch.Tensor, is_sparse: bool) -> None:
    """A gradient that is missing becomes zero: another rank may have it."""
    if parameter.grad is None:
        make = empty_sparse_gradient if is_sparse else torch.zeros_like
        parameter.grad = make(parameter)


def freshness(parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """A set to which backward adds the names of the parameters that it gives gradients.

    For those whom Horovod's hooks do not tell.
    """
    fresh: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.is_leaf and parameter.is_floating_point():
            trained = parameter.requires_grad
            # One that is frozen now may be thawed before the optimizer is made. torch wants it to
            # be trained while the hook is put on.
            parameter.requires_grad_(True)
            # This hook is called before Horovod's, which are on the node that accumulates.
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fresh.add(name))
            parameter.requires_grad_(trained)
    return fresh


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The same for the same numbers, for ranks to compare. Tensors may be sparse.

    Reads all of them.
    """
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        parts = [tensor]
        if tensor.is_sparse:
            tensor = tensor.coalesce()
            parts = [tensor.indices(), tensor.values()]
        for part in parts:
            found.update(as_bytes(part).numpy().data)
    return found.hexdigest()
