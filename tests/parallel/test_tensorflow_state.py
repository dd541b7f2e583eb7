"""Residues in checkpoints: resuming is bit-identical. What does not fit is refused by its name."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from made_up import SHAPES, gradients
from tensorflow_models import examples, net, same_on_all_ranks
from tensorflow_parity import Step, variables

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as keras

SETTINGS = {"rate": 20, "beta": 0.5, "min_numel": 100}
MODES = [
    {},
    {"lookahead": True},
    {"leader": "staggered", "lookahead": True, "bucket_bytes": 10_000},
    {"warmup_steps": 9, "bits": 32},
    {"bits": 3, "rate": 16, "lookahead": True},
]


def scalecom(**settings):
    return hvd.ScaleCom(**(SETTINGS | settings))


def run(compression, numbers, model=None):
    """Return the averages of all steps. compression: a ScaleCom, or a Step."""
    step = (
        compression
        if isinstance(compression, Step)
        else Step(variables(SHAPES) if model is None else model, compression)
    )
    return [step(gradients(SHAPES, hvd.rank(), number)) for number in numbers]


def assert_same(some, others):
    for averages, other in zip(some, others, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(averages[name], other[name], err_msg=name)


@pytest.mark.parametrize(
    "mode",
    [
        *(pytest.param(MODES[i], marks=pytest.mark.long) for i in (0, 2, 3)),
        MODES[4],
    ],
    ids=str,
)
def test_resuming_from_a_state_dict_is_bit_identical(mode):
    straight = scalecom(**mode)
    step = Step(variables(SHAPES), straight)
    run(step, range(5))
    saved = pickle.loads(pickle.dumps(straight.state_dict()))
    after = run(step, range(5, 9))
    # As in a new process: load before the first step. What is saved again at once is the same.
    resumed = scalecom(**mode)
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["step"] == 5
    assert_same(run(resumed, range(5, 9)), after)
    assert resumed.state_dict()["step"] == resumed.stats()["step"] == 9
    ratio = resumed.stats()["residue_ratio"]
    assert ratio == straight.stats()["residue_ratio"]
    assert mode or ratio is not None
    # A load in the middle of a run goes back to the saved step.
    straight.load_state_dict(saved)
    assert_same(run(step, range(5, 9)), after)
    for name, residue in straight.state_dict()["residues"].items():
        np.testing.assert_array_equal(residue, resumed.state_dict()["residues"][name])


@pytest.mark.parametrize(
    "mode", [pytest.param(MODES[2], marks=pytest.mark.long), MODES[4]], ids=str
)
def test_resuming_from_a_checkpoint_is_bit_identical(mode, tmp_path):
    """Every rank writes its own tf.train.Checkpoint."""
    straight = scalecom(**mode)
    step = Step(variables(SHAPES), straight)
    run(step, range(5))
    path = tf.train.Checkpoint(scalecom=straight).save(str(tmp_path / f"rank{hvd.rank()}"))
    after = run(step, range(5, 9))

    resumed = scalecom(**mode)
    status = tf.train.Checkpoint(scalecom=resumed).restore(path)
    assert_same(run(resumed, range(5, 9)), after)
    status.assert_consumed()
    assert resumed.stats()["step"] == 9
    tf.train.Checkpoint(scalecom=straight).restore(path).assert_consumed()
    assert straight.stats()["step"] == 5
    assert_same(run(step, range(5, 9)), after)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: tf.keras.optimizers.Adam(0.01), marks=pytest.mark.long),
        lambda: tf.keras.optimizers.legacy.SGD(0.1, 0.9),
    ],
    ids=["Adam", "legacy SGD"],
)
def test_a_fit_goes_on_where_it_stopped(make, tmp_path):
    """Model, optimizer and residues are in one checkpoint of this rank."""
    x, y = examples(hvd.rank())

    def build():
        model = net()
        compression = scalecom(lookahead=True)
        model.compile(keras.DistributedOptimizer(make(), compression=compression), "mse")
        return model, tf.train.Checkpoint(
            model=model, optimizer=model.optimizer, scalecom=compression
        )

    model, checkpoint = build()
    model.fit(x, y, 8, shuffle=False, verbose=0)
    path = checkpoint.save(str(tmp_path / f"rank{hvd.rank()}"))
    model.fit(x, y, 8, shuffle=False, verbose=0)
    again, checkpoint = build()
    checkpoint.restore(path)
    again.fit(x, y, 8, shuffle=False, verbose=0)
    for mine, other in zip(again.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())
    assert same_on_all_ranks(again.variables)
    assert again.optimizer.compression.stats()["step"] == 12


def test_the_state_is_what_the_design_says():
    compression = scalecom()
    run(compression, range(3))
    state = compression.state_dict()
    assert (state["version"], state["step"], state["config"]["rate"]) == (2, 3, 20)
    assert {name: residue.shape for name, residue in state["residues"].items()} == {
        n: s for n, s in SHAPES.items() if n != "bias"
    }


def test_residues_are_no_part_of_model_or_optimizer(tmp_path):
    """If they were, rank 0's residues would be broadcast, and saved for all ranks."""
    model = net()
    optimizer = keras.DistributedOptimizer(tf.keras.optimizers.Adam(), compression=scalecom())
    model.compile(optimizer, "mse")
    model.fit(*examples(hvd.rank()), 8, verbose=0)
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "all"))
    saved = [name for name, _ in tf.train.list_variables(str(tmp_path))]
    assert not any(
        "scalecom" in name or "stream" in name
        for name in [*saved, *(v.name for v in [*model.variables, *optimizer.variables])]
    )


def test_residues_are_no_variables_of_a_model_that_holds_the_scalecom():
    """A model's training step may need it there. Rank 0 broadcasts the model's variables."""

    compression, layers = scalecom(), net()
    model, module = tf.keras.Model(layers.inputs, layers.outputs), tf.Module()
    model.compression = module.compression = compression
    run(compression, range(2))
    assert compression.state_dict()["residues"]["first"].any()
    assert len(model.variables) == len(model.get_weights()) == 6
    assert not module.variables


def test_all_series_of_gradients_resume_from_a_checkpoint(tmp_path):
    """So do series that begin after the restore: a persistent tape's second gradients."""

    def training():
        compression, w = scalecom(), variables(SHAPES)["first"]

        def step(number):
            parts = [gradients(SHAPES, hvd.rank(), number + at)["first"] for at in (0, 50)]
            with tf.GradientTape(persistent=True) as tape:
                losses = [tf.reduce_sum(w * part) for part in parts]
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            return [tape.gradient(loss, [w])[0] for loss in losses]

        return compression, step

    straight, step = training()
    for number in range(3):
        step(number)
    path = tf.train.Checkpoint(scalecom=straight).write(str(tmp_path / f"rank{hvd.rank()}"))
    resumed, other_step = training()
    status = tf.train.Checkpoint(scalecom=resumed).read(path)
    for number in range(3, 6):
        for mine, other in zip(other_step(number), step(number), strict=True):
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
    status.assert_consumed()


@pytest.mark.parametrize("way", [pytest.param("state_dict", marks=pytest.mark.long), "checkpoint"])
def test_ranks_that_load_the_residues_of_one_rank_are_refused(way, tmp_path):
    """Residues would be sent several times. Residues that changed their ranks are no less right."""
    compression = scalecom()
    run(compression, range(3))
    tf.train.Checkpoint(scalecom=compression).write(str(tmp_path / "residues"))
    saved = hvd.allgather_object((str(tmp_path), compression.state_dict()), name="saved")

    def resume(of):
        resumed = scalecom()
        folder, state = saved[of]
        if way == "state_dict":
            resumed.load_state_dict(state)
        else:
            tf.train.Checkpoint(scalecom=resumed).read(f"{folder}/residues")
        run(resumed, range(3, 5))
        return resumed

    assert resume((hvd.rank() + 1) % hvd.size()).stats()["step"] == 5
    with pytest.raises(RuntimeError, match="ranks 0 and 1 have both loaded the residues of rank 0"):
        resume(0)


def test_a_state_saved_before_the_first_step():
    compression = scalecom()
    compression.load_state_dict(scalecom().state_dict())
    run(compression, range(2))
    assert compression.state_dict()["step"] == 2


@pytest.mark.parametrize(
    "mode", [pytest.param(MODES[0], marks=pytest.mark.long), MODES[1]], ids=str
)
def test_a_newcomer_starts_with_empty_residues(mode, caplog):
    compression = scalecom(**mode)
    run(compression, range(5))
    again = scalecom(**mode)
    if hvd.rank() < hvd.size() - 1:
        again.load_state_dict(compression.state_dict())
    step = Step(variables(SHAPES), again)
    run(step, range(5, 6))
    assert again.stats()["step"] == 6
    assert "ranks come from different steps" in caplog.text
    sent = run(step, range(6, 9))
    assert same_on_all_ranks([tf.constant(average) for average in sent[-1].values()])


def test_variables_that_thaw_after_a_resume():
    """Variables that were not there when the state was saved start with empty residues."""
    compression, model = scalecom(), variables(SHAPES)
    some = {name: model[name] for name in ("first", "bias")}
    Step(some, compression)({name: gradients(SHAPES, hvd.rank(), 0)[name] for name in some})
    resumed = scalecom()
    resumed.load_state_dict(compression.state_dict())
    Step(some, resumed)({name: gradients(SHAPES, hvd.rank(), 1)[name] for name in some})
    run(resumed, range(2, 4), model)
    assert resumed.stats()["step"] == 4
    assert set(resumed.state_dict()["residues"]) == {"first", "second", "third"}


def test_states_that_do_not_fit_are_refused():
    compression = scalecom()
    run(compression, range(2))
    state = compression.state_dict()
    for change, shapes, settings, message in (
        ({}, SHAPES, {"rate": 50}, r"rate=20.0 in the state and 50.0 now"),
        ({"version": 99}, SHAPES, {}, "version 99, but this release reads only version 2"),
        (
            {},
            {**SHAPES, "third": (6000,)},
            {},
            r"third has shape \(5000,\) in the state and \(6000,\) in the model",
        ),
        ({}, {**SHAPES, "fourth": (5000,)}, {}, "fourth is not in the state"),
    ):
        early = scalecom(**settings)
        with pytest.raises(ValueError, match=message):
            early.load_state_dict(state | change)
            Step(variables(shapes), early)(gradients(shapes, hvd.rank(), 0))
    for shapes, message in (
        (
            {**SHAPES, "third": (6000,)},
            r"third has shape \(5000,\) in the state and \(6000,\) in the model",
        ),
        (
            {name: shape for name, shape in SHAPES.items() if name != "third"},
            "third is not in this model",
        ),
        ({**SHAPES, "fourth": (5000,)}, "fourth is not in the state"),
    ):
        late = scalecom()
        Step(variables(shapes), late, traced=False)(gradients(shapes, hvd.rank(), 0))
        with pytest.raises(ValueError, match=message):
            late.load_state_dict(state)
        assert late.state_dict()["step"] == 1
    with pytest.raises(ValueError, match="it lacks config, residues, settings, step, version"):
        compression.load_state_dict({})


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    compression = scalecom()
    run(compression, range(2))
    path = tf.train.Checkpoint(scalecom=compression).save(str(tmp_path / f"rank{hvd.rank()}"))
    with pytest.raises(ValueError, match=r"rate=20.0 in the state and 50.0 now"):
        tf.train.Checkpoint(scalecom=scalecom(rate=50)).restore(path)
    other = scalecom(beta=1.0)
    run(other, range(1))
    with pytest.raises(ValueError, match=r"beta=0.5 in the state and 1.0 now"):
        tf.train.Checkpoint(scalecom=other).restore(path)


PLAIN = """
import sys
sys.modules["scalecom_hvd"] = sys.modules["horovod"] = None
import tensorflow as tf
for path in sys.argv[1:]:
    model = tf.keras.models.load_model(path)
    assert type(model.optimizer).__module__.startswith("keras.")
    model.predict(tf.zeros([2, 60]), verbose=0)
"""


@pytest.mark.long
def test_a_saved_model_loads_without_this_package_and_horovod(tmp_path):
    """It is not in Keras's own format, which cannot load Horovod's optimizers either."""
    model = net()
    model.compile(
        keras.DistributedOptimizer(tf.keras.optimizers.Adam(), compression=scalecom()), "mse"
    )
    model.fit(*examples(hvd.rank()), 8, verbose=0)
    if hvd.rank() == 0:
        paths = [str(tmp_path / f"model{ending}") for ending in (".h5", "")]
        for path in paths:
            model.save(path)
        done = subprocess.run(
            [sys.executable, "-c", PLAIN, *paths], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
