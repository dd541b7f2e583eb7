"""Which rank leads; and when workers synchronise, compared with a walk through all steps."""

import random

import pytest

from scalecom_hvd.schedule import Schedule, leader


def test_all_ranks_lead_as_often():
    assert [leader(t, 5, 3, staggered=False) for t in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [leader(t, 1, 3, staggered=True) for t in range(6)] == [1, 2, 0, 1, 2, 0]
    assert [leader(7, bucket, 3, staggered=True) for bucket in range(4)] == [1, 2, 0, 1]


def walk(changes, steps):
    """Find the steps after which all synchronise, one after the other."""
    found, last = [], 0
    while True:
        in_force = changes[max(begin for begin in changes if begin <= last)]
        last += in_force
        if last > steps:
            return found
        found.append(last)


@pytest.mark.parametrize(
    "changes",
    [
        {0: 1},
        {0: 4},
        {0: 7, 3: 2},
        {0: 1, 10: 4, 50: 16},
        {0: 16, 1: 1, 2: 3},
        {0: 5, 5: 1},
        {0: 100, 10: 1, 20: 7},
    ]
    + [
        {0: random.Random(i).randint(1, 9)}
        | {random.Random(i + j).randint(1, 150): j % 11 + 1 for j in range(6)}
        for i in range(20)
    ],
)
def test_a_step_is_due_where_a_walk_comes_by(changes):
    schedule = Schedule(changes)
    found = walk(changes, 200)
    assert [step for step in range(1, 201) if schedule.fragments_due(step)] == found
    for steps in range(201):
        assert schedule.synchronisations(steps) == sum(one <= steps for one in found)
    assert all(schedule.fragments_due(step) == range(1) for step in found)


@pytest.mark.parametrize("fragments", [1, 2, 3, 7])
@pytest.mark.parametrize("changes", [{0: 1}, {0: 12}, {0: 7, 3: 2}, {0: 1, 10: 5, 50: 16}])
def test_fragments_are_due_in_turn_once_in_each_round(changes, fragments):
    schedule, begin = Schedule(changes, fragments), 0
    for end in walk(changes, 200):
        due = [
            (step, p) for step in range(begin + 1, end + 1) for p in schedule.fragments_due(step)
        ]
        assert [p for _, p in due] == list(range(fragments))
        for step, p in due:
            share = (p + 1) / fragments * (end - begin)
            assert share <= step - begin < share + 1
        assert schedule.synchronisations(end) == schedule.synchronisations(begin) + 1
        begin = end


def test_one_number():
    assert [step for step in range(1, 20) if Schedule(4).fragments_due(step)] == [4, 8, 12, 16]
    assert Schedule(4).describe() == Schedule({0: 4}).describe() == [[0, 4]]


@pytest.mark.parametrize("wrong", [0, -1, {0: 0}, {5: 1}, {}, {-1: 2, 0: 1}, {0.5: 1, 0: 1}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=r"local_steps must be a number of steps \(4\)"):
        Schedule(wrong)


@pytest.mark.parametrize("wrong", ["4", 2.0, True, None, [], [4, 8], lambda step: 4])
def test_wrong_types_are_refused(wrong):
    with pytest.raises(TypeError, match=r"local_steps must be a number of steps \(4\)"):
        Schedule(wrong)


@pytest.mark.parametrize(
    ("settings", "overlap", "error", "message"),
    [
        ((4, 0), 0, ValueError, "fragments must be 1 .the whole model. or more, not 0"),
        ((4, 1.5), 0, TypeError, "a whole number, not 1.5"),
        ((4,), 4, ValueError, "from 0 to 3, less than local_steps, not 4"),
        ((4,), -1, ValueError, "not -1"),
        ((4,), 1.5, TypeError, "a whole number of steps, not 1.5"),
        ((4,), True, TypeError, "not True"),
        (({0: 1, 8: 4},), 1, ValueError, "must be 0"),
        ((4, 2), 2, ValueError, "from 0 to 1, less than local_steps // fragments, not 2"),
        ((5, 2), 2, ValueError, "from 0 to 1"),
        (({0: 8, 9: 4}, 2), 2, ValueError, "less than the smallest number in local_steps // fr"),
    ],
)
def test_fragments_and_overlaps_that_cannot_work_are_refused(settings, overlap, error, message):
    with pytest.raises(error, match=message):
        Schedule(*settings).check_overlap(overlap)
