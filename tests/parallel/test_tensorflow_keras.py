"""Keras's drop-in DistributedOptimizer.

Tests model.fit, Horovod's options, and what holds with all options.
"""

import subprocess
import sys

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
    scalecom,
    total_residue,
)

import scalecom_hvd.tensorflow
import scalecom_hvd.tensorflow.keras as hvd

STAGGERED = {"leader": "staggered", "bucket_bytes": 10_000}


def fit(model, optimizer, data=None, **compile_options):
    model.compile(optimizer, "mse", **compile_options)
    x, y = examples(hvd.rank()) if data is None else data
    model.fit(x, y, 8, verbose=0, shuffle=False)


def assert_same_weights(ours, theirs, tolerance=1e-5):
    for mine, other in zip(ours.trainable_variables, theirs.trainable_variables, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), other.numpy(), rtol=tolerance, atol=tolerance, err_msg=mine.name
        )


def test_rate_one_equals_stock_horovod():
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    ours, theirs = net(), net()
    for library, model, more in (
        (hvd, ours, {"compression": hvd.ScaleCom(rate=1)}),
        (stock, theirs, {}),
    ):
        fit(model, library.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), **options, **more))
    assert_same_weights(ours, theirs)
    assert same_on_all_ranks(ours.variables)


@pytest.mark.parametrize(
    ("options", "compile_options", "mode"),
    [
        (
            {"gradient_predivide_factor": 2.0, "groups": 2},
            {"steps_per_execution": 4},
            {},
        ),
        pytest.param(
            *({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, {}, STAGGERED),
            marks=pytest.mark.long,
        ),
        # That rank traces the step again for this batch, while the other ranks go on.
        (
            {"a smaller last batch on one rank": True, "op": scalecom_hvd.tensorflow.Sum},
            {},
            {},
        ),
        # Horovod itself ignores op and groups there.
        pytest.param(
            {"face": scalecom_hvd.tensorflow, "op": scalecom_hvd.tensorflow.Sum, "groups": 2},
            *({}, {}),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_nothing_is_lost(options, compile_options, mode):
    """The sum of everything sent, plus what waits, equals the sum of gradients."""
    options, model, compression = dict(options), linear(), scalecom(**mode)
    face = options.pop("face", hvd)
    smaller = options.pop("a smaller last batch on one rank", False)
    data = [inputs(rank, 24 - 2 * smaller * (rank == 1)) for rank in range(hvd.size())]
    optimizer = face.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), compression=compression, **options
    )
    model.compile(optimizer, output, **compile_options)
    for _ in range(2):
        model.fit(*data[hvd.rank()], batch_size=4, verbose=0, shuffle=False)
    divisor = 1 if "op" in options else hvd.size()
    batches = [x[first : first + 4] for x, _ in data for first in range(0, 24, 4)]
    came_in = 2 * sum(batch.mean(0, dtype=np.float64) for batch in batches)
    for variable in model.trainable_variables[::2]:
        left = total_residue(compression, variable.name[:-2])
        assert np.abs(left).sum() > 0
        np.testing.assert_allclose(
            -variable.numpy() * divisor + left, came_in[:, None], rtol=1e-4, atol=1e-3
        )
    biases = model.trainable_variables[1::2]
    np.testing.assert_allclose([*biases], -12 * hvd.size() / divisor, rtol=1e-6)
    assert same_on_all_ranks(model.variables)
    assert compression.stats()["step"] == 12 // options.get("backward_passes_per_step", 1)
    if "groups" in options:  # each has a bucket of what is compressed, and one of what is not
        assert len(compression.exchanges()[0].buckets) == 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was trained by a clone of its optimizer, and the clone's first optimizer.

    To trace a step takes seconds, so several tests look at this one.
    """
    model = net()
    groups = [[model.layers[0].kernel, model.layers[2].bias], [model.layers[1].kernel]]
    # Integers of few bits have buckets of their own.
    options = {"compression": scalecom(bits=32, min_numel=1000), "groups": groups}
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), **options)
    model.compile(optimizer.from_config(optimizer.get_config()), "mse")
    # Ranks on one machine have separate folders here, to show which rank wrote.
    runs = tmp_path_factory.mktemp("runs") / "of_this_rank"
    callback = hvd.MonitorCallback(every=3, tensorboard=runs)
    model.fit(*examples(hvd.rank()), 8, verbose=0, shuffle=False, callbacks=[callback])
    assert same_on_all_ranks(model.variables)
    return model, optimizer, callback.monitor, runs


def test_a_clone_of_the_optimizer(trained):
    model, optimizer, _, _ = trained
    theirs = stock.DistributedOptimizer(tf.keras.optimizers.Adam(0.01))
    assert optimizer.get_config() == theirs.get_config()
    assert optimizer.get_config().keys() == tf.keras.optimizers.Adam(0.01).get_config().keys()
    assert type(optimizer).__name__ == "Adam"
    assert model.optimizer is not optimizer
    assert model.optimizer.compression is optimizer.compression
    assert optimizer.compression.stats()["step"] == 6


def test_residues_are_no_part_of_model_or_optimizer(trained, tmp_path):
    """If they were, rank 0's residues would be broadcast, and saved for all ranks."""
    model, _, _, _ = trained
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "all"))
    names = [name for name, _ in tf.train.list_variables(str(tmp_path))]
    names += [variable.name for variable in (*model.variables, *model.optimizer.variables)]
    assert not [name for name in names if "scalecom" in name or "stream" in name]


def test_groups_of_variables(trained):
    buckets = trained[1].compression.exchanges()[0].buckets
    others = ["first/bias", "second/bias", "head/kernel"]
    assert [" ".join(bucket.names) for bucket in buckets] == [
        *("first/kernel head/bias", "second/kernel"),
        *others,
    ]


@pytest.mark.parametrize(
    ("passes", "scale"), [(1, False), pytest.param(2, True, marks=pytest.mark.long)]
)
def test_local_layers_keep_their_gradients(passes, scale):
    ours, theirs = net(), net()
    options = {"scale_local_gradients": scale, "backward_passes_per_step": passes}
    mine, other = (
        library.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), **options, **compression)
        for library, compression in ((hvd, {"compression": hvd.ScaleCom(rate=1)}), (stock, {}))
    )
    for optimizer, model in ((mine, ours), (other, theirs)):
        for variable in model.layers[1].trainable_weights:
            optimizer.register_local_var(variable)
    fit(ours, mine)
    fit(theirs, other)
    assert_same_weights(ours, theirs)
    assert same_on_all_ranks([*ours.layers[0].weights, *ours.layers[2].weights])
    assert not same_on_all_ranks([ours.layers[1].kernel])


@pytest.mark.parametrize(
    ("sparse_as_dense", "compares"),
    [
        (True, False),
        *(pytest.param(dense, True, marks=pytest.mark.long) for dense in (True, False)),
    ],
)
def test_sparse_embeddings(sparse_as_dense, compares):
    x = np.random.default_rng(hvd.rank()).integers(0, 300, (48, 3))
    data = x, np.sin(x[:, :1] + np.arange(40, dtype=np.float32))

    def train(library, **compression):
        tf.keras.utils.set_random_seed(7)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Embedding(300, 20, name="table", input_length=3),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(40, name="head"),
            ]
        )
        optimizer = library.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.5), sparse_as_dense=sparse_as_dense, **compression
        )
        fit(model, optimizer, data)
        assert same_on_all_ranks(model.variables)
        return model, optimizer

    _, optimizer = train(hvd, compression=scalecom())
    assert ("table/embeddings" in optimizer.compression.state_dict()["residues"]) == sparse_as_dense
    if compares:
        assert_same_weights(train(hvd, compression=hvd.ScaleCom(rate=1))[0], train(stock)[0])


def test_stats_count_what_is_sent(trained):
    compression = trained[1].compression
    stats = compression.stats()
    norms = [np.linalg.norm(residue) for residue in compression.state_dict()["residues"].values()]
    k, whole, n = FEATURES * 64 // 20 + -(-64 * 64 // 20), 64 + 64 + 64 * 5 + 5, hvd.size()
    dense = 4 * (whole + 5)  # with each bucket's count of workers with non-finite gradients
    assert stats == {
        "step": 6,
        "outliers": 0,
        "skipped_steps": 0,
        "leader": 5 % n,
        "bytes_offsets": k,
        "bytes_values": 4 * k,
        "bytes_dense": dense,
        "bytes_traffic": round((n - 1) / n * (k + 2 * (4 * k + dense))),
        "rate": pytest.approx((FEATURES * 64 + 64 * 64 + whole) / (k + whole)),
        "collectives": 2 + 5,  # two choices and five buckets
        # the first step's gradient waits, except for what was sent
        "residue_ratio": pytest.approx(1, rel=0.5),
        "residue_norm": pytest.approx(np.linalg.norm(norms)),
    }
    assert stats["residue_norm"] > 0


WITHOUT_THIS_PACKAGE = """
import sys
sys.modules["scalecom_hvd"] = sys.modules["horovod"] = None
import tensorflow as tf
model = tf.keras.models.load_model(sys.argv[1])
assert type(model.optimizer).__module__.startswith("keras.")
model.predict(tf.zeros([2, 60]), verbose=0)
"""


@pytest.mark.long
def test_models_that_were_saved(tmp_path):
    """Saved models load as far as Horovod loads its own, with their optimizer wrapped.

    They load without this package and Horovod too. Models in Keras's own format do neither. The
    optimizer's state loads only from .h5.
    """
    model = net()
    fit(model, hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), compression=scalecom()))
    for ending in (".h5", ""):  # the last is TensorFlow's SavedModel
        path = tmp_path / f"model{ending}"
        model.save(path)
        if hvd.rank() == 0:
            subprocess.run(
                [sys.executable, "-c", WITHOUT_THIS_PACKAGE, path], check=True, timeout=60
            )
        loaded = hvd.load_model(path, compression=scalecom())
        stocks = stock.load_model(path)
        assert loaded.optimizer.compression.config.rate == 20
        for mine, other in zip(loaded.optimizer.variables, stocks.optimizer.variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
        assert_same_weights(loaded, model, 0)
        loaded.fit(*examples(hvd.rank()), 8, verbose=0)
        assert same_on_all_ranks(loaded.variables)
        assert loaded.optimizer.compression.stats()["step"] == 6


def test_a_monitor_writes_for_tensorboard(trained):
    _, _, monitor, runs = trained
    assert ("MB, rate" in monitor.line) == (hvd.rank() == 0)
    assert runs.exists() == (hvd.rank() == 0)
    files = runs.glob("*") if hvd.rank() == 0 else ()
    events = [e for f in files for e in tf.compat.v1.train.summary_iterator(str(f))]
    found = {(value.tag, event.step) for event in events for value in event.summary.value}
    expected = {("scalecom/bytes_traffic", 3), ("scalecom/bytes_traffic", 6)}
    assert (expected <= found) == (hvd.rank() == 0)
