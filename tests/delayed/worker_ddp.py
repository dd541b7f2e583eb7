"""Run by test_device.py under torchrun: collectives and DistributedDataParallel on "delayed".

The results must be the same as on the CPU.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import delayed
from delayed.process_group import DelayedGroup

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.int32, torch.int64, torch.uint8]


class Averaging:
    """A communication hook with its own stream and its own thread, as a library may have."""

    def __init__(self, device):
        self.stream = torch.Stream(device=device)
        self.thread = ThreadPoolExecutor(max_workers=1)  # collectives match by order

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        future = torch.futures.Future(devices=[buffer.device])
        self.stream.wait_stream(torch.accelerator.current_stream())
        self.thread.submit(self.average, buffer, future)
        return future

    def average(self, buffer, future):
        try:
            with self.stream:
                buffer.record_stream(self.stream)
                scaled = buffer / dist.get_world_size()
                dist.all_reduce(scaled)
                buffer.copy_(scaled)
                future.set_result(buffer)
        except Exception as error:
            future.set_exception(error)


def call(state: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.hook(bucket)


def trained(device, optimizer, hooked=False, **options):
    torch.manual_seed(dist.get_rank())  # DDP makes the models equal
    layers = [torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5)]
    model = torch.nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
    if hooked:
        model.register_comm_hook(Averaging(device), call)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(20):
        x, y = torch.randn(16, 20).to(device), torch.randn(16, 5).to(device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check_training():
    for optimizer in OPTIMIZERS:
        expected = trained("cpu", optimizer)
        for order, options in [
            ("early", {}),
            ("late", {"hooked": True}),
            ("mixed", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
            ("early", {"hooked": True, "static_graph": True}),
        ]:
            delayed.set_delay(0.002, order)
            got = trained("delayed", optimizer, **options)
            torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def check_collectives():
    """Check collectives of torch.distributed. Rank 0 holds 1, 2, ..., 6, rank 1 ten times that."""
    rank, both = dist.get_rank(), (1, 10)
    for dtype in DTYPES:
        base = torch.arange(1, 7, device="delayed").to(dtype)
        mine = base * both[rank]
        for op, expected in [
            (dist.ReduceOp.SUM, base * 11),
            (dist.ReduceOp.MAX, base * 10),
            (dist.ReduceOp.MIN, base),
            (dist.ReduceOp.AVG, base * 11 / 2),
        ]:
            got = mine.clone()
            dist.all_reduce(got, op)
            assert torch.equal(got, expected.to(dtype)), (dtype, op, got, expected)
        together = torch.cat([base, base * 10])
        lists = [torch.empty_like(base) for _ in both]
        dist.all_gather(lists, mine)
        assert torch.equal(torch.cat(lists), together)
        whole = torch.empty_like(together)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, together)
        part = torch.empty_like(base)
        dist.reduce_scatter_tensor(part, together)
        assert torch.equal(part, together.chunk(2)[rank] * 2)
        dist.broadcast(mine, 1)
        assert torch.equal(mine, base * 10)
    dist.barrier()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def check_streams(group):
    """Check that, with a group made directly, only the stream waits that was told to."""
    delayed.set_delay(0.05, "late")
    values = torch.ones(1000, device="delayed")
    torch.accelerator.synchronize()
    with delayed.forbid_host_waits():
        values.mul_(2)  # the collective waits for this by itself
        work = group.allreduce([values])
        too_early = values.clone()
        assert not work.is_completed()
        future = work.get_future().then(lambda done: done.value()[0] + 1)
        work.wait()
        in_time = values.clone()
        later = future.wait()
        freed = torch.ones(1000, device="delayed")
        works = [group.allreduce([freed]), group.broadcast([values.clone()])]
        del freed  # the group's stream still uses it
    assert (too_early == 2).all(), too_early
    assert (in_time == 4).all(), in_time
    assert (later == 5).all(), later
    for each in works:
        each.wait()
    torch.accelerator.synchronize()
    assert all(each.is_completed() for each in works)
    assert (works[0].result()[0] == 2).all()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,delayed:delayedccl")
    store = dist.PrefixStore("direct", dist.distributed_c10d._get_default_store())
    check_collectives()
    check_streams(DelayedGroup(store, dist.get_rank(), dist.get_world_size()))
    check_training()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
