"""Whether a synchronize() has anything to exchange. Ranks find out together.

Each knows only its own gradients. Horovod's synchronize() reduces every parameter, also when no
gradient came since the last one: optimizer.step() calls it before its closure runs, and again
after the script has called it. An average of averages is what it was, so there it is harmless. An
exchange with residues is not: values leave them a second time, and the script, which has the first
ones, throws these away.

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
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.utils.weak import TensorWeakRef

from scalecom_hvd.agreement import Names
from scalecom_hvd.exchange.collectives import Collectives, Work, gather_objects
from scalecom_hvd.exchange.gradients import any_of

log = logging.getLogger("scalecom_hvd")

# Other than that of the objects: another optimizer's may be under way.
_NAME = "agreement.news"


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
        collectives: the ranks.
        names: of the optimizer's exchange.
        parameters: {name: parameter} of all that are trained.
    """

    def __init__(
        self,
        collectives: Collectives,
        names: Names,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._collectives, self._names, self._parameters = collectives, names, parameters
        self._work: Work | None = None
        self._told = self._warned = False
        self._left: dict[str, TensorWeakRef] = {}

    def tell(self) -> None:
        """This rank has news. Called in hooks: waits for nothing."""
        if not self._told:
            self._told, self._work = True, self._share(1)

    def ask(self) -> bool:
        """This rank has no news: whether another has.

        Waits for all of them; not to be called in hooks.
        """
        self._told = True
        return bool(self._share(0).wait())

    def _share(self, news: int) -> Work:
        # Of an average over ranks only this counts: whether it is zero.
        mine = torch.tensor([news], dtype=torch.float32)
        return self._collectives.average(mine, self._names(_NAME))

    def meet(self, fresh: bool) -> bool:
        """Whether any rank has news, before ranks have agreed on the name of their exchange.

        All are in synchronize(). Waits for them.
        """
        return any(gather_objects(self._collectives, fresh, "agreement.gradients"))

    def compare(self, names: Sequence[str]) -> Found:
        """No rank has news, and all are here: how p.grad of these parameters stands.

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

    def standing(self, names: Iterable[str]) -> dict[str, list]:
        """How p.grad of these parameters stands on this rank, for `judge`.

        {name: [digest, whether the script put it there]}.
        """
        standing: dict[str, list] = {}
        for name in names:
            parameter = self._parameters[name]
            grad, left = parameter.grad, self._left.get(name)
            # Horovod, too, puts tensors there, of zeros.
            by_hand = grad is not None and (left is None or grad is not left()) and any_of(grad)
            standing[name] = [
                digest([torch.zeros_like(parameter) if grad is None else grad]),
                by_hand,
            ]
        return standing

    def end(self) -> None:
        """The exchange is over, or none was needed, and p.grad holds the result."""
        if self._work is not None:
            self._work.wait()
        self.forget()
        self._left = {
            name: TensorWeakRef(p.grad)
            for name, p in self._parameters.items()
            if p.grad is not None
        }

    def forget(self) -> None:
        """The exchange was given up."""
        self._told, self._work = False, None


def judge(everyone: Sequence[dict[str, list]]) -> Found:
    """What ranks have that stand so."""
    digests = [{name: of_it for name, (of_it, _) in theirs.items()} for theirs in everyone]
    if all(theirs == digests[0] for theirs in digests):
        return Found.THE_SAME
    return (
        Found.SET_BY_HAND
        if any(by_hand for theirs in everyone for _, by_hand in theirs.values())
        else Found.CHANGED
    )


def freshness(parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """A set to which backward adds the names of parameters that it gives gradients.

    For who is not told by Horovod's hooks.
    """
    fresh: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.is_leaf and parameter.is_floating_point():
            trained = parameter.requires_grad
            # Also one that is frozen now: it may be thawed before the optimizer is made. torch
            # wants it to be trained meanwhile.
            parameter.requires_grad_(True)
            # Called before Horovod's own, which hang on the node that accumulates.
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fresh.add(name))
            parameter.requires_grad_(trained)
    return fresh


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The same for the same numbers, for ranks to compare. Reads all of them.

    Tensors may be sparse.
    """
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        parts = [tensor]
        if tensor.is_sparse:
            tensor = tensor.coalesce()
            parts = [tensor.indices(), tensor.values()]
        for part in parts:
            found.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()
