"""Diagnostics of real ranks equal those of as many simulated ranks.

One rank writes them, at steps that all ranks agreed on.
"""

import csv

import pytest
import torch
from faces import horovods_alone, hvd, stock
from models import feed, gradients, parameters

from scalecom_hvd.exchange.simulator import Simulation

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (6401,)}
SETTINGS = {"rate": 20, "beta": 0.3, "min_numel": 100}


def make(compression=hvd.ScaleCom, **settings):
    model = parameters(SHAPES)
    compressor = compression(**(SETTINGS | settings))
    return model, hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=compressor
    )


def known(numbers):
    return {name: number for name, number in numbers.items() if number is not None}


@pytest.mark.parametrize(
    ("compression", "settings"),
    [
        (hvd.ScaleCom, {}),
        (hvd.ScaleCom, {"lookahead": True, "leader": "staggered", "bucket_bytes": 20_000}),
        (hvd.LocalTopK, {}),
        (hvd.ECQSGD, {}),
    ],
    ids=str,
)
def test_real_ranks_see_what_simulated_ones_see(compression, settings):
    n, rank = hvd.size(), hvd.rank()
    settings = settings | {"diagnostics": hvd.Diagnostics(2, sample=4000)}
    model, optimizer = make(compression, **settings)
    simulation = Simulation(
        n, lambda _: parameters(SHAPES), compression=compression, **(SETTINGS | settings)
    )
    looks = 0
    for step in range(6):
        everyone = [gradients(SHAPES, r, step) for r in range(n)]
        missing = ["third"] if rank == n - 1 and step == 2 else []
        if step == 2:
            everyone[-1].pop("third")
        optimizer.zero_grad()
        feed(model, everyone[rank], missing)
        optimizer.step()
        simulation.step(
            [{name: torch.as_tensor(grad) for name, grad in worker.items()} for worker in everyone]
        )
        mine, theirs = (
            compressor.stats()["diagnostics"]
            for compressor in (optimizer.compression, simulation.compressors[rank])
        )
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert known(mine) == pytest.approx(known(theirs), rel=1e-4, abs=1e-6)
            looks += mine["step"] == step
    assert looks == (2 if settings.get("lookahead") else 3)


def test_the_first_rank_writes(tmp_path):
    # Ranks on one machine have separate folders here, to show which rank wrote.
    path = tmp_path / "diagnostics.csv"
    model, optimizer = make(diagnostics=hvd.Diagnostics(2, csv=path))
    for step in range(4):
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
    numbers = optimizer.compression.stats()["diagnostics"]
    assert path.exists() == (hvd.rank() == 0)
    assert all(other == numbers for other in hvd.allgather_object(numbers))
    if hvd.rank() == 0:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows] == ["0", "2"]
        assert float(rows[1]["contraction"]) == numbers["contraction"]


@pytest.mark.skipif(hvd.size() == 1, reason="one rank has nobody to differ from")
@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (5, 7, "diagnostics.every is 5 on rank 0 and 7 on rank 1"),
        (5, None, "diagnostics.every is 5 on rank 0 and missing on rank 1"),
        (
            5,
            hvd.Diagnostics(5, sample=100),
            "diagnostics.sample is 65536 on rank 0 and 100 on rank 1",
        ),
    ],
    ids=str,
)
def test_ranks_that_would_look_at_different_steps(mine, theirs, words):
    model, optimizer = make(diagnostics=theirs if hvd.rank() == 1 else mine)
    feed(model, gradients(SHAPES, hvd.rank(), 0))
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()


@horovods_alone
def test_horovods_own_optimizer_has_none():
    model = parameters(SHAPES)
    compressor = hvd.ScaleCom(model.items(), diagnostics=50)
    optimizer = stock.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=compressor
    )
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"Use scalecom_hvd.torch's DistributedOptimizer"):
            feed(model, gradients(SHAPES, hvd.rank(), 0))
    for p in model.values():
        p.grad = None
    del optimizer


def test_a_monitor_writes_on_the_first_rank():
    written = []

    class Writer:
        def add_scalar(self, name, number, step):
            written.append((name, step, number))

    model, optimizer = make()
    monitor = hvd.Monitor(optimizer, every=2, writer=Writer())
    for step in range(4):
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
        monitor.step()
    assert {step for _, step, _ in written} == ({2, 4} if hvd.rank() == 0 else set())
    if hvd.rank() == 0:
        assert ("scalecom/bytes_traffic", 4, optimizer.compression.stats()["bytes_traffic"]) in (
            written
        )
        assert "MB, rate" in monitor.line
