"""A torch.distributed backend, "delayedccl", that is to the device "delayed" what NCCL is to CUDA.

Importing this module registers the backend. To use it, call
dist.init_process_group("cpu:gloo,delayed:delayedccl").
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from . import _C

__all__ = ["DelayedGroup"]


def DelayedGroup(  # noqa: N802
    store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=5)
) -> dist.ProcessGroup | _C.Backend:
    """Make a communicator that runs collectives in stream order, over a Gloo group of its own.

    Collectives are matched only by the order in which they are called. As with a ProcessGroupNCCL
    made directly, work.wait() makes the current stream wait, not the host.
    """
    inner = dist.PrefixStore("delayedccl", store)
    return _C.Backend(dist.ProcessGroupGloo(inner, rank, size, timeout))


if "delayedccl" not in dist.Backend.backend_list:
    dist.Backend.register_backend("delayedccl", DelayedGroup, devices=["delayed"])
