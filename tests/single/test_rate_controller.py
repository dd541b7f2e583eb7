"""The controller of rate="auto" by itself, on networks that are made up.

A network is a function that gives what a step on a rung takes: (seconds, seconds exposed).
"""

import itertools
import random
import statistics

import pytest

from scalecom_hvd.rate_controller import CHANGED, FREE, RateController
from scalecom_hvd.stages import LADDER, START, WHOLE

ELEMENTS, COMPUTE = 25e6, 0.17
# What compression itself exposes: nothing if all is sent whole, most if nearly all is.
KERNELS = [0, 0.06, 0.05, 0.045, 0.04, 0.04, 0.04, 0.04, 0.04]


def network(gigabits, ranks=2, noise=0.05, compute=COMPUTE, seed=0, straggles=0.0):
    """Three fifths of backward hide communication. straggles: seconds that another rank is late."""
    dice = random.Random(seed)

    def step(rung):
        travels = LADDER[rung].bytes_of(ranks) * ELEMENTS * 8 / (gigabits * 1e9)
        own = compute * (1 + dice.gauss(0, noise))
        exposed = max(travels - 0.6 * own, 0.15 * travels) + 0.6 * KERNELS[rung]
        exposed += abs(dice.gauss(0, straggles))
        return own + 0.4 * KERNELS[rung] + exposed, exposed

    return step


def run(controller, step, steps):
    """The rungs that it took."""
    rungs = []
    for _ in range(steps):
        rungs.append(controller.rung)
        controller.note(*step(controller.rung))
    return rungs


def median(step, rung):
    return statistics.median(step(rung)[0] for _ in range(99))


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gigabits", [0.1, 1, 10, 40])
def test_steps_are_as_short_as_on_the_best_rung(gigabits, ranks, noise, is_new):
    """A denser rung that takes a little longer is preferred: it sends more."""
    settled = 400 if is_new else 200
    for seed in range(5):
        step, clean = network(gigabits, ranks, noise, seed=seed), network(gigabits, ranks, 0.0)
        rungs = run(RateController(ranks, is_new=is_new), step, 1200)
        best = min(median(clean, rung) for rung in range(len(LADDER)))
        assert median(clean, rungs[-1]) < 1.09 * best
        changes = zip(rungs[settled:], rungs[settled + 1 :], strict=False)
        assert sum(a != b for a, b in changes) <= 3
        # What it tried on the way costs little.
        assert sum(step(rung)[0] for rung in rungs) < 1.13 * 1200 * best
        assert gigabits < 10 or rungs[-1] == WHOLE


def test_a_new_run_begins_denser_unless_that_costs_much():
    def step(rung):
        return (0.14, 0.05) if rung < 2 else (0.12, 0.014) if rung == 2 else (0.115, 0.01)

    rungs = run(RateController(2, is_new=True), step, 700)
    assert set(rungs[100:240]) == {START}
    assert FREE >= rungs[-1] > START
    assert run(RateController(2), step, 700)[-1] == rungs[-1]
    assert run(RateController(2, is_new=True), network(0.1, noise=0.0), 120)[-1] > FREE


def test_it_settles_within_a_hundred_steps():
    for gigabits in (0.1, 1, 10):
        controller = RateController(4)
        run(controller, network(gigabits, 4, noise=0.02), 112)
        assert controller.is_settled


def test_the_rungs_that_it_tries_and_for_how_long():
    """The network of the second run becomes slower while the controller is settled."""
    until = [(2, 16), (3, 16), (4, 16), (5, 16), (0, 3)]
    for gigabits, expected in (
        ([0.5], [*until, (4, 233)]),
        ([3, 0.3, 0.3, 0.3], [*until, (3, 400), (4, 16), (5, 16), (4, 701)]),
    ):
        controller = RateController(2)
        rungs = [run(controller, network(each, noise=0.0), 300) for each in gigabits]
        grouped = itertools.groupby(itertools.chain(*rungs))
        assert [(rung, len(list(steps))) for rung, steps in grouped] == expected


def test_there_is_nothing_beyond_the_sparsest_rung():
    assert run(RateController(2), lambda rung: (2.0**-rung, 0.9 * 2.0**-rung), 200)[-1] == 8


@pytest.mark.parametrize(
    ("rung", "ranks", "sent"),
    [(0, 4, 6), (0, 1, 0), (1, 2, 4 / 3), (4, 2, 11 / 96), (6, 2, 1 / 32)],
)
def test_what_a_rung_sends_of_an_element(rung, ranks, sent):
    assert LADDER[rung].bytes_of(ranks) == pytest.approx(sent)


def test_a_slow_rank_is_not_mended_by_sending_less():
    step = network(10, noise=0.02, straggles=0.1)
    rungs = run(RateController(2), step, 1000)
    assert max(rungs) <= FREE + 2
    assert sum(a != b for a, b in zip(rungs[200:], rungs[201:], strict=False)) <= 3


def test_it_searches_again_if_steps_take_another_time():
    """The network becomes slower, later the computation longer, and in the end all is quick."""
    controller = RateController(2)
    assert run(controller, network(40, noise=0.02), 300)[-1] == WHOLE
    slow = run(controller, network(0.3, noise=0.02), 800)[-1]
    assert slow >= START
    longer = run(controller, network(0.3, noise=0.02, compute=20 * COMPUTE), 2500)[-1]
    assert longer < slow
    assert controller.is_settled
    assert run(controller, network(40, noise=0.02), 800)[-1] == WHOLE


def test_the_first_steps_of_a_window_do_not_count_nor_does_a_pause_of_a_settled_run():
    controller = RateController(2)
    for seconds in (9, 9, 9, *[0.1] * 8, *[0.2] * 5):
        controller.note(seconds, 0.0)
    assert "(0.1 s a step" in controller.reason
    while not controller.is_settled:
        controller.note(*network(10, noise=0.0)(controller.rung))
    for _ in range(3):
        controller.note(9.0, 0.0)
    assert controller.is_settled


@pytest.mark.parametrize(
    ("exposed", "is_left"), [((0.09, 0.09, 0.09), True), ((0.09, 0, 0), False)]
)
def test_a_rung_is_left_at_once_if_most_of_each_step_is_exposed(exposed, is_left):
    controller = RateController(2)
    for each in (0, 0, 0, *exposed):
        controller.note(0.1, each)
    assert ("much is exposed" in controller.reason) == is_left == (controller.rung != START)


@pytest.mark.parametrize(("of_rung_3", "is_tried"), [(1.09, False), (1.05, True)])
def test_whole_steps_are_tried_unless_bytes_cost_much(of_rung_3, is_tried):
    """They send 33 times as much more than rung 3 as rung 3 sends more than rung 4."""
    steps = {2: (1.3, 0.3), 3: (of_rung_3, 0.12), 4: (1.0, 0.05), WHOLE: (2.0, 1.0)}
    rungs = run(RateController(2), steps.get, 200)
    assert (WHOLE in rungs) == is_tried
    assert rungs[-1] == 4


def test_a_user_is_told(caplog):
    caplog.set_level("INFO", "scalecom_hvd")
    controller = RateController(2)
    rungs = run(controller, network(40, noise=0.02), 400)
    changes = sum(a != b for a, b in zip(rungs, rungs[1:], strict=False))
    assert len(caplog.records) == changes
    assert "rate='auto' goes from rate 8, 4 bits to rate" in caplog.text
    assert "s a step" in controller.reason


def test_noise_below_the_threshold_changes_nothing():
    controller = RateController(2)
    run(controller, network(10, noise=0.02), 200)
    settled, dice = controller.rung, random.Random(1)
    for _ in range(2000):
        seconds, exposed = network(10, noise=0.0)(settled)
        controller.note(seconds * (1 + dice.uniform(-CHANGED, CHANGED)), exposed)
        assert controller.rung == settled
