"""Loss scales by which one cannot divide are refused."""

import math

import pytest
import torch

from scalecom_hvd.exchange import Simulation


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_loss_scale_that_is_no_number_above_zero_is_refused(scale):
    simulation = Simulation(
        2,
        lambda rank: {"weight": torch.nn.Parameter(torch.zeros(100))},
        loss_scale=lambda: scale,
        min_numel=1,
    )
    with pytest.raises(ValueError, match="loss_scale= must give a finite number above 0"):
        simulation.step([{"weight": torch.ones(100)} for _ in range(2)])
