"""A script throws averages away: no step of its optimizer uses them, as with GANs, SAM and FGSM.

With this package's optimizers, and under DistributedDataParallel, where every backward averages,
residues become what they were before. With Horovod's own optimizer, a warning says what is lost.
"""

import logging
import re

import numpy as np
import pytest
import torch
from faces import UNDER_TORCHRUN, horovods_alone, hvd, in_every_library, stock
from made_up import gradients
from models import Given, parameters, same_on_all_ranks, wrap
from momentum import Momentum
from test_torch_changed_gradients import refuses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, ScaleComState, scalecom_hook

SHAPES = {"weight": (60, 100), "bias": (50,)}
SETTINGS = {"rate": 10, "beta": 1.0, "dense": (), "min_numel": 60, "outliers": None}
STEPS = 10
WARNS = re.compile("no optimizer step (has )?used")
under_torchrun = pytest.mark.skipif(not UNDER_TORCHRUN, reason="torchrun has not started the ranks")
HOOKS = [
    pytest.param({"gradient_as_bucket_view": as_view}, id=f"hook{as_view:d}", marks=under_torchrun)
    for as_view in (False, True)
]
with_hooks = pytest.mark.parametrize("face", HOOKS)
on_every_face = pytest.mark.parametrize(
    "face", [hvd, pytest.param(stock, marks=horovods_alone), *HOOKS]
)


def make_model():
    return Given(parameters(SHAPES))


def hooked(module, **of_ddp):
    model = DistributedDataParallel(module, **of_ddp)
    state = ScaleComState(model, **SETTINGS)
    model.register_comm_hook(state, scalecom_hook)
    return model, state.compression


def mine(number):
    """This rank's gradients of one backward pass."""
    own = gradients(SHAPES, hvd.rank(), number)
    return {name: torch.as_tensor(grad) for name, grad in own.items()}


def average(number):
    """The average of these gradients over ranks."""
    everyone = [gradients(SHAPES, rank, number) for rank in range(hvd.size())]
    return {name: sum(each[name] for each in everyone) / hvd.size() for name in SHAPES}


def add(total, grads):
    for name, grad in grads.items():
        total[name] = total.get(name, 0) + grad.astype(np.float64)


class Trained:
    """Parameters of zeros, and plain SGD with learning rate 1.

    face: a library with a DistributedOptimizer, or DDP's settings for a model with the hook.
    real, thrown_away: the sums of gradients of steps, and of what no step used.
    """

    def __init__(self, face, caplog, **more):
        caplog.set_level(logging.WARNING, "scalecom_hvd")
        self.plain, self.real, self.thrown_away, self.caplog = make_model(), {}, {}, caplog
        self.named = dict(self.plain.named_parameters())
        if isinstance(face, dict):
            self.model, self.compressor = hooked(self.plain, **face)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            self.synchronize = lambda: None
        else:
            self.model = self.plain
            self.optimizer, self.compressor = wrap(face, self.named, **SETTINGS, **more)
            self.synchronize = self.optimizer.synchronize

    def backward(self, number):
        self.model(mine(number)).backward()

    def throw_away(self, number):
        self.backward(number)
        self.synchronize()
        add(self.thrown_away, average(number))

    def step(self, number):
        self.backward(number)
        add(self.real, average(number))
        self.optimizer.step()

    def warnings(self):
        """Whether ranks' logs warn of thrown-away averages, one bool for each rank."""
        logged = [r for r in self.caplog.records if r.name == "scalecom_hvd"]
        warned = any(WARNS.search(r.getMessage()) for r in logged if r.levelname == "WARNING")
        return hvd.allgather_object(warned, name="warned")

    def share_missing(self, wanted):
        return share_missing(self.named, self.compressor.residues.tensors, wanted)

    def check(self, thrown_away=0):
        """Check that what steps used, plus what waits, is what came in for steps.

        There is no warning. thrown_away: how many averages were.
        """
        missing = self.share_missing([self.real])
        assert missing < 1e-3, f"a share of {missing:.3g} is missing"
        assert not any(self.warnings())
        assert same_on_all_ranks(self.named.values())
        assert self.compressor.stats().get("averages_thrown_away", 0) == thrown_away

    def check_warned_if_something_is_lost(self):
        """Check that a rank has warned, unless all is there.

        What was thrown away may have come in, except for a tensor that is sent whole.
        """
        compressed = self.compressor.residues.tensors
        both = {n: self.real[n] + self.thrown_away[n] * (n in compressed) for n in SHAPES}
        missing = self.share_missing([self.real, both])
        assert missing < 1e-3 or any(self.warnings()), f"a share of {missing:.3g} is missing"
        assert same_on_all_ranks(self.named.values())


def share_missing(named, compressed, wanted):
    """How much of the wanted sum of gradients neither steps used, nor waits in residues.

    named: {name: parameter}. compressed: {name: tensor with a residue}. wanted: several sums; the
    one that fits a tensor best is its own.
    """
    shares = []
    for name, parameter in named.items():
        tensor = compressed.get(name)
        waits = torch.zeros(parameter.shape) if tensor is None else tensor.residue / tensor.beta
        waits = hvd.allreduce(waits.double().view(parameter.shape), name=f"waits.{name}").numpy()
        here = waits - parameter.detach().double().numpy()
        sums = [each[name] for each in wanted]
        shares.append(min(np.linalg.norm(here - w) / np.linalg.norm(w) for w in sums))
    return max(shares)


# Scripts. Each takes one step, and returns how many averages it throws away.


def sharpness_aware(trained, step, zero):
    """SAM: the first average only says where to take the gradient that the step uses."""
    trained.throw_away(2 * step)
    where = {name: p.detach().clone() for name, p in trained.named.items()}
    with torch.no_grad():
        for parameter in trained.named.values():
            parameter.add_(parameter.grad, alpha=0.01)
    zero()
    trained.backward(2 * step + 1)
    add(trained.real, average(2 * step + 1))
    with torch.no_grad():
        for name, parameter in trained.named.items():
            parameter.copy_(where[name])
    trained.optimizer.step()
    return 1


def sharpness_aware_from_where_it_was(trained, step, zero):
    """The same, but parameters go back before the second backward."""
    trained.throw_away(2 * step)
    moves = {name: 0.01 * p.grad for name, p in trained.named.items()}
    with torch.no_grad():
        for name, parameter in trained.named.items():
            parameter.add_(moves[name])
    zero()
    with torch.no_grad():
        for name, parameter in trained.named.items():
            parameter.sub_(moves[name])
    trained.step(2 * step + 1)
    return 1


def skipped(trained, step, zero):
    """Large models' scripts skip a step if its gradient is too long."""
    if step % 3 == 2:
        trained.throw_away(step)
    else:
        trained.step(step)
    return int(step % 3 == 2)


def sign_of_inputs(trained, step, zero):
    """FGSM's first backward is for the inputs' gradients, but goes through the parameters too."""
    inputs = {name: grad.requires_grad_() for name, grad in mine(2 * step).items()}
    trained.model(inputs).backward()
    trained.synchronize()
    add(trained.thrown_away, average(2 * step))
    assert inputs["weight"].grad is not None
    zero()
    trained.step(2 * step + 1)
    return 1


def asked_for_without_parameters(trained, step, zero):
    inputs = {name: grad.requires_grad_() for name, grad in mine(2 * step).items()}
    torch.autograd.grad(trained.plain(inputs), list(inputs.values()))
    trained.step(step)
    return 0


def several_passes_that_add_up(trained, step, zero):
    """The script averages after every pass, and adds up what comes."""
    trained.backward(2 * step)
    trained.synchronize()
    add(trained.real, average(2 * step))
    trained.step(2 * step + 1)
    return 0


SCRIPTS = [
    sharpness_aware,
    sharpness_aware_from_where_it_was,
    skipped,
    sign_of_inputs,
    asked_for_without_parameters,
    several_passes_that_add_up,
]


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("script", SCRIPTS)
@on_every_face
def test_averages_that_no_step_uses(face, script, set_to_none, caplog):
    trained, thrown_away = Trained(face, caplog), 0

    def zero():
        for parameter in trained.named.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    if script is sharpness_aware and isinstance(face, dict):
        trained.step(99)  # until a step, nobody knows that moved parameters are none
    for step in range(STEPS):
        zero()
        thrown_away += script(trained, step, zero)
    if thrown_away and face is stock:
        trained.check_warned_if_something_is_lost()
    else:
        trained.check(thrown_away)


@on_every_face
def test_an_average_may_be_zero(face, caplog):
    """Other gradients then show that the script keeps what it has averaged."""
    trained = Trained(face, caplog)
    for step in range(STEPS):
        grads = {"bias": mine(step)["bias"], "weight": torch.zeros(SHAPES["weight"])}
        trained.model(grads).backward()  # the zeros come first
        trained.synchronize()
    assert trained.compressor.stats().get("averages_thrown_away", 0) == 0
    assert not any(trained.warnings())


@with_hooks
def test_sharpness_aware_from_the_first_step(face, caplog):
    """Only the first average is lost, because no optimizer has stepped before."""
    trained = Trained(face, caplog)
    for step in range(STEPS):
        sharpness_aware(trained, step, trained.model.zero_grad)
        assert all(trained.warnings())
        assert trained.compressor.stats()["averages_thrown_away"] == step
    assert ["from now on all goes back" in r.getMessage() for r in caplog.records] == [True]


def test_a_script_that_shows_late_what_it_does_is_warned(caplog):
    """Then there is no copy of the residues yet. From then on, there is one."""
    trained = Trained(hvd, caplog)
    for step in range(20):
        trained.optimizer.zero_grad()
        trained.throw_away(step)
        if step not in (15, 17):
            with trained.optimizer.skip_synchronize():
                trained.optimizer.step()
    assert all(trained.warnings())
    assert len([r for r in caplog.records if "no optimizer step used" in r.getMessage()]) == 1
    assert trained.compressor.stats()["averages_thrown_away"] == 1


def test_a_methods_own_state_is_given_back():
    def train(throws):
        method = Momentum(**SETTINGS)
        model = parameters(SHAPES)
        sgd = torch.optim.SGD(model.values(), 0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.items(), compression=method)
        for number in (0, 1, 7, 2, 3) if throws else range(4):
            optimizer.zero_grad()
            sum((model[name] * grad).sum() for name, grad in mine(number).items()).backward()
            optimizer.synchronize() if number == 7 else optimizer.step()
        state = method.state_dict()
        return state["residues"], state["method_state"]["tensors"]["velocity"]

    torch.testing.assert_close(train(throws=True), train(throws=False), rtol=0, atol=0)


@in_every_library
def test_averages_that_are_replaced_by_those_of_the_step_itself(library, caplog):
    """Gradients set by hand are averaged in step(). Nobody knows whether they hold the old ones."""
    trained = Trained(library, caplog)
    for step in range(6):
        trained.optimizer.zero_grad()
        trained.throw_away(2 * step)
        for name, parameter in trained.named.items():
            parameter.grad = mine(2 * step + 1)[name]
        add(trained.real, average(2 * step + 1))
        trained.optimizer.step()
    trained.check_warned_if_something_is_lost()


@in_every_library
def test_after_a_step_that_was_refused(library, caplog):
    """The error has ended that step, so later averages are not those of its closure."""
    trained = Trained(library, caplog)
    for step in range(2):
        trained.optimizer.zero_grad()
        trained.backward(step)
        if step == 1:
            trained.named["weight"].grad.mul_(0.5)
            assert refuses(trained.optimizer.step)
        else:
            trained.optimizer.step()
    # This gives a step up in Horovod's own optimizer.
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    for step in range(2, 5):  # the first of these is sent whole there
        trained.optimizer.zero_grad()
        trained.throw_away(step)
    if library is hvd:
        assert trained.compressor.stats()["averages_thrown_away"] == 2
    else:
        assert any(trained.warnings())


@with_hooks
def test_an_optimizer_without_hooks_uses_its_averages(face, caplog):
    """Other libraries' optimizers, and steps by hand, call no hooks of PyTorch's."""
    trained = Trained(face, caplog)
    for step in range(6):
        trained.model.zero_grad()
        trained.backward(step)
        add(trained.real, average(step))
        for parameter in trained.model.parameters():
            parameter.data.sub_(parameter.grad)
    trained.check()


class Two(nn.Module):
    """An actor's and a critic's parameters in one model, as in actor-critic training."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = make_model(), make_model()

    def forward(self, actors, critics):
        return self.actor(actors) + self.critic(critics)


@under_torchrun
def test_each_players_step_uses_its_own_averages():
    """The actor's loss gives gradients to the critic too, and the critic's to the actor."""
    model, compressor = hooked(Two())
    two = {"actor": model.module.actor, "critic": model.module.critic}
    optimizers = [torch.optim.SGD(player.parameters(), lr=1.0) for player in two.values()]
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
    for (name, player), expected in zip(two.items(), real, strict=True):
        compressed = {"weight": compressor.residues.tensors[f"{name}.weight"]}
        named = dict(player.named_parameters())
        assert share_missing(named, compressed, [expected]) < 1e-3


@under_torchrun
@pytest.mark.on_cpus  # where made-up gradients are
@pytest.mark.parametrize("throws_away", [True, False])
def test_sharded_parameters(throws_away):
    """Two nodes of one rank: FSDP2 adds to p.grad by itself."""
    model = make_model()
    mesh = init_device_mesh("cpu", (hvd.size(), 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    method = ScaleCom(**SETTINGS)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression=method, mesh=mesh)
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
    assert share_missing(named, method.residues.tensors, [real]) < 1e-3
    assert method.stats()["averages_thrown_away"] == 6 * throws_away
