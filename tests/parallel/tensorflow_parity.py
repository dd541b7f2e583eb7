"""Run TensorFlow's exchange on all ranks, and compare it step by step with n simulated workers."""

import numpy as np
import tensorflow as tf
from made_up import ODD_SHAPES, gradients
from parity_cases import assert_step_is_the_oracles

import scalecom_hvd.tensorflow as hvd
from scalecom_hvd.reference import ScaleComReference

# To trace an exchange of all of ODD_SHAPES takes long. test_kernels.py has all sizes.
OTHERS = "one", "n63", "n64", "n6399", "n6400", "conv"
SOME_SHAPES = {name: shape for name, shape in ODD_SHAPES.items() if name not in OTHERS}


def variables(shapes=ODD_SHAPES, dtype=np.float32) -> dict[str, tf.Variable]:
    return {name: tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in shapes.items()}


class Step:
    """A training step whose gradients are given: `step(grads)` returns the averaged ones.

    It is traced, or eager.
    """

    def __init__(
        self, model: dict[str, tf.Variable], compression, traced=True, **arguments
    ) -> None:
        self.model = model
        self.compression = compression
        self.arguments = arguments
        self._run = tf.function(self._gradient, autograph=False) if traced else self._gradient

    def _gradient(self, grads):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(tf.cast(self.model[name] * grad, tf.float64))
                    for name, grad in grads.items()
                ]
            )
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self.arguments)
        return tape.gradient(loss, list(self.model.values()))

    def __call__(self, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        grads = {name: tf.constant(grad) for name, grad in grads.items()}
        averages = self._run(grads)
        return {
            name: average if average is None else average.numpy()
            for name, average in zip(self.model, averages, strict=True)
        }


def run_against_reference(
    dtype=np.float32,
    steps=12,
    shapes=SOME_SHAPES,
    tolerance=1e-5,
    traced=True,
    outliers=(),
    **settings,
):
    """Feed the same made-up gradients to real ranks and to the oracle.

    Every average, selection and residue must agree.

    outliers: pairs of a rank and a step whose gradients are 1000 times as long.
    """
    settings.setdefault("min_numel", 2)
    n, rank = hvd.size(), hvd.rank()
    compressor = hvd.ScaleCom(**settings)
    step = Step(variables(shapes, dtype), compressor, traced)
    reference = ScaleComReference(n, shapes, compressor.config)
    for number in range(steps):
        everyone = [gradients(shapes, r, number, dtype) for r in range(n)]
        for own in (everyone[r] for r, at in outliers if at == number):
            own |= {name: grad * dtype(1000) for name, grad in own.items()}
        got = step(everyone[rank])
        if number == 0:
            buckets = compressor.exchanges()[0].buckets
            reference.bucket_of = {
                name: bucket.number for bucket in buckets for name in bucket.names
            }
        averages = reference.step(everyone)
        assert {own.dtype for own in got.values()} == {np.dtype(dtype)}
        residues = compressor.state_dict()["residues"]
        assert_step_is_the_oracles(reference, rank, averages, got, residues, tolerance, number)
    assert compressor.stats()["step"] == steps
    return compressor
