"""Orders of calls that scripts make and that once failed.

test_torch_differential.py draws all other orders.
"""

import gc
import time
import weakref

import pytest
import torch
from devices import DEVICE
from faces import horovods_alone, hvd, in_every_library, stock
from made_up import EVERYTHING, SOME
from models import assert_nothing_is_lost, feed, gradients, parameters, same_on_all_ranks

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (2000,)}


def make(library, sent, model, lr=1.0, **settings):
    """An optimizer and its ScaleCom. If sent is None, it is stock Horovod's, without ScaleCom."""
    compression = stock.Compression.none
    if sent is not None:
        named = {"named_parameters": model.items()} if library is stock else {}
        compression = hvd.ScaleCom(
            **named,
            min_numel=2,
            warmup_steps=0,
            dense=(),
            **sent,
            **settings,
        )
    return library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=lr), model.items(), compression=compression
    ), compression


def compare(library, train, **settings):
    """Train with stock Horovod, with everything chosen, and at rate 10.

    With everything chosen the result must be stock Horovod's. At rate 10 nothing may be lost.
    Return what the last run gives.
    """
    models = []
    for where, sent in ((stock, None), (library, EVERYTHING), (library, SOME)):
        model = parameters(SHAPES)
        optimizer, compressor = make(where, sent, model, **settings)
        train(optimizer, model)
        models.append(model)
    for name in SHAPES:
        torch.testing.assert_close(models[1][name], models[0][name], rtol=1e-4, atol=1e-5)
    assert same_on_all_ranks(models[2].values())
    return models, compressor


def nothing_is_lost(models, compressor, steps):
    came = {
        name: sum(
            gradients(SHAPES, rank, step)[name]
            for rank in range(hvd.size())
            for step in range(steps)
        )
        for name in SHAPES
    }
    assert_nothing_is_lost(models[2], compressor, came, hvd.size())
    assert compressor.stats()["step"] == steps


@in_every_library
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"lookahead": True}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("order", ["closure", "after every backward", "idle optimizer"])
def test_synchronize_with_nothing_new_changes_nothing(library, settings, order):
    def train(optimizer, model):
        for step in range(12):

            def evaluate(step=step):
                optimizer.zero_grad()
                feed(model, gradients(SHAPES, hvd.rank(), step))
                optimizer.synchronize()
                return torch.tensor(float(step))

            if order == "closure":
                assert float(optimizer.step(evaluate)) == step
                continue
            if order == "idle optimizer":
                optimizer.synchronize()
                optimizer.synchronize()
            evaluate()
            if order == "after every backward":
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()

    nothing_is_lost(*compare(library, train, **settings), 12)


@in_every_library
def test_clipping_without_skip_synchronize(library):
    def train(optimizer, model):
        for step in range(6):
            before = torch.cat([p.detach().clone().view(-1) for p in model.values()])
            optimizer.zero_grad()
            feed(model, gradients(SHAPES, hvd.rank(), step))
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.values(), 0.01)
            optimizer.step()
            after = torch.cat([p.detach().view(-1) for p in model.values()])
            assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-2)

    _, compressor = compare(library, train)
    assert compressor.stats()["step"] == 6


@in_every_library
def test_grad_scaler_without_skip_synchronize(library):
    """step() synchronises again when the averages are unscaled already."""

    def train(optimizer, model):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=3)
        compression = getattr(optimizer, "compression", None) or getattr(
            optimizer, "_compression", None
        )
        if isinstance(compression, hvd.ScaleCom):
            compression.loss_scale = scaler.get_scale
        for step in range(8):
            optimizer.zero_grad()
            scale = float(scaler.scale(torch.ones(())))
            feed(
                model,
                {name: grad * scale for name, grad in gradients(SHAPES, hvd.rank(), step).items()},
            )
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.values(), 1e9)
            scaler.step(optimizer)
            scaler.update()

    nothing_is_lost(*compare(library, train), 8)


@in_every_library
def test_gradients_set_by_hand_are_exchanged(library):
    def train(optimizer, model):
        for step in range(6):
            for name, grad in gradients(SHAPES, hvd.rank(), step).items():
                model[name].grad = torch.as_tensor(grad)
            optimizer.step()

    nothing_is_lost(*compare(library, train), 6)


@in_every_library
def test_what_ranks_change_by_themselves_is_averaged_once_more(library):
    """Every rank adds noise of its own after synchronize(), without skip_synchronize().

    Ranks stay alike, and no step is counted for the second average.
    """

    def train(optimizer, model):
        noise = torch.Generator().manual_seed(hvd.rank())
        for step in range(6):
            optimizer.zero_grad()
            feed(model, gradients(SHAPES, hvd.rank(), step))
            optimizer.synchronize()
            for parameter in model.values():
                parameter.grad.add_(torch.randn(parameter.shape, generator=noise))
            optimizer.step()

    _, compressor = compare(library, train)
    assert compressor.stats()["step"] == 6


@in_every_library
def test_one_rank_has_nothing_new_and_others_have(library):
    def train(optimizer, model):
        for step in range(8):
            optimizer.zero_grad()
            skipped = list(SHAPES) if step % hvd.size() == hvd.rank() else []
            feed(model, gradients(SHAPES, hvd.rank(), step), skip=skipped)
            optimizer.synchronize()
            optimizer.step()

    compare(library, train)


def uneven(x):
    return torch.tensor([len(x) - hvd.size() + 1] + [1] * (hvd.size() - 1), dtype=torch.int32)


COLLECTIVES = {
    "allreduce": lambda x, name: hvd.allreduce(x, name=name),
    "grouped_allreduce": lambda x, name: torch.cat(
        hvd.grouped_allreduce([x[:3], x[3:]], name=name)
    ),
    "allgather": lambda x, name: hvd.allgather(x, name=name),
    "grouped_allgather": lambda x, name: torch.cat(
        hvd.grouped_allgather([x[:3], x[3:]], name=name)
    ),
    "broadcast": lambda x, name: hvd.broadcast(x, 0, name=name),
    "alltoall": lambda x, name: hvd.alltoall(x, uneven(x), name=name)[0],
    "reducescatter": lambda x, name: hvd.reducescatter(x, name=name),
    "grouped_reducescatter": lambda x, name: torch.cat(
        hvd.grouped_reducescatter([x, x], name=name)
    ),
}


class Net(torch.nn.Module):
    """Has layers before and after a collective. Their buckets finish around its backward."""

    def __init__(self, collective, name):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(40, 40) for _ in range(5)])
        self.collective, self.name = COLLECTIVES[collective], name

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 2:
                x = self.collective(x, self.name)
        return x.square().mean()


@horovods_alone
@pytest.mark.parametrize(
    ("collective", "name"),
    [*((one, None) for one in COLLECTIVES), (next(iter(COLLECTIVES)), "mine")],
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
            net(
                torch.randn(8, 40, generator=torch.Generator().manual_seed(step * 8 + hvd.rank()))
            ).backward()
            optimizer.step()
        assert same_on_all_ranks(model.values())
        found.append(model)
    for key in found[0]:
        torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-4, atol=1e-6)


@in_every_library
def test_a_state_is_loaded_between_backward_and_step(library):
    """Horovod drops what is under way, and the exchange must too.

    Otherwise its values would be sent, and reach no rank. (In Horovod's own optimizer, only
    compress() learns of it.)
    """

    def train(optimizer, model):
        for step in range(12):
            for parameter in model.values():
                parameter.grad = None
            if step % 3 == 1:  # this step is given up
                feed(model, gradients(SHAPES, hvd.rank(), 100 + step))
                # Stock Horovod refuses names that are still under way.
                while not all(
                    callable(handle) or stock.poll(handle)
                    for handle, _ in getattr(optimizer, "_handles", {}).values()
                ):
                    time.sleep(0.001)
                optimizer.load_state_dict(optimizer.state_dict())
                for parameter in model.values():
                    parameter.grad = None
            feed(model, gradients(SHAPES, hvd.rank(), step))
            optimizer.step()

    nothing_is_lost(*compare(library, train), 12)


@horovods_alone
def test_parameters_thawed_after_the_compressor_was_made():
    """In Horovod's own optimizer the compressor watches backward from when it is made.

    It does so whatever is trained at that time.
    """
    model = parameters(SHAPES)
    for parameter in model.values():
        parameter.requires_grad_(False)
    compressor = hvd.ScaleCom(model.items(), rate=10, min_numel=2, warmup_steps=0, dense=())
    for parameter in model.values():
        parameter.requires_grad_(True)
    optimizer = stock.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=1.0), model.items(), compression=compressor
    )
    for step in range(4):
        for parameter in model.values():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
            )
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
    nothing_is_lost([None, None, model], compressor, 4)


@horovods_alone
def test_two_compressors_that_know_all_parameters():
    """A GAN with Horovod's own optimizer has two compressors.

    From the first synchronize() on, what the other compressor's backward gave is not new.
    """
    halves = [
        parameters({name: SHAPES[name] for name in names})
        for names in (("first", "bias"), ("second", "third"))
    ]
    everything = halves[0] | halves[1]
    compressors = [
        hvd.ScaleCom(everything.items(), rate=10, min_numel=2, warmup_steps=0, dense=())
        for _ in halves
    ]
    optimizers = [
        stock.DistributedOptimizer(
            torch.optim.SGD(half.values(), lr=1.0), half.items(), compression=compressor
        )
        for half, compressor in zip(halves, compressors, strict=True)
    ]
    for step in range(6):
        for half, optimizer, other in zip(halves, optimizers, reversed(optimizers), strict=True):
            optimizer.zero_grad()
            feed(half, {name: gradients(SHAPES, hvd.rank(), step)[name] for name in half})
            if step == 0:
                other.synchronize()
            optimizer.step()
            other.synchronize()
    assert [compressor.stats()["step"] for compressor in compressors] == [6, 6]


@in_every_library
def test_an_optimizer_is_deleted_and_its_compressor_kept(library):
    """Scripts keep the compressor for checkpoints.

    The hooks of a deleted optimizer must not go on.
    """
    model, kept = parameters(SHAPES), []
    for stage in range(2):
        optimizer, compressor = make(library, SOME, model)
        kept.append(compressor)
        for step in range(3):
            optimizer.zero_grad()
            feed(model, gradients(SHAPES, hvd.rank(), 3 * stage + step))
            optimizer.step()
        optimizer.zero_grad()
        deleted = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert deleted() is None
    assert [compressor.stats()["step"] for compressor in kept] == [3, 3]
