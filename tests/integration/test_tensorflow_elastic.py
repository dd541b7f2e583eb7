"""Elastic training with TensorFlow.

A worker is killed, another one joins, training goes on, and every rank keeps its own residues.
"""

import json
import os
import signal
import sys
from pathlib import Path

import launch
import pytest
from soak import of

WORKER = Path(__file__).with_name("worker_tensorflow_elastic.py")
# COMMITTED is the last commit before the kill. GROWN_AT and LAST are those of the worker.
COMMITTED, GROWN_AT, LAST = 10, 20, 40

pytestmark = [pytest.mark.long, pytest.mark.timeout(150, func_only=True)]


@pytest.fixture
def diaries(run, tmp_path):
    """diaries(kind, settings) -> what each worker of a job wrote down: [[event, ...], ...].

    The job loses a worker and gets another one.
    """

    def runner(kind, settings):
        # Horovod gives up the host of a failed worker, so the worker that fails has its own host.
        (tmp_path / "hosts").write_text("localhost:2\n127.0.0.1:1\n")
        (tmp_path / "discover.sh").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
        (tmp_path / "discover.sh").chmod(0o755)
        elastic = "--gloo -np 3 --min-np 2 --max-np 3 --gloo-timeout-seconds 10"
        discovery = ["--host-discovery-script", tmp_path / "discover.sh"]
        worker = [sys.executable, WORKER, kind, json.dumps(settings), tmp_path]
        command = [launch.find("horovodrun"), *elastic.split(), *discovery, *worker]
        output = run(command, limit=120)
        found = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in tmp_path.glob("*.jsonl")
        ]
        assert len(found) == 4, output
        return found

    yield runner
    for path in tmp_path.glob("*.jsonl"):  # workers have sessions of their own
        process = Path("/proc", path.stem)
        if process.exists() and WORKER.name in (process / "cmdline").read_text():
            os.kill(int(path.stem), signal.SIGKILL)


def committed(diary, batch, what, size=None):
    """What all commits at a batch say, or those of this many ranks."""
    commits = [entry for entry in of(diary, "commit") if entry["batch"] == batch]
    return {entry[what] for entry in commits if size in (None, entry["size"])}


def mean_loss(diary, first, last):
    losses = [entry["loss"] for entry in of(diary, "step") if first <= entry["batch"] < last]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("tape", {"rate": 20, "bits": 32, "leader": "staggered", "bucket_bytes": 10_000}),
        pytest.param("fit", {"rate": 20}, marks=pytest.mark.nightly),
        # As in Horovod's example, survivors take an additional step after each restart of Horovod.
        pytest.param("example", {"rate": 20, "bits": 8}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_worker_is_killed_and_another_one_comes(diaries, kind, settings):
    told = diaries(kind, settings)
    survivors = [
        diary for diary in told if [entry["size"] for entry in of(diary, "begin")] == [3, 2, 3]
    ]
    (victim,) = [diary for diary in told if not of(diary, "end")]
    (newcomer,) = [diary for diary in told if diary not in survivors and diary is not victim]
    assert len(survivors) == 2
    assert of(victim, "step")[-1]["batch"] > COMMITTED, "it should have died between two commits"

    # The survivors go on from the last commit, each with its own residues.
    extra = 1 if kind == "example" else 0
    for diary in survivors:
        _, after_loss, after_gain = of(diary, "begin")
        assert (after_loss["batch"], after_loss["step"]) == (COMMITTED, COMMITTED + 2 * extra)
        assert (after_gain["batch"], after_gain["step"]) == (GROWN_AT, GROWN_AT + 3 * extra)
        if not extra:
            for begin in (after_loss, after_gain):
                # Commits of the earlier ranks: there were 3 before the loss and 2 before the gain.
                at, size = begin["batch"], 5 - begin["size"]
                assert committed(diary, at, "residues", size) == {begin["residues"]}
        for broken in of(diary, "broken"):
            assert broken["residues"] == broken["before"], "a step that died changed residues"
    if kind == "tape":
        assert all(of(diary, "broken") for diary in survivors)
        traces = {entry["count"] for diary in survivors for entry in of(diary, "traces")}
        assert traces == {1}, "a function was traced again"
    for begins in zip(*(of(diary, "begin")[1:] for diary in survivors), strict=True):
        residues = {begin["residues"] for begin in begins}
        assert len(residues) == 2, "residues of one rank came to another"

    # The newcomer starts at GROWN_AT.
    (begin,) = of(newcomer, "begin")
    assert begin["batch"] == GROWN_AT
    assert of(newcomer, "step")[0]["step"] == GROWN_AT + 1 + 3 * extra
    for first in of(newcomer, "first"):
        # At most what was sent may be off.
        sent = 0 if settings.get("bits") == 32 else 1 / 20
        assert first["off"] <= 1.1 * sent, "the newcomer's residues did not start at zero"
        assert first["kept"] > 0

    # All of them train to the end.
    trained = [*survivors, newcomer]
    assert len({of(diary, "end")[0]["weights"] for diary in trained}) == 1
    assert len({of(diary, "end")[0]["residues"] for diary in trained}) == 3
    for batch in (15, 25, 30, 35, LAST):
        weights = set().union(*(committed(diary, batch, "weights") for diary in trained))
        assert len(weights) == 1, f"weights differ at batch {batch}"
    for diary in survivors:
        assert mean_loss(diary, 0, 5) > mean_loss(diary, 15, 20) > mean_loss(diary, 35, LAST)
