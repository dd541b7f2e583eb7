"""What ranks tell each other where Horovod's own optimizer asks for tensors one by one.

Hooks compress gradients there, so ranks cannot ask before a step begins, as they do with this
package's optimizers (exchange/optimizer_gradients.py). A rank that has news says so in its first
hook, and waits for nobody. A rank without news waits until all ranks have said whether they have
news. This is safe, because it happens in synchronize(), which all ranks call equally often. When
the last average has come, each rank tells the others how it stands (`signal`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from scalecom_hvd.agreement import Names
from scalecom_hvd.exchange.collectives import Collectives, Work
from scalecom_hvd.exchange.new_gradients import NewGradients
from scalecom_hvd.exchange.unused_averages import LOST, UnusedAverages, listed

log = logging.getLogger("scalecom_hvd")

# Not the name by which ranks gather objects, because another optimizer may be doing so.
_NAME = "agreement.news"
# Larger than the number of ranks.
_ANEW = 10**7


class News(NewGradients):
    """What ranks say about one optimizer's gradients. For the arguments, see NewGradients."""

    def __init__(
        self, collectives: Collectives, names: Names, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(collectives, names, parameters)
        self.unused = UnusedAverages(parameters, calls_hooks=True)
        # The other ranks, for what is said in hooks. None until ranks have agreed.
        self.channel: Collectives | None = None
        self._work: Work | None = None
        self._told = False

    def ask(self, fresh: bool) -> bool:
        """Whether any rank has news. If this rank (`fresh`) has none, this waits for all ranks."""
        if self._told:  # in a step whose first gradient could not be compressed
            return True
        self._told, work = True, self._share(int(fresh), _NAME)
        if fresh:  # perhaps in a hook, which must not wait
            self._work = work
        return fresh or bool(work.wait())

    def signal(self, changed: bool, agreed: bool) -> tuple[bool, bool]:
        """Whether some rank's gradients were changed on their way, and whether all ranks agree.

        All wait for each other here, also those that gave up their step: so the others learn of it.
        agreed: whether this rank still holds to what ranks agreed on.
        """
        work = self._share(float(changed) + (0 if agreed else _ANEW), "agreement.signal")
        total = round(float(work.wait()) / self._collectives.share)  # the sum over ranks
        return total % _ANEW > 0, total < _ANEW

    def _share(self, number: float, name: str) -> Work:
        mine = torch.tensor([number], dtype=torch.float64, device="cpu")
        return self.channel.all_reduce(mine, self._names(name))

    def end(self, has_sent: bool = False) -> None:
        """See NewGradients. has_sent: whether values left residues."""
        super().end()
        lost = self.unused.thrown_away(self._parameters)
        if lost:
            log.warning(LOST, listed(lost), "")
        self.unused.end(self._parameters if has_sent else ())
        work, self._work = self._work, None
        self._told = False
        if work is not None:
            work.wait()

    def meet(self, channel: Collectives | None) -> None:
        """Use a channel on which ranks have said nothing yet. None: they have to agree anew."""
        self.channel, self._told, self._work = channel, False, None
