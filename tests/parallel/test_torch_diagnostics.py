"""Statistics and diagnostics of real ranks equal those of as many simulated ranks.

All ranks agree on the steps of diagnostics.
"""

import pytest
import torch
from faces import horovods_alone, hvd, stock
from made_up import gradients
from models import feed, parameters, take_steps, wrap

from scalecom_hvd.exchange.simulator import Simulation

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (6401,)}
SETTINGS = {"rate": 20, "beta": 0.3, "min_numel": 100}


def make(compression=hvd.ScaleCom, **settings):
    model = parameters(SHAPES)
    return model, *wrap(hvd, model, lr=0.1, method=compression, **(SETTINGS | settings))


def known(numbers):
    return {name: number for name, number in numbers.items() if number is not None}


@pytest.mark.parametrize(
    ("compression", "settings"),
    [
        (hvd.ScaleCom, {}),
        (hvd.ScaleCom, {"lookahead": True, "leader": "staggered", "bucket_bytes": 20_000}),
        (hvd.LocalTopK, {}),
        (hvd.RandomK, {}),
    ],
    ids=str,
)
def test_real_ranks_see_what_simulated_ones_see(compression, settings, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.diagnostics.SAMPLE", 4000)
    n, rank = hvd.size(), hvd.rank()
    settings = settings | {"diagnostics": 2}
    model, optimizer, own = make(compression, **settings)
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
        stats = own.stats(), simulation.compressors[rank].stats()
        mine, theirs = (each.pop("diagnostics") for each in stats)
        assert stats[0] == stats[1]
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert known(mine) == pytest.approx(known(theirs), rel=1e-4, abs=1e-6)
            looks += mine["step"] == step
    assert looks == (2 if settings.get("lookahead") else 3)


@pytest.mark.skipif(hvd.size() == 1, reason="one rank has nobody to differ from")
def test_ranks_that_would_look_at_different_steps():
    model, optimizer, _ = make(diagnostics=None if hvd.rank() == 1 else 5)
    with pytest.raises(RuntimeError, match="diagnostics is 5 on rank 0 and missing on rank 1"):
        take_steps(optimizer, model, [0])


@horovods_alone
@pytest.mark.parametrize("what", ["diagnostics=...", "bits=4", "rate='auto'"])
def test_horovods_own_optimizer_has_none(what):
    model = parameters(SHAPES)
    settings = {"diagnostics=...": {"diagnostics": 50}, "bits=4": {"bits": 4}}
    optimizer, _ = wrap(stock, model, **settings.get(what, {"rate": "auto"}))
    if hvd.size() > 1:
        with pytest.raises(TypeError, match=f"{what} works only in this package's"):
            feed(model, gradients(SHAPES, hvd.rank(), 0))
    for p in model.values():
        p.grad = None
    del optimizer


def test_a_monitor_writes_on_the_first_rank():
    model, optimizer, _ = make()
    monitor = hvd.Monitor(optimizer, every=1)
    take_steps(optimizer, model, [0])
    monitor.step()
    assert ("MB, rate" in monitor.line) == (hvd.rank() == 0)
