"""What the README shows works as it stands there: its examples of methods of one's own."""

import re
from pathlib import Path

import pytest
import torch

from scalecom_hvd.exchange.simulator import Simulation

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.usefixtures("one_thread_per_rank")
def test_methods_of_ones_own():
    section = README.read_text().split("**One of your own** is a class")[1]
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S):
        exec(example, scope)
    counting = Simulation(
        2,
        lambda rank: {"w": torch.nn.Parameter(torch.zeros(60, 50))},
        compression=scope["Counting"],
        dense=[],
        warmup_steps=0,
    )
    counting.step([{"w": torch.ones(60, 50)}] * 2)
    assert counting.compressors[0].tensor_states["w"]["steps"] == 1
    ranks = 3
    # Two widths of offsets in one bucket, the wider of an odd number of bytes in all.
    simulation = Simulation(
        ranks,
        lambda rank: {name: torch.nn.Parameter(torch.zeros(60, 50)) for name in ("w", "other")},
        compression=scope["SignTopK"],
        rates={"w": 20, "other": 999},
        min_numel=0,
    )
    came, went = torch.zeros(60, 50), torch.zeros(60, 50)
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        grads = [torch.randn(60, 50, generator=random) for _ in range(ranks)]
        came += sum(grads) / ranks
        averages = simulation.step(
            [{"w": grad, "other": torch.randn(60, 50, generator=random)} for grad in grads]
        )
        went += averages[0]["w"]
    kept = (
        sum(
            compressor.residues.tensors["w"].residue.view(60, 50)
            for compressor in simulation.compressors
        )
        / ranks
    )
    assert 0 < went.count_nonzero() < came.numel()
    waits = kept / simulation.compressors[0].config.beta
    torch.testing.assert_close(went + waits, came)
