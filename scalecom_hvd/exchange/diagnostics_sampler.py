"""What diagnostics see of a step: numbers of the sampled elements, before the step and after it.

Before the step these are residues and accumulators; after it, the average and the new residues.
This works for every method, because a bucket is looked at from outside, and nothing here changes
it. Ranks gather what each of them saw, and all compute the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from scalecom_hvd.diagnostics import Numbers, Piece, draw, look, share_sent
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.exchange.kernels.base import usable

log = logging.getLogger("scalecom_hvd")


class Sampler:
    """Looks at one optimizer's steps 0, every, 2 every, ... that are not whole, on this rank."""

    def __init__(self, every: int) -> None:
        self.last: Numbers | None = None  # of the last look, with its step
        self.seen: int | None = None  # the step that ranks must still compare
        self.every = every
        # {name: (m, acc)} before the step, in the residue's units.
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # {name: (m, acc, average, m afterwards)} of the step's parts so far.
        self._columns: dict[str, tuple[torch.Tensor, ...]] = {}
        self._pieces: dict[str, Piece] = {}
        self._beta = 1.0
        self._places: dict[str, torch.Tensor] = {}

    def draw(self, buckets: Sequence[Bucket]) -> None:
        """Choose the sample of these buckets' compressed tensors, the same on every rank."""
        tensors = {name: tensor for bucket in buckets for name, tensor in bucket.compressed.items()}
        self._columns = {}
        self._beta = next((tensor.beta for tensor in tensors.values()), 1.0)
        self._pieces = draw({name: tensor.geometry for name, tensor in tensors.items()})
        self._places = {
            name: torch.from_numpy(piece.positions).to(tensors[name].residue.device)
            for name, piece in self._pieces.items()
        }

    def before(self, bucket: BucketStep) -> None:
        """Look at a bucket when its gradients are here, before anything has moved."""
        for name, tensor in bucket.compressed.items():
            places = self._places[name]
            residue = tensor.residue[places]
            gradient, _ = usable(bucket.grads[name][places], residue, bucket.scale)
            self._before[name] = residue, residue + gradient

    def after(self, buckets: Sequence[BucketStep], collectives: Collectives) -> None:
        """Look at buckets after their step is committed: their gradients now hold the averages."""
        for bucket in buckets:
            # A residue is that of one worker, so a sum over workers is divided by their number.
            scale = bucket.scale / (collectives.share * collectives.size)
            for (name, own), frozen in zip(bucket.compressed.items(), bucket.frozen, strict=True):
                places = self._places[name]
                average = bucket.grads[name][places].to(own.residue.dtype) * scale
                column = *self._before.pop(name), average, own.residue[places]
                # What sends nothing shows as zeros.
                self._columns[name] = tuple(map(torch.zeros_like, column)) if frozen else column

    def look(self, collectives: Collectives, name: str) -> None:
        """Let all ranks compare what they saw of a step that is over.

        If a part of the step was skipped, all ranks know it, and there is nothing to compare.
        """
        columns, self._columns = self._columns, {}
        self._before.clear()
        if not self._pieces or columns.keys() != self._pieces.keys():
            return
        parts = zip(*(columns[own] for own in self._pieces), strict=True)
        m, acc, average, new = (torch.cat([column.cpu() for column in part]) for part in parts)
        share = share_sent(m.numpy(), acc.numpy(), new.numpy(), self._beta)
        mine = torch.cat([m, acc, m.new_tensor([share])])
        everyone = collectives.gather(mine[None], name).wait()
        ends = [average.numel(), 2 * average.numel()]
        residues, accumulators, shares = np.split(everyone.numpy(), ends, axis=1)
        pieces = list(self._pieces.values())
        numbers = look(residues, accumulators, average.numpy(), shares[:, 0], pieces)
        self.last = {"step": self.seen} | numbers
        if collectives.position == 0:
            log.info("diagnostics of step %d: %s", self.seen, numbers)
