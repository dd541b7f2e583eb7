"""ScaleCom refuses hvd.join(). If nothing is compressed, it leaves join() to Horovod.

Horovod's ranks run this file first. If ranks gave up a step, collectives that only some of them
submitted stay with Horovod. Its join() then crashes on them (0.28.1, tensor_queue.cc:
GetTensorEntriesFromResponse).
"""

import gc

import pytest
import torch

import scalecom_hvd.torch as hvd


def test_join():
    model = torch.nn.Linear(60, 50)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.ScaleCom(rate=20),
    )
    with pytest.raises(RuntimeError, match="Give every rank the same number of steps"):
        hvd.join()
    del optimizer


def test_join_with_nothing_compressed_is_horovods():
    gc.collect()
    assert hvd.join() in range(hvd.size())
