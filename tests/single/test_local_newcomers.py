"""Local steps of simulated ranks: newcomers, and ranks that are not as far as others."""

import pytest
import torch
from local_ranks import (
    HALF,
    THREE,
    Ranks,
    adam,
    momentum,
    plain,
)
from simulated import assert_same

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.background_thread import wait_for_kept


@pytest.mark.parametrize(
    ("more", "at"),
    [
        *(
            ({"dtype": dtype}, at)
            for dtype in (torch.float32, HALF, torch.bfloat16)
            for at in (4, 6)
        ),
        *(({"local_steps": 2, "outer": outer}, 4) for outer in (momentum, adam)),
        ({"local_steps": 2, "outer": plain}, 2),  # only the learning rate differs
        *(({"fragments": 2, "overlap": tau, "outer": momentum}, 6) for tau in (0, 1)),
        ({"overlap": 2, "outer": momentum}, 5),
        ({"warmup_steps": 16}, 6),
    ],
)
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("first", ["synchronise", "step"])
def test_a_newcomer_takes_over_what_the_others_have(more, at, new, first):
    """All may synchronise at once. Averages that travel are applied at once, where they are held.

    A step of the newcomer, without a gradient, then shows where it begins.
    """
    ranks, old = Ranks(**more), [rank for rank in range(3) if rank != new]
    ranks.train(0, at)
    if "warmup_steps" in more:  # all must know that the warm-up is one synchronisation longer
        ranks.simulation.synchronise()
    for outer in (one.outer for one in ranks.locals if one.outer):
        outer.param_groups[0]["lr"] *= 0.75  # as a scheduler would
    later = ranks.resumed(3, old)
    grads = [0.25, 0.5]
    if first == "synchronise":
        later.meet()
    later.step([*grads[:new], 0.0, *grads[new:]])
    assert [one.taken for one in later.locals] == [at + 1] * 3
    for name, x in later.locals[new].common.items():
        assert all(torch.equal(x, one.common[name]) for one in later.locals)
        assert torch.equal(x.to(ranks.settings["dtype"]), later.own[new][name])
    if first == "step":
        ranks.step(grads)
        for rank, other in enumerate(old):
            torch.testing.assert_close(later.values(other), ranks.values(rank))
    later.step(THREE, 10)
    later.meet()
    if "outer" in more:
        states = [later.outer_state(rank) for rank in range(3)]
        assert_same(states, states[:1] * 3)
        groups = [{**one.outer.param_groups[0], "params": 0} for one in later.locals]
        assert groups == [{**ranks.locals[0].outer.param_groups[0], "params": 0}] * 3
        rate = ranks.locals[0].outer.param_groups[0]["lr"]
        assert {type(group["lr"]) for group in groups} == {type(rate)}  # a tensor stays one


@pytest.mark.parametrize("made", ["anew", "before"])
def test_ranks_that_committed_different_steps_go_on_from_the_latest(made, caplog):
    ranks, states = Ranks(), {}
    for step in range(1, 7):
        ranks.step([0.25, 0.5])
        states[step] = ranks.states()
    again, committed = ranks, [states[3][0], states[6][1]]
    if made == "anew":
        again = ranks.resumed(states=committed)
    else:
        for compressor, state in zip(ranks.compressors, committed, strict=True):
            compressor.load_state_dict(state)
    again.step(0.25)
    assert [one.taken for one in again.locals] == [7, 7]
    again.step(0.25)
    assert again.alike() == "abcde"
    assert "begins from rank 1's common parameters" in caplog.text


@pytest.mark.parametrize("outer", [None, momentum])
def test_ranks_are_started_anew_when_one_alone_has_averages_that_travel(outer):
    """That rank saved its state meanwhile.

    The other ranks lose their part of the averages, and their changes since then. What diagnostics
    saw on one rank is not compared.
    """
    ranks = Ranks(3, overlap=2, outer=outer, compression=hvd.LocalTopK, diagnostics=1)
    ranks.step(THREE, 5)
    wait_for_kept()  # everything is submitted now
    network, (first, *others) = ranks.simulation.network, ranks.locals
    network.run([first.collect, *[lambda: None] * 2])
    before = first.common["a"].clone()
    for owner in (*ranks.locals, *(local.exchange for local in ranks.locals)):
        answers = iter([True])
        owner._restarted = lambda answers=answers: next(answers, False)
    network.run([local.rejoin for local in ranks.locals])
    assert not torch.equal(first.common["a"], before)
    for local in others:
        assert torch.equal(local.common["a"], first.common["a"])
    ranks.step(THREE, 5)
    ranks.meet()
