"""What diagnostics see of a step: numbers of the sample's elements, before it and after it.

Before the step these are residues and accumulators, after it the average and the new residues.
That works for every method, because a bucket is looked at from outside: when its gradients are at
hand and nothing has moved yet, and when all averages are out. Then ranks gather what each saw, and
all compute the same numbers. The exchange calls this, only in steps that are due. Nothing here
changes a bucket. Imports bucket and the rooms below.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from scalecom_hvd.diagnostics import Diagnostics, Numbers, Piece, Writer, draw, look, share_sent
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.kernels import usable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Before(NamedTuple):
    """One tensor's sample before the step.

    Attributes:
        residue, accumulator: (size of the sample,), in the residue's units.
        scale: 1 / loss scale.
        frozen: whether nothing is sent of the tensor, so that it shows as zeros.
    """

    residue: torch.Tensor
    accumulator: torch.Tensor
    scale: float
    frozen: bool


class Sampler:
    """Looks at one optimizer's steps on this rank.

    Args:
        diagnostics: which steps, how much of the model, and where the numbers go.

    Attributes:
        settings: what ranks must have in common.
        last: the numbers of the last look, and its step; None before the first.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.settings = diagnostics.settings
        self.last: Numbers | None = None
        self._every, self._sample = diagnostics.every, diagnostics.sample
        self._writer = Writer(diagnostics, open_tensorboard)
        self._before: dict[str, Before] = {}
        self._pieces: dict[str, Piece] = {}
        self._places: dict[str, torch.Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether this step is looked at."""
        return step % self._every == 0

    def draw(self, buckets: Sequence[Bucket]) -> None:
        """Choose the sample of these buckets' compressed tensors, the same on every rank."""
        tensors = {name: tensor for bucket in buckets for name, tensor in bucket.compressed.items()}
        geometries = {name: tensor.geometry for name, tensor in tensors.items()}
        self._pieces = draw(geometries, self._sample)
        self._places = {
            name: torch.from_numpy(piece.positions).to(tensors[name].residue.device)
            for name, piece in self._pieces.items()
        }

    def before(self, bucket: Bucket) -> None:
        """Look at a bucket whose gradients are at hand, before anything has moved."""
        for (name, tensor), frozen in zip(bucket.compressed.items(), bucket.frozen, strict=True):
            places = self._places[name]
            residue = tensor.residue[places]
            gradient, _ = usable(bucket.grads[name][places], residue, bucket.scale)
            self._before[name] = Before(residue, residue + gradient, bucket.scale, frozen)

    def look(
        self, step: int, buckets: Sequence[Bucket], collectives: Collectives, name: str
    ) -> None:
        """Look at the step after it: it counts, and buckets' gradients are its averages.

        All ranks are here, so they may wait for each other.

        Args:
            step: its number.
            buckets: all of them.
            collectives: the other ranks.
            name: the full name by which ranks gather.
        """
        if not self._pieces:
            return
        bucket_of = {own: bucket for bucket in buckets for own in bucket.compressed}
        columns: list[tuple[torch.Tensor, ...]] = []
        for own, places in self._places.items():
            bucket, seen = bucket_of[own], self._before[own]
            tensor = bucket.compressed[own]
            # Residues hold what one worker has, so a sum over workers is divided by their number.
            scale = seen.scale / (collectives.share * collectives.size)
            average = bucket.grads[own][places].to(tensor.residue.dtype) * scale
            column = seen.residue, seen.accumulator, average, tensor.residue[places]
            columns.append(tuple(map(torch.zeros_like, column)) if seen.frozen else column)
        m, acc, average, new = (
            torch.cat([part.cpu() for part in parts]) for parts in zip(*columns, strict=True)
        )
        self._before.clear()
        share = share_sent(m.numpy(), acc.numpy(), new.numpy(), tensor.beta)
        mine = torch.cat([m, acc, torch.tensor([share], dtype=m.dtype)])
        everyone = collectives.gather(mine[None], name).wait()
        pieces = list(self._pieces.values())
        self.last = {"step": step} | _numbers(everyone, average.numpy(), pieces)
        if collectives.position == 0:
            self._writer.write(self.last)


# The last gathered tensor, and its numbers. Simulated ranks get the very same tensor, and compute
# once.
_known: tuple[weakref.ref[torch.Tensor], Numbers] | None = None


def _numbers(everyone: torch.Tensor, average: np.ndarray, pieces: Sequence[Piece]) -> Numbers:
    global _known
    known = _known
    if known is None or known[0]() is not everyone:
        ends = [average.size, 2 * average.size]
        residues, accumulators, shares = np.split(everyone.numpy(), ends, axis=1)
        numbers = look(residues, accumulators, average, shares[:, 0], pieces)
        known = _known = weakref.ref(everyone), numbers
    return dict(known[1])


def open_tensorboard(directory: str, step: int) -> SummaryWriter:
    """TensorBoard's writer: what an earlier run wrote from `step` on no longer shows."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory, purge_step=step)
