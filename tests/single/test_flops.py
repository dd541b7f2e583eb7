"""rates_from_flops: the paper's guide applied to a model, layer by layer."""

import pytest
import torch
from torch import nn

import scalecom_hvd.torch as hvd


def test_rates_follow_the_flops_per_gradient():
    # Forward FLOPs per weight at a mini-batch of 32: 2 * 32 * positions.
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # the first layer
        nn.Conv2d(8, 8, 3, padding=1, bias=False),  # 64 positions: 4096
        nn.AvgPool2d(4),
        nn.Conv2d(8, 16, 1, bias=False),  # 4 positions: 256
        nn.AvgPool2d((1, 2)),
        nn.Conv2d(16, 16, 1, bias=False),  # 2 positions: 128
        nn.Flatten(),
        nn.Linear(32, 10, bias=False),  # 64
    )
    for batch in (2, 32):
        rates = hvd.rates_from_flops(model, torch.zeros(batch, 3, 8, 8), batch_size=batch)
        assert rates == {"0.weight": 1, "1.weight": 25, "3.weight": 25, "5.weight": 50, "7.weight": 400}
    assert model.training
    assert hvd.ScaleComConfig(rates=rates, min_numel=0).rates_for({n: tuple(p.shape) for n, p in model.named_parameters()}) == rates


def test_inputs_of_all_kinds():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 5), nn.Linear(5, 6), nn.LayerNorm(6)

        def forward(self, x, scale):
            return self.norm(self.b(self.a(x)) * scale)

    expected = {"a.weight": 1, "a.bias": 1, "b.weight": 400, "b.bias": 400, "norm.weight": 400, "norm.bias": 400}
    assert hvd.rates_from_flops(Named(), (torch.zeros(2, 4), 2.0), 2) == expected
    assert hvd.rates_from_flops(Named(), {"x": torch.zeros(2, 4), "scale": 2.0}, 2) == expected
    with pytest.raises(ValueError, match="batch_size is the number of samples"):
        hvd.rates_from_flops(Named(), (), 0)
    with pytest.raises(ValueError, match="no parameters"):
        hvd.rates_from_flops(nn.Identity(), torch.zeros(1), 1)
