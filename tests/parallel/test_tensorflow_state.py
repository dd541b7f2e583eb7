"""Residues in checkpoints: resuming is bit-identical. What does not fit is refused by its name."""

import json
import pickle

import numpy as np
import pytest
import tensorflow as tf
from made_up import SHAPES, gradients
from tensorflow_models import examples, net, same_on_all_ranks, scalecom
from tensorflow_parity import Step, variables

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as keras
from scalecom_hvd.tensorflow import elastic

MODES = [
    {},
    {"leader": "staggered", "bucket_bytes": 10_000},
    {"warmup_steps": 9, "bits": 32},
    {"bits": 3, "rate": 16},
]


FEW = {"first": (60, 50), "bias": (60,)}  # to trace their exchange takes half as long


def run(compression, numbers, shapes=FEW, traced=True):
    """Return the averages of all steps. compression: a ScaleCom, or a Step."""
    step = compression
    if not isinstance(step, Step):
        step = Step(variables(shapes), compression, traced)
    return [step(gradients(shapes, hvd.rank(), number)) for number in numbers]


def assert_same(some, others):
    for averages, other in zip(some, others, strict=True):
        for name in FEW:
            np.testing.assert_array_equal(averages[name], other[name], err_msg=name)


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        *(pytest.param("state_dict", MODES[i], marks=pytest.mark.long) for i in (0, 1, 2)),
        ("state_dict", MODES[3]),
        pytest.param("checkpoint", MODES[1], marks=pytest.mark.long),
        ("checkpoint", MODES[3]),
    ],
    ids=str,
)
def test_resuming_is_bit_identical(way, mode, tmp_path):
    """Every rank writes its own tf.train.Checkpoint, or its own state."""
    straight, resumed = (scalecom(beta=0.5, **mode) for _ in range(2))
    step = Step(variables(FEW), straight)
    run(step, range(5))
    if way == "state_dict":
        saved = pickle.loads(pickle.dumps(straight.state_dict()))
    else:
        saved = tf.train.Checkpoint(scalecom=straight).save(str(tmp_path / f"rank{hvd.rank()}"))
    after, norms = run(step, range(5, 9)), straight.state_dict()["recent_norms"]

    def load(compression):
        if way == "state_dict":
            compression.load_state_dict(saved)
            assert compression.state_dict()["step"] == 5  # what is saved again at once is the same
            return lambda: None
        return tf.train.Checkpoint(scalecom=compression).restore(saved).assert_consumed

    # As in a new process: load before the first step.
    check = load(resumed)
    assert_same(run(resumed, range(5, 9)), after)
    check()
    assert resumed.state_dict()["step"] == resumed.stats()["step"] == 9
    ratio = resumed.stats()["residue_ratio"]
    assert ratio == straight.stats()["residue_ratio"]
    assert mode or ratio is not None
    # A load in the middle of a run goes back to the saved step.
    load(straight)()
    assert straight.stats()["step"] == 5
    assert_same(run(step, range(5, 9)), after)
    for name, residue in straight.state_dict()["residues"].items():
        np.testing.assert_array_equal(residue, resumed.state_dict()["residues"][name])
    assert norms == straight.state_dict()["recent_norms"] == resumed.state_dict()["recent_norms"]


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.keras.optimizers.Adam(0.01),
        lambda: tf.keras.optimizers.legacy.SGD(0.1, 0.9),
    ],
    ids=["Adam", "legacy SGD"],
)
def test_a_fit_goes_on_where_it_stopped(make, tmp_path):
    """Model, optimizer and residues are in one checkpoint of this rank."""
    x, y = examples(hvd.rank())

    def build():
        model = net()
        compression = scalecom()
        model.compile(keras.DistributedOptimizer(make(), compression=compression), "mse")
        parts = {"model": model, "optimizer": model.optimizer, "scalecom": compression}
        return model, tf.train.Checkpoint(**parts)

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


def test_residues_are_no_variables_of_a_model_that_holds_the_scalecom():
    """A model's training step may need it there. Rank 0 broadcasts the model's variables."""
    compression, layers = scalecom(), net()
    model, module = tf.keras.Model(layers.inputs, layers.outputs), tf.Module()
    model.compression = module.compression = compression
    run(compression, range(3))
    assert len(model.variables) == len(model.get_weights()) == 6
    assert not module.variables
    state = compression.state_dict()
    assert (state["version"], state["step"], state["config"]["rate"]) == (2, 3, 20)
    shapes = {name: residue.shape for name, residue in state["residues"].items() if residue.any()}
    assert shapes == {"first": FEW["first"]}


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
    for number in range(2):
        step(number)
    path = tf.train.Checkpoint(scalecom=straight).write(str(tmp_path / f"rank{hvd.rank()}"))
    resumed, other_step = training()
    status = tf.train.Checkpoint(scalecom=resumed).read(path)
    for number in range(2, 4):
        for mine, other in zip(other_step(number), step(number), strict=True):
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
    status.assert_consumed()


@pytest.mark.parametrize("way", [pytest.param("state_dict", marks=pytest.mark.long), "checkpoint"])
def test_a_state_of_an_earlier_release_with_look_ahead(way, tmp_path, monkeypatch):
    """Its residues and its step count. What the leader had chosen is dropped."""
    straight, resumed = scalecom(), scalecom()
    step = Step(variables(FEW), straight)
    run(step, range(3))
    state, (progress,) = straight.state_dict(), straight._streams[0].progress.values()
    state["config"]["lookahead"] = True
    if way == "state_dict":
        more = {"offsets": {"first": np.zeros(150, np.uint8)}, "scales": {"first": np.ones(1)}}
        state["exchanges"] = {progress.label: state["exchanges"][progress.label] | more}
        resumed.load_state_dict(state)
    else:
        settings = {
            "version": 2,
            "config": state["config"],
            "rank": hvd.rank(),
            "ranks": hvd.size(),
        }
        monkeypatch.setattr(straight._settings, "serialize", lambda: json.dumps(settings))
        progress.ahead = tf.Variable(True)
        progress.offsets = {"first": tf.Variable(tf.zeros(150, tf.uint8))}
        path = tf.train.Checkpoint(scalecom=straight).write(str(tmp_path / f"rank{hvd.rank()}"))
        tf.train.Checkpoint(scalecom=resumed).read(path)
    assert_same(run(resumed, range(3, 5)), run(step, range(3, 5)))
    assert resumed.stats()["step"] == 5


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
        run(resumed, range(3, 5), traced=False)
        return resumed

    assert resume((hvd.rank() + 1) % hvd.size()).stats()["step"] == 5
    with pytest.raises(RuntimeError, match="ranks 0 and 1 have both loaded the residues of rank 0"):
        resume(0)


def test_a_state_saved_before_the_first_step():
    compression = scalecom()
    compression.load_state_dict(scalecom().state_dict())
    run(compression, range(2))
    assert compression.state_dict()["step"] == 2


def test_residues_that_were_made_after_a_commit_are_zero_when_it_is_restored():
    """A worker may be lost before the first commit that has residues."""
    compression = scalecom()
    step = Step(variables(FEW), compression)
    state = elastic.TensorFlowState([*step.model.values()], batch=0)  # this commits, too
    first, late = run(step, range(2)), scalecom()
    run(late, range(1), traced=False)
    for each in (compression, late):
        assert each.stats()["residue_norm"] > 0
    state.restore()
    for each in (compression, late):
        assert (each.stats()["step"], each.stats()["residue_norm"]) == (0, 0)
    assert_same(run(step, range(2)), first)


def test_a_variable_that_begins_after_a_commit_has_no_residue_when_it_is_restored():
    compression = scalecom()
    early, late = {"first": (60, 50)}, {"late": (60, 50)}
    model = variables(early | late)
    run(Step({"first": model["first"]}, compression), range(2), early)
    state = elastic.TensorFlowState([*model.values()], batch=0)  # this commits, too
    norm = compression.stats()["residue_norm"]
    run(Step({"late": model["late"]}, compression), range(2), late)
    state.restore()
    assert compression.stats()["residue_norm"] == norm > 0


def test_a_newcomer_starts_with_empty_residues(caplog):
    compression = scalecom()
    run(compression, range(5))
    again = scalecom()
    if hvd.rank() < hvd.size() - 1:
        again.load_state_dict(compression.state_dict())
    step = Step(variables(FEW), again)
    run(step, range(5, 6))
    assert again.stats()["step"] == 6
    assert "ranks come from different steps" in caplog.text
    sent = run(step, range(6, 9))
    assert same_on_all_ranks([tf.constant(average) for average in sent[-1].values()])


@pytest.fixture
def joined(elastic_run):
    """joined(number, given, settings) -> Steps that have trained, except on the last rank.

    That rank has forgotten everything, as if it had just come. Its new ScaleComs have the settings.
    given: the shapes of the variables that had gradients.
    """

    def join(number=1, given=FEW, **settings):
        steps = [Step(variables(FEW), scalecom()) for _ in range(number)]
        for i in range(number):  # no variable may keep a step
            run(steps[i], range(2), given)
        if hvd.rank() == hvd.size() - 1:
            steps = [Step(variables(FEW), scalecom(**settings)) for _ in range(number)]
        elastic.TensorFlowState([*steps[0].model.values()], batch=0).reset()
        return steps

    return join


def test_a_new_rank_takes_part_in_the_exchanges_of_two_scalecoms(joined):
    """Their variables have the same names. The other ranks' functions are not traced again."""
    for step in joined(2):
        (sent,) = run(step, [2])
        assert step.compression.stats()["step"] == 3
        assert same_on_all_ranks([tf.constant(average) for average in sent.values()])


@pytest.mark.parametrize(
    ("given", "settings", "says"),
    [
        (FEW, {"rate": 40}, "rate is 20.0 on rank 0 and 40.0 on rank 1"),
        ({"first": FEW["first"]}, {}, "ranks that trained before send no gradient of bias"),
    ],
    ids=["settings", "gradients"],
)
def test_a_new_rank_that_differs_is_refused(joined, given, settings, says):
    (step,) = joined(1, given, **settings)
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(RuntimeError, match=says):
            run(step, [2])


def test_ranks_that_meet_go_on_at_the_step_of_the_first(elastic_run):
    """Its weights count, too."""
    compression = scalecom()
    step = Step(variables(FEW), compression)
    run(step, range(2))
    state = compression.state_dict()
    (label,) = state["exchanges"]
    own = state["exchanges"][label] | {"step": 5 + hvd.rank()}
    compression.load_state_dict(state | {"exchanges": {label: own}})
    elastic.TensorFlowState([*step.model.values()], batch=0).reset()
    assert compression.stats()["step"] == 5


@pytest.mark.long
def test_variables_that_thaw_after_a_resume():
    """Variables that were not there when the state was saved start with empty residues."""
    compression, resumed, model = scalecom(), scalecom(), variables(SHAPES)
    few = {name: model[name] for name in FEW}
    run(Step(few, compression, traced=False), range(1))
    resumed.load_state_dict(compression.state_dict())
    run(Step(few, resumed, traced=False), range(1, 2))
    run(Step(model, resumed), range(2, 4), SHAPES)
    assert resumed.stats()["step"] == 4
    assert set(resumed.state_dict()["residues"]) == {"first", "second", "third"}


MORE = FEW | {"fourth": (5000,)}
# Only after the first step is it known that no variable comes for this residue.
FIFTH = "fifth is not in this model"
# {what the error says: what the state says instead}
UNFIT = {
    "beta=0.7 in the state and 0.5 now": {"config": {"beta": 0.7}},
    "version 99, but this release reads only version 2": {"version": 99},
    r"first has shape \(50, 50\) in the state and \(60, 50\) in the model": {
        "residues": {"first": np.zeros((50, 50), np.float32)}
    },
    FIFTH: {"residues": {"fifth": np.zeros(5000, np.float32)}},
    "fourth is not in the state": {"residues": {"fourth": None}},
}


def test_what_no_variable_has_taken_up_yet_is_saved_and_loaded_again():
    """Such as the residue of a layer that was frozen since. It waits for its variable."""
    before = scalecom(beta=0.5)
    run(before, range(2), MORE)
    state = before.state_dict()
    made = scalecom(beta=0.5)
    made.load_state_dict(state)
    run(made, range(1), FEW, traced=False)
    made.load_state_dict(made.state_dict())
    np.testing.assert_array_equal(
        made.state_dict()["residues"]["fourth"], state["residues"]["fourth"]
    )
    run(made, range(1), {"fourth": MORE["fourth"]}, traced=False)
    made.load_state_dict(made.state_dict())


def test_a_refused_state_settles_nothing():
    with_nan = {"residues": {"first": np.full((60, 50), np.nan, np.float32)}}
    before, made = scalecom(nu=0.5), scalecom()
    with pytest.raises(ValueError, match="not finite"):
        made.load_state_dict(before.state_dict() | with_nan)
    run(made, range(1), FEW, traced=False)  # by a tape, which takes no nu


def test_states_that_do_not_fit_are_refused(tmp_path):
    """Before the first step, which may refuse it, and after."""
    compression, made = scalecom(beta=0.5), scalecom(beta=0.5)
    run(compression, range(2), MORE)
    run(made, range(1), MORE, traced=False)
    state = compression.state_dict()
    for message, changes in UNFIT.items():
        spoilt = dict(state)
        for key, change in changes.items():
            spoilt[key] = state[key] | change if isinstance(change, dict) else change
        residues = spoilt["residues"].items()
        spoilt["residues"] = {name: own for name, own in residues if own is not None}
        if message != FIFTH:
            early = scalecom(beta=0.5)
            with pytest.raises(ValueError, match=message):
                early.load_state_dict(spoilt)
                run(early, range(1), MORE, traced=False)
        with pytest.raises(ValueError, match=message):
            made.load_state_dict(spoilt)
        assert made.state_dict()["step"] == 1
    with pytest.raises(ValueError, match="it lacks config, residues, settings, step, version"):
        compression.load_state_dict({})
    path = tf.train.Checkpoint(scalecom=compression).save(str(tmp_path / f"rank{hvd.rank()}"))
    for steps_before in (0, 1):
        other = scalecom(beta=1.0)
        run(other, range(steps_before), MORE, traced=False)
        with pytest.raises(ValueError, match=r"beta=0.5 in the state and 1.0 now"):
            tf.train.Checkpoint(scalecom=other).restore(path)
            run(other, range(1), MORE, traced=False)
        assert other.state_dict()["step"] == steps_before
    other = scalecom(beta=0.5, rate=1, bits=32)
    with pytest.raises(ValueError, match="what those of the state hold would be lost"):
        tf.train.Checkpoint(scalecom=other).restore(path)
        run(other, range(1), MORE, traced=False)
