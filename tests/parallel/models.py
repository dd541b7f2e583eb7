"""Small models and made-up gradients for the parallel tests."""

import numpy as np
import torch

# Around the lane group's width (64) and a group's size at rate 100 (6400), and what is not a plain matrix.
ODD_SHAPES = {
    "scalar": (),
    "empty": (0,),
    "one": (1,),
    "n63": (63,),
    "n64": (64,),
    "n65": (65,),
    "n6399": (6399,),
    "n6400": (6400,),
    "n6401": (6401,),
    "matrix": (37, 211),
    "conv": (8, 4, 3, 3),
    "embedding": (500, 20),
}


def parameters(shapes: dict, dtype=torch.float32) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def gradients(shapes: dict, rank: int, step: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """What worker `rank` computed at a step: the same numbers wherever this is called."""
    random = np.random.default_rng([rank, step])
    return {name: np.asarray(random.standard_normal(shape) * 2.0 ** random.integers(-3, 4), dtype) for name, shape in shapes.items()}


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
