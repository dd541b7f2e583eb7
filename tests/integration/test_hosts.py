"""Hosts on one machine.

Horovod jobs run across them at the requested bandwidth. However the script is ended, nothing of the
hosts is left.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import pytest
from hosts import Hosts

SCRIPT = hosts.__file__
WORKER = str(Path(__file__).with_name("worker_hosts.py"))
PLACES = ("/run/netns", "/run/sshd", "/root/.ssh", "/root/.horovod")

# These tests look at what else is on the machine, so they run one after the other.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(180, func_only=True),
    pytest.mark.xdist_group("hosts"),
]


def outside() -> dict[str, object]:
    """Return what a cluster could leave on the machine, except for processes."""
    return {
        "namespaces": subprocess.check_output(["ip", "netns", "list"], text=True),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "mounts": Path("/proc/self/mounts").read_text(),
        "places": [*filter(os.path.exists, PLACES)],
    }


def inside(space: str) -> set[str]:
    """Return the processes of a cluster, found by its PID namespace."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") == space:
                found.add(f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()}")
    return found


def space_of(cluster: Hosts) -> str:
    return subprocess.check_output(
        cluster.enter("h1", ["readlink", "/proc/self/ns/pid"]), text=True
    ).strip()


@pytest.fixture
def tidy(machine):
    """tidy(space) registers a cluster by its PID namespace.

    At the end of the test, the cluster must have ended and the machine must be as it was before.
    """
    before, spaces = outside(), []
    yield spaces.append
    limit = time.time() + 5
    while any(inside(space) for space in spaces) and time.time() < limit:
        time.sleep(0.05)
    assert [inside(space) for space in spaces] == [set() for _ in spaces]
    assert outside() == before


def results(output: str, word: str) -> list[dict]:
    return [json.loads(found) for found in re.findall(rf"{word} (\{{.*\}})", output)]


@pytest.mark.parametrize(("launcher", "n"), [("horovodrun --gloo", 2), ("mpirun", 4)])
def test_all_reduce_across_hosts(tidy, tmp_path, monkeypatch, launcher, n):
    mbit, numel, times, odd = 100, 1_000_000, 2, "a b;c='d' $e=\"f\""
    monkeypatch.chdir(tmp_path)
    with Hosts(n, mbit) as cluster:
        tidy(space_of(cluster))
        before = cluster.bytes_sent()
        program = [WORKER, "all-reduce", str(numel), str(times)]
        more = {"environment": {"SCALECOM_TEST": odd}, "stdout": subprocess.PIPE}
        job = cluster.run(launcher, program, timeout=50, **more)
        assert job.returncode == 0, job.stdout
        grown = {name: sent - before[name] for name, sent in cluster.bytes_sent().items()}
    ranks = sorted(results(job.stdout, "RESULT"), key=lambda rank: rank["rank"])
    assert [rank["rank"] for rank in ranks] == list(range(n)), job.stdout
    assert sorted(r["host"] for r in ranks) == [f"h{i + 1}" for i in range(n)] == cluster.names
    share = 2 * (n - 1) / n * 4 * numel
    for rank in ranks:
        assert rank["size"] == n
        assert rank["exact"]
        assert rank["variable"] == odd
        assert rank["directory"] == str(tmp_path)
        assert rank["sent"] == pytest.approx(share, rel=0.15)
        assert rank["seconds"] >= share * 8 / (mbit * 1e6)
        # There was one more all-reduce than the worker counted, and launchers send messages too.
        assert grown[rank["host"]] == pytest.approx(share * (times + 1), rel=0.15)


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGINT, "horovodrun --gloo"),
        (signal.SIGINT, "mpirun"),
        (signal.SIGTERM, "mpirun"),
        (signal.SIGKILL, "mpirun"),
    ],
)
def test_nothing_is_left_when_the_script_is_ended(tidy, number, launcher):
    options = ["--hosts", "3", "--mbit", "1000", "--launcher", launcher]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *options, "--", WORKER, "hang"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # If the tests run in the background, they and their child processes ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    waiting = []
    with process:
        for line in process.stdout:
            waiting += results(line, "WAITING")
            if len(waiting) == 3:
                break
        (space,) = {rank["space"] for rank in waiting}
        tidy(space)
        assert inside(space)
        process.send_signal(number)
        assert process.wait(10) == {signal.SIGINT: 130}.get(number, -number)
