"""A method with state (tests/momentum.py) on simulated ranks."""

import copy
import dataclasses
import io

import numpy as np
import pytest
import simulated
import torch
from momentum import Momentum
from simulated import assert_same
from torch.utils._pytree import tree_leaves

from scalecom_hvd.exchange import Method
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.residue import torch_dtype
from scalecom_hvd.reference import select

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (6401,)}
BUCKETS = [["third", "bias"], ["second", "first"]]
COMPRESSED = ("first", "second", "third")
SETTINGS = {"rate": 20, "min_numel": 0, "dense": ["bias"], "warmup_steps": 0}


def simulate(n, compression=Momentum, **fields):
    fields = {"groups": BUCKETS, **SETTINGS, **fields}
    return simulated.simulate(n, SHAPES, compression=compression, **fields)


def trained(steps, n=2, **fields):
    """Return n simulated ranks that have taken so many steps."""
    simulation = simulate(n, **fields)
    for step in range(steps):
        simulation.step(made_up(n, step))
    return simulation


def made_up(n, step, spoilt=None, scale=1):
    """Return all ranks' gradients of a step. One of rank `spoilt` has a NaN."""
    everyone = simulated.made_up(n, step, SHAPES)
    if spoilt is not None:
        everyone[spoilt]["second"][1, 17] = np.nan
    return simulated.as_tensors(everyone, scale)


def everything(simulation):
    """Return copies of the residues and the state of all ranks."""
    return copy.deepcopy(
        [
            {
                "step": method.residues.step,
                "residues": {n: t.residue for n, t in method.residues.tensors.items()},
                "norms": {n: vars(t.norms) for n, t in method.residues.tensors.items()},
                "tensors": method.run.tensor_states,
                "method": method.run.method_state,
            }
            for method in simulation.compressors
        ]
    )


class Truth:
    """The method, spelled out for all ranks."""

    def __init__(self, simulation, mu=0.5):
        self.n, self.mu = len(simulation.compressors), mu
        self.beta = simulation.compressors[0].config.beta
        self.lanes = {
            name: tensor.geometry
            for name, tensor in simulation.compressors[0].residues.tensors.items()
        }

        def zeros():
            return {name: np.zeros(own.numel, np.float32) for name, own in self.lanes.items()}

        self.residues, self.velocities = ([zeros() for _ in range(self.n)] for _ in range(2))
        self.sent = {name: np.zeros(own.numel, np.int32) for name, own in self.lanes.items()}
        self.came, self.went = ({n: np.zeros(x.numel) for n, x in self.lanes.items()} for _ in "ab")

    def step(self, grads, whole=False):
        averages = {
            name: sum(own[name].numpy().astype(np.float64) for own in grads) / self.n
            for name in SHAPES
        }
        for name in COMPRESSED:
            average = np.zeros(self.lanes[name].numel)
            for rank in range(self.n):
                g = grads[rank][name].numpy().reshape(-1)
                u, m = self.velocities[rank][name], self.residues[rank][name]
                new = u * np.float32(self.mu) + g
                self.velocities[rank][name] = new
                if whole:
                    continue
                self.came[name] += new.astype(np.float64) / self.n
                acc = (m + g) + u * np.float32(self.mu)
                chosen = select(acc, self.lanes[name], "lanes")
                average[chosen] += acc[chosen].astype(np.float64) / self.n
                acc[chosen] = new[chosen] = 0
                self.sent[name][chosen] += 1
                beta = np.float32(self.beta)
                self.residues[rank][name] = m * (1 - beta) + acc * beta if beta != 1 else acc
            if not whole:
                self.went[name] += average
                averages[name] = average.reshape(SHAPES[name])
        return averages

    def check(self, simulation, outputs, averages):
        for output in outputs:
            for name, average in averages.items():
                assert torch.equal(output[name], outputs[0][name])
                np.testing.assert_allclose(output[name].numpy(), average, rtol=1e-6, atol=1e-6)
        for rank, method in enumerate(simulation.compressors):
            assert method.run.tensor_states.keys() == set(COMPRESSED)
            for name, state in method.run.tensor_states.items():
                residue = method.residues.tensors[name].residue
                np.testing.assert_array_equal(residue.numpy(), self.residues[rank][name])
                velocity = state["velocity"].numpy()
                np.testing.assert_array_equal(velocity, self.velocities[rank][name])
                np.testing.assert_array_equal(state["sent"].numpy(), self.sent[name])


@pytest.mark.parametrize(
    "fields", [{}, {"beta": 0.5}, {"loss_scale": lambda: 4.0}, {"warmup_steps": 4}], ids=" ".join
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_state_is_made_by_init_and_committed_only_with_a_step_that_counts(n, fields):
    """Uncompressed steps update the momentum, and leave residues unchanged."""
    simulation = simulate(n, **fields)
    truth, warmup = Truth(simulation), fields.get("warmup_steps", 0)
    scale = 4 if "loss_scale" in fields else 1
    for own in everything(simulation):
        assert own["method"] == {"steps": 0, "whole": 0}
        assert not any(part.any() for kept in own["tensors"].values() for part in kept.values())
    for step in range(10):
        if step in (0, 2, 5, 6):
            before = everything(simulation)
            outputs = simulation.step(made_up(n, 100 + step, spoilt=step % n, scale=scale))
            assert all(grad.isnan().all() for output in outputs for grad in output.values())
            assert_same(everything(simulation), before)
        averages = truth.step(made_up(n, step), whole=step < warmup)
        outputs = simulation.step(made_up(n, step, scale=scale))
        for output in outputs:
            for grad in output.values():
                grad /= scale
        truth.check(simulation, outputs, averages)
        for own in everything(simulation):
            counts = {"steps": max(step + 1 - warmup, 0), "whole": min(step + 1, warmup)}
            assert own["method"] == counts
    assert simulation.compressors[0].residues.buckets == BUCKETS
    assert [own.stats()["skipped_steps"] for own in simulation.compressors] == [4] * n
    if truth.beta == 1 and not warmup:  # nothing is lost: velocities are what came in
        for name in COMPRESSED:
            left = sum(own[name].astype(np.float64) for own in truth.residues) / n
            np.testing.assert_allclose(truth.went[name] + left, truth.came[name], atol=1e-5)


def saved(simulation):
    """Return the state that every rank reads back from its file."""
    states = []
    for method in simulation.compressors:
        file = io.BytesIO()
        torch.save(method.state_dict(), file)
        file.seek(0)
        states.append(torch.load(file, weights_only=True))
    return states


def resumed(states, early=False, **fields):
    """Return new ranks that have loaded these states; early: before they have an optimizer."""
    if early:
        methods = []

        def make(**settings):
            methods.append(Momentum(**settings))
            methods[-1].load_state_dict(states[len(methods) - 1])
            return methods[-1]

        return simulate(len(states), compression=make, **fields)
    simulation = simulate(len(states), **fields)
    for method, state in zip(simulation.compressors, states, strict=True):
        method.load_state_dict(state)
    return simulation


def tensors_in(state):
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_run_goes_on_from_a_file_to_the_bit(at, early):
    """The file is from the start, from within the warm-up, or from after it."""
    simulation = trained(at, warmup_steps=4)
    states = saved(simulation)
    kept = copy.deepcopy(states)
    again = resumed(states, early, warmup_steps=4)
    for state in states:  # the script may change its own copy
        for tensor in tensors_in(state):
            tensor.fill_(1)
    assert_same(everything(again), everything(simulation))
    for step in range(at, 9):
        if step == 7:
            for run in (simulation, again):
                run.step(made_up(2, 100, spoilt=1))
        assert_same(again.step(made_up(2, step)), simulation.step(made_up(2, step)))
        assert_same(everything(again), everything(simulation))
    assert all(tensor.eq(1).all() for state in states for tensor in tensors_in(state))
    for run in (simulation, again):
        for method, state in zip(run.compressors, kept, strict=True):
            method.load_state_dict(copy.deepcopy(state))
    if at:
        assert_same(everything(again), everything(simulation))
        assert_same(again.step(made_up(2, at)), simulation.step(made_up(2, at)))


def test_a_state_saved_before_there_was_an_optimizer_is_that_of_the_start():
    simulation = trained(3)
    for method in simulation.compressors:
        method.load_state_dict(Momentum(**SETTINGS).state_dict())
    assert_same(everything(simulation), everything(trained(0)))


def test_a_state_that_no_optimizer_has_used_is_saved_as_it_was():
    (state,) = saved(trained(3, 1))
    state |= {"local_steps": {"taken": 3}, "shard": [1, 2]}
    method = Momentum(**SETTINGS)
    method.load_state_dict(state)
    again = method.state_dict()
    assert again.keys() == state.keys()
    for what in ("residues", "recent_norms", "method_state", "local_steps", "shard"):
        assert again[what] is state[what]


def put(state, path, value=None):
    """Change a state where this path of keys leads; no value: remove what is there."""
    *way, last = path.split()
    for key in way:
        state = state[key]
    del state[last]
    if value is not None:
        state[last] = value


# {what is wrong with a state: (what to put, and where; the message)}
MISFITS = {
    "no state of the method": (["method_state"], "the method's state of"),
    "a kind is missing": (["method_state tensors velocity"], "state of (first|second|third) is"),
    "other kinds": (
        ["method_state tensors", {"sent": {}, "other": {}}],
        "the method's state of (first|second|third) is",
    ),
    "a tensor is missing": (["method_state tensors sent third"], "the method's state of third is"),
    "another shape": (
        ["method_state tensors velocity second", torch.zeros(2999)],
        r"the method's state of second is \{'velocity': \(2999,\), 'sent': \(3000,\)\} in the "
        r"loaded state.*another model, or another version of Momentum",
    ),
    "the method's own is missing": (
        ["method_state method whole"],
        r"the state of the whole method is \{'steps': None\} in the loaded state, but .*'whole'",
    ),
    "the method's own of another shape": (
        ["method_state method whole", torch.zeros(3)],
        r"the state of the whole method is .*'whole': \(3,\)",
    ),
    "another setting": (["settings mu", 0.9], "made by another method.*mu=0.9"),
    "another method": (
        ["settings method", "LocalTopK"],
        "made by another method, or with other settings of the method: method='LocalTopK'",
    ),
    "another model": (
        ["residues third", torch.zeros(6400)],
        r"third has shape \(6400,\) in the state and \(6401,\) in the model",
    ),
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("case", MISFITS)
def test_a_state_that_does_not_fit_is_refused(case, early):
    change, message = MISFITS[case]
    simulation = trained(3)
    states = saved(simulation)
    simulation.step(made_up(2, 3))
    put(states[0], *change)
    if early:
        with pytest.raises(ValueError, match=message):
            resumed(states, early)
        return
    before = everything(simulation)
    with pytest.raises(ValueError, match=message):
        simulation.compressors[0].load_state_dict(states[0])
    assert_same(everything(simulation), before)


def test_what_must_be_equal_begins_anew_where_ranks_disagree(caplog):
    """In an elastic run, for example, one rank may have committed steps that the other did not."""
    simulation = simulate(2)
    states = {}
    for step in range(5):
        simulation.step(made_up(2, step))
        states[step + 1] = saved(simulation)
    again = resumed([states[3][0], states[5][1]])
    before = everything(again)
    assert not torch.equal(*(own["tensors"]["first"]["sent"] for own in before))
    averages = again.step(made_up(2, 5))
    assert "going on at step 5" in caplog.text
    assert_same(*averages)
    truth = Truth(again)
    for rank, own in enumerate(before):
        for name in COMPRESSED:
            truth.residues[rank][name] = own["residues"][name].numpy()
            truth.velocities[rank][name] = own["tensors"][name]["velocity"].numpy()
    truth.check(again, averages, truth.step(made_up(2, 5)))  # `sent` counts from zero
    assert [own.run.method_state["steps"] for own in again.compressors] == [1, 1]
    assert [own.residues.step for own in again.compressors] == [6, 6]


@pytest.mark.parametrize("where", ["gather", "check"])
def test_an_error_in_mid_step_leaves_what_ranks_have_of_their_own(where, monkeypatch):
    """State that must be equal begins anew, because one rank may have come further.

    At a bucket's check, all is averaged, but nothing counts yet.
    """
    simulation = trained(3)
    before = everything(simulation)

    def fail(*_):
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(simulation.collectives[1] if where == "gather" else BucketStep, where, fail)
        with pytest.raises(OSError, match="no route to host"):
            simulation.step(made_up(2, 3))
    after = everything(simulation)
    for own in before:
        own["method"]["steps"] = 0
        for kept in own["tensors"].values():
            kept["sent"] = torch.zeros_like(kept["sent"])
    assert_same(after, before)
    for step in range(3, 6):
        assert_same(*simulation.step(made_up(2, step)))
    assert_same(*(own["tensors"]["first"]["sent"] for own in everything(simulation)))
    assert [own.run.method_state["steps"] for own in simulation.compressors] == [3, 3]


class Chooses(Method):
    """Keeps the leader's last choice as state, in views of the bucket's buffer.

    It counts in bfloat16. Only the first bucket counts for the method.
    """

    equal_state = ("count",)

    def init(self, tensor):
        return {
            "chosen": torch.zeros(
                tensor.geometry.k, dtype=torch_dtype(tensor.geometry.offset_dtype)
            ),
            "count": torch.zeros(1, dtype=torch.bfloat16),
        }

    def init_method(self):
        return {"steps": torch.zeros(1, dtype=torch.int64)}

    def step(self, bucket, collectives, state):
        offsets = yield from collectives.broadcast(bucket.choose(), collectives.leader())
        places = bucket.places_at(offsets)
        values = bucket.accumulators[places]
        bucket.send(places, values)
        bucket.receive(places, (yield from collectives.average(values)))
        own = {
            name: {"chosen": choice["offsets"], "count": state.tensors[name]["count"] + 1}
            for name, choice in bucket.choices.split(offsets).items()
        }
        method = state.method
        if collectives.bucket == 0:
            method = {"steps": state.method["steps"] + 1}
        return dataclasses.replace(state, tensors=own, method=method)

    def whole_step(self, bucket, collectives, state):
        """Look at the accumulators. This changes nothing."""
        assert bucket.choose().numel()
        return None
        yield


def test_views_of_the_choice_are_saved_as_copies():
    """Offsets of two widths share a buffer, which torch.save would refuse."""
    simulation = trained(3, compression=Chooses, rates={"third": 999})
    (kept, _), (first, _) = saved(simulation), copy.deepcopy(saved(simulation))
    torch.save(simulation.compressors[0].state_dict(), io.BytesIO())
    for step in range(3, 6):
        simulation.step(made_up(2, step))
    assert_same(kept["method_state"], first["method_state"])
    assert kept["method_state"]["method"]["steps"] == 3, "one bucket's change is kept"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_whole_step_may_look_at_accumulators(dtype):
    fields = {"rate": 20, "dense": [], "warmup_steps": 1, "compression": Chooses}
    simulation = simulated.simulate(2, {"a": (3000,)}, dtype, **fields)
    averages = simulation.step(
        [{"a": torch.full((3000,), rank + 1, dtype=dtype)} for rank in (0, 1)]
    )
    assert_same(averages[0]["a"], torch.full((3000,), 1.5, dtype=dtype))
    assert not any(method.residues.norm() for method in simulation.compressors)


def test_what_was_loaded_is_kept_where_no_optimizer_could_be_made():
    """The script corrects its mistake, and tries again with the same object."""
    simulation = trained(3, 1)
    (state,), wanted = saved(simulation), everything(simulation)

    def serve(method):
        return simulate(1, compression=lambda **settings: method)

    method = Momentum(**SETTINGS)
    method.load_state_dict(copy.deepcopy(state))
    for _ in range(2):
        with pytest.raises(KeyError), method.run.released_on_error():
            assert_same(everything(serve(method)), wanted)
            raise KeyError
    method.load_state_dict(copy.deepcopy(state))
    assert_same(everything(serve(method)), wanted)

    # Load a state that does not fit, and then the right one.
    for case in ("a kind is missing", "another model"):
        method, wrong = Momentum(**SETTINGS), copy.deepcopy(state)
        put(wrong, *MISFITS[case][0])
        method.load_state_dict(wrong)
        with pytest.raises(ValueError, match=MISFITS[case][1]):
            serve(method)
        method.load_state_dict(copy.deepcopy(state))
        assert_same(everything(serve(method)), wanted)
