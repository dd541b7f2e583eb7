"""Keras's drop-in DistributedOptimizer.

Tests model.fit, Horovod's options, and what holds with all options.
"""

import horovod.tensorflow.keras as stock
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_models import (
    FEATURES,
    examples,
    inputs,
    linear,
    net,
    output,
    same_on_all_ranks,
    total_residue,
)

import scalecom_hvd.tensorflow
import scalecom_hvd.tensorflow.keras as hvd

OPTIMIZERS = [
    lambda: tf.keras.optimizers.SGD(0.05, momentum=0.5),
    lambda: tf.keras.optimizers.Adam(0.01),
    lambda: tf.keras.optimizers.legacy.SGD(0.05, momentum=0.5),
    lambda: tf.keras.optimizers.legacy.Adam(0.01),
]
NAMES = ["SGD", "Adam", "legacy SGD", "legacy Adam"]
MODES = [{}, {"lookahead": True}, {"leader": "staggered", "bucket_bytes": 10_000}]


def scalecom(**settings):
    return hvd.ScaleCom(**({"rate": 20, "min_numel": 100} | settings))


def fit(
    model, optimizer, data=None, epochs=1, batch_size=8, validation_data=None, **compile_options
):
    model.compile(optimizer, "mse", **compile_options)
    x, y = examples(hvd.rank()) if data is None else data
    return model.fit(
        x, y, batch_size, epochs, verbose=0, shuffle=False, validation_data=validation_data
    ).history


def assert_same_weights(ours, theirs, tolerance=1e-5):
    for mine, other in zip(ours.trainable_variables, theirs.trainable_variables, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), other.numpy(), rtol=tolerance, atol=tolerance, err_msg=mine.name
        )


@pytest.mark.parametrize("make", OPTIMIZERS[1:3], ids=NAMES[1:3])
def test_rate_one_equals_stock_horovod(make):
    ours, theirs = net(), net()
    fit(ours, hvd.DistributedOptimizer(make(), compression=hvd.ScaleCom(rate=1)))
    fit(theirs, stock.DistributedOptimizer(make()))
    assert_same_weights(ours, theirs)
    assert same_on_all_ranks(ours.variables)


@pytest.mark.parametrize(
    ("options", "compile_options"),
    [
        pytest.param({}, {"run_eagerly": True}, marks=pytest.mark.long),
        pytest.param(
            {"gradient_predivide_factor": 2.0}, {"steps_per_execution": 3}, marks=pytest.mark.long
        ),
        (
            {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
            {"steps_per_execution": 2},
        ),
    ],
    ids=str,
)
def test_rate_one_equals_stock_horovod_with_options(options, compile_options):
    ours, theirs = net(), net()
    fit(
        ours,
        hvd.DistributedOptimizer(OPTIMIZERS[0](), compression=hvd.ScaleCom(rate=1), **options),
        **compile_options,
    )
    fit(theirs, stock.DistributedOptimizer(OPTIMIZERS[0](), **options), **compile_options)
    assert_same_weights(ours, theirs)
    assert same_on_all_ranks(ours.variables)


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (OPTIMIZERS[1], MODES[1]),
        pytest.param(OPTIMIZERS[2], MODES[2], marks=pytest.mark.long),
    ],
    ids=NAMES[1:3],
)
def test_several_fits_with_validation(make, mode):
    model = net()
    optimizer = hvd.DistributedOptimizer(
        make(), compression=scalecom(rate=5, warmup_steps=2, **mode)
    )
    history = fit(model, optimizer, epochs=2, validation_data=examples(99))["val_loss"]
    x, y = examples(hvd.rank())
    for _ in range(2):
        history += model.fit(x, y, 8, 3, verbose=0, validation_data=examples(99)).history[
            "val_loss"
        ]
    assert history[-1] < 0.7 * history[0]
    assert same_on_all_ranks(model.variables)
    assert optimizer.compression.stats()["step"] == 48


@pytest.mark.parametrize(
    ("options", "compile_options", "mode"),
    [
        ({}, {"steps_per_execution": 4}, {"lookahead": True}),
        ({"op": scalecom_hvd.tensorflow.Sum}, {}, {}),
        ({"gradient_predivide_factor": 2.0, "groups": 2}, {}, {}),
        ({"backward_passes_per_step": 2}, {}, {"lookahead": True}),
        pytest.param(
            {"backward_passes_per_step": 3}, {"run_eagerly": True}, {}, marks=pytest.mark.long
        ),
        pytest.param(
            {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"},
            {},
            {"leader": "staggered", "bucket_bytes": 10_000},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_nothing_is_lost(options, compile_options, mode):
    """The sum of everything sent, plus what waits, equals the sum of gradients."""
    model = linear()
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), compression=scalecom(**mode), **options
    )
    model.compile(optimizer, output, **compile_options)
    for _ in range(2):
        model.fit(*inputs(hvd.rank()), batch_size=4, verbose=0, shuffle=False)
    divisor = 1 if options.get("op") == scalecom_hvd.tensorflow.Sum else hvd.size()
    # Six batches, two epochs.
    came_in = sum(12 * inputs(rank)[0].mean(0, dtype=np.float64) for rank in range(hvd.size()))[
        :, None
    ]
    for variable in model.trainable_variables[::2]:
        left = total_residue(optimizer.compression, variable.name[:-2])
        assert np.abs(left).sum() > 0
        np.testing.assert_allclose(
            -variable.numpy() * divisor + left, came_in, rtol=1e-4, atol=1e-3
        )
    np.testing.assert_allclose(
        model.trainable_variables[1].numpy(), -12 * hvd.size() / divisor, rtol=1e-6
    )
    assert same_on_all_ranks(model.variables)


def test_a_smaller_last_batch_on_one_rank_only():
    """That rank traces the step again for this batch, while the other ranks go on."""
    model = linear()
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), compression=scalecom(lookahead=True)
    )
    model.compile(optimizer, output)
    counts = [22 if rank == hvd.size() - 1 else 24 for rank in range(hvd.size())]
    model.fit(
        *inputs(hvd.rank(), counts[hvd.rank()]), batch_size=4, epochs=2, verbose=0, shuffle=False
    )
    came_in = 0
    for rank, count in enumerate(counts):
        x = inputs(rank, count)[0]
        came_in = came_in + 2 * sum(x[i : i + 4].mean(0) for i in range(0, count, 4))
    left = total_residue(optimizer.compression, "first/kernel")
    np.testing.assert_allclose(
        -model.trainable_variables[0].numpy() * hvd.size() + left,
        came_in[:, None],
        rtol=1e-4,
        atol=1e-3,
    )
    assert same_on_all_ranks(model.variables)
    assert optimizer.compression.stats()["step"] == 12


def test_a_clone_of_the_optimizer():
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), compression=scalecom())
    theirs = stock.DistributedOptimizer(tf.keras.optimizers.Adam(0.01))
    assert optimizer.get_config() == theirs.get_config()
    assert optimizer.get_config().keys() == tf.keras.optimizers.Adam(0.01).get_config().keys()
    assert type(optimizer).__name__ == "Adam"
    clone = optimizer.from_config(optimizer.get_config())
    assert clone.compression is optimizer.compression
    model = net()
    fit(model, clone)
    assert same_on_all_ranks(model.variables)
    assert clone.compression.stats()["rate"] > 10


@pytest.mark.long
def test_several_models_and_optimizers_in_one_process():
    models = [net(prefix="one_"), net(prefix="two_")]
    shared = scalecom()
    optimizers = [
        hvd.DistributedOptimizer(make(), compression=shared)
        for make in (OPTIMIZERS[0], OPTIMIZERS[3])
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        fit(model, optimizer)
    models.append(net())
    fit(
        models[2],
        hvd.DistributedOptimizer(OPTIMIZERS[1](), compression=scalecom(rate=50, lookahead=True)),
    )
    for model in models:
        model.fit(*examples(hvd.rank()), 8, verbose=0)
    assert all(same_on_all_ranks(model.variables) for model in models)
    assert len(shared.exchanges()) == 2
    assert {name.partition("_")[0] for name in shared.state_dict()["residues"]} == {"one", "two"}


def test_horovod_tensorflow_given_a_keras_optimizer():
    """Horovod itself ignores op and groups there."""
    model = linear()
    optimizer = scalecom_hvd.tensorflow.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0),
        compression=scalecom(rate=1),
        op=scalecom_hvd.tensorflow.Sum,
        groups=2,
    )
    model.compile(optimizer, output)
    model.fit(*inputs(hvd.rank()), batch_size=24, verbose=0)
    came_in = sum(inputs(rank)[0].mean(0) for rank in range(hvd.size()))[:, None]
    np.testing.assert_allclose(-model.trainable_variables[0].numpy(), came_in, rtol=1e-4, atol=1e-5)
    assert len(optimizer.compression.exchanges()[0].buckets) == 2


def test_groups_of_variables():
    model = net()
    groups = [[model.layers[0].kernel, model.layers[2].bias], [model.layers[1].kernel]]
    # Integers of few bits have buckets of their own.
    compression = scalecom(bits=32)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[0](), compression=compression, groups=groups)
    fit(model, optimizer)
    assert [bucket.names for bucket in optimizer.compression.exchanges()[0].buckets] == [
        ["first/kernel", "head/bias"],
        ["second/kernel"],
        ["first/bias"],
        ["second/bias"],
        ["head/kernel"],
    ]
    assert same_on_all_ranks(model.variables)


@pytest.mark.parametrize(
    ("passes", "scale"), [pytest.param(1, False, marks=pytest.mark.long), (2, True)]
)
def test_local_layers_keep_their_gradients(passes, scale):
    ours, theirs = net(), net()
    options = {"scale_local_gradients": scale, "backward_passes_per_step": passes}
    mine = hvd.PartialDistributedOptimizer(
        tf.keras.optimizers.SGD(0.1),
        compression=hvd.ScaleCom(rate=1),
        local_layers=ours.layers[1],
        **options,
    )
    other = stock.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), **options)
    for variable in theirs.layers[1].trainable_weights:
        other.register_local_var(variable)
    fit(ours, mine)
    fit(theirs, other)
    assert_same_weights(ours, theirs)
    assert same_on_all_ranks([*ours.layers[0].weights, *ours.layers[2].weights])
    assert not same_on_all_ranks([ours.layers[1].kernel])


def test_local_layers_must_be_layers():
    with pytest.raises(ValueError, match=r"must be of tf.keras.layers.Layer type"):
        hvd.PartialDistributedOptimizer(
            tf.keras.optimizers.SGD(0.1), compression=hvd.ScaleCom, local_layers=["head"]
        )


def embedding():
    tf.keras.utils.set_random_seed(7)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(300, 20, name="table", input_length=3),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(40, name="head"),
        ]
    )


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_embeddings(sparse_as_dense):
    x = np.random.default_rng(hvd.rank()).integers(0, 300, (48, 3))
    data = x, np.sin(x[:, :1] + np.arange(40, dtype=np.float32))

    def train(library, **compression):
        model = embedding()
        optimizer = library.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.5), sparse_as_dense=sparse_as_dense, **compression
        )
        fit(model, optimizer, data)
        assert same_on_all_ranks(model.variables)
        return model, optimizer

    _, optimizer = train(hvd, compression=scalecom())
    assert ("table/embeddings" in optimizer.compression.state_dict()["residues"]) == sparse_as_dense
    assert_same_weights(train(hvd, compression=hvd.ScaleCom(rate=1))[0], train(stock)[0])


def test_frozen_and_thawed_layers():
    model = net()
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.legacy.SGD(0.1), compression=scalecom()
    )
    fit(model, optimizer)
    before, residue = (
        model.layers[1].kernel.numpy(),
        optimizer.compression.state_dict()["residues"]["second/kernel"],
    )
    assert residue.any()
    model.layers[1].trainable = False
    fit(model, optimizer)
    np.testing.assert_array_equal(model.layers[1].kernel.numpy(), before)
    np.testing.assert_array_equal(
        optimizer.compression.state_dict()["residues"]["second/kernel"], residue
    )
    assert optimizer.compression.stats()["step"] == 12
    model.layers[1].trainable = True
    fit(model, optimizer)
    assert not np.array_equal(model.layers[1].kernel.numpy(), before)
    assert same_on_all_ranks(model.variables)


def test_stats_count_what_is_sent():
    model = net()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[0](), compression=scalecom(bits=32, min_numel=1000)
    )
    fit(model, optimizer, [part[:24] for part in examples(hvd.rank())])
    stats = optimizer.compression.stats()
    k, whole, n = FEATURES * 64 // 20 + -(-64 * 64 // 20), 64 + 64 + 64 * 5 + 5, hvd.size()
    assert stats == {
        "step": 3,
        "outliers": 0,
        "skipped_steps": 0,
        "leader": 2 % n,
        "bytes_offsets": k,
        "bytes_values": 4 * k,
        "bytes_dense": 4 * (whole + 1),  # plus the count of workers with non-finite gradients
        "bytes_traffic": round((n - 1) / n * (k + 2 * (4 * k + 4 * (whole + 1)))),
        "rate": pytest.approx((FEATURES * 64 + 64 * 64 + whole) / (k + whole)),
        "collectives": 2,
        # the first step's gradient waits, except for what was sent
        "residue_ratio": pytest.approx(1, rel=0.5),
        "residue_norm": pytest.approx(
            np.sqrt(
                sum(
                    np.square(residue).sum()
                    for residue in optimizer.compression.state_dict()["residues"].values()
                )
            )
        ),
    }
    assert stats["residue_norm"] > 0


@pytest.mark.long
def test_models_that_were_saved(tmp_path):
    """Saved models load as far as Horovod loads its own, with their optimizer wrapped.

    Models in Keras's own format do not. The optimizer's state loads only from .h5.
    """
    model = net()
    fit(model, hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), compression=scalecom()))
    for ending in (".h5", ""):  # the last is TensorFlow's SavedModel
        path = tmp_path / f"model{ending}"
        model.save(path)
        loaded = hvd.load_model(path, compression=scalecom())
        stocks = stock.load_model(path)
        assert loaded.optimizer.compression.config.rate == 20
        for mine, other in zip(loaded.optimizer.variables, stocks.optimizer.variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
        assert_same_weights(loaded, model, 0)
        loaded.fit(*examples(hvd.rank()), 8, verbose=0)
        assert same_on_all_ranks(loaded.variables)
        assert loaded.optimizer.compression.stats()["step"] == 6


def test_a_monitor_writes_for_tensorboard(tmp_path):
    # Ranks on one machine have separate folders here, to show which rank wrote.
    model = net()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[0](), compression=scalecom())
    callback = hvd.MonitorCallback(every=3, tensorboard=tmp_path / "runs")
    model.compile(optimizer, "mse")
    x, y = examples(hvd.rank())
    model.fit(x, y, 8, verbose=0, callbacks=[callback])
    assert ("MB, rate" in callback.monitor.line) == (hvd.rank() == 0)
    assert (tmp_path / "runs").exists() == (hvd.rank() == 0)
    files = (tmp_path / "runs").glob("*") if hvd.rank() == 0 else ()
    events = [e for f in files for e in tf.compat.v1.train.summary_iterator(str(f))]
    found = {(value.tag, event.step) for event in events for value in event.summary.value}
    expected = {("scalecom/bytes_traffic", 3), ("scalecom/bytes_traffic", 6)}
    assert (expected <= found) == (hvd.rank() == 0)
