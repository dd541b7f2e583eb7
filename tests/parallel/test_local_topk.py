"""The benchmark's baseline.

On every rank, what it sends and keeps is what came in. All ranks get the same sum.
"""

import sys
from pathlib import Path

import torch
from models import came_in, feed, gradients, parameters, same_on_all_ranks

import scalecom_hvd.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
from local_topk import LocalTopK  # after sys.path is set

SHAPES = {"matrix": (300, 50), "vector": (4000,), "small": (10,)}


def test_sent_and_kept_is_what_came_in():
    hvd.init()
    n, steps = hvd.size(), 10
    model = parameters(SHAPES)
    local = LocalTopK(list(model.values()), rate=50)
    received = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(steps):
        for parameter in model.values():
            parameter.grad = None
        feed(model, gradients(SHAPES, hvd.rank(), step))
        local.reduce()
        assert same_on_all_ranks([p.grad for p in model.values()])
        for name, parameter in model.items():
            received[name] += parameter.grad.double()
            if name != "small":
                sent = int((parameter.grad != 0).sum())
                assert 0.3 * parameter.numel() / 50 < sent < 3 * n * parameter.numel() / 50
    came = came_in(range(n), range(steps), SHAPES)
    for name, parameter in model.items():
        kept = local._residues.get(parameter, torch.zeros(parameter.numel()))
        kept = hvd.allreduce(kept.double(), op=hvd.Sum, name=f"kept.{name}").view(SHAPES[name])
        total = torch.as_tensor(came[name])
        torch.testing.assert_close(received[name] * n + kept, total, rtol=1e-4, atol=1e-4)
    local.close()
