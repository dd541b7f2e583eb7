"""make soak: trains elastically for minutes under faults, and checks that all of them are survived.

Workers are killed, stopped, added and sent home. Gradients overflow or are missing.

Jobs follow each other, one for each way of using ScaleCom (`PLANS`). Horovod's jobs go on with the
workers that are left. torchrun starts all workers again, and each goes on from its own checkpoint.
The workers (soak_worker.py, soak_tensorflow_worker.py, soak_torchrun_worker.py) check after every
step that nothing was lost. This script reads their diaries: weights must be equal on all ranks at
every commit, losses must fall, and memory must not grow. It ends with a table of faults, and with
exit code 1 if any was not survived. If a job has complaints, its folder is kept. It holds the log,
and every worker's diary and checkpoint.

    python scripts/checks/soak.py --minutes 3 --ranks 4
    python scripts/checks/soak.py --minutes 3 --only "local steps" --seed 5
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import pickle
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from soak_faults import Plan, Point, points_of
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

COMPRESSED = {"rate": 20, "bits": 3}
AS_THEY_ARE = {"rate": 20, "bits": 32}
AHEAD = COMPRESSED | {
    "lookahead": True,
    "leader": "staggered",
    "bucket_bytes": 10_000,
    "beta": 0.5,
}
PLANS = [
    Plan(settings=AS_THEY_ARE),
    Plan(settings=AHEAD),
    Plan(optimizer="stock", settings=COMPRESSED),
    Plan(optimizer="local steps", settings=AS_THEY_ARE, local_steps=3),
    Plan(optimizer="local steps", settings=COMPRESSED, local_steps=6, overlap=2, fragments=2),
    Plan(optimizer="torchrun", settings=COMPRESSED),
    Plan(optimizer="torchrun", settings=AHEAD),
    Plan(optimizer="torchrun", settings=AS_THEY_ARE, local_steps=6, overlap=2, fragments=2),
    Plan(optimizer="DDP hook", settings=COMPRESSED),
    Plan(optimizer="TensorFlow", settings=COMPRESSED),
    Plan(optimizer="TensorFlow", settings=AHEAD),
]


WHERE = {
    Point.BACKWARD: "in backward",
    Point.EXCHANGE: "as the leader between its choice and the averages",
    Point.SIGNAL: "before it signals",
    Point.AVERAGES: "while averages are made",
    Point.SAVING: "while a checkpoint is written",
}


class Framework(NamedTuple):
    """A worker's program, and its times in seconds.

    limit: the longest time until training starts, or goes on after a fault.
    calm: the longest time between two faults.
    gloo_timeout: only the neighbours of a dying worker notice its death at once. The other workers
        wait this long, and a newcomer may take this long to start. None: torchrun runs the workers,
        and starts all of them again.
    """

    worker: str
    limit: float
    calm: float
    gloo_timeout: int | None


PYTORCH = Framework("soak_worker.py", 120, 2, 25)
TORCHRUN = Framework("soak_torchrun_worker.py", 120, 2, None)
TENSORFLOW = Framework("soak_tensorflow_worker.py", 200, 8, 40)
MEGABYTES_PER_1000_STEPS = 5.0

Diary = list[dict[str, Any]]


class Job:
    """A job on this machine with workers that may die.

    Under Horovod every worker has a host of its own, because Horovod gives up the host of a worker
    that died.
    """

    def __init__(self, folder: Path, plan: Plan, ranks: int) -> None:
        self.folder, self._names = folder, _loopback_names()
        self.log = (folder / "log").open("w+", errors="replace")
        framework = framework_of(plan)
        self.elastic = framework.gloo_timeout is not None
        worker = Path(__file__).with_name(framework.worker)
        program = [str(worker), str(folder), json.dumps(dataclasses.asdict(plan))]
        if self.elastic:
            command = self._horovodrun(ranks, framework.gloo_timeout, program)
        else:
            command = launch.command("torchrun", ranks, program)
            command[3:3] = ["--max-restarts", "1000"]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            # Without this, restarted ranks of Gloo look for the dead ones in PyTorch 2.13.
            env=launch.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _horovodrun(self, ranks: int, gloo_timeout: int, program: list[str]) -> list[str]:
        self.hosts = [next(self._names) for _ in range(ranks)]
        self._show_hosts()
        discover = self.folder / "discover.sh"
        discover.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        discover.chmod(0o755)
        command = [
            launch.find("horovodrun"),
            "--gloo",
            "-np",
            ranks,
            "--min-np",
            min(2, ranks),
            "--max-np",
            ranks,
            "--gloo-timeout-seconds",
            gloo_timeout,
            "--host-discovery-script",
            discover,
            sys.executable,
            *program,
        ]
        return [str(part) for part in command]

    def _show_hosts(self) -> None:
        part = self.folder / "hosts.part"
        part.write_text("".join(f"{host}:1\n" for host in self.hosts))
        part.replace(self.folder / "hosts")

    def add_host(self) -> None:
        self.hosts.append(next(self._names))
        self._show_hosts()

    def remove_host(self, host: str) -> None:
        self.hosts.remove(host)
        self._show_hosts()

    def diaries(self) -> dict[int, Diary]:
        """What every worker has written so far, by its process number."""
        return {int(path.stem): list(_entries(path)) for path in self.folder.glob("*.jsonl")}

    def workers(self) -> dict[int, str]:
        """{process number: host} of the living workers that have begun to train."""
        begun = {pid: diary[0]["host"] for pid, diary in self.diaries().items() if diary}
        return {pid: host for pid, host in begun.items() if self._is_worker(pid)}

    def order(self, pid: int, deed: str, point: Point) -> None:
        """Tell a worker to "die", or to "wait", at a point of its next step."""
        part = self.folder / f"order-{pid}.part"
        part.write_text(f"{deed} {point}")
        part.replace(self.folder / f"order-{pid}")

    def _is_worker(self, pid: int) -> bool:
        """Whether the worker lives. Its number may belong to another process by now."""
        try:
            return str(self.folder) in Path("/proc", str(pid), "cmdline").read_text()
        except OSError:
            return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, limit: float) -> int | None:
        """Let the workers end at their next commit. Return the exit code; None: they did not."""
        (self.folder / "stop").touch()
        return self.wait(limit)

    def wait(self, limit: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
        return self._process.poll()

    def tell_where(self) -> None:
        """Make every living worker write into the log where its threads are."""
        for pid in self.workers():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")

    def close(self) -> None:
        """End everything of this job. Workers have sessions of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in self.diaries():
            if self._is_worker(pid):
                os.kill(pid, signal.SIGKILL)
        self.log.close()


def framework_of(plan: Plan) -> Framework:
    others = {"TensorFlow": TENSORFLOW, "torchrun": TORCHRUN, "DDP hook": TORCHRUN}
    return others.get(plan.optimizer, PYTORCH)


def _loopback_names() -> Iterator[str]:
    """Names of this machine that Horovod takes for different ones: 127.0.0.1, 127.0.00.1, ..."""
    zeros = "0"
    while True:
        yield f"127.0.{zeros}.1"
        zeros += "0"


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a worker may die while it writes
            yield json.loads(line)


def of(diary: Diary, event: str) -> Diary:
    return [entry for entry in diary if entry["event"] == event]


# What a job's diaries say.


@dataclasses.dataclass
class Findings:
    """What a job's diaries say. complaints: what was wrong."""

    steps: int
    compared: int
    faults: collections.Counter
    growth: float
    complaints: list[str]


def judge(diaries: dict[int, Diary], folder: Path) -> Findings:
    """Compare what the workers wrote."""
    commits = collections.defaultdict(dict)
    for pid, diary in diaries.items():
        for commit in of(diary, "commit"):
            commits[commit["generation"], commit["batch"]][pid] = commit
    shared = {key: told for key, told in commits.items() if len(told) > 1}
    complaints = [
        f"weights differ between ranks at batch {batch}"
        for (_, batch), told in shared.items()
        if len({commit["weights"] for commit in told.values()}) > 1
    ]
    complaints += [
        f"batch {entry['batch']}, rank {entry['rank']} of {entry['size']}: {entry['complaint']}"
        for diary in diaries.values()
        for entry in of(diary, "violation")
    ]
    by_time = sorted(
        (commit for told in commits.values() for commit in told.values()),
        key=lambda commit: commit["time"],
    )
    losses = [commit["loss"] for commit in by_time if math.isfinite(commit["loss"])]
    # A busy machine takes too few steps to learn anything.
    if min(len(commits), len(losses)) >= 8:
        first, last = (
            statistics.median(part)
            for part in (losses[: len(losses) // 4], losses[-len(losses) // 4 :])
        )
        if last >= first:
            complaints.append(
                f"the loss does not fall: {first:g} in the first quarter, {last:g} in the last"
            )
    for path in [*folder.glob("checkpoint-*.pt"), *folder.glob("checkpoint-*.pickle")]:
        try:
            torch.load(path, weights_only=True) if path.suffix == ".pt" else pickle.loads(
                path.read_bytes()
            )
        except Exception as error:
            complaints.append(f"{path.name} cannot be loaded: {error}")
    growth = max((_growth(of(diary, "commit")) for diary in diaries.values()), default=0.0)
    if growth > MEGABYTES_PER_1000_STEPS:
        complaints.append(f"memory grows by {growth:.1f} MB in 1000 steps")
    faults = collections.Counter(
        entry["kind"] for diary in diaries.values() for entry in of(diary, "fault")
    )
    steps = sum(
        max(told.values(), key=lambda commit: commit["made"])["made"] for told in commits.values()
    )
    return Findings(steps, len(shared), faults, growth, complaints)


def _growth(commits: Diary) -> float:
    """MB per 1000 steps of one worker, from its tenth commit on; 0 if its life is too short."""
    lived = commits[10:]
    steps = sum(commit["made"] for commit in lived)
    if steps < 1000:  # every start of Horovod takes some memory, the first ones most
        return 0.0
    half = len(lived) // 2
    first, second = (
        statistics.median(commit["memory"] for commit in part)
        for part in (lived[:half], lived[half:])
    )
    return max(0.0, (second - first) / (steps / 2) * 1000)


def _failures(diaries: dict[int, Diary]) -> int:
    """How often torchrun restarted workers that had not come to their end.

    Finished workers do not count: PyTorch 2.13 may abort them as their processes end, with and
    without ScaleCom.
    """
    lives = collections.defaultdict(list)
    for diary in diaries.values():
        for begin in of(diary, "begin"):
            lives[begin["restarts"]].append(bool(of(diary, "end")))
    return max(lives) + 1 - sum(map(all, lives.values()))


# Faults from outside.


class Trouble:
    """Makes a fault from outside every few seconds, and waits until training goes on."""

    def __init__(
        self, job: Job, ranks: int, dice: random.Random, points: Sequence[Point] = tuple(Point)
    ) -> None:
        self.job, self.ranks, self.dice, self.points = job, ranks, dice, points
        self.survived: collections.Counter = collections.Counter()
        self.tried: collections.Counter = collections.Counter()
        self.slowest: dict[str, float] = {}  # seconds until training went on, by kind of fault
        self.restarts = 0  # that torchrun must make

    def make(self, limit: float) -> None:
        """Make one fault. Raise TimeoutError if the job has not recovered after `limit` seconds."""
        alive, generations = self.job.workers(), self._generations()
        if len(alive) < self.ranks:
            if not self.job.elastic:
                raise ChildProcessError("a worker ended that nobody killed")
            kind, spare = "a worker comes", alive
            self.job.add_host()
        else:
            kind = self.dice.choice(list(self._faults()))
            spare = self._faults()[kind](alive)
            if len(spare) < len(alive) and not self.job.elastic:
                spare = []
                self.restarts += 1
        self.tried[kind] += 1
        began = time.time()
        wanted = set(spare) if kind != "a worker comes" else set()
        victims = set(alive) - set(spare)
        # If workers come or go, Horovod starts again. Until it has, nothing else may happen: while
        # it starts, it forgets what it is told of hosts (0.28.1, common/elastic.py: on_reset).
        over = generations if victims or kind == "a worker comes" else set()
        while time.time() - began < limit:
            if not self.job.running:
                raise ChildProcessError(f"the job ended after: {kind}")
            later = {
                pid: commit["generation"]
                for pid, diary in self.job.diaries().items()
                for commit in of(diary, "commit")[-1:]
                if commit["time"] > began and pid in self.job.workers()
            }
            # A worker that was told to die, or that lost its host, still trains for a while.
            gone = victims.isdisjoint(self.job.workers())
            together = (
                len(later) >= 2
                and len(set(later.values())) == 1
                and over.isdisjoint(later.values())
            )
            gone_on = gone and together and wanted <= later.keys()
            if gone_on and (kind != "a worker comes" or later.keys() - set(alive)):
                self.survived[kind] += 1
                self.slowest[kind] = max(self.slowest.get(kind, 0.0), time.time() - began)
                return
            time.sleep(0.2)
        if not victims.isdisjoint(self.job.workers()):
            raise TimeoutError(
                f"a worker that was to go is still there {limit:.0f} s after: {kind}"
            )
        raise TimeoutError(f"training did not go on within {limit:.0f} s after: {kind}")

    def _generations(self) -> set[str]:
        """One entry for every time that ranks have come together."""
        return {
            entry["generation"]
            for diary in self.job.diaries().values()
            for entry in of(diary, "begin")
        }

    def _faults(self) -> dict[str, Any]:
        faults = {
            "kill -9 at any moment": lambda alive: self._kill(alive, 1),
            "a worker stands still for seconds": self._stop,
        }
        if self.job.elastic:
            faults["a host is taken away"] = self._remove
        for point in self.points:
            faults[f"kill -9 {WHERE[point]}"] = lambda alive, point=point: self._order(alive, point)
            faults[f"a worker stands still {WHERE[point]}"] = lambda alive, point=point: (
                self._order(alive, point, "wait")
            )
        if self.ranks >= 4:
            faults["kill -9 of all but two"] = lambda alive: self._kill(alive, len(alive) - 2)
        return faults

    def _kill(self, alive: dict[int, str], count: int) -> list[int]:
        victims = self.dice.sample(sorted(alive), count)
        time.sleep(self.dice.uniform(0, 0.2))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [pid for pid in alive if pid not in victims]

    def _order(self, alive: dict[int, str], point: Point, deed: str = "die") -> list[int]:
        victim = self.dice.choice(sorted(alive))
        self.job.order(victim, deed, point)
        return [pid for pid in alive if pid != victim or deed == "wait"]

    def _stop(self, alive: dict[int, str]) -> list[int]:
        victim = self.dice.choice(sorted(alive))
        os.kill(victim, signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.5, 8))
        os.kill(victim, signal.SIGCONT)
        return list(alive)

    def _remove(self, alive: dict[int, str]) -> list[int]:
        victim = self.dice.choice(sorted(alive))
        self.job.remove_host(alive[victim])
        return [pid for pid in alive if pid != victim]


def watch(
    plan: Plan, ranks: int, seconds: float, dice: random.Random, bar: tqdm
) -> tuple[Findings, Trouble]:
    """Run one job for this many seconds."""
    folder, began, start = Path(tempfile.mkdtemp(prefix="soak.")), time.time(), bar.n
    job = Job(folder, plan, ranks)
    trouble = Trouble(job, ranks, dice, points_of(plan))
    limit, calm = framework_of(plan).limit, framework_of(plan).calm
    failure = ""
    try:
        while len(job.workers()) < ranks:
            if not job.running or time.time() > began + limit:
                raise TimeoutError("the job did not start")
            time.sleep(0.2)
        while not trouble.tried or time.time() - began < seconds:
            time.sleep(dice.uniform(0.5, calm))
            trouble.make(limit)
            bar.set_postfix_str(f"{trouble.survived.total()} faults survived")
            bar.update(round(start + min(time.time() - began, seconds)) - bar.n)
        if job.stop(limit / 2) != 0:
            raise ChildProcessError("the job did not end well")
        if not job.elastic and _failures(job.diaries()) != trouble.restarts:
            raise ChildProcessError("workers failed that nobody killed")
    except (TimeoutError, ChildProcessError) as error:
        job.tell_where()
        failure = f"{error}\n{job.output()[-5000:]}"
    finally:
        job.close()
    findings = judge(job.diaries(), folder)
    if failure:
        findings.complaints.append(failure)
    if findings.complaints:
        findings.complaints.append(
            f"the log and the diaries of {plan.optimizer} {plan.settings} are in {folder}"
        )
    else:
        shutil.rmtree(folder)
    return findings, trouble


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3, help="how long, in all")
    parser.add_argument("--ranks", type=int, default=4, help="at least 3")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong when")
    parser.add_argument(
        "--only", choices=sorted({plan.optimizer for plan in PLANS}), help="only jobs of this kind"
    )
    arguments = parser.parse_args()
    if arguments.ranks < 3:
        parser.error("--ranks must be at least 3: one is killed, and two must be left")
    if not 0 < arguments.minutes < float("inf"):
        parser.error("--minutes must be more than 0")

    dice = random.Random(arguments.seed)
    plans = [plan for plan in PLANS if arguments.only in (None, plan.optimizer)]
    seconds = arguments.minutes * 60 / len(plans)
    results = []
    with tqdm(
        total=round(arguments.minutes * 60),
        unit="s",
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} s {postfix}",
    ) as bar:
        for number, plan in enumerate(plans):
            bar.set_description(f"{plan.optimizer} {plan.settings}")
            results.append(
                watch(
                    dataclasses.replace(plan, seed=arguments.seed + number),
                    arguments.ranks,
                    seconds,
                    dice,
                    bar,
                )
            )
            bar.update(round(seconds * (number + 1)) - bar.n)
    report(results)
    return 1 if any(findings.complaints for findings, _ in results) else 0


def report(results: list[tuple[Findings, Trouble]]) -> None:
    tried, survived = collections.Counter(), collections.Counter()
    for findings, trouble in results:
        tried += trouble.tried + findings.faults
        survived += trouble.survived + (
            collections.Counter() if findings.complaints else findings.faults
        )
    width = max(map(len, tried), default=5)
    print(f"\n{'fault':{width}s}  tried  survived  slowest")
    for kind in sorted(tried):
        slowest = [trouble.slowest[kind] for _, trouble in results if kind in trouble.slowest]
        print(
            f"{kind:{width}s}  {tried[kind]:5d}  {survived[kind]:8d}"
            + (f"  {max(slowest):5.0f} s" if slowest else "")
        )
    print(
        f"\n{sum(f.steps for f, _ in results)} steps, {tried.total()} faults, {survived.total()} "
        "survived"
    )
    print(f"agreement: weights compared at {sum(f.compared for f, _ in results)} commits")
    print(f"memory: grows by at most {max(f.growth for f, _ in results):.2f} MB in 1000 steps")
    complaints = [complaint for findings, _ in results for complaint in findings.complaints]
    print(
        "what left the residues was compared with what arrived after every step: "
        f"{len(complaints)} complaints"
    )
    for complaint in complaints[:20]:
        print(f"  {complaint}")


if __name__ == "__main__":
    sys.exit(main())
