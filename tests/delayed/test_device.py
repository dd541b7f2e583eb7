"""The device that tests use instead of a GPU. A missing wait must show on it.

Each hazard is tried with and without the wait. With it, the numbers must be right. Without it, they
must be wrong in the order that provokes the hazard. That operations and collectives are right
otherwise, every other test on this device shows.
"""

import time

import pytest
import torch
import torch.distributed as dist

import delayed
from delayed.process_group import DelayedGroup
from scalecom_hvd.exchange.devices import Timer

DEVICE = "delayed"


def ones():
    tensor = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    return tensor


def nothing_forces_streams():
    time.sleep(0.2)


def read_computed(waits):
    """A side stream reads the tensor that the default stream computes."""
    tensor, side = ones(), torch.Stream(device=DEVICE)
    tensor.add_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        return tensor * 2


def read_overwritten(waits):
    """The default stream overwrites the tensor that a side stream reads."""
    tensor, side = ones(), torch.Stream(device=DEVICE)
    with side:
        result = tensor * 4
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    tensor.zero_()
    return result


def read_freed(waits):
    """The host frees a tensor of the default stream while a side stream reads it."""
    tensor, side = ones(), torch.Stream(device=DEVICE)
    with side:
        result = tensor * 4
    if waits:
        tensor.record_stream(side)
    return result


HAZARDS = {read_computed: "early", read_overwritten: "late", read_freed: "late"}


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize(
    ("seconds", "run"), [(0.03, nothing_forces_streams), (10, torch.accelerator.synchronize)]
)
def test_a_missing_wait_shows_and_a_wait_is_enough(hazard, seconds, run):
    delayed.set_delay(seconds, HAZARDS[hazard])
    for waits in (False, True):
        result = hazard(waits)
        run()
        assert ((result.cpu() == 4) == waits).all()


@pytest.mark.parametrize("hazard", HAZARDS)
def test_a_missing_wait_shows_in_mixed_order(hazard):
    def shows():
        result = hazard(waits=False)
        nothing_forces_streams()
        return (result.cpu() != 4).any()

    delayed.set_delay(0.02, "mixed")
    assert any(shows() for _ in range(8))


def test_freed_on_its_own_stream_is_reused_in_turn():
    tensor = ones()
    result = tensor * 4
    alias = delayed.cpu_alias(tensor)
    del tensor
    assert (result.cpu() == 4).all()
    torch.accelerator.synchronize()
    assert alias.isnan().all()


@pytest.mark.parametrize("waits", [False, True])
def test_a_timer_counts_only_what_the_current_stream_waits_for(waits):
    tensor, side = ones(), torch.Stream(device=DEVICE)
    timer = Timer([tensor.device])
    delayed.enqueue(lambda: time.sleep(1))  # it is computed before
    timer.start()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        delayed.enqueue(lambda: time.sleep(1))
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    timer.stop()
    assert (timer.seconds() > 0.6) == waits
    assert timer.seconds() < 1.8


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


def test_only_the_stream_that_was_told_to_waits_for_a_collective():
    delayed.set_delay(0.05, "late")
    group = DelayedGroup(dist.HashStore(), 0, 1)
    values, gathered = ones(), torch.zeros(1000, device=DEVICE)
    with delayed.forbid_host_waits():
        values.mul_(2)  # the collective waits for this by itself
        work = group._allgather_base(gathered, values)
        del values  # the group's stream still uses it
        too_early = gathered.clone()
        assert not work.is_completed()
        work.wait()
        in_time = gathered.clone()
    assert (too_early == 0).all(), too_early
    assert (in_time == 2).all(), in_time
    assert work.is_completed()
