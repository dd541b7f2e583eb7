"""A minute and a half of `make soak`, and its errors on wrong arguments.

Workers are killed, stopped, added and dismissed at random.
"""

import os
import random
import re
import sys
import time
from pathlib import Path

import pytest
import soak
from conftest import ROOT

SOAK = [sys.executable, ROOT / "scripts" / "checks" / "soak.py"]


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_all_jobs(run):
    # A job lasts until its last fault is over. If a worker was killed, this may take a minute.
    output = run([*SOAK, "--minutes", "1.5", "--ranks", "4"], limit=1200)
    steps, tried, survived = map(
        int, re.search(r"(\d+) steps, (\d+) faults, (\d+) survived", output).groups()
    )
    assert steps > 50, output
    assert tried == survived >= len(soak.PLANS), output
    assert "0 complaints" in output


class JobThatStartsAgainLate:
    """When a host is removed, this job's workers at first go on as before.

    Horovod has not told them yet.
    """

    running, elastic, removed, looks = True, True, None, 0

    def workers(self):
        return {pid: str(pid) for pid in (1, 2, 3) if str(pid) != self.removed}

    def remove_host(self, host):
        self.removed = host

    def diaries(self):
        self.looks += self.removed is not None
        generations = ["old", "new"] if self.looks > 3 else ["old"]
        begun = [{"event": "begin", "generation": generation} for generation in generations]
        return {
            pid: [
                *begun,
                {"event": "commit", "time": time.time() + 1, "generation": generations[-1]},
            ]
            for pid in self.workers()
        }


def test_the_next_fault_waits_until_horovod_has_started_again(monkeypatch):
    """Without the wait, Horovod forgets a host that is added in the meantime.

    The worker on this host then never starts.
    """
    job = JobThatStartsAgainLate()
    trouble = soak.Trouble(job, 3, random.Random(0), list(soak.Point))
    monkeypatch.setattr(trouble, "faults", lambda: {"a host is taken away": trouble.remove})
    trouble.make(limit=10)
    assert trouble.survived.total() == 1
    assert job.looks > 3


def test_a_fault_that_is_not_survived_leaves_its_folder(tmp_path, monkeypatch):
    """It says where every living worker was.

    Here the leader dies between its choice and the averages, also with Horovod's own optimizer.
    """
    monkeypatch.setattr(soak.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(soak.Trouble, "make", leader_dies)
    plan = soak.Plan("stock", soak.COMPRESSED, random_faults=False)
    findings, _ = soak.watch(plan, 2, 1, random.Random(0))
    complaint, where = findings.complaints
    assert complaint.startswith("it died")
    folder = Path(where.rpartition(" ")[2])
    assert folder.parent == tmp_path
    assert len(list(folder.glob("*.jsonl"))) == 2
    (where,) = [text for file in folder.glob("where-*") if (text := file.read_text())]
    assert "most recent call first" in where


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "rounds", "point"),
    [
        ("torchrun", {}, soak.Point.EXCHANGE),
        ("torchrun", {"local_steps": 4}, soak.Point.SAVING),
        ("DDP hook", {}, soak.Point.AVERAGES),
    ],
)
def test_torchrun_starts_workers_again(monkeypatch, optimizer, rounds, point):
    """One worker dies, and all workers resume from their own checkpoints."""
    monkeypatch.setattr(
        soak.Trouble,
        "faults",
        lambda trouble: {"one dies": lambda alive: trouble.order(alive, point)},
    )
    plan = soak.Plan(optimizer, soak.COMPRESSED, rounds)
    findings, trouble = soak.watch(plan, 2, 1, random.Random(0))
    assert not findings.complaints, findings.complaints
    assert trouble.survived["one dies"] == trouble.restarts > 0
    assert findings.compared > 1


LOSSY = """
from scalecom_hvd.ddp import ScaleCom
class Lossy(ScaleCom):
    def step(self, bucket, collectives, state):
        result = yield from super().step(bucket, collectives, state)
        if collectives.step == 7 and collectives.position == 0:
            for tensor in bucket.tensors:
                tensor.residue.mul_(0.9)
        return result
"""


@pytest.mark.long
@pytest.mark.parametrize("rounds", [{}, soak.TRAVELS], ids=["every step", "local steps"])
def test_a_part_of_one_residue_is_missed(tmp_path, monkeypatch, rounds):
    (tmp_path / "lossy.py").write_text(LOSSY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    plan = soak.Plan("torchrun", soak.COMPRESSED, rounds, method="lossy:Lossy", last=50)
    job = soak.Job(tmp_path, plan, 2)
    try:
        assert job.wait(250) == 0, job.output()
    finally:
        job.close()
    complaints = soak.judge(job.diaries(), tmp_path).complaints
    assert complaints
    assert all("what ranks sent and what arrived differ by" in each for each in complaints)


def leader_dies(trouble, limit):
    left = trouble.order(trouble.job.workers(), soak.Point.EXCHANGE)
    end = time.time() + limit
    while time.time() < end and len(trouble.job.workers()) > len(left):
        time.sleep(0.1)
    raise ChildProcessError("it died" if list(trouble.job.workers()) == left else "it did not die")


def test_wrong_arguments(run):
    assert "--ranks must be at least 3" in run([*SOAK, "--ranks", "2"], fails=True)
    assert "invalid choice" in run([*SOAK, "--only", "nothing"], fails=True)
    assert "--minutes must be more than 0" in run([*SOAK, "--minutes", "nan"], fails=True)
