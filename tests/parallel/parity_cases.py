"""Settings under which real ranks are compared with reference.py, in every framework.

Each setting is in some case. Settings that meet in one move are in one case: which kernel, which
leader, what travels. Cross products of all settings would show nothing more.
"""

import numpy as np
import pytest

PLAIN = {"rate": 30, "beta": 0.3, "bits": 32}
STAGGERED = {"rate": 20, "beta": 0.5, "leader": "staggered", "bucket_bytes": 20_000}
CASES = {
    "few are left": {"rate": 400, "beta": 0.5},
    "many are sent, look-ahead": {"rate": 2.5, "lookahead": True},
    "beta 1": {"rate": 100},
    "a small beta, look-ahead": {"rate": 7, "beta": 0.1, "lookahead": True},
    "float16 gradients, look-ahead": {
        "dtype": np.float16,
        "rate": 50,
        "beta": 0.3,
        "lookahead": True,
        "tolerance": 1e-3,
    },
    "float64 gradients": {"dtype": np.float64, "rate": 50, "beta": 0.3, "tolerance": 1e-12},
    "staggered leaders of many buckets": STAGGERED,
    "the same, look-ahead": STAGGERED | {"lookahead": True},
    "exact": {"rate": 30, "beta": 0.3, "selection": "exact"},
    "exact, look-ahead": {"rate": 30, "beta": 0.3, "selection": "exact", "lookahead": True},
    "32 bits": PLAIN,
    "32 bits, look-ahead": PLAIN | {"lookahead": True},
    "warm-up, rates, dense; look-ahead": {
        "rate": 100,
        "rates": {"n64*": 10, "matrix": 1000},
        "dense": ["embedding", "matrix"],
        "warmup_steps": 5,
        "lookahead": True,
    },
    "integers of 3 bits": {"bits": 3, "rate": 16, "beta": 0.3},
    "integers, look-ahead, many buckets": STAGGERED | {"bits": 2, "rate": 7.5, "lookahead": True},
    "integers, a schedule": {
        "bits": 3,
        "rate": {0: 1, 3: 4, 6: 16},
        "rates": {"n64*": 2, "matrix": 300},
        "beta": 0.3,
    },
    "exact, 32 bits, a schedule": PLAIN
    | {
        "selection": "exact",
        "leader": "staggered",
        "bucket_bytes": 20_000,
        "rate": {0: 5, 4: 30},
    },
    "all in few bits, many buckets": STAGGERED | {"bits": 4, "rate": 1},
    "all in 32 bits, after a start at rate 4": PLAIN | {"rate": {0: 4, 3: 1}},
    "integers of float64 gradients": {
        "bits": 4,
        "rate": 30,
        "dtype": np.float64,
        "tolerance": 1e-12,
    },
    "integers of float16 gradients, warm-up, look-ahead": {
        "bits": 3,
        "dtype": np.float16,
        "rate": 16,
        "warmup_steps": 3,
        "lookahead": True,
        "tolerance": 1e-3,
    },
}
# Only make test-nightly runs these, because each takes seconds in TensorFlow.
LONG = [
    *("few are left", "many are sent, look-ahead", "the same, look-ahead"),
    *("exact, look-ahead", "32 bits", "integers of float64 gradients"),
    *("float64 gradients", "float16 gradients, look-ahead", "integers of 3 bits"),
    *("exact, 32 bits, a schedule", "all in 32 bits, after a start at rate 4"),
]
MORE_IN_TENSORFLOW = "beta 1", "32 bits, look-ahead", "a small beta, look-ahead"


def assert_step_is_the_oracles(reference, rank, averages, got, residues, tolerance, step):
    """Compare a rank's averages and residues after a step with the oracle's.

    averages: the oracle's. got, residues: {name: array}.
    """
    for name, average in averages.items():
        assert got[name].shape == average.shape
        chosen = reference.selections.get(name)
        if chosen is not None:
            assert not np.delete(got[name].reshape(-1), chosen).any(), (
                f"{name} at step {step}: something outside the selection was sent"
            )
        where = f"{name} at step {step}"
        np.testing.assert_allclose(got[name], average, tolerance, tolerance, err_msg=where)
    for name, residue in residues.items():
        # Equal to the bit: what a worker keeps depends only on its own arithmetic.
        own = reference.residues[rank].get(name, np.zeros_like(residue))
        np.testing.assert_array_equal(residue, own, err_msg=f"{name} at step {step}")


def in_cases(long):
    """Parametrise a test. long: the cases that only make test-nightly runs."""
    cases = [
        pytest.param(settings, id=name, marks=[pytest.mark.long] * (name in long))
        for name, settings in CASES.items()
    ]
    return pytest.mark.parametrize("settings", cases)


in_all_cases = in_cases(LONG)
# What a face may change is where buckets begin and end, so some cases are enough for the next face.
OF_ONE_FACE = "beta 1", "a small beta, look-ahead", "32 bits, look-ahead", "integers, a schedule"
in_some_cases = in_cases([*LONG, *OF_ONE_FACE])
