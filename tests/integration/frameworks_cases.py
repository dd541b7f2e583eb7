"""The shapes, gradients and settings of test_frameworks_agree.py.

The test gives them to the reference and to both frameworks. This module imports no framework.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

from made_up import gradients  # noqa: F401

STEPS = 50
SHAPES = {
    "first": (37, 211),
    "scale": (64,),
    "odd": (6399,),
    "conv": (8, 4, 3, 3),
    "embedding": (500, 20),
    "bias": (10,),
    "last": (40, 101),
}
# Buckets are given, because PyTorch would form them in the order in which gradients arrive, and
# TensorFlow in the order of variables.
ONE = [list(SHAPES)]
SEVERAL = [["first", "scale"], ["odd", "conv", "embedding"], ["bias", "last"]]
# Integers of few bits have buckets of their own.
APART = [["first"], ["odd", "conv", "embedding"], ["last"], ["scale", "bias"]]
MODES = {  # (settings, buckets)
    "cyclic": ({"rate": 20, "bits": 32, "beta": 0.3, "min_numel": 100}, ONE),
    "few bits": ({"rate": 16, "bits": 3, "min_numel": 100}, ONE),
    "staggered": (
        {"rate": 20, "bits": 32, "min_numel": 100, "leader": "staggered", "dense": ["conv"]},
        SEVERAL,
    ),
    "lookahead": (
        {
            "rate": 300,
            "bits": 3,
            "beta": 0.5,
            "min_numel": 100,
            "leader": "staggered",
            "lookahead": True,
            "warmup_steps": 3,
        },
        APART,
    ),
}


def digest(array) -> str:
    """Return a digest that differs if any bit differs, except for the sign of zero."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1) + np.float32(0)).hexdigest()[:16]
