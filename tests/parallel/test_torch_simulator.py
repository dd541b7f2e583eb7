"""Simulated workers give what as many real ranks give."""

import pytest
import torch
from faces import hvd
from models import ODD_SHAPES, feed, gradients, parameters

from scalecom_hvd.exchange.simulator import Simulation

MODES = [
    {},
    {"lookahead": True, "leader": "staggered", "bucket_bytes": 20_000},
    {"bits": 32, "selection": "exact"},
    {"warmup_steps": 3},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_real_ranks_and_simulated_ones_keep_the_same_residues(mode):
    settings = {"rate": 20, "beta": 0.3, "min_numel": 2} | mode
    n, rank = hvd.size(), hvd.rank()
    model = parameters(ODD_SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        named_parameters=model.items(),
        compression=hvd.ScaleCom(**settings),
    )
    simulation = Simulation(n, lambda _: parameters(ODD_SHAPES), **settings)
    for step in range(20):
        everyone = [gradients(ODD_SHAPES, r, step) for r in range(n)]
        optimizer.zero_grad()
        feed(model, everyone[rank])
        optimizer.synchronize()
        averages = simulation.step(
            [{name: torch.as_tensor(grad) for name, grad in worker.items()} for worker in everyone]
        )
        for name, parameter in model.items():
            torch.testing.assert_close(parameter.grad, averages[rank][name], rtol=1e-5, atol=1e-5)
        mine, theirs = (
            compressor.residues.tensors
            for compressor in (optimizer.compression, simulation.compressors[rank])
        )
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor.residue, theirs[name].residue), f"{name} at step {step}"
        with optimizer.skip_synchronize():
            optimizer.step()
    mine, theirs = optimizer.compression.stats(), simulation.compressors[rank].stats()
    assert mine == theirs
