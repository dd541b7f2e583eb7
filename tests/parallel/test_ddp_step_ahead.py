"""Step-ahead gradients in DDP's hook, which knows the model and finds the optimizer."""

import contextlib
import copy
import gc
import io
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from faces import hvd
from models import same_on_all_ranks
from oracles import step_ahead as oracle
from step_ahead import (
    OPTIMIZERS,
    SETTINGS,
    are_equal,
    assert_close,
    config,
    copies,
    loss,
    make_model,
)
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleCom, ScaleComState, scalecom_hook


def make(optimizer="adamw", wrap=lambda model: model, **settings):
    model = DistributedDataParallel(wrap(make_model()))
    state = ScaleComState(model, **{**SETTINGS, **settings})
    model.register_comm_hook(state, scalecom_hook)
    return model, OPTIMIZERS[optimizer](model.parameters()), state


def take(model, optimizer, step):
    optimizer.zero_grad()
    loss(model, hvd.rank(), step).backward()
    optimizer.step()


def test_a_method_that_is_given_to_the_state_is_ahead_too():
    model, optimizer, _ = make()
    other = DistributedDataParallel(make_model())
    state = ScaleComState(other, ScaleCom(**SETTINGS))
    other.register_comm_hook(state, scalecom_hook)
    others = OPTIMIZERS["adamw"](other.parameters())
    for step in range(4):
        take(model, optimizer, step)
        take(other, others, step)
    assert are_equal(other, {n.removeprefix("module."): p for n, p in copies(model).items()})


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_for_matrices_and_adamw_for_the_rest(caplog):
    """The parameters of each optimizer are ahead along its own direction."""
    model, _, state = make()
    named = {name: p for name, p in model.module.named_parameters() if p.numel() >= 20}
    matrices = [p for p in named.values() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() == 1]
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
    before = common = copies(model.module)
    for step in range(6):
        before, common = common if step > 1 else copies(model.module), copies(model.module)
        muon.zero_grad()
        adamw.zero_grad()
        came = loss(model, hvd.rank(), step)
        for name, p in named.items() if step else ():
            optimizer = muon if p.dim() == 2 else adamw
            residues, group = state.compression.residues, optimizer.param_groups[0]
            waits = residues.tensors[name].residue.view(p.shape).cpu()
            kept = {key: value.cpu() for key, value in optimizer.state[p].items()}
            last = (common[name] - before[name]).cpu() if optimizer is muon else None
            given = residues.alignment.weight, group["lr"], 1.0, group, kept, last
            with torch.device("cpu"):
                moved = oracle.ahead(waits, *given)
            assert moved.any() or (optimizer is muon and step == 1)
            torch.testing.assert_close((p - common[name]).cpu(), moved, rtol=1e-6, atol=1e-9)
        came.backward()
        muon.step()
        adamw.step()
    assert same_on_all_ranks(model.parameters())
    assert "not computed a step ahead" not in caplog.text


@pytest.mark.parametrize("registers", [True, False])
def test_a_hook_that_was_not_registered_is_told(registers, caplog):
    model = DistributedDataParallel(make_model())
    state = ScaleComState(model, **SETTINGS)
    if registers:
        model.register_comm_hook(state, scalecom_hook)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(21):
        take(model, optimizer, step)
    assert ("call model.register_comm_hook(state" in caplog.text) != registers


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_whose_scale_is_not_known_is_refused(enabled, knows):
    """Residues of scaled gradients would move parameters by thousands of steps."""
    scaler = torch.amp.GradScaler(DEVICE, enabled=enabled)
    model, optimizer, _ = make(loss_scale=scaler if knows else None)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # it wraps optimizer.step
    scaler.scale(loss(model, hvd.rank(), 0)).backward()
    if enabled and not knows:
        with pytest.raises(RuntimeError, match="loss_scale=scaler"):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)


@pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")
def test_forked_processes_collect_garbage():
    """DataLoader's workers do. A process group that a child deletes makes it crash."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer, state = make()
        for step in range(2):
            take(model, optimizer, step)
        del model, optimizer, state
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()


def test_a_state_that_was_unpickled_goes_on():
    model, optimizer, state = make()
    for step in range(2):
        take(model, optimizer, step)
    other = DistributedDataParallel(copy.deepcopy(model.module))
    restored = pickle.loads(pickle.dumps(state))
    restored.attach(other)
    other.register_comm_hook(restored, scalecom_hook)
    stepped = OPTIMIZERS["adamw"](other.parameters())
    stepped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 5):
        take(model, optimizer, step)
        take(other, stepped, step)
    assert are_equal(other, copies(model.module))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"lookahead": True, "bits": 3}])
def test_they_are_the_oracles(optimizer, settings):
    model, stepped, state = make(optimizer, **settings)
    assert state.compression.config.step_ahead == 1 == state.compression.config.beta
    for step in range(8):
        take(model, stepped, step)
        assert same_on_all_ranks(model.parameters())
    other = make_model()
    oracle.train(
        other, OPTIMIZERS[optimizer](other.parameters()), config(**settings), hvd.size(), 8, loss
    )
    assert_close(model, other)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("named", [True, False])
def test_gradients_of_a_closure(optimizer, named):
    """Lightning computes all gradients in a closure."""
    model, stepped, _ = make(optimizer)
    steps = iter(range(8))

    def closure():
        stepped.zero_grad()
        value = loss(model, hvd.rank(), next(steps))
        value.backward()
        return value

    for _ in range(8):
        assert (stepped.step(closure=closure) if named else stepped.step(closure)) > 0
        assert same_on_all_ranks(model.parameters())
    other = make_model()
    oracle.train(other, OPTIMIZERS[optimizer](other.parameters()), config(), hvd.size(), 8, loss)
    assert_close(model, other)


def test_a_closure_without_averages():
    """What the closure has moved is moved back before the optimizer writes."""
    model, optimizer, _ = make("sgd")
    for step in range(3):
        take(model, optimizer, step)
    optimizer.zero_grad(set_to_none=True)
    before = copies(model.module)
    with model.no_sync():
        optimizer.step(lambda: loss(model, hvd.rank(), 3))
    assert are_equal(model, before), "no gradient, no step"


def test_the_model_inside_may_be_saved_and_evaluated_at_any_time():
    model, optimizer, _ = make()
    for step in range(3):
        take(model, optimizer, step)
    before = copies(model.module)
    optimizer.zero_grad()
    loss(model, hvd.rank(), 3)
    assert not are_equal(model, before)
    model.module.state_dict()
    assert are_equal(model, before)
    loss(model, hvd.rank(), 3).backward()
    assert are_equal(model, before), "averages have come: gradients are complete"
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_accumulation_without_synchronisation():
    model, optimizer, _ = make("momentum")
    for step in range(5):
        optimizer.zero_grad()
        for part in range(2):
            with contextlib.nullcontext() if part else model.no_sync():
                loss(model, hvd.rank(), 2 * step + part).backward()
        optimizer.step()
        assert same_on_all_ranks(model.parameters())
    other = make_model()

    def both(model, rank, step):
        return loss(model, rank, 2 * step) + loss(model, rank, 2 * step + 1)

    stepped = OPTIMIZERS["momentum"](other.parameters())
    oracle.train(other, stepped, config(), hvd.size(), 5, both)
    assert_close(model, other)


class Checkpointed(torch.nn.Module):
    """Its activations are computed again in backward."""

    def __init__(self, inside, reentrant):
        super().__init__()
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(
            self.inside[:2], x.requires_grad_(), use_reentrant=self.reentrant
        )
        return self.inside[2](hidden)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_activations(reentrant):
    model, optimizer, _ = make("momentum", lambda model: Checkpointed(model, reentrant))
    plain, other, _ = make("momentum")
    for step in range(5):
        take(model, optimizer, step)
        take(plain, other, step)
    assert are_equal(model.module.inside, copies(plain.module))


def test_a_run_that_goes_on_is_one_that_never_stopped():
    model, optimizer, state = make()
    for step in range(4):
        take(model, optimizer, step)
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), state.state_dict()), saved)
    for step in range(4, 7):
        take(model, optimizer, step)
    saved.seek(0)
    again = make()
    for one, own in zip(again, torch.load(saved), strict=True):
        one.load_state_dict(own)
    for step in range(4, 7):
        take(again[0], again[1], step)
    assert are_equal(again[0], copies(model.module))


def test_a_scaler_that_skips_a_step():
    model, optimizer, state = make("momentum", bits=3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    state.compression.loss_scale = scaler
    for step in range(6):
        before = copies(model.module)
        optimizer.zero_grad()
        value = loss(model, hvd.rank(), step)
        if step == 3 and hvd.rank() == 0:
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        assert are_equal(model, before) == (step == 3)
        assert same_on_all_ranks(model.parameters())


def test_a_rank_that_has_joined_computes_no_gradients(caplog):
    model, optimizer, _ = make()
    with model.join():
        for step in range(8 if hvd.rank() else 2):
            take(model, optimizer, step)
    assert "not computed a step ahead" not in caplog.text
    assert same_on_all_ranks(model.parameters())


@pytest.mark.long
def test_a_compiled_model():
    model, optimizer, _ = make("momentum")
    plain, other, _ = make("momentum")
    compiled = torch.compile(model)
    for step in range(4):
        take(compiled, optimizer, step)
        take(plain, other, step)
    assert_close(model, plain)
    assert same_on_all_ranks(model.parameters())
    dist.barrier()
