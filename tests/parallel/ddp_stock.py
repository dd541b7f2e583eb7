"""Those names of Horovod's that the tests of both faces use, made with torch.distributed."""

import contextlib

import torch
import torch.distributed as dist

from scalecom_hvd.exchange.collectives import CollectiveError as HorovodInternalError

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast_object",
    "rank",
    "size",
]
Average, Sum = dist.ReduceOp.AVG, dist.ReduceOp.SUM
size, rank, barrier = dist.get_world_size, dist.get_rank, dist.barrier


class Compression:
    none = None


def allreduce(tensor, op=Average, name=None):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total if op == Sum else total / size()


def allgather(tensor, name=None):
    parts = list(tensor.new_empty((size(), *tensor.shape)))
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def allgather_object(value, name=None):
    values = [None] * size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value, root_rank=0, name=None):
    return allgather_object(value)[root_rank]


def DistributedOptimizer(optimizer, named_parameters=None, compression=None, op=Average):  # noqa: N802
    """Average every gradient before a step, without any compression."""
    assert compression is None

    class Averaging(type(optimizer)):
        synchronizes = True

        def synchronize(self):
            for parameter in (p for group in self.param_groups for p in group["params"]):
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = allreduce(grad, op)

        @contextlib.contextmanager
        def skip_synchronize(self):
            self.synchronizes = False
            yield
            self.synchronizes = True

        def step(self, *args, **kwargs):
            if self.synchronizes:
                self.synchronize()
            return super().step(*args, **kwargs)

    optimizer.__class__ = Averaging
    return optimizer
