"""Averages that a script throws away, on one simulated rank."""

import copy

import pytest
import torch

from scalecom_hvd.exchange import Exchange, Options, ScaleCom
from scalecom_hvd.exchange.simulator import Network, SimulatedCollectives
from scalecom_hvd.exchange.unused_averages import TRIAL, UnusedAverages

BOTH = {"weight", "other"}


class Script:
    """Two weights in buckets of their own, their optimizer and their exchange."""

    def __init__(self, warmup_steps):
        self.weight, other = (torch.nn.Parameter(torch.zeros(300)) for _ in range(2))
        self.weights = {"weight": self.weight, "other": other}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.1)
        settings = {"rate": 10, "bits": 32, "beta": 1.0, "min_numel": 0, "dense": ()}
        self.method = ScaleCom(**settings, warmup_steps=warmup_steps)
        unused = UnusedAverages(self.weights, calls_hooks=True)
        options = Options([["weight"], ["other"]], unused=unused)
        transport = SimulatedCollectives(Network(1), 0)
        self.exchange = Exchange(self.weights, self.method, transport, options)

    def step(self, uses=True, flawed=False):
        """Average a gradient, and use its average, or zero it."""
        self.report(flawed)
        self.exchange.finish()
        if uses:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, flawed=False):
        sum((p * torch.randn(300)).sum() for p in self.weights.values()).backward()
        if flawed:
            self.weight.grad[7] = torch.nan
        for name, weight in self.weights.items():
            self.exchange.ready(name, weight.grad.view(-1))

    def seen(self):
        """The number of exchanges whose averages were thrown away, and what went back last."""
        return self.method.stats()["averages_thrown_away"], self.method.residues.given_back


@pytest.mark.parametrize(("warmup_steps", "uses"), [(0, True), (TRIAL + 2, True), (3, False)])
def test_steps_that_are_sent_whole_are_no_trial(warmup_steps, uses, caplog):
    """No residue has to become what it was before them."""
    script = Script(warmup_steps)
    for _ in range(warmup_steps):
        script.step(uses)
    script.step()
    assert script.seen() == (0, set())
    residue = script.method.residues.tensors["weight"].residue
    before = residue.clone()
    script.step(uses=False)
    assert not torch.equal(residue, before)
    script.step(flawed=True)  # this step is rolled back to the residues that went back
    torch.testing.assert_close(residue, before, rtol=0, atol=1e-6)
    script.step()
    assert script.seen() == (1, BOTH)
    assert not caplog.records


@pytest.mark.parametrize("flawed", [False, True])
def test_averages_of_several_exchanges_are_thrown_away(flawed):
    """Residues become what they were before the first, also if the last one was skipped."""
    script = Script(warmup_steps=0)
    script.step()
    residue = script.method.residues.tensors["weight"].residue
    before = residue.clone()
    script.report()
    script.exchange.finish()
    script.step(uses=False, flawed=flawed)
    assert not torch.equal(residue, before)
    script.step(flawed=True)
    torch.testing.assert_close(residue, before, rtol=0, atol=1e-6)
    assert script.seen() == (1, BOTH)


def test_gradients_that_are_taken_away_before_the_step_are_thrown_away():
    script = Script(warmup_steps=0)
    script.step()
    residues = script.method.residues.tensors
    before = {name: tensor.residue.clone() for name, tensor in residues.items()}
    script.report()
    script.exchange.finish()
    script.weight.grad = None
    script.optimizer.step()
    kept = residues["other"].residue.clone()
    script.optimizer.zero_grad()
    script.step(flawed=True)
    torch.testing.assert_close(residues["weight"].residue, before["weight"], rtol=0, atol=1e-6)
    torch.testing.assert_close(residues["other"].residue, kept, rtol=0, atol=1e-6)


def test_what_was_loaded_stays(caplog):
    script = Script(warmup_steps=0)
    script.step()
    state = copy.deepcopy(script.method.state_dict())
    for _ in range(3):
        script.step()
    script.step(uses=False)
    script.method.load_state_dict(state)
    script.step(flawed=True)  # this step is rolled back
    assert script.seen()[0] == 0
    assert not caplog.records
    residue = script.method.residues.tensors["weight"].residue
    torch.testing.assert_close(residue, state["residues"]["weight"], rtol=0, atol=1e-6)


def test_what_went_back_counts_once_if_its_step_is_given_up():
    script = Script(warmup_steps=0)
    script.step()
    script.step(uses=False)
    script.report()
    script.exchange.abort()
    script.step()
    assert script.seen() == (1, BOTH)
