"""LossScaleOptimizer, used as the guide says.

Every rank skips overflowing steps. Residues survive a moving scale.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_models import examples, net, same_on_all_ranks, scalecom

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as keras

LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer
BATCH, STEPS = 8, 14


def overflowing_ranks() -> dict[int, set[int]]:
    """{step: the ranks on which it overflows}.

    These are the first step, and steps on only the last rank, only the leader, and all ranks.
    """
    last, leader = hvd.size() - 1, 3 % hvd.size()
    return {0: {0}, 3: {last}, 5: {leader}, 6: set(range(hvd.size()))}


def batches():
    """What this rank trains on with overflows, and the same without the overflowing steps."""
    x, y = examples(hvd.rank(), BATCH * STEPS)
    kept = np.ones(len(x), bool)
    for step, ranks in overflowing_ranks().items():
        kept[step * BATCH :][:BATCH] = False
        if hvd.rank() in ranks:
            x[step * BATCH] = np.inf
    return (x, y), (x[kept], y[kept])


MODES = [
    {"bits": 3, "rate": 16, "warmup_steps": 2},
    {},
    {"beta": 0.3, "leader": "staggered", "bucket_bytes": 10_000},
]


@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[1:])], ids=str
)
def test_a_custom_loop_with_overflows_ends_where_one_without_them_ends(mode):
    def run(compression, optimizer, data):
        model = net()
        optimizer.build(model.trainable_variables)
        scaling = isinstance(optimizer, LossScaleOptimizer)

        @tf.function(autograph=False)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
                loss = optimizer.get_scaled_loss(loss) if scaling else loss
            grads = hvd.DistributedGradientTape(tape, compression=compression).gradient(
                loss, model.trainable_variables
            )
            grads = optimizer.get_unscaled_gradients(grads) if scaling else grads
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        for start in range(0, len(data[0]), BATCH):
            step(*(part[start : start + BATCH] for part in data))
        return model

    with_overflows, without = batches()
    scaling = LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.05), initial_scale=2.0**20, dynamic_growth_steps=3
    )
    compression, other = scalecom(loss_scale=scaling, **mode), scalecom(**mode)
    scaled = run(compression, scaling, with_overflows)
    plain = run(other, tf.keras.optimizers.SGD(0.05), without)
    assert (compression.stats()["step"], compression.stats()["skipped_steps"]) == (STEPS - 4, 4)
    assert (other.stats()["step"], other.stats()["skipped_steps"]) == (STEPS - 4, 0)
    for mine, theirs in zip(scaled.variables, plain.variables, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5, err_msg=mine.name
        )
    kept, expected = compression.state_dict(), other.state_dict()
    for name, residue in expected["residues"].items():
        mine = kept["residues"][name]
        np.testing.assert_allclose(mine, residue, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(kept["recent_norms"][name], expected["recent_norms"][name], 1e-3)
    assert same_on_all_ranks(scaled.variables)
    # Halved four times. Doubled after each three good steps in a row, which came at the end.
    assert float(scaling.loss_scale) == 2.0**20 / 2**4 * 2**2


@pytest.mark.parametrize("kind", [tf.keras.optimizers, tf.keras.optimizers.legacy])
def test_a_scale_that_the_scalecom_does_not_know_is_refused(kind):
    """Residues would have units that change."""
    for compression in (hvd.ScaleCom, scalecom()):
        optimizer = keras.DistributedOptimizer(kind.SGD(0.05), compression=compression)
        with pytest.raises(TypeError, match=r"ScaleCom must know the scale\. .*loss_scale=lambda"):
            LossScaleOptimizer(optimizer)
