"""make soak: trains for minutes while workers are killed, stopped, added and sent home.

Jobs follow each other, one for each way of using ScaleCom in PyTorch (`PLANS`). Horovod's jobs go
on with the workers that are left. torchrun starts all workers again, and each goes on from its own
checkpoint. The workers (soak_worker.py) check at every commit that nothing was lost. This script
reads their diaries: weights must be equal on all ranks at every commit. It ends with a table of
faults, and with exit code 1 if any was not survived. If a job has complaints, its folder is kept.
It holds the log, and every worker's diary and checkpoint. where-PID says where a worker's threads
were at the end.

    python scripts/checks/soak.py --minutes 3 --ranks 4
    python scripts/checks/soak.py --minutes 3 --only "local steps" --seed 5
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

# Seconds until training starts, or goes on after a fault, at most. A busy machine needs them.
LIMIT = 240
# Only the neighbours of a dying worker notice its death at once. Horovod's other workers wait for
# so many seconds, and a newcomer may take as long to start.
GLOO_TIMEOUT = 25
Diary = list[dict[str, Any]]
Alive = dict[int, str]
"""{process number: host}"""


class Point(enum.StrEnum):
    """Where in a step a worker may be told to die, or to wait."""

    BACKWARD = "in backward"  # before anything is sent
    EXCHANGE = "as the leader between its choice and the averages"
    SIGNAL = "before it tells the other ranks of its gradients"
    AVERAGES = "while averages are made"
    SAVING = "while a checkpoint is written"


@dataclasses.dataclass
class Plan:
    """What a job does.

    Attributes:
        optimizer: "drop-in"; "stock": Horovod's own; "local steps"; and under torchrun "torchrun",
            the optimizer of scalecom_hvd.ddp, or "DDP hook".
        method: as module:class.
        rounds: the optimizer's arguments on local steps.
        last: the batch after which training ends.
        random_faults: whether gradients overflow, or are missing, at random.
        deaths: {host: [batch, point]}, for a job whose course is known beforehand.
        grow_at: the batch before which two workers wait for another one.
    """

    optimizer: str = "drop-in"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    method: str = "scalecom_hvd.torch:ScaleCom"
    commit_every: int = 5
    last: int | None = None
    seed: int = 0
    random_faults: bool = True
    deaths: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    grow_at: int | None = None

    @property
    def elastic(self) -> bool:
        """Whether Horovod runs it, not torchrun."""
        return self.optimizer not in ("torchrun", "DDP hook")

    @property
    def points(self) -> list[Point]:
        """The points that a worker of this plan reaches in every step."""
        signals = self.optimizer in ("drop-in", "torchrun") and not self.rounds
        missing = {Point.SIGNAL: not signals, Point.AVERAGES: self.optimizer == "stock"}
        return [point for point in Point if not missing.get(point)]


COMPRESSED, AS_THEY_ARE = {"rate": 20, "bits": 3}, {"rate": 20, "bits": 32}
AHEAD = COMPRESSED | {"lookahead": True, "leader": "staggered", "bucket_bytes": 10_000, "beta": 0.5}
TRAVELS = {"local_steps": 6, "overlap": 2, "fragments": 2}
PLANS = [
    Plan(settings=AS_THEY_ARE),
    Plan(settings=AHEAD),
    Plan("stock", COMPRESSED),
    Plan("local steps", AS_THEY_ARE, {"local_steps": 3}),
    Plan("local steps", COMPRESSED, TRAVELS),
    Plan("torchrun", COMPRESSED),
    Plan("torchrun", AHEAD),
    Plan("torchrun", AS_THEY_ARE, TRAVELS),
    Plan("DDP hook", COMPRESSED),
]


class Job:
    """A job on this machine with workers that may die.

    Its folder holds `hosts`, which Horovod's host discovery shows; `order-PID`, which tells a
    worker where to die; `stop`, which ends the job; checkpoints; and every worker's diary, with a
    JSON object per line. Under Horovod every worker has a host of its own, because Horovod gives up
    the host of a worker that died. So it gets names of this machine that Horovod takes for
    different ones: 127.0.0.1, 127.0.00.1, ...
    """

    def __init__(self, folder: Path, plan: Plan, ranks: int) -> None:
        self.folder, self.elastic = folder, plan.elastic
        worker = Path(__file__).with_name("soak_worker.py")
        program = [str(worker), str(folder), json.dumps(dataclasses.asdict(plan))]
        if self.elastic:
            self.hosts: list[str] = []
            self.hosts_so_far = 0
            for _ in range(ranks):
                self.add_host()
            discover = folder / "discover.sh"
            discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
            discover.chmod(0o755)
            command = [launch.find("horovodrun"), "--gloo", "-np", str(ranks)]
            command += ["--min-np", str(min(2, ranks)), "--max-np", str(ranks)]
            command += ["--gloo-timeout-seconds", str(GLOO_TIMEOUT)]
            command += ["--host-discovery-script", str(discover), sys.executable, *program]
        else:
            command = launch.command("torchrun", ranks, program)
            command[3:3] = ["--max-restarts", "1000"]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                # Without this, restarted ranks of Gloo look for the dead ones in PyTorch 2.13.
                env=launch.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def add_host(self) -> None:
        self.hosts_so_far += 1
        self._show([*self.hosts, f"127.0.{'0' * self.hosts_so_far}.1"])

    def remove_host(self, host: str) -> None:
        self._show([other for other in self.hosts if other != host])

    def _show(self, hosts: list[str]) -> None:
        self.hosts = hosts
        write_whole(self.folder / "hosts", "".join(f"{host}:1\n" for host in hosts))

    def diaries(self) -> dict[int, Diary]:
        """What every worker has written so far, by its process number."""
        return {int(path.stem): list(_entries(path)) for path in self.folder.glob("*.jsonl")}

    def workers(self) -> Alive:
        """The living workers that have begun to train."""
        begun = {pid: diary[0]["host"] for pid, diary in self.diaries().items() if diary}
        return {pid: host for pid, host in begun.items() if self._is_worker(pid)}

    def _is_worker(self, pid: int) -> bool:
        """Whether the worker lives. Its number may belong to another process by now."""
        try:
            return str(self.folder) in Path("/proc", str(pid), "cmdline").read_text()
        except OSError:
            return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, limit: float) -> int | None:
        """The exit code; None if the job does not end in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
        return self._process.poll()

    def tell_where(self) -> None:
        """Make every living worker write where its threads are, however busy the machine is."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        end = time.time() + LIMIT
        while time.time() < end and not all(map(self._has_told_where, self.workers())):
            time.sleep(0.1)

    def _has_told_where(self, pid: int) -> bool:
        return "most recent call first" in (self.folder / f"where-{pid}").read_text()

    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        """End everything of this job. Workers have sessions of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in self.diaries():
            if self._is_worker(pid):
                os.kill(pid, signal.SIGKILL)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others read at any time."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a worker may die while it writes
            yield json.loads(line)


def of(diary: Diary, event: str) -> Diary:
    return [entry for entry in diary if entry["event"] == event]


@dataclasses.dataclass
class Findings:
    """What a job's diaries say. compared: at how many commits. complaints: what was wrong."""

    steps: int
    compared: int
    complaints: list[str]


def judge(diaries: dict[int, Diary], folder: Path) -> Findings:
    """Compare what the workers wrote."""
    commits = collections.defaultdict(list)
    for diary in diaries.values():
        for commit in of(diary, "commit"):
            commits[commit["generation"], commit["batch"]].append(commit)
    shared = {key: told for key, told in commits.items() if len(told) > 1}
    complaints = [
        f"weights differ between ranks at batch {batch}"
        for (_, batch), told in shared.items()
        if len({commit["weights"] for commit in told}) > 1
    ]
    complaints += [
        f"batch {entry['batch']}, rank {entry['rank']} of {entry['size']}: {entry['complaint']}"
        for diary in diaries.values()
        for entry in of(diary, "violation")
    ]
    for path in folder.glob("checkpoint-*.pt"):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            complaints.append(f"{path.name} cannot be loaded: {error}")
    steps = sum(max(commit["made"] for commit in told) for told in commits.values())
    return Findings(steps, len(shared), complaints)


class Trouble:
    """Makes a fault from outside every few seconds, and waits until training goes on."""

    def __init__(self, job: Job, ranks: int, dice: random.Random, points: list[Point]) -> None:
        self.job, self.ranks, self.dice, self.points = job, ranks, dice, points
        self.survived: collections.Counter = collections.Counter()
        self.tried: collections.Counter = collections.Counter()
        self.restarts = 0  # that torchrun must make

    def make(self, limit: float) -> None:
        """Make one fault. Raise TimeoutError if the job has not recovered after `limit` seconds."""
        alive, before = self.job.workers(), self.told("begin", "generation")
        comes = len(alive) < self.ranks
        if comes:
            if not self.job.elastic:
                raise ChildProcessError("a worker ended that nobody killed")
            kind, spare = "a worker comes", list(alive)
            self.job.add_host()
        else:
            kind, fault = self.dice.choice(list(self.faults().items()))
            spare = fault(alive)
            if len(spare) < len(alive) and not self.job.elastic:
                spare = []
                self.restarts += 1
        self.tried[kind] += 1
        began, victims = time.time(), set(alive) - set(spare)
        while time.time() < began + limit:
            if not self.job.running:
                raise ChildProcessError(f"the job ended after: {kind}")
            workers = self.job.workers()
            later = {
                pid: commit["generation"]
                for pid, diary in self.job.diaries().items()
                for commit in of(diary, "commit")[-1:]
                if commit["time"] > began and pid in workers
            }
            together = len(later) >= 2 and len(set(later.values())) == 1
            # A worker that was told to die, or that lost its host, still trains for a while. If
            # workers come or go, Horovod starts again. Until it has, nothing else may happen: while
            # it starts, it forgets what it is told of hosts (0.28.1, common/elastic.py: on_reset).
            gone = victims.isdisjoint(workers)
            anew = not (victims or comes) or before.isdisjoint(later.values())
            there = later.keys() - alive.keys() if comes else later.keys() >= set(spare)
            if together and gone and anew and there:
                self.survived[kind] += 1
                return
            time.sleep(0.2)
        raise TimeoutError(f"training did not go on within {limit:.0f} s after: {kind}")

    def told(self, event: str, fact: str) -> set[Any]:
        """What diaries say: this fact of all events of a kind."""
        diaries = self.job.diaries().values()
        return {entry[fact] for diary in diaries for entry in of(diary, event)}

    def faults(self) -> dict[str, Callable[[Alive], list[int]]]:
        """What may happen. Each returns the workers that must live on."""
        faults: dict[str, Callable[[Alive], list[int]]] = {
            "kill -9 at any moment": self.kill,
            "a worker stands still for seconds": self.stop,
        }
        for point in self.points:
            for deed in ("die", "wait"):
                faults[f"{deed} {point}"] = partial(self.order, point=point, deed=deed)
        if self.job.elastic:
            faults["a host is taken away"] = self.remove
        if self.ranks >= 4:
            faults["kill -9 of all but two"] = partial(self.kill, spared=2)
        return faults

    def kill(self, alive: Alive, spared: int | None = None) -> list[int]:
        victims = self.dice.sample(sorted(alive), 1 if spared is None else len(alive) - spared)
        time.sleep(self.dice.uniform(0, 0.2))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [pid for pid in alive if pid not in victims]

    def order(self, alive: Alive, point: Point, deed: str = "die") -> list[int]:
        """Tell a worker to die, or to wait, at a point of its next step."""
        victim = self.dice.choice(sorted(alive))
        write_whole(self.job.folder / f"order-{victim}", f"{deed} {point}")
        return [pid for pid in alive if pid != victim or deed == "wait"]

    def stop(self, alive: Alive) -> list[int]:
        victim = self.dice.choice(sorted(alive))
        os.kill(victim, signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.5, 8))
        os.kill(victim, signal.SIGCONT)
        return list(alive)

    def remove(self, alive: Alive) -> list[int]:
        victim = self.dice.choice(sorted(alive))
        self.job.remove_host(alive[victim])
        return [pid for pid in alive if pid != victim]


def watch(plan: Plan, ranks: int, seconds: float, dice: random.Random) -> tuple[Findings, Trouble]:
    """Run one job for this many seconds."""
    folder, began = Path(tempfile.mkdtemp(prefix="soak.")), time.time()
    job = Job(folder, plan, ranks)
    trouble = Trouble(job, ranks, dice, plan.points)
    failure = []
    try:
        while len(job.workers()) < ranks:
            if not job.running or time.time() > began + LIMIT:
                raise TimeoutError("the job did not start")
            time.sleep(0.2)
        while not trouble.tried or time.time() < began + seconds:
            time.sleep(dice.uniform(0.5, 2))
            trouble.make(LIMIT)
        # PyTorch 2.13 may abort finished workers as their processes end, with and without ScaleCom.
        # torchrun starts them again, so restarts count only until here.
        if not job.elastic and max(trouble.told("begin", "restarts")) != trouble.restarts:
            raise ChildProcessError("workers failed that nobody killed")
        (folder / "stop").touch()  # workers end at their next commit
        if job.wait(LIMIT) != 0:
            raise ChildProcessError("the job did not end well")
    except (TimeoutError, ChildProcessError) as error:
        job.tell_where()
        failure = [f"{error}\n{job.output()[-5000:]}"]
    finally:
        job.close()
    findings = judge(job.diaries(), folder)
    findings.complaints += failure
    if findings.complaints:
        findings.complaints.append(f"the log and the diaries of {plan} are in {folder}")
    else:
        shutil.rmtree(folder)
    return findings, trouble


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    kinds = sorted({plan.optimizer for plan in PLANS})
    parser.add_argument("--minutes", type=float, default=3, help="how long, in all")
    parser.add_argument("--ranks", type=int, default=4, help="at least 3")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong when")
    parser.add_argument("--only", choices=kinds, help="only jobs of this kind")
    arguments = parser.parse_args()
    if arguments.ranks < 3:
        parser.error("--ranks must be at least 3: one is killed, and two must be left")
    if not 0 < arguments.minutes < float("inf"):
        parser.error("--minutes must be more than 0")

    dice = random.Random(arguments.seed)
    plans = [plan for plan in PLANS if arguments.only in (None, plan.optimizer)]
    seconds = arguments.minutes * 60 / len(plans)
    steps, compared, complaints = 0, 0, []
    tried, survived = collections.Counter(), collections.Counter()
    for number, plan in enumerate(plans):
        plan = dataclasses.replace(plan, seed=arguments.seed + number)
        findings, trouble = watch(plan, arguments.ranks, seconds, dice)
        faults = f"{trouble.survived.total()} of {trouble.tried.total()} faults survived"
        print(f"{plan.optimizer} {plan.settings}: {findings.steps} steps, {faults}", flush=True)
        steps, compared = steps + findings.steps, compared + findings.compared
        complaints += findings.complaints
        tried, survived = tried + trouble.tried, survived + trouble.survived
    print(f"\n{'fault':53s}  tried  survived")
    for kind in sorted(tried):
        print(f"{kind:53s}  {tried[kind]:5d}  {survived[kind]:8d}")
    print(f"\n{steps} steps, {tried.total()} faults, {survived.total()} survived")
    print(f"weights compared at {compared} commits: {len(complaints)} complaints")
    print(*complaints[:20], sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
