"""What only torch.distributed's optimizer does. What both optimizers do is tested elsewhere."""

import collections
import copy
import gc
import time

import pytest
import torch
import torch.distributed as dist
from made_up import EVERYTHING
from models import assert_groups_go, same_on_all_ranks
from torch import nn

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, broadcast_parameters
from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives
from scalecom_hvd.exchange import CollectiveError

ALL = {"dense": (), "warmup_steps": 0, "min_numel": 2}


def make(rate=10, model=None, lr=0.1, compression=None, **more):
    model = model or nn.Linear(60, 60)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        model.named_parameters(),
        compression or ScaleCom(rate=rate, **ALL),
        **more,
    )
    return model, optimizer


def backward(model, seed=0):
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    model(torch.randn(4, 60, generator=random)).square().mean().backward()


def take(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def test_sparse_gradients_are_made_dense():
    embedding = nn.Embedding(50, 10, sparse=True)
    model, optimizer = make(
        model=embedding, compression=ScaleCom(**ALL, **EVERYTHING), lr=1.0, sparse_as_dense=True
    )
    before = model.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([dist.get_rank(), 20])).sum().backward()
        optimizer.step()
    moved = (before - model.weight.detach())[:, 0]
    torch.testing.assert_close(moved[20], torch.tensor(3.0))
    torch.testing.assert_close(moved[0], torch.tensor(3 / dist.get_world_size()))


def test_a_grad_scaler_must_not_look_before_gradients_are_averaged():
    """Fused optimizers would unscale in their step, if this rank's own gradients are finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = nn.Linear(60, 60)
    broadcast_parameters(model)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    method = ScaleCom(rate=10, loss_scale=scaler, **ALL)
    optimizer = DistributedOptimizer(adam, model.named_parameters(), method)
    scaler.scale(model(torch.randn(4, 60)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="synchronize"):
        scaler.step(optimizer)


def test_sparse_gradients_are_refused():
    model, _ = make(model=nn.Embedding(50, 10, sparse=True))
    with pytest.raises(RuntimeError, match="sparse_as_dense=True"):
        model(torch.tensor([3])).sum().backward()


@pytest.mark.on_cpus  # a stream would also wait for what the other ranks never submit
def test_letting_go_of_a_step_that_was_given_up_waits_for_nobody():
    """Python's garbage collector may free a step while the other ranks wait for this one."""
    model, optimizer = make()
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:  # the other ranks never submit what this rank submits
        backward(model, 1)
        optimizer._gradients.exchange.abort()
        del optimizer
        gc.collect()
    dist.barrier()


@pytest.mark.on_cpus
def test_letting_go_of_what_follows_a_collective_waits_for_nobody():
    """A group waits for all it has submitted when it is freed, so it is held until then."""
    collectives = ProcessGroupCollectives()
    first = collectives.all_reduce(torch.ones(1), "first")
    if dist.get_rank() == 0:
        collectives.all_reduce(torch.ones(1), "never submitted by other ranks")
    first.wait()
    if dist.get_rank() == 0:
        del collectives, first
        gc.collect()
    dist.barrier()


@pytest.mark.on_cpus
def test_what_the_other_ranks_have_left_fails_whenever_it_is_waited_for():
    collectives = ProcessGroupCollectives()
    for name in ("first", "second"):  # what made the group is then let go
        collectives.all_reduce(torch.ones(1), name).wait()
    if dist.get_rank() == 0:
        work = collectives.all_reduce(torch.ones(1), "third")
        for _ in range(2):
            with pytest.raises(CollectiveError, match="third failed. Most often another rank"):
                work.wait()
    else:
        del collectives
        gc.collect()
    dist.barrier()


@pytest.mark.skipif("dist.get_world_size() < 3", reason="two ranks have only one group of two")
def test_groups_that_overlap():
    """One rank is in more groups than the others."""
    for pair in ((0, 1), (0, 2)):
        group, model = dist.new_group(pair), nn.Linear(60, 60)
        broadcast_parameters(model)
        if dist.get_rank() in pair:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            method = ScaleCom(rate=10, **ALL)
            named = model.named_parameters()
            optimizer = DistributedOptimizer(sgd, named, method, process_group=group)
            take(model, optimizer, range(3))
            theirs = model.weight.detach().clone()
            dist.broadcast(theirs, 0, group=group)
            assert torch.equal(theirs, model.weight)


@pytest.mark.on_cpus
def test_groups_go_with_their_optimizer():
    def trained():
        model, optimizer = make()
        take(model, optimizer, range(2))
        return model, optimizer

    assert_groups_go(trained)


def test_fewer_backward_passes_than_were_announced():
    model, optimizer = make(backward_passes_per_step=2)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        for micro in range(1 + step % 2):
            backward(model, 10 * step + micro)
        with pytest.raises(AssertionError, match="gradients would be lost"):
            optimizer.zero_grad()
        optimizer.step()
    assert optimizer.compression.stats()["step"] == 4
    assert same_on_all_ranks(model.parameters())
    backward(model)
    backward(model)
    with pytest.raises(AssertionError, match="backward_passes_per_step=3"):
        backward(model)
    with pytest.raises(RuntimeError, match="changed on some rank"):  # one pass too many
        optimizer.step()


def test_a_step_after_synchronize_says_that_it_averages_once_more():
    model, optimizer = make()
    backward(model)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"in `with optimizer.skip_synchronize\(\):`"):
        optimizer.step()


def test_a_schedule_made_before_and_one_made_after():
    model = nn.Linear(60, 60)
    broadcast_parameters(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1)
    before = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), ScaleCom(rate=10, **ALL))
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        take(model, optimizer, [step])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before.step()
        after.step()
    assert sgd.state
    assert sgd.state is optimizer.state
    optimizer.__setstate__({"state": collections.defaultdict(dict)})  # some scripts begin anew so
    assert not sgd.state
    assert optimizer.param_groups[0]["lr"] == 0.5**6
    assert same_on_all_ranks(model.parameters())


def test_a_refused_step_leaves_nothing_behind():
    model, optimizer = make(compression=ScaleCom(rate=10 + dist.get_rank(), **ALL))
    backward(model)
    with pytest.raises(RuntimeError, match="rate is 10.0 on rank 0 and 11.0 on rank 1"):
        optimizer.step()
    optimizer.zero_grad()


def test_what_cannot_work_is_refused():
    model, _ = make()
    with pytest.raises(ValueError, match="named_parameters does not name"):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), [("weight", model.weight)])
    with pytest.raises(TypeError, match="must be a method"):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), compression="top-k")
    with pytest.raises(ValueError, match="AVG"):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="no backend .* serves meta"):
        DistributedOptimizer(torch.optim.SGD(nn.Linear(3, 3, device="meta").parameters()))


def test_sharded_parameters_are_refused():
    parameter = torch.nn.Parameter(torch.zeros(100, 100))
    for name in ("_flat_param", "_fsdp_wrapped_module.weight"):
        sgd = torch.optim.SGD([parameter], lr=0.1)
        with pytest.raises(TypeError, match="FSDP"):
            DistributedOptimizer(sgd, [(name, parameter)], ScaleCom)


def test_a_rank_says_that_others_have_made_no_optimizer(monkeypatch, caplog):
    monkeypatch.setattr("scalecom_hvd.ddp.process_group_collectives.SECONDS_TO_TELL", 0.5)
    late = dist.get_world_size() - 1
    dist.barrier()
    if dist.get_rank() == late:
        time.sleep(2)
    model = nn.Linear(60, 60)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    DistributedOptimizer(sgd, model.named_parameters(), ScaleCom(**ALL))
    told = [record.getMessage() for record in caplog.records]
    assert dist.get_rank() == late or any("Does every rank make its" in text for text in told)


def test_a_rank_says_for_what_it_waits(monkeypatch, caplog):
    """If a rank is late or steps differently, the other ranks say so once, and go on waiting.

    Horovod does the same.
    """
    model, optimizer = make()
    late = dist.get_world_size() - 1
    take(model, optimizer, range(2))
    if dist.get_rank() != late:  # on a busy machine the late rank may wait that long, too
        monkeypatch.setattr("scalecom_hvd.ddp.process_group_collectives.SECONDS_TO_TELL", 0.5)
    dist.barrier()
    optimizer.zero_grad()
    backward(model, 2)
    if dist.get_rank() == late:
        time.sleep(2)
    optimizer.step()
    told = [record.getMessage() for record in caplog.records]
    if dist.get_rank() == late:
        assert not told
    else:
        assert any("for other ranks to submit scalecom." in message for message in told)
        assert all("step them in the same order" in message for message in told)
    assert same_on_all_ranks(model.parameters())


def test_channels_of_a_transport_of_ones_own_are_like_it():
    class Counting(ProcessGroupCollectives):
        counted = []

        def all_reduce(self, buffer, name):
            self.counted.append(name)
            return super().all_reduce(buffer, name)

    model = nn.Linear(60, 60)
    take(*make(model=model, collectives=Counting(devices=[model.weight.device])), range(2))
    assert any("values" in name for name in Counting.counted)
