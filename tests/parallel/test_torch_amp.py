"""GradScaler and autocast, used as the guide says.

Every rank skips steps that overflow. Residues survive a moving scale.
"""

import pytest
import torch
from devices import DEVICE
from faces import horovods_alone, hvd, in_every_library, stock
from models import same_on_all_ranks, wrap


def small_net(dtype=torch.float32):
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40)
    ).to(dtype)


SETTINGS = {"rate": 10, "min_numel": 100}


def train(library, scaler, steps, overflow_at=(), **settings):
    """Train a small net. In the steps of `overflow_at`, losses are too large for their scale.

    Return the net, the compressor, and the scales.

    overflow_at: {step: "the last rank", "all ranks" or "the leader"}. With look-ahead, the leader
        is the rank that chooses in this step.
    """
    net = small_net()
    model, settings = dict(net.named_parameters()), SETTINGS | {"loss_scale": scaler} | settings
    optimizer, compressor = wrap(library, model, 0.05, 0.9, **settings)
    ahead = library is stock or compressor.config.lookahead
    taken, scales = 0, []
    for step in range(steps):
        torch.manual_seed(100 * taken + hvd.rank())
        inputs = torch.randn(16, 40)
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        leader = (taken + ahead) % hvd.size()
        overflowing = {
            "the last rank": [hvd.size() - 1],
            "all ranks": range(hvd.size()),
            "the leader": [leader],
            None: [],
        }
        if hvd.rank() in overflowing[overflow_at.get(step)]:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        taken += step not in overflow_at
        scales.append(scaler.get_scale())
    return net, compressor, scales


EVERY_MODE = [
    (hvd, {}),
    (hvd, {"lookahead": True}),
    (hvd, {"beta": 0.3, "warmup_steps": 3}),
    (hvd, {"lookahead": True, "beta": 0.3}),
    pytest.param(stock, {}, marks=horovods_alone),
    pytest.param(stock, {"beta": 0.3, "warmup_steps": 3}, marks=horovods_alone),
]


@pytest.mark.parametrize(("library", "mode"), EVERY_MODE)
def test_a_run_with_overflows_ends_where_one_without_them_ends(library, mode):
    moving = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=3)
    still = torch.amp.GradScaler(DEVICE, enabled=False)
    overflow_at = {
        0: "the last rank",
        4: "all ranks",
        5: "the leader",
        9: "the leader",
        11: "all ranks",
        12: "the last rank",
    }
    scaled, compressor, scales = train(library, moving, 18, overflow_at, **mode)
    plain, other, _ = train(library, still, 12, {}, **mode)
    # the scale went both ways
    assert {later / earlier for earlier, later in zip(scales, scales[1:], strict=False)} == {
        0.5,
        1,
        2,
    }
    assert compressor.stats()["skipped_steps"] == 6
    assert compressor.stats()["step"] == other.stats()["step"] == 12
    torch.testing.assert_close(scaled.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    found, expected = (method.state_dict()["residues"] for method in (compressor, other))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert same_on_all_ranks(scaled.parameters())


def train_half(library, rate, net_dtype, autocast):
    """Take five steps in half precision, by autocast or by a model of that dtype.

    Return the net and the compressor. If rate is None, there is no compression.
    """
    net = small_net(net_dtype)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=autocast is torch.float16)
    model, compressor = dict(net.named_parameters()), None
    if rate is None:
        sgd = torch.optim.SGD(net.parameters(), lr=0.05)
        optimizer = stock.DistributedOptimizer(sgd, model.items())
    else:
        settings = SETTINGS | {"rate": rate, "loss_scale": scaler}
        optimizer, compressor = wrap(library, model, 0.05, **settings)
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(step * 10 + hvd.rank())
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            output = net(torch.randn(8, 40).to(net_dtype))
            assert output.dtype == (autocast or net_dtype)
            loss = output.float().square().mean()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        assert all(p.grad.dtype == net_dtype for p in net.parameters())
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return net, compressor


@in_every_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["autocast", "model"])
def test_half_precision(library, dtype, form):
    """Residues are float32, whatever the gradient. At rate=1 the result is dense training's."""
    kind = (torch.float32, dtype) if form == "autocast" else (dtype, None)
    net, compressor = train_half(library, 10, *kind)
    residues = {name: tensor.residue for name, tensor in compressor.residues.tensors.items()}
    assert residues.keys() == {"0.weight", "2.weight"}
    assert all(residue.dtype == torch.float32 and residue.any() for residue in residues.values())
    assert same_on_all_ranks(net.parameters())
    if (form, dtype) != ("model", torch.bfloat16):  # Horovod's all-reduce takes no bfloat16
        whole, _ = train_half(library, 1, *kind)
        dense, _ = train_half(library, None, *kind)
        rtol, atol = (1e-2, 1e-3) if form == "model" else (1e-4, 1e-5)
        torch.testing.assert_close(whole.state_dict(), dense.state_dict(), rtol=rtol, atol=atol)
