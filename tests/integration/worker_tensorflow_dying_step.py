"""Run on every rank by test_tensorflow_elastic.py: a step fails in the middle.

The exchange of one bucket is done by then, and that of another has not begun.
"""

import time

import numpy as np
import pytest
import tensorflow as tf

import scalecom_hvd.tensorflow as hvd


def main() -> None:
    hvd.init()
    model = [tf.Variable(tf.zeros([4000]), name=name) for name in ("first", "second")]
    compressor = hvd.ScaleCom(rate=100)
    dies = tf.Variable(False)

    def late(grad: np.ndarray, dying: np.ndarray) -> np.ndarray:
        if dying:
            time.sleep(1)  # the other bucket is done by then
            raise ArithmeticError("dying")
        return grad

    @tf.custom_gradient
    def second_of(variable):
        return tf.identity(variable), lambda grad: tf.ensure_shape(
            tf.numpy_function(late, [grad, dies], tf.float32), [4000]
        )

    @tf.function
    def step(grads):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model[0] * grads[0]) + tf.reduce_sum(
                second_of(model[1]) * grads[1]
            )
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=2)
        return tape.gradient(loss, model)

    random = np.random.default_rng(hvd.rank())
    everything = [tf.constant(random.standard_normal([2, 4000]), tf.float32) for _ in range(3)]
    step(everything[0])
    assert len(compressor.exchanges()[0].buckets) == 2
    before = compressor.state_dict()
    assert all(residue.any() for residue in before["residues"].values())
    dies.assign(True)
    with pytest.raises(tf.errors.UnknownError, match="dying"):
        step(everything[1])
    after = compressor.state_dict()
    assert after["step"] == before["step"] == 1
    for name, residue in before["residues"].items():
        np.testing.assert_array_equal(after["residues"][name], residue)
    dies.assign(False)
    step(everything[2])
    assert compressor.stats()["step"] == 2


if __name__ == "__main__":
    main()
