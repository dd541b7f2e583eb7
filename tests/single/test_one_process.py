"""Tests that need no second rank."""

import contextlib
import inspect
import math

import horovod.torch as horovod
import pytest
import torch
from horovod.torch import mpi_ops
from simulated import as_tensors, assert_same, made_up, simulate

import scalecom_hvd.torch as hvd
from scalecom_hvd.ddp import ScaleComState
from scalecom_hvd.exchange.local.local_steps import LocalSteps
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.missing import TORCHS_ALONE
from scalecom_hvd.torch.collective_names import named_collectives
from scalecom_hvd.torch.horovod_collectives import restarts


def test_it_is_horovod_torch_and_more():
    for name in dir(horovod):
        value = getattr(horovod, name)
        if not name.startswith("_") and name not in (
            "DistributedOptimizer",
            "broadcast_parameters",
            "join",
            "optimizer",
            "elastic",
        ):
            ours = getattr(hvd, name)
            assert ours is value or inspect.signature(ours) == inspect.signature(value), name
    assert all(
        getattr(hvd.elastic, name) is getattr(horovod.elastic, name)
        for name in horovod.elastic.__all__
    )
    assert hvd.DistributedOptimizer is not horovod.DistributedOptimizer
    assert {"ScaleCom", "ScaleComConfig", "diloco", "allreduce", "elastic"} <= set(hvd.__all__)


def test_one_process_trains_as_without_horovod():
    hvd.init()
    torch.manual_seed(0)
    ours, plain = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
    plain.load_state_dict(ours.state_dict())
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.1),
            ours.named_parameters(),
            compression=hvd.ScaleCom,
        ),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    ]
    for _ in range(3):
        inputs = torch.randn(8, 100)
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.weight, plain.weight)
    assert optimizers[0].compression.stats()["residue_norm"] == 0


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("deepspeed.runtime.zero.stage3", torch.optim.SGD),
        ("megatron.core.optimizer.distrib_optimizer", torch.optim.SGD),
        ("deepspeed.runtime.engine", torch.nn.Linear),
        ("megatron.core.distributed.distributed_data_parallel", torch.nn.Linear),
    ],
)
def test_what_averages_itself_is_refused(module, kind):
    hvd.init()
    engine = type("Engine", (kind,), {"__module__": module})
    with pytest.raises(TypeError, match=f"{module}.Engine averages gradients itself"):
        if kind is torch.optim.SGD:
            sgd = engine(torch.nn.Linear(3, 3).parameters(), lr=0.1)
            hvd.DistributedOptimizer(sgd, compression=hvd.ScaleCom)
        else:
            ScaleComState(engine(3, 3))
    adam = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    hvd.DistributedOptimizer(adam(torch.nn.Linear(3, 3).parameters()), compression=hvd.ScaleCom)


def test_settings_of_the_object(monkeypatch):
    monkeypatch.setenv("SCALECOM_RATE", "50")
    assert hvd.ScaleCom().config.rate == 50
    assert hvd.ScaleCom(rate=20).config.rate == 20
    config = hvd.ScaleCom(config=hvd.ScaleComConfig(rate=30), beta=0.1).config
    assert config == hvd.ScaleComConfig(rate=30, bits=4, beta=0.1, nu=1)
    with pytest.raises(ValueError, match="did you mean beta"):
        hvd.ScaleCom(betta=0.1)
    with pytest.raises(TypeError, match="a GradScaler, or a callable|GradScaler or a callable"):
        hvd.ScaleCom(loss_scale=65536)
    assert hvd.ScaleCom(loss_scale=torch.amp.GradScaler("cpu", init_scale=8.0)).loss_scale() == 8.0


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_loss_scale_by_which_one_cannot_divide_is_refused(scale):
    simulation = simulate(2, {"weight": (100,)}, loss_scale=lambda: scale, min_numel=1)
    with pytest.raises(ValueError, match="loss_scale= must give a finite number above 0"):
        simulation.step([{"weight": torch.ones(100)} for _ in range(2)])


def test_the_stats_before_training():
    assert hvd.ScaleCom().stats() == {
        "step": 0,
        "skipped_steps": 0,
        "residue_norm": 0.0,
        "residue_ratio": None,
        "outliers": 0,
    }


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("numel", [3000, 3])
def test_parameters_that_are_no_real_numbers_are_refused(dtype, numel):
    """This includes small ones: Horovod cannot average them uncompressed either."""
    parameters = {"weight": torch.zeros(3000), "table": torch.zeros(numel, dtype=dtype)}
    with pytest.raises(
        TypeError,
        match=(f"table has dtype {dtype}, which ScaleCom cannot average.*leave it out of"),
    ):
        Residues(hvd.ScaleComConfig()).attach(parameters)


WRONG_OFFSETS = {
    "beyond its lane": ("lanes", 64, 1),  # the last lane has one element
    "beyond all lanes": ("lanes", 3, 100),
    "a negative position": ("exact", 0, -1),
    "beyond the tensor": ("exact", 64, 6401),
    "a position twice": ("exact", 3, 2),
}


@pytest.mark.parametrize("loaded_first", [False, True])
@pytest.mark.parametrize("case", WRONG_OFFSETS)
def test_offsets_that_are_damaged_are_refused(case, loaded_first):
    """The damage may be the same on all ranks. Comparing ranks would not find it then."""
    selection, place, value = WRONG_OFFSETS[case]
    shapes = {"weight": (6401,)}
    settings = {"bits": 32, "lookahead": True, "selection": selection, "dense": ()}

    def load(method, state):
        if loaded_first:
            method.load_state_dict(state)
        simulate(1, shapes, compression=lambda **_: method)
        if not loaded_first:
            method.load_state_dict(state)
        return method.state_dict()

    trained = simulate(1, shapes, **settings)
    trained.step(as_tensors(made_up(1, 0, shapes)))
    state = trained.compressors[0].state_dict()
    offsets = state["offsets"]["weight"]
    offsets.copy_(torch.arange(65) * (selection == "exact"))
    assert_same(load(hvd.ScaleCom(**settings), state)["offsets"], state["offsets"])
    offsets[place] = value
    method = hvd.ScaleCom(**settings)
    message = "look-ahead's offsets of weight are damaged.*Load the state of another step, or go on"
    with pytest.raises(ValueError, match=message):
        load(method, state)
    if not loaded_first:
        assert method.residues.step == 0
        assert "offsets" not in method.state_dict()


@pytest.mark.parametrize("wrong", [[1.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_scales_that_are_damaged_are_refused(wrong):
    shapes = {"weight": (6401,)}
    trained = simulate(1, shapes, bits=3, lookahead=True)
    trained.step(as_tensors(made_up(1, 0, shapes)))
    (method,) = trained.compressors
    state = method.state_dict()
    method.load_state_dict(state)
    state["method_state"]["tensors"]["scales"]["weight"] = torch.tensor(wrong)
    with pytest.raises(ValueError, match="look-ahead's scales of weight belong to another model"):
        method.load_state_dict(state)


def test_another_init_is_noticed_once():
    """Elastic runs call init() again after a shutdown.

    Here there is no shutdown, because one process with MPI does not survive it.
    """
    hvd.init()
    is_restarted = restarts()
    assert not is_restarted()
    hvd.init()
    assert [is_restarted(), is_restarted()] == [True, False]


def test_calls_are_counted_for_each_process_set_and_anew_after_an_init(monkeypatch):
    """Ranks outside of a process set, and ranks that are new, have not made the same calls."""

    def allreduce(tensor, name=None, process_set=hvd.global_process_set):
        return name

    monkeypatch.setattr(mpi_ops, "allreduce", allreduce)
    call, others = named_collectives()["allreduce"], hvd.ProcessSet([0])
    others.process_set_id = 1
    names = [call(0), call(0), call(0, process_set=others), call(0, "mine")]
    monkeypatch.setattr(mpi_ops, "_handle_map", {})
    names.append(call(0))
    assert names == [*(f"allreduce.call.{n}" for n in (0, 1, 0)), "mine", "allreduce.call.0"]


def test_what_is_no_optimizer_or_no_compression_is_refused_by_one_process_too():
    """Horovod notices only at the first gradient that it sends, and one process never sends any."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 0.1)
    for wrong in ("scalecom", None, 100):
        with pytest.raises(
            TypeError, match=r"compression must be hvd.ScaleCom.*not " + repr(wrong)
        ):
            hvd.DistributedOptimizer(optimizer, compression=wrong)
    with pytest.raises(
        TypeError, match=r"of PyTorch, not builtins.list: .*scalecom_hvd.tensorflow"
    ):
        hvd.DistributedOptimizer([], compression=hvd.ScaleCom)
    assert hvd.DistributedOptimizer(optimizer) is not optimizer  # it is Horovod's own


def test_what_tensorflow_has_not_is_here():
    assert set(TORCHS_ALONE) < set(hvd.__all__)


class FailsOnce(torch.optim.SGD):
    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise ConnectionError
        super().step(closure)


def test_a_grad_scaler_goes_on_after_a_local_step_that_failed():
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(
        FailsOnce([weight], lr=1.0), [("weight", weight)], hvd.ScaleCom(), local_steps=2
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for fails in (True, False):
        optimizer.zero_grad()
        scaler.scale(weight.sum() / 4).backward()
        with pytest.raises(ConnectionError) if fails else contextlib.nullcontext():
            scaler.step(optimizer)
    assert weight.tolist() == [0.75] * 4


def test_a_commit_that_fails_is_not_half_made(monkeypatch):
    hvd.init()
    model = torch.nn.Linear(3, 3)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    sgd = hvd.DistributedOptimizer(sgd, model.named_parameters(), hvd.ScaleCom(), local_steps=2)
    state, before = hvd.elastic.TorchState(model, sgd), model.weight.detach().clone()
    model.weight.data.add_(1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(LocalSteps, "collect", lambda self: 1 / 0)  # a rank was lost
        state.save()
    state.restore()
    assert torch.equal(model.weight, before)
