"""What local steps send: fragments of the model, clipped changes, synchronisations under way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from scalecom_hvd.bucket_layout import cut, divide
from scalecom_hvd.config import ScaleComConfig, checked_number
from scalecom_hvd.exchange.bucket import Groups
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.values import norm
from scalecom_hvd.saved_state import Saved


@dataclass
class Journey:
    """A synchronisation between its departure and the step at which its averages are applied."""

    names: Sequence[str]  # of the parameters that are synchronised
    since: int  # how many steps were taken before the departure
    # {name: x_i at the departure}, if this rank takes more steps meanwhile.
    sent_from: dict[str, torch.Tensor] = field(default_factory=dict)
    # {name: averaged change}, once they were waited for. {}: the synchronisation was skipped.
    averages: dict[str, torch.Tensor] | None = None

    def state_dict(self) -> Saved:
        """What is saved of a journey, once its averages were waited for."""
        averages = dict(self.averages)
        return {"since": self.since, "averages": averages, "sent_from": dict(self.sent_from)}

    @classmethod
    def of(
        cls,
        state: Saved,
        common: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> Journey:
        """Make a journey, of tensors like the common parameters and this rank's own."""

        def copied(part: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {n: torch.empty_like(like[n]).copy_(t) for n, t in state[part].items()}

        sent_from = copied("sent_from", parameters)
        return cls(list(sent_from), int(state["since"]), sent_from, copied("averages", common))


class Clipping:
    """Scales a rank's change down to at most `times` times the median norm over all ranks.

    This guards against workers that go astray, as in SparseLoCo's deployment (Sarfi et al., 2025,
    arXiv 2508.15706). What is cut off is lost, as in gradient clipping.

    `clipped` counts this rank's changes that were. If `times` is None, all stay as they are.
    """

    def __init__(self, times: float | None) -> None:
        self.times = None if times is None else checked_number("clip_changes", times)
        if self.times is not None and not 0 < self.times < math.inf:
            raise ValueError(
                f"clip_changes must be a number above 0, not {times}. A change may be at most this "
                "many times, such as 2, as long as the median change"
            )
        self.clipped = 0

    def clip(
        self,
        changes: Sequence[torch.Tensor],
        collectives: Collectives,
        of_worker: Callable[[float, torch.device], float],
    ) -> None:
        """Clip this rank's change, in place. All ranks wait for each other here.

        A change that is not finite stays as it is. of_worker: see Worker.norm.
        """
        if self.times is None:
            return
        mine = of_worker(norm(changes), changes[0].device)
        length = torch.tensor([mine], dtype=torch.float64, device=changes[0].device)
        everyone = collectives.gather(length, "scalecom.local_steps.norms").wait().tolist()
        # A rank that changed nothing, such as one that got no tokens for an expert, does not show
        # how long changes are. For an even number of ranks, the lower of the two middle norms is
        # taken: with their mean, two ranks would never clip.
        lengths = [length for length in everyone if length > 0]
        limit = self.times * statistics.median_low(lengths) if lengths else math.inf
        if limit < mine < math.inf:
            torch._foreach_mul_(list(changes), limit / mine)
            self.clipped += 1


def cut_into_fragments(
    parameters: Mapping[str, torch.Tensor],
    groups: Groups | None,
    fragments: int,
    config: ScaleComConfig,
) -> tuple[list[list[str]], Groups | None]:
    """The names in each of the model's fragments, of about the same size.

    Also groups of names that keep every bucket inside one fragment.
    """
    if fragments == 1:
        return [list(parameters)], groups

    def bytes_of(names: Sequence[str]) -> list[int]:
        return [parameters[n].numel() * parameters[n].element_size() for n in names]

    units = [list(group) for group in groups if group] if groups else [[n] for n in parameters]
    sizes = [sum(bytes_of(unit)) for unit in units]
    own: list[list[str]] = []
    buckets: list[list[str]] = []
    for part in divide(sizes, units, fragments):
        names = [name for unit in part for name in unit]
        own.append(names)
        buckets += part if groups else cut(bytes_of(names), names, config.bucket_bytes)
    return own, buckets


def check_config(config: ScaleComConfig) -> None:
    """Raise ValueError if a setting has no meaning for changes of parameters."""
    if config.nu not in (None, 1):
        raise ValueError(
            "nu has no meaning with local steps, because each rank's optimizer has its own "
            "gradients, which are not late: leave nu= out"
        )
    if config.rate == "auto":
        raise ValueError(
            "rate='auto' measures the time of each step, but local steps exchange seldom: give "
            "a rate"
        )
