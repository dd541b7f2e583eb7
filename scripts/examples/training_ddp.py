"""Horovod's names over torch.distributed, as far as the training scripts use them.

Under torchrun, training_torch.py takes them from here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import training

from scalecom_hvd.ddp import DistributedOptimizer as DistributedOptimizer
from scalecom_hvd.ddp import Monitor as Monitor
from scalecom_hvd.ddp import ScaleCom as ScaleCom
from scalecom_hvd.ddp import broadcast_parameters as broadcast_parameters

Average, Sum = dist.ReduceOp.AVG, dist.ReduceOp.SUM
barrier, rank, shutdown = dist.barrier, dist.get_rank, dist.destroy_process_group
size = dist.get_world_size


class _Compression:
    none = None

    @property
    def fp16(self) -> None:
        raise training.WrongInput("--compression fp16 is Horovod's own: launch with horovodrun")


Compression = _Compression()


def init() -> None:
    """Meet the ranks that torchrun started."""
    if "RANK" not in os.environ:
        raise SystemExit("--backend ddp: launch with torchrun --nproc-per-node 2 SCRIPT ...")
    # On GPUs also Gloo, because metrics are summed on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def local_size() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def allreduce(tensor: torch.Tensor, op: Any = Average, name: str | None = None) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total if op == Sum else total / size()


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    values = [value]
    dist.broadcast_object_list(values, root_rank)
    return values[0]


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))
