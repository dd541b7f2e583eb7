"""Tests on another device than the CPU: TESTS_DEVICE=delayed, the one of tests/delayed, or cuda.

The same tests then make their tensors there, and look at them as ever. On cuda, TESTS_BACKEND says
how torch.distributed's tensors travel: nccl, or gloo.
"""

import os

DEVICE = os.environ.get("TESTS_DEVICE", "cpu")


def begin(local_rank: int, ranks: int) -> None:
    """From now on tensors are made on the device, if a test does not say where.

    ranks: how many there are on this machine.
    """
    import torch

    if DEVICE == "cpu":
        return
    if DEVICE == "delayed":
        import delayed.process_group  # noqa: F401 (this registers both)
    else:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        share_gpus(local_rank, ranks)
        for name in ("rand", "randint", "randn", "randperm"):
            setattr(torch, name, drawn_on_the_cpu(getattr(torch, name)))
    torch.set_default_device(DEVICE)
    to_numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **more: to_numpy(self.cpu(), **more)


def drawn_on_the_cpu(draw):
    """The same, which gives a generator's numbers on the device: generators are the CPU's here."""
    import torch

    def drawn(*sizes, generator=None, device=None, **more):
        device = device or torch.get_default_device()
        where = device if generator is None else generator.device
        return draw(*sizes, generator=generator, device=where, **more).to(device)

    return drawn


def share_gpus(local_rank: int, ranks: int) -> None:
    """Let NCCL take ranks that share a GPU: each says that it is on a machine of its own."""
    import torch

    if torch.accelerator.device_count() < ranks:
        os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def backends() -> str:
    """What torch.distributed is to be started with."""
    if DEVICE == "cpu":
        return "gloo"
    if DEVICE == "delayed":
        return "cpu:gloo,delayed:delayedccl"
    return f"cpu:gloo,{DEVICE}:{os.environ.get('TESTS_BACKEND', 'nccl')}"
