"""Elastic training with PyTorch.

Workers are killed at the worst moments, another one joins, and every rank keeps its own residues.
The workers are those of soak_worker.py, which check at every commit that nothing was lost. Here
the faults are known beforehand. test_soak.py covers other ways of using ScaleCom.
"""

import os
from pathlib import Path

import momentum
import pytest
import soak

COMMIT_EVERY, KILLED_AT, LEADER_KILLED_AT, GROWN_AT, LAST = 5, 12, 22, 35, 60
PLAN = {"commit_every": COMMIT_EVERY, "last": LAST, "settings": {"rate": 20}}
# One worker dies in backward. Then, of three workers, the leader dies between its choice and the
# averages. Another worker comes later.
DEATHS = {
    "127.0.00.1": (KILLED_AT, soak.Point.BACKWARD),
    "127.0.000.1": (LEADER_KILLED_AT, soak.Point.EXCHANGE),
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture
def diaries(tmp_path):
    """diaries(ranks, plan) -> what each worker of a job wrote down.

    The job must end by itself and without complaints.
    """
    jobs = []

    def runner(ranks, **plan):
        plan = soak.Plan(**(PLAN | plan), random_faults=False)
        job = soak.Job(tmp_path, plan, ranks)
        jobs.append(job)
        assert job.wait(250) == 0, job.output()
        findings = soak.judge(job.diaries(), tmp_path)
        assert not findings.complaints, findings.complaints
        assert findings.compared >= plan.last // COMMIT_EVERY - 1
        return list(job.diaries().values())

    yield runner
    for job in jobs:
        job.close()


def test_workers_are_killed_and_another_one_comes(diaries):
    told = diaries(4, deaths=DEATHS, grow_at=GROWN_AT)

    survivors = [
        diary
        for diary in told
        if [entry["size"] for entry in soak.of(diary, "begin")] == [4, 3, 2, 3]
    ]
    (newcomer,) = [diary for diary in told if soak.of(diary, "begin")[0]["batch"] == GROWN_AT]
    assert len(told) == 5
    assert len(survivors) == 2
    assert all(soak.of(diary, "end") for diary in [*survivors, newcomer])
    for diary in survivors:
        batches = [entry["batch"] for entry in soak.of(diary, "begin")]
        assert batches[1] in range(KILLED_AT - KILLED_AT % COMMIT_EVERY, KILLED_AT)
        # The step in which the victim leads is not fixed, but it must lie between two commits.
        assert (
            LEADER_KILLED_AT - LEADER_KILLED_AT % COMMIT_EVERY <= batches[2] <= LEADER_KILLED_AT + 5
        )
        assert batches[3] == GROWN_AT
    for begins in zip(*(soak.of(diary, "begin")[1:] for diary in survivors), strict=True):
        assert len({begin["residues"] for begin in begins}) == 2, (
            "residues of one rank came to another"
        )
    assert soak.of(newcomer, "begin")[0]["norm"] == 0


def test_a_methods_state_is_that_of_the_last_commit(diaries, monkeypatch):
    """A worker dies in the middle of a step.

    The others compare their residues and momenta with those that they committed.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(momentum.__file__).parent), prepend=os.pathsep)
    deaths = {"127.0.00.1": (KILLED_AT, soak.Point.EXCHANGE)}
    # Momentum would be sent on top of the gradients that workers account for.
    settings = {"rate": 20, "mu": 0}
    told = diaries(3, method="momentum:Momentum", settings=settings, deaths=deaths, last=25)
    survivors = [diary for diary in told if soak.of(diary, "end")]
    sizes = [[entry["size"] for entry in soak.of(diary, "begin")] for diary in survivors]
    assert sizes == [[3, 2]] * 2
    for diary in survivors:
        assert soak.of(diary, "begin")[1]["batch"] == KILLED_AT - KILLED_AT % COMMIT_EVERY


def test_local_steps_while_a_worker_is_killed_and_another_comes(diaries):
    """Rounds have three steps, with commits in the middle of them.

    Survivors go on with their own parameters, and a newcomer with the common ones.
    """
    rounds = {"local_steps": 3}
    told = diaries(4, optimizer="local steps", rounds=rounds, deaths=DEATHS, grow_at=GROWN_AT)
    assert len(told) == 5
    assert sum(bool(soak.of(diary, "end")) for diary in told) == 3
    last = {diary[-2]["step"] if diary[-1]["event"] == "end" else None for diary in told} - {None}
    assert last == {LAST // 3}
