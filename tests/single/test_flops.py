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
        assert rates == {
            "0.weight": 1,
            "1.weight": 25,
            "3.weight": 25,
            "5.weight": 50,
            "7.weight": 400,
        }
    assert model.training
    assert (
        hvd.ScaleComConfig(rates=rates, dense=(), min_numel=0).rates_for(
            {n: tuple(p.shape) for n, p in model.named_parameters()}
        )
        == rates
    )


def test_inputs_of_all_kinds():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 5), nn.Linear(5, 6), nn.LayerNorm(6)

        def forward(self, x, scale):
            return self.norm(self.b(self.a(x)) * scale)

    expected = {
        "a.weight": 1,
        "a.bias": 1,
        "b.weight": 400,
        "b.bias": 400,
        "norm.weight": 400,
        "norm.bias": 400,
    }
    assert hvd.rates_from_flops(Named(), (torch.zeros(2, 4), 2.0), 2) == expected
    assert hvd.rates_from_flops(Named(), {"x": torch.zeros(2, 4), "scale": 2.0}, 2) == expected
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        hvd.rates_from_flops(Named(), (), 0)
    with pytest.raises(ValueError, match="no trainable parameters"):
        hvd.rates_from_flops(nn.Identity(), torch.zeros(1), 1)


def test_recurrent_and_attention_layers_are_counted():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm, self.head = (
                nn.Embedding(50, 32),
                nn.LSTM(32, 64, batch_first=True),
                nn.Linear(64, 50),
            )

        def forward(self, x):
            return self.head(self.lstm(self.embedding(x))[0])

    rates = hvd.rates_from_flops(Recurrent(), torch.zeros(32, 64, dtype=torch.long), 32)
    # 2 * 32 * 64 positions per weight. An embedding computes nothing, so the LSTM is the first
    # layer that computes.
    assert rates["lstm.weight_ih_l0"] == rates["lstm.weight_hh_l0"] == 1
    assert rates["head.weight"] == 25
    assert rates["embedding.weight"] == 400

    encoder = nn.Sequential(
        nn.Linear(16, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    )
    rates = hvd.rates_from_flops(encoder, torch.zeros(32, 10, 16), 32)
    assert (
        rates["1.self_attn.in_proj_weight"]
        == rates["1.self_attn.out_proj.weight"]
        == rates["1.linear1.weight"]
        == 25
    )
    assert torch.backends.mha.get_fastpath_enabled()


def test_frozen_and_tied_parameters_and_modes():
    model = nn.ModuleDict(
        {"body": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "head": nn.Linear(8, 8, bias=False)}
    )
    model["head"].weight = model["body"].weight
    model["norm"].eval()
    model["body"].bias.requires_grad_(False)
    model.forward = lambda x: model["head"](model["norm"](model["body"](x)))
    rates = hvd.rates_from_flops(model, torch.zeros(4, 8), 4)
    assert rates == {"body.weight": 1, "norm.weight": 400, "norm.bias": 400}
    assert model.training
    assert not model["norm"].training
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert set(hvd.ScaleComConfig(rates=rates).rates_for(trained)) == set(rates)
