"""Moves ahead in C equal those of plain PyTorch, up to rounding."""

import pytest
import torch

from scalecom_hvd import native
from scalecom_hvd.exchange import moves_ahead

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW, maximizing": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
    "AMSGrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "Adadelta, maximizing": lambda p: torch.optim.Adadelta(p, 1.0, maximize=True),
}
# Sizes around the number of elements that the kernel's loops process at a time.
SHAPES = [(1,), (15,), (16,), (17, 1), (4095,), (4097,), (300, 70)]


def stepped(make, dtype=torch.float32):
    """Return parameters, their residues, an optimizer, and values from before its last step."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    residues = [torch.randn(p.numel()) for p in parameters]
    optimizer = make(parameters)
    for _ in range(3):
        for p in parameters:
            # Some elements never get a gradient.
            p.grad = torch.randn(p.shape).to(dtype) * (torch.rand(p.shape) < 0.7)
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
    return parameters, residues, optimizer, before


def moved(parameters, residues, optimizer, before, weight):
    group, moves = optimizer.param_groups[0], []
    for p, residue, last in zip(parameters, residues, before, strict=True):
        tensors, state = (p.detach().clone(), last.clone(), residue), optimizer.state[p]
        moves.append(moves_ahead.move_by(optimizer, *tensors, group, state, 1.0))
    moves_ahead.make(moves, weight, 0.7)
    return moves


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which each call of the C kernel adds its number of moves."""
    monkeypatch.delenv("SCALECOM_KERNEL", raising=False)
    library, counts = native.library(), []

    class Counted:
        def scalecom_move_ahead(self, table, count, *numbers):
            counts.append(count)
            return library.scalecom_move_ahead(table, count, *numbers)

    monkeypatch.setattr(native, "library", Counted)
    return counts


@pytest.mark.parametrize("weight", [1.0, 0.4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernel_in_c_moves_as_plain_torch_does(name, weight, calls, monkeypatch):
    trained = stepped(OPTIMIZERS[name])
    ours = moved(*trained, weight)
    assert calls == [len(SHAPES)]
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    plain = moved(*trained, weight)
    assert len(calls) == 1
    for mine, other, parameter in zip(ours, plain, trained[0], strict=True):
        torch.testing.assert_close(mine.own, other.own, rtol=1e-5, atol=1e-6)
        assert torch.equal(mine.spare, parameter)
        assert not torch.equal(mine.own, parameter)


def test_momenta_and_second_moments_of_zero(calls, monkeypatch):
    parameter, residue = torch.ones(40), torch.linspace(-2, 2, 40)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.0}
    state = {"exp_avg": torch.zeros(40), "exp_avg_sq": torch.zeros(40), "step": 3}
    ends = []
    for kernel in ("native", "torch"):
        monkeypatch.setenv("SCALECOM_KERNEL", kernel)
        own = parameter.clone()
        move = moves_ahead.move_of(own, torch.empty(40), residue, group, state, 1.0)
        moves_ahead.make([move], 0.5, 1.0)
        ends.append(own)
    torch.testing.assert_close(*ends)
    most = 0.1 * moves_ahead.ADAM_SHARE * moves_ahead.LARGEST
    assert torch.allclose((1 - ends[0]).abs(), torch.full((40,), most))
    assert calls == [1]


ADAM = {"exp_avg": torch.zeros(40), "exp_avg_sq": torch.full((40,), 1e-8), "step": 1000}
STATES = {
    "Adam": ({"betas": (0.9, 0.95)}, ADAM, 0.05),
    "RMSprop": ({"alpha": 0.99}, {"square_avg": ADAM["exp_avg_sq"]}, 0.01),
    "Adagrad": ({}, {"sum": ADAM["exp_avg_sq"]}, 1.0),
}


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("name", STATES)
def test_a_value_s_own_square_is_in_its_divisor(name, kernel, monkeypatch):
    """The optimizer adds it when the value comes, and the average fades while the value waits."""
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    group, state, part = STATES[name]
    own = torch.zeros(40)
    group = {"lr": 1.0, "eps": 0.0, **group}
    moves_ahead.make(
        [moves_ahead.move_of(own, torch.empty(40), torch.full((40,), 0.01), group, state, 1.0)],
        1.0,
        1.0,
    )
    direction = 0.01 / (1e-8 + part * 0.01**2) ** 0.5
    torch.testing.assert_close(own, torch.full((40,), -moves_ahead.ADAM_SHARE * direction))


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("name", STATES)
def test_sums_over_ranks_move_parameters_as_far_as_averages(name, kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    group, state, _ = STATES[name]
    group, ends = {"lr": 0.1, "eps": 0.0, **group}, []
    for ranks in (1, 4):
        own, seen = torch.zeros(40), {**state}
        for key in moves_ahead.SECOND_MOMENTS:
            if key in state:
                seen[key] = state[key] * ranks**2
        tensors = own, torch.empty(40), torch.linspace(-1e-3, 1e-3, 40)
        moves_ahead.make([moves_ahead.move_of(*tensors, group, seen, 1.0, ranks)], 1.0, 0.7)
        ends.append(own)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides_are_plain_torch_s(dtype, calls):
    trained = stepped(OPTIMIZERS["AdamW"], dtype)
    for move, parameter in zip(moved(*trained, 1.0), trained[0], strict=True):
        assert not torch.equal(move.own, parameter)
        assert torch.equal(move.spare, parameter)
    own = torch.randn(6, 8).t()
    group, state = {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer": torch.ones(8, 6)}
    move = moves_ahead.move_of(own, torch.empty(8, 6), torch.ones(48), group, state, 1.0)
    moves_ahead.make([move], 1.0, 1.0)
    torch.testing.assert_close(own, move.spare - 0.1 * moves_ahead.SGD_SHARE)
    assert not calls


def test_moments_of_another_shape_are_not_for_the_kernel():
    """Some optimizers have one second moment for a whole layer."""
    own, whole = torch.zeros(70_000), torch.ones(70_000)
    adam = torch.optim.Adam([torch.nn.Parameter(own)])
    known = {"exp_avg": whole, "exp_avg_sq": whole, "step": 3}
    assert moves_ahead.is_known(adam, known, own)
    assert not moves_ahead.is_known(torch.optim.RAdam(adam.param_groups), known, own)
    for state in (
        {"exp_avg": whole, "exp_avg_sq": torch.ones(()), "step": 3},
        {"exp_avg": torch.ones(70, 4), "exp_avg_sq": torch.ones(70, 4), "step": 3},
    ):
        assert not moves_ahead.is_known(adam, state, own)
    move = moves_ahead.Move(own, torch.empty_like(own), whole, 0.1, 1, second=torch.ones(()))
    assert not moves_ahead._is_for_c(move)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, like an optimizer's state in few bits."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        inner = [a.inner if isinstance(a, cls) else a for a in arguments]
        made = function(*inner, **(named or {}))
        return cls(made) if function is torch.ops.aten.detach.default else made


def test_a_state_without_memory_of_its_own_is_not_for_the_kernel(calls):
    group, ends = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, []
    for kind in (Wrapped, torch.Tensor.clone):
        state = {"exp_avg": torch.ones(40), "exp_avg_sq": kind(torch.full((40,), 0.04)), "step": 3}
        own = torch.zeros(40)
        move = moves_ahead.move_of(own, torch.empty(40), torch.ones(40), group, state, 1.0)
        moves_ahead.make([move], 1.0, 1.0)
        ends.append(own)
    torch.testing.assert_close(*ends)
    assert calls == [1]  # for the plain tensor


def test_a_signal_in_the_kernel_leaves_parameters_where_they_are(monkeypatch):
    library = native.library()

    class Interrupted:
        def scalecom_move_ahead(self, *arguments):
            library.scalecom_move_ahead(*arguments)
            raise KeyboardInterrupt  # Python raises it after the kernel has returned

    monkeypatch.setattr(native, "library", Interrupted)
    trained = stepped(OPTIMIZERS["AdamW"])
    before = [p.detach().clone() for p in trained[0]]
    moves = []
    original = moves_ahead.move_of
    monkeypatch.setattr(
        moves_ahead, "move_of", lambda *given: moves.append(original(*given)) or moves[-1]
    )
    with pytest.raises(KeyboardInterrupt):
        moved(*trained, 0.5)
    assert all(torch.equal(move.own, p) for move, p in zip(moves, before, strict=True))


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("upwards", [False, True])
def test_a_residue_of_any_length_moves_as_far_as_three_steps(upwards, kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    torch.manual_seed(0)
    now, before, residue = torch.randn(30, 70), torch.randn(30, 70), torch.randn(2100)
    step, towards = now - before, residue.view(30, 70) * (1 if upwards else -1)

    def moved(residue, weight, before=before):
        own = now.clone()
        group = {"maximize": upwards}
        move = moves_ahead.move_by_step(own, before.clone(), residue, group, 1.0)
        moves_ahead.make([move], weight, 0.7)
        assert torch.equal(move.spare, now)
        return own - now

    for factor in (1e-3, 1.0, 1e3):
        ahead = 3 * step.norm() * towards / towards.norm()
        torch.testing.assert_close(moved(residue * factor, 1.0), ahead)
    torch.testing.assert_close(moved(residue, 0.0), 3 * step)
    torch.testing.assert_close(moved(residue, 0.5), ahead / 2 + 1.5 * step)
    assert not moved(residue * 0, 0.5).any()
    assert not moved(residue, 0.5, before=now).any()
