"""The race's numbers, on known losses and step times."""

import pytest
import race
import race_language
import torch
from race_ways import WAYS, Way

TIMED = {
    ("forward and backward", 100): {"step_ms": 10.0},
    ("DDP dense", 100): {"step_ms": 200.0},
    ("DDP dense, one bucket", 100): {"step_ms": 400.0},
    ("quick", 100): {"step_ms": 30.0},
    ("auto", 100): {"step_ms": 30.0, "search_ms": [100.0] * 15},
}


def run(*losses):
    return {"losses": {str(10 * i): loss for i, loss in enumerate(losses)}}


@pytest.mark.parametrize(
    ("way", "losses", "points"),
    [
        (Way("quick"), [[6.0, 5.0, 4.0]], [(0, 6.0), (0.3, 5.0), (0.6, 4.0)]),
        # Microbatches take compute and no network.
        (Way("DDP dense", microbatches=4), [[6.0, 5.0]], [(0, 6.0), (10 * (0.2 + 0.03), 5.0)]),
        # Dense steps come first.
        (
            Way("quick", begins=0.1),
            [[6.0, 5.0, 4.0]],
            [(0, 6.0), (0.8 + 0.24, 5.0), (0.8 + 0.54, 4.0)],
        ),
        # The search's steps have their own times.
        (Way("auto"), [[6.0, 5.0, 4.0]], [(0, 6.0), (1.0, 5.0), (1.65, 4.0)]),
        # Losses are means of seeds.
        (Way("quick"), [[6.0, 5.0], [7.0, 4.0]], [(0, 6.5), (0.3, 4.5)]),
    ],
)
def test_curves(way, losses, points):
    found = race.curve(way, [run(*own) for own in losses], TIMED, 100)
    assert found == [pytest.approx(point) for point in points]


def test_losses_and_times():
    points = [(0.0, 6.0), (10.0, 4.0), (20.0, 4.5), (30.0, 3.0)]
    times = {5.0: 5.0, 4.0: 10.0, 3.75: 25.0, 2.0: None}
    assert {loss: race.time_to(loss, points) for loss in times} == times


def test_all_ways_are_timed_to_the_same_loss():
    ends = {"DDP, dense": (0, 5.0), "ScaleCom": (0, 5.0)}
    curves = {
        (way, mbit): [begin, (50.0, 2.0), (100.0, 1.99)]
        for way, begin in ends.items()
        for mbit in race.SPEEDS
    }
    rows = [row for row in race.table(curves, [*ends]) if row.startswith(("| DDP", "| Scale"))]
    cells = [[cell.strip() for cell in row.split("|")[2:5]] for row in rows]
    assert cells == [["50.0", "1.0", "100.0"]] * 6


def test_every_way_is_timed_by_a_name_that_the_bench_knows():
    import bench_worker

    known = {*bench_worker.UNDER_TORCHRUN}
    assert {name for way in WAYS.values() for name in way.timed} <= known


def test_the_model_sees_only_what_came_before():
    torch.manual_seed(0)
    model = race_language.Decoder(race_language.SIZES["tiny"])
    windows = torch.randint(512, (1, race_language.CONTEXT + 1))
    x = model.embedding(windows[:, :-1]).detach().requires_grad_()
    seen = x
    for block in model.blocks:
        seen = block(seen)
    seen[0, 10].sum().backward()
    assert x.grad[0, :11].abs().sum(1).all()
    assert not x.grad[0, 11:].any()
