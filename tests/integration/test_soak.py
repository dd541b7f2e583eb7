"""`make soak` for a minute and a half, jobs with known faults, and what the soak must notice."""

import os
import random
import re
import sys
from pathlib import Path

import momentum
import pytest
import soak
from conftest import ROOT
from soak import Plan, Point

SOAK = [sys.executable, ROOT / "scripts" / "checks" / "soak.py"]


@pytest.mark.nightly
@pytest.mark.timeout(1300)
def test_all_jobs(run):
    # A job lasts until its last fault is over. If a worker was killed, this may take a minute.
    output = run([*SOAK, "--minutes", "1.5"], limit=1200)
    survived, compared = map(
        int, re.search(r"(\d+) faults survived, weights compared at (\d+)", output).groups()
    )
    assert survived >= len(soak.PLANS), output
    assert compared > 10, output
    assert "0 complaints" in output


# One worker dies in backward. Then, of three workers, the leader dies between its choice and the
# averages. Another worker comes later.
TWO_DEATHS = [f"die {Point.BACKWARD}", f"die {Point.EXCHANGE}", soak.COMES]
# Momentum would be sent on top of the gradients that workers account for.
MOMENTUM = {"rate": 20, "mu": 0, "outliers": None}


@pytest.mark.long
@pytest.mark.timeout(500, func_only=True)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan("horovodrun", "drop-in", soak.AS_THEY_ARE), marks=pytest.mark.nightly),
        pytest.param(
            Plan("horovodrun", "drop-in", MOMENTUM, method="momentum:Momentum"),
            marks=pytest.mark.nightly,
        ),
        # Commits lie in the middle of rounds.
        Plan("horovodrun", "drop-in", soak.AS_THEY_ARE, {"local_steps": 3}),
    ],
    ids=["plain", "a method with a state", "local steps"],
)
def test_two_workers_die_and_another_one_comes(plan, monkeypatch):
    """Every rank keeps its own residues, and a method's state is that of the last commit."""
    monkeypatch.setenv("PYTHONPATH", str(Path(momentum.__file__).parent), prepend=os.pathsep)
    _, complaints, diaries = soak.watch(plan, 4, random.Random(0), lambda job: TWO_DEATHS)
    assert not complaints, "\n".join(complaints)
    sizes = [[entry["size"] for entry in soak.of(diary, "begin")] for diary in diaries]
    assert sorted(sizes) == [[3], [4], [4, 3], [4, 3, 2, 3], [4, 3, 2, 3]]
    every = plan.rounds.get("local_steps", 1)
    commits = [commit for diary in diaries for commit in soak.of(diary, "commit")]
    assert every == 1 or all(commit["step"] == commit["batch"] // every for commit in commits)


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "rounds", "point"),
    [
        ("drop-in", {}, Point.EXCHANGE),
        ("drop-in", {"local_steps": 4}, Point.SAVING),
        ("DDP hook", {}, Point.AVERAGES),
    ],
)
def test_torchrun_starts_workers_again(optimizer, rounds, point):
    """One worker dies, and all workers resume from their own checkpoints."""
    plan, fault = Plan("torchrun", optimizer, soak.COMPRESSED, rounds), f"die {point}"

    def after_both_saved(job):
        files = [f"checkpoint-{rank}-*.pt" for rank in range(2)]
        job.wait_until(lambda: all(map(any, map(job.folder.glob, files))), "nothing was saved")
        yield fault

    count, complaints, diaries = soak.watch(plan, 2, random.Random(0), after_both_saved)
    assert not complaints, "\n".join(complaints)
    assert count[fault] == 1
    assert count[soak.COMPARED] > 1
    assert [diary[0]["restarts"] for diary in diaries].count(1) == 2


LOSSY = """
from scalecom_hvd.ddp import ScaleCom
class Lossy(ScaleCom):
    def step(self, bucket, collectives, state):
        result = yield from super().step(bucket, collectives, state)
        if collectives.position == 0:
            for tensor in bucket.tensors:
                tensor.residue.mul_(0.9)
        return result
"""


@pytest.mark.long
@pytest.mark.parametrize("rounds", [{}, soak.TRAVELS], ids=["every step", "local steps"])
def test_a_part_of_one_residue_is_missed(tmp_path, monkeypatch, rounds):
    (tmp_path / "lossy.py").write_text(LOSSY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(soak.tempfile, "tempdir", str(tmp_path))
    plan = Plan("torchrun", "drop-in", soak.COMPRESSED, rounds, method="lossy:Lossy")
    _, complaints, _ = soak.watch(plan, 2, random.Random(0), has_exchanged_twice)
    assert len(complaints) > 1
    for complaint in complaints[:-1]:  # the last one names the folder
        assert "what ranks sent and what arrived differ by" in complaint


def has_exchanged_twice(job):
    """No fault, but the job goes on until residues have been there at a commit."""

    def steps():
        commits = [soak.of(diary, "commit") for diary in job.workers().values()]
        return min((of_rank[-1]["step"] for of_rank in commits if of_rank), default=0)

    job.wait_until(lambda: steps() >= 5, "it trained too slowly")
    return []
