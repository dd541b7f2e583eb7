"""Methods as users might write them, each with one mistake.

All are refused, and the error says what to do. None hangs, and none silently gives wrong numbers.
"""

import dataclasses

import pytest
import torch

from scalecom_hvd.exchange import LocalTopK, Method, Quantiser, ScaleCom, Simulation

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


class Right(Method):
    """A correct method: the leader chooses. It has a count per tensor, and one for all tensors."""

    def init(self, tensor):
        return {"sent": torch.zeros(tensor.residue.numel())}

    def init_method(self):
        return {"steps": 0}

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


def right(bucket, collectives):
    """Send and receive ten elements of a bucket correctly."""
    places = torch.arange(10)
    values = bucket.accumulators[places]
    bucket.send(places, values)
    bucket.receive(places, (yield from collectives.average(values)))


class NoStep(Method):
    pass


class NoGenerator(Right):
    def step(self, bucket, collectives, state):
        return state


class ReturnsATensor(Right):
    def next_state(self, bucket, state, places):
        return places


class ReceivesNothing(Right):
    def step(self, bucket, collectives, state):
        places = torch.arange(10)
        values = bucket.accumulators[places]
        bucket.send(places, values)
        yield from collectives.average(values)


class DoesNotReceiveInPlace(Right):
    def step(self, bucket, collectives, state):
        offsets = yield from collectives.broadcast(torch.zeros_like(bucket.new_offsets()), 0)
        yield from bucket.take_and_accumulate(offsets)
        yield from collectives.average_taken()


class DoesNotWait(Right):
    def step(self, bucket, collectives, state):
        yield from right(bucket, collectives)
        collectives.average(torch.ones(3), "mean")


class DoesNotTake(Right):
    def step(self, bucket, collectives, state):
        offsets = yield from collectives.broadcast(torch.zeros_like(bucket.new_offsets()), 0)
        bucket.take_and_accumulate(offsets)
        bucket.receive(offsets, (yield from collectives.average_taken()))


class ReceivesAWait(Right):
    def step(self, bucket, collectives, state):
        places = torch.arange(10)
        bucket.receive(places, collectives.average(bucket.accumulators[places]))
        yield


class SendsLess(Right):
    def step(self, bucket, collectives, state):
        bucket.send(torch.arange(10), bucket.accumulators[:1])
        yield from right(bucket, collectives)


class ReceivesLess(Right):
    def step(self, bucket, collectives, state):
        bucket.receive(slice(None), (yield from collectives.average(torch.ones(1))))


class GathersUnequally(Right):
    def step(self, bucket, collectives, state):
        rows = 5 + collectives.position
        for theirs in (yield from collectives.gather(torch.ones(rows), "values")):
            bucket.receive(torch.arange(len(theirs)), theirs)


class ReceivesItsOwn(Right):
    def step(self, bucket, collectives, state):
        places = torch.arange(10)
        values = bucket.accumulators[places]
        bucket.receive(places, values)
        yield from collectives.average(values.clone())


class AsksInAnotherOrder(Right):
    def step(self, bucket, collectives, state):
        names = ["one", "other"][:: 1 - 2 * collectives.position]
        for name in names:
            yield from collectives.average(torch.ones(3), name)
        yield from right(bucket, collectives)


class ChangesItsState(Right):
    def next_state(self, bucket, state, places):
        for own in state.tensors.values():
            own["sent"].add_(1)
        return state


class ChangesTheMethodsState(Right):
    def init_method(self):
        return {"steps": torch.zeros(())}

    def next_state(self, bucket, state, places):
        state.method["steps"].add_(1)
        return state


class StateOfAnotherShape(Right):
    def next_state(self, bucket, state, places):
        return dataclasses.replace(state, tensors={"a": {"sent": places}})


class StateOfNoTensor(Right):
    def next_state(self, bucket, state, places):
        return dataclasses.replace(state, tensors={"a": {"sent": 3.0}})


class StateOfAnotherTensor(Right):
    def next_state(self, bucket, state, places):
        return dataclasses.replace(state, tensors={"b": state.tensors["a"]})


class StateThatIsAView(Right):
    def next_state(self, bucket, state, places):
        return dataclasses.replace(state, tensors={"a": {"sent": bucket.parts[0]}})


class StateThatIsTheResidue(Right):
    def next_state(self, bucket, state, places):
        (tensor,) = bucket.tensors
        own = {tensor.name: {"sent": tensor.residue}}
        return dataclasses.replace(state, tensors=own)


class AnotherMethodState(Right):
    def next_state(self, bucket, state, places):
        return dataclasses.replace(state, method={"count": 1})


WRONG = {
    NoStep: (NotImplementedError, "NoStep must define step"),
    NoGenerator: (TypeError, "NoGenerator.step must be a generator"),
    ReturnsATensor: (TypeError, "must return the next State.*or None, not Tensor"),
    ReceivesNothing: (RuntimeError, r"ended without bucket\.receive"),
    DoesNotReceiveInPlace: (RuntimeError, r"ended without bucket\.receive"),
    DoesNotWait: (RuntimeError, "did not wait for 'mean'"),
    DoesNotTake: (RuntimeError, "must come after `yield from bucket.take_and_accumulate"),
    ReceivesAWait: (TypeError, "is a `yield from` missing"),
    SendsLess: (ValueError, r"there are \(1,\) values for \(10,\) indices"),
    ReceivesLess: (ValueError, r"there are \(1,\) values for \(3000,\) indices"),
    GathersUnequally: (ValueError, "different numbers of rows \\([56] on this rank, 11 in total"),
    AsksInAnotherOrder: (
        RuntimeError,
        r"ranks \[0\] wait for scalecom.*one.0, which \[1\] have not submitted; ranks \[1\] wait",
    ),
    ChangesItsState: (RuntimeError, "changed its state in place"),
    ChangesTheMethodsState: (RuntimeError, "changed its state in place"),
    StateOfAnotherShape: (ValueError, r"'sent' of a became \(150,\), torch.int64"),
    StateOfNoTensor: (ValueError, "'sent' of a must be a tensor, not 3.0"),
    StateOfAnotherTensor: (ValueError, "as the state of 'b', but init.* gave None"),
    StateThatIsTheResidue: (ValueError, "is a view of the bucket's.*clone it"),
    StateThatIsAView: (ValueError, "is a view of the bucket's accumulators.*clone it"),
    AnotherMethodState: (ValueError, r"returned \['count'\] for the whole method"),
}


def simulate(method, **settings):
    return Simulation(
        2,
        lambda rank: {"a": torch.nn.Parameter(torch.zeros(30, 100))},
        compression=method,
        rate=20,
        dense=[],
        warmup_steps=0,
        **settings,
    )


def gradients():
    generator = torch.Generator().manual_seed(3)
    return [{"a": torch.randn(30, 100, generator=generator)} for _ in range(2)]


def test_without_a_mistake_it_is_taken():
    simulation = simulate(Right)
    for _ in range(3):
        one, other = simulation.step(gradients())
        assert torch.equal(one["a"], other["a"])
        assert one["a"].count_nonzero() == 150
    assert simulation.compressors[1].run.method_state == {"steps": 3}


@pytest.mark.parametrize("method", WRONG, ids=lambda method: method.__name__)
def test_a_mistake_is_refused_and_the_step_rolled_back(method):
    kind, message = WRONG[method]
    simulation = simulate(method)
    with pytest.raises(kind, match=message):
        simulation.step(gradients())
    for compressor in simulation.compressors:
        assert not compressor.residues.tensors["a"].residue.any()


def test_averages_that_differ_between_ranks_are_noticed():
    with pytest.raises(RuntimeError, match="averages of a differ between ranks 0 and 1"):
        simulate(ReceivesItsOwn).step(gradients())


class OfWords(Quantiser):
    """Its levels have 32 bits. Each of their bytes would be taken for a level."""

    bits = 8

    def quantise(self, blocks, lengths, uniform):
        return torch.ones_like(lengths, dtype=blocks.dtype), blocks.int()

    def restore(self, scales, levels):
        return scales * levels


def test_a_quantiser_of_other_words_is_refused():
    with pytest.raises(ValueError, match=r"OfWords\.quantise gave scales and levels of"):
        simulate(ScaleCom, quantiser=OfWords()).step(gradients())


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


def test_a_method_that_does_not_take_few_bits_has_them_refused():
    def make(**settings):
        return Simulation(
            2,
            lambda rank: {"w": torch.nn.Parameter(torch.zeros(60, 50))},
            compression=Right,
            **settings,
        )

    with pytest.raises(ValueError, match="bits means nothing to Right"):
        make(bits=3)
    assert make(bits=32).compressors[0].config.rate == 100


@pytest.mark.parametrize("method", [ScaleCom, LocalTopK])
def test_what_waits_is_compared_with_gradients_in_every_form(method):
    """The norms of residues are those after the step, whichever moves the method makes."""
    make = lambda rank: {"one": torch.nn.Parameter(torch.zeros(50, 100))}  # noqa: E731
    simulation = Simulation(2, make, compression=method, dense=[], min_numel=0)
    simulation.step([{"one": torch.randn(50, 100)} for _ in range(2)])
    assert simulation.compressors[0].stats()["residue_ratio"] > 0.1


def test_what_is_open_is_settled_before_a_method_serves():
    simulation = Simulation(2, lambda rank: {"one": torch.nn.Parameter(torch.zeros(50, 100))})
    with pytest.raises(RuntimeError, match="before the method serves"):
        simulation.compressors[0].settle(every_step=True)
