"""Local steps of simulated ranks that have different histories or reach non-finite values."""

import copy
import functools
import math
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from local_ranks import (
    GRADIENTS,
    GROUPS,
    HALF,
    SETTINGS,
    SIZE,
    WHOLE,
    Ranks,
    adam,
    begun,
    momentum,
)
from simulated import assert_same

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.gradients import have_finite_gradients
from scalecom_hvd.exchange.local.worker import Worker

BF16 = torch.bfloat16


def assert_nothing_is_lost(ranks, first, end, more=0.0):
    """Train up to step `end`, and synchronise. The ranks' first `first` steps were the same.

    more: what else came in.
    """
    ranks.train(first, end)
    ranks.meet()
    came = more + sum(sum(GRADIENTS[step % 5]) for step in range(end)) / 2
    moved = begun() - ranks.values() + ranks.residues()
    near = 0.1 if ranks.settings["dtype"] == BF16 else 1e-5
    torch.testing.assert_close(moved, torch.full_like(moved, came), rtol=0, atol=near)


# What is sent, and when.


@pytest.mark.parametrize("compression", [hvd.ScaleCom, hvd.LocalTopK, hvd.RandomK])
@pytest.mark.parametrize(
    "more",
    [
        *({"overlap": overlap} for overlap in (0, 1, 3)),
        *({"overlap": overlap, "fragments": 2} for overlap in (0, 1)),
        {"local_steps": {0: 2, 7: 5}, "fragments": 2},
        {"local_steps": 2, "fragments": 5},
        {"local_steps": 12, "overlap": 1, "fragments": 5},
        {"dtype": BF16, "overlap": 2},
    ],
)
def test_nothing_is_lost(compression, more):
    assert_nothing_is_lost(Ranks(compression=compression, beta=1.0, **more), 0, 27)


@pytest.mark.parametrize(
    ("saved", "at", "loads"),
    [
        *(({"overlap": 3}, 5, {"local_steps": h, "overlap": t}) for h, t in [(4, 0), (4, 1)]),
        *(({"overlap": 3}, 5, {"local_steps": h, "overlap": t}) for h, t in [(6, 5), (5, 4)]),
        ({"overlap": 3}, 5, {"local_steps": 10, "overlap": 3}),
        ({"fragments": 2}, 3, {"fragments": 5}),
    ],
)
def test_nothing_is_lost_by_resuming_with_another_schedule(saved, at, loads):
    """Travelling averages are applied before others are sent."""
    ranks = Ranks(compression=hvd.LocalTopK, beta=1.0, **saved)
    ranks.train(0, at)
    assert_nothing_is_lost(ranks.resumed(**loads), at, at + 13)


@pytest.mark.parametrize(
    ("overlap", "equal", "expected"),
    [
        (0, (), ["", "abc", "", "de", "", "abc", "", "de"]),
        (1, (2, 4), ["", "", "abc", "", "de"]),
    ],
)
def test_fragments_synchronise_one_after_the_other(overlap, equal, expected):
    """Ranks take the same steps where averages arrive late, and diverge in all others."""
    ranks, found = Ranks(fragments=2, overlap=overlap, **WHOLE), []
    for step in range(len(expected)):
        ranks.step(0.25 if step in equal else [0.25, 0.5])
        found.append(ranks.alike(1e-6))
    assert found == expected
    ranks.meet()


def test_all_ranks_lead_each_fragment():
    """Steps are counted in rounds.

    Otherwise, with as many fragments as ranks, each fragment would always have the same leader.
    """
    ranks, led = Ranks(2, 2, fragments=2, rate=20, beta=1.0), []
    for _ in range(8):
        ranks.step([0.25, 0.5])
        led.append(ranks.stats()["leader"])
    assert ranks.stats()["step"] == 4
    assert led == [0, 0, 1, 1, 0, 0, 1, 1]


def test_groups_stay_together_in_fragments():
    """Empty groups do not count."""
    ranks, rates = Ranks(2, 3, fragments=3, groups=GROUPS, warmup_steps=3), []
    for _ in range(6):
        ranks.step([0.25, 0.5])
        rates.append(ranks.stats()["rate"])
    assert rates == [1.0, 1.0, 1.0, 4, 4, 4]
    buckets = sorted(map(sorted, ranks.compressors[0].residues.buckets))
    assert buckets == [["a", "e"], ["b"], ["c", "d"]]
    assert ranks.alike() == "cd"


@pytest.mark.parametrize(
    ("settings", "ends", "expected"),
    [
        # Early synchronisations do not end the warm-up, or another stage.
        ({"warmup_steps": 16}, {2, 6, 10, 14, 18, 22}, [1.0] * 17 + [4] * 7),
        ({"rate": {0: 2, 16: 4}}, {2, 6, 10, 14, 18, 22}, [2.0] * 17 + [4] * 7),
        # One at the warm-up's end is sent whole.
        ({"warmup_steps": 6}, {6}, [1.0] * 7 + [4]),
    ],
)
def test_early_synchronisations_before_the_last_stage(settings, ends, expected):
    ranks, rates = Ranks(**settings), []
    for step in range(1, len(expected) + 1):
        ranks.step(0.01)
        if step in ends:
            ranks.simulation.synchronise()
        rates.append(ranks.stats()["rate"])
    assert rates[3:] == expected[3:]
    early = sorted(step for step in ends if step <= 16)
    assert ranks.states()[0]["local_steps"]["early"] == early
    # A run that is resumed ends the stage when this one does.
    assert ranks.resumed().states()[0]["local_steps"]["early"] == early


def test_what_a_failed_first_step_of_a_round_moved_is_averaged():
    ranks = Ranks(**WHOLE)
    ranks.train(0, 4)

    def fails():
        with torch.no_grad():
            for parameter in ranks.own[1].values():
                parameter.sub_(0.5)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        ranks.locals[1].step(fails)
    before = ranks.values()
    ranks.step(0.25, times=4)
    for rank in range(2):
        torch.testing.assert_close(ranks.values(rank), before - 1.25)


def test_stats_are_of_what_has_arrived():
    ranks = Ranks(overlap=2, compression=hvd.LocalTopK)
    ranks.train(0, 6)
    arrived = ranks.stats()
    assert arrived["bytes_gathered"] > 0
    ranks.train(0, 3)
    changing = ("residue_norm", "local_steps_taken")
    kept = [{n: v for n, v in s.items() if n not in changing} for s in (arrived, ranks.stats())]
    assert kept[0] == kept[1]


def test_stats_and_looks_of_fragments():
    ranks, found = Ranks(fragments=2, diagnostics=2, compression=hvd.LocalTopK, rate=20), []
    for _ in range(16):
        ranks.step([0.25, -0.5])
        stats = ranks.stats()
        found.append((stats["bytes_gathered"], stats["rate"], stats["diagnostics"]))
    large, small = found[5], found[7]
    assert (large[:2], small[:2]) == ((3 * 2 * 5, 20), (2 * 2 * 5, 20))
    # Diagnostics are of the whole model, and come when the round is over.
    assert found[2][2] is None
    assert [found[i][2]["step"] for i in (3, 10, 11, 15)] == [0, 0, 2, 2]
    # The first change of a, b and c covers two steps, that of d and e four.
    largest = ranks.compressors[0].residues.health.norms[-1][-1]
    assert largest == pytest.approx((120 * 0.5**2 + 80 * 1.0**2) ** 0.5)


# Checkpoints.


@pytest.mark.parametrize(
    "compression", [hvd.ScaleCom, pytest.param(hvd.LocalTopK, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("outer", [None, momentum, adam])
@pytest.mark.parametrize(
    ("more", "steps", "bad"),
    [
        *(({"dtype": dtype}, steps, None) for dtype in (torch.float32, HALF) for steps in (6, 8)),
        *(({"overlap": 2}, steps, None) for steps in (4, 5)),
        ({"overlap": 2}, 5, 2),  # the averages are void
        *(({"fragments": 2}, steps, None) for steps in (6, 7)),
        *(({"fragments": 2, "overlap": 1}, steps, None) for steps in (6, 8, 9)),
    ],
)
def test_resuming_is_bit_identical(compression, outer, more, steps, bad):
    ranks = Ranks(compression=compression, outer=outer, **more)
    ranks.train(0, steps, bad)
    states = ranks.states()
    kept, other = copy.deepcopy(states), ranks.resumed(states=states)
    for step in range(9):
        ranks.train(step, step + 1)
        other.train(step, step + 1)
        for rank in range(2):
            assert_same(other.values(rank), ranks.values(rank))
    assert_same(other.residues(), ranks.residues())
    assert bool(other.values(1).isfinite().all())
    if outer is not None:  # training changes no loaded state
        assert_same(*(one[0]["local_steps"]["outer"]["state"] for one in (states, kept)))


def test_loading_an_older_state_while_averages_travel():
    ranks = Ranks(overlap=2)
    ranks.train(0, 3)
    states, found = ranks.states(), []
    for _ in range(2):
        ranks.train(3, 13)
        found.append(ranks.values(1))
        ranks.simulation.collect()
        for rank, state in enumerate(states):
            ranks.compressors[rank].load_state_dict(state)
    assert torch.equal(*found)


def test_a_state_is_saved_again_before_training_goes_on():
    """Even if the script has loaded another model meanwhile."""
    ranks = Ranks()
    ranks.train(0, 6)
    other = ranks.resumed()
    other.load(1, begun())
    assert_same(*(one.states()[1]["local_steps"] for one in (other, ranks)))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_process_that_was_alone_in_between(dtype):
    """It resumes with its own parameters and trains on. Its states fit its current parameters."""
    pair = Ranks(dtype=dtype, **WHOLE)
    pair.train(0, 6)
    single = pair.resumed(1, [0], pair.states()[:1])
    own = pair.values()
    single.step(0.125)
    torch.testing.assert_close(single.values(), own - 0.125)
    (state,) = single.states()
    assert state["local_steps"] == {"taken": 7, "early": []}  # and no common parameters
    again = single.resumed(2, [0], [state])
    again.compressors[1].load_state_dict(state)
    again.step(0.125)
    for rank in range(2):
        torch.testing.assert_close(again.values(rank), own - 0.25)


# Outer optimizers.


class Subtract(torch.optim.Optimizer):
    """Its step() does not accept a closure."""

    def step(self):
        for x in self.param_groups[0]["params"]:
            x.sub_(x.grad)


def test_an_outer_optimizer_of_rate_one_subtracts_the_average():
    found = []
    for outer in (None, lambda x: torch.optim.SGD(x, lr=1.0), lambda x: Subtract(x, {})):
        ranks = Ranks(3, 2, outer=outer)
        for step in range(8):
            ranks.step([0.25 * step, -0.5, 0.125])
        found.append(ranks.values(1))
    assert torch.equal(*found[:2])
    assert torch.equal(*found[1:])


def test_outer_momentum_does_not_move_what_is_frozen():
    ranks = Ranks(2, 1, outer=momentum)
    ranks.step(0.25)
    for parameters in ranks.own:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    before, residues = ranks.values(), ranks.residues()
    ranks.step(0.0, 3)
    assert torch.equal(ranks.values(), before)
    assert torch.equal(ranks.residues(), residues)


# Numbers that are not finite, and changes that are clipped.


def test_a_rank_is_told_that_its_gradients_stay_bad(caplog):
    ranks = Ranks()
    ranks.step([0.25, "bad"], 20)
    (record,) = (r for r in caplog.records if "20 times in a row" in r.getMessage())
    assert "each time this rank had a gradient that was not finite" in record.getMessage()


@pytest.mark.parametrize(
    ("more", "lost"), [({}, 4), ({"overlap": 2}, 6), ({"clip_changes": 3}, 4), ({"early": True}, 3)]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rank_whose_change_is_not_finite_goes_back(more, lost, value, caplog):
    """Its steps are lost. The other rank sends its change again."""
    early = more.get("early")
    ranks = Ranks(**WHOLE, **({} if early else more))
    for step in range(lost):
        ranks.step([0.25, value if step == 2 else 0.25])
    if early:  # the first exchange is skipped, and the second makes ranks equal
        ranks.meet()
    else:
        assert torch.equal(ranks.values(1), begun())
        torch.testing.assert_close(ranks.values(0), begun() - lost * 0.25)
        assert caplog.text.count("this rank's parameters are not finite") == 1
    assert ranks.stats()["skipped_steps"] == 1
    assert not ranks.stats(1).get("changes_clipped")
    ranks.step([0.25, 0.5], 4)
    ranks.meet()
    came = (lost * 0.25 + 4 * 0.25 + 4 * 0.5) / 2
    torch.testing.assert_close(ranks.values(0), begun() - came)


def test_a_fragment_that_is_void():
    """One rank's change of it is not finite. That rank goes back, and nothing else is lost."""
    ranks = Ranks(fragments=2, **WHOLE)
    ranks.step(0.25, 3)
    ranks.own[1]["e"].detach()[3] = math.nan
    ranks.step(0.25)
    # a, b and c were averaged after two steps; here rank 1 goes back to the common parameters.
    torch.testing.assert_close(ranks.values(0), begun() - 1.0)
    torch.testing.assert_close(ranks.values(1), begun() - torch.tensor([0.5] * 120 + [0.0] * 80))
    assert ranks.stats()["skipped_steps"] == 1
    ranks.step(0.25, 4)
    ranks.meet()
    torch.testing.assert_close(ranks.values(), begun() - torch.tensor([1.75] * 120 + [1.5] * 80))


@pytest.mark.parametrize("compression", [hvd.ScaleCom, hvd.LocalTopK])
def test_a_void_synchronisation_leaves_residues(compression):
    """A change is finite, but too large for a residue."""
    ranks = Ranks(2, 2, beta=1.0, compression=compression)
    ranks.train(0, 2)
    before = ranks.residues()
    ranks.step([0.25, 1.2e30], 2)  # each is accepted, but twice this is too large
    torch.testing.assert_close(ranks.residues(), before)
    assert (ranks.stats()["step"], ranks.stats()["skipped_steps"]) == (1, 1)
    assert_nothing_is_lost(ranks, 2, 4, more=2 * 0.25 / 2)


def test_a_void_synchronisation_leaves_the_outer_momentum():
    ranks = Ranks(2, 2, outer=momentum)
    ranks.train(0, 2)
    before = copy.deepcopy(ranks.outer_state())
    ranks.step([0.25, math.nan])
    ranks.step(0.25)  # skipped: rank 1 goes back
    assert_same(ranks.outer_state(), before)
    ranks.train(0, 2)
    assert ranks.alike() == "abcde"
    assert bool(ranks.values().isfinite().all())


@pytest.mark.parametrize(
    ("grads", "changes"),
    [
        ([0.25, 0.5, 100.0], [0.5, 1.0, 2.0]),
        # the square of this length overflows float32
        ([0.25, 0.5, 2.0**90], [0.5, 1.0, 2.0]),
        # the lower of the two middle lengths counts; with their mean, two ranks would never clip
        ([0.25, 100.0], [0.5, 1.0]),
        # ranks that changed nothing do not count for the median
        ([0.0, 0.25, 0.0], [0.0, 0.5, 0.0]),
    ],
)
def test_a_rank_that_goes_astray_moves_the_others_less(grads, changes):
    ranks = Ranks(len(grads), 2, **WHOLE, clip_changes=np.float32(2))
    for rounds in (1, 2):
        ranks.step(grads, 2)
        assert ranks.alike() == "abcde"
        torch.testing.assert_close(ranks.values(), begun() - rounds * sum(changes) / len(changes))
        cut = [rounds * (2 * grad != own) for grad, own in zip(grads, changes, strict=True)]
        assert [ranks.stats(rank)["changes_clipped"] for rank in range(len(grads))] == cut


@pytest.mark.parametrize("value", [2.0**99, -(2.0**101), math.nan, math.inf])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_which_gradients_can_be_used(dtype, value):
    """A gradient can be used even if its square overflows float32."""
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    assert have_finite_gradients(parameters)
    parameters[1].grad[2] = value
    assert have_finite_gradients(parameters) == (abs(value) < 2.0**100)


# Refusals.

NO_OPTIMIZER = "takes the common parameters and returns a torch optimizer"
REFUSED = [
    (ValueError, {"overlap": 2, "fragments": 2}, "less than local_steps // fragments, not 2"),
    (ValueError, {"fragments": 6}, "5 tensors, or groups, cannot be cut into 6 .*: give fewer"),
    (ValueError, {"fragments": 4, "groups": GROUPS}, "3 tensors, or groups, cannot be cut into 4"),
    (ValueError, {"clip_changes": 0}, "a number above 0, not 0"),
    (ValueError, {"clip_changes": math.inf}, "not inf"),
    (TypeError, {"clip_changes": "2"}, "clip_changes must be a number, not '2'"),
    (TypeError, {"clip_changes": True}, "not True"),
    (TypeError, {"outer": lambda _: torch.optim.SGD([torch.zeros(3)], lr=1.0)}, NO_OPTIMIZER),
    (TypeError, {"outer": "nesterov"}, NO_OPTIMIZER),
    (TypeError, {"outer": torch.optim.LBFGS}, "steps without a closure, not LBFGS"),
]


@pytest.mark.parametrize(("error", "settings", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(error, settings, message):
    with pytest.raises(error, match=message):
        Ranks(**settings)


@pytest.mark.parametrize(
    "more", [{"outer": momentum}, {"overlap": 1}, {"fragments": 2}, {"clip_changes": 2}]
)
def test_settings_without_local_steps_are_refused(more):
    (name,), weight = more, torch.nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match=rf"{name}= needs local_steps=.*Give local_steps=H too"):
        hvd.DistributedOptimizer(sgd, [("w", weight)], hvd.ScaleCom, **more)


def test_a_refused_optimizer_leaves_no_schedule_behind():
    weight = torch.nn.Parameter(torch.zeros(9))
    method = hvd.ScaleCom(warmup_steps=100, rates={"x": 3})
    sgd = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match="which matches no parameter"):
        hvd.DistributedOptimizer(sgd, [("w", weight)], method, local_steps=10)
    assert method.residues.is_whole_at(99)


OTHER = "is not a {} of these parameters: give the outer="


@pytest.mark.parametrize(
    ("saved", "loads", "change", "message"),
    [
        ({}, {"outer": momentum}, (), "without an outer optimizer"),
        ({"outer": momentum}, {}, (), "made with an outer optimizer"),
        ({"outer": momentum}, {"outer": adam}, (), OTHER.format("Adam")),
        ({"outer": adam}, {"outer": momentum}, (), OTHER.format("SGD")),
        ({}, {}, ("sent_from", "unknown"), "sent_from. belong to another model"),
        ({}, {}, ("local", "a"), r"local steps \(local\) belong to another model"),
        ({}, {}, ("common",), "another kind of schedule"),
        ({"local_steps": None}, {}, (), r"this optimizer sends changes of parameters \(local_"),
        ({}, {"local_steps": None}, (), r"hold changes of parameters \(local_steps\), but this"),
    ],
)
def test_states_that_do_not_fit_are_refused(saved, loads, change, message):
    """The refusal changes nothing."""
    states = []
    for settings, steps in ((saved, 8), (loads, 0)):
        ranks = Ranks(**({"overlap": 2} if "local_steps" not in settings else {}), **settings)
        ranks.train(0, steps if ranks.locals else 0)
        states += ranks.states()
    state = states[0]
    if change:  # take it out, or add it
        *way, last = change
        holds = functools.reduce(operator.getitem, way, state["local_steps"])
        if holds.pop(last, None) is None:
            holds[last] = torch.zeros(SIZE)
    with pytest.raises(ValueError, match=message):
        ranks.compressors[0].load_state_dict(state)
    assert ranks.compressors[0].residues.step == 0
    ranks.train(0, 4 if ranks.locals else 0)


def test_a_method_that_loaded_changes_before_it_knew_its_local_steps_is_refused():
    ranks = Ranks()
    ranks.train(0, 2)
    method = hvd.ScaleCom(**SETTINGS)
    method.load_state_dict(ranks.states()[0])
    with pytest.raises(ValueError, match="give local_steps as the saved run did"):
        Ranks(1, None, compression=lambda **_: method)


@pytest.mark.parametrize(
    ("at", "message"), [(0, ".*lr.*on every rank"), (4, ".*the same value on all ranks")]
)
def test_other_outer_learning_rates_are_refused(at, message):
    """One rank has loaded its scheduler's state, or a scheduler follows each rank's own loss."""
    ranks = Ranks(outer=momentum)
    ranks.train(0, at)
    ranks.locals[1].outer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match=f"outer optimizers differ{message}"):
        ranks.step(0.25)  # the first is refused
        if at:
            ranks.simulation.synchronise()


def test_synchronising_after_different_numbers_of_steps_is_refused():
    ranks = Ranks()
    ranks.train(0, 3)
    ranks.locals[1].taken += 1
    with pytest.raises(RuntimeError, match=r"steps, \[3, 4\]\. Let every rank take every step"):
        ranks.simulation.synchronise()


def test_the_norm_of_a_nodes_shards_may_overflow():
    """Other ranks of the node wait for it, so it must not raise."""
    alone = SimpleNamespace(add_up=lambda total, name: SimpleNamespace(wait=lambda: total))
    worker = SimpleNamespace(node=alone)
    assert Worker.norm(worker, 3.0, torch.device("cpu")) == 3.0
    assert Worker.norm(worker, 1e200, torch.device("cpu")) == math.inf
