"""scikit-learn's 1797 handwritten digits, 8 x 8 pixels, split the same way for everyone.

1437 digits are to train with, and 360 to test with. Uses NumPy and scikit-learn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

TEST_IMAGES = 360
SPLIT_SEED = 0


class Digits(NamedTuple):
    """Images and their labels.

    images: (count, 8, 8) float32. The background is zero, so that a shift can be filled with zero;
        ink is up to 2.
    labels: (count,) int64.
    """

    images: np.ndarray
    labels: np.ndarray


def load() -> tuple[Digits, Digits]:
    """The digits to train on, and those to test with."""
    from sklearn import datasets

    digits = datasets.load_digits()
    everything = Digits((digits.images / 8).astype(np.float32), digits.target.astype(np.int64))
    order = permutation(len(digits.images), SPLIT_SEED)
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(everything.images[train], everything.labels[train]), Digits(
        everything.images[test], everything.labels[test]
    )


def permutation(count: int, seed: int) -> np.ndarray:
    """What torch.randperm gives with a generator of this seed, computed without torch."""
    draws = np.random.RandomState(seed).randint(0, 2**32, size=count - 1, dtype=np.uint32)
    order = np.arange(count)
    for place, draw in enumerate(draws):
        other = place + int(draw) % (count - place)
        order[place], order[other] = order[other], order[place]
    return order


def shift(images: np.ndarray, dx: int, dy: int) -> np.ndarray:
    """Move images by one pixel at most, right by dx and down by dy; new pixels are zero."""
    return np.pad(images, ((0, 0), (1, 1), (1, 1)))[:, 1 - dy : 9 - dy, 1 - dx : 9 - dx]


def shift_at_random(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Move each image by one pixel at most, in a direction of its own."""
    dx, dy = random.integers(-1, 2, (len(images), 2)).T
    nine = np.stack([shift(images, x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)])
    return nine[3 * (dx + 1) + dy + 1, np.arange(len(images))]
