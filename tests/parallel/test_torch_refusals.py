"""Every rank refuses what cannot work, with an error that says what to do instead."""

import horovod.torch as stock
import pytest
import torch
from models import feed, parameters, same_on_all_ranks, take_steps

import scalecom_hvd.torch as hvd
from scalecom_hvd import agreement
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives

SHAPES = {"first": (60, 50), "second": (5000,)}


def make(model=None, compression=None, names=None, **options):
    model = model or parameters(SHAPES)
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        names or model.items(),
        compression=compression or hvd.ScaleCom(rate=20),
        **options,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda _: {"op": hvd.Adasum}, r"Use op=hvd.Average \(the default\), or Adasum without"),
        (lambda _: {"op": hvd.Max}, "works with op=hvd.Average and op=hvd.Sum"),
        (
            lambda _: {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor not supported",
        ),
        (lambda _: {"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        (
            lambda _: {"compression": hvd.ScaleCom(dense=["frist"])},
            "dense names 'frist', which matches no parameter; the model has first",
        ),
        (
            lambda _: {"compression": hvd.ScaleCom(rates={"third.*": 5})},
            "rates names 'third.*'",
        ),
        (lambda _: {"groups": -1}, "groups should be"),
        (lambda _: {"groups": [["first"]]}, "groups must consist of torch.Tensor"),
        (lambda model: {"groups": [[model["first"]]] * 2}, "can only appear once"),
        (lambda _: {"names": list(SHAPES)}, "sequence of tuples"),
        (lambda model: {"names": [("same", p) for p in model.values()]}, "must be unique"),
        (lambda model: {"names": list(model.items())[:1]}, "were not named"),
    ],
)
def test_what_cannot_work(options, message):
    """The refusal leaves the parameters and the method usable."""
    model, method = parameters(SHAPES), hvd.ScaleCom(rate=20)
    with pytest.raises(ValueError, match=message):
        make(model, **{"compression": method, **options(model)})
    optimizer = make(model, method)
    assert optimizer.compression is method
    take_steps(optimizer, model, [0])
    assert same_on_all_ranks(model.values())


def test_complex_parameters():
    with pytest.raises(TypeError, match="Train it as two real parameters"):
        make({"wave": torch.nn.Parameter(torch.zeros(3000, dtype=torch.complex64))})


def test_groups_as_in_horovod():
    model = parameters(SHAPES)
    optimizer = make(model, groups=[[model["second"]]])
    take_steps(optimizer, model, [0])
    assert optimizer.compression.residues.buckets == [["second"], ["first"]]


@pytest.mark.parametrize("more", [{}, {"groups": 1}], ids=str)
def test_the_old_number_of_groups_counts_unless_groups_are_given(more):
    model = parameters(SHAPES)
    with pytest.warns(DeprecationWarning, match="num_groups has been replaced by groups"):
        optimizer = make(model, num_groups=2, **more)
    take_steps(optimizer, model, [0])
    assert len(optimizer.compression.residues.buckets) == more.get("groups", 2)


@pytest.mark.parametrize(
    "options",
    [{"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"process_set": hvd.ProcessSet([0])}],
    ids=str,
)
def test_a_transport_brings_its_ranks(options):
    with pytest.raises(ValueError, match="collectives= brings its own transport"):
        make(collectives=HorovodCollectives(), **options)


# What only rank 1 has, and how it is refused.
RATES = "settings differ between ranks.*rate is 20.0 on rank 0 and 40.0 on rank 1"
DTYPES = "tensors differ between ranks.*dtype.first is .*float32.* on rank 0 and .*bfloat16.* on"
VERSIONS = "version differ between ranks.* on rank 0 and 9.9 on rank 1"
SPARSE = "settings differ between ranks.*sparse_as_dense is False on rank 0 and True on rank 1"
NAMES = "tensors differ between ranks.*{} on rank 0 and {} on rank 1"
DIFFERENT = {
    "setting": ({"rate": 40}, RATES),
    "sparse_as_dense": ({"sparse_as_dense": True}, SPARSE),
    "shape": ({"second": (5001,)}, r"tensors differ .*shape.second is \[\[5000\].*\[\[5001\]"),
    "dtype": ({"dtype": torch.bfloat16}, DTYPES),
    "a parameter more": ({"third": (3000,)}, "tensors differ .*third is missing on rank 0"),
    "a parameter less": ({"second": None}, NAMES.format("second is .*", "missing")),
    "name": ({"first": None, "other": (60, 50)}, NAMES.format("name.first is .*", "missing")),
    "groups": ({"groups": 2}, "groups differ between ranks"),
    "version": ({}, VERSIONS),
}
OF_STOCK = {name: DIFFERENT[name] for name in ("setting", "dtype", "version")}
# Horovod's own error comes first.
OF_STOCK["shape"] = ({"second": (5001,)}, "Mismatched ALLREDUCE tensor shapes")


@pytest.mark.parametrize(
    ("face", "what", "changes", "message"),
    [
        (face, name, *case)
        for face, cases in ((hvd, DIFFERENT), (stock, OF_STOCK))
        for name, case in cases.items()
    ],
)
def test_one_rank_is_started_differently(face, what, changes, message, monkeypatch):
    """Names of parameters differ between the cases, because one rank may submit others."""
    changes = dict(changes) if hvd.rank() == 1 else {}
    if what == "version" and hvd.rank() == 1:
        monkeypatch.setattr(agreement, "__version__", "9.9")
    rate, dtype = changes.pop("rate", 20), changes.pop("dtype", torch.float32)
    options = {name: changes.pop(name) for name in ("sparse_as_dense",) if name in changes}
    if what == "groups":
        options["groups"] = changes.pop("groups", 1)
    shapes = {f"{what}.{name}": shape for name, shape in (SHAPES | changes).items() if shape}
    model = parameters(shapes, dtype)
    method = hvd.ScaleCom(rate=rate, **({} if face is hvd else {"named_parameters": model.items()}))
    sgd = torch.optim.SGD(model.values(), lr=0.1)
    optimizer = face.DistributedOptimizer(sgd, model.items(), compression=method, **options)
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
