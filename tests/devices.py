"""Runs tests on another device than the CPU.

TESTS_DEVICE names the device: delayed (the device of tests/delayed) or cuda. The same tests then
make their tensors on it, and compare them as on the CPU. On cuda, TESTS_BACKEND names the backend
of torch.distributed: nccl or gloo.
"""

import os

DEVICE = os.environ.get("TESTS_DEVICE", "cpu")


def begin(local_rank: int, ranks: int) -> None:
    """Make the device the default device of new tensors.

    ranks: the number of ranks on this machine.
    """
    import torch

    if DEVICE == "cpu":
        return
    if DEVICE == "delayed":
        import delayed.process_group  # noqa: F401 (this registers both)
    else:
        from scalecom_hvd.doctor.torch_rank import use_device

        use_device(DEVICE, local_rank, ranks)
        for name in ("rand", "randint", "randn", "randperm"):
            setattr(torch, name, drawn_on_the_cpu(getattr(torch, name)))
    torch.set_default_device(DEVICE)
    to_numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **more: to_numpy(self.cpu(), **more)


def foreign() -> int:
    """Return how many times this rank made another rank's device current. Only `delayed` counts."""
    if DEVICE != "delayed":
        return 0
    import delayed

    return delayed.foreign_devices()


def drawn_on_the_cpu(draw):
    """Return `draw`, changed to draw on the generator's device (here the CPU) and move the result.

    The tests' generators belong to the CPU.
    """
    import torch

    def drawn(*sizes, generator=None, device=None, **more):
        device = device or torch.get_default_device()
        where = device if generator is None else generator.device
        return draw(*sizes, generator=generator, device=where, **more).to(device)

    return drawn


def backends() -> str:
    """Return the backends to start torch.distributed with."""
    if DEVICE == "cpu":
        return "gloo"
    if DEVICE == "delayed":
        return "cpu:gloo,delayed:delayedccl"
    return f"cpu:gloo,{DEVICE}:{os.environ.get('TESTS_BACKEND', 'nccl')}"
