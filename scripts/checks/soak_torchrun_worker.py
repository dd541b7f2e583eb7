"""Trains with torchrun under faults. soak.py runs this on every rank.

It uses the optimizer or the hook of scalecom_hvd.ddp, and checks after every step that nothing was
lost.

If a worker dies, torchrun starts all of them again. Each goes on from its own last checkpoint, but
with rank 0's model, because ranks may have reached different ones. Local steps need states of one
step, so there each goes on from the last checkpoint that all ranks have. soak_worker.py trains in
the same way. See also soak_faults.py.
"""

from __future__ import annotations

import contextlib
import types
from pathlib import Path
from typing import Any

import soak_faults
import soak_worker
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd import ddp


class Ranks:
    """What the soak asks of Horovod, from torch.distributed, which knows no names."""

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)

    @staticmethod
    def broadcast_object(value: Any, root_rank: int, name: str) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=root_rank)
        return values[0]

    @staticmethod
    def allreduce(values: torch.Tensor, name: str | None = None) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


class Trainer(soak_worker.Trainer):
    """One worker's model, optimizer and checks."""

    def distributed(self, optimizer: torch.optim.Optimizer, compression: ddp.Method) -> Any:
        if self.plan.optimizer == "torchrun":
            named = self.model.named_parameters()
            return ddp.DistributedOptimizer(optimizer, named, compression, **self.rounds())
        self.forward = DistributedDataParallel(self.model, find_unused_parameters=True)
        state = ddp.ScaleComState(self.forward, compression)
        self.forward.register_comm_hook(state, ddp.scalecom_hook)
        # Backward leaves averages already.
        optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext
        return optimizer

    def write(self, file: Any) -> None:
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scalecom": self.compression.state_dict(),
            "committed": self.committed,
            "committed_own": self.committed_own,
        }
        torch.save(saved, file)

    def save(self) -> None:
        # All ranks have one of two checkpoints: no rank is a whole round of commits ahead.
        self.file = self.file_of(self.state.batch)
        super().save()
        self.file_of(self.state.batch - 2 * self.plan.commit_every).unlink(missing_ok=True)

    def file_of(self, batch: int) -> Path:
        return self.folder / f"checkpoint-{dist.get_rank()}-{batch}.pt"

    def resume(self) -> Any:
        """Go on from this rank's checkpoint, if it has one. Return what `train` is given."""
        rounds = self.plan.local_steps is not None
        files = self.folder.glob(f"checkpoint-{dist.get_rank()}-*.pt")
        batches = {int(file.stem.rpartition("-")[2]) for file in files}
        if rounds:
            everyone = [set()] * dist.get_world_size()
            dist.all_gather_object(everyone, batches)
            batches = set.intersection(*everyone)
        batch = max(batches, default=0)
        if batch:
            saved = torch.load(self.file_of(batch), weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.compression.load_state_dict(saved["scalecom"])
            self.committed, self.committed_own = saved["committed"], saved["committed_own"]
        ddp.broadcast_parameters(self.model)
        common = batch, self.optimizer.state_dict()
        batch, state = self._hvd.broadcast_object(common, root_rank=0, name="start")
        if not (rounds and batch):  # there every rank has its own
            self.optimizer.load_state_dict(state)
        self.state = types.SimpleNamespace(batch=batch, commit=lambda: None)
        return self.state


class LocalTrainer(Trainer, soak_worker.LocalTrainer):
    """A worker that takes local steps."""


def main() -> None:
    plan, folder = soak_faults.begin()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainer = (Trainer if plan.local_steps is None else LocalTrainer)(plan, folder, Ranks)
    trainer.train(trainer.resume())
    trainer.diary.note("end", skipped=trainer.compression.stats()["skipped_steps"])


if __name__ == "__main__":
    main()
