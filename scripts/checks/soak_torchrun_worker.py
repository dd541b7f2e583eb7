"""Run on every rank by soak.py: trains under torchrun under faults, with the optimizer or the hook
of scalecom_hvd.ddp, and checks after every step that nothing was lost.

Where a worker dies torchrun starts all of them again. Each goes on from its own last checkpoint,
and with rank 0's model, since ranks may have come to different ones. See soak_worker.py, which
trains in the same way, and soak_faults.py.
"""

from __future__ import annotations

import contextlib
import types
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
            return ddp.DistributedOptimizer(optimizer, self.model.named_parameters(), compression)
        self.forward = DistributedDataParallel(self.model, find_unused_parameters=True)
        state = ddp.ScaleComState(self.forward, compression)
        self.forward.register_comm_hook(state, ddp.scalecom_hook)
        # Backward leaves averages.
        optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext
        return optimizer

    def write(self, file: Any) -> None:
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scalecom": self.compression.state_dict(),
            "committed": self.committed,
            "batch": self.state.batch,
        }
        torch.save(saved, file)

    def resume(self) -> Any:
        """Go on from this rank's checkpoint, if it has one; gives what `train` is given."""
        self.file = self.folder / f"checkpoint-{dist.get_rank()}{self.checkpoint}"
        batch = 0
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.compression.load_state_dict(saved["scalecom"])
            self.committed, batch = saved["committed"], saved["batch"]
        ddp.broadcast_parameters(self.model)
        common = batch, self.optimizer.state_dict()
        batch, state = self._hvd.broadcast_object(common, root_rank=0, name="start")
        self.optimizer.load_state_dict(state)
        self.state = types.SimpleNamespace(batch=batch, commit=lambda: None)
        return self.state


def main() -> None:
    plan, folder = soak_faults.begin()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainer = Trainer(plan, folder, Ranks)
    trainer.train(trainer.resume())
    trainer.diary.note("end", skipped=trainer.compression.stats()["skipped_steps"])


if __name__ == "__main__":
    main()
