"""Tests on another device than the CPU: TESTS_DEVICE=delayed, the one of tests/delayed, or cuda.

The same tests then make their tensors there, and look at them as ever.
"""

import os

DEVICE = os.environ.get("TESTS_DEVICE", "cpu")


def begin(local_rank: int) -> None:
    """From now on tensors are made on the device, if a test does not say where."""
    import torch

    if DEVICE == "cpu":
        return
    if DEVICE == "delayed":
        import delayed.process_group  # noqa: F401 (this registers both)
    else:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    torch.set_default_device(DEVICE)
    to_numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **more: to_numpy(self.cpu(), **more)


def backends(ranks: int) -> str:
    """What torch.distributed is to be started with, for so many ranks of this machine."""
    import torch

    if DEVICE == "cpu":
        return "gloo"
    if DEVICE == "delayed":
        return "cpu:gloo,delayed:delayedccl"
    # NCCL wants a GPU for each rank.
    backend = "nccl" if torch.accelerator.device_count() >= ranks else "gloo"
    return f"cpu:gloo,{DEVICE}:{backend}"
