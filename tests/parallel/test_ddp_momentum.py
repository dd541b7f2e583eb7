"""Quasi-hyperbolic momentum with DDP's hook: parameters are the same on all ranks, at any time."""

import contextlib
import copy

import pytest
import torch
from faces import hvd
from models import OPTIMIZERS, SETTINGS, loss, make_model, same_on_all_ranks, take
from test_torch_momentum import NU, Oracle
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook


def make(optimizer="momentum", model=None, registers=True, **settings):
    model = DistributedDataParallel(make_model() if model is None else model)
    state = ScaleComState(model, **{**SETTINGS, "nu": NU, **settings})
    if registers:
        model.register_comm_hook(state, scalecom_hook)
    make = OPTIMIZERS.get(optimizer, optimizer)
    return model, make([p for p in model.parameters() if p.requires_grad]), state


@pytest.mark.parametrize("settings", [{}, {"lookahead": True}, {"bits": 3}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_the_oracles(optimizer, settings):
    model, stepped, state = make(optimizer, **settings)
    expected = Oracle(model.module, optimizer)
    for step in range(6):
        take(model, stepped, step)
        expected.check()
    assert state.compression.config.beta == 1


class Teaching(nn.Module):
    """As MoCo, it updates a teacher in forward. It also limits its own weights there."""

    def __init__(self):
        super().__init__()
        self.student = make_model()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        assert same_on_all_ranks(self.parameters())
        self.student[0].weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)
            wanted = self.teacher(x)
        assert same_on_all_ranks(self.parameters())
        return self.student(x) - wanted


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_whoever_looks_sees_the_same_parameters_on_all_ranks(optimizer):
    """They look in forward, between micro-batches and before the step."""
    model, stepped, _ = make(optimizer, Teaching(), nu=None, bits=3)
    for step in range(6):
        stepped.zero_grad()
        for part in range(2):
            with contextlib.nullcontext() if part else model.no_sync():
                loss(model, hvd.rank(), 2 * step + part).backward()
            assert model.module.student[0].weight.abs().max() <= 0.2
            with torch.no_grad():
                seen = model.module.student(torch.ones(2, 12, dtype=torch.float64))
            assert same_on_all_ranks([seen, *model.module.state_dict().values()])
        stepped.step()
        assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("registers", [True, False])
def test_a_hook_that_was_not_registered_is_told(registers, caplog):
    model, optimizer, _ = make(registers=registers)
    for step in range(25):
        take(model, optimizer, step)
    assert caplog.text.count("call model.register_comm_hook(state") == (not registers)


def test_a_compiled_step_is_the_same():
    """Hooks of an optimizer's step are not compiled with it."""
    ends = []
    for compiles in (False, True):
        model, optimizer, _ = make("adamw")
        step_of = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for step in range(4):
            optimizer.zero_grad()
            loss(model, hvd.rank(), step).backward()
            step_of()
        assert same_on_all_ranks(model.parameters())
        ends.append(list(model.parameters()))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)  # Adam's powers have other dtypes
