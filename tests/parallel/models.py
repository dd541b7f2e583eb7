"""Small models of PyTorch for the parallel tests."""

import numpy as np
import torch
from made_up import ODD_SHAPES, gradients

__all__ = ["ODD_SHAPES", "feed", "gradients", "parameters", "same_on_all_ranks"]


def parameters(shapes: dict, dtype=torch.float32) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def feed(model: dict[str, torch.nn.Parameter], grads: dict[str, np.ndarray], skip=()) -> None:
    """Run backward so that every parameter's gradient is the given one; those in `skip` get none on this rank."""
    loss = torch.zeros(())
    for name, parameter in model.items():
        if name not in skip:
            grad = torch.from_numpy(np.array(grads[name])).to(parameter.dtype)
            loss = loss + (parameter * grad).sum().float()
    if loss.requires_grad:
        loss.backward()


def same_on_all_ranks(tensors) -> bool:
    import horovod.torch as hvd

    flat = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    everyone = hvd.allgather(flat.unsqueeze(0), name="same_on_all_ranks")
    return all(torch.equal(row, everyone[0]) for row in everyone)
