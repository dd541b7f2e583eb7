"""Averages that a script throws away under DistributedDataParallel.

Every backward averages there. Either nothing is lost, or a warning says that something is.
"""

import logging

import pytest
import torch
from models import same_on_all_ranks
from thrown_away import SHAPES, add, assert_nothing_is_lost_or_warned, average, mine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


class Given(nn.Module):
    """Its parameters' gradients are what forward is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPES["weight"]))
        self.bias = nn.Parameter(torch.zeros(SHAPES["bias"]))

    def forward(self, grads):
        return (self.weight * grads["weight"]).sum() + (self.bias * grads["bias"]).sum()


def run(caplog, set_to_none, throws_away):
    """Train by plain SGD with learning rate 1.

    throws_away(model, grads) runs before each step's own backward.
    """
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model = DistributedDataParallel(Given())
    state = ScaleComState(model, rate=10, beta=1.0, dense=["bias"], warmup_steps=0, min_numel=2)
    model.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    real, thrown_away = {}, {}
    for step in range(6):
        optimizer.zero_grad(set_to_none)
        if throws_away is not None:
            throws_away(model, mine(2 * step))
            add(thrown_away, average(2 * step))
        optimizer.zero_grad(set_to_none)
        model(mine(2 * step + 1)).backward()
        add(real, average(2 * step + 1))
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    if throws_away is None:
        thrown_away = dict.fromkeys(SHAPES, 0.0)
    named = dict(model.module.named_parameters())
    assert_nothing_is_lost_or_warned(named, state.compression, real, thrown_away, caplog)
    return [record.getMessage() for record in caplog.records if record.name == "scalecom_hvd"]


in_both_ways = pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])


@in_both_ways
def test_the_fast_gradient_sign_method(set_to_none, caplog):
    """FGSM's first backward is for the inputs' gradients, but goes through the parameters too.

    Generators of GANs do the same to their discriminator.
    """

    def attack(model, grads):
        inputs = {name: grad.requires_grad_() for name, grad in grads.items()}
        model(inputs).backward()
        assert inputs["weight"].grad is not None

    run(caplog, set_to_none, attack)


@in_both_ways
def test_parameters_that_ask_for_no_gradient_meanwhile_lose_nothing(set_to_none, caplog):
    """The pages may advise this to such scripts: what is not asked for is not averaged."""

    def attack(model, grads):
        inputs = {name: grad.requires_grad_() for name, grad in grads.items()}
        torch.autograd.grad(model.module(inputs), list(inputs.values()))

    said = run(caplog, set_to_none, attack)
    assert not any("zero_grad" in message for message in said)


@in_both_ways
def test_a_script_that_throws_nothing_away_is_not_warned(set_to_none, caplog):
    said = run(caplog, set_to_none, None)
    assert not any("zero_grad" in message for message in said)
