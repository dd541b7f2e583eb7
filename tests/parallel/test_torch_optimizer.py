"""The drop-in DistributedOptimizer: Horovod's options, and what holds with all options."""

import itertools
import math
import time

import horovod.torch as stock
import numpy as np
import pytest
import torch
from models import (
    ODD_SHAPES,
    SHAPES,
    assert_nothing_is_lost,
    came_in,
    feed,
    gradients,
    parameters,
    same_on_all_ranks,
)

import scalecom_hvd.torch as hvd

MODES = [{}, {"lookahead": True}, {"leader": "staggered", "bucket_bytes": 10_000}]
STOCK = "Horovod's own optimizer"


def scalecom(mode, model, **settings):
    """A library with a DistributedOptimizer, and a ScaleCom for it.

    The library is this package with one of MODES, or Horovod itself.
    """
    if mode == STOCK:
        return stock, hvd.ScaleCom(model.items(), **settings)
    return hvd, hvd.ScaleCom(**(settings | mode))


def make(model, library=hvd, lr=1.0, compression=None, **options):
    """Make an optimizer. groups may list names."""
    compression = hvd.ScaleCom(rate=20, min_numel=100) if compression is None else compression
    if isinstance(options.get("groups"), list):
        options["groups"] = [[model[name] for name in group] for group in options["groups"]]
    return library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=lr),
        named_parameters=model.items(),
        compression=compression,
        **options,
    )


def run(
    optimizer,
    model,
    steps=6,
    shapes=SHAPES,
    passes=1,
    skips=lambda rank, step: [],
    dtype=np.float32,
):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            feed(
                model,
                gradients(shapes, hvd.rank(), step * passes + part, dtype),
                skip=skips(hvd.rank(), step),
            )
        optimizer.step()


OPTIONS = [
    {},
    {"backward_passes_per_step": 3, "gradient_predivide_factor": 2.0},
    {"op": hvd.Sum, "groups": 2},
    {"groups": [["third", "first"], ["second"]], "sparse_as_dense": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("mode", "dtype"), [({}, np.float32), ({}, np.float64), (STOCK, np.float32)], ids=str
)
def test_rate_one_equals_stock_horovod(options, mode, dtype):
    passes = options.get("backward_passes_per_step", 1)
    kind = torch.as_tensor(np.zeros(1, dtype)).dtype
    ours, theirs = parameters(SHAPES, kind), parameters(SHAPES, kind)
    library, compressor = scalecom(mode, ours, rate=1)
    run(make(ours, library, compression=compressor, **options), ours, passes=passes, dtype=dtype)
    run(
        make(theirs, stock, compression=stock.Compression.none, **options),
        theirs,
        passes=passes,
        dtype=dtype,
    )
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)
    assert same_on_all_ranks(ours.values())


def test_everything_dense_equals_stock_horovod():
    ours, theirs = parameters(ODD_SHAPES), parameters(ODD_SHAPES)
    run(make(ours, compression=hvd.ScaleCom(dense=["*"])), ours, shapes=ODD_SHAPES)
    run(make(theirs, stock, compression=stock.Compression.none), theirs, shapes=ODD_SHAPES)
    for name in ODD_SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [*MODES, STOCK], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_lost(options, mode):
    """The sum of everything sent, plus what waits, equals the sum of gradients."""
    steps, passes = 6, options.get("backward_passes_per_step", 1)
    model = parameters(SHAPES)
    library, compressor = scalecom(mode, model, rate=20, min_numel=100)
    run(make(model, library, compression=compressor, **options), model, steps, passes=passes)
    assert same_on_all_ranks(model.values())
    divisor = 1 if options.get("op") == hvd.Sum else hvd.size()
    assert_nothing_is_lost(
        model, compressor, came_in(range(hvd.size()), range(steps * passes)), divisor
    )


@pytest.mark.parametrize("rate", [1, 20])
@pytest.mark.parametrize("mode", [*MODES, STOCK], ids=str)
def test_each_rank_skips_other_layers(mode, rate):
    """A missing gradient counts as zero, as in Horovod."""
    names = list(SHAPES)

    def skips(rank, step):
        return [names[(rank + step) % 4], names[(2 * rank + 1) % 4]]

    model = parameters(SHAPES)
    library, compressor = scalecom(mode, model, rate=rate, min_numel=100)
    run(make(model, library, compression=compressor), model, 8, skips=skips)
    assert same_on_all_ranks(model.values())
    assert_nothing_is_lost(
        model, compressor, came_in(range(hvd.size()), range(8), skips=skips), hvd.size()
    )


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_hooks_fire_in_another_order_on_every_rank(mode):
    model = parameters({f"layer{i}": (50, 60) for i in range(8)})
    shapes = {name: p.shape for name, p in model.items()}
    optimizer = make(model, lr=0.1, compression=hvd.ScaleCom(rate=20, min_numel=100, **mode))
    for step in range(8):
        optimizer.zero_grad()
        grads = gradients(shapes, hvd.rank(), step)
        order = np.random.default_rng([hvd.rank(), step]).permutation(list(model))
        for name in order:  # each has its own backward, so this is the order
            (model[name] * torch.as_tensor(grads[name])).sum().backward()
        optimizer.step()
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_that_overflows_on_one_rank_never_happened(mode):
    """A gradient too large for a residue (config.largest_gradient) is as bad as one not finite."""
    shapes, overflowing = SHAPES, {0: np.inf, 3: np.nan, 4: 1e38, 7: -np.inf, 8: -1e38}
    model = parameters(shapes)
    optimizer = make(
        model,
        lr=0.1,
        compression=hvd.ScaleCom(rate=20, beta=0.5, min_numel=100, warmup_steps=2, **mode),
    )
    clean = parameters(shapes)
    untouched = make(
        clean,
        lr=0.1,
        compression=hvd.ScaleCom(rate=20, beta=0.5, min_numel=100, warmup_steps=2, **mode),
    )
    for step in range(12):
        grads = gradients(shapes, hvd.rank(), step)
        if step in overflowing:
            if hvd.rank() == step % hvd.size():
                grads["second"][1, 7] = overflowing[step]
        else:
            untouched.zero_grad()
            feed(clean, grads)
            untouched.step()
        optimizer.zero_grad()
        feed(model, grads)
        optimizer.synchronize()
        if step in overflowing:
            assert all(p.grad.isnan().all() for p in model.values())
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
    stats = optimizer.compression.stats()
    assert (stats["step"], stats["skipped_steps"]) == (7, 5)
    for name in shapes:
        torch.testing.assert_close(model[name], clean[name], rtol=1e-4, atol=1e-5)
        if name in optimizer.compression.residues.tensors:
            torch.testing.assert_close(
                optimizer.compression.residues.tensors[name].residue,
                untouched.compression.residues.tensors[name].residue,
                rtol=1e-4,
                atol=1e-4,
            )
    assert same_on_all_ranks(model.values())


@pytest.mark.parametrize("mode", [{}, STOCK], ids=str)
@pytest.mark.parametrize("rate", [1, 20])
def test_process_sets_have_leaders_of_their_own(process_sets, mode, rate):
    mine = process_sets[hvd.rank() % 2]
    model = parameters(SHAPES)
    library, compressor = scalecom(mode, model, rate=rate, min_numel=100, process_set=mine)
    run(make(model, library, compression=compressor, process_set=mine), model, 6)
    assert_nothing_is_lost(model, compressor, came_in(mine.ranks, range(6)), mine.size(), mine)
    everyone = hvd.allgather(
        torch.cat([p.detach().reshape(-1) for p in model.values()]).unsqueeze(0),
        name="members",
        process_set=mine,
    )
    assert all(torch.equal(row, everyone[0]) for row in everyone)
    if hvd.size() >= 4:
        assert (compressor.stats()["bytes_offsets"] > 0) == (rate > 1)


@pytest.fixture
def process_sets():
    sets = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in range(2)]
    yield sets
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("mode", [{}, STOCK], ids=str)
def test_two_models_in_one_process(mode):
    shapes = [{f"{i}.{name}": shape for name, shape in SHAPES.items()} for i in range(2)]
    models = [parameters(each) for each in shapes]
    made = [
        scalecom(mode, model, rate=rate, min_numel=100)
        for model, rate in zip(models, (20, 50), strict=True)
    ]
    optimizers = [
        make(model, library, compression=compressor)
        for model, (library, compressor) in zip(models, made, strict=True)
    ]
    for step in range(6):
        # Both exchanges are under way at once. Their order differs between even and odd ranks.
        for i in (0, 1) if hvd.rank() % 2 else (1, 0):
            optimizers[i].zero_grad()
            feed(models[i], gradients(shapes[i], hvd.rank(), step))
        for optimizer in optimizers:
            optimizer.step()
    for model, (_, compressor), each in zip(models, made, shapes, strict=True):
        assert same_on_all_ranks(model.values())
        assert_nothing_is_lost(
            model, compressor, came_in(range(hvd.size()), range(6), each), hvd.size()
        )


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_sparse_embeddings(mode, sparse_as_dense):
    def build():
        torch.manual_seed(3)
        return torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(300, 20, sparse=True), "head": torch.nn.Linear(20, 150)}
        )

    def train(library, compression):
        model = build()
        optimizer = library.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compression=compression,
            sparse_as_dense=sparse_as_dense,
        )
        for step in range(5):
            optimizer.zero_grad()
            model["head"](
                model["table"](torch.arange(30) + 10 * hvd.rank() + step)
            ).square().mean().backward()
            optimizer.step()
            assert model["table"].weight.grad.is_sparse
        assert same_on_all_ranks(model.parameters())
        return model

    train(hvd, hvd.ScaleCom(rate=10, **mode))
    ours, theirs = train(hvd, hvd.ScaleCom(rate=1, **mode)), train(stock, stock.Compression.none)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_sparse_embedding_that_one_rank_does_not_use():
    torch.manual_seed(3)
    table, head = torch.nn.Embedding(300, 20, sparse=True), torch.nn.Linear(20, 150)
    named = [
        *(("table." + n, p) for n, p in table.named_parameters()),
        *(("head." + n, p) for n, p in head.named_parameters()),
    ]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.1), named, compression=hvd.ScaleCom(rate=10)
    )
    for step in range(4):
        optimizer.zero_grad()
        unused = step % hvd.size() == hvd.rank()
        inputs = torch.ones(3, 20) if unused else table(torch.arange(3) + step)
        head(inputs).square().mean().backward()
        optimizer.step()
    assert same_on_all_ranks([p for _, p in named])


def test_layouts_that_are_not_contiguous():
    shapes = {"conv": (16, 8, 3, 3)}
    last = {
        "conv": torch.nn.Parameter(
            torch.zeros(shapes["conv"]).to(memory_format=torch.channels_last)
        )
    }
    plain = parameters(shapes)
    for model in (last, plain):
        optimizer = make(model, compression=hvd.ScaleCom(rate=20, min_numel=100))
        for step in range(5):
            optimizer.zero_grad()
            weights = torch.as_tensor(gradients(shapes, hvd.rank(), step)["conv"])
            (model["conv"] * weights.to(memory_format=torch.channels_last)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(last["conv"], plain["conv"], rtol=0, atol=0)


def steps_of_every_kind(library, compression, thaws):
    """Train in every way that Horovod's optimizer knows. Return the parameters after each step.

    thaws: whether parameters are added and thawed. Horovod averages nothing of these. The drop-in
        refuses them (test_torch_unlike_ranks.py).
    """
    model = parameters(SHAPES | {"frozen": (3000,), "late": (3000,)})
    model["frozen"].requires_grad_(False)
    trained = {name: parameter for name, parameter in model.items() if name != "late"}
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9),
        iter(trained.items()),
        compression=compression(trained),
    )
    seen, passes = [], itertools.count()

    def backward():
        feed(
            model,
            gradients(
                {name: tuple(p.shape) for name, p in model.items()}, hvd.rank(), next(passes)
            ),
        )

    def ends_step():
        seen.append({name: parameter.detach().clone() for name, parameter in model.items()})
        optimizer.zero_grad()

    for _ in range(2):  # gradients are kept in place
        backward()
        optimizer.step()
        seen.append({name: parameter.detach().clone() for name, parameter in model.items()})
        for parameter in model.values():
            if parameter.grad is not None:
                parameter.grad.zero_()
    backward()
    assert optimizer.step(lambda: torch.tensor(5.0)) == 5.0
    ends_step()
    backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    ends_step()
    for trains in (False, True):  # it is frozen, and then unfrozen
        model["third"].requires_grad_(trains)
        backward()
        optimizer.step()
        ends_step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.set_backward_passes_per_step(2)
    backward()
    backward()
    optimizer.step()
    ends_step()
    optimizer.set_backward_passes_per_step(1)
    if thaws:  # Horovod has no hook on either, so every rank uses its own gradient
        optimizer.add_param_group({"params": [model["late"]]})
        model["frozen"].requires_grad_(True)
    for _ in range(2):
        backward()
        optimizer.step()
        ends_step()
    return seen


@pytest.mark.parametrize("mode", [*MODES, STOCK], ids=str)
def test_steps_of_every_kind_are_as_in_stock_horovod(mode):
    theirs = steps_of_every_kind(stock, lambda _: stock.Compression.none, mode == STOCK)
    for rate in (1, 20):
        library = stock if mode == STOCK else hvd
        ours = steps_of_every_kind(
            library,
            lambda trained: scalecom(mode, trained, rate=rate, min_numel=100)[1],  # noqa: B023
            mode == STOCK,
        )
        for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
            for name in mine:
                if rate == 1 or name in ("frozen", "late"):
                    torch.testing.assert_close(
                        mine[name],
                        expected[name],
                        rtol=1e-5,
                        atol=1e-5,
                        msg=f"{name} at step {step}",
                    )
            assert same_on_all_ranks([mine[name] for name in SHAPES])
        late = () if mode == STOCK else ("frozen", "late")
        assert all(value.any() for name, value in ours[-1].items() if name not in late)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("mode", [{}, {"lookahead": True}, STOCK], ids=str)
def test_nothing_is_lost_of_sparse_gradients(mode, sparse_as_dense):
    shapes = {"table": (300, 20), "weight": (5000,)}
    model = parameters(shapes)
    library, compressor = scalecom(mode, model, rate=20, min_numel=100)
    optimizer = make(model, library, compression=compressor, sparse_as_dense=sparse_as_dense)
    total = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            grads = gradients({"rows": (30, 20), "weight": (5000,)}, rank, step)
            rows = np.arange(30) * 2 + 7 * rank + step
            total["table"][rows] += grads["rows"]
            total["weight"] += grads["weight"]
            if rank == hvd.rank():
                looked_up = torch.nn.functional.embedding(
                    torch.as_tensor(rows), model["table"], sparse=True
                )
                loss = (looked_up * torch.as_tensor(grads["rows"])).sum() + (
                    model["weight"] * torch.as_tensor(grads["weight"])
                ).sum()
                loss.backward()
        optimizer.step()
    assert same_on_all_ranks(model.values())
    assert_nothing_is_lost(model, compressor, total, hvd.size())
    assert bool(compressor.residues.tensors["table"].residue.any()) == sparse_as_dense


@pytest.mark.parametrize("mode", [{}, {"lookahead": True}, STOCK], ids=str)
def test_zeros_and_denormals(mode):
    """Tensors have every shape, and all are compressed.

    Nothing becomes NaN, steps count, and nothing is lost, however small it is.
    """
    model = parameters(ODD_SHAPES)
    # Any other beta would round numbers this small.
    library, compressor = scalecom(mode, model, rate=20, min_numel=0, beta=1.0)
    optimizer = make(model, library, compression=compressor)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in ODD_SHAPES.items()}
    for step in range(3):
        optimizer.zero_grad()
        feed(model, zeros)
        optimizer.step()
        assert compressor.stats()["step"] == step + 1
        assert compressor.stats()["residue_norm"] == 0
        assert not any(p.any() or p.grad.any() for p in model.values())
    assert compressor.residues.tensors.keys() == ODD_SHAPES.keys() - {"empty"}
    for step in range(3):
        optimizer.zero_grad()
        feed(
            model,
            {
                name: np.full(shape, (step + 1) * 1e-42, np.float32)
                for name, shape in ODD_SHAPES.items()
            },
        )
        optimizer.step()
    for name, parameter in model.items():
        tensor = compressor.residues.tensors.get(name)
        left = tensor.residue.view(tensor.shape) if tensor else torch.zeros_like(parameter)
        torch.testing.assert_close(
            left.double() - parameter.detach().double(),
            torch.full_like(parameter, 6e-42).double(),
            rtol=0,
            atol=1e-44,
        )
    assert same_on_all_ranks(model.values())


def test_zero_grad_between_backward_and_step_is_refused():
    model = parameters(SHAPES)
    optimizer = make(model)
    feed(model, gradients(SHAPES, hvd.rank(), 1))
    with pytest.raises(
        AssertionError, match="optimizer.zero_grad\\(\\) was called after loss.backward"
    ):
        optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("named", ["generator", "none"])
def test_names_from_a_generator_or_none(named):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(60, 70), torch.nn.Linear(70, 30))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        net.named_parameters() if named == "generator" else None,
        compression=hvd.ScaleCom,
    )
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step * 10 + hvd.rank())
        net(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
    assert same_on_all_ranks(net.parameters())
    assert list(optimizer.compression.residues.tensors) == (
        ["0.weight", "1.weight"]
        if named == "generator"
        else ["allreduce.noname.0.0", "allreduce.noname.0.2"]
    )


def test_broadcast_optimizer_state_and_state_dict():
    model = parameters(SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1 + hvd.rank(), momentum=0.9),
        model.items(),
        compression=hvd.ScaleCom(rate=20),
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    run(optimizer, model, 3)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, model, 3)
    assert same_on_all_ranks(model.values())


def test_other_compressions_are_horovods_own():
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model = parameters(SHAPES)
        optimizer = make(model, compression=compression)
        assert not hasattr(optimizer, "_gradients")
        run(optimizer, model, 2)
        assert same_on_all_ranks(model.values())


def test_stats_count_what_is_sent():
    model = parameters(SHAPES)
    optimizer = make(model, compression=hvd.ScaleCom(rate=20, bits=32, min_numel=100))
    run(optimizer, model, 3)
    stats = optimizer.compression.stats()
    k = 3000 // 20 + 3000 // 20 + 5000 // 20
    assert stats["bytes_offsets"] == k
    assert stats["bytes_values"] == 4 * k
    # the small tensor, plus the count of workers with non-finite gradients
    assert stats["bytes_dense"] == 4 * (60 + 1)
    n = hvd.size()
    assert stats["bytes_traffic"] == round((n - 1) / n * (k + 2 * (4 * k + 4 * 61)))
    assert stats["rate"] == pytest.approx(11060 / (k + 60))
    assert stats["leader"] == 2 % n
    assert stats["collectives"] == 2
    assert stats["residue_norm"] > 0


def test_a_sparse_gradient_that_is_not_finite_is_no_step():
    torch.manual_seed(3)
    net = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(300, 20, sparse=True), "head": torch.nn.Linear(20, 150)}
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        net.named_parameters(),
        compression=hvd.ScaleCom(rate=10),
    )
    for step in range(4):
        optimizer.zero_grad()
        rows = net["table"](torch.arange(30) + step)
        if step == 2 and hvd.rank() == hvd.size() - 1:
            rows.register_hook(lambda grad: grad * float("inf"))
        before = optimizer.compression.residues.tensors["head.weight"].residue.clone()
        net["head"](rows).square().mean().backward()
        optimizer.synchronize()
        assert net["head"].weight.grad.isnan().all() == (step == 2)
        if step == 2:
            torch.testing.assert_close(
                optimizer.compression.residues.tensors["head.weight"].residue,
                before,
                rtol=1e-5,
                atol=1e-6,
            )
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert optimizer.compression.stats()["skipped_steps"] == 1


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_nameless_collectives_between_backward_and_step(mode):
    """How many collectives the exchange has submitted by then differs between ranks.

    Horovod would use that number to name this collective.
    """
    model = parameters({f"layer{i}": (40, 50) for i in range(10)})
    shapes = {name: p.shape for name, p in model.items()}
    optimizer = make(
        model,
        lr=0.1,
        compression=hvd.ScaleCom(**({"rate": 16, "min_numel": 100, "bucket_bytes": 10_000} | mode)),
    )
    for step in range(20):
        time.sleep(0.002 * hvd.rank() * (step % 3))
        optimizer.zero_grad()
        feed(model, gradients(shapes, hvd.rank(), step))
        assert hvd.allreduce(torch.tensor(float(hvd.rank()))) == (hvd.size() - 1) / 2
        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
        optimizer.step()


def test_gradients_with_gaps_or_repeats_in_memory():
    for strides in ("every other", "all the same"):
        model = parameters({"w": (64, 64)})
        optimizer = make(model, compression=hvd.ScaleCom(rate=4, min_numel=1))
        for step in range(3):
            if strides == "every other":
                memory = torch.full((64, 128), -7.0)
                memory[:, ::2] = torch.as_tensor(gradients({"w": (64, 64)}, hvd.rank(), step)["w"])
                model["w"].grad = memory[:, ::2]
            else:
                model["w"].grad = torch.autograd.grad(model["w"].sum(), model["w"])[0]
                assert model["w"].grad.stride() == (0, 0)
            optimizer.step()
        tensor = optimizer.compression.residues.tensors["w"]
        left = hvd.allreduce(tensor.residue.view(64, 64) / tensor.beta, name="left.gaps")
        if strides == "every other":
            came = (
                sum(
                    gradients({"w": (64, 64)}, r, s)["w"]
                    for r in range(hvd.size())
                    for s in range(3)
                )
                / hvd.size()
            )
        else:
            came = np.full((64, 64), 3.0)
        np.testing.assert_allclose((left - model["w"].detach()).numpy(), came, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_gradients_of_another_dtype_than_the_parameter(dtype, grad_dtype):
    parameter = torch.nn.Parameter(torch.zeros(40_000, dtype=dtype))
    parameter.grad_dtype = grad_dtype
    optimizer = make({"w": parameter}, compression=hvd.ScaleCom(rate=4, min_numel=100))
    for _ in range(3):
        parameter.grad = torch.ones(40_000, dtype=grad_dtype)
        optimizer.synchronize()
        assert parameter.grad.dtype == grad_dtype
        assert set(parameter.grad.tolist()) <= {0, 1, 2, 3}
        with optimizer.skip_synchronize():
            optimizer.step()


def test_the_first_gradient_is_sparse_on_one_rank_and_dense_on_another():
    shapes = {"table": (50, 8), "w": (5000,)}
    model = parameters(shapes)
    optimizer = make(model, compression=hvd.ScaleCom(rate=10))
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.nn.functional.embedding(
            torch.tensor([1, 3 + hvd.rank()]), model["table"], sparse=(hvd.rank() + step) % 2 == 0
        )
        (rows.sum() + model["w"].sum()).backward()
        optimizer.step()
        expected = torch.zeros(50)
        expected[1] = step + 1
        expected[3 : 3 + hvd.size()] = (step + 1) / hvd.size()
        torch.testing.assert_close(-model["table"].detach(), expected.unsqueeze(1).expand(50, 8))


def test_tied_parameters_are_sent_once():
    net = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(64, 64, bias=False), "b": torch.nn.Linear(64, 64, bias=False)}
    )
    net["b"].weight = net["a"].weight
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        net.named_parameters(remove_duplicate=False),
        compression=hvd.ScaleCom(rate=4),
    )
    net["b"](net["a"](torch.ones(2, 64))).sum().backward()
    optimizer.step()
    assert list(optimizer.compression.residues.tensors) == ["a.weight"]
    # 1024 integers, each in log2(2 * 7 * n + 1) bits of a 32-bit word
    words = math.ceil(1024 / (32 // math.ceil(math.log2(14 * hvd.size() + 1))))
    assert optimizer.compression.stats()["bytes_values"] == 4 * words


def test_look_ahead_with_nothing_to_compress():
    model = parameters({"small": (10,)})
    optimizer = make(model, compression=hvd.ScaleCom(lookahead=True))
    run(optimizer, model, 3, shapes={"small": (10,)})
    assert same_on_all_ranks(model.values())
    assert optimizer.compression.stats()["collectives"] == 1


@pytest.mark.parametrize("library", [hvd, stock], ids=["drop-in", "stock"])
def test_residues_that_keep_growing_are_reported_once(library, caplog):
    """A gradient never changes, at a rate of 400.

    After 200 steps most elements have never been sent.
    """
    model = {"weight": torch.nn.Parameter(torch.zeros(100, 100))}
    compressor = hvd.ScaleCom(
        model.items() if library is stock else None, rate=400, total_steps=310
    )
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.values(), 0.1), model.items(), compression=compressor
    )
    for _ in range(310):
        optimizer.zero_grad()
        feed(model, {"weight": torch.ones(100, 100)})
        optimizer.step()
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name == "scalecom_hvd" and record.levelname == "WARNING"
    ]
    assert [("each element is sent" in m, "residues keep growing" in m) for m in messages] == [
        (True, False),
        (False, True),
    ]
    assert 100 < compressor.stats()["residue_ratio"] < 400


def test_a_model_of_sparse_embeddings_alone():
    """The first gradient may be dense, so its residue exists, but nothing is ever sent from it."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(300, 20, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), 0.1),
        embedding.named_parameters(),
        compression=hvd.ScaleCom(rate=20),
    )
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([hvd.rank(), 7])).sum().backward()
        optimizer.step()
    assert optimizer.compression.stats()["step"] == 2
    assert same_on_all_ranks([embedding.weight])
