"""Models with parameters of two dtypes, with DDP's static_graph.

In its first pass DDP hands out one bucket of each dtype. It numbers all of them 0, and marks none
as the last.
"""

import pytest
import torch
import torch.distributed as dist
from made_up import EVERYTHING, SOME
from models import same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

pytestmark = pytest.mark.timeout(45, method="thread")  # no timeout of Gloo ends the wait


class Two(nn.Module):
    def __init__(self, other):
        super().__init__()
        torch.manual_seed(3)
        self.other = other
        self.first = nn.Linear(20, 40)
        self.second = nn.Linear(40, 40).to(other)
        self.third = nn.Linear(40, 10)

    def forward(self, x):
        y = torch.tanh(self.first(x)).to(self.other)
        return self.third(torch.tanh(self.second(y)).float()).square().mean()


def train(sent, other, **of_ddp):
    model = DistributedDataParallel(Two(other), **of_ddp)
    if sent is not None:
        state = ScaleComState(model, dense=(), warmup_steps=0, min_numel=2, **sent)
        model.register_comm_hook(state, scalecom_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=random)).backward()
        optimizer.step()
    assert same_on_all_ranks(model.parameters())
    if sent is not None:
        assert state.stats()["step"] == 4
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "of_ddp",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.long)
            for more in ({"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.003})
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("static_graph", [False, True], ids=["", "static_graph"])
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_parameters_of_two_dtypes(other, static_graph, of_ddp):
    of_ddp = of_ddp | {"static_graph": static_graph}
    plain, everything = (train(sent, other, **of_ddp) for sent in (None, EVERYTHING))
    near = {"rtol": 1e-4, "atol": 1e-5} if other == torch.float64 else {"rtol": 0.05, "atol": 0.01}
    for one, two in zip(plain, everything, strict=True):
        torch.testing.assert_close(one, two, **near)
    train(SOME, other, **of_ddp)
