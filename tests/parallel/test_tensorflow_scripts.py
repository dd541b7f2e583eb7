"""What ordinary scripts do around tapes and optimizers, besides training.

It works as with stock Horovod, or is refused.
"""

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from made_up import EVERYTHING, SHAPES, gradients
from tensorflow_models import same_on_all_ranks, scalecom
from tensorflow_parity import variables

import scalecom_hvd.tensorflow as hvd


def assert_trains_like_stock_horovod(train):
    """train(library, compression) -> the weights after some steps."""
    mine = train(hvd, scalecom(**EVERYTHING))
    np.testing.assert_allclose(mine, train(stock, stock.Compression.none), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.long), True])
def test_gradients_asked_for_while_the_tape_records(traced):
    """A persistent tape then records the exchange too."""

    def train(library, compression):
        w = variables(SHAPES)["first"]

        def step(grad):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_sum(w * grad) + tf.reduce_sum(w * w)
                distributed = library.DistributedGradientTape(tape, compression=compression)
                w.assign_sub(0.1 * distributed.gradient(loss, [w])[0])

        step = tf.function(step, autograph=False) if traced else step
        for number in range(3):
            step(tf.constant(gradients(SHAPES, hvd.rank(), number)["first"]))
        assert same_on_all_ranks([w])
        return w.numpy()

    assert_trains_like_stock_horovod(train)


@pytest.mark.parametrize("traced", [False, True])
def test_derivatives_of_averages_are_refused(traced):
    """Averages have no derivatives. To leave the derivatives out would train something else."""
    w, compression = variables(SHAPES)["first"], scalecom()

    def step(grad):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(w * w * grad)
            inner = hvd.DistributedGradientTape(inner, compression=compression)
            loss += tf.reduce_sum(inner.gradient(loss, [w])[0] ** 2)
        return outer.gradient(loss, w)

    step = tf.function(step, autograph=False) if traced else step
    with pytest.raises(LookupError, match=r"inner gradient with a plain tf.GradientTape"):
        step(tf.constant(gradients(SHAPES, hvd.rank(), 0)["first"]))


def test_a_training_step_that_is_saved_goes_on(tmp_path):
    """The ScaleCom, and so its residues, are a part of what is saved."""

    def train(library, compression):
        module = tf.Module()
        module.w = tf.Variable(tf.zeros(SHAPES["first"]), name="w")
        if compression is not stock.Compression.none:
            module.compression = compression

        @tf.function(input_signature=[tf.TensorSpec(SHAPES["first"])], autograph=False)
        def step(grad):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(module.w * grad)
            tape = library.DistributedGradientTape(tape, compression=compression)
            module.w.assign_sub(0.1 * tape.gradient(loss, [module.w])[0])

        module.step = step
        step(gradients(SHAPES, hvd.rank(), 0)["first"])
        tf.saved_model.save(module, str(tmp_path))
        loaded = tf.saved_model.load(str(tmp_path))
        for number in range(1, 4):
            loaded.step(gradients(SHAPES, hvd.rank(), number)["first"])
        assert same_on_all_ranks([loaded.w])
        return loaded.w.numpy()

    assert_trains_like_stock_horovod(train)


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.long), True])
def test_steps_in_which_nothing_that_is_compressed_has_a_gradient(traced):
    model, compression = variables(SHAPES), scalecom()

    def step(names):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.constant(0.0), *(tf.reduce_sum(model[name]) for name in names)])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, list(model.values()))

    step = tf.function(step, autograph=False) if traced else step
    for names in ((), ("bias",), tuple(SHAPES)):
        given = dict(zip(model, step(names), strict=True))
        assert {name for name, average in given.items() if average is not None} == set(names)
    np.testing.assert_array_equal(given["bias"].numpy(), 1)
