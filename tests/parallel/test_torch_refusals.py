"""Every rank refuses what cannot work, with an error that says what to do instead."""

import horovod.torch as stock
import pytest
import torch
from models import feed, gradients, parameters, same_on_all_ranks

import scalecom_hvd.torch as hvd
from scalecom_hvd import agreement
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives, HorovodWork

SHAPES = {"first": (60, 50), "second": (5000,)}


def make(model=None, compression=None, **options):
    model = model or parameters(SHAPES)
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        model.items(),
        compression=compression or hvd.ScaleCom(rate=20),
        **options,
    )


def test_adasum():
    with pytest.raises(
        ValueError, match=r"Use op=hvd.Average \(the default\), or Adasum without compression"
    ):
        make(op=hvd.Adasum)


def test_other_operations():
    with pytest.raises(ValueError, match="works with op=hvd.Average and op=hvd.Sum"):
        make(op=hvd.Max)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported"):
        make(op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        make(backward_passes_per_step=0)


def test_settings_that_fit_no_parameter():
    with pytest.raises(
        ValueError, match="dense names 'frist', which matches no parameter; the model has first"
    ):
        make(compression=hvd.ScaleCom(dense=["frist"]))
    with pytest.raises(ValueError, match="rates names 'third.*'"):
        make(compression=hvd.ScaleCom(rates={"third.*": 5}))


def test_one_object_for_two_optimizers():
    shared = hvd.ScaleCom()
    make(compression=shared)
    with pytest.raises(ValueError, match="Make one for each"):
        make(compression=shared)


def test_complex_parameters():
    with pytest.raises(TypeError, match="Train it as two real parameters"):
        make({"wave": torch.nn.Parameter(torch.zeros(3000, dtype=torch.complex64))})


def test_groups_as_in_horovod():
    model = parameters(SHAPES)
    with pytest.raises(ValueError, match="groups should be"):
        make(model, groups=-1)
    with pytest.raises(ValueError, match="groups must consist of torch.Tensor"):
        make(model, groups=[["first"]])
    with pytest.raises(ValueError, match="can only appear once"):
        make(model, groups=[[model["first"]], [model["first"]]])
    optimizer = make(model, groups=[[model["second"]]])
    feed(model, gradients(SHAPES, hvd.rank(), 0))
    optimizer.step()
    assert optimizer.compression.residues.buckets == [["second"], ["first"]]


def start_differently(what, rank):
    """Return a model and an optimizer that differ in one thing on rank 1.

    Names differ between the cases (see below).
    """
    changed = rank == 1
    shapes = {f"{what}.{name}": shape for name, shape in SHAPES.items()}
    settings, options = {"rate": 20}, {}
    dtype = torch.float32
    if what == "setting":
        settings["rate"] = 40 if changed else 20
    elif what == "shape":
        shapes[f"{what}.second"] = (5001,) if changed else (5000,)
    elif what == "dtype":
        dtype = torch.bfloat16 if changed else torch.float32
    elif what == "a parameter more" and changed:
        shapes[f"{what}.third"] = (3000,)
    elif what == "a parameter less" and changed:
        del shapes[f"{what}.second"]
    elif what == "name" and changed:
        shapes = {"other": shapes.pop(f"{what}.first"), **shapes}
    elif what == "sparse_as_dense":
        options["sparse_as_dense"] = changed
    elif what == "groups":
        options["groups"] = 2 if changed else 1
    model = parameters(shapes, dtype)
    return model, settings, options


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("setting", "settings differ between ranks.*rate is 20.0 on rank 0 and 40.0 on rank 1"),
        (
            "sparse_as_dense",
            "settings differ between ranks.*sparse_as_dense is False on rank 0 and True on rank 1",
        ),
        ("shape", r"tensors differ between ranks.*shape.second is \[\[5000\].*\[\[5001\]"),
        (
            "dtype",
            "tensors differ between ranks.*dtype.first is .*float32.* on rank 0 and .*bfloat16.* "
            "on rank 1",
        ),
        ("a parameter more", "tensors differ between ranks.*third is missing on rank 0"),
        (
            "a parameter less",
            "tensors differ between ranks.*second is .* on rank 0 and missing on rank 1",
        ),
        ("name", "tensors differ between ranks.*name.first is .* on rank 0 and missing on rank 1"),
        ("groups", "groups differ between ranks"),
        ("version", "version differ between ranks.* on rank 0 and 9.9 on rank 1"),
    ],
)
def test_one_rank_is_started_differently(what, message, monkeypatch):
    if what == "version" and hvd.rank() == 1:
        monkeypatch.setattr(agreement, "__version__", "9.9")
    model, settings, options = start_differently(what, hvd.rank())
    optimizer = make(model, hvd.ScaleCom(**settings), **options)
    # One rank sends a sparse gradient differently, so use one. Its name is never used again.
    if what == "sparse_as_dense":
        rows = torch.nn.functional.embedding(
            torch.tensor([1, 2]), model[f"{what}.first"], sparse=True
        )
        (rows.sum() + model[f"{what}.second"].sum()).backward()
    else:
        feed(model, {n: p.detach().float().numpy() for n, p in model.items()})
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("setting", "settings differ between ranks.*rate is 20.0 on rank 0 and 40.0 on rank 1"),
        ("shape", "Mismatched ALLREDUCE tensor shapes"),  # Horovod's own error comes first
        (
            "dtype",
            "tensors differ between ranks.*dtype.first is .*float32.* on rank 0 and .*bfloat16.* "
            "on rank 1",
        ),
        ("version", "version differ between ranks.* on rank 0 and 9.9 on rank 1"),
    ],
)
def test_one_rank_is_started_differently_in_the_stock_optimizer(what, message, monkeypatch):
    if what == "version" and hvd.rank() == 1:
        monkeypatch.setattr(agreement, "__version__", "9.9")
    model, settings, _ = start_differently(what, hvd.rank())
    compressor = hvd.ScaleCom(named_parameters=model.items(), **settings)
    optimizer = stock.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=compressor
    )
    feed(model, {n: p.detach().float().numpy() for n, p in model.items()})
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_after_a_refused_step_residues_are_as_before(monkeypatch):
    """A step that fails leaves no trace. Once the cause is mended, training goes on from there."""
    model = parameters(SHAPES)
    optimizer = make(model)
    for step in range(3):
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
    before = {name: t.residue.clone() for name, t in optimizer.compression.residues.tensors.items()}
    wait, done = HorovodWork.wait, set()

    def fails_after_two(work):
        result = wait(work)
        done.add(work)
        if len(done) == 2:
            raise hvd.HorovodInternalError("a worker died")
        return result

    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(HorovodWork, "wait", fails_after_two)
        feed(model, gradients(SHAPES, hvd.rank(), 9))
        with pytest.raises(hvd.HorovodInternalError):
            optimizer.step()
    for name, tensor in optimizer.compression.residues.tensors.items():
        torch.testing.assert_close(tensor.residue, before[name], rtol=1e-5, atol=1e-5)
    optimizer.load_state_dict(optimizer.state_dict())  # what an elastic restore does
    for step in range(3, 6):
        optimizer.zero_grad()
        feed(model, gradients(SHAPES, hvd.rank(), step))
        optimizer.step()
    assert same_on_all_ranks(model.values())


def test_names_as_in_horovod():
    model = parameters(SHAPES)
    optimizer = torch.optim.SGD(model.values(), lr=0.1)
    compressor = hvd.ScaleCom()
    for names, message in (
        (list(model), "sequence of tuples"),
        ([("same", p) for p in model.values()], "must be unique"),
        (list(model.items())[:1], "were not named"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(optimizer, names, compression=compressor)
    assert (
        hvd.DistributedOptimizer(optimizer, model.items(), compression=compressor).compression
        is compressor
    )


def test_a_refusal_leaves_the_parameters_usable():
    model = parameters(SHAPES)
    with pytest.raises(ValueError, match="matches no parameter"):
        make(model, compression=hvd.ScaleCom(dense=["none"]))
    optimizer = make(model)
    feed(model, gradients(SHAPES, hvd.rank(), 0))
    optimizer.step()
    assert same_on_all_ranks(model.values())


def test_a_collective_that_failed_fails_the_same_way_when_asked_again():
    work = HorovodCollectives().all_reduce(torch.ones(3 + hvd.rank()), "of unequal shapes")
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="shape"):
            work.wait()


def test_threads_that_use_a_name_twice_are_told_so():
    collectives, mine = HorovodCollectives(), torch.ones(3)
    work = None
    if hvd.rank() == 0:
        work = collectives.all_reduce(mine, "twice")  # the other ranks have not submitted it yet
        with pytest.raises(RuntimeError, match="Train both models on one thread"):
            collectives.all_reduce(torch.ones(3), "twice")
    hvd.barrier()
    work = work or collectives.all_reduce(mine, "twice")
    assert work.wait().tolist() == [1, 1, 1]
