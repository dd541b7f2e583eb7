"""Every rank refuses what cannot work, with an error that says what to do instead."""

import gc

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest
import tensorflow as tf
from made_up import gradients
from tensorflow_models import examples, net
from tensorflow_parity import Step, variables

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as keras

SHAPES = {"first": (60, 50), "second": (5000,)}


def fit(model, compression, library=keras, **options):
    optimizer = library.DistributedOptimizer(tf.keras.optimizers.SGD(), compression=compression)
    model.compile(optimizer, "mse", **options)
    model.fit(*examples(hvd.rank()), 8, verbose=0)


def step(compression, shapes=SHAPES, grads=None, traced=False, **arguments):
    run = Step(variables(shapes), compression, traced, **arguments)
    return run(gradients(shapes, hvd.rank(), 0) if grads is None else grads)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (hvd.DistributedGradientTape, tf.GradientTape()),
        (hvd.DistributedOptimizer, tf.keras.optimizers.SGD()),
        (keras.DistributedOptimizer, tf.keras.optimizers.SGD()),
    ],
)
def test_adasum_and_other_operations(make, given):
    says = r"Use op=hvd.Average \(the default\), or Adasum without compression"
    with pytest.raises(ValueError, match=says):
        make(given, compression=hvd.ScaleCom, op=hvd.Adasum)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match=r"works with op=hvd.Average and op=hvd.Sum"):
            make(given, compression=hvd.ScaleCom(), op=op)


def test_options_that_horovod_refuses():
    for options, says in (
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "factor not supported"),
        ({"groups": -1}, "groups should be"),
    ):
        with pytest.raises(ValueError, match=says):
            hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.ScaleCom(), **options)


def test_tensorflow_1():
    says = r"does not work with TensorFlow 1's graphs.*Train eagerly or in a tf.function"
    v1, made = tf.compat.v1.train.GradientDescentOptimizer(0.1), hvd.ScaleCom()
    for library in (hvd, keras):
        for compression in (hvd.ScaleCom, made):
            with pytest.raises(TypeError, match=says):
                library.DistributedOptimizer(v1, compression=compression)

    def average(compression):
        weights = tf.Variable(tf.zeros([3000]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights)
        hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [weights])

    def update():
        weights = tf.Variable(tf.zeros([3000]))
        optimizer.minimize(lambda: tf.reduce_sum(weights), [weights])

    sgd = tf.keras.optimizers.legacy.SGD
    optimizer = hvd.DistributedOptimizer(sgd(0.1), compression=made)
    with tf.Graph().as_default():
        for use in (
            hvd.ScaleCom,
            lambda: hvd.DistributedOptimizer(sgd(0.1), compression=hvd.ScaleCom),
            lambda: average(hvd.ScaleCom()),
            lambda: average(made),
            update,
        ):
            with pytest.raises(RuntimeError, match=says):
                use()


def test_complex_variables():
    wave = tf.Variable(tf.zeros([3000], tf.complex64), name="wave")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.math.real(wave))
    with pytest.raises(TypeError, match="wave has dtype complex64.*Train it as two real variables"):
        hvd.DistributedGradientTape(tape, compression=hvd.ScaleCom()).gradient(loss, [wave])


@pytest.mark.parametrize("dtype", [tf.int64, tf.bool])
def test_a_counter_has_no_gradient_and_is_left_out(dtype):
    weight, counter = tf.Variable(tf.ones(3000)), tf.Variable(tf.zeros([], dtype))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.ScaleCom(min_numel=1))
    average, nothing = tape.gradient(loss, [weight, counter])
    assert nothing is None
    assert average.shape == weight.shape


def test_a_loss_scale_inside():
    """Horovod itself fails there without saying why."""
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"takes 1 positional argument but 2 were given"):
        stock_keras.DistributedOptimizer(optimizer)
    for library in (hvd, keras):
        with pytest.raises(
            TypeError, match="Wrap its inner optimizer, and give ScaleCom the scale"
        ):
            library.DistributedOptimizer(optimizer, compression=hvd.ScaleCom)


def test_settings_that_fit_no_variable():
    with pytest.raises(ValueError, match="dense names 'frist', which matches no"):
        step(hvd.ScaleCom(dense=["frist"]))


def test_join():
    compression = hvd.ScaleCom()
    step(compression)
    with pytest.raises(RuntimeError, match="Give every rank the same number of steps"):
        hvd.join()
    del compression
    gc.collect()


@pytest.mark.parametrize("compression", [hvd.ScaleCom, hvd.ScaleCom()], ids=["class", "object"])
def test_horovods_own_functions(compression):
    v = tf.Variable(tf.zeros([3000]), name="v")

    def tape():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v)
        stock.DistributedGradientTape(tape, compression=compression).gradient(loss, [v])

    def optimizer():
        made = stock.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), compression=compression
        )
        made.minimize(lambda: tf.reduce_sum(v), var_list=[v])

    for call in (
        tape,
        optimizer,
        lambda: fit(net(), compression, stock_keras, run_eagerly=True),
        lambda: stock.allreduce(tf.zeros(3), compression=compression),
    ):
        with pytest.raises(TypeError, match=r"import scalecom_hvd.tensorflow as hvd"):
            call()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda one: step(hvd.ScaleCom(rate=20 + 20 * one), traced=True),
            "settings differ between ranks.*rate is 20.0 on rank 0 and 40.0 on rank 1",
        ),
        (
            lambda one: step(hvd.ScaleCom(), sparse_as_dense=one),
            "settings differ between ranks.*sparse_as_dense is False on rank 0 and True on rank 1",
        ),
        (
            lambda one: step(hvd.ScaleCom(), {**SHAPES, "second": (5000 + one,)}),
            r"tensors differ between ranks.*second is \[\[5000\].*\[\[5001\]",
        ),
        (
            lambda one: step(hvd.ScaleCom(), groups=1 + one),
            "groups differ between ranks",
        ),
        (
            lambda one: fit(net(), hvd.ScaleCom(beta=0.5 if one else 1)),
            "beta is 1.0 on rank 0 and 0.5 on rank 1",
        ),
    ],
    ids=["rate", "sparse_as_dense", "shapes", "groups", "beta in a fit"],
)
def test_one_rank_with_other_settings_or_another_model(make, says):
    with pytest.raises(RuntimeError, match=says):
        make(hvd.rank() == 1)


def test_layers_that_keras_numbers_otherwise_on_one_rank():
    tf.keras.backend.clear_session()
    if hvd.rank() == 1:
        tf.keras.layers.Dense(1)  # a layer of another model
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])
    with pytest.raises(
        RuntimeError,
        match=r"tensors differ between ranks.*dense/bias is .* on rank 0 and missing on rank 1.*"
        r'Dense\(10, name="head"\).*clear_session\(\)',
    ):
        fit(model, hvd.ScaleCom)


def test_a_scalecom_made_anew_in_every_step(caplog):
    model = variables(SHAPES)
    grads = gradients(SHAPES, hvd.rank(), 0)
    Step(model, hvd.ScaleCom(), False)(grads)
    gc.collect()
    with pytest.raises(ValueError, match="make the ScaleCom once, outside of the training step"):
        Step(model, hvd.ScaleCom(), False)(grads)
    kept = hvd.ScaleCom()
    again = variables(SHAPES)
    Step(again, kept, False)(grads)
    Step(again, hvd.ScaleCom(), False)(grads)
    assert "make the ScaleCom once" in caplog.text


def test_a_scalecom_made_in_a_traced_function():
    """A rank that traces the function again, for a smaller batch, would wait for the others."""
    run = tf.function(lambda grads: step(hvd.ScaleCom(), grads=grads), autograph=False)
    with pytest.raises(ValueError, match="make the ScaleCom once, outside of the training step"):
        run(gradients(SHAPES, hvd.rank(), 0))


def test_a_loss_scale_that_a_traced_function_would_keep_for_ever():
    says = r"loss_scale must give a tf.Tensor or tf.Variable.*a number \(1024.0\)"
    with pytest.raises(TypeError, match=says):
        step(hvd.ScaleCom(loss_scale=lambda: 1024.0), traced=True)
    step(hvd.ScaleCom(loss_scale=lambda: 1024.0))


@pytest.mark.parametrize(
    ("kernel", "settings"),
    [("tensorflow", {"rate": 20}), ("native", {"rate": 16})],
    ids=str,
)
def test_ranks_at_different_steps(kernel, settings, monkeypatch):
    """If there is no leader, or several, an error is raised. A broadcast would hang."""
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    compression = hvd.ScaleCom(**settings)
    run = Step(variables(SHAPES), compression)
    run(gradients(SHAPES, hvd.rank(), 0))
    state = compression.state_dict()
    exchanges = {
        label: exchange | {"step": 1 + hvd.rank()} for label, exchange in state["exchanges"].items()
    }
    compression.load_state_dict(state | {"exchanges": exchanges})
    with pytest.raises(tf.errors.InvalidArgumentError, match="exactly one leader"):
        run(gradients(SHAPES, hvd.rank(), 1))


def test_other_compressions_are_horovods_own():
    v, v1 = tf.Variable(tf.zeros([3000]), name="v"), tf.compat.v1.train.GradientDescentOptimizer
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        optimizer = keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), compression=compression
        )
        assert not hasattr(optimizer, "compression")
        assert "scalecom" not in optimizer._allreduce_grads.__module__
        legacy = hvd.DistributedOptimizer(v1(1.0), compression=compression)
        assert type(legacy) is type(stock.DistributedOptimizer(v1(1.0)))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * (hvd.rank() + 1)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        np.testing.assert_allclose(tape.gradient(loss, [v])[0].numpy(), (hvd.size() + 1) / 2)
