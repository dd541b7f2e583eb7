"""Made-up gradients, the same in every framework."""

import numpy as np

# Sizes around the lane group's width (64) and around a group's size at rate 100 (6400), and shapes
# that are not a plain matrix.
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


# Settings of ScaleCom that send every element of tensors as small as these, unrounded. So training
# equals dense training.
EVERYTHING = {"rate": 1.0001, "bits": 32}
SOME = {"rate": 10}

# A vector that most settings send whole, and tensors that they compress.
SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (5000,)}


def gradients(shapes: dict, rank: int, step: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """What worker `rank` computed at a step. The numbers are the same wherever this is called."""
    random = np.random.default_rng([rank, step])
    return {
        name: np.asarray(random.standard_normal(shape) * 2.0 ** random.integers(-3, 4), dtype)
        for name, shape in shapes.items()
    }


def came_in(ranks, steps, shapes: dict = SHAPES, skips=lambda rank, step: ()) -> dict:
    """{name: the sum of these ranks' gradients of these steps}, without the skipped ones."""
    total = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    for rank in ranks:
        for step in steps:
            for name, grad in gradients(shapes, rank, step).items():
                total[name] += 0 if name in skips(rank, step) else grad
    return total
