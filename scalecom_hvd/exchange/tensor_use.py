"""Which tensors a step uses: those for which the backward of some rank gives a gradient.

DDP and FSDP2 throw away the average of a tensor that no rank used. So such a tensor must send
nothing, and its residue must wait.

Once per step, ranks ask each other about all tensors. The answer comes when backward has ended, but
buckets should travel while it runs. So buckets begin as if the step used what the step before used.
If that was wrong, the buckets concerned begin again, and in the next step they wait for the answer.

All ranks decide the same, and nothing here depends on what arrives when. So ranks submit all
collectives in one order, as NCCL needs.

Imports bucket_step, collectives and saved_state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Collectives
from scalecom_hvd.saved_state import Saved


class TensorUse:
    """What the ranks of an exchange know of the tensors that steps use.

    Args:
        zeros_are_unused: whether a tensor that this rank did not use has a gradient of zeros, as
            DDP gives it. If not, such a tensor has none.

    Attributes:
        unused: names of compressed tensors that no rank used in the last step.
        changed: names of those for which that was different in the step before.
        given: names of tensors for which some rank reported a gradient, even one of zeros.
    """

    def __init__(self, zeros_are_unused: bool) -> None:
        self._zeros_are_unused = zeros_are_unused
        self.unused: set[str] = set()
        self.changed: set[str] = set()
        self.given: set[str] = set()

    def look(self, step: BucketStep, flats: Mapping[str, torch.Tensor]) -> None:
        """Look at a step's gradients, which are all here, before it begins."""
        if self._zeros_are_unused:
            step.look_for_use(flats)

    def ask(
        self,
        steps: Sequence[BucketStep],
        missing: Collection[str],
        collectives: Collectives,
        name: str,
    ) -> list[BucketStep]:
        """Learn what this step uses. Waits for the device, and for the other ranks.

        Args:
            steps: all steps, each of which was looked at.
            missing: names of tensors without a gradient on this rank.
            collectives: how this rank reaches the others.
            name: of the collective.

        Returns:
            The steps of buckets for which some rank assumed something else.
        """
        compressed = [name for step in steps for name in step.bucket.compressed]
        names = [name for step in steps for name in step.bucket.names]
        if self._zeros_are_unused:
            used = torch.cat([step.used.wait() for step in steps]).int().tolist()
        else:
            used = [name not in missing for name in compressed]
        given = [name not in missing for name in names]
        # If a rank has given a step up alone, it may assume something else.
        assumed = [name in self.unused for name in compressed]
        flags = torch.tensor([*used, *given, *assumed], dtype=torch.int32, device="cpu")
        total = collectives.all_reduce(flags, name).wait()
        lengths = [len(compressed), len(names), len(compressed)]
        is_used, is_given, by_how_many = (part.tolist() for part in total.split(lengths))
        self.unused = {n for n, ranks in zip(compressed, is_used, strict=True) if not ranks}
        self.given = {n for n, ranks in zip(names, is_given, strict=True) if ranks}
        self.changed = {
            name
            for name, ranks in zip(compressed, by_how_many, strict=True)
            if ranks != (collectives.size if name in self.unused else 0)
        }
        return [step for step in steps if self.concerns(step)]

    def concerns(self, step: BucketStep) -> bool:
        """Whether a step's bucket has tensors whose use has changed."""
        return not self.changed.isdisjoint(step.bucket.compressed)

    def state_dict(self) -> Saved:
        """What a rank that resumes must know, so that its steps are the same to the bit."""
        if not (self.unused or self.changed):
            return {}
        return {"use": {"unused": sorted(self.unused), "changed": sorted(self.changed)}}

    def load_state_dict(self, state: Saved) -> None:
        """Load what `state_dict` gave."""
        use = state.get("use", {})
        self.unused, self.changed = set(use.get("unused", ())), set(use.get("changed", ()))

    def agree(self, everyone: Sequence[Saved]) -> None:
        """Begin anew unless all ranks know the same. everyone: what `state_dict` gave each."""
        if any(other != everyone[0] for other in everyone):
            self.load_state_dict({})
