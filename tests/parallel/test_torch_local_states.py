"""States of local steps on real ranks: checkpoints, newcomers, and elastic runs."""

import copy
import gc
import time

import pytest
import torch
from faces import horovods_alone, hvd, stock
from local_models import (
    MOMENTUM,
    SOME,
    begin,
    copy_into,
    equal,
    learn,
    make,
    method,
    values_of,
)
from models import same_on_all_ranks, take_steps, through_a_file

from scalecom_hvd.exchange.background_thread import wait_for_kept
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives


def checkpoint(model, optimizer):
    """Save and load, as weights only: the method's state, the optimizer's, and the model."""
    states = [optimizer.compression.state_dict(), optimizer.state_dict(), values_of(model)]
    return through_a_file(states)


def saved_in_mid_round():
    """A model in the middle of a round, its optimizer, and what was saved."""
    model = begin()
    optimizer, _ = make(model, momentum=MOMENTUM)
    learn(optimizer, model, range(6))
    return model, optimizer, checkpoint(model, optimizer)


def resume(saved, order=("residues", "optimizer"), values=None):
    """A new model and optimizer that load these states in this order."""
    state, momentum, own = copy.deepcopy(saved)  # an optimizer keeps the tensors that it loads
    model = begin()
    copy_into(model, values or own)
    optimizer, compressor = make(model, momentum=MOMENTUM)
    for what in order:
        if what == "residues":
            compressor.load_state_dict(state)
        else:
            optimizer.load_state_dict(momentum)
    return model, optimizer


@pytest.mark.parametrize(
    ("compression", "more"),
    [
        *((compression, {"overlap": 3}) for compression in [*SOME, "ScaleCom, exact, beta"]),
        ("ScaleCom", {"overlap": 1}),
        ("ScaleCom", {"overlap": 1, "fragments": 2}),
    ],
)
def test_one_rank_saves_while_averages_travel_and_others_wait_for_it(compression, more):
    """What other ranks still have to send of these averages is sent without their scripts.

    Ranks compare what diagnostics saw when all of them have taken the same step. To load the
    optimizer's state does not concern the averages.
    """
    found = []
    for saves in (False, True):
        model, compressor = begin(), method(compression, diagnostics=1)
        optimizer, _ = make(model, compressor, **more)
        for step in range(16):
            take_steps(optimizer, model, [step])
            if saves and hvd.rank() == step % hvd.size():
                compressor.state_dict()
            if saves and step == 8:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            stock.barrier()
        found.append((model, compressor.stats()["diagnostics"]))
    assert equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1]["step"] >= 2


@pytest.mark.parametrize("compression", [*SOME, "RandomK"])
def test_ranks_drop_an_optimizer_at_different_times_while_averages_travel(compression):
    """What a rank still has to submit of these averages is submitted without its optimizer."""
    model = begin()
    optimizer, compressor = make(model, compression, overlap=3)
    leader_of_the_second = 1
    take_steps(optimizer, model, range(7 if hvd.rank() == leader_of_the_second else 8))
    if hvd.rank() != leader_of_the_second:
        if hvd.rank() == 0:
            del optimizer, compressor
            gc.collect()
        stock.barrier()
        wait_for_kept()
        return
    stock.barrier()
    take_steps(optimizer, model, [7])
    compressor.state_dict()  # waits for what rank 0 has to send


def test_the_choice_for_the_next_round_has_arrived_when_it_is_saved(monkeypatch):
    def broadcast_late(self, choice, root):
        time.sleep(0.1 * self.leads(later=1))
        return broadcast(self, choice, root)

    broadcast = BucketCollectives.broadcast_choice
    monkeypatch.setattr(BucketCollectives, "broadcast_choice", broadcast_late)
    model = begin()
    optimizer, compressor = make(model, method("ScaleCom", lookahead=True))
    learn(optimizer, model, range(8))
    assert same_on_all_ranks(compressor.state_dict()["offsets"].values())


# Rank 0's model is loaded on all ranks, but each goes on with its own.

ORDERS = {
    "state, broadcast": ("made", "state", "broadcast"),
    "broadcast, state": ("made", "broadcast", "state"),
    "state before all": ("state", "made", "model", "broadcast"),
    "state, model, broadcast": ("made", "state", "model", "broadcast"),
    "twice": ("made", "state", "model", "state", "broadcast", "model", "broadcast"),
}
HALF = {"first": torch.float16, "third": torch.float16}


@pytest.mark.parametrize(
    ("order", "dtypes"),
    [*((order, {}) for order in ORDERS), *((order, HALF) for order in list(ORDERS)[:2])],
)
def test_own_parameters_are_in_place_before_the_first_forward(order, dtypes):
    """They are in place in the middle of a round. Odd ranks skip the first step."""
    straight, seen = begin(**dtypes), []
    optimizer, _ = make(straight, momentum=MOMENTUM)
    learn(optimizer, straight, range(6))
    state, momentum, own = checkpoint(straight, optimizer)
    learn(optimizer, straight, range(6, 13), bad=[6], forwards=seen)

    rank_0s = hvd.broadcast_object(own, root_rank=0)
    model, again, compressor = begin(**dtypes), None, method("ScaleCom")
    copy_into(model, rank_0s)
    for what in ORDERS[order]:
        if what == "made":
            again, _ = make(model, compressor, momentum=MOMENTUM)
            again.load_state_dict(copy.deepcopy(momentum))
        elif what == "state":
            compressor.load_state_dict(copy.deepcopy(state))
        elif what == "model":
            copy_into(model, rank_0s)
        else:
            hvd.broadcast_parameters(list(model.items()) if hvd.rank() % 2 else model, root_rank=0)
    assert equal(model, own)
    resumed = []
    learn(again, model, range(6, 13), bad=[6], forwards=resumed)
    for step, (one, other) in enumerate(zip(seen, resumed, strict=True), 6):
        assert equal(one, other), f"step {step}"
    assert equal(model, straight)
    assert not hvd.rank() % 2 or equal(*resumed[:2]), "the skipped step changed something"
    assert hvd.rank() == 0 or not torch.equal(rank_0s["third"], own["third"])


@horovods_alone
@pytest.mark.parametrize("who", ["all", "one"])
def test_parameters_overwritten_after_the_state_was_loaded_are_refused_on_all_ranks(who):
    straight, optimizer, saved = saved_in_mid_round()
    learn(optimizer, straight, range(6, 12))
    model, again = resume(saved)
    if who == "all":
        stock.broadcast_parameters(model, root_rank=0)
    elif hvd.rank() == 1:
        copy_into(model, begin())
    kept = values_of(model)
    message = "parameters of rank 1.*Load the compressor's state last, or call broadcast_parameters"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            learn(again, model, [6])
    assert equal(model, kept)
    hvd.broadcast_parameters(model, root_rank=0)
    learn(again, model, range(6, 12))
    assert equal(model, straight)


def test_a_broadcast_in_training_is_as_in_horovod():
    """Parameters are held only until the first step, and not for another model's broadcast."""
    _, _, saved = saved_in_mid_round()
    model, again = resume(saved)
    other = begin()
    copy_into(model, other)
    hvd.broadcast_parameters(other, root_rank=0)
    assert equal(model, other)
    hvd.broadcast_parameters(model, root_rank=0)
    assert equal(model, saved[2])
    learn(again, model, [6])
    assert not same_on_all_ranks(model.values())
    hvd.broadcast_parameters(model, root_rank=0)
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize(("broadcasts", "new"), [(True, 1), (False, 1), (False, 0)])
def test_a_newcomer_begins_from_the_common_parameters(broadcasts, new, caplog):
    """It loads what rank 0's own model was, and has its own after a broadcast, or a step."""
    _, _, saved = saved_in_mid_round()
    values = hvd.broadcast_object(saved[2], root_rank=0)
    is_new = hvd.rank() == new
    model, again = resume(saved, () if is_new else ("residues", "optimizer"), values)
    began = saved[0]["local_steps"]["common"] if is_new else saved[2]
    if broadcasts:
        hvd.broadcast_parameters(model, root_rank=0)
        assert equal(model, began)
    learn(again, model, [6], bad=[6])
    assert hvd.rank() % 2 == 0 or equal(model, began)
    common = again.compression.state_dict()["local_steps"]["common"]
    assert equal(common, saved[0]["local_steps"]["common"])
    told = f"begins from rank {int(not new)}'s common parameters" in caplog.text
    assert told == (is_new and not broadcasts)
    learn(again, model, range(7, 12))
    assert again.compression.stats()["local_steps_taken"] == 12
    assert same_on_all_ranks(model.values())


# Elastic runs.


class Holder(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(f"the_{name}", value)


def elastic_state(model, optimizer, order="model first"):
    kept = {"net": Holder(model), "sgd": optimizer, "residues": optimizer.compression}
    kept = kept if order == "model first" else dict(reversed(kept.items()))
    return stock.elastic.TorchState(**kept)


def momenta_of(optimizer, model):
    states = {name: optimizer.state[p].get("momentum_buffer") for name, p in model.items()}
    return {name: momentum.clone() for name, momentum in states.items() if momentum is not None}


@horovods_alone
@pytest.mark.parametrize("who", ["newcomer", "committed less"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_ranks_of_an_elastic_run_have_their_parameters_when_they_come_together(who, order):
    """They have them before they compute a gradient, so a skipped step changes nothing."""
    model = begin()
    optimizer, _ = make(model, momentum=MOMENTUM)
    state = elastic_state(model, optimizer, order)
    state.sync()  # an elastic run begins so
    learn(optimizer, model, range(2))
    state.save()
    learn(optimizer, model, range(2, 6))
    if who == "newcomer":
        if hvd.rank() == 1:
            model = begin()
            optimizer, _ = make(model, momentum=MOMENTUM)
            state = elastic_state(model, optimizer, order)
            state.restore()  # it failed before its first step
        optimizer._local.exchange.agree_anew()  # a restart of Horovod does this
    else:
        if hvd.rank() != 1:
            state.save()
        learn(optimizer, model, range(6, 8))
        state.restore()
    own = values_of(model)
    state.sync()
    common = hvd.broadcast_object(values_of(optimizer._local.common), root_rank=0)
    began = common if hvd.rank() == 1 else own
    assert equal(model, began)
    assert hvd.rank() == 1 or not torch.equal(own["third"], common["third"])
    momenta = momenta_of(optimizer, model)
    rank_0s = hvd.broadcast_object(momenta, root_rank=0)
    assert who != "newcomer" or hvd.rank() != 1 or equal(momenta, rank_0s)
    learn(optimizer, model, [6], bad=[6])
    if hvd.rank() % 2:
        assert equal(model, began)
        assert equal(momenta_of(optimizer, model), momenta)
    optimizer.synchronize_parameters()
    assert optimizer.compression.stats()["local_steps_taken"] == 7
    assert same_on_all_ranks(model.values())


@horovods_alone
def test_an_elastic_states_optimizer_stays_each_ranks_own():
    model = begin()
    optimizer, _ = make(model, momentum=MOMENTUM)
    state = stock.elastic.TorchState(optimizer=optimizer)
    state.sync()
    take_steps(optimizer, model, range(4), skips=lambda rank, step: ["third"] if rank == 0 else [])
    momenta = momenta_of(optimizer, model)
    # with buffers that differ, ranks would broadcast different things
    assert ("third" in momenta) == (hvd.rank() != 0)
    state.sync()
    assert equal(momenta_of(optimizer, model), momenta)


@horovods_alone
@pytest.mark.parametrize("local_steps", [None, 4])
def test_a_commit_is_restored_twice(local_steps):
    """All goes on as if nothing had been done since the commit.

    An optimizer goes on with the very tensors that it loads, so the commit needs its own.
    """
    straight, model = begin(), begin()
    learn(make(straight, local_steps=local_steps, momentum=MOMENTUM)[0], straight, range(8))
    optimizer, _ = make(model, local_steps=local_steps, momentum=MOMENTUM)
    state = elastic_state(model, optimizer)
    learn(optimizer, model, range(2))
    state.save()
    own, momenta = values_of(model), momenta_of(optimizer, model)
    for lost in (range(20, 22), range(20, 27)):  # also a round later
        learn(optimizer, model, lost)
        state.restore()
        state.sync()  # all ranks get rank 0's model
        assert equal(model, own)
        assert equal(momenta_of(optimizer, model), momenta)
    learn(optimizer, model, range(2, 6))
    state.sync()  # other ranks came, and nothing was lost
    learn(optimizer, model, range(6, 8))
    assert equal(model, straight)


@horovods_alone
def test_a_commit_fails_whole_if_averages_that_travel_are_lost(monkeypatch):
    """Other ranks may have them, so this rank keeps its last commit."""
    from scalecom_hvd.torch.horovod_collectives import HorovodWork

    straight, model = begin(), begin()
    learn(make(straight, momentum=MOMENTUM, overlap=3)[0], straight, range(8))
    optimizer, _ = make(model, momentum=MOMENTUM, overlap=3)
    state = elastic_state(model, optimizer)
    learn(optimizer, model, range(2))
    state.save()
    learn(optimizer, model, range(2, 4))
    wait = HorovodWork.wait

    def lost(work):
        wait(work)
        raise hvd.HorovodInternalError("a worker was lost")

    with monkeypatch.context() as patch:
        patch.setattr(HorovodWork, "wait", lost)
        with pytest.raises(hvd.HorovodInternalError):
            state.save()
    state.restore()
    state.sync()
    learn(optimizer, model, range(2, 8))
    assert equal(model, straight)
