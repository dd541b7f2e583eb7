"""Local steps, compared with the oracle of Qsparse-local-SGD.

Also what users expect of an optimizer: checkpoints, scaling, bad gradients.
"""

import copy
import gc
import io
import itertools

import numpy as np
import pytest
import rules
import torch
from devices import DEVICE
from faces import horovods_alone, hvd, stock
from models import feed, gradients, parameters, same_on_all_ranks
from oracles import methods as oracle
from oracles.local_steps import LocalStepsReference, nesterov

from scalecom_hvd.exchange.background_thread import wait_for_kept
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.kernels.base import positions_of
from scalecom_hvd.schedule import Schedule

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (5000,), "double": (700,)}
SETTINGS = {"rate": 20, "min_numel": 100, "dense": [], "warmup_steps": 0, "bucket_bytes": 30_000}
# Powers of two make products exact, so it does not matter whether they are fused with a sum.
LR, MOMENTUM = 0.5, 0.5

COMPRESSIONS = {
    "ScaleCom": lambda **more: hvd.ScaleCom(**(SETTINGS | more)),
    "ScaleCom, 32 bits": lambda **more: hvd.ScaleCom(bits=32, **(SETTINGS | more)),
    "ScaleCom, exact, beta": lambda **more: hvd.ScaleCom(
        **(SETTINGS | {"selection": "exact", "beta": 0.5} | more)
    ),
    "ScaleCom, sign": lambda **more: hvd.ScaleCom(quantiser=hvd.Sign(), **(SETTINGS | more)),
    "ScaleCom, 4 bits": lambda **more: hvd.ScaleCom(quantiser=hvd.QSGD(7), **(SETTINGS | more)),
    "LocalTopK": lambda **more: hvd.LocalTopK(**(SETTINGS | more)),
    "LocalTopK, sign": lambda **more: hvd.LocalTopK(quantiser=hvd.Sign(), **(SETTINGS | more)),
    "LocalTopK, 8 bits": lambda **more: hvd.LocalTopK(quantiser=hvd.QSGD(127), **(SETTINGS | more)),
    "RandomK, own, 4 bits": lambda **more: hvd.RandomK(
        shared=False, quantiser=hvd.QSGD(7), **(SETTINGS | more)
    ),
    "RandomK": lambda **more: hvd.RandomK(**(SETTINGS | more)),
}
SOME = ["ScaleCom", "ScaleCom, sign", "LocalTopK, 8 bits"]
some_compressions = pytest.mark.parametrize("compression", SOME)


def begin(shapes=SHAPES, dtypes=None):
    """A model that begins with the same random numbers on all ranks."""
    values = gradients(shapes, 99, 0)
    dtypes = {"double": torch.float64} if dtypes is None else dtypes
    return {
        name: torch.nn.Parameter(torch.as_tensor(value).to(dtypes.get(name, torch.float32)))
        for name, value in values.items()
    }


def make(model, compression, local_steps, lr=LR, momentum=0.0, made=None, **more):
    compressor = COMPRESSIONS[compression]() if isinstance(compression, str) else compression
    sgd = made or torch.optim.SGD(model.values(), lr=lr, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(
        sgd, model.items(), compression=compressor, local_steps=local_steps, **more
    )
    return optimizer, optimizer.compression


def run(optimizer, model, steps, skip=lambda step: (), grads=gradients, shapes=SHAPES):
    for step in steps:
        optimizer.zero_grad()
        feed(model, grads(shapes, hvd.rank(), step), skip=skip(step))
        optimizer.step()


def momentum_sgd():
    """PyTorch's SGD with momentum, separately for every worker."""
    buffers = {}

    def update(worker, values, grads):
        for name, grad in grads.items():
            key = (worker, name)
            buffers[key] = grad if key not in buffers else MOMENTUM * buffers[key] + grad
        return {
            name: value - value.dtype.type(LR) * buffers[worker, name].astype(value.dtype)
            for name, value in values.items()
        }

    return update


def hold_to_the_oracle(
    compression,
    local_steps,
    steps,
    outer=None,
    outers=None,
    overlap=0,
    fragments=1,
    clip_changes=None,
    **more,
):
    """outers: the oracle's outer optimizer, if there is one."""
    n, rank = hvd.size(), hvd.rank()
    model = begin()
    if isinstance(compression, str):
        compression = COMPRESSIONS[compression](**more)
    optimizer, compressor = make(
        model,
        compression,
        local_steps,
        momentum=MOMENTUM,
        outer=outer,
        overlap=overlap,
        fragments=fragments,
        clip_changes=clip_changes,
    )
    exchange = oracle.MethodReference(
        n,
        SHAPES,
        compressor.config,
        rules.sending(compressor),
        decay=getattr(compressor, "decay", 1.0),
        by_contributors=getattr(compressor, "average", "all") == "contributors",
    )
    start = {name: parameter.detach().numpy().copy() for name, parameter in model.items()}
    reference = LocalStepsReference(
        exchange,
        start,
        Schedule(local_steps, fragments),
        momentum_sgd(),
        outers,
        overlap,
        optimizer._local._fragments,
        clip_changes,
    )
    kinds = {name: value.dtype for name, value in start.items()}
    for step in range(steps):
        everyone = [
            {name: g.astype(kinds[name]) for name, g in gradients(SHAPES, r, step).items()}
            for r in range(n)
        ]
        optimizer.zero_grad()
        feed(model, everyone[rank])
        optimizer.step()
        if compressor.residues.buckets is not None:
            exchange.buckets = compressor.residues.buckets
        reference.step(everyone)
        for name, parameter in model.items():
            want = reference.workers[rank][name]
            np.testing.assert_allclose(
                parameter.detach().numpy(),
                want,
                1e-5,
                1e-5,
                err_msg=f"{name} after step {step + 1}",
            )
        if reference.travelling is not None:
            continue  # residues have moved in place, and may still be taken back
        for name, tensor in compressor.residues.tensors.items():
            want = exchange.residues[rank].get(name, np.zeros(SHAPES[name])).reshape(-1)
            np.testing.assert_allclose(
                tensor.residue.numpy(), want, 1e-4, 1e-4, err_msg=f"{name} after step {step + 1}"
            )
    assert compressor.stats()["step"] == exchange.step_number
    optimizer.synchronize_parameters()
    assert same_on_all_ranks(model.values())


# The oracle's buckets are known only after the first exchange. So that exchange has one bucket of
# each kind.
ONE_BUCKET = {"bucket_bytes": 10**8, "dense": ["double"]}


@pytest.mark.parametrize(
    ("compression", "local_steps"),
    [*((compression, 4) for compression in COMPRESSIONS), (SOME[0], 1), (SOME[1], 1)],
)
def test_parity(compression, local_steps):
    hold_to_the_oracle(compression, local_steps, local_steps * 10, **ONE_BUCKET)


def outer_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.75, nesterov=True)


@some_compressions
def test_an_outer_optimizer(compression):
    hold_to_the_oracle(compression, 4, 40, outer_sgd, nesterov(0.5, 0.75), **ONE_BUCKET)


@some_compressions
@pytest.mark.parametrize("overlap", [1, 3])
def test_averages_that_travel_while_ranks_go_on(compression, overlap):
    outer = outer_sgd, nesterov(0.5, 0.75)
    hold_to_the_oracle(compression, 4, 43, *outer, overlap=overlap, **ONE_BUCKET)


@some_compressions
@pytest.mark.parametrize(
    ("local_steps", "overlap", "fragments"),
    [
        (6, 2, 2),
        ({0: 1, 5: 3, 15: 7}, 0, 2),
        *(pytest.param(*own, marks=pytest.mark.long) for own in [(5, 0, 3), (2, 0, 3)]),
    ],
)
def test_fragments_that_synchronise_in_turn(compression, local_steps, overlap, fragments):
    hold_to_the_oracle(
        compression,
        local_steps,
        43,
        outer_sgd,
        nesterov(0.5, 0.75),
        overlap=overlap,
        fragments=fragments,
        **ONE_BUCKET,
    )


@some_compressions
@pytest.mark.parametrize("more", [{}, {"overlap": 2, "fragments": 2}], ids=["all", "in turn"])
@pytest.mark.parametrize("clip_changes", [1, pytest.param(0.9, marks=pytest.mark.long)])
def test_changes_longer_than_the_median_are_cut(compression, clip_changes, more):
    hold_to_the_oracle(
        compression, local_steps=6, steps=42, clip_changes=clip_changes, **more, **ONE_BUCKET
    )


def test_diloco_by_its_name():
    hold_to_the_oracle(**hvd.diloco(4), steps=24, outers=nesterov(0.7, 0.9))


def test_sparseloco_by_its_name():
    recipe = hvd.sparseloco(4, rate=20)
    recipe["compression"] = hvd.LocalTopK(  # the oracle knows of only one bucket
        config=recipe["compression"].config.replace(bucket_bytes=10**8, dense=["double"]),
        decay=recipe["compression"].decay,
        average=recipe["compression"].average,
        quantiser=recipe["compression"].quantiser,
    )
    assert (recipe["compression"].decay, recipe["compression"].average) == (0.95, "contributors")
    hold_to_the_oracle(**recipe, steps=40)


@some_compressions
def test_parity_where_synchronisation_points_change(compression):
    hold_to_the_oracle(compression, {0: 1, 5: 3, 15: 7}, 40, **ONE_BUCKET)


@pytest.fixture
def sent(monkeypatch):
    """{name: the sum of all that this rank handed over for sending}, as buckets are told of it."""
    sent = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}

    class Recording(BucketStep):
        def take_and_accumulate(self, offsets, choose=False):
            chosen = yield from super().take_and_accumulate(offsets, choose)
            own = self._bucket
            values = own.scaled(self.taken, offsets) if own.levels else self.taken
            choice, numbers = self.choices.split(offsets), values.double().split(self.counts)
            for (name, tensor), part in zip(self.compressed.items(), numbers, strict=True):
                positions = positions_of(tensor.geometry, choice[name]["offsets"])
                sent[name].view(-1)[positions] += part
            return chosen

        def send(self, places, values):
            before = self.accumulators.clone().double()
            super().send(places, values)
            parts = (before - self.accumulators.double()).split(self.sizes)
            for name, part in zip(self.compressed, parts, strict=True):
                sent[name] += part.view(SHAPES[name])

        def fill(self):
            filled = super().fill()
            for name, values in {} if self.whole else self._bucket.values.whole.items():
                sent[name] += values.double().view(SHAPES[name])
            return filled

    monkeypatch.setattr("scalecom_hvd.exchange.exchange.BucketStep", Recording)
    return sent


@pytest.mark.parametrize("compression", [*SOME, "ScaleCom, exact, beta", "RandomK, own, 4 bits"])
def test_nothing_is_lost_in_200_steps(compression, sent):
    """Compare where all ranks began and ended with what was sent.

    The common start minus the common end is the average of what was sent. What each rank changed is
    what it sent plus its residue.
    """
    model = begin()
    start = {name: parameter.detach().clone() for name, parameter in model.items()}
    optimizer, compressor = make(model, COMPRESSIONS[compression](beta=1.0), 4)
    changed = {
        name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in model.items()
    }
    for step in range(200):
        if step % 4 == 0:
            mine = {name: parameter.detach().clone() for name, parameter in model.items()}
            began = {name: value.clone() for name, value in mine.items()}
        grads = gradients(SHAPES, hvd.rank(), step)
        optimizer.zero_grad()
        feed(model, grads)
        optimizer.step()
        for name, value in mine.items():
            value.sub_(torch.as_tensor(grads[name]).to(value.dtype), alpha=LR)
        if step % 4 == 3:
            for name, value in mine.items():
                changed[name] += began[name].double() - value.double()
    assert compressor.stats()["step"] == 50
    assert same_on_all_ranks(model.values())
    for name, parameter in model.items():
        tensor = compressor.residues.tensors.get(name)
        left = (
            tensor.residue.view(tensor.shape).double()
            if tensor is not None
            else torch.zeros_like(changed[name])
        )
        assert sent[name].any()
        assert name == "bias" or left.any()
        torch.testing.assert_close(sent[name] + left, changed[name], rtol=1e-3, atol=1e-3)
        everyones = hvd.allreduce(sent[name], name=f"test.{name}")
        torch.testing.assert_close(
            (start[name] - parameter.detach()).double(), everyones, rtol=1e-3, atol=1e-3
        )


def exact(shapes, rank, step):
    """Gradients of few bits: sums, averages over 2 and 4 ranks, and steps of 0.5 are exact."""
    return {name: np.round(grad * 8) / 64 for name, grad in gradients(shapes, rank, step).items()}


@pytest.mark.parametrize(
    "compression", ["ScaleCom", "LocalTopK", "RandomK", "ScaleCom, exact, beta"]
)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_one_local_step_with_sgd_is_the_ordinary_path(compression, op):
    """Where arithmetic is exact, they are equal to the bit."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "double"}
    ordinary, local = parameters(shapes), parameters(shapes)
    more = {"beta": 1.0}
    run(
        make(ordinary, COMPRESSIONS[compression](**more), None, op=getattr(hvd, op))[0],
        ordinary,
        range(20),
        grads=exact,
        shapes=shapes,
    )
    run(
        make(local, COMPRESSIONS[compression](**more), 1, op=getattr(hvd, op))[0],
        local,
        range(20),
        grads=exact,
        shapes=shapes,
    )
    for name in shapes:
        assert torch.equal(ordinary[name], local[name]), name
    assert local["first"].any()


def test_plain_local_sgd():
    """Compression.none: changes travel whole, and common parameters are the ranks' mean."""
    model = begin()
    own = {name: parameter.detach().clone() for name, parameter in model.items()}
    optimizer, compressor = make(model, hvd.Compression.none, 3)
    for step in range(3):
        run(optimizer, model, [step])
        for name, value in own.items():
            value.sub_(
                torch.as_tensor(gradients(SHAPES, hvd.rank(), step)[name]).to(value.dtype),
                alpha=LR,
            )
        if step < 2:
            assert all(torch.equal(own[name], model[name]) for name in model)
    for name, value in own.items():
        torch.testing.assert_close(model[name].detach(), hvd.allreduce(value, name=f"test.{name}"))
    assert compressor.stats()["rate"] == 1
    assert not compressor.residues.tensors


def test_the_optimizers_state_stays_local():
    model = begin()
    optimizer, compressor = make(model, "ScaleCom", 4, momentum=0.9)
    run(optimizer, model, range(8))
    assert same_on_all_ranks(model.values())
    assert not same_on_all_ranks(
        [optimizer.state[parameter]["momentum_buffer"] for parameter in model.values()]
    )
    numbers = compressor.stats()
    assert (
        numbers["step"],
        numbers["local_steps_taken"],
        numbers["local_steps_skipped"],
        numbers["local_steps"],
    ) == (2, 8, 0, [[0, 4]])


def test_warm_up_counts_the_optimizers_steps():
    model = begin()
    optimizer, compressor = make(model, COMPRESSIONS["ScaleCom"](warmup_steps=10), 4)
    rates = []
    for step in range(20):
        run(optimizer, model, [step])
        if step % 4 == 3:
            rates.append(compressor.stats()["rate"])
    assert rates[:2] == [1.0, 1.0]
    assert min(rates[2:]) > 10


@some_compressions
def test_clipping_between_synchronize_and_step_clips_local_gradients(compression):
    model = begin()
    optimizer, compressor = make(model, compression, 2, lr=1.0)
    for step in range(4):
        before = {name: parameter.detach().clone() for name, parameter in model.items()}
        optimizer.zero_grad()
        grads = gradients(SHAPES, hvd.rank(), step)
        feed(model, grads)
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.values(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        if step % 2 == 0:
            for name, parameter in model.items():
                own = torch.as_tensor(grads[name]).to(parameter.dtype) * (0.5 / norm)
                torch.testing.assert_close(
                    before[name] - parameter.detach(), own, rtol=1e-3, atol=1e-4
                )
    assert compressor.stats()["step"] == 2
    assert same_on_all_ranks(model.values())


# Numbers that are not finite.


@some_compressions
def test_a_bad_gradient_makes_this_ranks_step_one_that_changes_nothing(compression):
    model = begin()
    optimizer, compressor = make(model, compression, 3, momentum=0.9)
    bad = {1: 0, 4: 1, 5: 0}
    for step in range(9):
        optimizer.zero_grad()
        grads = gradients(SHAPES, hvd.rank(), step)
        if bad.get(step) == hvd.rank():
            grads["first"][3, 4] = (np.nan, np.inf)[step % 2]
        feed(model, grads)
        before = {name: parameter.detach().clone() for name, parameter in model.items()}
        optimizer.step()
        if bad.get(step) == hvd.rank() and step % 3 != 2:
            assert all(torch.equal(before[name], parameter) for name, parameter in model.items())
    assert all(parameter.isfinite().all() for parameter in model.values())
    assert all(
        optimizer.state[parameter]["momentum_buffer"].isfinite().all()
        for parameter in model.values()
    )
    numbers = compressor.stats()
    assert (numbers["step"], numbers["skipped_steps"]) == (3, 0)
    assert (numbers["local_steps_taken"], numbers["local_steps_skipped"]) == (
        9,
        list(bad.values()).count(hvd.rank()),
    )
    assert same_on_all_ranks(model.values())


@some_compressions
def test_parameters_that_are_not_finite_go_back_and_others_keep_theirs(compression, caplog):
    """What the other ranks changed is not lost: the next synchronisation sends it."""
    model = begin()
    optimizer, compressor = make(model, COMPRESSIONS[compression](beta=1.0), 2, lr=1.0)
    run(optimizer, model, range(2))
    common = {name: parameter.detach().clone() for name, parameter in model.items()}
    residues = {
        name: tensor.residue.clone() for name, tensor in compressor.residues.tensors.items()
    }
    own = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in (2, 3):
        optimizer.zero_grad()
        grads = gradients(SHAPES, hvd.rank(), step)
        if hvd.rank() == 1:
            grads["third"][7] = 1.2e30  # it is accepted, but twice this is too large for a residue
        else:
            own = {name: own[name] + torch.as_tensor(grads[name]).double() for name in SHAPES}
        feed(model, grads)
        optimizer.step()
    assert (compressor.stats()["step"], compressor.stats()["skipped_steps"]) == (1, 1)
    for name, parameter in model.items():
        torch.testing.assert_close(
            (common[name] - parameter.detach()).double(), own[name], rtol=1e-4, atol=1e-4
        )
    for name, tensor in compressor.residues.tensors.items():
        torch.testing.assert_close(tensor.residue, residues[name], rtol=1e-5, atol=1e-5)
    assert ("this rank's parameters are not finite" in caplog.text) == (hvd.rank() == 1)

    run(optimizer, model, range(4, 6))
    assert compressor.stats()["step"] == 2
    assert same_on_all_ranks(model.values())
    for name, parameter in model.items():
        for step in (4, 5):
            own[name] += torch.as_tensor(gradients(SHAPES, hvd.rank(), step)[name]).double()
        tensor = compressor.residues.tensors.get(name)
        before, left = (
            (residues[name].view(SHAPES[name]), tensor.residue.view(SHAPES[name]))
            if tensor is not None
            else (torch.zeros(()),) * 2
        )
        kept = hvd.allreduce(own[name] + before.double() - left.double(), name=f"test.{name}")
        torch.testing.assert_close(
            (common[name] - parameter.detach()).double(), kept, rtol=1e-3, atol=1e-3
        )


@some_compressions
def test_changes_carry_no_loss_scale(compression):
    """Gradients are unscaled before a local step, so the scale after it does not matter."""
    scaled, plain = begin(), begin()
    scales = itertools.cycle([2.0**10, 2.0**-3, 1.0])
    compressor = COMPRESSIONS[compression](loss_scale=lambda: next(scales))
    run(make(scaled, compressor, 2)[0], scaled, range(12))
    run(make(plain, compression, 2)[0], plain, range(12))
    assert all(torch.equal(scaled[name], plain[name]) for name in SHAPES)


@some_compressions
def test_a_gradient_scaler(compression):
    """Every rank scales by itself. If its scaler finds an overflow, it still takes its turn."""
    plain, scaled = begin(), begin()
    a, _ = make(plain, compression, 3)
    b, compressor = make(scaled, compression, 3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=4)
    for step in range(12):
        overflows = step in (2, 4, 7) and hvd.rank() == step % 2
        grads = gradients(SHAPES, hvd.rank(), step)
        a.zero_grad()
        feed(plain, {name: grad * np.nan for name, grad in grads.items()} if overflows else grads)
        a.step()
        b.zero_grad()
        factor = np.inf if overflows else scaler.get_scale()
        scaler.scale(torch.zeros(()))  # as for a loss; here the gradients are given
        feed(scaled, {name: grad * grad.dtype.type(factor) for name, grad in grads.items()})
        if step % 2:  # as scripts that clip do
            b.synchronize()
            scaler.unscale_(b)
            with b.skip_synchronize():
                scaler.step(b)
        else:
            scaler.step(b)
        scaler.update()
    for name in SHAPES:
        assert torch.equal(plain[name], scaled[name]), name
    assert (compressor.stats()["step"], compressor.stats()["local_steps_taken"]) == (4, 12)
    assert same_on_all_ranks(scaled.values())


# Parameters and ranks of every kind.


def test_half_precision_loses_nothing_of_the_average():
    """Common parameters are float32, so what is too small for half precision adds up there."""
    model = {"weight": torch.nn.Parameter(torch.ones(4000, dtype=torch.float16))}
    optimizer, compressor = make(model, hvd.ScaleCom(dense=["*"], warmup_steps=0), 1, lr=1.0)
    for step in range(8):
        # As its share of the average, one rank's change is a sixteenth of what half precision
        # resolves at 1.
        grad = 2.0**-10 if hvd.rank() == 0 and step % 2 == 0 else 0.0
        run(
            optimizer,
            model,
            [0],
            grads=lambda shapes, rank, step, grad=grad: {"weight": np.full(4000, grad)},
            shapes={"weight": (4000,)},
        )
    expected = 1 - 4 * 2.0**-10 / hvd.size()
    assert model["weight"].dtype == torch.float16
    torch.testing.assert_close(
        model["weight"].detach(),
        torch.full((4000,), expected, dtype=torch.float16),
        rtol=0,
        atol=2.0**-11,
    )
    assert abs(model["weight"][0].item() - 1) > 2.0**-11
    assert compressor.stats()["step"] == 8


@some_compressions
def test_missing_gradients_and_frozen_parameters(compression):
    model = begin()
    optimizer, compressor = make(model, compression, 2)
    run(optimizer, model, range(4), skip=lambda step: [list(SHAPES)[(hvd.rank() + step) % 5]])
    assert same_on_all_ranks(model.values())
    model["second"].requires_grad_(False)
    kept, value = (
        compressor.residues.tensors["second"].residue.clone(),
        model["second"].detach().clone(),
    )
    run(optimizer, model, range(4, 8), skip=lambda step: ["second"])
    assert torch.equal(compressor.residues.tensors["second"].residue, kept)
    assert torch.equal(model["second"], value)
    model["second"].requires_grad_(True)
    run(optimizer, model, range(8, 12))
    assert not torch.equal(model["second"], value)
    assert same_on_all_ranks(model.values())


def test_what_changed_before_a_parameter_was_frozen_is_sent():
    model = begin()
    optimizer, _ = make(model, hvd.Compression.none, 2)
    before = model["second"].detach().clone()
    run(optimizer, model, [0])
    model["second"].requires_grad_(False)
    run(optimizer, model, [1], skip=lambda step: ["second"])
    mean = (
        sum(torch.as_tensor(gradients(SHAPES, rank, 0)["second"]) for rank in range(hvd.size()))
        / hvd.size()
    )
    torch.testing.assert_close(before - model["second"].detach(), LR * mean, rtol=1e-4, atol=1e-5)


def test_sparse_gradients_stay_local():
    embedding = torch.nn.Embedding(200, 30, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=0.1),
        embedding.named_parameters(),
        compression=COMPRESSIONS["ScaleCom"](),
        local_steps=2,
    )
    for step in range(4):
        optimizer.zero_grad()
        embedding(torch.arange(10) * (hvd.rank() + step)).square().sum().backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
    assert same_on_all_ranks(embedding.parameters())


def test_closures_and_schedulers():
    model = begin()
    optimizer, compressor = make(model, "ScaleCom", 2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            feed(model, gradients(SHAPES, hvd.rank(), step))
            return 17 + step

        assert optimizer.step(closure) == 17 + step
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == LR / 16
    assert compressor.stats()["step"] == 2
    assert same_on_all_ranks(model.values())


def test_a_closure_whose_gradients_are_bad():
    model = begin()
    optimizer, compressor = make(model, "ScaleCom", 2, momentum=0.9)
    for step in range(4):
        before = {name: parameter.detach().clone() for name, parameter in model.items()}
        bad = step in (0, 3) and hvd.rank() == 1

        def closure(step=step, bad=bad):
            optimizer.zero_grad()
            grads = gradients(SHAPES, hvd.rank(), step)
            grads["third"][0] = (np.nan, 2.0**101)[step % 2] if bad else 0.5
            feed(model, grads)
            return 17 + step

        assert optimizer.step(closure) == 17 + step
        if bad and step == 0:
            assert all(torch.equal(before[name], parameter) for name, parameter in model.items())
    assert (compressor.stats()["step"], compressor.stats()["local_steps_skipped"]) == (
        2,
        2 * (hvd.rank() == 1),
    )
    assert same_on_all_ranks(model.values())


class Twice(torch.optim.Optimizer):
    """Evaluates the closure a second time, at the point that the gradient leads to."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.125})

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            loss = torch.enable_grad()(closure)()
            for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.mul_(0.5).add_(p.grad), alpha=self.param_groups[0]["lr"])
        return loss


EVALUATES = {
    "twice": Twice,
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4, history_size=3),
    "LBFGS, searching": lambda params: torch.optim.LBFGS(
        params, lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe"
    ),
}


def evaluating(kind):
    """A model, the DistributedOptimizer of one, and what makes a closure for any optimizer."""
    goal = {
        name: torch.as_tensor(value).clamp(-1, 1)
        for name, value in gradients(SHAPES, 7, hvd.rank()).items()
    }
    goal["double"] = goal["double"].double()
    model = begin()
    made = EVALUATES[kind](model.values())

    def closure(sgd, values, bad=None):
        """bad: the number of the evaluation on odd ranks that finds a bad gradient."""
        losses = []

        def evaluate():
            sgd.zero_grad()
            loss = sum(
                ((values[name] - goal[name]).square() * (1 + goal[name].abs())).sum().float()
                for name in SHAPES
            )
            loss.backward()
            losses.append(loss.detach())
            if len(losses) == bad and hvd.rank() % 2:
                values["third"].grad[5] = np.nan
            return losses[-1]

        return evaluate

    return model, made, closure


@pytest.mark.parametrize("kind", EVALUATES)
def test_a_bad_gradient_in_the_first_evaluation_leaves_the_step_out(kind):
    model, made, closure = evaluating(kind)
    optimizer, compressor = make(model, "ScaleCom", 30, made=made)
    alone = begin()
    plain = EVALUATES[kind](alone.values())
    for step in range(8):
        for one in (model, alone):
            one["bias"].requires_grad_(step < 4)
        bad = None if step % 3 else 1
        loss = optimizer.step(closure(optimizer, model, bad))
        if bad is None or hvd.rank() % 2 == 0:
            assert torch.equal(loss, plain.step(closure(plain, alone)))
        assert all(torch.equal(model[name], alone[name]) for name in SHAPES), step
    assert compressor.stats()["local_steps_skipped"] == 3 * (hvd.rank() % 2)
    optimizer.synchronize_parameters()
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("kind", EVALUATES)
def test_a_bad_gradient_in_a_later_evaluation_lasts_until_the_next_synchronisation(kind):
    model, made, closure = evaluating(kind)
    optimizer, compressor = make(model, "ScaleCom", 2, made=made)
    for step in range(4):
        optimizer.step(closure(optimizer, model, None if step else 2))
    assert all(bool(parameter.isfinite().all()) for parameter in model.values())
    assert same_on_all_ranks(model.values())
    assert compressor.stats()["local_steps_taken"] == 4


def test_step_hooks_are_called_once_and_see_gradients_that_are_not_scaled():
    model = begin()
    optimizer, _ = make(model, "ScaleCom", 2)
    scaler, seen = torch.amp.GradScaler(DEVICE, init_scale=1024.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(model["first"].grad.abs().max())))
    grads = gradients(SHAPES, hvd.rank(), 0)
    feed(model, {name: grad * 1024 for name, grad in grads.items()})
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert seen == [pytest.approx(np.abs(grads["first"]).max())]


def test_parameters_that_come_later_are_refused():
    model = begin()
    optimizer, _ = make(model, "ScaleCom", 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(
        RuntimeError,
        match=(
            "made trainable, after DistributedOptimizer was made.*Make a new DistributedOptimizer"
        ),
    ):
        run(optimizer, model, [0])


def test_a_rank_that_goes_back_forgets_its_momentum():
    model = begin()
    optimizer, compressor = make(model, "ScaleCom", 2, lr=1.0, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        grads = gradients(SHAPES, hvd.rank(), step)
        if hvd.rank() == 1 and step == 0:
            grads["third"][7] = 1.2e30
        feed(model, grads)
        optimizer.step()
    assert (compressor.stats()["step"], compressor.stats()["skipped_steps"]) == (2, 1)
    assert same_on_all_ranks(model.values())
    assert all(parameter.abs().max() < 1e3 for parameter in model.values())


def test_a_rank_that_goes_back_forgets_what_lbfgs_gathered():
    model = begin()
    optimizer, _ = make(model, hvd.Compression.none, 2, made=EVALUATES["LBFGS"](model.values()))
    goal = {
        name: torch.as_tensor(value) for name, value in gradients(SHAPES, 7, hvd.rank()).items()
    }

    def closure():
        optimizer.zero_grad()
        loss = sum((model[name] - goal[name]).square().sum().float() for name in SHAPES)
        loss.backward()
        return loss.detach()

    for step in range(4):
        loss = optimizer.step(closure)
        if step == 2 and hvd.rank() == 1:
            model["third"].detach()[7] = np.inf
            next(iter(optimizer.state.values()))["old_stps"][0].fill_(np.nan)
    for _ in range(2):
        before = {name: parameter.detach().clone() for name, parameter in model.items()}
        assert optimizer.step(closure).isfinite()
        assert not torch.equal(model["third"], before["third"])
    assert loss.isfinite() == (hvd.rank() != 1)
    assert same_on_all_ranks(model.values())


def test_accumulated_gradients():
    """The sum of backward_passes_per_step backward passes makes one local step."""
    model, other = begin(), begin()
    several, _ = make(model, "ScaleCom", 2, backward_passes_per_step=2)
    once, _ = make(other, "ScaleCom", 2)
    for step in range(4):
        several.zero_grad()
        for half in (0, 1):
            feed(model, exact(SHAPES, hvd.rank(), 2 * step + half))
        several.step()
        one, two = (exact(SHAPES, hvd.rank(), 2 * step + half) for half in (0, 1))
        run(
            once,
            other,
            [0],
            grads=lambda shapes, rank, step, one=one, two=two: {
                name: one[name] + two[name] for name in shapes
            },
        )
    assert all(torch.equal(model[name], other[name]) for name in SHAPES)


def test_groups_and_two_optimizers():
    one, other = begin(), begin()
    a, first = make(
        one, "ScaleCom", 2, groups=[[one["first"], one["second"]], [one["third"], one["bias"]]]
    )
    b, second = make(other, "LocalTopK", 3)
    for step in range(6):
        run(a, one, [step])
        run(b, other, [step])
    assert first.residues.buckets[0] == ["first", "second"]
    assert (first.stats()["step"], second.stats()["step"]) == (3, 2)
    assert same_on_all_ranks([*one.values(), *other.values()])


@horovods_alone
@pytest.mark.skipif("hvd.size() < 3")
def test_a_process_set():
    """Ranks outside it take their steps by themselves."""
    pair = hvd.add_process_set([0, 1])
    try:
        model = begin()
        optimizer, _ = make(model, "ScaleCom", 2, process_set=pair)
        run(optimizer, model, range(4))
        optimizer.synchronize_parameters()
        if pair.included():
            flat = torch.cat([parameter.detach().double().view(-1) for parameter in model.values()])
            everyone = hvd.allgather(flat[None], name="test.pair", process_set=pair)
            assert torch.equal(everyone[0], everyone[1])
    finally:
        hvd.remove_process_set(pair)


@horovods_alone
def test_a_bad_gradient_outside_of_the_process_set():
    zero = hvd.add_process_set([0])
    try:
        model = begin()
        optimizer, compressor = make(model, "ScaleCom", 2, process_set=zero)
        for step in range(4):
            optimizer.zero_grad()
            feed(model, gradients(SHAPES, hvd.rank(), step))
            if step == 1:
                model["first"].grad[0, 0] = torch.nan
            optimizer.step()
        stats = compressor.stats()
        assert (stats["local_steps_taken"], stats["local_steps_skipped"]) == (4, 1)
    finally:
        hvd.remove_process_set(zero)


def test_synchronize_parameters_ends_a_round_early():
    model = begin()
    optimizer, compressor = make(model, "ScaleCom", 4)
    run(optimizer, model, range(2))
    assert not same_on_all_ranks(model.values())
    optimizer.synchronize_parameters()
    assert same_on_all_ranks(model.values())
    optimizer.synchronize_parameters()  # nothing to do
    assert compressor.stats()["step"] == 1
    run(optimizer, model, range(2, 4))
    assert compressor.stats()["step"] == 2  # after step 4, as usual
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("more", [{}, {"clip_changes": 2, "outer": outer_sgd}], ids=["", "more"])
@pytest.mark.parametrize("compression", ["ScaleCom", "LocalTopK, 8 bits"])
def test_synchronize_parameters_where_a_script_evaluates(compression, more):
    """The first synchronisation under inference mode makes tensors that later ones write to."""
    model = begin()
    optimizer, compressor = make(model, compression, 4, overlap=1, **more)
    for steps in (range(2), range(2, 9)):
        run(optimizer, model, steps)
        with torch.inference_mode():
            compressor.state_dict()
            optimizer.synchronize_parameters()
        assert same_on_all_ranks(model.values())
    assert compressor.stats()["step"] == 4


def test_a_model_loaded_between_rounds_is_where_the_next_begins():
    model, fresh = begin(), begin()
    optimizer, compressor = make(model, COMPRESSIONS["ScaleCom"](dense=["*"]), 2)
    run(optimizer, model, range(2))
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(fresh[name])
    run(optimizer, model, range(2))
    other, _ = make(fresh, COMPRESSIONS["ScaleCom"](dense=["*"]), 2)
    run(other, fresh, range(2))
    assert all(torch.equal(model[name], fresh[name]) for name in SHAPES)


# Checkpoints.


def checkpoint(model, optimizer):
    file = io.BytesIO()
    values = {name: parameter.detach() for name, parameter in model.items()}
    torch.save([optimizer.compression.state_dict(), optimizer.state_dict(), values], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(compression, local_steps, saved, order, values=None, **more):
    """A new model and optimizer that load what was saved.

    order: which state is loaded first.
    """
    state, momentum, own = copy.deepcopy(saved)  # an optimizer keeps the tensors that it loads
    model = begin()
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_((values or own)[name])
    optimizer, compressor = make(model, compression, local_steps, momentum=MOMENTUM, **more)
    loads = {
        "residues": lambda: compressor.load_state_dict(state),
        "optimizer": lambda: optimizer.load_state_dict(momentum),
    }
    for what in order:
        loads[what]()
    return model, optimizer


@some_compressions
@pytest.mark.parametrize("at", [4, 6], ids=["after a synchronisation", "in the middle of a round"])
@pytest.mark.parametrize("overlap", [0, 3])
def test_resuming_is_bit_identical(compression, at, overlap):
    straight = begin()
    optimizer, _ = make(straight, compression, 4, momentum=MOMENTUM, overlap=overlap)
    run(optimizer, straight, range(at))
    saved = checkpoint(straight, optimizer)
    run(optimizer, straight, range(at, 13))
    for order in (("residues", "optimizer"), ("optimizer", "residues")):
        model, again = resume(compression, 4, saved, order, overlap=overlap)
        run(again, model, range(at, 13))
        assert all(torch.equal(model[name], straight[name]) for name in SHAPES)
        assert again.compression.stats()["local_steps_taken"] == 13


@pytest.mark.parametrize("compression", [*SOME, "ScaleCom, exact, beta"])
def test_one_rank_saves_while_averages_travel_and_others_wait_for_it(compression):
    """What other ranks still have to send of these averages is sent without their scripts."""
    straight = begin()
    run(make(straight, compression, 4, overlap=3)[0], straight, range(16))
    model = begin()
    optimizer, compressor = make(model, compression, 4, overlap=3)
    for at, steps in enumerate((range(4), range(4, 9), range(9, 16))):
        run(optimizer, model, steps)
        if hvd.rank() == at % hvd.size():
            compressor.state_dict()
        stock.barrier()
    assert all(torch.equal(model[name], straight[name]) for name in SHAPES)


@pytest.mark.parametrize("fragments", [1, 2])
def test_one_rank_saves_while_averages_travel_of_a_step_that_is_looked_at(fragments):
    """Ranks compare what they saw when all of them have taken the same step."""
    found = []
    for saves in (False, True):
        model = begin()
        compressor = hvd.ScaleCom(**SETTINGS, diagnostics=hvd.Diagnostics(1))
        optimizer, _ = make(model, compressor, 4, overlap=1, fragments=fragments)
        for step in range(13):
            run(optimizer, model, [step])
            if saves and hvd.rank() == step % hvd.size():
                compressor.state_dict()
            stock.barrier()
        found.append(compressor.stats()["diagnostics"])
    assert found[0] == found[1]
    assert found[0]["step"] == 2


def test_an_optimizers_state_is_loaded_while_averages_travel():
    """It does not concern the averages. One rank has waited for them, and others have not."""
    straight = begin()
    run(make(straight, "ScaleCom", 4, overlap=3)[0], straight, range(13))
    model = begin()
    optimizer, compressor = make(model, "ScaleCom", 4, overlap=3)
    run(optimizer, model, range(9))
    if hvd.rank() == 0:
        compressor.state_dict()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, model, range(9, 13))
    assert all(torch.equal(model[name], straight[name]) for name in SHAPES)


@pytest.mark.parametrize("compression", [*SOME, "RandomK"])
def test_ranks_drop_an_optimizer_at_different_times_while_averages_travel(compression):
    """What a rank still has to submit of these averages is submitted without its optimizer."""
    model = begin()
    optimizer, compressor = make(model, compression, 4, overlap=3)
    leader_of_the_second = 1
    run(optimizer, model, range(7 if hvd.rank() == leader_of_the_second else 8))
    if hvd.rank() != leader_of_the_second:
        if hvd.rank() == 0:
            del optimizer, compressor
            gc.collect()
        stock.barrier()
        wait_for_kept()
        return
    stock.barrier()
    run(optimizer, model, [7])
    compressor.state_dict()  # waits for what rank 0 has to send


def learn(optimizer, model, steps, bad=(), forwards=None):
    """Take steps with gradients that depend on the parameters.

    bad: steps with gradients that are not finite on odd ranks.
    forwards: gets the parameters at each forward.
    """
    for step in steps:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for name, grad in gradients(SHAPES, hvd.rank(), step).items():
            loss = (
                loss
                + (model[name] * torch.as_tensor(grad).to(model[name].dtype)).sum().float() / 4
                + model[name].square().sum().float()
            )
        if forwards is not None:
            forwards.append({name: parameter.detach().clone() for name, parameter in model.items()})
        (loss * (np.nan if step in bad and hvd.rank() % 2 else 0.25)).backward()
        optimizer.step()


def copy_into(model, values):
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(values[name])


ORDERS = {
    "state, broadcast": ("made", "state", "broadcast"),
    "broadcast, state": ("made", "broadcast", "state"),
    "state before all": ("state", "made", "model", "broadcast"),
    "state, model, broadcast": ("made", "state", "model", "evaluate", "broadcast"),
    "twice": ("made", "state", "model", "state", "broadcast", "model", "broadcast"),
}
KINDS = {
    "one kind": {},
    "half precision": {"first": torch.float16, "third": torch.float16},
}


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (kind, order)
        for kind in KINDS
        for order in list(ORDERS)[: 2 if kind != "one kind" else None]
    ],
)
def test_own_parameters_are_in_place_before_the_first_forward(kind, order):
    """They are in place in the middle of a round, although rank 0's model is loaded and broadcast.

    Scripts usually load it so. Odd ranks skip the first step.
    """
    dtypes = KINDS[kind]
    straight, seen = begin(dtypes=dtypes), []
    optimizer, _ = make(straight, "ScaleCom", 4, momentum=MOMENTUM)
    learn(optimizer, straight, range(6))
    state, momentum, own = checkpoint(straight, optimizer)
    learn(optimizer, straight, range(6, 13), bad=[6], forwards=seen)

    rank_0s = hvd.broadcast_object(own, root_rank=0)
    model, again, compressor = begin(dtypes=dtypes), None, COMPRESSIONS["ScaleCom"]()
    copy_into(model, rank_0s)
    for what in ORDERS[order]:
        if what == "made":
            again, _ = make(model, compressor, 4, momentum=MOMENTUM)
            again.load_state_dict(copy.deepcopy(momentum))
        elif what == "state":
            compressor.load_state_dict(copy.deepcopy(state))
        elif what == "model":
            copy_into(model, rank_0s)
        elif what == "evaluate":
            assert all(torch.equal(model[name], rank_0s[name]) for name in SHAPES)
        else:
            hvd.broadcast_parameters(model if hvd.rank() % 2 else list(model.items()), root_rank=0)
    assert all(torch.equal(model[name], own[name]) for name in SHAPES)
    resumed = []
    learn(again, model, range(6, 13), bad=[6], forwards=resumed)
    for step, (one, other) in enumerate(zip(seen, resumed, strict=True), 6):
        assert all(torch.equal(one[name], other[name]) for name in SHAPES), f"step {step}"
    assert all(torch.equal(model[name], straight[name]) for name in SHAPES)
    if hvd.rank() % 2:
        # the skipped step changed nothing
        assert all(torch.equal(resumed[0][name], resumed[1][name]) for name in SHAPES)
    assert not torch.equal(rank_0s["third"], own["third"]) or hvd.rank() == 0


@horovods_alone
@pytest.mark.parametrize("who", ["all", "one"])
def test_parameters_overwritten_after_the_state_was_loaded_are_refused_on_all_ranks(who):
    straight = begin()
    optimizer, _ = make(straight, "ScaleCom", 4, momentum=MOMENTUM)
    learn(optimizer, straight, range(6))
    saved = checkpoint(straight, optimizer)
    learn(optimizer, straight, range(6, 12))
    model, again = resume("ScaleCom", 4, saved, ("residues", "optimizer"))
    if who == "all":
        stock.broadcast_parameters(model, root_rank=0)
    elif hvd.rank() == 1:
        copy_into(model, begin())
    kept = {name: parameter.detach().clone() for name, parameter in model.items()}
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=(
                r"parameters of rank 1.*Load the compressor's state last, or call "
                r"broadcast_parameters of"
            ),
        ):
            learn(again, model, [6])
    assert all(torch.equal(model[name], kept[name]) for name in SHAPES)
    hvd.broadcast_parameters(model, root_rank=0)
    learn(again, model, range(6, 12))
    assert all(torch.equal(model[name], straight[name]) for name in SHAPES)


def test_a_broadcast_in_training_is_as_in_horovod():
    """Parameters are held only until the first step.

    Another model's broadcast does not affect them.
    """
    model, other = begin(), begin()
    optimizer, _ = make(model, "ScaleCom", 4)
    learn(optimizer, model, range(2))
    saved = checkpoint(model, optimizer)
    model, again = resume("ScaleCom", 4, saved, ("residues",))
    copy_into(model, begin())
    hvd.broadcast_parameters(other, root_rank=0)
    assert all(torch.equal(model[name], other[name]) for name in SHAPES)
    hvd.broadcast_parameters(model, root_rank=0)
    learn(again, model, [2])
    assert not same_on_all_ranks(model.values())
    hvd.broadcast_parameters(model, root_rank=0)
    assert same_on_all_ranks(model.values())


def test_who_has_no_state_gets_the_common_parameters_from_the_broadcast():
    straight = begin()
    optimizer, _ = make(straight, "ScaleCom", 4, momentum=MOMENTUM)
    learn(optimizer, straight, range(6))
    saved = checkpoint(straight, optimizer)
    common = saved[0]["local_steps"]["common"]
    model, again = resume(
        "ScaleCom", 4, saved, () if hvd.rank() == 1 else ("residues", "optimizer"), values=begin()
    )
    hvd.broadcast_parameters(model, root_rank=0)
    began = common if hvd.rank() == 1 else saved[2]
    assert all(torch.equal(model[name], began[name]) for name in SHAPES)
    learn(again, model, [6], bad=[6])
    assert hvd.rank() % 2 == 0 or all(torch.equal(model[name], began[name]) for name in SHAPES)
    learn(again, model, range(7, 12))
    assert same_on_all_ranks(model.values())


def test_a_newcomer_begins_from_the_common_parameters(caplog):
    """Rank 1 is new. The model that it loads is rank 0's own, in the middle of a round."""
    straight = begin()
    optimizer, _ = make(straight, "ScaleCom", 4, momentum=MOMENTUM)
    run(optimizer, straight, range(6))
    saved = checkpoint(straight, optimizer)
    common = saved[0]["local_steps"]["common"]
    values = hvd.broadcast_object(saved[2], root_rank=0)
    model, again = resume(
        "ScaleCom",
        4,
        saved,
        ("optimizer",) if hvd.rank() == 1 else ("residues", "optimizer"),
        values,
    )
    grads = gradients(SHAPES, hvd.rank(), 6)
    again.zero_grad()
    for state in again.state.values():
        state.clear()  # take a plain step
    feed(model, grads)
    again.step()
    began = common if hvd.rank() == 1 else saved[2]
    for name, parameter in model.items():
        torch.testing.assert_close(
            parameter.detach(), began[name] - LR * torch.as_tensor(grads[name]).to(parameter.dtype)
        )
    assert ("begins from rank 0's common parameters" in caplog.text) == (hvd.rank() == 1)
    run(again, model, range(7, 12))
    assert again.compression.stats()["local_steps_taken"] == 12
    assert same_on_all_ranks(model.values())


class Holder(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(f"the_{name}", value)


@horovods_alone
def test_an_elastic_state_keeps_a_round():
    """Commit in the middle of a round, go on, lose the progress, and come back.

    The result is as if nothing had been done since the commit.
    """
    from scalecom_hvd.torch import elastic

    def expected(steps):
        """Where plain SGD ends if everything is averaged."""
        sums = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for rank in range(hvd.size()):
            for step in steps:
                for name, grad in gradients(SHAPES, rank, step).items():
                    sums[name] += LR * grad / hvd.size()
        return {name: begin()[name].detach().numpy() - total for name, total in sums.items()}

    model = begin()
    optimizer, compressor = make(model, hvd.Compression.none, 4)
    run(optimizer, model, range(2))
    state = elastic.TorchState(model=Holder(model), optimizer=optimizer)
    state.save()
    for lost in (range(20, 22), range(20, 27)):  # also a round later
        run(optimizer, model, lost)
        state.restore()
        state.sync()  # all ranks get rank 0's model
    state.sync()  # other ranks came, and nothing was lost
    run(optimizer, model, range(2, 4))
    assert compressor.stats()["local_steps_taken"] == 4
    assert same_on_all_ranks(model.values())
    run(optimizer, model, range(4, 6))
    state.sync()  # with uncommitted steps
    run(optimizer, model, range(6, 8))
    assert same_on_all_ranks(model.values())
    for name, want in expected(range(8)).items():
        np.testing.assert_allclose(model[name].detach().numpy(), want, rtol=1e-3, atol=1e-4)


@horovods_alone
@pytest.mark.parametrize("who", ["newcomer", "committed less"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_ranks_of_an_elastic_run_have_their_parameters_when_they_come_together(who, order):
    """They have them before they compute a gradient, so a skipped step changes nothing.

    Horovod's own state does this.
    """
    model = begin()
    optimizer, _ = make(model, "ScaleCom", 4, momentum=MOMENTUM)

    def state_of(model, optimizer):
        kept = {"net": Holder(model), "sgd": optimizer, "residues": optimizer.compression}
        return stock.elastic.TorchState(
            **dict(kept.items() if order == "model first" else reversed(kept.items()))
        )

    state = state_of(model, optimizer)
    state.sync()  # an elastic run begins so
    learn(optimizer, model, range(2))
    state.save()
    learn(optimizer, model, range(2, 6))
    if who == "newcomer":
        if hvd.rank() == 1:
            model = begin()
            optimizer, _ = make(model, "ScaleCom", 4, momentum=MOMENTUM)
            state = state_of(model, optimizer)
        optimizer._local.exchange.agree_anew()  # a restart of Horovod does this
    else:
        if hvd.rank() != 1:
            state.save()
        learn(optimizer, model, range(6, 8))
        state.restore()
    own = {name: parameter.detach().clone() for name, parameter in model.items()}
    state.sync()
    common = hvd.broadcast_object(
        {name: x.detach() for name, x in optimizer._local.common.items()}, root_rank=0
    )
    began = common if hvd.rank() == 1 else own
    assert all(torch.equal(model[name], began[name]) for name in SHAPES)
    assert hvd.rank() == 1 or not torch.equal(own["third"], common["third"])
    momenta = [
        optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.values()
    ]
    learn(optimizer, model, [6], bad=[6])
    if hvd.rank() % 2:
        assert all(torch.equal(model[name], began[name]) for name in SHAPES)
        assert all(
            torch.equal(optimizer.state[p]["momentum_buffer"], m)
            for p, m in zip(model.values(), momenta, strict=True)
        )
    optimizer.synchronize_parameters()
    assert optimizer.compression.stats()["local_steps_taken"] == 7
    assert same_on_all_ranks(model.values())


@horovods_alone
def test_an_elastic_states_optimizer_stays_each_ranks_own():
    from scalecom_hvd.torch import elastic

    model = begin()
    optimizer, _ = make(model, "ScaleCom", 4, momentum=0.9)
    state = elastic.TorchState(optimizer=optimizer)
    state.sync()
    run(optimizer, model, range(4), skip=lambda step: ["third"] if hvd.rank() == 0 else [])
    buffers = {
        name: optimizer.state[parameter]["momentum_buffer"].clone()
        for name, parameter in model.items()
        if optimizer.state[parameter]
    }
    # with buffers that differ, ranks would broadcast different things
    assert ("third" in buffers) == (hvd.rank() != 0)
    state.sync()
    for name, buffer in buffers.items():
        assert torch.equal(optimizer.state[model[name]]["momentum_buffer"], buffer)


@horovods_alone
@pytest.mark.parametrize("local_steps", [None, 4])
def test_a_commit_is_restored_twice(local_steps):
    """Training after the first restore does not change the commit.

    An optimizer goes on with the very tensors that it loads.
    """
    model = begin()
    optimizer, _ = make(model, "ScaleCom", local_steps, momentum=MOMENTUM)
    state = stock.elastic.TorchState(model=Holder(model), optimizer=optimizer)
    learn(optimizer, model, range(2))
    state.save()
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.values()]
    for _ in range(2):
        learn(optimizer, model, range(2, 5))
        state.restore()
        assert all(
            torch.equal(optimizer.state[p]["momentum_buffer"], one)
            for p, one in zip(model.values(), momenta, strict=True)
        )


# Refusals.


def test_states_of_the_other_kind_are_refused():
    model, other = begin(), begin()
    local, ordinary = make(model, "ScaleCom", 4)[0], make(other, "ScaleCom", None)[0]
    run(local, model, range(2))
    run(ordinary, other, range(2))
    states = [copy.deepcopy(one.compression.state_dict()) for one in (local, ordinary)]
    with pytest.raises(
        ValueError,
        match=r"hold gradients, but this optimizer sends changes of parameters \(local_steps\)",
    ):
        local.compression.load_state_dict(states[1])
    with pytest.raises(
        ValueError,
        match=r"hold changes of parameters \(local_steps\), but this optimizer sends gradients",
    ):
        ordinary.compression.load_state_dict(states[0])
    early = COMPRESSIONS["ScaleCom"]()
    early.load_state_dict(states[0])
    with pytest.raises(ValueError, match="give local_steps as the saved run did"):
        make(begin(), early, None)
    each = copy.deepcopy(states[0])
    del each["local_steps"]["common"]
    with pytest.raises(ValueError, match="another kind of schedule"):
        make(begin(), "ScaleCom", 4)[1].load_state_dict(each)
    wrong = copy.deepcopy(states[0])
    del wrong["local_steps"]["local"]["bias"]
    with pytest.raises(ValueError, match=r"local steps \(local\) belong to another model"):
        make(begin(), "ScaleCom", 4)[1].load_state_dict(wrong)


@pytest.mark.parametrize("local_steps", [None, 2])
def test_what_averages_is_not_wrapped_again(local_steps):
    model = begin()
    optimizer, _ = make(model, "ScaleCom", local_steps)
    for again in (None, 4):
        with pytest.raises(
            TypeError, match="already averages gradients: wrap the optimizer that it was made from"
        ):
            make(model, "ScaleCom", again, made=optimizer)


@horovods_alone
def test_what_cannot_work_is_refused():
    def refused(message, compression=None, local_steps=4, kind=ValueError, **more):
        with pytest.raises(kind, match=message):
            make(begin(), compression or COMPRESSIONS["ScaleCom"](), local_steps, **more)

    refused(
        r"not through FP16Compressor. To send fewer bits, give hvd.ScaleCom\(bits=8\)",
        hvd.Compression.fp16,
    )
    refused("ScaleCom averages values, but Adasum does not", op=hvd.Adasum)
    refused("0 is less than one step", local_steps=0)
    for wrong in ("4", [2] * hvd.size()):
        refused("local_steps must be a number of steps", local_steps=wrong, kind=TypeError)


def test_ranks_that_differ_are_refused():
    model = begin()
    optimizer, _ = make(model, "ScaleCom", 4 + (hvd.rank() == 1))
    with pytest.raises(
        RuntimeError,
        match=r"settings differ.*local_steps is \[\[0, 4\]\] on rank 0 and \[\[0, 5\]\] on rank 1",
    ):
        run(optimizer, model, [0])
    model = begin()
    optimizer, _ = make(model, "ScaleCom", 4 if hvd.rank() == 1 else None)
    with pytest.raises(
        RuntimeError,
        match=r"settings differ.*local_steps is missing on rank 0 and \[\[0, 4\]\] on rank 1",
    ):
        run(optimizer, model, [0])
    model = begin()
    optimizer, _ = make(model, "ScaleCom", 4)
    with torch.no_grad():
        model["first"] += hvd.rank()
    with pytest.raises(
        RuntimeError,
        match="different parameters.*Call broadcast_parameters on all ranks before the first step",
    ):
        run(optimizer, model, [0])


def test_look_ahead_chooses_for_the_next_round():
    model = begin()
    optimizer, compressor = make(
        model, COMPRESSIONS["ScaleCom"](lookahead=True, leader="staggered"), 2
    )
    run(optimizer, model, range(12))
    assert compressor.stats()["step"] == 6
    assert same_on_all_ranks(model.values())
