"""Tests of the TensorFlow drop-ins that need no second rank."""

import gc
import inspect
import weakref

import horovod.tensorflow as horovod
import horovod.tensorflow.keras as horovod_keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as hvd_keras
from scalecom_hvd.recent_norms import RecentNorms
from scalecom_hvd.tensorflow.residues import Progress, shares_of
from scalecom_hvd.tensorflow.transport import Transport


@pytest.mark.parametrize(
    ("ours", "theirs"), [(hvd, horovod), (hvd_keras, horovod_keras)], ids=["tensorflow", "keras"]
)
def test_they_are_horovod_and_more(ours, theirs):
    replaced = (
        "DistributedOptimizer",
        "DistributedGradientTape",
        "PartialDistributedGradientTape",
        "elastic",
        "join",
        "keras",
        "load_model",
    )
    for name in dir(theirs):
        if not name.startswith("_"):
            value, mine = getattr(theirs, name), getattr(ours, name)
            assert mine is value or name in replaced, name
            if inspect.isfunction(value):
                assert list(inspect.signature(mine).parameters) == list(
                    inspect.signature(value).parameters
                ), name
    assert {name for name in dir(theirs) if not name.startswith("_")} <= set(ours.__all__)
    namespace = {}
    exec(f"from {ours.__name__} import *", namespace)
    assert {"ScaleComConfig", "DistributedOptimizer", "elastic", "allreduce"} <= namespace.keys()
    assert namespace["ScaleCom"] is hvd.ScaleCom
    assert set(theirs.elastic.__all__) <= set(ours.elastic.__all__) & set(dir(ours.elastic))
    state = "KerasState" if ours is hvd_keras else "TensorFlowState"
    assert issubclass(getattr(ours.elastic, state), getattr(theirs.elastic, state))


def test_one_process_trains_as_without_horovod():
    hvd.init()
    weights, plain = [], tf.keras.optimizers.SGD(0.1)
    ours = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=hvd.ScaleCom)
    for optimizer in (ours, plain):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.layers.Input((100,)), tf.keras.layers.Dense(100)])
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 100)), np.zeros((8, 100)), epochs=3, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)


def test_a_monitor_follows_the_models_optimizer():
    hvd.init()
    monitor, model = hvd_keras.MonitorCallback(), tf.keras.Sequential([tf.keras.layers.Dense(1)])
    for _ in range(2):
        sgd = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=hvd.ScaleCom)
        model.compile(sgd, "mse")
        model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0, callbacks=[monitor])
        assert monitor.monitor._source is model.optimizer.compression


def test_one_process_makes_sparse_gradients_dense():
    hvd.init()
    rows = tf.Variable(tf.zeros((4, 2)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(rows, [1]))
    tape = hvd.DistributedGradientTape(tape, compression=hvd.ScaleCom, sparse_as_dense=True)
    assert tape.gradient(loss, [rows])[0].numpy().tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_settings_of_the_object(monkeypatch):
    monkeypatch.setenv("SCALECOM_RATE", "50")
    assert hvd.ScaleCom().config.rate == 50
    assert hvd.ScaleCom(rate=20).config.rate == 20
    config = hvd.ScaleCom(config=hvd.ScaleComConfig(rate=30), beta=0.1).config
    assert config == hvd.ScaleComConfig(rate=30, bits=4, beta=0.1, nu=1)
    for settings, error, message in (
        ({"rate": {0: 4, 3: 8}}, ValueError, "works only in PyTorch, because a graph has one rate"),
        ({"lookahead": True}, ValueError, "lookahead works only in PyTorch: unset it"),
        ({"ratte": 5}, ValueError, "no setting ratte; did you mean rate"),
        ({"named_parameters": []}, ValueError, "there is no setting named_parameters"),
        ({"loss_scale": 1024}, TypeError, "must be a LossScaleOptimizer or a callable"),
    ):
        with pytest.raises(error, match=message):
            hvd.ScaleCom(**settings)
    hvd.ScaleCom(rate=1)


def test_the_stats_before_training():
    stats = hvd.ScaleCom().stats()
    assert stats.pop("rate") == 1
    names = "step skipped_steps leader bytes_traffic collectives residue_norm"
    assert set(names.split()) < stats.keys()
    assert not any(stats.values())


@pytest.mark.parametrize("times", [4.0, 1.0])
def test_outliers_are_in_the_graph_what_recent_norms_says(times):
    """To the bit, also at powers of two and next to them, where logarithms are rounded."""
    random = np.random.default_rng(0)
    powers = 2.0 ** random.integers(-60, 40, (60, 8))
    norms = np.nextafter(powers, powers * random.integers(0, 3, powers.shape))
    unusual = random.random(norms.shape) < 0.1
    norms[unusual] = random.choice([0.0, np.inf, np.nan], unusual.sum())
    expected, recent = [RecentNorms() for _ in range(8)], tf.zeros((8, 3), tf.float64)
    for row in norms:
        shares, recent = shares_of(tf.constant(row), recent, times)
        pairs = zip(expected, row.tolist(), strict=True)
        assert shares.numpy().tolist() == [own.share(norm, times) for own, norm in pairs]
    noted = [[own.longest, own.count, own.outliers] for own in expected]
    assert recent.numpy().tolist() == noted


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_state_that_is_not_finite_is_refused_and_changes_nothing(value):
    compression = hvd.ScaleCom(rate=20)
    good = compression.state_dict() | {
        "step": 5,
        "residues": {"kernel": np.ones((100, 100), np.float32)},
    }
    compression.load_state_dict(good)
    spoilt = good | {"step": 9, "residues": {"kernel": np.full((100, 100), value, np.float32)}}
    with pytest.raises(ValueError, match="residues of kernel.*not finite.*go on without loading"):
        compression.load_state_dict(spoilt)
    assert compression.state_dict()["step"] == 5
    np.testing.assert_array_equal(compression.state_dict()["residues"]["kernel"], 1)


@pytest.mark.parametrize("norms", [np.ones((2, 2)), np.full((2, 3), np.nan)], ids=str)
def test_norms_that_are_damaged_are_refused_and_change_nothing(norms):
    compression = hvd.ScaleCom(rate=20)
    progress = compression._streams[0].progress["exchange"] = Progress("exchange")

    def state(step, norms):
        exchanges = {"exchange": {"step": step, "norms": norms}}
        return compression.state_dict() | {"step": step, "exchanges": exchanges}

    compression.load_state_dict(state(5, np.ones((2, 3))))
    with pytest.raises(ValueError, match="the state is damaged: its norms are"):
        compression.load_state_dict(state(6, norms))
    with pytest.raises(ValueError, match="the state is damaged: its norms are"):
        progress.take_up(state(6, norms)["exchanges"]["exchange"])
    assert progress.as_dict()["step"] == 5


def variables(*sizes, dtype=tf.float32):
    return [tf.Variable(tf.zeros(n, dtype), name=f"v{n}") for n in sizes]


@pytest.fixture
def alone(monkeypatch):
    """A run whose other ranks are yet to come: this one exchanges its gradients with itself.

    Return a step: it takes a ScaleCom, gradients of its `variables`, and arguments of the tape.
    """
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def step(compression, *gradients, **arguments):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * g) for v, g in zip(step.variables, gradients, strict=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression, **arguments)
        return tape.gradient(loss, step.variables)

    step.variables = variables(3000, 50)
    return step


@pytest.mark.parametrize("scale", [None, 8.0])
def test_what_waits_is_compared_with_gradients_in_unscaled_units(alone, scale):
    given = {} if scale is None else {"loss_scale": lambda: scale}
    compression = hvd.ScaleCom(rate=20, beta=0.5, **given)
    alone(compression, tf.range(3000.0) * (scale or 1), tf.ones(50))
    stats, norm = compression.stats(), np.linalg.norm(np.arange(3000.0))
    assert stats["residue_ratio"] == pytest.approx(stats["residue_norm"] / 0.5 / norm, rel=1e-5)


def test_residues_that_keep_growing_are_reported_once(alone, capfd, caplog, monkeypatch):
    """A gradient never changes, so what waits grows until all elements have been sent."""
    monkeypatch.setattr("scalecom_hvd.tensorflow.exchange.LOOK_EVERY", 10)
    compression = hvd.ScaleCom(rate=64, total_steps=45)
    for _ in range(45):
        alone(compression, tf.ones(3000), tf.ones(50))
    assert caplog.text.count("each element is sent") == 1
    assert capfd.readouterr().err.count("residues keep growing") == 1


@pytest.mark.parametrize(
    ("dtype", "bits", "compressed"),
    [
        (tf.float32, 32, [4 * 51, 4 * 150, 150, 2]),
        # Eight integers to a word, with a scale and a count. What is dense has another bucket.
        (tf.float16, 4, [4 * 51 + 4, 4 * 19, 150 + 4, 3]),
    ],
    ids=str,
)
def test_the_stats_of_a_warm_up(alone, dtype, bits, compressed):
    """What is sent whole is sent in float32, float16 too."""
    alone.variables = variables(3000, 50, dtype=dtype)
    compression, seen = hvd.ScaleCom(rate=20, bits=bits, warmup_steps=2), []
    for _ in range(3):
        alone(compression, tf.ones(3000, dtype), tf.ones(50, dtype))
        stats, of = compression.stats(), ("dense", "values", "offsets")
        seen.append([*(stats[f"bytes_{what}"] for what in of), stats["collectives"]])
    assert seen == [[4 * 3050, 0, 0, 2]] * 2 + [compressed]


def test_two_models_of_one_scalecom(alone):
    """A glob may match the first of them alone. stats() adds up what both send."""
    compression = hvd.ScaleCom(rate=20, bits=32, dense=["v60"])
    for sizes in ((3000, 60), (4000,)):
        alone.variables = variables(*sizes)
        alone(compression, *map(tf.ones, sizes))
    assert compression.state_dict()["residues"].keys() == {"v3000", "v4000"}
    stats = compression.stats()
    assert (stats["step"], stats["rate"], stats["collectives"]) == (1, 20, 4)
    sent = [stats[f"bytes_{what}"] for what in ("dense", "values", "offsets")]
    assert sent == [4 * 62, 4 * 350, 350]


def test_a_state_of_more_ranks_is_noticed_once(alone, caplog):
    compression, resumed = hvd.ScaleCom(rate=20), hvd.ScaleCom(rate=20)

    def ranks(of):
        (exchange,) = of.state_dict()["exchanges"].values()
        return exchange["ranks"]

    alone(compression, tf.ones(3000), tf.ones(50))
    state = compression.state_dict()
    (label,) = state["exchanges"]
    state["exchanges"] = {label: state["exchanges"][label] | {"ranks": 3}}
    resumed.load_state_dict(state)
    alone(resumed, tf.ones(3000), tf.ones(50))
    assert "the state was saved by 3 ranks, but there are 1 now" in caplog.text
    assert ranks(resumed) == 1
    resumed.load_state_dict(state)
    assert ranks(resumed) == 3
    hvd.elastic.TensorFlowState(alone.variables, batch=0).reset()  # ranks meet again
    assert ranks(resumed) == 1


def test_a_load_sets_a_run_back(alone):
    """It does so for every series of gradients. Before the first step, there was nothing."""
    compression = hvd.ScaleCom(rate=20)
    before = compression.state_dict()

    def step(number):
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(v * v * number + v) for v in alone.variables]
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for sources in (alone.variables[:1], alone.variables):
            tape.gradient(losses, sources)

    step(1)
    saved = compression.state_dict()
    assert saved["residues"].keys() == {"v3000", "v3000#1"}
    step(2)
    compression.load_state_dict(saved)
    np.testing.assert_equal(compression.state_dict(), saved)
    compression.load_state_dict(before)
    now = compression.state_dict()
    assert now["step"] == compression.stats()["residue_norm"] == 0
    assert set(map(tuple, now["recent_norms"].values())) == {(0, 0)}


def test_a_resumed_run_with_another_variable(alone):
    """What it sends whole is no part of the state. It goes on at the step of the others."""
    compression, resumed = hvd.ScaleCom(rate=20), hvd.ScaleCom(rate=20)
    alone(compression, tf.ones(3000), tf.ones(50))
    resumed.load_state_dict(compression.state_dict())
    alone.variables = variables(3000, 60)
    alone(resumed, tf.ones(3000), tf.ones(60))
    assert resumed.stats()["step"] == 2


def test_a_tape_with_other_arguments(alone):
    """They hold from then on, with the residues and the step that exist."""
    compression = hvd.ScaleCom(rate=20, bits=32)
    for groups, buckets in ((None, 1), (2, 2)):
        alone(compression, tf.ones(3000), tf.ones(50), groups=groups)
        assert len(compression.exchanges()[0].buckets) == buckets
    assert compression.stats()["step"] == 2


def test_a_sync_keeps_the_residues_that_a_restore_goes_back_to(alone):
    compression = hvd.ScaleCom(rate=20)
    state = hvd.elastic.TensorFlowState(alone.variables, batch=0)
    alone(compression, tf.range(3000.0), tf.ones(50))
    state.sync()
    kept = compression.state_dict()
    alone(compression, tf.ones(3000), tf.ones(50))
    state.restore()
    found = compression.state_dict()
    assert found["step"] == kept["step"] == 1
    np.testing.assert_array_equal(found["residues"]["v3000"], kept["residues"]["v3000"])


def test_a_worker_that_is_lost_while_ranks_meet(alone, monkeypatch):
    """hvd.elastic.run survives it. When Horovod runs again, ranks meet again."""
    state = hvd.elastic.TensorFlowState(alone.variables, batch=0)

    def fail(*_):
        raise tf.errors.UnknownError(None, None, message)

    with monkeypatch.context() as patched:
        patched.setattr(Transport, "gather_objects", fail)
        message = "HorovodAllgather has failed"
        state.reset()
        with pytest.raises(HorovodInternalError):
            state.sync()
        message = "something else"
        with pytest.raises(tf.errors.UnknownError, match=message):
            state.sync()
    state.sync()


@pytest.mark.parametrize(("traced", "steps"), [(False, 2), (True, 1)])
def test_a_second_training_of_the_same_variables(alone, traced, steps, caplog):
    """The old ScaleCom is gone, but it was not made anew in every step."""
    first = hvd.ScaleCom(rate=20)
    run = tf.function(alone, autograph=False) if traced else alone
    for _ in range(steps):
        run(first, tf.ones(3000), tf.ones(50))
    gone = weakref.ref(first)
    del first, run
    gc.collect()
    assert gone() is None
    alone(hvd.ScaleCom(rate=20), tf.ones(3000), tf.ones(50))
    assert "a new ScaleCom serves this tape's variables" in caplog.text


def test_a_run_that_is_too_short_for_its_rate(alone, caplog):
    alone(hvd.ScaleCom(rate=20, total_steps=10), tf.ones(3000), tf.ones(50))
    assert "each element is sent 0.5 times" in caplog.text


def test_a_variable_whose_shape_is_not_known(alone):
    alone.variables = [tf.Variable(tf.zeros(9), shape=tf.TensorShape([None]), name="open")]
    with pytest.raises(TypeError, match="open has the shape .* which must be known"):
        alone(hvd.ScaleCom(), tf.ones(9))


@pytest.mark.parametrize("face", [hvd, hvd_keras], ids=["tensorflow", "keras"])
def test_what_is_no_optimizer_or_no_compression_is_refused_by_one_process_too(face):
    with pytest.raises(TypeError, match="compression must be hvd.ScaleCom.*not 'scalecom'"):
        face.DistributedOptimizer(tf.keras.optimizers.SGD(), compression="scalecom")
    with pytest.raises(TypeError, match="compression must be hvd.ScaleCom"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression="scalecom")
    with pytest.raises(TypeError, match="of Keras and TensorFlow, not builtins.list: import hvd"):
        face.DistributedOptimizer([], compression=hvd.ScaleCom)
    with pytest.raises(
        AttributeError, match="has no LocalTopK, because TensorFlow has only ScaleCom"
    ):
        _ = face.LocalTopK
    with pytest.raises(AttributeError, match="has no attribute 'LocalTopKK'"):
        _ = face.LocalTopKK


def test_a_callback_finds_the_scalecom_inside_of_a_loss_scale():
    hvd.init()
    compression = hvd.ScaleCom(loss_scale=lambda: model.optimizer.loss_scale)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(), compression=compression)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(tf.keras.mixed_precision.LossScaleOptimizer(optimizer), "mse")
    callback = hvd_keras.MonitorCallback(every=1)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[callback])
    assert callback.monitor.line == "0 MB, rate 1"


def test_variables_have_names_of_their_own():
    """This includes a variable named like the second variable of another name would be."""
    compression = hvd.ScaleCom(rate=20)
    names = ("w", "w", "w.1", "w", "v.1", "v")
    variables = [tf.Variable(tf.zeros(3), name=name) for name in names]
    found = [compression._name_of(variable) for variable in variables]
    assert len(set(found)) == len(names), found
    assert found[0] == "w"
    assert found == [compression._name_of(variable) for variable in variables]
