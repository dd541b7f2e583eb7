"""The collectives of one bucket's step, as a method sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import LAST, Collectives, Result, Wait, Work


class BucketCollectives:
    """The collectives of one bucket's step: it names them, and counts their bytes in `submitted`.

    A call submits a collective, and `yield from` waits for it:
    `averages = yield from collectives.average(values)`. Every rank must ask for the same
    collectives in the same order.

    Attributes:
        bucket, step: the numbers of both.
        size, position: the number of ranks, and this rank's position among them.
        share: what a sum over ranks is multiplied by: 1 / size, or 1 for sums. `average` does this.
            A method that adds up gathered values must do it itself.
        waits: everything that was submitted.
    """

    def __init__(
        self,
        collectives: Collectives,
        name: Callable[[str], str],
        bucket: BucketStep,
        step: int,
        leader_at: Callable[[int, int], int],
        submitted: dict[str, int],
    ) -> None:
        self._collectives, self._name, self._submitted = collectives, name, submitted
        self._bucket, self.step, self._leader_at = bucket, step, leader_at
        self.waits: list[Wait[Any]] = []
        self.sent_values = False
        self.bucket = bucket.number
        self.size, self.position = collectives.size, collectives.position
        self.share = collectives.share

    def leader(self, later: int = 0) -> int:
        """The position of the rank that chooses for this bucket, now or `later` steps on."""
        return self._leader_at(self.step + later, self.bucket)

    def leads(self, later: int = 0) -> bool:
        """Whether this rank is the one that chooses, now or `later` steps on."""
        return self.leader(later) == self.position

    def broadcast(
        self,
        offsets: torch.Tensor,
        root: int,
        then: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Wait[torch.Tensor]:
        """Send a tensor of the rank at position `root` into those of all others, which are alike.

        Only one broadcast can be under way, because its name is fixed.
        """
        work = self._collectives.broadcast(offsets, root, self._name(f"offsets.{self.bucket}"))
        return self._wait("offsets", work, "offsets", offsets, then)

    def broadcast_choice(self, choice: torch.Tensor, root: int) -> Wait[torch.Tensor]:
        """As `broadcast`, of offsets and the scales of integers, into `bucket.new_offsets()`."""
        choices = self._bucket.choices

        def unpacked(message: torch.Tensor) -> torch.Tensor:
            choices.unpack(message, choice)
            return choice

        return self.broadcast(choices.pack(choice), root, unpacked)

    def average(self, values: torch.Tensor, name: str = "values") -> Wait[torch.Tensor]:
        """Average values (float32 or float64) over ranks, in place, or sum them if it is asked for.

        name: one that no other collective of this step has.
        """
        work = self._collectives.all_reduce(values, self._name(f"{name}.{self.bucket}"))
        return self._wait(name, work, "values", values)

    def average_taken(self) -> Wait[torch.Tensor]:
        """Average a copy of `bucket.taken`, with the tensors sent whole, for `bucket.receive`."""
        bucket = self._bucket
        buffer, *flags = bucket.fill()
        work = self._collectives.all_reduce(buffer, self._name(f"{bucket.kind}.{self.bucket}"))
        more = [self._collectives.all_reduce(f, self._name(f"flags.{self.bucket}")) for f in flags]
        self._submitted["dense"] += buffer.nbytes - bucket.values_bytes
        self._submitted["dense"] += sum(flag.nbytes for flag in flags)
        self._submitted["values"] += bucket.values_bytes
        self._submitted["collectives"] += 1 + len(flags)
        self.sent_values = True

        def averages(_: torch.Tensor) -> torch.Tensor:
            for each in more:
                each.wait()
            return bucket.averages_taken()

        wait: Wait[torch.Tensor] = Wait("values", work, LAST, averages)
        self.waits.append(wait)
        return wait

    def gather(self, tensor: torch.Tensor, name: str) -> Wait[list[torch.Tensor]]:
        """Every rank's tensor, in order of position. All have one shape.

        Raises:
            ValueError: ranks passed tensors of different lengths.
        """

        def parts(joined: torch.Tensor) -> list[torch.Tensor]:
            if len(joined) != self.size * len(tensor):
                raise ValueError(
                    f"gather({name!r}): ranks brought different numbers of rows ({len(tensor)} on "
                    f"this rank, {len(joined)} in total). Bring equally many on every rank: pad "
                    "the shorter tensors"
                )
            # Copies, because bytes can be viewed as another dtype only if they begin on a word, and
            # because simulated ranks share the joined tensor.
            return [part.clone() for part in joined.split(len(tensor))]

        work = self._collectives.gather(tensor, self._name(f"{name}.{self.bucket}"))
        return self._wait(name, work, "gathered", tensor, parts)

    def _wait(
        self,
        what: str,
        work: Work,
        kind: str,
        buffer: torch.Tensor,
        then: Callable[[torch.Tensor], Result] | None = None,
    ) -> Wait[Result]:
        self._submitted[kind] += buffer.numel() * buffer.element_size()
        self._submitted["collectives"] += 1
        wait = Wait(what, work, len(self.waits) + 1, then)
        self.waits.append(wait)
        return wait
