"""Three minutes of `make soak`: workers are killed, stopped, added and sent home at random; and what it says to wrong arguments."""

import re
import sys

import pytest
from conftest import ROOT

SOAK = [sys.executable, ROOT / "scripts" / "soak.py"]


@pytest.mark.timeout(700)
def test_three_minutes(run):
    output = run([*SOAK, "--minutes", "3", "--ranks", "4"], limit=600)
    steps, tried, survived = map(int, re.search(r"(\d+) steps, (\d+) faults, (\d+) survived", output).groups())
    assert steps > 50, output
    assert tried == survived > 20, output
    assert "0 complaints" in output


def test_wrong_arguments(run):
    assert "--ranks must be at least 3" in run([*SOAK, "--ranks", "2"], fails=True)
    assert "--minutes must be more than 0" in run([*SOAK, "--minutes", "nan"], fails=True)
