"""Models that DistributedDataParallel wraps, in whole or in part; and steps compiled as a whole."""

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from made_up import EVERYTHING
from models import same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, ScaleComState, scalecom_hook

SETTINGS = EVERYTHING | {"dense": (), "warmup_steps": 0, "min_numel": 2}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))


def batch(step):
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 20, generator=random)


NAMES = {
    "the wrapper's": lambda wrapped: wrapped.named_parameters(),
    "the model's own": lambda wrapped: wrapped.module.named_parameters(),
    "none": lambda wrapped: None,
}


@pytest.mark.parametrize("names", [*NAMES, "wrapped later"])
def test_a_wrapped_model_is_refused_by_the_optimizer(names):
    """DDP has averaged already. The optimizer would average again, and would compress averages."""
    model = net()
    with pytest.raises((TypeError, ValueError, RuntimeError), match="DistributedDataParallel"):
        wrapped = DistributedDataParallel(model) if names in NAMES else model
        named = NAMES[names](wrapped) if names in NAMES else model.named_parameters()
        sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, named, ScaleCom(**SETTINGS))
        wrapped = wrapped if names in NAMES else DistributedDataParallel(model)
        for step in range(2):
            optimizer.zero_grad()
            wrapped(batch(step)).square().mean().backward()
            optimizer.step()


def train(model, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        # The script itself averages what DDP ignores.
        for parameter in model.module[0].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    return [p.detach().clone() for p in model.parameters()]


def ignore_the_first_layer(model):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["0.weight", "0.bias"]
    )


@pytest.mark.parametrize("state_is_made", ["first", "between", "last"])
def test_parameters_that_ddp_ignores(state_is_made):
    """They train as without the hook. A state that was made before says that it was."""
    plain = net()
    ignore_the_first_layer(plain)
    plain = DistributedDataParallel(plain)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def with_the_hook():
        model = net()
        state = ScaleComState(model, **SETTINGS) if state_is_made == "first" else None
        ignore_the_first_layer(model)
        state = ScaleComState(model, **SETTINGS) if state_is_made == "between" else state
        model = DistributedDataParallel(model)
        state = ScaleComState(model, **SETTINGS) if state_is_made == "last" else state
        model.register_comm_hook(state, scalecom_hook)
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    if state_is_made == "first":
        with pytest.raises(RuntimeError, match="ignores .* when ScaleComState was made"):
            with_the_hook()
    else:
        torch.testing.assert_close(with_the_hook(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_a_narrower_dtype_than_their_parameters_are_refused(dtype):
    """As DDP's fp16_compress_wrapper and its mixed_precision give them."""

    def narrowed(state, bucket):
        bucket.set_buffer(bucket.buffer().to(dtype))
        return scalecom_hook(state, bucket)

    model = DistributedDataParallel(net())
    model.register_comm_hook(ScaleComState(model), narrowed)
    with pytest.raises(RuntimeError, match="Leave out mixed_precision="):
        model(batch(0)).sum().backward()


def test_a_parameter_that_was_thawed_after_the_state_was_made_is_refused():
    trained = net()
    trained[0].requires_grad_(False)
    state = ScaleComState(trained)
    model = DistributedDataParallel(trained.requires_grad_(True))
    model.register_comm_hook(state, scalecom_hook)
    with pytest.raises(RuntimeError, match="did not train.*make DistributedDataParallel and the"):
        model(batch(0)).sum().backward()


def with_hook(model):
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(ScaleComState(wrapped, **SETTINGS), scalecom_hook)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)


def with_optimizer(model):
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(plain, model.named_parameters(), ScaleCom(**SETTINGS))


@pytest.mark.parametrize("face", [pytest.param(with_hook, marks=pytest.mark.long), with_optimizer])
def test_a_step_that_is_compiled_as_a_whole(face):
    """The same as without torch.compile, and nothing of the library is traced."""
    trained = []
    for compiles in (False, True):
        model, optimizer = face(net())

        def step(inputs, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        take = torch.compile(step, backend="eager") if compiles else step
        for number in range(4):
            take(batch(number))
        trained.append([p.detach().clone() for p in model.parameters()])
    reasons = " ".join(torch._dynamo.utils.counters["graph_break"])
    assert torch._dynamo.utils.counters["frames"]["ok"] < 60  # plain DDP's are 45
    assert "GradBucket" not in reasons
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)


def test_what_a_joined_rank_averaged_was_not_thrown_away(caplog):
    """The steps of other ranks used it."""
    model = DistributedDataParallel(net())
    state = ScaleComState(model, **SETTINGS)
    model.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.join():
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()
    assert state.stats()["averages_thrown_away"] == 0
    assert not [one for one in caplog.records if one.name == "scalecom_hvd"]
