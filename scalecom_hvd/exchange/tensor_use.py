"""Which tensors a step used: those for which the backward of some rank gave a gradient.

DDP and FSDP2 throw away the average of a tensor that no rank used. So such a tensor must send
nothing, and its residue must wait.

Once per step, ranks ask each other about all tensors. The answer comes when backward has ended, but
buckets should travel while it runs. So buckets begin as if the step used what the step before used.
If that was wrong, the buckets concerned begin again. The buckets of the next step then wait for the
answer, until two steps have used the same tensors.

All ranks decide the same, and nothing here depends on what arrives when. So ranks submit all
collectives in one order, as NCCL needs.

Imports agreement, bucket_step and collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from scalecom_hvd.agreement import Names
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Collectives


class TensorUse:
    """What the ranks of an exchange know of the tensors that steps use.

    Args:
        collectives: how this rank reaches the others.
        names: gives the collective its name.

    Attributes:
        unused: names of compressed tensors that no rank used in the last step.
        given: names of tensors for which some rank reported a gradient, even one of zeros.
        is_steady: whether the last step used what the step before it used.
    """

    def __init__(self, collectives: Collectives, names: Names) -> None:
        self._collectives, self._names = collectives, names
        self.unused: set[str] = set()
        self.given: set[str] = set()
        self.is_steady = False

    def ask(self, steps: Sequence[BucketStep], missing: Collection[str]) -> list[BucketStep]:
        """Learn what this step used. Waits for the device, and for the other ranks.

        Args:
            steps: all steps. They have looked at their gradients.
            missing: names of tensors without a gradient on this rank.

        Returns:
            The steps of buckets for which some rank assumed something else.
        """
        compressed = [name for step in steps for name in step.bucket.compressed]
        names = [name for step in steps for name in step.bucket.names]
        used = torch.cat([step.used.wait() for step in steps])
        given = used.new_tensor([name not in missing for name in names])
        # If a rank has given a step up alone, it may assume something else.
        assumed = used.new_tensor([name in self.unused for name in compressed])
        flags = torch.cat([used, given, assumed]).int()
        total = self._collectives.all_reduce(flags, self._names("used")).wait()
        lengths = [len(compressed), len(names), len(compressed)]
        is_used, is_given, by_how_many = (part.tolist() for part in total.split(lengths))
        self.unused = {n for n, ranks in zip(compressed, is_used, strict=True) if not ranks}
        self.given = {n for n, ranks in zip(names, is_given, strict=True) if ranks}
        wrong = {
            name
            for name, ranks in zip(compressed, by_how_many, strict=True)
            if ranks != (self._collectives.size if name in self.unused else 0)
        }
        self.is_steady = not wrong
        return [step for step in steps if not wrong.isdisjoint(step.bucket.compressed)]
