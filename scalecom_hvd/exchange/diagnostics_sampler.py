"""What diagnostics see of a step, at the sample's places.

Residues and accumulators before it, the average and the residues after it. It works for every
method, because it looks at a bucket from outside: when its gradients are at hand and nothing has
moved yet, and when all averages are out. Then ranks gather what each saw, and all compute the same
numbers. The exchange calls it, only on steps that are due; nothing here changes a bucket. Imports
bucket and the rooms below.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from scalecom_hvd.diagnostics import Diagnostics, Numbers, Piece, Writer, draw, look, share_sent
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.gradients import is_frozen
from scalecom_hvd.exchange.kernels import usable


class Before(NamedTuple):
    """One tensor's sample before the step. scale: 1 / loss scale.  frozen: nothing is sent of it,
    and it shows as zeros.
    """

    residue: torch.Tensor
    accumulator: torch.Tensor
    scale: float
    frozen: bool


class Sampler:
    """Looks at one optimizer's steps on this rank. last: the numbers of the last look, and its
    step; None before the first.
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
        return step % self._every == 0

    def draw(self, buckets: Sequence[Bucket]) -> None:
        """Choose the sample, of these buckets' compressed tensors: every rank has the same."""
        tensors = {name: tensor for bucket in buckets for name, tensor in bucket.compressed.items()}
        self._pieces = draw(
            {name: tensor.geometry for name, tensor in tensors.items()}, self._sample
        )
        self._places = {
            name: torch.from_numpy(piece.positions).to(tensors[name].residue.device)
            for name, piece in self._pieces.items()
        }

    def before(self, bucket: Bucket) -> None:
        """A bucket's gradients are at hand, and nothing has moved."""
        for name, tensor in bucket.compressed.items():
            places = self._places[name]
            residue = tensor.residue[places]
            gradient, _ = usable(bucket.grads[name][places], residue, bucket.scale)
            frozen = is_frozen(bucket.parameters[name])
            self._before[name] = Before(residue, residue + gradient, bucket.scale, frozen)

    def look(
        self, step: int, buckets: Sequence[Bucket], collectives: Collectives, name: str
    ) -> None:
        """The step counted, and its averages are in the buckets' gradients.

        All ranks are here, so they may wait for each other.
        """
        if not self._pieces:
            return
        tensors = {
            name: (bucket, tensor)
            for bucket in buckets
            for name, tensor in bucket.compressed.items()
        }
        residues, accumulators, averages, new_residues = [], [], [], []
        for name in self._pieces:
            bucket, tensor = tensors[name]
            seen, places = self._before[name], self._places[name]
            # Residues hold what one worker has, so a sum over workers is divided by their number.
            average = bucket.grads[name][places].to(tensor.residue.dtype) * (
                seen.scale / (collectives.share * collectives.size)
            )
            columns = (seen.residue, seen.accumulator, average, tensor.residue[places])
            for kept, column in zip(
                (residues, accumulators, averages, new_residues), columns, strict=True
            ):
                kept.append(torch.zeros_like(column) if seen.frozen else column)
        m, acc, average, new = (
            torch.cat([part.cpu() for part in parts])
            for parts in (residues, accumulators, averages, new_residues)
        )
        self._before.clear()
        share = share_sent(
            m.numpy(), acc.numpy(), new.numpy(), next(iter(tensors.values()))[1].beta
        )
        mine = torch.cat([m, acc, torch.tensor([share], dtype=m.dtype)])
        everyone = collectives.gather(mine[None], name).wait()
        self.last = {"step": step} | _numbers(
            everyone, average.numpy(), list(self._pieces.values())
        )
        if collectives.position == 0:
            self._writer.write(self.last)


# The last gathered tensor, and its numbers: simulated ranks get the very same tensor, and compute
# once.
_known: tuple[weakref.ref, Mapping[str, Any]] | None = None


def _numbers(everyone: torch.Tensor, average: np.ndarray, pieces: Sequence[Piece]) -> Numbers:
    global _known
    known = _known
    if known is None or known[0]() is not everyone:
        residues, accumulators, shares = np.split(
            everyone.numpy(), [average.size, 2 * average.size], axis=1
        )
        known = _known = (
            weakref.ref(everyone),
            look(residues, accumulators, average, shares[:, 0], pieces),
        )
    return dict(known[1])


def open_tensorboard(directory: str, step: int) -> Any:
    """TensorBoard's writer; what an earlier run wrote there from `step` on is hidden by what comes
    now.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory, purge_step=step)
