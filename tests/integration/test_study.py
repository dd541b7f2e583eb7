"""The study as a reader runs it: the short form, and with the reader's own model.

tests/single/test_study_results.py checks the study's numbers against their definitions.
"""

import csv
import json
import sys
from pathlib import Path

import pytest
import study_results

STUDY = Path(__file__).resolve().parents[2] / "scripts" / "study" / "study.py"

OWN = """
import study_tasks
import torch
from torch.nn import functional as F


class Lines(study_tasks.Task):
    title, metric, unit, steps, batch_size, lr = "lines", "accuracy", "%", 30, 8, 0.1

    def model(self, norm):
        return torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.ReLU(), torch.nn.Linear(80, 2))

    def batch(self, seed, step, worker, workers, size, unlike):
        x = torch.randn(size, 40, generator=study_tasks.generator(seed, step, worker))
        return x, (x.sum(1) > 0).long()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model):
        x, y = self.batch(0, 0, 0, 1, 500, False)
        return 100 * float((model(x).argmax(1) == y).float().mean())

TASK = Lines()
"""


# This takes about 150 s on two idle cores. CI's cores are shared with another job, and were three
# times slower.
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.xdist_group("study")
def test_the_short_study_knows_every_number(run, tmp_path):
    command = [sys.executable, STUDY, "--quick", "--output", tmp_path]
    tables = run(command, limit=1800)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    shown = study_results.TABLES
    assert {row["experiment"] for row in rows} == {*shown, "trials"}
    assert all(row["mean"] or row["diverged"] != "0" for row in rows)
    for number in study_results.NUMBERS:
        assert any(row[number] for row in rows), number
    for table in shown.values():
        assert f"## {table.title}\n" in tables

    results = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*.json")]
    of_defaults = {"task": "lstm", "steps": 150, "optimizer": "adamw", "momentum": None}
    scores = {
        result["run"]["method"]: result["score"]
        for result in results
        if of_defaults.items() <= result["run"].items()
    }
    # The few steps are enough to tell a trained model from an untrained one, which is at 6.6 bits.
    assert max(scores["dense"], scores["ScaleCom"], scores["LocalTopK"]) < 4

    # A study that was interrupted, here with one file missing, continues where it was. Existing
    # results are not computed again.
    files = sorted((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    lost = next(path for path in files if path.name.startswith("lstm-dense"))
    kept = next(path for path in files if path != lost)
    before, same = kept.stat().st_mtime_ns, json.loads(lost.read_text())
    lost.unlink()
    run(command, limit=500)
    assert kept.stat().st_mtime_ns == before
    again = json.loads(lost.read_text())
    assert {**again, "seconds": 0} == {**same, "seconds": 0}


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_a_model_of_ones_own(run, tmp_path):
    task = tmp_path / "lines.py"
    task.write_text(OWN)
    command = [sys.executable, STUDY, "--task", task, "--quick", "--output", tmp_path / "study"]
    tables = run(command, limit=900)
    assert "lines" in tables
    assert "with look-ahead" in tables
