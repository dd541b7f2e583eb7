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


# Numbers of very different magnitudes. "lone" is on rank 0 only.
FINE = {"1e-7": 1e-7, "1e-8": 1e-8, "lone": 5e-9, "huge": 1e6, "wide": None}
FINE_SHAPES = {
    f"{which} {kind}": shape
    for which in FINE
    for kind, shape in {"weight": (20, 15), "bias": (3,)}.items()
}


def fine(rank: int, step: int) -> dict[str, np.ndarray]:
    """A rank's gradients of a step, shaped as FINE_SHAPES says.

    They are constants, or random magnitudes from 1e-9 to 1e4.
    """
    random = np.random.default_rng([rank, step])

    def numbers(which: str, shape: tuple) -> np.ndarray:
        if FINE[which] is None:
            return 10 ** random.uniform(-9, 4, shape) * random.choice([-1, 1], shape)
        return np.full(shape, 0 if which == "lone" and rank else FINE[which] * (1 + rank / 3))

    return {
        name: numbers(name.split()[0], shape).astype(np.float32)
        for name, shape in FINE_SHAPES.items()
    }


class Fine:
    """Checks that nothing of `fine` is lost, except by rounding.

    It adds up what came in and what the user was given, and compares both with what is left.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._came, self._given, self._rounding = (
            {name: np.zeros(shape) for name, shape in FINE_SHAPES.items()} for _ in range(3)
        )

    def add(self, step: int, averages: dict[str, np.ndarray]) -> None:
        everyone = [fine(rank, step) for rank in range(self._n)]
        for name in FINE_SHAPES:
            assert np.isfinite(averages[name]).all(), f"{name} at step {step}"
            self._came[name] += sum(own[name].astype(float) for own in everyone) / self._n
            self._given[name] += averages[name]
            self._rounding[name] += 2.0**-23 * sum(np.abs(own[name]) for own in everyone)

    def check(self, mean_residues: dict[str, np.ndarray]) -> None:
        for name in FINE_SHAPES:
            off = np.abs(self._given[name] + mean_residues.get(name, 0) - self._came[name])
            wrong = off > self._rounding[name]
            assert not wrong.any(), f"{name}: {wrong.sum()} elements are off, by up to {off.max()}"
