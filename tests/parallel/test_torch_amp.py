"""GradScaler, as README says to use it: overflowing steps are skipped on every rank, and residues survive a moving scale."""

import pytest
import torch
from models import same_on_all_ranks

import scalecom_hvd.torch as hvd


def train(scaler, steps, overflow_at=(), **settings):
    """Train a small net; at the steps of `overflow_at` the last rank's loss is too large for its scale. Gives net and compressor."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        net.named_parameters(),
        compression=hvd.ScaleCom(rate=10, min_numel=100, loss_scale=scaler, **settings),
    )
    taken = 0
    for step in range(steps):
        overflows = step in overflow_at
        torch.manual_seed(100 * taken + hvd.rank())
        inputs = torch.randn(16, 40)
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        if overflows and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        taken += not overflows
    return net, optimizer.compression


@pytest.mark.parametrize("mode", [{}, {"lookahead": True}, {"beta": 0.3}, {"lookahead": True, "beta": 0.3}], ids=str)
def test_a_run_with_overflows_ends_where_one_without_them_ends(mode):
    moving = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    still = torch.amp.GradScaler("cpu", enabled=False)
    scaled, compressor = train(moving, 16, overflow_at=(0, 4, 5, 11), **mode)
    plain, other = train(still, 12, **mode)
    assert moving.get_scale() != 2.0**20
    assert compressor.stats()["skipped_steps"] == 4
    assert compressor.stats()["step"] == other.stats()["step"] == 12
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert same_on_all_ranks(scaled.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    torch.manual_seed(5)
    net = torch.nn.Linear(100, 60).to(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(), compression=hvd.ScaleCom(rate=10)
    )
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(step * 10 + hvd.rank())
        net(torch.randn(8, 100).to(dtype)).float().square().mean().backward()
        optimizer.step()
    assert optimizer.compression.residues.tensors["weight"].residue.dtype == torch.float32
    assert net.weight.grad.dtype == dtype
    assert same_on_all_ranks(net.parameters())
