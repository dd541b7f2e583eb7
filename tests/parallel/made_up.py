"""Made-up gradients, the same in every framework."""

import numpy as np

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


def gradients(shapes: dict, rank: int, step: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """What worker `rank` computed at a step: the same numbers wherever this is called."""
    random = np.random.default_rng([rank, step])
    return {name: np.asarray(random.standard_normal(shape) * 2.0 ** random.integers(-3, 4), dtype) for name, shape in shapes.items()}
