"""Three minutes of `make soak`: workers are killed, stopped, added and sent home at random; and what it says to wrong arguments."""

import random
import re
import sys
from pathlib import Path

import pytest
import soak
from conftest import ROOT
from tqdm import tqdm

SOAK = [sys.executable, ROOT / "scripts" / "soak.py"]


@pytest.mark.timeout(1000)
def test_three_minutes(run):
    # A job lasts until the last fault in it is over, which may take a minute where a worker was killed.
    output = run([*SOAK, "--minutes", "3", "--ranks", "4"], limit=900)
    steps, tried, survived = map(int, re.search(r"(\d+) steps, (\d+) faults, (\d+) survived", output).groups())
    assert steps > 50, output
    assert tried == survived > 20, output
    assert "0 complaints" in output


def test_a_fault_that_is_not_survived_leaves_its_folder(tmp_path, monkeypatch):
    """What a worker complains of is counted, and the folder of its job is kept, to be looked into."""
    monkeypatch.setattr(soak.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(soak.Trouble, "make", _complain)
    findings, _ = soak.watch(soak.Plan(settings=soak.COMPRESSED), 2, 1, random.Random(0), tqdm(disable=True))
    complaint, where = findings.complaints
    assert "the job ended after: nothing" in complaint
    folder = Path(where.rpartition(" ")[2])
    assert folder.parent == tmp_path
    assert len(list(folder.glob("*.jsonl"))) == 2
    assert "Current thread" in (folder / "log").read_text(), "workers should have said where they are"


def _complain(trouble, limit):
    raise ChildProcessError("the job ended after: nothing")


def test_wrong_arguments(run):
    assert "--ranks must be at least 3" in run([*SOAK, "--ranks", "2"], fails=True)
    assert "invalid choice" in run([*SOAK, "--only", "nothing"], fails=True)
    assert "--minutes must be more than 0" in run([*SOAK, "--minutes", "nan"], fails=True)
