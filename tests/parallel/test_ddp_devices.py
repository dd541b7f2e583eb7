"""What only a device with streams can show.

Run under torchrun with TESTS_DEVICE: see devices.py.
"""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from models import same_on_all_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import scalecom_hvd.ddp as ddp
from scalecom_hvd.exchange.exchange import Exchange
from scalecom_hvd.exchange.waves import Waves

pytestmark = pytest.mark.usefixtures("nu_is_open")

SETTINGS = {"rate": 5, "min_numel": 20, "bucket_bytes": 2000}
FORMS = {
    "the defaults": {},
    "32 bits": {"bits": 32},
    "look-ahead": {"lookahead": True},
    "staggered": {"leader": "staggered"},
    "local steps": {"options": {"local_steps": 3, "overlap": 1}, "steps": 10},
}
only_delayed = pytest.mark.skipif(DEVICE != "delayed", reason="asks that device for its waits")


def make_model(device):
    torch.manual_seed(1)
    with torch.device("cpu"):
        layers = [nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 4)]
    return nn.Sequential(*layers).to(device)


def loss_of(model, step, device):
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(8, 20, generator=random, device="cpu").to(device)
    return model(inputs).square().mean()


def with_hook(model, finds_unused=False, mesh=None, **settings):
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=0.002, find_unused_parameters=finds_unused
    )
    state = ddp.ScaleComState(wrapped, mesh=mesh, **{**SETTINGS, **settings})
    wrapped.register_comm_hook(state, ddp.scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wrapped, optimizer, state.compression


def with_optimizer(model, options=(), **settings):
    method = ddp.ScaleCom(**{**SETTINGS, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = model.named_parameters()
    return model, ddp.DistributedOptimizer(optimizer, named, method, **dict(options)), method


def train(make, device, steps=5, around=contextlib.nullcontext, **settings):
    """The parameters after each step, and the method."""
    model = make_model(device)
    called, optimizer, method = make(model, **settings)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(called, step, device)
        with around():
            loss.backward()
        optimizer.step()
        if step == steps - 1 and "local_steps" in settings.get("options", ()):
            optimizer.synchronize_parameters()
        seen.append(torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]))
    assert same_on_all_ranks(model.parameters())
    return seen, method


def assert_close(ours, expected):
    """The layers of a GPU round differently than those of a CPU."""
    tolerance = 0 if DEVICE == "delayed" else 1e-3
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["early", "late"])
def order(request):
    """Streams run ahead of each other, or behind each other."""
    if DEVICE == "delayed":
        import delayed

        delayed.set_delay(0.002, request.param)
        yield
        delayed.set_delay(0.005)
    else:
        yield


@pytest.mark.parametrize(
    ("form", "make"),
    [
        *(("the defaults", make) for make in (with_hook, with_optimizer)),
        *((form, with_hook) for form in ("32 bits", "staggered")),
        *((form, with_optimizer) for form in ("look-ahead", "local steps")),
    ],
)
def test_the_same_training_as_on_the_cpu(form, make, order):
    settings = FORMS[form]
    ours, method = train(make, DEVICE, **settings)
    expected, _ = train(make, "cpu", **settings)
    assert_close(ours, expected)
    assert {t.residue.device.type for t in method.residues.tensors.values()} == {DEVICE}


@pytest.mark.parametrize("settings", [{}, {"finds_unused": True}], ids=str)
def test_a_script_that_trains_on_a_stream_of_its_own(settings, order):
    stream = torch.Stream(device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        ours, _ = train(with_hook, DEVICE, **settings)
    expected, _ = train(with_hook, "cpu", **settings)
    assert_close(ours, expected)


@only_delayed
@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_hooks_wait_for_no_device(settings):
    import delayed

    train(with_optimizer, DEVICE, around=delayed.forbid_host_waits, **settings)


@only_delayed
def test_hooks_do_not_wait_for_a_loss_scale():
    import delayed

    model, scaler = make_model(DEVICE), torch.amp.GradScaler(DEVICE, init_scale=2.0**8)
    called, optimizer, method = with_optimizer(model, loss_scale=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(called, step, DEVICE))
        with delayed.forbid_host_waits():
            loss.backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert method.stats()["skipped_steps"] == 0
    assert same_on_all_ranks(model.parameters())


@only_delayed
def test_backwards_stream_does_not_wait_for_the_exchange():
    import delayed

    model = make_model(DEVICE)
    called, optimizer, _ = with_optimizer(model)
    opened = []
    for step in range(3):
        gate = threading.Event()
        if step:
            (own,) = optimizer._gradients.exchange.streams._streams
            delayed.enqueue(lambda gate=gate: opened.append(gate.wait(5)), own)
        loss_of(called, step, DEVICE).backward()
        torch.accelerator.current_stream().synchronize()
        gate.set()
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks(model.parameters())
    assert opened == [True, True], "backward waited"


@only_delayed
@pytest.mark.parametrize("kind", ["hook", "finds unused", "sharded", "nodes"])
def test_buckets_travel_while_backward_runs(kind, monkeypatch):
    """What ranks must know before they send is known early, or assumed."""
    import delayed

    model, seen = make_model(DEVICE), []
    sizes = (dist.get_world_size(), 1)
    mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=("replicate", "shard"))
    if kind == "sharded":
        for layer in [*model[::2], model]:
            fully_shard(layer, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method, named = ddp.ScaleCom(**SETTINGS), model.named_parameters()
        called, stepped = model, ddp.DistributedOptimizer(optimizer, named, method, mesh=mesh)
    elif kind == "nodes":
        called, stepped, _ = with_hook(model, mesh=mesh)
    else:
        called, stepped, _ = with_hook(model, finds_unused=kind == "finds unused")
    complete, finish = Waves.complete, Exchange._finish

    def watched_finish(exchange):
        begun = [step.has_begun and not step.has_more for step in exchange._waves.all]
        seen.append(len(begun) > 2 and all(begun) and delayed.host_waits() == waits)
        return finish(exchange)

    def watched_complete(steps, chosen):
        before = delayed.host_waits()
        complete(steps, chosen)
        assert delayed.host_waits() == before

    monkeypatch.setattr(Exchange, "_finish", watched_finish)
    monkeypatch.setattr(Waves, "complete", watched_complete)
    for step in range(5):
        stepped.zero_grad()
        loss = loss_of(called, step, DEVICE)
        torch.accelerator.synchronize()  # hooks may wait for what was enqueued before forward
        waits = delayed.host_waits()
        loss.backward()
        stepped.step()
    assert seen == [False, True, True, True, True]


@only_delayed
def test_a_change_without_a_trace_is_noticed_in_each_dtype():
    dtypes = {"float": torch.float32, "double": torch.float64}
    model = {n: torch.nn.Parameter(torch.ones(99, dtype=d).to(DEVICE)) for n, d in dtypes.items()}
    sgd = torch.optim.SGD(model.values(), lr=0.1)
    optimizer = ddp.DistributedOptimizer(sgd, model.items(), ddp.ScaleCom(**SETTINGS))
    for name in (None, "float", None, "double"):  # in the others nothing is under way yet
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in model.values()).backward()
        if name and dist.get_rank() == 0:
            model[name].grad.data.mul_(0.25)
        with pytest.raises(RuntimeError, match="changed") if name else contextlib.nullcontext():
            optimizer.step()


def test_all_buckets_travel_in_one_order():
    """A backend of streams matches collectives by their order, and its groups cost much."""
    model = make_model(DEVICE)
    _, optimizer, _ = with_optimizer(model)
    loss_of(model, 0, DEVICE).backward()
    optimizer.step()
    exchange = optimizer._gradients.exchange
    assert len(exchange.buckets) > 2
    if exchange.collectives.is_ordered:
        buckets, news = exchange._channels
        assert set(buckets._groups) == {"gloo", *exchange.collectives._backends.values()}
        assert set(news._groups) == {"gloo"}


@only_delayed
def test_a_group_that_has_no_backend_for_cpus():
    """init_process_group("nccl") makes such a group. The ranks' messages still travel by Gloo."""
    group = dist.new_group(backend="delayed:delayedccl")
    train(with_optimizer, DEVICE, 3, options={"process_group": group})


def test_a_group_without_a_backend_for_the_device_is_refused():
    group = dist.new_group(backend="cpu:gloo")
    with pytest.raises(ValueError, match=f"no backend .* serves {DEVICE}. Leave the backend out"):
        ddp.ScaleComState(make_model(DEVICE), process_group=group)
