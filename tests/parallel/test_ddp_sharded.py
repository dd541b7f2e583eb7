"""FSDP2's sharded models: gradients are whole inside a node, and compressed between nodes.

Run under torchrun, as two nodes. The oracle is plain FSDP2 on the same mesh, which averages densely
between nodes. test_torch_nodes.py has what holds on every face. test_ddp_sharded_differential.py
draws clipping, loss scales and passes.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from devices import DEVICE
from faces import hvd
from models import OPTIMIZERS, SETTINGS, assert_groups_go, same_on_all_ranks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from scalecom_hvd import ddp

NODES = 2
NAMES = ("replicate", "shard")
_mesh = []


def make_mesh():
    """Make the mesh only once: each mesh makes process groups, which live until the end."""
    if not _mesh:
        shape = (NODES, dist.get_world_size() // NODES)
        _mesh.append(init_device_mesh(DEVICE, shape, mesh_dim_names=NAMES))
    return _mesh[0]


def local():
    return hvd.size() // NODES


# Besides models.py's.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
MADE = OPTIMIZERS | {way: functools.partial(ADAMW, **{way: True}) for way in ("foreach", "fused")}
BFLOAT16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Shards of 13 rows are uneven. `extra` may be left out, and `body` may be called twice."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(12, 13)
        self.body = nn.Sequential(nn.Linear(13, 13), nn.Tanh())
        self.extra = nn.Linear(13, 6)
        self.last = nn.Linear(13, 6, bias=False)

    def forward(self, x, twice=False, extra=True, checkpointed=False):
        x = torch.tanh(self.first(x))
        for _ in range(1 + twice):
            x = checkpoint(self.body, x, use_reentrant=False) if checkpointed else self.body(x)
        return self.last(x) + (self.extra(x) if extra else 0)


@pytest.fixture(params=[NAMES, "shard"], ids=["2-D", "1-D"])
def dimensions(request, monkeypatch):
    """The dimensions of the mesh that fully_shard is given."""
    monkeypatch.setattr("test_ddp_sharded.given", request.param)


given = NAMES
both_meshes = pytest.mark.usefixtures("dimensions")


def shard(model, mesh=None, **settings):
    mesh = make_mesh()[given] if mesh is None else mesh
    for module in (model.body, model.extra):
        fsdp.fully_shard(module, mesh=mesh, **settings)
    return fsdp.fully_shard(model, mesh=mesh, **settings)


def make(optimizer="adamw", compression=None, model=None, passes=1, of_fsdp=None, **settings):
    model = Net().double() if model is None else model
    shard(model, **(of_fsdp or {}))
    method = compression or ddp.ScaleCom(**{**SETTINGS, **settings})
    return model, wrap(model, optimizer, method, passes)


def wrap(model, optimizer, method, passes=1):
    return ddp.DistributedOptimizer(
        MADE[optimizer](model.parameters()),
        model.named_parameters(),
        compression=method,
        backward_passes_per_step=passes,
        mesh=make_mesh(),
    )


def of_sgd(model, names=None):
    """Make an optimizer of a model that is sharded already, or of some of its parameters."""
    named = [pair for pair in model.named_parameters() if names is None or pair[0] in names]
    optimizer = OPTIMIZERS["sgd"]([p for _, p in named])
    return ddp.DistributedOptimizer(optimizer, named, ddp.ScaleCom(rate=1), mesh=make_mesh())


def plain(optimizer="adamw", model=None, of_fsdp=None):
    model = Net().double() if model is None else model
    shard(model, make_mesh(), **(of_fsdp or {}))
    return model, MADE[optimizer](model.parameters())


def loss(model, rank, step, **how):
    torch.manual_seed(100 * step + rank)
    inputs = torch.randn(8, 12, dtype=next(model.parameters()).dtype)
    wanted = torch.sin(inputs[:, :6]) + rank * 0.1
    return (model(inputs, **how) - wanted).square().mean()


def take(model, optimizer, step, **how):
    optimizer.zero_grad()
    loss(model, dist.get_rank(), step, **how).backward()
    optimizer.step()


def whole(model):
    for module in (model, *model.children()):  # an evaluation leaves some whole until a backward
        getattr(module, "reshard", int)()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def assert_close(model, others, rtol=1e-9):
    found = whole(model)
    for name, p in others.items():
        assert torch.allclose(found[name], p, rtol=rtol, atol=1e-12), (dist.get_rank(), name)


@pytest.mark.skipif(DEVICE == "cpu", reason="they are on the host")
def test_parameters_that_are_offloaded_to_the_host():
    """Hooks run when FSDP2 may still be copying gradients to the host."""
    model, wrapped = make("momentum", of_fsdp={"offload_policy": fsdp.CPUOffloadPolicy()})
    other, others = make("momentum")
    for step in range(6):
        take(model, wrapped, step)
        take(other, others, step)
        assert all(p.grad.to_local().device.type == "cpu" for p in model.parameters())
    assert any(t.residue.any() for t in wrapped.compression.residues.tensors.values())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.to_local().cpu(), q.to_local().cpu(), rtol=1e-9, atol=1e-12)


CASES = {
    "as usual": {},
    "unused": {"how": {"extra": False}},
    "checkpointed": {"how": {"checkpointed": True}},
    "clipped": {"clip": 0.05},
    "mixed precision": {"of_fsdp": {"mp_policy": BFLOAT16}},
    "gathered twice": {"of_fsdp": {"reshard_after_forward": True}},
    "gathered from few ranks": {"of_fsdp": {"reshard_after_forward": 2}},
    "frozen beside trained ones": {"frozen": "first"},
    "1-D, as usual": {"given": "shard"},
}
LONG_CASES = {
    "called twice": {"how": {"twice": True}},
    "frozen": {"frozen": "body"},
    "foreach": {"optimizer": "foreach"},
    "fused": {"optimizer": "fused"},
    "whole in backward": {"of_fsdp": {"reshard_after_forward": False}},
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(c, id=name, marks=pytest.mark.long) for name, c in LONG_CASES.items()),
    ],
)
def test_with_everything_chosen_it_is_plain_fsdp2(case, monkeypatch):
    monkeypatch.setattr("test_ddp_sharded.given", case.get("given", NAMES))
    kind, of_fsdp = case.get("optimizer", "adamw"), case.get("of_fsdp", {})
    if of_fsdp.get("reshard_after_forward") == 2 and local() % 2:
        pytest.skip("PyTorch makes such groups on all ranks, and of an even number of them")
    models = [Net() if "mp_policy" in of_fsdp else Net().double() for _ in range(2)]
    if "frozen" in case:
        for model in models:
            getattr(model, case["frozen"]).requires_grad_(False)
    model, wrapped = make(kind, rate=1, model=models[0], of_fsdp=of_fsdp)
    other, optimizer = plain(kind, model=models[1], of_fsdp=of_fsdp)
    for step in range(4):
        for m, o in ((model, wrapped), (other, optimizer)):
            o.zero_grad()
            loss(m, dist.get_rank(), step, **(case.get("how", {}) if step != 2 else {})).backward()
            if "clip" in case:
                nn.utils.clip_grad_norm_(m.parameters(), case["clip"])
            o.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or p.grad.placements == p.placements
    assert_close(model, whole(other), rtol=1e-5 if "mp_policy" in of_fsdp else 1e-9)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in (ddp.LocalTopK, ddp.RandomK, ddp.ScaleCom)),
        (ddp.ScaleCom, {"lookahead": True}),
    ],
    ids=str,
)
def test_a_dynamic_graph_loses_nothing(method, settings):
    """What came into averages and did not come out is in residues, even after a skipped step.

    A module is called twice, or not at all, from one step to the next. In step 5 a gradient is not
    finite in one rank's shard, so all ranks skip the step. In step 8 all gradients are zeros, and
    only what waits is sent.
    """
    model, came, step = Net().double(), {}, 0
    mesh, spoilt, zeros = make_mesh(), 5, 8
    shard(model)

    def comes(p, name):
        if (name, step, dist.get_rank()) == ("last.weight", spoilt, 0):
            p.grad.to_local().fill_(float("inf"))
        came[name] = p.grad.to_local().clone().cpu()

    for name, p in model.named_parameters():
        # FSDP2 calls hooks in the order in which they were registered.
        p.register_post_accumulate_grad_hook(functools.partial(comes, name=name))
    wrapped = wrap(model, "momentum", method(rate=6, min_numel=20, **settings))
    shards = {name: p.to_local() for name, p in model.named_parameters()}
    left = {name: torch.zeros_like(own, device="cpu") for name, own in shards.items()}
    for step in range(12):
        came.clear()
        how = {"twice": step % 3 == 1, "extra": step % 4 != 2}
        wrapped.zero_grad()
        (loss(model, dist.get_rank(), step, **how) * (step != zeros)).backward()
        if step == spoilt:
            assert all(p.grad.to_local().isnan().all() for p in model.parameters())
            continue
        for name, p in model.named_parameters():
            if name in came:
                left[name] += came[name] - p.grad.to_local().cpu()
            else:
                assert p.grad is None, name
        assert step != zeros or any(bool(p.grad.to_local().any()) for p in model.parameters())
        wrapped.step()
    stats, tensors = wrapped.compression.stats(), wrapped.compression.residues.tensors
    assert (stats["step"], stats["skipped_steps"]) == (11, 1)
    for name, rest in left.items():
        total = rest.clone()
        if name in tensors:
            total -= (tensors[name].residue / tensors[name].beta).view(total.shape).cpu()
            assert rest.any()
        dist.all_reduce(total, group=mesh.get_group("replicate"))
        assert total.abs().max() < 1e-6 if total.numel() else True, name
    assert same_on_all_ranks(whole(model).values())


@pytest.mark.parametrize("settings", [{"rate": 1}, {"bits": 3, "rate": 8}], ids=str)
def test_nodes_that_leave_out_a_module_have_its_gradients_too(settings):
    """Else AdamW would step it on one node alone. A shard, or an average, may be all zeros."""
    node = make_mesh().get_local_rank("replicate")
    model, wrapped = make(**settings)
    for step in range(6):
        wrapped.zero_grad()
        loss(model, dist.get_rank(), step, extra=(step + node) % 3 == 1).backward()
        missing = torch.tensor([p.grad is None for p in model.parameters()], device="cpu")
        assert same_on_all_ranks([missing]), step
        assert missing.any() == (step % 3 == 2), step
        wrapped.step()
        assert same_on_all_ranks(whole(model).values()), step


@both_meshes
def test_models_that_were_sharded_one_by_one():
    """Without a common root, FSDP2 reduces gradients of some only when backward has ended."""
    models = [nn.ModuleList([Net().body, Net().body]).double() for _ in range(2)]
    for part in models[0]:
        fsdp.fully_shard(part, mesh=make_mesh()[given])
    wrapped = wrap(models[0], "sgd", ddp.ScaleCom(**SETTINGS | {"rate": 1}))
    plain_sgd = OPTIMIZERS["sgd"](models[1].parameters())

    def loss_of(model, step, rank):
        torch.manual_seed(100 * step + rank)
        inputs = torch.randn(4, 13, dtype=torch.float64)
        one, other = model
        uses_one = step % 2 or rank // local()  # the nodes differ in every other step
        return other(one(inputs) if uses_one else inputs).square().mean()

    for step in range(6):
        wrapped.zero_grad()
        loss_of(models[0], step, dist.get_rank()).backward()
        wrapped.step()
        plain_sgd.zero_grad()
        ranks = range(dist.get_world_size())
        (sum(loss_of(models[1], step, rank) for rank in ranks) / len(ranks)).backward()
        plain_sgd.step()
    assert wrapped.compression.stats()["step"] == 6
    assert_close(models[0], dict(models[1].named_parameters()))


@pytest.mark.parametrize(
    ("way", "dimensions"),
    [
        *((way, NAMES) for way in ("no sync", "all reduce", "passes", "sums of shards")),
        ("all reduce", "shard"),
    ],
    indirect=["dimensions"],
)
def test_microbatches(way, dimensions):
    """Gradients are exchanged once, after the last microbatch. FSDP2 sums whole ones, or shards."""
    if DEVICE == "delayed" and way != "no sync":
        pytest.skip("plain FSDP2 frees shards that another stream reads, which CUDA reuses later")
    model, wrapped = make("sgd", rate=1, passes=3 if way == "passes" else 1)
    other, optimizer = plain("sgd")
    for step in range(3):
        for m, o in ((model, wrapped), (other, optimizer)):
            o.zero_grad()
            for micro in range(3):
                m.set_requires_gradient_sync(way != "no sync" or micro == 2)
                m.set_requires_all_reduce(way != "all reduce" or micro == 2)
                loss(m, dist.get_rank(), 3 * step + micro).backward()
                waits = all(p.grad is None for p in m.parameters())
                if m is other or given == NAMES:
                    assert waits == (micro < 2 and way in ("no sync", "all reduce"))
            o.step()
    assert_close(model, whole(other))
    # Without the dimension between nodes, FSDP2 has no all-reduce to leave out.
    is_each = way == "sums of shards" or (way == "all reduce" and given != NAMES)
    assert wrapped.compression.stats()["step"] == (9 if is_each else 3)


def test_a_step_before_all_passes_averages_what_there_is():
    model, wrapped = make("sgd", rate=1, passes=2)
    other, optimizer = plain("sgd")
    take(model, wrapped, 0)
    take(other, optimizer, 0)
    wrapped.synchronize_parameters()
    assert_close(model, whole(other))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embedding(x))))


@both_meshes
@pytest.mark.parametrize("rate", [1, 5])
def test_tied_weights(rate):
    made = Tied().double(), Tied().double()
    for model, mesh in zip(made, (make_mesh()[given], make_mesh()), strict=True):
        fsdp.fully_shard(model.body, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
    model, other = made
    wrapped = wrap(model, "adamw", ddp.ScaleCom(rate=rate, min_numel=20))
    optimizer = OPTIMIZERS["adamw"](other.parameters())
    for step in range(3):
        for m, o in ((model, wrapped), (other, optimizer)):
            o.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            m(torch.randint(11, (8,))).square().mean().backward()
            o.step()
    assert model.head.weight is model.embedding.weight
    if rate == 1:
        assert_close(model, whole(other))
    assert same_on_all_ranks(whole(model).values())


@both_meshes
def test_a_distributed_checkpoint(shared_folder):
    """test_torch_nodes.py resumes from files of each rank."""

    def state_of(model, wrapped):
        residues = ddp.PerRank(wrapped.compression)
        return {"model": model.state_dict(), "optimizer": wrapped.state_dict(), "own": residues}

    model, wrapped = make(nu=None, lookahead=True)
    for step in range(6):
        take(model, wrapped, step)
        if step == 2:
            dcp.save(state_of(model, wrapped), checkpoint_id=shared_folder)
    again, second = make(nu=None, lookahead=True, model=Net(seed=5).double())
    take(again, second, 0)  # loading needs an optimizer state to load into
    state = state_of(again, second)
    dcp.load(state, checkpoint_id=shared_folder)
    second.load_state_dict(state["optimizer"])
    for step in range(3, 6):
        take(again, second, step)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def test_plain_fsdp2_goes_on_from_a_checkpoint(shared_folder):
    """Both give the model and the optimizer the same state."""
    model, wrapped = make(rate=1)
    for step in range(3):
        take(model, wrapped, step)
    saved = {"model": model.state_dict(), "optimizer": wrapped.state_dict()}
    dcp.save(saved, checkpoint_id=shared_folder)
    other, optimizer = plain(model=Net(seed=5).double())
    take(other, optimizer, 0)
    state = {"model": other.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=shared_folder)
    optimizer.load_state_dict(state["optimizer"])
    for step in range(3, 6):
        take(model, wrapped, step)
        take(other, optimizer, step)
    assert_close(model, whole(other))


def test_residues_of_another_shard_are_refused():
    model, wrapped = make()
    take(model, wrapped, 0)
    state = wrapped.compression.state_dict()
    place = make_mesh().get_local_rank("shard")
    assert state["shard"] == [place, local()]
    with pytest.raises(ValueError, match=f"of shard {place + 1} of 7 .* holds shard {place} of"):
        make()[1].compression.load_state_dict(state | {"shard": [place + 1, 7]})
    if local() > 1:
        whole_tensors = {key: value for key, value in state.items() if key != "shard"}
        with pytest.raises(ValueError, match="of shard 0 of 1"):
            make()[1].compression.load_state_dict(whole_tensors)


@both_meshes
def test_an_optimizer_that_is_made_anew_retires_the_old_one():
    model, old = make("sgd", rate=1)
    other, optimizer = plain("sgd")
    take(model, old, 0)
    take(other, optimizer, 0)
    new = of_sgd(model)
    for step in range(1, 4):
        take(model, new, step)
        take(other, optimizer, step)
    assert_close(model, whole(other))
    assert old.compression.stats()["step"] == 1


@both_meshes
@pytest.mark.parametrize(("rate", "passes"), [(1, 1), (5, 1), (5, 2)])
def test_a_backward_that_failed_leaves_nothing(rate, passes):
    """The backward fails on all ranks. FSDP2 itself begins anew after reset_iter_state()."""
    model, wrapped = make("sgd", rate=rate, passes=passes)
    other, optimizer = plain("sgd")
    if not hasattr(model, "reset_iter_state"):
        pytest.skip("this PyTorch cannot go on after a backward that failed")
    for step in range(5):
        for m, o in ((model, wrapped), (other, optimizer)):
            o.zero_grad()
            if step in (2, 3):
                for _ in range(passes - 1):
                    loss(m, dist.get_rank(), 49).backward()
                hook = m.first.weight.register_post_accumulate_grad_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    loss(m, dist.get_rank(), 50).backward()
                hook.remove()
                m.reset_iter_state()
                (o if step == 2 else m).zero_grad()  # the optimizer need not know
            for micro in range(passes):
                loss(m, dist.get_rank(), 10 * step + micro).backward()
            o.step()
    if rate == 1:
        assert_close(model, whole(other))
    assert wrapped.compression.stats()["step"] == 5
    assert same_on_all_ranks(whole(model).values())


def fail(*_):
    raise ZeroDivisionError


def test_reentrant_checkpointing_is_refused():
    model, wrapped = make()
    body = model.body

    class Reentrant(nn.Module):
        def forward(self, x):
            return checkpoint(body, x, use_reentrant=True)

    take(model, wrapped, 0)
    model.body = Reentrant()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        take(model, wrapped, 1)


def test_a_step_inside_backward_is_refused():
    """Its averages would come only when backward ends."""
    model, wrapped = make()
    model.first.weight.register_post_accumulate_grad_hook(lambda _: wrapped.step())
    with pytest.raises(RuntimeError, match=r"inside backward.*call step\(\) after backward"):
        take(model, wrapped, 0)


def test_different_weights_on_nodes_are_refused():
    node = make_mesh().get_local_rank("replicate")
    model, wrapped = make(model=Net(seed=node).double())
    with pytest.raises(RuntimeError, match="nodes 0 and 1 start from different parameters"):
        take(model, wrapped, 0)
    model, wrapped = make(model=Net(seed=node).double())
    with pytest.raises(ValueError, match=r"process_group=mesh.get_group\(.replicate.\)"):
        ddp.broadcast_parameters(model)
    ddp.broadcast_parameters(model, process_group=make_mesh().get_group("replicate"))
    take(model, wrapped, 0)
    assert same_on_all_ranks(whole(model).values())


def test_what_cannot_work_is_refused():
    mesh, model = make_mesh(), Net()

    def wrap(model, mesh=mesh, **more):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return ddp.DistributedOptimizer(sgd, model.named_parameters(), mesh=mesh, **more)

    with pytest.raises(TypeError, match="first.weight is not sharded"):
        wrap(model)
    shard(model)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        wrap(model, mesh=4)
    with pytest.raises(ValueError, match=r"must have the dimensions .*, not \('shard',\)"):
        wrap(model, mesh=mesh["shard"])
    with pytest.raises(TypeError, match=r"DistributedOptimizer\(..., mesh=mesh\)"):
        wrap(model, mesh=None)
    for setting in (
        {"op": dist.ReduceOp.SUM},
        {"sparse_as_dense": True},
        {"process_group": dist.group.WORLD},
    ):
        with pytest.raises(ValueError, match=f"{[*setting][0]}.* cannot be used with mesh="):
            wrap(model, **setting)
    of_fsdp1 = {"device_id": torch.device(DEVICE), "use_orig_params": True}
    with pytest.raises(TypeError, match="FSDP1"):
        wrap(fsdp.FullyShardedDataParallel(Net(), **of_fsdp1), mesh=None)


@pytest.mark.on_cpus
def test_groups_go_with_their_optimizer():
    def trained():
        model, optimizer = make()
        for step in range(2):
            take(model, optimizer, step)
        return optimizer  # FSDP2's models are in reference cycles

    assert_groups_go(trained)
