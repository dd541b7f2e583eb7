"""Methods as users might write them, each with one mistake.

All are refused, and the error says what to do. None hangs, and none silently gives wrong numbers.
"""

import dataclasses
import math

import pytest
import simulated
import torch

from scalecom_hvd.exchange import LocalTopK, Method, Quantiser, ScaleCom

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


class Right(Method):
    """A correct method: the leader chooses. It has a count per tensor, and one for all tensors."""

    def init(self, tensor):
        return {"sent": torch.zeros(tensor.residue.numel())}

    def init_method(self):
        return {"steps": torch.zeros(())}

    def step(self, bucket, collectives, state):
        chosen = bucket.choose()
        offsets = yield from collectives.broadcast(chosen, collectives.leader())
        places = bucket.places_at(offsets)
        values = bucket.accumulators[places]
        bucket.send(places, values)
        bucket.receive(places, (yield from collectives.average(values)))
        return self.next_state(bucket, state, places)

    def next_state(self, bucket, state, places):
        count = torch.cat([own["sent"] for own in state.tensors.values()])
        count[places] += 1
        parts = zip(bucket.compressed, count.split(bucket.sizes), strict=True)
        own = {name: {"sent": part.clone()} for name, part in parts}
        method = {"steps": state.method["steps"] + 1}
        return dataclasses.replace(state, tensors=own, method=method)


WRONG = {}


def wrong(kind, message):
    """A decorator of a step with a mistake. It says how the mistake is refused."""

    def note(step):
        WRONG[step.__name__] = type(step.__name__, (Right,), {"step": step}), kind, message

    return note


TEN = torch.arange(10)


def right(bucket, collectives):
    """Send and receive ten elements of a bucket correctly."""
    values = bucket.accumulators[TEN]
    bucket.send(TEN, values)
    bucket.receive(TEN, (yield from collectives.average(values)))


WRONG["no_step"] = type("NoStep", (Method,), {}), NotImplementedError, "NoStep must define step"


@wrong(TypeError, "no_generator.* must be a generator")
def no_generator(self, bucket, collectives, state):
    return state


@wrong(RuntimeError, r"ended without bucket\.receive")
def receives_nothing(self, bucket, collectives, state):
    values = bucket.accumulators[TEN]
    bucket.send(TEN, values)
    yield from collectives.average(values)


@wrong(RuntimeError, r"ended without bucket\.receive")
def does_not_receive_in_place(self, bucket, collectives, state):
    offsets = yield from collectives.broadcast(torch.zeros_like(bucket.new_offsets()), 0)
    yield from bucket.take_and_accumulate(offsets)
    yield from collectives.average_taken()


@wrong(RuntimeError, "did not wait for 'mean'")
def does_not_wait(self, bucket, collectives, state):
    yield from right(bucket, collectives)
    collectives.average(torch.ones(3), "mean")


@wrong(RuntimeError, "must come after `yield from bucket.take_and_accumulate")
def does_not_take(self, bucket, collectives, state):
    offsets = yield from collectives.broadcast(torch.zeros_like(bucket.new_offsets()), 0)
    bucket.take_and_accumulate(offsets)
    bucket.receive(offsets, (yield from collectives.average_taken()))


@wrong(TypeError, "is a `yield from` missing")
def receives_a_wait(self, bucket, collectives, state):
    bucket.receive(TEN, collectives.average(bucket.accumulators[TEN]))
    yield


@wrong(ValueError, r"there are \(1,\) values for \(10,\) indices")
def sends_less(self, bucket, collectives, state):
    bucket.send(TEN, bucket.accumulators[:1])
    yield from right(bucket, collectives)


@wrong(ValueError, r"there are \(1,\) values for \(3000,\) indices")
def receives_less(self, bucket, collectives, state):
    bucket.receive(slice(None), (yield from collectives.average(torch.ones(1))))


@wrong(ValueError, "different numbers of rows \\([56] on this rank, 11 in total")
def gathers_unequally(self, bucket, collectives, state):
    yield from collectives.gather(torch.ones(5 + collectives.position), "values")


@wrong(RuntimeError, "averages of a differ between ranks 0 and 1")
def receives_its_own(self, bucket, collectives, state):
    values = bucket.accumulators[TEN]
    bucket.receive(TEN, values)
    yield from collectives.average(values.clone())


@wrong(
    RuntimeError,
    r"ranks \[0\] wait for scalecom.*one.0, which \[1\] have not submitted; ranks \[1\] wait",
)
def asks_in_another_order(self, bucket, collectives, state):
    for name in ("one", "other")[:: 1 - 2 * collectives.position]:
        yield from collectives.average(torch.ones(3), name)
    yield from right(bucket, collectives)


def changed(state, kept):
    for value in kept.values():
        value.add_(1)
    return state


# What a method returns as its next state, given the bucket, the state and where it sent.
REPLACE = dataclasses.replace
STATES = {
    "no State": (lambda bucket, state, places: places, "next State.*or None, not Tensor"),
    "changed in place": (
        lambda bucket, state, places: changed(state, state.tensors["a"]),
        "changed its state in place",
    ),
    "the method's, changed in place": (
        lambda bucket, state, places: changed(state, state.method),
        "changed its state in place",
    ),
    "another of the method": (
        lambda bucket, state, places: REPLACE(state, method={"count": 1}),
        r"returned \['count'\] for the whole method",
    ),
    "another shape": (
        lambda bucket, state, places: REPLACE(state, tensors={"a": {"sent": places}}),
        r"'sent' of a became \(150,\), torch.int64",
    ),
    "another dtype": (
        lambda bucket, state, places: REPLACE(
            state, tensors={"a": {"sent": state.tensors["a"]["sent"].double()}}
        ),
        r"'sent' of a became \(3000,\), torch.float64",
    ),
    "no tensor": (
        lambda bucket, state, places: REPLACE(state, tensors={"a": {"sent": 3.0}}),
        "'sent' of a must be a tensor, not 3.0",
    ),
    "another tensor": (
        lambda bucket, state, places: REPLACE(state, tensors={"b": state.tensors["a"]}),
        "as the state of 'b', but init.* gave None",
    ),
    "a view": (
        lambda bucket, state, places: REPLACE(state, tensors={"a": {"sent": bucket.parts[0]}}),
        "is a view of the bucket's accumulators.*clone it",
    ),
    "the gradient": (
        lambda bucket, state, places: REPLACE(state, tensors={"a": {"sent": bucket.grads["a"]}}),
        "is a view of the bucket's.*clone it",
    ),
    "the residue": (
        lambda bucket, state, places: REPLACE(
            state, tensors={"a": {"sent": bucket.tensors[0].residue}}
        ),
        "is a view of the bucket's.*clone it",
    ),
}


def simulate(method, **settings):
    settings = {"rate": 20, "dense": [], "warmup_steps": 0, **settings}
    return simulated.simulate(2, {"a": (30, 100)}, compression=method, **settings)


def gradients():
    return simulated.as_tensors(simulated.made_up(2, 0, {"a": (30, 100)}))


def test_without_a_mistake_it_is_taken():
    simulation = simulate(Right)
    for _ in range(3):
        one, other = simulation.step(gradients())
        assert torch.equal(one["a"], other["a"])
        assert one["a"].count_nonzero() == 150
    assert simulation.compressors[1].run.method_state["steps"] == 3


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_refused_and_the_step_rolled_back(mistake):
    method, kind, message = WRONG[mistake]
    simulation = simulate(method)
    with pytest.raises(kind, match=message):
        simulation.step(gradients())
    if mistake != "receives_its_own":  # the simulation notices it afterwards
        assert not any(own.residues.tensors["a"].residue.any() for own in simulation.compressors)


@pytest.mark.parametrize("what", STATES)
def test_a_wrong_state_is_refused_and_the_step_rolled_back(what):
    give, message = STATES[what]
    method = type("Wrong", (Right,), {"next_state": lambda self, *of_step: give(*of_step)})
    simulation = simulate(method)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        simulation.step(gradients())
    assert not any(own.residues.tensors["a"].residue.any() for own in simulation.compressors)


class OfWords(Quantiser):
    """Its levels have 32 bits. Each of their bytes would be taken for a level."""

    bits = 8

    def quantise(self, blocks, counts):
        return torch.ones(len(blocks), 1, dtype=blocks.dtype), blocks.int()

    def restore(self, scales, levels):
        return scales * levels


def test_a_quantiser_of_other_words_is_refused():
    with pytest.raises(ValueError, match=r"OfWords\.quantise gave scales and levels of"):
        simulate(LocalTopK, quantiser=OfWords()).step(gradients())


class Own(ScaleCom):
    """ScaleCom with a state of its own."""

    def init(self, tensor):
        return {"seen": torch.zeros(2)}


def test_the_state_of_a_subclass_of_scalecom_is_checked():
    simulations = [simulate(kind) for kind in (Own, ScaleCom)]
    for simulation in simulations:
        simulation.step(gradients())
    own, plain = (simulation.compressors[0] for simulation in simulations)
    with pytest.raises(ValueError, match="made by another method"):
        plain.load_state_dict(own.state_dict())
    state = own.state_dict()
    state["method_state"]["tensors"]["seen"]["a"] = torch.zeros(3)
    with pytest.raises(ValueError, match="the method's state of a is"):
        own.load_state_dict(state)


def test_a_use_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match=r"Wrong.uses names \['bit'\], but knows only \('bits',"):
        type("Wrong", (Right,), {"uses": ("bit",)})()


def test_a_method_that_does_not_take_few_bits_has_them_refused():
    with pytest.raises(ValueError, match="bits means nothing to Right"):
        Right(bits=3)
    assert Right(bits=32).config.rate == 100


@pytest.mark.parametrize("method", [ScaleCom, LocalTopK])
def test_what_waits_is_compared_with_gradients_in_every_form(method):
    """The norms of residues are those after the step, whichever moves the method makes."""
    shapes = {"a": (30, 100), "b": (2500,), "c": (50, 60)}
    simulation = simulated.simulate(2, shapes, compression=method, bucket_bytes=10_000)
    grads = simulated.as_tensors(simulated.made_up(2, 0, shapes))
    norms = [grad.norm() for grad in grads[0].values()]
    simulation.step(grads)
    own = simulation.compressors[0]
    waits = own.stats()["residue_norm"] / own.config.beta
    assert own.stats()["residue_ratio"] == pytest.approx(waits / math.hypot(*norms))


def test_what_is_open_is_settled_before_a_method_serves():
    with pytest.raises(RuntimeError, match="before the method serves"):
        simulate(Right).compressors[0].settle(every_step=True)
