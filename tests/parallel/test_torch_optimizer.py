"""The drop-in DistributedOptimizer: Horovod's options, and what holds with all options.

test_torch_orders.py has orders of calls. Horovod's own optimizer is tested here only if a
promise of the drop-in holds there too.
"""

import functools

import horovod.torch as stock
import models
import numpy as np
import pytest
import torch
from made_up import ODD_SHAPES, SHAPES, came_in, gradients

import scalecom_hvd.torch as hvd

MODES = [{}, {"lookahead": True}, {"leader": "staggered", "bucket_bytes": 10_000}]
STOCK = "Horovod's own optimizer"
OPTIONS = [
    {},
    {"backward_passes_per_step": 3, "gradient_predivide_factor": 2.0},
    {"op": hvd.Sum, "groups": 2},
    {"groups": [["third", "first"], ["second"]], "sparse_as_dense": True},
]
SETTINGS = {"rate": 20, "min_numel": 100}


def make(model, mode=None, options=None, lr=1.0, **settings):
    """Return an optimizer and its ScaleCom. mode: one of MODES, or STOCK."""
    options = with_groups(model, options)
    if mode == STOCK:
        return models.wrap(stock, model, lr, options=options, **(SETTINGS | settings))
    return models.wrap(hvd, model, lr, options=options, **(SETTINGS | settings | (mode or {})))


def make_uncompressed(model, options=None, library=stock, compression=stock.Compression.none):
    sgd, options = torch.optim.SGD(model.values(), lr=1.0), with_groups(model, options)
    return library.DistributedOptimizer(sgd, model.items(), compression=compression, **options)


def with_groups(model, options):
    """Groups list names in OPTIONS, and parameters in Horovod."""
    options = dict(options or {})
    if isinstance(options.get("groups"), list):
        options["groups"] = [[model[name] for name in group] for group in options["groups"]]
    return options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [({"rate": 1}, np.float32), ({"rate": 1}, np.float64), ({"dense": ["*"]}, np.float32)],
    ids=str,
)
def test_what_is_sent_whole_equals_stock_horovod(options, mode, dtype):
    passes = options.get("backward_passes_per_step", 1)
    shapes, kind = SHAPES | ODD_SHAPES, torch.as_tensor(np.zeros(1, dtype)).dtype
    ours, theirs = models.parameters(shapes, kind), models.parameters(shapes, kind)
    how = {"passes": passes, "grads": functools.partial(gradients, dtype=dtype)}
    models.take_steps(make(ours, mode, options)[0], ours, range(6), **how)
    models.take_steps(make_uncompressed(theirs, options), theirs, range(6), **how)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert models.same_on_all_ranks(ours.values())


def skips_some(rank, step):
    """Each rank skips other layers."""
    names = list(SHAPES)
    return [names[(rank + step) % 4], names[(2 * rank + 1) % 4]]


@pytest.mark.parametrize("mode", [*MODES, STOCK], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, {"skips": skips_some}], ids=str)
def test_nothing_is_lost(options, mode):
    """The sum of everything sent, plus what waits, equals the sum of gradients.

    A missing gradient counts as zero, as in Horovod.
    """
    skips = {name: skip for name, skip in options.items() if name == "skips"}
    options = {name: option for name, option in options.items() if name != "skips"}
    steps, passes = 8, options.get("backward_passes_per_step", 1)
    model = models.parameters(SHAPES)
    optimizer, compressor = make(model, mode, options)
    models.take_steps(optimizer, model, range(steps), passes=passes, **skips)
    assert models.same_on_all_ranks(model.values())
    divisor = 1 if options.get("op") == hvd.Sum else hvd.size()
    came = came_in(range(hvd.size()), range(steps * passes), **skips)
    models.assert_nothing_is_lost(model, compressor, came, divisor)


@pytest.fixture
def process_sets():
    sets = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in range(2)]
    yield sets
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("mode", [{}, STOCK], ids=str)
@pytest.mark.parametrize("rate", [1, 20])
def test_process_sets_have_leaders_of_their_own(process_sets, mode, rate):
    mine = process_sets[hvd.rank() % 2]
    model = models.parameters(SHAPES)
    optimizer, compressor = make(model, mode, {"process_set": mine}, rate=rate, process_set=mine)
    models.take_steps(optimizer, model, range(6))
    models.assert_nothing_is_lost(
        model, compressor, came_in(mine.ranks, range(6)), mine.size(), mine
    )
    assert models.same_on_all_ranks(model.values(), process_set=mine)
    if hvd.size() >= 4:
        assert (compressor.stats()["bytes_offsets"] > 0) == (rate > 1)


@pytest.mark.parametrize("mode", [{}, STOCK], ids=str)
def test_two_models_in_one_process(mode):
    shapes = [{f"{i}.{name}": shape for name, shape in SHAPES.items()} for i in range(2)]
    pair = [models.parameters(each) for each in shapes]
    made = [make(model, mode, rate=rate) for model, rate in zip(pair, (20, 50), strict=True)]
    for step in range(6):
        # Both exchanges are under way at once. Their order differs between even and odd ranks.
        for i in (0, 1) if hvd.rank() % 2 else (1, 0):
            made[i][0].zero_grad()
            models.feed(pair[i], gradients(shapes[i], hvd.rank(), step))
        for optimizer, _ in made:
            optimizer.step()
    for model, (_, compressor), each in zip(pair, made, shapes, strict=True):
        assert models.same_on_all_ranks(model.values())
        came = came_in(range(hvd.size()), range(6), each)
        models.assert_nothing_is_lost(model, compressor, came, hvd.size())


def every_rank_looks_up(rank, step):
    return "sparse"


def one_rank_looks_nothing_up(rank, step):
    return "nothing" if step % hvd.size() == rank else "sparse"


def nobody_looks_up_in_step_2(rank, step):
    return "nothing" if step == 2 else "sparse"


def some_gradients_are_dense(rank, step):
    """Even the first gradient is sparse on one rank and dense on another."""
    return "sparse" if (rank + step) % 2 == 0 else "dense"


@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["", "as dense"])
@pytest.mark.parametrize(
    ("looks_up", "mode"),
    [(every_rank_looks_up, mode) for mode in (*MODES, STOCK)]
    + [(nobody_looks_up_in_step_2, STOCK)]
    + [(one_rank_looks_nothing_up, {}), (some_gradients_are_dense, {})],
)
def test_nothing_is_lost_of_sparse_gradients(looks_up, mode, sparse_as_dense):
    shapes = {"table": (300, 20), "weight": (5000,)}
    model = models.parameters(shapes)
    optimizer, compressor = make(model, mode, {"sparse_as_dense": sparse_as_dense})
    total = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            how = looks_up(rank, step)
            grads = gradients({"rows": (30, 20), "weight": (5000,)}, rank, step)
            rows = np.arange(30) * 2 + 7 * rank + step
            total["table"][rows] += grads["rows"] * (how != "nothing")
            total["weight"] += grads["weight"]
            if rank == hvd.rank():
                loss = (model["weight"] * torch.as_tensor(grads["weight"])).sum()
                if how != "nothing":
                    found = torch.nn.functional.embedding(
                        torch.as_tensor(rows), model["table"], sparse=how == "sparse"
                    )
                    loss = loss + (found * torch.as_tensor(grads["rows"])).sum()
                loss.backward()
        optimizer.step()
        assert model["table"].grad.is_sparse or looks_up is not every_rank_looks_up
    assert models.same_on_all_ranks(model.values())
    models.assert_nothing_is_lost(model, compressor, total, hvd.size())
    assert bool(compressor.residues.tensors["table"].residue.any()) == sparse_as_dense


def test_a_sparse_gradient_that_is_not_finite_is_no_step():
    model = models.parameters({"table": (300, 20), "weight": (5000,)})
    optimizer, compressor = make(model, rate=10)
    for step in range(4):
        optimizer.zero_grad()
        before = compressor.residues.tensors["weight"].residue.clone()
        factor = float("inf") if step == 2 and hvd.rank() == hvd.size() - 1 else 1.0
        rows = torch.nn.functional.embedding(torch.arange(30) + step, model["table"], sparse=True)
        rows.register_hook(lambda grad, factor=factor: grad * factor)
        own = torch.as_tensor(gradients({"weight": (5000,)}, hvd.rank(), step)["weight"])
        (rows.sum() + (model["weight"] * own).sum()).backward()
        optimizer.synchronize()
        assert model["weight"].grad.isnan().all() == (step == 2)
        if step == 2:
            after = compressor.residues.tensors["weight"].residue
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
    assert compressor.stats()["skipped_steps"] == 1


def test_a_model_of_sparse_embeddings_alone():
    """The first gradient may be dense, so its residue exists, but nothing is ever sent from it."""
    model = models.parameters({"table": (300, 20)})
    optimizer, compressor = make(model)
    for _ in range(2):
        optimizer.zero_grad()
        words = torch.tensor([hvd.rank(), 7])
        torch.nn.functional.embedding(words, model["table"], sparse=True).sum().backward()
        optimizer.step()
    assert compressor.stats()["step"] == 2
    assert models.same_on_all_ranks(model.values())


def channels_last(parameter, grad):
    (parameter * grad.to(memory_format=torch.channels_last)).sum().backward()
    assert not parameter.grad.is_contiguous()


def with_gaps(parameter, grad):
    memory = torch.full((*grad.shape[:-1], 2 * grad.shape[-1]), -7.0)
    memory[..., ::2] = grad
    parameter.grad = memory[..., ::2]


def all_the_same(parameter, grad):
    grad.fill_(hvd.rank() + 1.0)
    parameter.grad = grad[:1, :1, :1, :1].clone().expand(grad.shape)


def rows_the_same(parameter, grad):
    parameter.grad = grad[:1].clone().expand(grad.shape)
    grad.copy_(parameter.grad)


@pytest.mark.parametrize("give", [channels_last, with_gaps, all_the_same, rows_the_same])
def test_gradients_that_are_not_contiguous(give):
    shapes, layout = {"conv": (16, 8, 3, 4)}, torch.contiguous_format
    if give is channels_last:
        layout = torch.channels_last
    memory = torch.zeros(shapes["conv"]).to(memory_format=layout)
    one, plain = {"conv": torch.nn.Parameter(memory)}, models.parameters(shapes)
    optimizers = [make(model)[0] for model in (one, plain)]
    for step in range(5):
        grad = torch.as_tensor(gradients(shapes, hvd.rank(), step)["conv"])
        one["conv"].grad = None
        give(one["conv"], grad)
        plain["conv"].grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(one["conv"], plain["conv"], rtol=0, atol=0)
    assert one["conv"].any()


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_gradients_of_another_dtype_than_the_parameter(dtype, grad_dtype):
    parameter = torch.nn.Parameter(torch.zeros(40_000, dtype=dtype))
    parameter.grad_dtype = grad_dtype
    optimizer, _ = make({"w": parameter}, rate=4)
    for _ in range(3):
        parameter.grad = torch.ones(40_000, dtype=grad_dtype)
        optimizer.synchronize()
        assert parameter.grad.dtype == grad_dtype
        assert set(parameter.grad.tolist()) <= {0, 1, 2, 3}
        with optimizer.skip_synchronize():
            optimizer.step()


def test_zero_grad_between_backward_and_step_is_refused():
    model = models.parameters(SHAPES)
    optimizer, _ = make(model)
    models.feed(model, gradients(SHAPES, hvd.rank(), 1))
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward"):
        optimizer.zero_grad()
    optimizer.step()


NAMED = {
    "generator": (lambda net: net.named_parameters(), ["0.weight", "1.weight"]),
    "none": (lambda net: None, ["allreduce.noname.0.0", "allreduce.noname.1.0"]),
    "tied": (lambda net: net.named_parameters(remove_duplicate=False), ["0.weight"]),
}


@pytest.mark.parametrize("kind", NAMED)
def test_names(kind):
    names_of, compressed = NAMED[kind]
    net = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 60))
    if kind == "tied":
        net[1].weight = net[0].weight
    groups = [{"params": layer.parameters()} for layer in net] if kind == "none" else None
    sgd = torch.optim.SGD(groups or net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, names_of(net), compression=hvd.ScaleCom)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step * 10 + hvd.rank())
        net(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
    assert models.same_on_all_ranks(net.parameters())
    assert list(optimizer.compression.residues.tensors) == compressed


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_other_compressions_are_horovods_own(compression):
    model = models.parameters(SHAPES)
    optimizer = make_uncompressed(model, library=hvd, compression=compression)
    assert not hasattr(optimizer, "compression")
    models.take_steps(optimizer, model, range(2))
    assert models.same_on_all_ranks(model.values())


@pytest.mark.parametrize("library", [hvd, stock], ids=["drop-in", "stock"])
def test_residues_that_keep_growing_are_reported_once(library, caplog):
    """A gradient never changes, at a rate of 400.

    After 200 steps most elements have never been sent.
    """
    model = models.parameters({"weight": (100, 100)})
    optimizer, compressor = models.wrap(library, model, lr=0.1, rate=400, total_steps=310)
    for _ in range(310):
        optimizer.zero_grad()
        models.feed(model, {"weight": torch.ones(100, 100)})
        optimizer.step()
    logged = [r for r in caplog.records if (r.name, r.levelname) == ("scalecom_hvd", "WARNING")]
    first, second = (record.getMessage() for record in logged)
    assert "each element is sent" in first
    assert "residues keep growing" in second
    assert 100 < compressor.stats()["residue_ratio"] < 400
