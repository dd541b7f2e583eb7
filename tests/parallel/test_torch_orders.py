"""Orders of calls that scripts make and that once failed.

test_torch_differential.py draws all other orders.
"""

import gc
import time
import weakref

import models
import pytest
import torch
from devices import DEVICE
from faces import UNDER_TORCHRUN, horovods_alone, hvd, in_every_library, stock
from made_up import EVERYTHING, SOME, came_in, gradients

if not UNDER_TORCHRUN:
    from test_torch_nodes import remove_process_sets

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (2000,)}
STEPS = 7
SETTINGS = {"min_numel": 2, "warmup_steps": 0, "dense": ()}


def make(library, sent, model, **settings):
    """An optimizer and its ScaleCom. If sent is None, it is stock Horovod's, without ScaleCom."""
    if sent is not None:
        return models.wrap(library, model, **(SETTINGS | sent | settings))
    sgd = torch.optim.SGD(model.values(), lr=settings.get("lr", 1.0))
    return stock.DistributedOptimizer(sgd, model.items()), None


def compare(library, order, counted, loses_nothing=True, **settings):
    """Train with stock Horovod, with everything chosen, and at rate 10.

    With everything chosen the result must be stock Horovod's. At rate 10 nothing may be lost.
    counted: how many steps count.
    """
    trained = []
    for where, sent in ((stock, None), (library, EVERYTHING), (library, SOME)):
        model = models.parameters(SHAPES)
        optimizer, compressor = make(where, sent, model, **(settings if sent else {}))
        for step in range(STEPS):
            order(optimizer, model, step)
        trained.append(model)
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)
    assert models.same_on_all_ranks(trained[2].values())
    assert compressor.stats()["step"] == counted
    if loses_nothing:
        came = came_in(range(hvd.size()), range(STEPS), SHAPES)
        models.assert_nothing_is_lost(trained[2], compressor, came, hvd.size())


def backward(model, step, skip=(), scale=1.0):
    grads = gradients(SHAPES, hvd.rank(), step)
    models.feed(model, {name: grad * scale for name, grad in grads.items()}, skip=skip)


def skipping(optimizer, closure=None):
    with optimizer.skip_synchronize():
        return optimizer.step(closure)


def averages(optimizer, model, step):
    optimizer.zero_grad()
    backward(model, step)
    optimizer.synchronize()


def by_a_closure(optimizer, model, step):
    def evaluate():
        with torch.enable_grad():
            averages(optimizer, model, step)
        return torch.tensor(float(step))

    found = skipping(optimizer, evaluate) if step % 2 else optimizer.step(evaluate)
    assert float(found) == step


def synchronized_too_often(optimizer, model, step):
    """Before there is anything new, and once more when all is averaged."""
    optimizer.synchronize()
    optimizer.synchronize()
    averages(optimizer, model, step)
    optimizer.synchronize()
    skipping(optimizer)


def zeroed_in_place(optimizer, model, step):
    backward(model, step)
    assert optimizer.step(lambda: torch.tensor(5.0)) == 5.0
    for parameter in model.values():
        parameter.grad.zero_()


def in_more_passes(optimizer, model, step):
    passes = 1 + step % 2
    optimizer.load_state_dict(optimizer.state_dict())
    getattr(optimizer, "set_backward_passes_per_step", int)(passes)  # ddp_stock.py has none
    optimizer.zero_grad()
    for _ in range(passes):
        backward(model, step, scale=1 / passes)
    optimizer.step()


def set_by_hand(optimizer, model, step):
    for name, grad in gradients(SHAPES, hvd.rank(), step).items():
        model[name].grad = torch.as_tensor(grad)
    optimizer.step()


def set_by_hand_on_one_rank(optimizer, model, step):
    optimizer.zero_grad()
    if step % hvd.size() == hvd.rank():
        set_by_hand(optimizer, model, step)
    else:
        optimizer.step()


def given_up(optimizer, model, step):
    """A state is loaded between backward() and step().

    Horovod drops what is under way, and the exchange must too. Otherwise its values would be sent,
    and reach no rank. (In Horovod's own optimizer, only compress() learns of it.)
    """
    optimizer.zero_grad()
    if step % 3 == 1:  # this step is given up
        backward(model, 100 + step)
        # Stock Horovod refuses names that are still under way.
        while not all(
            callable(handle) or stock.poll(handle)
            for handle, _ in getattr(optimizer, "_handles", {}).values()
        ):
            time.sleep(0.001)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def clipped(optimizer, model, step):
    averages(optimizer, model, step)
    torch.nn.utils.clip_grad_norm_(model.values(), 0.01)
    skipping(optimizer)


def clipped_without_skip_synchronize(optimizer, model, step):
    before = torch.cat([p.detach().clone().view(-1) for p in model.values()])
    averages(optimizer, model, step)
    torch.nn.utils.clip_grad_norm_(model.values(), 0.01)
    optimizer.step()
    after = torch.cat([p.detach().view(-1) for p in model.values()])
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-2)


def noisy(optimizer, model, step):
    """Every rank adds noise of its own after synchronize(), without skip_synchronize().

    All is averaged once more, so ranks stay alike. No step is counted for that average.
    """
    averages(optimizer, model, step)
    noise = torch.Generator().manual_seed(100 * step + hvd.rank())
    for parameter in model.values():
        parameter.grad.add_(torch.randn(parameter.shape, generator=noise))
    optimizer.step()


def one_rank_has_nothing_new(optimizer, model, step):
    optimizer.zero_grad()
    backward(model, step, skip=list(SHAPES) if step % hvd.size() == hvd.rank() else [])
    if step % 4 < 2:
        optimizer.synchronize()
    optimizer.step()


def frozen_on_one_rank(optimizer, model, step):
    optimizer.zero_grad()
    model["second"].requires_grad_(hvd.rank() != step % hvd.size())
    backward(model, step)
    model["second"].requires_grad_(True)
    optimizer.step()


def frozen_for_a_while(optimizer, model, step):
    """It stays where it is, though its residue waits."""
    is_frozen, before = step in (2, 3), model["second"].detach().clone()
    model["second"].requires_grad_(not is_frozen)
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()
    assert torch.equal(model["second"], before) == is_frozen


def without_backward(optimizer, model, step):
    """In step 2 average again, without new gradients."""
    if step != 2:
        optimizer.zero_grad()
        backward(model, step)
    optimizer.step()


# {an order: how many steps count, whether all gradients are used as they came}
ORDERS = {
    by_a_closure: (STEPS, True),
    synchronized_too_often: (STEPS, True),
    zeroed_in_place: (STEPS, True),
    in_more_passes: (STEPS, True),
    set_by_hand: (STEPS, True),
    set_by_hand_on_one_rank: (STEPS, False),
    given_up: (STEPS, True),
    clipped: (STEPS, False),
    clipped_without_skip_synchronize: (STEPS, False),
    noisy: (STEPS, False),
    one_rank_has_nothing_new: (STEPS, False),
    frozen_on_one_rank: (STEPS, False),
    frozen_for_a_while: (STEPS, False),
    without_backward: (STEPS - 1, False),
}


@pytest.fixture(scope="module")
def nodes():
    """Two nodes. Other files make the same process sets, and Horovod can have only one of each."""
    yield {"options": {"nodes": 2}}
    remove_process_sets()


@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@in_every_library
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"lookahead": True}, marks=pytest.mark.long)], ids=str
)
def test_an_order(library, settings, order):
    compare(library, order, *ORDERS[order], **settings)


@horovods_alone
@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize(
    "order",
    [by_a_closure, in_more_passes, noisy, one_rank_has_nothing_new, frozen_on_one_rank],
)
def test_an_order_on_two_nodes(order, nodes):
    compare(hvd, order, ORDERS[order][0], loses_nothing=False, **nodes)


def test_half_precision_is_averaged_again():
    """Ranks add up in float32. p.grad keeps its dtype, and the average of what ranks changed."""
    model = models.parameters(SHAPES, torch.float16)
    optimizer, _ = make(hvd, EVERYTHING, model)
    averages(optimizer, model, 0)
    for parameter in model.values():
        parameter.grad.fill_(hvd.rank())
    optimizer.synchronize()
    for parameter in model.values():
        assert parameter.grad.dtype == torch.float16
        assert bool((parameter.grad == (hvd.size() - 1) / 2).all())


@horovods_alone
def test_sparse_gradients_are_averaged_again():
    """The script puts the same values into other rows on each rank."""
    model = models.parameters({"table": (20, 6)})
    optimizer, _ = make(hvd, EVERYTHING, model)
    torch.nn.functional.embedding(torch.tensor([3]), model["table"], sparse=True).sum().backward()
    optimizer.synchronize()
    own = torch.zeros(20, 6)
    own[hvd.rank()] = 1
    model["table"].grad.zero_().add_(own.to_sparse(1))
    optimizer.synchronize()
    expected = torch.zeros(20, 6)
    expected[: hvd.size()] = 1 / hvd.size()
    torch.testing.assert_close(model["table"].grad.to_dense(), expected)


@in_every_library
def test_grad_scaler_without_skip_synchronize(library):
    """step() synchronises again when the averages are unscaled already."""
    scaler = None

    def order(optimizer, model, step):
        nonlocal scaler
        if step == 0:
            scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=3)
        optimizer.zero_grad()
        backward(model, step, scale=float(scaler.scale(torch.ones(()))))
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.values(), 1e9)
        scaler.step(optimizer)
        scaler.update()

    compare(library, order, STEPS, loss_scale=lambda: scaler.get_scale() if scaler else 1.0)


class Net(torch.nn.Module):
    """Has layers before and after a collective. Their buckets finish around its backward."""

    def __init__(self, collective, name):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(40, 40) for _ in range(5)])
        self.collective, self.name = collective, name

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 2:
                x = models.run_collective(hvd, self.collective, x, self.name)
        return x.square().mean()


@horovods_alone
@pytest.mark.parametrize(
    ("collective", "name"),
    [
        *(pytest.param(c, None, marks=pytest.mark.long) for c in models.COLLECTIVES[2:]),
        *((c, None) for c in models.COLLECTIVES[:2]),
        (models.COLLECTIVES[0], "mine"),
    ],
)
def test_differentiable_collectives_in_the_middle_of_a_model(collective, name):
    found = []
    for sent in (None, EVERYTHING, SOME):
        # Without compression, collectives need names too: the numbers that Horovod gives differ if
        # an earlier test had a process set of some ranks.
        net = Net(collective, name)
        model = dict(net.named_parameters())
        settings = {} if sent is None else {"bucket_bytes": 1000, "leader": "staggered"}
        optimizer, _ = make(hvd, sent, model, lr=0.1, **settings)
        for step in range(4):
            # Ranks get to their hooks at different times. So offsets have arrived on some ranks but
            # not on others.
            for layer in net.layers:
                layer.weight.register_post_accumulate_grad_hook(
                    lambda _, step=step: time.sleep(0.002 * ((step + hvd.rank()) % 3))
                )
            optimizer.zero_grad()
            random = torch.Generator().manual_seed(step * 8 + hvd.rank())
            net(torch.randn(8, 40, generator=random)).backward()
            optimizer.step()
        assert models.same_on_all_ranks(model.values())
        found.append(model)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@horovods_alone
def test_parameters_thawed_after_the_compressor_was_made():
    """In Horovod's own optimizer the compressor watches backward from when it is made.

    It does so whatever is trained at that time.
    """
    model = models.parameters(SHAPES)
    for parameter in model.values():
        parameter.requires_grad_(False)
    compressor = hvd.ScaleCom(model.items(), **(SETTINGS | SOME))
    for parameter in model.values():
        parameter.requires_grad_(True)
    sgd = torch.optim.SGD(model.values(), lr=1.0)
    optimizer = stock.DistributedOptimizer(sgd, model.items(), compression=compressor)
    for step in range(4):
        for parameter in model.values():
            parameter.grad = torch.zeros_like(parameter)
        backward(model, step)
        optimizer.step()
    came = came_in(range(hvd.size()), range(4), SHAPES)
    models.assert_nothing_is_lost(model, compressor, came, hvd.size())


@horovods_alone
def test_two_compressors_that_know_all_parameters():
    """A GAN with Horovod's own optimizer has two compressors.

    From the first synchronize() on, what the other compressor's backward gave is not new.
    """
    model = models.parameters(SHAPES)
    names = [["first", "bias"], ["second", "third"]]
    halves = [{name: model[name] for name in half} for half in names]
    made = [models.wrap(stock, model, trained=half, **(SETTINGS | SOME)) for half in halves]
    for step in range(6):
        for half, (optimizer, _), (other, _) in zip(halves, made, reversed(made), strict=True):
            optimizer.zero_grad()
            backward(model, step, skip=model.keys() - half.keys())
            if step == 0:
                other.synchronize()
            optimizer.step()
            other.synchronize()
    assert [compressor.stats()["step"] for _, compressor in made] == [6, 6]


@in_every_library
def test_an_optimizer_is_deleted_and_its_compressor_kept(library):
    """Scripts keep the compressor for checkpoints.

    The hooks of a deleted optimizer must not go on.
    """
    model, kept = models.parameters(SHAPES), []
    for stage in range(2):
        optimizer, compressor = make(library, SOME, model)
        kept.append(compressor)
        models.take_steps(optimizer, model, range(3 * stage, 3 * stage + 3))
        optimizer.zero_grad()
        deleted = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert deleted() is None
    assert [compressor.stats()["step"] for compressor in kept] == [3, 3]
