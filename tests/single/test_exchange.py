"""An Exchange by itself on one rank: where gradients are averaged, and which calls are refused.

test_simulator.py has several ranks.
"""

import pytest
import torch
from simulated import assert_same

from scalecom_hvd.exchange import Exchange, Face, ScaleCom
from scalecom_hvd.exchange.simulator import Network, SimulatedCollectives, SimulatedWork
from scalecom_hvd.stages import WHOLE


def made(like, face=None, **settings):
    """Return an exchange on one rank, and its method."""
    method = ScaleCom(min_numel=0, **settings)
    return Exchange(like, method, SimulatedCollectives(Network(1), 0), face=face), method


class SideBySide(Face):
    """A face whose gradients lie side by side, as in DDP's buckets."""

    def layout(self):
        return [["b", "a"]]


def test_after_gradients_that_are_averaged_in_their_own_memory_flags_travel(monkeypatch):
    """Ranks wait for both. If gradients lie elsewhere, they are copied."""
    under_way = set()
    wait, submit = SimulatedWork.wait, Network.submit

    def submitted(*what):
        work = submit(*what)
        under_way.add(work)
        return work

    def waited(work):
        under_way.discard(work)
        return wait(work)

    monkeypatch.setattr(Network, "submit", submitted)
    monkeypatch.setattr(SimulatedWork, "wait", waited)
    like = {"a": torch.zeros(100), "b": torch.zeros(50)}
    exchange, method = made(like, SideBySide(), rate="auto")
    method.residues.take_rung(WHOLE)  # from the second step on, nothing is compressed
    for step in range(4):
        memory = torch.arange(150.0)
        b, a = memory.split([50, 100]) if step < 3 else (memory[100:], memory[:100])
        came = {"a": a.clone(), "b": b.clone()}
        exchange.ready_all({"a": a, "b": b})
        assert_same(exchange.finish(), came)
        stats = method.stats()
        assert step == 0 or (stats["bytes_dense"], stats["collectives"]) == (608, 2)
        assert not under_way


def test_nothing_is_chosen_for_what_travels_elsewhere():
    """With look-ahead, only the first step is then sent whole."""
    like, rates = {"a": torch.zeros(64), "rows": torch.zeros(50)}, []
    exchange, method = made(like, rate=4, lookahead=True)
    for _ in range(3):
        exchange.ready("a", torch.randn(64))
        exchange.ready_elsewhere("rows")
        assert exchange.finish().keys() == {"a"}
        rates.append(method.stats()["rate"])
    assert rates == [1, 4, 4]


def test_calls_in_a_wrong_order_are_refused():
    exchange, method = made({"a": torch.zeros(64), "b": torch.zeros(64)})
    with pytest.raises(RuntimeError, match=r"finish\(\) before ready\(\)"):
        exchange.finish()
    with pytest.raises(ValueError, match="has no tensor 'c', so it cannot average it"):
        exchange.ready("c", torch.ones(64))
    for _ in range(2):
        exchange.ready_all({"a": torch.ones(64), "b": None})
        exchange.finish()
    before = method.residues.tensors["a"].residue.clone()
    exchange.ready("a", torch.ones(64))
    for call in (method.state_dict, lambda: method.load_state_dict({})):
        with pytest.raises(RuntimeError, match="was called between backward.. and step"):
            call()
    with pytest.raises(RuntimeError, match=r"'a' was reported twice before finish\(\)"):
        exchange.ready("a", torch.ones(64))
    assert not exchange.in_step()
    torch.testing.assert_close(method.residues.tensors["a"].residue, before)
    with pytest.raises(ValueError, match="this ScaleCom already serves an optimizer"):
        Exchange({"a": torch.zeros(64)}, method, SimulatedCollectives(Network(1), 0))
