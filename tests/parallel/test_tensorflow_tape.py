"""Tapes in custom loops, eager and traced."""

import time

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf
from made_up import SHAPES, came_in, gradients
from tensorflow_models import same_on_all_ranks, scalecom, total_residue
from tensorflow_parity import Step, variables

import scalecom_hvd.tensorflow as hvd
from scalecom_hvd.tensorflow.compressor import shared

# Each variable that is compressed makes an exchange take longer to trace.
FEW = {name: SHAPES[name] for name in ("first", "bias")}
MODES = [{}, {"leader": "staggered", "bucket_bytes": 10_000}]


def nothing(rank, number):
    return ()


def without_two_buckets_on_other_ranks_than_0(rank, number):
    """Those ranks sum zeros there, which TensorFlow would sum once and for all."""
    return ("bias", "third") if rank else ()


def some_once_and_one_until_rank_0_has_it(rank, number):
    """When a gradient comes on one rank alone, all agree anew. A member may have none just then."""
    late = ["third"] * (number < 3 or rank > 0) + ["bias"] * (number == 3)
    return ["first"] * (number % hvd.size() == rank) + late


def until_they_come(rank, number):
    """In eager execution a rank with a new gradient must not be the only one to notice.

    The other ranks take part with zeros.
    """
    last = hvd.size() - 1
    # {name: {rank: its first step}}; other ranks never have a gradient
    since = {"bias": {0: 1, last: 2}, "third": {last: 1}, "second": {0: 3}}
    return {name for name, begins in since.items() if number < begins.get(rank, 99)}


def train(step, numbers, skips=nothing):
    """Return {name: the sum of the averages} of made-up gradients, without the skipped ones."""
    sent, begun = dict.fromkeys(step.model, 0.0), set()
    for number in numbers:
        for rank in range(hvd.size()):
            begun |= step.model.keys() - skips(rank, number)
        averages = step(
            {
                name: tf.cast(grad, step.model[name].dtype)
                for name, grad in gradients(SHAPES, hvd.rank(), number).items()
                if name in step.model.keys() - skips(hvd.rank(), number)
            }
        )
        assert {name for name, average in averages.items() if average is not None} == begun
        for name in begun:
            assert averages[name].dtype == step.model[name].dtype
            sent[name] = sent[name] + averages[name].astype(np.float64)
    return sent


def check_nothing_is_lost(
    compression,
    sent,
    steps,
    skips=nothing,
    divisor=None,
    tolerance=1e-4,
    process_set=hvd.global_process_set,
):
    """Check that what was sent, plus what waits, is the sum of all gradients."""
    everything = came_in(process_set.ranks or range(hvd.size()), range(steps), skips=skips)
    for name, total in ((name, everything[name]) for name in sent):
        waits = total_residue(compression, name, process_set)
        found = sent[name] * (divisor or process_set.size()) + waits
        np.testing.assert_allclose(
            found, total, rtol=tolerance, atol=tolerance * np.abs(total).max(), err_msg=name
        )
    assert same_on_all_ranks([tf.constant(total) for total in sent.values()], process_set)
    assert compression.stats()["residue_norm"] > 0


@pytest.mark.parametrize(
    ("mode", "options", "skips"),
    [
        (MODES[0], {"gradient_predivide_factor": 2.0, "groups": 2}, nothing),
        pytest.param(
            MODES[1], {"op": hvd.Sum, "device_dense": "/cpu:0"}, nothing, marks=pytest.mark.long
        ),
        (MODES[0], {"traced": False}, some_once_and_one_until_rank_0_has_it),
        pytest.param(
            {"warmup_steps": 2}, {"traced": False}, until_they_come, marks=pytest.mark.long
        ),
        pytest.param(MODES[1], {"traced": False}, until_they_come, marks=pytest.mark.long),
        ({"bucket_bytes": 100}, {}, without_two_buckets_on_other_ranks_than_0),
    ],
)
def test_nothing_is_lost(mode, options, skips):
    compression, steps = scalecom(**mode), 5
    sent = train(Step(variables(SHAPES), compression, **options), range(steps), skips)
    divisor = 1 if options.get("op") == hvd.Sum else None
    check_nothing_is_lost(compression, sent, steps, skips, divisor)
    assert compression.stats()["step"] == steps


def test_bfloat16():
    """Horovod sums no bfloat16. ScaleCom sends float32."""
    compression = scalecom()
    sent = train(Step(variables(FEW, tf.bfloat16), compression), range(4))
    check_nothing_is_lost(compression, sent, 4, tolerance=0.02)
    residues = compression.state_dict()["residues"].values()
    assert {residue.dtype for residue in residues} == {np.dtype(np.float32)}


def test_the_bare_class_is_one_object_for_all_tapes(monkeypatch):
    monkeypatch.setenv("SCALECOM_RATE", "10")
    shared.cache_clear()
    sent = train(Step(variables(FEW), hvd.ScaleCom, traced=False), range(3))
    compression = shared()
    shared.cache_clear()
    assert compression.config.rate == 10
    check_nothing_is_lost(compression, sent, 3)


def test_two_steps_in_one_function():
    compression, sent = scalecom(bucket_bytes=100), dict.fromkeys(FEW, 0.0)
    step = Step(variables(FEW), compression, traced=False)
    both = tf.function(lambda *parts: [step._gradient(part) for part in parts], autograph=False)
    for number in range(0, 6, 2):
        for averages in both(*(gradients(FEW, hvd.rank(), number + part) for part in range(2))):
            for name, average in zip(FEW, averages, strict=True):
                sent[name] = sent[name] + average.numpy().astype(np.float64)
    check_nothing_is_lost(compression, sent, 6)
    assert compression.stats()["step"] == 6


def test_variables_join_and_leave():
    """Lists of sources may change, traced or not.

    The same training goes on, with the residues that exist.
    """
    model, compression, sent = variables(SHAPES), scalecom(), dict.fromkeys(SHAPES, 0.0)

    def away(rank, number):
        return () if number in (0, 1, 4) else ("first", "second")

    steps = {}  # to trace takes long
    for number in range(6):
        here = tuple(name for name in SHAPES if name not in away(0, number))
        traced = number % 2 == 1
        if (here, traced) not in steps:
            steps[here, traced] = Step({n: model[n] for n in here}, compression, traced)
        totals = train(steps[here, traced], [number])
        sent |= {name: sent[name] + total for name, total in totals.items()}
    check_nothing_is_lost(compression, sent, 6, away)
    # The shorter list began at the step of the other, and was averaged three times.
    assert compression.stats()["step"] == 2 + 3


def test_a_persistent_tape_for_two_models():
    """A GAN has disjoint variables, with one residue each."""
    model, compression = variables(SHAPES), scalecom()
    parts, sent = [["first", "bias"], ["second", "third"]], dict.fromkeys(SHAPES, 0.0)

    @tf.function(autograph=False)
    def step(grads):
        with tf.GradientTape(persistent=True) as tape:
            losses = [
                tf.add_n([tf.reduce_sum(model[name] * grads[name]) for name in names])
                for names in parts
            ]
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return [
            dict(zip(names, tape.gradient(loss, [model[name] for name in names]), strict=True))
            for loss, names in zip(losses, parts, strict=True)
        ]

    for number in range(5):
        for averages in step(gradients(SHAPES, hvd.rank(), number)):
            for name, average in averages.items():
                sent[name] = sent[name] + average.numpy().astype(np.float64)
    check_nothing_is_lost(compression, sent, 5)
    assert set(compression.state_dict()["residues"]) == {"first", "second", "third"}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.float16, {}),
        (np.float64, {"op": hvd.Sum}),
        pytest.param(np.float32, {"gradient_predivide_factor": 2.0}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_rate_one_equals_stock_horovod(dtype, options):
    model = variables(SHAPES, dtype)
    ways = (hvd, hvd.ScaleCom(rate=1)), (stock, stock.Compression.none)

    @tf.function(autograph=False)
    def both(grads):
        averages = []
        for library, compression in ways:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(model[name] * grad) for name, grad in grads.items()])
            tape = library.DistributedGradientTape(tape, compression=compression, **options)
            averages.append(tape.gradient(loss, list(model.values())))
        return averages

    # The sums over ranks are the same in any order, so they are equal to the bit.
    grads = gradients(SHAPES, hvd.rank(), 0, dtype)
    ours, theirs = both({name: tf.constant(np.round(grad * 8)) for name, grad in grads.items()})
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype == dtype
        np.testing.assert_allclose(
            mine.numpy(), other.numpy(), rtol=2e-3 if dtype is np.float16 else 1e-6
        )


@pytest.mark.parametrize(
    ("partial", "scale"), [(True, True), pytest.param(False, False, marks=pytest.mark.long)]
)
def test_local_sources(partial, scale):
    layers = [
        tf.keras.layers.Dense(1, name=name, kernel_initializer="zeros")
        for name in ("shared", "mine")
    ]
    x = tf.fill([2, 3000], float(hvd.rank() + 1))
    for layer in layers:
        layer(x)

    def run(library, compression):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean(layer(x)) for layer in layers)
        options = {"compression": compression, "scale_local_gradients": scale}
        if partial:
            tape = library.PartialDistributedGradientTape(tape, local_layers=layers[1], **options)
        else:
            tape = library.DistributedGradientTape(tape, **options)
            for variable in layers[1].trainable_variables:
                tape.register_local_source(variable)
        return tape.gradient(loss, [layers[0].kernel, layers[1].kernel])

    compression = scalecom()
    shared, local = run(hvd, compression)
    own = (hvd.rank() + 1) / (hvd.size() if scale else 1)
    np.testing.assert_allclose(local.numpy(), own)
    assert np.count_nonzero(shared.numpy()) == 3000 // 20
    assert list(compression.state_dict()["residues"]) == ["shared/kernel"]
    for mine, other in zip(
        run(hvd, hvd.ScaleCom(rate=1)), run(stock, stock.Compression.none), strict=True
    ):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-6)


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_gradients_of_the_same_variables_in_a_step(traced):
    """They are two series, and each keeps what was not sent of it.

    A step of one exchange gives what two exchanges would give.
    """
    shapes = {"w": (60, 50)}
    together, apart = scalecom(), [scalecom(), scalecom()]
    model = variables(shapes)

    def step(a, b):
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(model["w"] * a), tf.reduce_sum(model["w"] * b)]
        tape = hvd.DistributedGradientTape(tape, compression=together)
        return [tape.gradient(loss, [model["w"]])[0] for loss in losses]

    if traced:
        step = tf.function(step, autograph=False)
    others = [Step(variables(shapes), compression, traced=False) for compression in apart]
    for number in range(5):
        parts = [gradients(shapes, hvd.rank(), 100 * part + number) for part in range(2)]
        got = step(*(tf.constant(part["w"]) for part in parts))
        for mine, other, part in zip(got, others, parts, strict=True):
            np.testing.assert_array_equal(mine.numpy(), other(part)["w"])
    assert set(together.state_dict()["residues"]) == {"w", "w#1"}
    assert together.stats()["step"] == 5


@pytest.mark.parametrize("warmup_steps", [0, 9])
def test_an_average_that_float16_cannot_hold_is_no_step(warmup_steps):
    """Residues are float32. What waits, and the next gradient, may add up to too much.

    So may the gradients of several ranks, in whole steps too.
    """
    compression = scalecom(rate=20, bits=32, warmup_steps=warmup_steps)
    op = hvd.Sum if warmup_steps else hvd.Average
    step = Step(variables({"weight": (60, 50)}, tf.float16), compression, op=op)

    def of(*values):
        grad = np.zeros(3000, np.float16)
        grad[[0, 64]] = values  # of one lane, which sends the larger one
        return step({"weight": grad.reshape(60, 50)})["weight"]

    share = hvd.size() if warmup_steps else 1
    assert np.isfinite(of(5e4 / share, 6e4 / share)).all()
    assert np.isnan(of(5e4, 0)).all()
    assert (compression.stats()["step"], compression.stats()["skipped_steps"]) == (1, 1)


def test_sparse_gradients_are_horovods_own():
    table = tf.Variable(tf.zeros([300, 20]), name="table")
    head = tf.Variable(tf.zeros([20, 150]), name="head")
    compression = scalecom()

    def run(library, compression, factor=1.0):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [1, 3 + hvd.rank()])
            loss = tf.reduce_sum(rows) * factor + tf.reduce_sum(head)
        return library.DistributedGradientTape(tape, compression=compression).gradient(
            loss, [table, head]
        )

    ours, theirs = run(hvd, compression), run(stock, stock.Compression.none)
    assert isinstance(ours[0], tf.IndexedSlices)
    np.testing.assert_array_equal(ours[0].values.numpy(), theirs[0].values.numpy())
    np.testing.assert_array_equal(ours[0].indices.numpy(), theirs[0].indices.numpy())
    assert list(compression.state_dict()["residues"]) == ["head"]
    before = compression.state_dict()["residues"]["head"]
    void = run(hvd, compression, np.inf if hvd.rank() == 0 else 1.0)
    assert np.isnan(void[1].numpy()).all()
    np.testing.assert_array_equal(compression.state_dict()["residues"]["head"], before)
    assert (compression.stats()["step"], compression.stats()["skipped_steps"]) == (1, 1)


def test_process_sets_have_leaders_of_their_own(request):
    """With fewer than 4 ranks a set has one rank, which sends only where others may come."""
    if hvd.size() < 4:
        request.getfixturevalue("elastic_run")
    sets = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in range(2)]
    mine = sets[hvd.rank() % 2]
    compression = scalecom()
    sent = train(Step(variables(SHAPES), compression, process_set=mine), range(5))
    check_nothing_is_lost(compression, sent, 5, process_set=mine)
    assert compression.stats()["step"] == 5
    assert compression.stats()["leader"] == 4 % mine.size()
    assert not same_on_all_ranks([tf.constant(total) for total in sent.values()])
    # Ranks outside the process set keep their gradients.
    grads = gradients(SHAPES, hvd.rank(), 9)
    untouched = Step(variables(SHAPES), scalecom(), process_set=sets[(hvd.rank() + 1) % 2])(grads)
    for name in SHAPES:
        np.testing.assert_array_equal(untouched[name], grads[name])
    for process_set in sets:
        hvd.remove_process_set(process_set)


def test_a_step_that_fails_in_the_middle_changes_no_residue():
    """The exchange of one bucket is done by then, and that of the other has not begun."""
    model = [tf.Variable(tf.zeros([4000]), name=name) for name in ("first", "second")]
    compressor, fails = hvd.ScaleCom(rate=100), tf.Variable(False)

    def late(grad, failing):
        if failing:
            time.sleep(1)
            raise ArithmeticError("in the middle")
        return grad

    @tf.custom_gradient
    def second_of(variable):
        return tf.identity(variable), lambda grad: tf.ensure_shape(
            tf.numpy_function(late, [grad, fails], tf.float32), [4000]
        )

    @tf.function
    def step(grads):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model[0] * grads[0] + second_of(model[1]) * grads[1])
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=2)
        return tape.gradient(loss, model)

    random = np.random.default_rng(hvd.rank())
    grads = [tf.constant(random.standard_normal([2, 4000]), tf.float32) for _ in range(3)]
    step(grads[0])
    assert len(compressor.exchanges()[0].buckets) == 2
    before = compressor.state_dict()
    assert all(residue.any() for residue in before["residues"].values())
    fails.assign(True)
    with pytest.raises(tf.errors.UnknownError, match="in the middle"):
        step(grads[1])
    after = compressor.state_dict()
    assert after["step"] == before["step"] == 1
    for name, residue in before["residues"].items():
        np.testing.assert_array_equal(after["residues"][name], residue)
    fails.assign(False)
    step(grads[2])
    assert compressor.stats()["step"] == 2
