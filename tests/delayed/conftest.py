"""The tests of this folder run on the device "delayed". Importing `delayed` registers it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import delayed


@pytest.fixture(autouse=True)
def usual_delay(nu_is_open):
    delayed.set_delay(0.005)
    before = delayed.foreign_devices()
    yield
    torch.accelerator.synchronize()
    assert delayed.foreign_devices() == before
