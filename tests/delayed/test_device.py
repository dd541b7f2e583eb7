"""The device that tests use instead of a GPU. A missing wait must show on it.

Each hazard is tried with and without the wait. With it, the numbers must be right whatever the
order of streams. Without it, they must be wrong in the order that provokes the hazard.
"""

import copy
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import delayed

HERE = Path(__file__).resolve().parent
ORDERS = ["early", "late", "mixed", "same"]
DEVICE = "delayed"


def ones():
    tensor = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    return tensor


def read_computed(waits):
    """A side stream reads the tensor that the default stream computes."""
    tensor, side = ones(), torch.Stream(device=DEVICE)
    tensor.add_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = tensor * 2
    time.sleep(0.2)  # nothing forces the streams to run
    return result


def read_overwritten(waits):
    """The default stream overwrites the tensor that a side stream reads."""
    tensor, side = ones(), torch.Stream(device=DEVICE)
    with side:
        result = tensor * 4
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    tensor.zero_()
    time.sleep(0.2)
    return result


def read_freed(waits):
    """The host frees a tensor of the default stream while a side stream reads it."""
    tensor, side = ones(), torch.Stream(device=DEVICE)
    with side:
        result = tensor * 4
    if waits:
        tensor.record_stream(side)
    del tensor
    time.sleep(0.2)
    return result


def read_between_sides(waits):
    """One side stream reads the tensor that another side stream computes."""
    tensor, first, second = ones(), *(torch.Stream(device=DEVICE) for _ in range(2))
    with first:
        tensor.add_(1)
    if waits:
        second.wait_stream(first)
    with second:
        result = tensor * 2
    time.sleep(0.2)
    return result


HAZARDS = {read_computed: "early", read_overwritten: "late", read_freed: "late"}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_missing_wait_shows(hazard):
    delayed.set_delay(0.03, HAZARDS[hazard])
    assert (hazard(waits=False).cpu() != 4).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hazard", [*HAZARDS, read_between_sides])
def test_wait_is_enough(hazard, order):
    delayed.set_delay(0.03, order)
    assert (hazard(waits=True).cpu() == 4).all()


@pytest.mark.parametrize("hazard", HAZARDS)
def test_missing_wait_shows_in_mixed_order(hazard):
    delayed.set_delay(0.02, "mixed")
    assert any((hazard(waits=False).cpu() != 4).any() for _ in range(8))


def test_synchronizing_runs_streams_in_the_order_asked_for():
    for hazard, order in HAZARDS.items():
        delayed.set_delay(10, order)
        tensor, side = ones(), torch.Stream(device=DEVICE)
        if hazard is read_computed:
            tensor.add_(1)
            with side:
                result = tensor * 2
        else:
            with side:
                result = tensor * 4
            if hazard is read_overwritten:
                tensor.zero_()
            else:
                del tensor
        torch.accelerator.synchronize()
        assert (result.cpu() != 4).all()


def test_freed_on_its_own_stream_is_reused_in_turn():
    tensor = ones()
    result = tensor * 4
    alias = delayed.cpu_alias(tensor)
    del tensor
    assert (result.cpu() == 4).all()
    torch.accelerator.synchronize()
    assert alias.isnan().all()


def test_event():
    delayed.set_delay(0.05)
    event, later = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    assert event.query()  # it was never recorded
    ones().add_(1)
    event.record()
    assert not event.query()
    assert not torch.accelerator.current_stream().query()
    time.sleep(0.2)
    assert event.query()
    assert torch.accelerator.current_stream().query()
    later.record()
    later.synchronize()
    assert event.elapsed_time(later) > 0


def test_synchronizing_forces_what_is_waited_for_and_nothing_else():
    delayed.set_delay(10)
    first, second, third = (torch.Stream(device=DEVICE) for _ in range(3))
    tensor, start = torch.zeros(10), time.monotonic()
    with third:
        delayed.enqueue(lambda: tensor.add_(100))
    with first:
        delayed.enqueue(lambda: tensor.add_(1))
    event = first.record_event()
    with first:
        delayed.enqueue(lambda: tensor.add_(100))
    second.wait_event(event)
    with second:
        delayed.enqueue(lambda: tensor.mul_(2))
    second.synchronize()
    assert time.monotonic() - start < 2
    assert (tensor == 2).all()
    torch.accelerator.synchronize()
    assert time.monotonic() - start < 2
    assert (tensor == 202).all()


def test_forbidden_host_waits():
    tensor = ones()
    before = delayed.host_waits()
    with delayed.forbid_host_waits():
        tensor.mul_(2)
        tensor.to("cpu", non_blocking=True)
        for name, call in [
            ("_local_scalar_dense", lambda: tensor.sum().item()),
            ("copy to the CPU", tensor.cpu),
            ("nonzero", lambda: tensor[tensor > 1]),
            ("synchronize", torch.accelerator.synchronize),
            ("Stream.synchronize", torch.accelerator.current_stream().synchronize),
        ]:
            with pytest.raises(RuntimeError, match=name):
                call()
        tensor.copy_(torch.ones(1000))
    assert delayed.host_waits() == before
    assert tensor.sum().item() == 1000
    assert delayed.host_waits() == before + 1
    with delayed.forbid_host_waits(uploads=True), pytest.raises(RuntimeError, match="to the dev"):
        tensor.copy_(torch.ones(1000))


def test_copies_between_host_and_device():
    delayed.set_delay(0.05, "same")
    ordinary, pinned = torch.ones(10), torch.ones(10).pin_memory()
    copies = [each.to(DEVICE, non_blocking=True) for each in (ordinary, pinned)]
    ordinary.zero_()
    pinned.zero_()  # before the copy has read it
    assert [copied.sum().item() for copied in copies] == [10, 0]
    late = copies[0].to("cpu", non_blocking=True)
    late.zero_()
    assert late.sum() == 0
    torch.accelerator.synchronize()
    assert late.sum() == 10


def test_error_in_an_operation_is_raised_where_the_host_waits():
    table = torch.ones(3, 2, device=DEVICE)
    functional.embedding(torch.tensor([5], device=DEVICE), table)
    with pytest.raises(RuntimeError, match="embedding|index"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_enqueued_function_may_block_while_other_streams_go_on():
    tensor, side, done = ones(), torch.Stream(device=DEVICE), []
    delayed.enqueue(lambda: time.sleep(0.5) or done.append(1), side)
    assert (tensor + 1).sum().item() == 2000
    assert not done
    side.synchronize()
    assert done


def test_future_waits_by_streams():
    delayed.set_delay(0.05, "early")
    side, future = torch.Stream(device=DEVICE), torch.futures.Future(devices=["delayed:0"])
    doubled = future.then(lambda done: done.value() * 2)
    tensor = ones()
    with delayed.forbid_host_waits():
        with side:
            future.set_result(tensor + 1)
        result = future.wait() + doubled.wait()
    assert (result.cpu() == 6).all()


def operations(device):
    """Yield the intermediate results of the operations of compression, on any device."""
    torch.manual_seed(1)
    x, words = torch.randn(40), torch.randint(0, 2**31, (20,), dtype=torch.int32)
    x, words = x.to(device), words.to(device)
    positions, values = torch.tensor([3, 1, 30], device=device), torch.ones(3, device=device)
    shifted = torch.empty(0, dtype=torch.int32, device=device)
    yield torch.bitwise_right_shift(words, 3, out=shifted)
    yield shifted << 2 | (words & 3) ^ 5
    buffer = torch.zeros(64, dtype=torch.uint8, device=device)
    buffer[:32].view(torch.float32).copy_(x[:8])
    buffer[32:].view(torch.int64).fill_(-7)
    yield buffer
    x[positions] = values
    x[positions] -= 3 * values
    x.index_add_(0, positions, values)
    yield x[x > 0].sum() + x.masked_fill_(x > 1, 0.5)
    yield from torch.topk(x.abs(), 4)
    yield from torch.sort(x, descending=True)
    yield from torch.aminmax(x.view(8, 5), dim=1)
    yield x.view(8, 5).argmax(1)
    yield torch.copysign(x.abs(), -x).clamp(-0.5, 2).isfinite()
    yield torch.where(x > 0, x, 2).to(torch.float16) * 3
    yield torch.cat([x[:3], *x.split(7), *x.tensor_split(3)])
    yield torch.stack([x, x.flip(0)]).gather(1, positions.expand(2, 3))
    yield torch.zeros(40, device=device).scatter_(0, positions, values)
    yield functional.pad(x, (1, 4)).view(9, 5).norm(dim=1)
    lists = [x[:3].clone(), x[3:].clone()]
    torch._foreach_mul_(lists, 2.0)
    torch._foreach_add_(lists, lists, alpha=0.5)
    torch._foreach_copy_(lists, [each * 2 for each in lists])
    yield from [*lists, *torch._foreach_norm(lists)]


def test_operations_equal_those_of_the_cpu():
    for got, expected in zip(operations(DEVICE), operations("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), expected)
    assert not delayed.synchronous_operations()


def model():
    torch.manual_seed(2)
    layers = [torch.nn.Embedding(30, 16), torch.nn.Linear(16, 32), torch.nn.GELU()]
    layers += [torch.nn.LayerNorm(32), torch.nn.Linear(32, 30)]
    return torch.nn.Sequential(*layers)


def trained(device, optimizer, **options):
    net = model().to(device)
    optimizer = optimizer(net.parameters(), lr=0.01, **options)
    torch.manual_seed(3)
    for _ in range(5):
        x, y = (torch.randint(0, 30, (8, 4)).to(device) for _ in range(2))
        optimizer.zero_grad()
        functional.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [tensor.cpu() for tensor in copy.deepcopy(net).state_dict().values()]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_training_equals_that_on_the_cpu(optimizer, foreach):
    torch.testing.assert_close(
        trained(DEVICE, optimizer, foreach=foreach),
        trained("cpu", optimizer, foreach=foreach),
        atol=1e-5,
        rtol=1e-5,
    )


def random_program(seed, streams):
    """Run operations on random streams. Each waits only for the streams that it depends on."""
    choose = random.Random(seed)
    expected = [torch.full((64,), float(i)) for i in range(5)]
    tensors = [each.to(DEVICE) for each in expected]
    torch.accelerator.synchronize()
    wrote = [torch.accelerator.current_stream()] * 5
    read = [[] for _ in range(5)]
    for _ in range(150):
        stream, (a, b, c) = choose.choice(streams), choose.sample(range(5), 3)
        with stream:
            for each in (a, b):
                stream.wait_stream(wrote[each])
                tensors[each].record_stream(stream)
            read[b].append(stream)
            if choose.random() < 0.5:  # the old tensor is freed
                tensors[c] = tensors[a] * 0.5 + tensors[b]
                expected[c] = expected[a] * 0.5 + expected[b]
                read[a].append(stream)
                wrote[c], read[c] = stream, []
            else:
                for other in read[a]:
                    stream.wait_stream(other)
                tensors[a].mul_(0.9).add_(tensors[b], alpha=0.1)
                expected[a].mul_(0.9).add_(expected[b], alpha=0.1)
                wrote[a], read[a] = stream, []
    torch.accelerator.synchronize()
    torch.testing.assert_close([each.cpu() for each in tensors], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_random_programs_that_wait_are_right(order):
    delayed.set_delay(0.002, order)
    side = [torch.Stream(device=DEVICE) for _ in range(3)]
    for seed in range(3):
        random_program(seed, [torch.accelerator.current_stream(), *side])


def test_forked_process_may_free_what_it_inherited():
    tensors = [torch.ones(10, device=DEVICE) for _ in range(100)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.long
def test_ranks():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = HERE / "worker_ddp.py"
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(worker)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
