"""Keras optimizers whose momentum ScaleCom makes quasi-hyperbolic.

They train a model whose gradients are its inputs. So the reference gives all averages, and NumPy
the steps.
"""

import horovod.tensorflow.keras as stock
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_models import WIDTH, examples, linear, net, output, same_on_all_ranks

import scalecom_hvd.tensorflow
import scalecom_hvd.tensorflow.keras as hvd
from scalecom_hvd.quasi_hyperbolic import kappa_of
from scalecom_hvd.reference import ScaleComReference
from scalecom_hvd.tensorflow import momentum

pytestmark = pytest.mark.usefixtures("nu_is_open")
NEW, LEGACY = tf.keras.optimizers, tf.keras.optimizers.legacy
LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer
STEPS, LR, DECAY = 8, 0.01, 0.02
# Half of this is whole, and half is compressed.
SETTINGS = {"rate": 20, "bits": 32, "min_numel": 100, "dense": ["second/kernel"]}


def image(rank, step):
    """What a rank's model is given at a step. It is the gradient of both kernels."""
    return np.random.default_rng([5, rank, step]).standard_normal((1, WIDTH)).astype(np.float32)


def averages(compression, passes=1):
    """The averages of every exchange, as the reference makes them."""
    shapes = {"first/kernel": (WIDTH, 1), "second/kernel": (WIDTH, 1)}
    shapes |= {"first/bias": (1,), "second/bias": (1,)}
    reference = ScaleComReference(hvd.size(), shapes, compression.config)
    for bucket in compression.exchanges()[0].buckets:
        reference.bucket_of |= dict.fromkeys(bucket.names, bucket.number)

    def gradients(rank, steps):
        kernel = sum(image(rank, step).T for step in steps)
        bias = np.full(1, len(steps), np.float32)
        return {name: kernel if "kernel" in name else bias for name in shapes}

    for first in range(0, STEPS, passes):
        steps = range(first, first + passes)
        yield reference.step([gradients(rank, steps) for rank in range(hvd.size())])


def descend(kind, options, everyone, kappas, passes):
    """{name: (variable, momentum)} after these averages, in float64, from zeros."""
    ended = {}
    for name in everyone[0]:
        x = m = v = np.zeros(everyone[0][name].shape)
        for t, average in enumerate(everyone):
            g, kappa, lr = average[name].astype(np.float64), kappas(name, t), LR
            if "clipnorm" in options:
                g = g * options["clipnorm"] / max(np.linalg.norm(g), options["clipnorm"])
            if options.get("learning_rate") is not None:
                lr = LR / (1 + DECAY * t)
            if kind == "SGD":
                mu = options["momentum"]
                m = mu * m - lr * g
                # Horovod counts every pass as a step.
                size = -lr * (1 - mu ** (passes * (t + 1))) / (1 - mu)
                mixed = (1 - kappa) * m + kappa * size * g
                x = x + (mu * mixed - lr * g if options.get("nesterov") else mixed)
            elif kind == "Lion":
                mixed = (1 - kappa) * m + kappa * (1 - 0.99**t) * g
                x = x - lr * np.sign(0.9 * mixed + 0.1 * g)
                m = 0.99 * m + 0.01 * g
            else:
                x = x * (1 - lr * options.get("weight_decay", 0))
                m, young = 0.9 * m + 0.1 * g, 1 - 0.9 ** (t + 1)
                v = 0.999 * v + 0.001 * g**2
                mixed = ((1 - kappa) * m + kappa * young * g) / young
                x = x - lr * np.sqrt(1 - 0.999 ** (t + 1)) * mixed / (np.sqrt(v) + 1e-7)
        ended[name] = x, m
    return ended


def kappas_of(compression, whole=1, nu=None):
    kappa = kappa_of(compression.config.rate, nu)
    return lambda name, step: kappa if name == "first/kernel" and step >= whole else 0.0


def fit(model, optimizer, eager=False):
    model.compile(optimizer, output, run_eagerly=eager)
    x = np.concatenate([image(hvd.rank(), step) for step in range(STEPS)])
    model.fit(x, np.zeros((STEPS, 1)), batch_size=1, shuffle=False, verbose=0)


def call(model, optimizer, eager):
    """A loop of the user's own, with the optimizer inside of tf.function or not."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)

    if not eager:
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
        step = tf.function(step)
    for number in range(STEPS):
        step(tf.constant(image(hvd.rank(), number)))


def slots(optimizer, model):
    for variable in model.trainable_variables:
        if isinstance(optimizer, LEGACY.Optimizer):
            names = {"momentum", "m"} & set(optimizer.get_slot_names())
            yield optimizer.get_slot(variable, names.pop())
        else:
            yield next(s for s in optimizer.variables if s.name.endswith(f"m/{variable.name}"))


def assert_descended(model, optimizer, compression, kappas, kind="SGD", options=None, passes=1):
    everyone = list(averages(compression, passes))
    options = MOMENTUM if options is None else options
    expected = descend(kind, options, everyone, kappas, passes)
    for variable, slot in zip(model.trainable_variables, slots(optimizer, model), strict=True):
        name = variable.name[:-2]
        x, m = expected[name]
        np.testing.assert_allclose(variable.numpy(), x, rtol=1e-3, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(slot.numpy(), m, rtol=1e-3, atol=1e-5, err_msg=name)
    assert same_on_all_ranks(model.variables)


MOMENTUM, NESTEROV = {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}
SLOWER = {
    "learning_rate": tf.keras.optimizers.schedules.InverseTimeDecay(LR, 1, DECAY),
    "momentum": 0.5,
}
EAGER, TRACED = True, False
OPTIMIZERS = [
    (NEW, "SGD", NESTEROV, {"warmup_steps": 3}, call, EAGER),
    (NEW, "Adam", {"clipnorm": 0.5}, {}, fit, TRACED),
    (NEW, "Lion", {}, {}, fit, EAGER),
    (LEGACY, "SGD", SLOWER, {}, call, TRACED),
    (LEGACY, "Adam", {"clipnorm": 0.5}, {"nu": 0.3}, call, TRACED),
]
MORE = [
    (NEW, "SGD", MOMENTUM, {}, fit, TRACED),
    (NEW, "SGD", SLOWER, {"nu": 0.8}, call, TRACED),
    (NEW, "AdamW", {"weight_decay": 0.1}, {}, call, EAGER),
    (LEGACY, "SGD", NESTEROV, {}, fit, EAGER),
    *((*case, not eager) for *case, eager in OPTIMIZERS),
]


@pytest.mark.parametrize(
    ("kinds", "kind", "options", "settings", "run", "eager"),
    [
        *OPTIMIZERS,
        *(pytest.param(*case, marks=pytest.mark.long) for case in MORE),
    ],
)
def test_a_step_goes_along_the_mix_and_slots_hold_the_momentum(
    kinds, kind, options, settings, run, eager
):
    model, compression = linear(), hvd.ScaleCom(**SETTINGS | settings)
    optimizer = hvd.DistributedOptimizer(
        getattr(kinds, kind)(**{"learning_rate": LR} | options), compression=compression
    )
    assert compression.config.beta == 1
    run(model, optimizer, eager)
    kappas = kappas_of(compression, settings.get("warmup_steps", 1), settings.get("nu"))
    assert_descended(model, optimizer, compression, kappas, kind, options)


@pytest.mark.parametrize(
    "kinds", [NEW, pytest.param(LEGACY, marks=pytest.mark.long)], ids=["new", "legacy"]
)
def test_only_steps_that_are_applied_are_mixed(kinds):
    """Gradients of two passes are added up, or the loss scale skips a step."""
    model, compression = linear(), hvd.ScaleCom(**SETTINGS)
    optimizer = hvd.DistributedOptimizer(
        kinds.SGD(LR, 0.9), compression=compression, backward_passes_per_step=2
    )
    fit(model, optimizer)
    kappas = kappas_of(compression)
    assert_descended(model, optimizer, compression, kappas, passes=2)

    model = linear()
    compression = hvd.ScaleCom(**SETTINGS, loss_scale=lambda: scaled.loss_scale)
    optimizer = hvd.DistributedOptimizer(kinds.SGD(LR, 0.9), compression=compression)
    scaled = LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    fit(model, scaled)
    assert_descended(model, optimizer, compression, kappas)
    model.fit(np.full((1, WIDTH), np.inf, np.float32), np.zeros((1, 1)), verbose=0)
    assert compression.stats()["skipped_steps"] == 1
    assert_descended(model, optimizer, compression, kappas)


@pytest.mark.parametrize(
    "kinds", [NEW, pytest.param(LEGACY, marks=pytest.mark.long)], ids=["new", "legacy"]
)
def test_whole_steps_are_the_stock_optimizer_s_to_the_bit(kinds):
    def ended(library, compression):
        model = linear()
        optimizer = library.DistributedOptimizer(kinds.Adam(LR), compression=compression)
        call(model, optimizer, EAGER)
        return [v.numpy() for v in (*model.variables, *optimizer.variables())]

    expected = ended(stock, stock.Compression.none)
    for settings in ({"rate": 1}, {"warmup_steps": STEPS}):
        found = ended(hvd, hvd.ScaleCom(**SETTINGS | settings))
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, other)


def told_of_momentum(caplog):
    """The optimizers of which the log says that they keep their momentum as it is."""
    told = [r.getMessage().partition(" keeps its momentum as it is") for r in caplog.records]
    return [name for name, says, _ in told if says]


OTHERS = [NEW.RMSprop, NEW.Nadam, LEGACY.Adamax, NEW.SGD, NEW.Adamax, LEGACY.Nadam]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_other_optimizers_and_policies(policy, caplog):
    """RMSprop's momentum is not linear in gradients, so it stays, and the log says so once."""
    momentum._warn_of_unknown.cache_clear()

    def scale():
        return getattr(model.optimizer, "loss_scale", tf.constant(1.0))

    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        for kind in OTHERS:
            inner = kind(1e-3, **({"momentum": 0.5} if kind is NEW.RMSprop else {}))
            model, compression = net(), hvd.ScaleCom(rate=20, bits=32, loss_scale=scale)
            optimizer = hvd.DistributedOptimizer(inner, compression=compression)
            optimizer.jit_compile = True  # Keras does so where there is a GPU
            model.compile(optimizer, "mse")
            losses = model.fit(*examples(hvd.rank()), 8, 4, verbose=0).history["loss"]
            assert losses[-1] < losses[0]
            assert same_on_all_ranks(model.variables)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert told_of_momentum(caplog) == ["RMSprop"]


def test_momentum_that_is_kept_elsewhere_stays(monkeypatch, caplog):
    monkeypatch.setattr(momentum, "_LISTS", ())
    momentum._warn_of_unknown.cache_clear()
    model, compression = linear(), hvd.ScaleCom(**SETTINGS)
    optimizer = hvd.DistributedOptimizer(NEW.SGD(LR, 0.9), compression=compression)
    call(model, optimizer, EAGER)
    assert_descended(model, optimizer, compression, lambda name, step: 0.0)
    assert told_of_momentum(caplog) == ["SGD"]


def keras_optimizer(compression):
    hvd.DistributedOptimizer(NEW.SGD(), compression=compression)


def tape(compression):
    scalecom_hvd.tensorflow.DistributedGradientTape(tf.GradientTape(), compression=compression)


def test_who_takes_it_first_settles_nu_and_beta():
    def settled(compression, *takers):
        for take in takers:
            take(compression)
        return compression.config.nu, compression.config.beta

    assert settled(hvd.ScaleCom(), keras_optimizer) == (None, 1)
    assert settled(hvd.ScaleCom(beta=0.5), keras_optimizer) == (None, 0.5)
    assert settled(hvd.ScaleCom(nu=0.7), keras_optimizer) == (0.7, 1)
    assert settled(hvd.ScaleCom(), tape, keras_optimizer) == (1, 0.2)
    with pytest.raises(ValueError, match="Leave nu out, and make a ScaleCom that"):
        tape(hvd.ScaleCom(nu=0.7))
    with pytest.raises(ValueError, match="Leave nu out, and make a ScaleCom that"):
        settled(hvd.ScaleCom(), keras_optimizer, tape)
    published = hvd.ScaleCom.as_published(rate=400)
    assert settled(published, tape, keras_optimizer) == (1, 0.1)
    config = published.config
    assert (config.rate, config.bits, config.flush) == (400, 32, False)


def test_a_state_settles_what_is_open():
    made, other = hvd.ScaleCom(**SETTINGS), hvd.ScaleCom(**SETTINGS)
    fit(linear(), hvd.DistributedOptimizer(NEW.SGD(LR, 0.9), compression=made))
    state = made.state_dict()
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="Leave nu out"):
        tape(other)
    for takes in (keras_optimizer, tape):
        empty = hvd.ScaleCom(**SETTINGS)
        empty.load_state_dict(hvd.ScaleCom(**SETTINGS).state_dict())
        takes(empty)
        assert empty.config.beta == (0.2 if takes is tape else 1)
    late = hvd.ScaleCom(**SETTINGS)
    tape(late)
    with pytest.raises(ValueError, match=r"beta=1.0 in the state and 0.2 now"):
        late.load_state_dict(state)
