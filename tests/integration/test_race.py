"""A short form of the race, run as a reader of the documentation runs it."""

import json
import os
import sys
from pathlib import Path

import pytest

RACE = Path(__file__).resolve().parents[2] / "scripts" / "race" / "race.py"


@pytest.mark.nightly
def test_a_resnet_trains_in_the_race(launched, tmp_path):
    worker = RACE.with_name("race_worker.py")
    arguments = ["--task", "resnet", "--size", "tiny", "--way", "ScaleCom", "--steps", "40"]
    arguments += ["--lr", "0.05", "--pieces", "unused", "--output", "losses.json"]
    launched("torchrun", 2, [worker, *arguments])
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert losses["40"] < 0.8 * losses["0"]


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="hosts need root")
def test_a_short_race(run, tmp_path):
    command = [sys.executable, RACE, "--quick", "--untuned", "--seeds", "1", "--steps", "40"]
    command += [
        "--ways",
        "PowerSGD, rank 2",
        "DiLoCo",
        "ScaleCom, auto",
        "--output",
        tmp_path / "race",
    ]
    told = run(command, limit=600)
    for way in ("DDP, dense", "ScaleCom", "PowerSGD, rank 2", "DiLoCo", "ScaleCom, auto"):
        assert told.count(f"\n| {way} | ") == 3, told
    files = {path.name for path in (tmp_path / "race").iterdir()}
    assert {"curves.csv", "steps-2.json", "runs"} <= files
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "race" / "runs").iterdir()}
    again = run(command, limit=200)
    assert again.split("2 workers")[-1] == told.split("2 workers")[-1]
    assert runs == {path: path.stat().st_mtime_ns for path in runs}
