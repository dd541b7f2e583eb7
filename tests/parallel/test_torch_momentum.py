"""Quasi-hyperbolic momentum in optimizers that average gradients: both faces', and Horovod's own.

The oracle steps by the averages that the optimizer has left in p.grad.
"""

import copy
import gc

import models
import pytest
import torch
from faces import hvd, in_every_library, stock
from oracles import momentum as oracle

NU = 0.6


def make(library=hvd, optimizer="momentum", **settings):
    model = models.make_model()
    named = {"named_parameters": model.named_parameters()} if library is stock else {}
    method = hvd.ScaleCom(**named, **{**models.SETTINGS, "nu": NU, **settings})
    stepped = models.OPTIMIZERS[optimizer](model.parameters())
    named = model.named_parameters()
    return model, library.DistributedOptimizer(stepped, named, compression=method), method


class Oracle:
    """A copy of a model on the host, which the oracle steps by the averages that the model has."""

    def __init__(self, model, optimizer="momentum", nu=NU):
        self.of, self.model = model, copy.deepcopy(model).cpu()
        least = models.SETTINGS["min_numel"]
        kappas = {p: 1 - nu for p in self.model.parameters() if p.numel() >= least}
        self.steps = oracle.Steps(models.OPTIMIZERS[optimizer](self.model.parameters()), kappas)

    def check(self):
        for p, q in zip(self.model.parameters(), self.of.parameters(), strict=True):
            p.grad = q.grad.cpu().clone()
        self.steps.step()
        models.assert_close(copy.deepcopy(self.of).cpu(), self.model)
        assert models.same_on_all_ranks(self.of.parameters())


def clipped(model, optimizer, step):
    optimizer.zero_grad()
    models.loss(model, hvd.rank(), step).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        optimizer.step()


def by_a_closure(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        value = models.loss(model, hvd.rank(), step)
        value.backward()
        optimizer.synchronize()
        return value

    with optimizer.skip_synchronize():
        assert optimizer.step(closure) > 0


def without_a_gradient_on_one_rank(model, optimizer, step):
    optimizer.zero_grad()
    if hvd.rank() != step % hvd.size():
        models.loss(model, hvd.rank(), step).backward()
    optimizer.step()


ORDERS = models.take, clipped, by_a_closure, without_a_gradient_on_one_rank


@in_every_library
@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_steps_are_the_oracles(library, optimizer, order):
    model, wrapped, method = make(library, optimizer, bits=3 if library is hvd else 32)
    expected = Oracle(model, optimizer)
    for step in range(6):
        order(model, wrapped, step)
        expected.check()
    assert method.config.beta == 1
    assert any(tensor.residue.any() for tensor in method.residues.tensors.values())


@in_every_library
@pytest.mark.parametrize("nu", [None, 1])
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_with_everything_sent_it_is_stock_to_the_bit(library, optimizer, nu):
    model, wrapped, _ = make(library, optimizer, rate=1, nu=nu)
    other = models.make_model()
    plain = stock.DistributedOptimizer(
        models.OPTIMIZERS[optimizer](other.parameters()),
        other.named_parameters(),
        compression=stock.Compression.none,
    )
    for step in range(5):
        for order in (models.take, clipped):
            order(model, wrapped, step)
            order(other, plain, step)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@in_every_library
def test_a_step_that_fails_leaves_no_trace(library):
    """The optimizer's own state has no trace. Only the exchange has counted."""
    model, wrapped, _ = make(library)
    expected = Oracle(model)
    for step in range(6):
        if step == 3:
            wrapped.zero_grad()
            models.loss(model, hvd.rank(), step).backward()
            wrapped.synchronize()
            with pytest.raises(ZeroDivisionError), wrapped.skip_synchronize():
                wrapped.step(lambda: 1 / 0)
            expected.steps.count += 1
        models.take(model, wrapped, step)
        expected.check()


def test_local_steps_leave_the_optimizer_as_it_is():
    def settled(**settings):
        model, method = models.make_model(), hvd.ScaleCom(**models.SETTINGS, **settings)
        optimizer = models.OPTIMIZERS["sgd"](model.parameters())
        named = model.named_parameters()
        hvd.DistributedOptimizer(optimizer, named, compression=method, local_steps=2)
        return method.config.nu, method.config.beta

    assert settled(nu=None) == settled(nu=1) == (1, 0.2)
    with pytest.raises(ValueError, match="nu has no meaning with local steps"):
        settled(nu=0.5)


@pytest.mark.parametrize("nu", [None, 1, 0.5])
def test_a_state_is_loaded_before_there_is_an_optimizer(nu):
    """Then nobody knows yet what nu and beta are."""
    model, wrapped, method = make(nu=nu)
    for step in range(3):
        models.take(model, wrapped, step)
    saved = method.state_dict()
    assert (saved["config"]["nu"], saved["config"]["beta"]) == (nu, 0.2 if nu == 1 else 1)
    if nu is None:  # a state of a version that computed gradients a step ahead
        del saved["config"]["nu"]
        saved["config"] |= {"step_ahead": 1.0, "wire_dtype": "float16", "max_norm": None}
        saved |= {"alignment": 0.5, "node_residues": {}}
    del wrapped
    gc.collect()  # Horovod's hooks go with it
    method = hvd.ScaleCom(**models.SETTINGS, nu=nu)
    method.load_state_dict(saved)
    optimizer = models.OPTIMIZERS["momentum"](model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=method)
    for step in range(3, 5):
        models.take(model, optimizer, step)
    assert method.stats()["step"] == 5
    assert models.same_on_all_ranks(model.parameters())
