"""Averages that a script throws away under DistributedDataParallel, where every backward averages.

Residues become what they were before such a backward, so it trains nothing.
"""

import logging

import pytest
import torch
from models import same_on_all_ranks
from thrown_away import SHAPES, add, assert_nothing_is_lost, average, mine
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, ScaleComState, scalecom_hook

SETTINGS = {"rate": 10, "beta": 1.0, "dense": (), "min_numel": 60, "outliers": None}


class Given(nn.Module):
    """Its parameters' gradients are what forward is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPES["weight"]))
        self.bias = nn.Parameter(torch.zeros(SHAPES["bias"]))

    def forward(self, grads):
        return (self.weight * grads["weight"]).sum() + (self.bias * grads["bias"]).sum()


def compressed(module, **settings):
    model = DistributedDataParallel(module, **settings)
    state = ScaleComState(model, **SETTINGS)
    model.register_comm_hook(state, scalecom_hook)
    return model, state


def own(model):
    return dict(model.module.named_parameters())


def tensors(served):
    return served.compression.residues.tensors


def sign_of_inputs(model, optimizer, grads, set_to_none):
    """FGSM's first backward is for the inputs' gradients, but goes through the parameters too."""
    inputs = {name: grad.requires_grad_() for name, grad in grads.items()}
    model(inputs).backward()
    assert inputs["weight"].grad is not None


def sharpness_aware(model, optimizer, grads, set_to_none):
    """SAM by hand."""
    model(grads).backward()
    with torch.no_grad():
        moves = [0.01 * p.grad for p in model.parameters()]
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad(set_to_none)
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)


def skipped(model, optimizer, grads, set_to_none):
    """A step that is skipped because the gradient is too long."""
    model(grads).backward()


def asked_for_without_parameters(model, optimizer, grads, set_to_none):
    inputs = {name: grad.requires_grad_() for name, grad in grads.items()}
    torch.autograd.grad(model.module(inputs), list(inputs.values()))


def nothing(model, optimizer, grads, set_to_none):
    pass


BEFORE = {
    sign_of_inputs: 8,
    sharpness_aware: 8,
    skipped: 8,
    asked_for_without_parameters: 0,
    nothing: 0,
}


@pytest.mark.parametrize("as_view", [False, True], ids=["", "as view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("before", BEFORE)
def test_what_comes_before_a_steps_own_backward_trains_nothing(
    before, set_to_none, as_view, caplog
):
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, state = compressed(Given(), gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    real = {}
    for step in range(8):
        optimizer.zero_grad(set_to_none)
        before(model, optimizer, mine(2 * step), set_to_none)
        optimizer.zero_grad(set_to_none)
        model(mine(2 * step + 1)).backward()
        add(real, average(2 * step + 1))
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    assert_nothing_is_lost(own(model), tensors(state), real, caplog)
    assert state.stats()["averages_thrown_away"] == BEFORE[before]


@pytest.mark.parametrize("as_view", [False, True], ids=["", "as view"])
def test_averages_that_several_passes_add_up_are_used(as_view, caplog):
    model, state = compressed(Given(), gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    real = {}
    for step in range(6):
        optimizer.zero_grad()
        for number in (2 * step, 2 * step + 1):
            model(mine(number)).backward()
            add(real, average(number))
        optimizer.step()
    assert_nothing_is_lost(own(model), tensors(state), real, caplog)


def test_an_optimizer_without_hooks_uses_its_averages(caplog):
    """Other libraries' optimizers, and steps by hand, call no hooks of PyTorch's."""
    model, state = compressed(Given())
    real = {}
    for step in range(6):
        model.zero_grad()
        model(mine(step)).backward()
        add(real, average(step))
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad)
    assert_nothing_is_lost(own(model), tensors(state), real, caplog)
    assert not state.stats()["averages_thrown_away"]


class Two(nn.Module):
    """An actor's and a critic's parameters in one model, as in actor-critic training."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = Given(), Given()

    def forward(self, actors, critics):
        return self.actor(actors) + self.critic(critics)


def test_each_players_step_uses_its_own_averages(caplog):
    """The actor's loss gives gradients to the critic too, and the critic's to the actor."""
    model, state = compressed(Two())
    two = model.module.actor, model.module.critic
    optimizers = [torch.optim.SGD(player.parameters(), lr=1.0) for player in two]
    real = [{}, {}]
    for step in range(6):
        for player in (0, 1):
            model.zero_grad()
            model(mine(4 * step + player), mine(4 * step + 2 + player)).backward()
            optimizers[player].step()
            add(real[player], average(4 * step + 2 * player + player))
    # Residues still hold what the last backward gave the player whose step it was not.
    model.zero_grad()
    model(*[{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2).backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, player, expected in zip(("actor", "critic"), two, real, strict=True):
        compressed_ones = {"weight": tensors(state)[f"{name}.weight"]}
        assert_nothing_is_lost(dict(player.named_parameters()), compressed_ones, expected, caplog)


@pytest.mark.on_cpus  # where made-up gradients are
@pytest.mark.parametrize("throws_away", [True, False])
def test_sharded_parameters(throws_away, caplog):
    """Two nodes of one rank: FSDP2 adds to p.grad by itself."""
    model = Given()
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, mesh=mesh["shard"])
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compression=ScaleCom(**SETTINGS),
        mesh=mesh,
    )
    real = {}
    for step in range(6):
        model(mine(2 * step)).backward()
        if throws_away:
            optimizer.zero_grad()
        else:
            add(real, average(2 * step))
        model(mine(2 * step + 1)).backward()
        add(real, average(2 * step + 1))
        optimizer.step()
        optimizer.zero_grad()
    named = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    assert_nothing_is_lost(named, tensors(optimizer), real, caplog)
    assert optimizer.compression.stats()["averages_thrown_away"] == 6 * throws_away


def test_a_generators_loss_leaves_its_discriminator_alone():
    """The usual loop: rows that only the generator's loss gives gradients to never move."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(8, 64), nn.Linear(64, 64, bias=False)
    start = discriminator.weight.detach().clone()
    models = [compressed(each)[0] for each in (generator, discriminator)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(15):
        random = torch.Generator().manual_seed(2 * step + dist.get_rank())
        optimizers[1].zero_grad()
        models[1](torch.randn(16, 64, generator=random))[:, :32].mean().mul(30).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        made = models[0](torch.randn(16, 8, generator=random))
        models[1](made)[:, 32:].mean().mul(30).backward()
        optimizers[0].step()
    moved = (discriminator.weight.detach() - start).norm(dim=1)
    assert moved[:32].min() > 0
    assert not moved[32:].any()
