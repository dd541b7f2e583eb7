"""Local steps of simulated ranks that have different histories or reach non-finite values."""

import copy

import numpy as np
import pytest
import torch

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.background_thread import wait_for_kept
from scalecom_hvd.exchange.gradients import NotFinite, check_finite_gradients
from scalecom_hvd.exchange.simulator import Simulation

SETTINGS = {"rate": 4, "min_numel": 0, "dense": [], "warmup_steps": 0}


class Ranks:
    """n simulated ranks, each with a parameter of 40 elements and plain SGD of learning rate 1."""

    def __init__(self, n, local_steps, dtype=torch.float32, **fields):
        self.models = [torch.nn.Parameter(torch.linspace(-1, 1, 40).to(dtype)) for _ in range(n)]
        compression = fields.pop("compression", hvd.ScaleCom)
        self.simulation = Simulation(
            n,
            lambda rank: {"w": self.models[rank]},
            compression=compression,
            local_steps=local_steps,
            **(SETTINGS | fields),
        )
        self.locals, self.compressors = self.simulation.locals, self.simulation.compressors

    def step(self, grads):
        """Take a step on all ranks.

        grads: a number, or one for each rank. All elements have this gradient. "bad" is a gradient
        that cannot be used.
        """
        grads = grads if isinstance(grads, list) else [grads] * len(self.models)

        def take(rank):
            if grads[rank] == "bad":
                raise NotFinite(rank)
            with torch.no_grad():
                self.models[rank].sub_(grads[rank])
            return rank

        def of(rank):
            return lambda: take(rank)

        return self.simulation.take_steps([of(rank) for rank in range(len(self.models))])

    def states(self):
        return [copy.deepcopy(compressor.state_dict()) for compressor in self.compressors]

    def alike(self):
        return all(torch.equal(self.models[0], model) for model in self.models)


def alone(state, dtype=torch.float32, local_steps=4):
    """Return one process that has loaded this state, if there is one."""
    ranks = Ranks(1, local_steps, dtype, dense=["*"])
    if state is not None:
        ranks.compressors[0].load_state_dict(state)
    return ranks


def test_a_bad_step_changes_nothing_and_gives_what_it_would_have_given():
    ranks = Ranks(2, 2)
    before = ranks.models[1].detach().clone()
    assert ranks.step([0.1, "bad"]) == [0, 1]
    assert torch.equal(ranks.models[1], before)
    assert [one.stats()["local_steps_skipped"] for one in ranks.locals] == [0, 1]
    ranks.step(0.1)
    assert ranks.alike()


def test_a_rank_is_told_that_its_gradients_stay_bad(caplog):
    ranks = Ranks(2, 4)
    for _ in range(20):
        ranks.step([0.25, "bad"])
    (record,) = (r for r in caplog.records if "20 times in a row" in r.getMessage())
    assert "each time this rank had a gradient that was not finite" in record.getMessage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at", [4, 6])
def test_synchronising_first_of_all_after_a_newcomer_came(dtype, at):
    """All ranks must take part, whether or not they took steps since the last synchronisation."""
    ranks = Ranks(2, 4, dtype)
    for _ in range(at):
        ranks.step([0.25, 0.5])
    states = ranks.states()
    again = Ranks(3, 4, dtype)
    for rank, model in enumerate(again.models):
        with torch.no_grad():
            model.copy_(ranks.models[0])
        if rank < 2:
            again.compressors[rank].load_state_dict(states[rank])
    again.simulation.synchronise()
    assert again.alike()
    again.step(0.25)
    assert [one.taken for one in again.locals] == [at + 1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_process_that_was_alone_in_between(dtype):
    """It resumes with its own parameters and trains on. Its states fit its current parameters."""
    pair = Ranks(2, 4, dtype, dense=["*"])
    for _ in range(6):
        pair.step([0.25, 0.5])
    single = alone(pair.states()[0], dtype)
    own = pair.models[0].detach().clone()
    single.step(0.125)
    torch.testing.assert_close(single.models[0].detach(), own - 0.125)
    (state,) = single.states()
    assert state["local_steps"].keys() == {"taken", "early"}
    again = Ranks(2, 4, dtype, dense=["*"])
    for model, compressor in zip(again.models, again.compressors, strict=True):
        with torch.no_grad():
            model.copy_(single.models[0])
        compressor.load_state_dict(copy.deepcopy(state))
    again.step(0.125)
    for model in again.models:
        torch.testing.assert_close(model.detach(), own - 0.25)


def test_a_state_of_a_process_that_never_synchronised_holds_no_common_parameters():
    single = alone(None, torch.float16)
    single.step(0.5)
    assert single.states()[0]["local_steps"] == {"taken": 1, "early": 0}


def test_ranks_that_committed_different_steps_go_on_from_the_latest(caplog):
    ranks = Ranks(2, 4)
    states = {}
    for step in range(8):
        ranks.step([0.25, 0.5])
        states[step + 1] = ranks.states(), [model.detach().clone() for model in ranks.models]
    again = Ranks(2, 4)
    for rank, step in enumerate((3, 6)):
        again.compressors[rank].load_state_dict(states[step][0][rank])
        with torch.no_grad():
            again.models[rank].copy_(states[step][1][rank])
    again.step(0.25)
    assert [one.taken for one in again.locals] == [7, 7]
    again.step(0.25)
    assert again.alike()
    assert "begins from rank 1's common parameters" in caplog.text


def test_synchronising_where_a_ranks_parameters_are_not_finite():
    """The first exchange is skipped and that rank goes back. The second makes all ranks equal."""
    forgotten = []
    ranks = Ranks(2, 8)
    ranks.locals[1]._start_anew = lambda: forgotten.append(1)
    ranks.step([0.25, float("inf")])
    ranks.simulation.synchronise()
    assert ranks.alike()
    assert ranks.models[0].isfinite().all()
    assert forgotten == [1]
    assert ranks.compressors[0].stats()["skipped_steps"] == 1


def test_early_synchronisations_do_not_end_the_warm_up():
    ranks = Ranks(2, 4, warmup_steps=16)
    rates = []
    for step in range(24):
        ranks.step(0.01)
        if step % 4 == 1:
            ranks.simulation.synchronise()
        rates.append(ranks.compressors[0].stats()["rate"])
    assert set(rates[1:16]) == {1.0}
    assert rates[20] == 4
    assert ranks.states()[0]["local_steps"]["early"] == 4


def test_an_early_synchronisation_at_the_warm_ups_end_is_sent_whole():
    ranks = Ranks(2, 4, warmup_steps=7)
    rates = []
    for step in range(1, 9):
        ranks.step(0.01)
        if step == 6:
            ranks.simulation.synchronise()
        rates.append(ranks.compressors[0].stats()["rate"])
    assert rates[5:] == [1.0, 1.0, 4]


def test_a_refused_optimizer_leaves_no_schedule_behind():
    compression = hvd.ScaleCom(warmup_steps=100)
    with pytest.raises(ValueError, match="which matches no parameter"):
        Simulation(
            1,
            lambda rank: {"w": torch.nn.Parameter(torch.zeros(9))},
            compression=hvd.ScaleCom,
            local_steps=10,
            rates={"x": 3},
        )
    assert compression.residues.warmup == 100


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.75, nesterov=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def outer_state(ranks, rank=0):
    return ranks.locals[rank].outer.state_dict()["state"]


def test_an_outer_optimizer_of_rate_one_subtracts_the_average():
    def plain(parameters):
        return torch.optim.SGD(parameters, lr=1.0)

    found = []
    for outer in (None, plain):
        ranks = Ranks(3, 2, outer=outer)
        for step in range(8):
            ranks.step([0.25 * step, -0.5, 0.125])
        found.append(ranks.models[1].detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("at", [3, 4], ids=["in mid-round", "between two"])
@pytest.mark.parametrize("outer", [momentum, adam])
def test_an_outer_optimizer_goes_on_from_a_checkpoint(outer, at):
    ranks = Ranks(2, 2, outer=outer)
    for _ in range(at):
        ranks.step([0.25, -0.125])
    states, models = ranks.states(), [model.detach().clone() for model in ranks.models]
    resumed = Ranks(2, 2, outer=outer)
    for rank, model in enumerate(models):
        resumed.models[rank].data.copy_(model)
        resumed.compressors[rank].load_state_dict(states[rank])
    for _ in range(5):
        ranks.step([0.25, -0.125])
        resumed.step([0.25, -0.125])
    assert torch.equal(ranks.models[0], resumed.models[0])
    saved = states[0]["local_steps"]["outer"]["state"][0]
    assert not any(torch.equal(v, saved[key]) for key, v in outer_state(resumed)[0].items())


@pytest.mark.parametrize("outer", [momentum, adam])
def test_a_newcomer_takes_up_the_outer_optimizers_state(outer):
    ranks = Ranks(2, 2, outer=outer)
    for _ in range(4):
        ranks.step([0.25, -0.125])
    for local in ranks.locals:
        local.outer.param_groups[0]["lr"] *= 0.75  # as a scheduler would
    one = ranks.states()[1]
    later = Ranks(3, 2, outer=outer)
    for rank in (1, 2):  # rank 0 is new
        later.models[rank].data.copy_(ranks.models[0])
        later.compressors[rank].load_state_dict(one)
    for _ in range(4):
        later.step(0.25)
    assert later.alike()
    for key, value in outer_state(later)[0].items():
        assert torch.equal(value, outer_state(later, 1)[0][key])
    first, second = ({**local.outer.param_groups[0], "params": 0} for local in later.locals[:2])
    assert first == second
    assert first["lr"] == ranks.locals[0].outer.param_groups[0]["lr"]


def test_a_newcomer_takes_up_an_outer_learning_rate_alone():
    """The newcomer's parameters equal the others' already, and there is no momentum."""

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=torch.tensor(0.5))

    ranks = Ranks(2, 2, outer=plain)
    for _ in range(2):
        ranks.step(0.25)
    ranks.locals[1].outer.param_groups[0]["lr"].fill_(0.3)
    later = Ranks(2, 2, outer=plain)
    for model in later.models:
        model.data.copy_(ranks.models[1])
    later.compressors[1].load_state_dict(ranks.states()[1])
    for _ in range(2):
        later.step(0.25)
    assert later.alike()
    for local in later.locals:
        assert local.outer.param_groups[0]["lr"] == torch.tensor(0.3)


def test_a_void_synchronisation_leaves_the_outer_momentum():
    ranks = Ranks(2, 2, outer=momentum)
    ranks.step(0.25)
    ranks.step(0.25)
    before = copy.deepcopy(outer_state(ranks))
    ranks.step([0.25, float("nan")])
    ranks.step(0.25)  # skipped: rank 1 goes back
    assert torch.equal(outer_state(ranks)[0]["momentum_buffer"], before[0]["momentum_buffer"])
    ranks.step(0.25)
    ranks.step(0.25)
    assert ranks.alike()
    assert bool(ranks.models[0].isfinite().all())


def test_outer_momentum_does_not_move_what_is_frozen():
    ranks = Ranks(2, 1, outer=momentum)
    ranks.step(0.25)
    for model in ranks.models:
        model.requires_grad_(False)
    before = ranks.models[0].detach().clone()
    residue = ranks.compressors[0].residues.tensors["w"].residue.clone()
    for _ in range(3):
        ranks.step(0.0)
    assert torch.equal(ranks.models[0], before)
    assert torch.equal(ranks.compressors[0].residues.tensors["w"].residue, residue)


def test_outer_optimizers_that_cannot_work_are_refused():
    for outer in (lambda parameters: torch.optim.SGD([torch.zeros(3)], lr=1.0), "nesterov"):
        with pytest.raises(
            TypeError, match="takes the common parameters and returns a torch optimizer"
        ):
            Ranks(2, 2, outer=outer)
    with pytest.raises(TypeError, match="steps without a closure, not LBFGS"):
        Ranks(2, 2, outer=torch.optim.LBFGS)
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="Give local_steps=H too"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("w", weight)], hvd.ScaleCom, outer=momentum
        )
    with_one, without = Ranks(1, 2, outer=momentum), Ranks(1, 2)
    with pytest.raises(ValueError, match="without an outer optimizer"):
        with_one.compressors[0].load_state_dict(without.states()[0])
    with pytest.raises(ValueError, match="made with an outer optimizer"):
        without.compressors[0].load_state_dict(with_one.states()[0])


def test_an_outer_optimizer_of_ones_own():
    """Its step() need not accept a closure."""

    class Subtract(torch.optim.Optimizer):
        def step(self):
            for x in self.param_groups[0]["params"]:
                x.sub_(x.grad)

    plain, own = Ranks(2, 2), Ranks(2, 2, outer=lambda common: Subtract(common, {}))
    for ranks in (plain, own):
        for _ in range(4):
            ranks.step([0.25, 0.5])
    assert torch.equal(plain.models[0], own.models[0])


@pytest.mark.parametrize(("made", "loaded"), [(momentum, adam), (adam, momentum)])
def test_a_state_of_another_outer_optimizer_is_refused(made, loaded):
    """The refusal changes nothing."""
    state = travelling(steps=8, outer=made).states()[0]
    ranks = Ranks(2, 4, overlap=2, outer=loaded)
    kind = type(ranks.locals[0].outer).__name__
    with pytest.raises(ValueError, match=f"is not a {kind} of these parameters: give the outer="):
        ranks.compressors[0].load_state_dict(state)
    assert ranks.locals[0].taken == ranks.compressors[0].residues.step == 0
    for _ in range(4):
        ranks.step(0.25)


def test_ranks_with_other_outer_optimizers_are_refused():
    calls = []

    def differs(parameters):
        calls.append(parameters)
        return torch.optim.SGD(parameters, lr=0.5 if len(calls) == 1 else 0.7)

    with pytest.raises(RuntimeError, match="outer"):
        Ranks(2, 2, outer=differs).step(0.25)


def test_ranks_with_other_outer_learning_rates_are_refused():
    """For example, one rank has loaded its scheduler's state and the other has not."""
    ranks = Ranks(2, 2, outer=momentum)
    ranks.locals[1].outer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match="outer optimizers differ.*lr.*on every rank"):
        ranks.step(0.25)


def test_outer_learning_rates_that_came_to_differ_are_refused():
    """For example, a scheduler follows each rank's own loss."""
    ranks = Ranks(2, 2, outer=momentum)
    for _ in range(3):
        ranks.step(0.25)
    ranks.locals[1].outer.param_groups[0]["lr"] = 0.1
    ranks.step(0.25)
    with pytest.raises(RuntimeError, match="outer optimizers differ.*the same value on all ranks"):
        ranks.simulation.synchronise()


def test_synchronising_after_different_numbers_of_steps_is_refused():
    ranks = Ranks(2, 4)
    for _ in range(3):
        ranks.step(0.25)
    ranks.locals[1].taken += 1
    with pytest.raises(RuntimeError, match=r"steps, \[3, 4\]\. Let every rank take every step"):
        ranks.simulation.synchronise()


# Averages that travel while ranks go on.

GRADIENTS = [[0.25, -0.125], [0.5, 0.0], [-0.25, 0.375], [0.125, 0.25], [0.0, -0.5]]


def travelling(n=2, steps=5, overlap=2, **fields):
    """Return ranks whose averages have been travelling since step 4."""
    ranks = Ranks(n, 4, overlap=overlap, **fields)
    for step in range(steps):
        ranks.step(GRADIENTS[step % 5])
    ranks.simulation.collect()
    return ranks


def train(ranks, steps):
    """Take steps and synchronise; return the sum of gradients, averaged over two ranks."""
    for step in range(steps):
        ranks.step(GRADIENTS[step % 5])
    ranks.simulation.synchronise()
    return sum(sum(GRADIENTS[step % 5]) for step in range(steps)) / 2


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("compression", [hvd.ScaleCom, hvd.LocalTopK])
def test_nothing_is_lost_while_averages_travel(overlap, compression):
    ranks = Ranks(2, 4, overlap=overlap, compression=compression, beta=1.0)
    begin = ranks.models[0].detach().clone()
    came = train(ranks, 27)
    assert ranks.alike()
    kept = sum(each.residues.tensors["w"].residue for each in ranks.compressors) / 2
    torch.testing.assert_close(begin - ranks.models[0].detach() + kept, torch.full([40], came))


@pytest.mark.parametrize("outer", [None, momentum, adam])
@pytest.mark.parametrize("steps", [4, 5])
def test_resuming_while_averages_travel_is_bit_identical(outer, steps):
    ranks = travelling(steps=steps, outer=outer)
    states, models = ranks.states(), [model.detach().clone() for model in ranks.models]
    assert states[0]["local_steps"]["since"] == 4
    resumed = Ranks(2, 4, overlap=2, outer=outer)
    for rank, model in enumerate(models):
        resumed.compressors[rank].load_state_dict(states[rank])
        assert torch.equal(resumed.models[rank], model)
    for step in range(9):
        ranks.step(GRADIENTS[step % 5])
        resumed.step(GRADIENTS[step % 5])
        for one, other in zip(ranks.models, resumed.models, strict=True):
            assert torch.equal(one, other), step
    ranks.simulation.collect()
    resumed.simulation.collect()
    residues = [r.compressors[1].residues.tensors["w"].residue for r in (ranks, resumed)]
    assert torch.equal(*residues)


@pytest.mark.parametrize(("local_steps", "overlap"), [(4, 0), (4, 1), (6, 5), (5, 4), (10, 3)])
def test_resuming_with_another_schedule_while_averages_travel(local_steps, overlap):
    """The travelling averages are applied before others are sent, and nothing is lost."""
    settings = {"compression": hvd.LocalTopK, "beta": 1.0}
    ranks = travelling(overlap=3, **settings)
    begin, came = torch.linspace(-1, 1, 40), sum(map(sum, GRADIENTS)) / 2
    resumed = Ranks(2, local_steps, overlap=overlap, **settings)
    for rank, state in enumerate(ranks.states()):
        resumed.compressors[rank].load_state_dict(state)
    came += train(resumed, 13)
    assert resumed.alike()
    kept = sum(each.residues.tensors["w"].residue for each in resumed.compressors) / 2
    torch.testing.assert_close(begin - resumed.models[0].detach() + kept, torch.full([40], came))


def test_a_newcomer_while_averages_travel():
    """The newcomer does not hold these averages.

    Ranks that hold them apply them at once, and the newcomer begins from the result.
    """
    ranks = travelling(outer=momentum)
    states = ranks.states()
    later = Ranks(3, 4, overlap=2, outer=momentum)
    for rank in range(2):
        later.compressors[rank].load_state_dict(states[rank])
    ranks.step(0.0)
    later.step(0.0)
    for local in later.locals:
        assert torch.equal(local.common["w"], ranks.locals[0].common["w"])
    assert torch.equal(later.models[1], ranks.models[1])
    assert torch.equal(later.models[2], later.locals[2].common["w"])
    for _ in range(3):
        later.step([0.25, 0.5, 0.125])
    later.simulation.synchronise()
    assert later.alike()


@pytest.mark.parametrize("outer", [None, momentum])
def test_ranks_are_started_anew_when_one_alone_has_averages_that_travel(outer):
    """That rank saved its state meanwhile.

    The other ranks lose their part of the averages, and their changes since then.
    """
    ranks = Ranks(3, 4, overlap=2, outer=outer, compression=hvd.LocalTopK)
    for _ in range(5):
        ranks.step([0.25, 0.5, -0.125])
    wait_for_kept()  # everything is submitted now
    network, (first, *others) = ranks.simulation.network, ranks.locals
    network.run([first.collect, *[lambda: None] * 2])
    for owner in (*ranks.locals, *(local.exchange for local in ranks.locals)):
        answers = iter([True])
        owner._restarted = lambda answers=answers: next(answers, False)
    network.run([local.rejoin for local in ranks.locals])
    for local in others:
        assert torch.equal(local.common["w"], first.common["w"])
    for _ in range(5):
        ranks.step([0.25, 0.5, -0.125])
    ranks.simulation.synchronise()
    assert ranks.alike()


def test_a_void_average_that_travels():
    """The synchronisation is skipped. The bad rank goes back, the other sends its change again."""
    ranks = Ranks(2, 4, overlap=2, dense=["*"])
    begin = ranks.models[0].detach().clone()
    for step in range(6):
        ranks.step([0.25, float("nan") if step == 2 else 0.25])
    assert torch.equal(ranks.models[1], begin)
    torch.testing.assert_close(ranks.models[0].detach(), begin - 6 * 0.25)
    for _ in range(4):
        ranks.step([0.25, 0.5])
    ranks.simulation.synchronise()
    assert ranks.alike()
    torch.testing.assert_close(ranks.models[0].detach(), begin - (10 * 0.25 + 4 * 0.5) / 2)


def test_a_void_average_goes_on_from_a_checkpoint():
    ranks = Ranks(2, 4, overlap=2)
    for step in range(5):
        ranks.step([0.25, float("nan") if step == 2 else 0.25])
    ranks.simulation.collect()
    states = ranks.states()
    assert states[0]["local_steps"]["averages"] == {}
    resumed = Ranks(2, 4, overlap=2)
    for rank in range(2):
        resumed.compressors[rank].load_state_dict(states[rank])
    for _ in range(6):
        ranks.step([0.25, 0.5])
        resumed.step([0.25, 0.5])
    for one, other in zip(ranks.models, resumed.models, strict=True):
        assert torch.equal(one, other)
    assert bool(ranks.models[1].isfinite().all())


def test_loading_an_older_state_while_averages_travel():
    ranks = Ranks(2, 4, overlap=2)
    for step in range(3):
        ranks.step(GRADIENTS[step])
    states, models = ranks.states(), [model.detach().clone() for model in ranks.models]
    found = []
    for _ in range(2):
        for step in range(3, 13):
            ranks.step(GRADIENTS[step % 5])
        found.append(ranks.models[1].detach().clone())
        ranks.simulation.collect()
        for rank, model in enumerate(models):
            ranks.models[rank].data.copy_(model)
            ranks.compressors[rank].load_state_dict(states[rank])
    assert torch.equal(*found)


def test_an_overlap_in_half_precision():
    ranks = Ranks(2, 4, torch.bfloat16, overlap=2, dense=["*"])
    begin = ranks.models[0].detach().clone()
    for _ in range(22):
        ranks.step([0.25, 0.5])
    ranks.simulation.synchronise()
    assert ranks.alike()
    torch.testing.assert_close(ranks.models[0].detach(), begin - 22 * 0.375, rtol=0, atol=0.1)


def test_stats_are_of_what_has_arrived():
    ranks = Ranks(2, 4, overlap=2, compression=hvd.LocalTopK)
    for _ in range(6):
        ranks.step([0.25, 0.5])
    arrived = ranks.compressors[0].stats()
    assert arrived["bytes_gathered"] > 0
    for _ in range(3):
        ranks.step([0.25, 0.5])
    travels = ranks.compressors[0].stats()
    changing = {"residue_norm", "local_steps_taken"}
    assert {n: v for n, v in travels.items() if n not in changing} == {
        n: v for n, v in arrived.items() if n not in changing
    }


@pytest.mark.parametrize(
    ("local_steps", "overlap", "error", "message"),
    [
        (4, 4, ValueError, "from 0 to 3, less than local_steps, not 4"),
        ({0: 1, 8: 4}, 1, ValueError, "must be 0"),
        (4, -1, ValueError, "not -1"),
        (4, 1.5, TypeError, "a whole number of steps, not 1.5"),
        (4, True, TypeError, "not True"),
    ],
)
def test_overlaps_that_cannot_work_are_refused(local_steps, overlap, error, message):
    with pytest.raises(error, match=message):
        Ranks(2, local_steps, overlap=overlap)


def test_an_overlap_without_local_steps_is_refused():
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"overlap= .* lets local steps go on.*Give local_steps=H"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("w", weight)], hvd.ScaleCom, overlap=1
        )


# Fragments that synchronise in turn.

NAMES = ("a", "b", "c", "d", "e")


class Fragments(Ranks):
    """Simulated ranks with five parameters of 40 elements. Each fragment has some of them."""

    def __init__(self, n, local_steps, fragments, dtype=torch.float32, **fields):
        def parameters():
            values = torch.linspace(-1, 1, 40).to(dtype)
            return {name: torch.nn.Parameter(values.clone()) for name in NAMES}

        self.own = [parameters() for _ in range(n)]
        self.simulation = Simulation(
            n,
            lambda rank: self.own[rank],
            compression=fields.pop("compression", hvd.ScaleCom),
            local_steps=local_steps,
            fragments=fragments,
            **(SETTINGS | fields),
        )
        self.locals, self.compressors = self.simulation.locals, self.simulation.compressors

    @property
    def models(self):
        """Return each rank's parameters as one object; it can change them in place."""
        return [Joined(own.values()) for own in self.own]

    def same(self):
        """Return the names of the parameters that are equal on all ranks."""
        return "".join(
            name
            for name in NAMES
            if all(torch.allclose(self.own[0][name], o[name], atol=1e-6) for o in self.own)
        )

    def values(self, rank):
        return torch.cat([p.detach() for p in self.own[rank].values()])


class Joined:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def sub_(self, number):
        for parameter in self.parameters:
            parameter.sub_(number)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [(0, ["", "abc", "de", "abc", "de"]), (1, ["", "", "abc", "", "de"])],
)
def test_fragments_synchronise_one_after_the_other(overlap, expected):
    """Two ranks diverge in every step. With an overlap, they take some equal steps."""
    ranks = Fragments(2, 4, 2, overlap=overlap, dense=["*"])
    found = []
    for step in range(5 if overlap else 8):
        ranks.step(0.25 if overlap and step in (2, 4) else [0.25, 0.5])
        if overlap or step in (0, 1, 3, 5, 7):
            found.append(ranks.same())
    assert found == expected
    ranks.simulation.synchronise()
    assert ranks.same() == "abcde"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("compression", [hvd.ScaleCom, hvd.LocalTopK, hvd.RandomK])
@pytest.mark.parametrize(("local_steps", "fragments"), [(4, 2), ({0: 2, 7: 5}, 2), (2, 5)])
def test_nothing_is_lost_of_fragments(compression, overlap, local_steps, fragments):
    if overlap and local_steps != 4:
        local_steps = 12
    ranks = Fragments(2, local_steps, fragments, compression=compression, overlap=overlap, beta=1.0)
    begin = ranks.values(0)
    came = train(ranks, 27)
    assert ranks.same() == "abcde"
    kept = (
        sum(
            torch.cat([each.residues.tensors[name].residue for name in NAMES])
            for each in ranks.compressors
        )
        / 2
    )
    torch.testing.assert_close(begin - ranks.values(0) + kept, torch.full([200], came))


@pytest.mark.parametrize("outer", [None, momentum, adam])
@pytest.mark.parametrize(("steps", "overlap"), [(6, 0), (7, 0), (6, 1), (8, 1), (9, 1)])
@pytest.mark.parametrize("compression", [hvd.ScaleCom, hvd.LocalTopK])
def test_resuming_between_fragments_is_bit_identical(compression, outer, steps, overlap):
    def make():
        return Fragments(2, 4, 2, compression=compression, overlap=overlap, outer=outer)

    ranks, resumed = make(), make()
    for step in range(steps):
        ranks.step(GRADIENTS[step % 5])
    ranks.simulation.collect()
    for rank, state in enumerate(ranks.states()):
        # In another order and place, as a new process would: the parameters are loaded last.
        resumed.compressors[rank].load_state_dict(state)
        assert torch.equal(resumed.values(rank), ranks.values(rank))
    for step in range(9):
        ranks.step(GRADIENTS[step % 5])
        resumed.step(GRADIENTS[step % 5])
        for rank in range(2):
            assert torch.equal(resumed.values(rank), ranks.values(rank)), step
    ranks.simulation.collect()
    resumed.simulation.collect()
    for name in NAMES:
        residues = [r.compressors[1].residues.tensors[name].residue for r in (ranks, resumed)]
        assert torch.equal(*residues)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_newcomer_between_fragments(overlap):
    ranks = Fragments(2, 4, 2, overlap=overlap, outer=momentum)
    for step in range(6):
        ranks.step(GRADIENTS[step % 5])
    ranks.simulation.collect()
    later = Fragments(3, 4, 2, overlap=overlap, outer=momentum)
    for rank, state in enumerate(ranks.states()):
        later.compressors[rank].load_state_dict(state)
    for _ in range(7):
        later.step([0.25, 0.5, 0.125])
    later.simulation.synchronise()
    assert later.same() == "abcde"
    for name in NAMES:
        commons = [local.common[name] for local in later.locals]
        assert torch.equal(commons[0], commons[2])


def test_a_fragment_that_is_void():
    """One rank's change of it is not finite. That rank goes back, and nothing else is lost."""
    ranks = Fragments(2, 4, 2, dense=["*"])
    begin = ranks.values(0)
    for _ in range(3):
        ranks.step(0.25)
    with torch.no_grad():
        ranks.own[1]["e"][3] = float("nan")
    ranks.step(0.25)
    # a, b and c were averaged after two steps; here rank 1 goes back to the common parameters.
    torch.testing.assert_close(ranks.values(0), begin - 1.0)
    torch.testing.assert_close(ranks.values(1), begin - torch.tensor([0.5] * 120 + [0.0] * 80))
    assert ranks.compressors[0].stats()["skipped_steps"] == 1
    for _ in range(4):
        ranks.step(0.25)
    ranks.simulation.synchronise()
    assert ranks.same() == "abcde"
    torch.testing.assert_close(ranks.values(0), begin - torch.tensor([1.75] * 120 + [1.5] * 80))


def test_all_ranks_lead_each_fragment():
    """Steps are counted in rounds.

    Otherwise, with as many fragments as ranks, each fragment would always have the same leader.
    """
    ranks = Fragments(2, 2, 2, rate=20, beta=1.0)
    led = []
    for _ in range(8):
        ranks.step([0.25, 0.5])
        led.append(ranks.compressors[0].stats()["leader"])
    assert ranks.compressors[0].stats()["step"] == 4
    assert led == [0, 0, 1, 1, 0, 0, 1, 1]


def test_stats_and_looks_of_fragments():
    ranks = Fragments(2, 4, 2, diagnostics=2, compression=hvd.LocalTopK, rate=20)
    found = []
    for _ in range(16):
        ranks.step([0.25, -0.5])
        stats = ranks.compressors[0].stats()
        found.append((stats["bytes_gathered"], stats["rate"], stats["diagnostics"]))
    large, small = found[5], found[7]
    assert (large[:2], small[:2]) == ((3 * 2 * 5, 20), (2 * 2 * 5, 20))
    # Diagnostics are of the whole model, and come when the round is over.
    assert found[2][2] is None
    assert [found[i][2]["step"] for i in (3, 10, 11, 15)] == [0, 0, 2, 2]
    # The first change of a, b and c covers two steps, that of d and e four.
    largest = ranks.compressors[0].residues.health.norms[-1][-1]
    assert largest == pytest.approx((120 * 0.5**2 + 80 * 1.0**2) ** 0.5)


def test_groups_stay_together_in_fragments():
    groups = [["a", "e"], ["b"], ["c", "d"]]
    ranks = Fragments(2, 4, 2, groups=groups)
    for _ in range(4):
        ranks.step([0.25, 0.5])
    assert sorted(map(sorted, ranks.compressors[0].residues.buckets)) == [
        ["a", "e"],
        ["b"],
        ["c", "d"],
    ]
    assert ranks.same() == "cd"


def test_groups_of_nothing_are_no_fragments():
    groups = [["a", "e"], [], ["b"], [], ["c", "d"]]
    ranks = Fragments(2, 3, 3, groups=groups, warmup_steps=3)
    rates = []
    for _ in range(6):
        ranks.step([0.25, 0.5])
        rates.append(ranks.compressors[0].stats()["rate"])
    assert rates == [1.0, 1.0, 1.0, 4, 4, 4]
    with pytest.raises(ValueError, match="3 tensors, or groups, cannot be cut into 4 fragments"):
        Fragments(2, 4, 4, groups=groups)


@pytest.mark.parametrize(
    ("local_steps", "overlap", "fragments", "error", "message"),
    [
        (4, 0, 0, ValueError, "fragments must be 1 .the whole model. or more, not 0"),
        (4, 0, 1.5, TypeError, "a whole number, not 1.5"),
        (4, 0, 6, ValueError, "5 tensors, or groups, cannot be cut into 6 fragments: give fewer"),
        (4, 2, 2, ValueError, "from 0 to 1, less than local_steps // fragments, not 2"),
        (
            {0: 8, 9: 4},
            2,
            2,
            ValueError,
            "less than the smallest number in local_steps // fragments, not 2",
        ),
    ],
)
def test_fragments_that_cannot_work_are_refused(local_steps, overlap, fragments, error, message):
    with pytest.raises(error, match=message):
        Fragments(2, local_steps, fragments, overlap=overlap)


def test_states_of_other_fragments():
    """Between synchronisations, a state may come from another number of fragments.

    All ranks must use the same number.
    """
    ranks, other = Fragments(2, 4, 2), Fragments(2, 4, 5)
    for _ in range(3):
        ranks.step([0.25, 0.5])
    for rank, state in enumerate(ranks.states()):
        other.compressors[rank].load_state_dict(state)
    for _ in range(6):
        other.step([0.25, 0.5])
    other.simulation.synchronise()
    assert other.same() == "abcde"
    travelling = Fragments(2, 4, 2, overlap=1)
    for _ in range(2):
        travelling.step([0.25, 0.5])
    travelling.simulation.collect()
    state = travelling.states()[0]
    state["local_steps"]["sent_from"]["unknown"] = torch.zeros(40)
    with pytest.raises(ValueError, match="sent_from. belong to another model"):
        ranks.compressors[0].load_state_dict(state)


def test_ranks_with_other_fragments_are_refused():
    ranks = Fragments(2, 4, 2)
    ranks.locals[1]._fragments = ranks.locals[1]._fragments * 2
    with pytest.raises(RuntimeError, match="fragments"):
        ranks.step(0.25)


# Changes that are clipped.


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
    ranks = Ranks(len(grads), 2, dense=["*"], clip_changes=np.float32(2))
    begin = ranks.models[0].detach().clone()
    for _ in range(2):
        ranks.step(grads)
    assert ranks.alike()
    torch.testing.assert_close(ranks.models[0].detach(), begin - sum(changes) / len(changes))
    cut = [int(2 * grad != change) for grad, change in zip(grads, changes, strict=True)]
    assert [c.stats()["changes_clipped"] for c in ranks.compressors] == cut


def test_what_is_not_finite_is_not_clipped_to_what_is():
    ranks = Ranks(3, 2, dense=["*"], clip_changes=2)
    begin = ranks.models[0].detach().clone()
    for grad in (0.25, float("nan")):
        ranks.step([0.25, 0.5, grad])
    assert torch.equal(ranks.models[2], begin)
    assert ranks.compressors[0].stats()["skipped_steps"] == 1
    for _ in range(2):
        ranks.step(0.0)
    assert ranks.alike()
    torch.testing.assert_close(ranks.models[0].detach(), begin - (0.5 + 1.0 + 0.0) / 3)


def test_what_clips_is_the_same_on_all_ranks():
    ranks = Ranks(2, 2, clip_changes=2)
    ranks.locals[1]._clipping.times = 3
    with pytest.raises(RuntimeError, match="clip_changes"):
        ranks.step(0.25)


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        (0, ValueError, "a number above 0, not 0"),
        (float("inf"), ValueError, "not inf"),
        ("2", TypeError, "clip_changes must be a number, not '2'"),
        (True, TypeError, "not True"),
    ],
)
def test_clips_that_cannot_work_are_refused(clip, error, message):
    with pytest.raises(error, match=message):
        Ranks(2, 2, clip_changes=clip)


@pytest.mark.parametrize("value", [2.0**99, -(2.0**101), float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_gradients_can_be_used(dtype, value):
    """A gradient can be used even if its square overflows float32."""
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    check_finite_gradients(parameters)
    parameters[1].grad[2] = value
    if abs(value) < 2.0**100:
        check_finite_gradients(parameters)
    else:
        with pytest.raises(NotFinite):
            check_finite_gradients(parameters)
