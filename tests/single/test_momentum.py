"""Quasi-hyperbolic momentum, in one process: what it does to each optimizer, and what it leaves.

Gradients are given. The oracle is NumPy, or plain copies of the optimizer.
"""

import copy
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from oracles import momentum as oracle
from torch import nn

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.exchange import Simulation, momentum
from scalecom_hvd.exchange.momentum import QuasiHyperbolic
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.quasi_hyperbolic import kappa_of

NU = 0.6
KAPPA = 1 - NU
SGD, Adam, AdamW = (getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW"))
momentum_sgd = functools.partial(SGD, lr=0.1, momentum=0.9)
PLAIN = {
    "SGD": functools.partial(SGD, lr=0.1),
    "momentum": momentum_sgd,
    "dampening, decay": functools.partial(momentum_sgd, dampening=0.3, weight_decay=0.05),
    "Nesterov, decay": functools.partial(momentum_sgd, nesterov=True, weight_decay=0.05),
    "maximize": functools.partial(momentum_sgd, maximize=True, weight_decay=0.05),
    "SGD, foreach": functools.partial(momentum_sgd, foreach=True),
    "Nesterov, foreach": functools.partial(momentum_sgd, nesterov=True, foreach=True),
    "SGD, fused": functools.partial(momentum_sgd, fused=True),
    "Adam": functools.partial(Adam, lr=0.01),
    "Adam, decay": functools.partial(Adam, lr=0.01, weight_decay=0.1, foreach=True),
    "AMSGrad": functools.partial(Adam, lr=0.01, amsgrad=True),
    "AdamW": functools.partial(AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, maximize": functools.partial(AdamW, lr=0.01, weight_decay=0.1, maximize=True),
    "Adam, fused": functools.partial(Adam, lr=0.01, fused=True),
}
SHAPES = {"weight": (6, 5), "bias": (4,)}
every_plain = pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)


def parameters(seed=1, dtype=torch.float64):
    torch.manual_seed(seed)
    drawn = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


class Served:
    """The optimizer of parameters whose gradients have been exchanged between `ranks` ranks."""

    def __init__(self, make, named=None, nu=NU, ranks=2, by_hook=False, **settings):
        self.named = parameters() if named is None else named
        config = ScaleComConfig(**{"rate": 5, "min_numel": 0, "nu": nu, **settings})
        self.residues = Residues(config.resolved(mixes_momentum=True))
        self.residues.attach(self.named)
        collectives = SimpleNamespace(size=ranks)
        self.momentum = QuasiHyperbolic(self.named, self.residues, collectives, by_hook)
        self.optimizer = make(self.named.values())

    def step(self, number):
        feed(self.named, number)
        self.residues.note_step()
        self.optimizer.step()

    def train(self, numbers):
        for number in numbers:
            self.step(number)
        return self


def feed(named, number):
    torch.manual_seed(100 + number)
    for p in named.values():
        p.grad = torch.randn(p.shape, dtype=torch.float64).to(p.dtype)


def plain(make, steps=6):
    named = parameters()
    optimizer = make(named.values())
    for number in range(steps):
        feed(named, number)
        optimizer.step()
    return named


def assert_close(named, others, tolerance=1e-11):
    for name, p in named.items():
        torch.testing.assert_close(
            p.detach().double(), others[name].detach().double(), rtol=tolerance, atol=tolerance
        )


def are_equal(named, others):
    return all(torch.equal(p, others[name]) for name, p in named.items())


def by_oracle(make, steps=6, without=()):
    """without: the numbers of the steps in which the bias has no gradient."""
    named = parameters()
    expected = oracle.Steps(make(named.values()), dict.fromkeys(named.values(), KAPPA))
    for number in range(steps):
        feed(named, number)
        if number in without:
            named["bias"].grad = None
        expected.step()
    return named, expected


@pytest.mark.parametrize("large", [momentum.LARGE, 1])
@every_plain
def test_steps_are_the_oracles_and_the_state_is_the_plain_momentum(make, large, monkeypatch):
    monkeypatch.setattr(momentum, "LARGE", large)
    served = Served(make).train(range(6))
    named, expected = by_oracle(make)
    assert_close(served.named, named)
    assert are_equal(served.named, plain(make)) == (make is PLAIN["SGD"])
    for name, p in served.named.items():
        kept, state = expected.kept[named[name]], served.optimizer.state[p]
        for key, own in (("momentum_buffer", "b"), ("exp_avg", "m")):
            if state.get(key) is not None:
                torch.testing.assert_close(state[key].numpy(), kept[own], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [PLAIN["momentum"], PLAIN["AdamW"]])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str
)
def test_other_dtypes(make, dtype, tolerance):
    served = Served(make, parameters(dtype=dtype)).train(range(4))
    assert_close(served.named, by_oracle(make, 4)[0], tolerance)


@every_plain
@pytest.mark.parametrize(
    "settings",
    [{"nu": 1}, {"ranks": 1}, {"rate": 1}, {"min_numel": 100}, {"warmup_steps": 6}],
    ids=str,
)
def test_what_is_not_late_is_the_optimizers_own_to_the_bit(make, settings):
    served = Served(make, **settings).train(range(6))
    assert are_equal(served.named, plain(make))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has no Muon")
def test_muon_keeps_its_momentum_unless_nu_is_given(caplog):
    make = functools.partial(torch.optim.Muon, lr=0.01)
    for nu in (None, NU):
        served = Served(make, {"weight": parameters()["weight"]}, nu=nu).train(range(6))
        other = {"weight": parameters()["weight"]}
        optimizer = make(other.values())
        for number in range(6):
            feed(other, number)
            optimizer.step()
        assert are_equal(served.named, other) == (nu is None)
    assert not caplog.records


class Lion(torch.optim.Optimizer):
    """Its steps are signs of a mix of its own."""

    def __init__(self, parameters, lr=0.01, dtype=None):
        super().__init__(parameters, {"lr": lr, "dtype": dtype, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p, dtype=group["dtype"]))
                p.sub_((0.9 * average + 0.1 * p.grad).sign(), alpha=group["lr"])
                average.copy_(0.99 * average + 0.01 * p.grad)


class Named(torch.optim.Adam):
    """A class of the script's own."""


RELATIVES = {
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "a subclass": functools.partial(Named, lr=0.01),
}
NOT_LINEAR = {"Lion": Lion}
if hasattr(torch.optim, "Muon"):
    NOT_LINEAR["Muon"] = functools.partial(torch.optim.Muon, lr=0.01, momentum=0.9)


def plain_step(optimizer, p, key=None, buffer=None):
    """The parameter and the state after a step of a plain copy, with this momentum."""
    (copied,), other = copy.deepcopy(([p], optimizer))
    copied.grad = p.grad
    if buffer is not None:
        other.state[copied][key].copy_(buffer)
    other.step()
    return copied.detach(), other.state[copied]


@pytest.mark.parametrize("make", [*RELATIVES.values(), *NOT_LINEAR.values()], ids=str)
def test_other_optimizers_step_along_the_mix(make):
    """If steps are linear in the momentum, the mix's is between the momentum's and gradient's."""
    served = Served(make, {"weight": parameters()["weight"]})
    (p,) = served.named.values()
    served.step(0)
    key = "momentum_buffer" if "momentum_buffer" in served.optimizer.state[p] else "exp_avg"
    for number in range(1, 8):
        feed(served.named, number)
        size = 1 - (0.99 if make is Lion else 0.9) ** number
        state = served.optimizer.state[p]
        along, after = plain_step(served.optimizer, p)
        gradient, _ = plain_step(served.optimizer, p, key, size * p.grad)
        expected = NU * along + KAPPA * gradient
        if make in NOT_LINEAR.values():
            mix = NU * state[key] + KAPPA * size * p.grad
            expected, _ = plain_step(served.optimizer, p, key, mix)
        served.step(number)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state[key], after[key], rtol=1e-9, atol=1e-11)


def test_the_size_may_be_on_a_device(monkeypatch):
    """There the host must not wait for Adam's step count."""

    def on_device(group, state, steps):
        return torch.tensor(momentum._of_adam(group, state, steps), dtype=torch.float64)

    own = momentum.Momentum("exp_avg", on_device)
    monkeypatch.setitem(momentum.MOMENTA, "AdamW", own)
    served = Served(PLAIN["AdamW"]).train(range(4))
    assert_close(served.named, by_oracle(PLAIN["AdamW"], 4)[0])


def test_kappa_falls_with_the_rate_unless_the_user_says_nu():
    rates = [kappa_of(rate, None) for rate in (2, 4, 8, 100)]
    assert 0 < rates[0] < rates[1] < rates[2] == rates[3] < 1
    assert kappa_of(2, 0.75) == kappa_of(100, 0.75) == 0.25


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [PLAIN["momentum"], PLAIN["AdamW"]])
def test_gradients_may_come_in_a_closure(make, by_name):
    served, numbers = Served(make), []

    def closure():
        feed(served.named, len(numbers))
        served.residues.note_step()
        numbers.append(7)
        return 5.0

    for _ in range(4):
        step = served.optimizer.step
        assert (step(closure=closure) if by_name else step(closure)) == 5
    assert len(numbers) == 4
    assert_close(served.named, by_oracle(make, 4)[0])


def test_a_closure_may_only_have_a_name():
    class Own(SGD):
        def step(self, scale=1, *, closure=None):
            assert scale == 2
            return super().step(closure)

    assert Own([nn.Parameter(torch.ones(3))], lr=0.1).step(2, closure=lambda: 5.0) == 5


def test_a_closure_that_fails_changes_nothing():
    served = Served(PLAIN["momentum"])
    served.step(0)
    with pytest.raises(ZeroDivisionError):
        served.optimizer.step(lambda: 1 / 0)
    served.train(range(1, 4))
    assert_close(served.named, by_oracle(PLAIN["momentum"], 4)[0])


class Fails(SGD):
    """Its step may fail before, or after, it has changed anything."""

    when = None

    def step(self, closure=None):
        if self.when == "before":
            raise ZeroDivisionError
        result = super().step(closure)
        if self.when == "after":
            raise ZeroDivisionError
        return result


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_leaves_no_mix(when):
    make = functools.partial(Fails, lr=0.1, momentum=0.9)
    served = Served(make).train(range(3))
    served.optimizer.when = when
    with pytest.raises(ZeroDivisionError):
        served.step(3)
    served.optimizer.when = None
    served.train(range(4, 7))
    named = parameters()
    expected = oracle.Steps(momentum_sgd(named.values()), dict.fromkeys(named.values(), KAPPA))
    for number in range(7):
        feed(named, number)
        if number == 3 and when == "before":
            expected.count += 1  # gradients were averaged
        else:
            expected.step()
    assert_close(served.named, named)


def test_a_mix_stays_if_its_gradient_is_gone():
    """The script zeroed gradients in place after a step that failed."""
    served = Served(functools.partial(Fails, lr=0.1, momentum=0.9)).train(range(3))
    served.optimizer.when = "before"
    with pytest.raises(ZeroDivisionError):
        served.step(3)
    states = [served.optimizer.state[p] for p in served.named.values()]
    mixed = [state["momentum_buffer"].clone() for state in states]
    served.optimizer.when = None
    served.optimizer.zero_grad(set_to_none=False)
    served.residues.note_step()
    served.optimizer.step()
    for state, own in zip(states, mixed, strict=True):
        torch.testing.assert_close(state["momentum_buffer"], 0.9 * own)


@pytest.mark.parametrize("to_none", [True, False])
def test_hooks_of_the_scripts_own_may_change_gradients(to_none):
    """It clips gradients before each step, and zeros them after it."""

    def clip(named):
        nn.utils.clip_grad_norm_(named.values(), 0.5)

    served, named = Served(momentum_sgd), parameters()
    served.optimizer.register_step_pre_hook(lambda *_: clip(served.named))
    served.optimizer.register_step_post_hook(lambda own, *_: own.zero_grad(to_none))
    expected = oracle.Steps(momentum_sgd(named.values()), dict.fromkeys(named.values(), KAPPA))
    for number in range(6):
        served.step(number)
        feed(named, number)
        clip(named)
        expected.step()
    assert_close(served.named, named)


@pytest.mark.parametrize("fused", [True, False])
def test_a_grad_scaler(fused):
    """A fused Adam unscales gradients itself, and leaves out a step with an overflow itself."""
    make = functools.partial(Adam, lr=0.01, fused=fused)
    served = Served(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    number = 0
    for overflows in (False, False, True, False, True, False):
        feed(served.named, number)
        scaler.scale(torch.zeros(1))
        for p in served.named.values():
            p.grad *= scaler.get_scale()
        if overflows:
            served.named["bias"].grad[1] = float("inf")
        else:
            served.residues.note_step()
            number += 1
        state = served.optimizer.state_dict()["state"]
        before = copy.deepcopy((list(served.named.values()), state))
        scaler.step(served.optimizer)
        scaler.update()
        if overflows:
            found = served.optimizer.state_dict()["state"]
            assert are_equal(dict(enumerate(before[0])), dict(enumerate(served.named.values())))
            assert all(are_equal(before[1][i], found[i]) for i in found)
    assert_close(served.named, by_oracle(make, number)[0])


@pytest.mark.parametrize("make", [PLAIN["momentum"], PLAIN["AdamW"]])
def test_parameters_without_a_gradient_stay(make):
    served = Served(make)
    for number in range(4):
        feed(served.named, number)
        served.residues.note_step()
        if number == 2:
            served.named["bias"].grad = None
            before = served.named["bias"].detach().clone()
        served.optimizer.step()
        assert number != 2 or torch.equal(served.named["bias"], before)
    assert_close(served.named, by_oracle(make, 4, without=[2])[0])


def test_sparse_gradients_are_not_mixed():
    ends = []
    for nu in (NU, 1):
        torch.manual_seed(1)
        layer = nn.Embedding(9, 4, sparse=True)
        served = Served(momentum_sgd, {"weight": layer.weight}, nu)
        for number in range(4):
            served.optimizer.zero_grad()
            layer(torch.tensor([number, 3])).square().sum().backward()
            served.residues.note_step()
            served.optimizer.step()
        ends.append(layer.weight.detach())
    assert torch.equal(*ends)


def test_two_optimizers_of_one_model():
    served = Served(lambda _: None)
    named = parameters()
    ours, others = (
        (momentum_sgd([of["weight"]]), AdamW([of["bias"]], lr=0.01)) for of in (served.named, named)
    )
    expected = [oracle.Steps(each, dict.fromkeys(named.values(), KAPPA)) for each in others]
    for number in range(5):
        feed(served.named, number)
        feed(named, number)
        served.residues.note_step()
        for each in (*ours, *expected):
            each.step()
    assert_close(served.named, named)


@pytest.mark.parametrize(
    ("make", "is_said"),
    [
        (functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9), True),
        (functools.partial(torch.optim.RMSprop, lr=0.01), False),
        (functools.partial(Lion, dtype=torch.int8), False),
    ],
)
def test_optimizers_that_are_left_as_they_are(make, is_said, caplog):
    """Nobody knows how they use their momentum, or it has few bits."""
    served = Served(make).train(range(5))
    assert are_equal(served.named, plain(make, 5))
    assert caplog.text.count("RMSprop keeps its momentum as it is") == is_said
    Served(make, nu=1).step(0)
    assert len(caplog.records) == is_said


class Lamb(Adam):
    def __init__(self, params):
        super().__init__(params, lr=0.01)
        self.defaults["max_grad_norm"] = 1.0


def test_an_optimizer_that_clips_gradients_itself_keeps_its_momentum(caplog):
    served = Served(Lamb).train(range(5))
    assert are_equal(served.named, plain(PLAIN["Adam"], 5))
    assert caplog.text.count("Lamb keeps its momentum as it is") == 1


class Outer(torch.optim.Optimizer):
    """Steps another optimizer inside its step, as ZeroRedundancyOptimizer and SAM do."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = PLAIN["AdamW"](self.param_groups[0]["params"])
        self.state = self.inner.state

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_inside_another(caplog):
    assert_close(Served(Outer).train(range(5)).named, by_oracle(PLAIN["AdamW"], 5)[0])
    assert not caplog.records


def test_steps_without_new_averages_are_the_optimizers_own():
    """Nothing was compressed since: another optimizer goes on, and the method is kept."""
    served = Served(PLAIN["AdamW"]).train(range(3))
    named = {name: nn.Parameter(p.detach().clone()) for name, p in served.named.items()}
    ours, others = (PLAIN["AdamW"](of.values()) for of in (served.named, named))
    for number in range(4):
        feed(served.named, number)
        feed(named, number)
        ours.step()
        others.step()
    assert are_equal(served.named, named)


def test_of_several_the_last_one_made_has_a_parameter():
    first = Served(PLAIN["momentum"], nu=0.2)
    second = Served(lambda _: first.optimizer, first.named)
    for number in range(5):
        first.residues.note_step()
        second.step(number)
    assert_close(first.named, by_oracle(PLAIN["momentum"], 5)[0])


def test_what_is_gone_does_nothing():
    served = Served(PLAIN["AdamW"])
    del served.momentum
    gc.collect()
    served.train(range(6))
    assert are_equal(served.named, plain(PLAIN["AdamW"]))


@pytest.mark.parametrize(("by_hook", "skipped"), [(True, 0), (False, 0), (True, 1)])
def test_a_hook_that_is_never_called_is_said_once(by_hook, skipped, caplog):
    """If all steps so far were skipped, it was called."""
    served, is_said = Served(PLAIN["momentum"], by_hook=by_hook), by_hook and not skipped
    served.residues.skipped_steps = skipped
    for number in range(50):
        feed(served.named, number)
        served.optimizer.step()
        assert (number < 19 or not is_said) != ("taken 20 steps" in caplog.text)
    assert len(caplog.records) == is_said


def test_the_simulators_averages_are_stepped_by_the_quasi_hyperbolic_optimizer():
    """Only `stepped` is mixed. The defaults know what nu and beta are."""
    ends = []
    for way in ("oracle", "own", "not mixed"):
        named = parameters()
        optimizer = momentum_sgd(named.values())
        kappa = kappa_of(5, None)
        expected = oracle.Steps(optimizer, dict.fromkeys(named.values(), kappa))
        simulation = Simulation(
            2,
            lambda rank: parameters(),
            stepped=named if way != "not mixed" else None,
            rate=5,
            bits=32,
            min_numel=0,
            nu=None,
        )
        config = simulation.compressors[0].config
        assert (config.nu, config.beta) == ((1, 0.2) if way == "not mixed" else (None, 1))
        for number in range(6):
            torch.manual_seed(number)
            grads = [{n: torch.randn_like(p) for n, p in named.items()} for _ in range(2)]
            for name, average in simulation.step(grads)[0].items():
                named[name].grad = average
            (expected if way == "oracle" else optimizer).step()
        ends.append(named)
    assert_close(ends[0], ends[1])
    assert not are_equal(ends[1], ends[2])
