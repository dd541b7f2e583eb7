"""make soak: trains for minutes while workers are killed, stopped, added and sent home.

Jobs follow each other, one for each way of using ScaleCom in PyTorch (`PLANS`). Horovod's jobs go
on with the workers that are left. torchrun starts all workers again, and each goes on from its own
checkpoint. Faults come from outside (`FAULTS`) and from batches whose gradients overflow, are huge,
or are missing. The workers (soak_worker.py) check at every commit that nothing was lost, and write
diaries. This script compares the diaries. It ends with a table of faults, and with exit code 1 if
there are complaints. If a job has some, its folder is kept, with the log, diaries and checkpoints.
The log ends with where the workers' threads were.

    python scripts/checks/soak.py --minutes 3
    python scripts/checks/soak.py --minutes 3 --only "torchrun, DDP hook" --seed 5
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

RANKS, COMMIT_EVERY = 4, 5
# Seconds until training starts, or goes on after a fault, at most. A busy machine needs them.
LIMIT = 240
# Only the neighbours of a dying worker notice its death at once. Horovod's other workers wait for
# so many seconds, and a newcomer may take as long to start.
GLOO_TIMEOUT = "25"
Diary = list[dict[str, Any]]


class Point(enum.StrEnum):
    """Where in a step a worker may be told to die, or to wait."""

    BACKWARD = "in backward"  # before anything is sent
    EXCHANGE = "as the leader between its choice and the averages"
    SIGNAL = "before it tells the other ranks of its gradients"
    AVERAGES = "while averages are made"
    SAVING = "while a checkpoint is written"


KILL, KILL_MANY = "kill -9 at any moment", "kill -9 of all but two"
STOP, LEAVES = "a worker stands still for seconds", "a host is taken away"
FAULTS = [KILL, KILL_MANY, STOP, LEAVES]
FAULTS += [f"{what} {point}" for what in ("die", "wait") for point in Point]
COMES = "a worker comes"  # after others have gone
COMPARED = "commits compared"


@dataclasses.dataclass
class Plan:
    """What a job does."""

    launcher: str  # "horovodrun" or "torchrun"
    optimizer: str  # "drop-in", "Horovod's own", or "DDP hook" with PyTorch's own
    settings: dict[str, Any]  # of the method
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)  # arguments on local steps
    method: str = "scalecom_hvd.torch:ScaleCom"
    seed: int = 0  # of the batches' faults

    def __str__(self) -> str:
        return f"{self.launcher}, {self.optimizer}, {self.settings | self.rounds}"

    @property
    def faults(self) -> list[str]:
        """What may happen to the job. Its workers reach all points of these in every step."""
        impossible = {
            LEAVES: self.launcher == "torchrun",
            Point.SIGNAL: self.optimizer != "drop-in" or self.rounds,
            Point.AVERAGES: self.optimizer == "Horovod's own",
            Point.EXCHANGE: self.settings["rate"] == "auto",  # it may send everything
        }
        ends = tuple(end for end, is_so in impossible.items() if is_so)
        return [fault for fault in FAULTS if not fault.endswith(ends)]


# After an outlier, residues are scaled down by default. Without that, everything is accounted for.
AS_THEY_ARE = {"rate": 20, "bits": 32, "outliers": None}
COMPRESSED = AS_THEY_ARE | {"bits": 3}
AHEAD = COMPRESSED | {"lookahead": True, "leader": "staggered", "bucket_bytes": 10_000, "beta": 0.5}
TRAVELS = {"local_steps": 6, "overlap": 2, "fragments": 2}
PLANS = [
    Plan("horovodrun", "drop-in", AS_THEY_ARE),
    Plan("horovodrun", "drop-in", AHEAD),
    Plan("horovodrun", "drop-in", {"rate": "auto"}),
    Plan("horovodrun", "Horovod's own", AS_THEY_ARE),
    Plan("horovodrun", "drop-in", AS_THEY_ARE, {"local_steps": 3}),
    Plan("horovodrun", "drop-in", COMPRESSED, TRAVELS),
    Plan("torchrun", "drop-in", COMPRESSED),
    Plan("torchrun", "drop-in", AHEAD),
    Plan("torchrun", "drop-in", {"rate": "auto", "outliers": None}),
    Plan("torchrun", "drop-in", AS_THEY_ARE, TRAVELS),
    Plan("torchrun", "DDP hook", COMPRESSED),
    Plan("torchrun", "DDP hook", {"rate": 20}),
]


class Job:
    """A job on this machine with workers that may die.

    Its folder holds `hosts`, which Horovod's host discovery shows; `order-PID`, which tells a
    worker where to die; `stop`, which ends the job; checkpoints; and every worker's diary, with a
    JSON object per line. Under Horovod every worker has a host of its own, because Horovod gives up
    the host of a worker that died. So it gets names of this machine that Horovod takes for
    different ones: 127.0.0.1, 127.0.00.1, ...
    """

    def __init__(self, folder: Path, plan: Plan, ranks: int, dice: random.Random) -> None:
        self.folder, self.dice, self.elastic = folder, dice, plan.launcher == "horovodrun"
        self.size = ranks  # how many workers train, or will when the last fault is over
        self.restarts = 0  # that torchrun must make
        self.survived: Counter[str] = Counter()
        worker = Path(__file__).with_name("soak_worker.py")
        program = [str(worker), str(folder), json.dumps(dataclasses.asdict(plan))]
        if self.elastic:
            self.new_hosts = (f"127.0.{'0' * number}.1" for number in itertools.count(1))
            self.show(list(itertools.islice(self.new_hosts, ranks)))
            discover = folder / "discover.sh"
            discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
            discover.chmod(0o755)
            command = [launch.find("horovodrun"), "--gloo", "--gloo-timeout-seconds", GLOO_TIMEOUT]
            command += ["-np", str(ranks), "--min-np", "2", "--max-np", str(ranks)]
            command += ["--host-discovery-script", str(discover), sys.executable, *program]
        else:
            command = launch.command("torchrun", ranks, program)
            command[3:3] = ["--max-restarts", "1000"]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            # Without this, restarted ranks of Gloo look for the dead ones in PyTorch 2.13.
            env=launch.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            stdin=subprocess.DEVNULL,
            stdout=(folder / "log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def show(self, hosts: list[str]) -> None:
        """Let Horovod discover these hosts."""
        self.hosts = hosts
        self.write("hosts", "".join(f"{host}:1\n" for host in hosts))

    def write(self, name: str, text: str) -> None:
        """Write a file that others read at any time."""
        (self.folder / f"{name}.part").write_text(text)
        (self.folder / f"{name}.part").replace(self.folder / name)

    def diaries(self) -> dict[int, Diary]:
        """What every worker that has begun to train has written so far, by its process number."""
        lines = {int(p.stem): p.read_text().splitlines() for p in self.folder.glob("*.jsonl")}
        # A worker may die while it writes a line.
        whole = {pid: [line for line in of if line.endswith("}")] for pid, of in lines.items()}
        return {pid: list(map(json.loads, told)) for pid, told in whole.items() if told}

    def workers(self) -> dict[int, Diary]:
        """The diaries of the workers that live."""
        return {pid: diary for pid, diary in self.diaries().items() if self.lives(pid)}

    def lives(self, pid: int) -> bool:
        """Whether the worker lives. Its number may belong to another process by now."""
        with suppress(OSError):
            return str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text()
        return False

    def signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def make(self, fault: str) -> None:
        """Make a fault, and wait until training goes on."""
        alive, began = self.workers(), time.time()
        before = {entry["generation"] for diary in self.diaries().values() for entry in diary}
        if len(alive) != self.size:
            raise ChildProcessError("a worker ended that nobody killed")
        change = self.begin(fault, alive)
        if self.elastic:
            self.size += change
        else:
            self.restarts += change != 0

        def goes_on() -> bool:
            # A worker that was told to die, or that lost its host, still trains for a while. If
            # workers come or go, Horovod starts again. Until it has, nothing else may happen: while
            # it starts, it forgets what it is told of hosts (0.28.1, common/elastic.py: on_reset).
            alive = self.workers().values()
            last = [entry for diary in alive for entry in of(diary, "commit")[-1:]]
            generations = {commit["generation"] for commit in last}
            are_all = len(last) == len(alive) == self.size and len(generations) == 1
            is_anew = not change or generations.isdisjoint(before)
            return are_all and is_anew and all(commit["time"] > began for commit in last)

        self.wait_until(goes_on, f"training did not go on after: {fault}")
        self.survived[fault] += 1

    def begin(self, fault: str, alive: dict[int, Diary]) -> int:
        """Make a fault. Return by how many workers the job grows."""
        pids = self.dice.sample(sorted(alive), len(alive))
        if fault in (KILL, KILL_MANY):
            time.sleep(self.dice.uniform(0, 0.2))
            victims = pids[2:] if fault == KILL_MANY else pids[:1]
            self.signal(victims, signal.SIGKILL)
            return -len(victims)
        if fault == STOP:
            self.signal(pids[:1], signal.SIGSTOP)
            time.sleep(self.dice.uniform(0.5, 8))
            self.signal(pids[:1], signal.SIGCONT)
            return 0
        if fault == LEAVES:
            self.show([host for host in self.hosts if host != alive[pids[0]][0]["host"]])
            return -1
        if fault == COMES:
            self.show([*self.hosts, next(self.new_hosts)])
            return 1
        self.write(f"order-{pids[0]}", fault)
        return -fault.startswith("die")

    def wait_until(self, done: Callable[[], bool], complaint: str) -> None:
        end = time.time() + LIMIT
        while not done():
            if self.process.poll() is not None or time.time() > end:
                workers = f"{len(self.workers())} workers live"
                raise ChildProcessError(f"{complaint} ({workers}, {self.process.poll()=})")
            time.sleep(0.2)

    def end(self) -> None:
        """Let the job end at the workers' next commit. It must have gone well."""
        # PyTorch 2.13 may abort finished workers as their processes end, with and without ScaleCom.
        # torchrun starts them again, so restarts count only until here.
        restarts = [diary[0]["restarts"] for diary in self.diaries().values()]
        if max(restarts) != self.restarts:
            raise ChildProcessError("workers failed that nobody killed")
        (self.folder / "stop").touch()
        if self.process.wait(LIMIT) != 0:
            raise ChildProcessError("the job did not end well")

    def close(self) -> None:
        """Kill everything of this job. Workers have sessions of their own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.signal(self.workers(), signal.SIGKILL)


def at_random(plan: Plan, end: float, job: Job) -> Iterator[str]:
    """Faults until this time, and at least one. Workers that are gone are replaced first."""
    while not job.survived or time.time() < end:
        time.sleep(job.dice.uniform(0.5, 2))
        yield COMES if job.size < RANKS else job.dice.choice(plan.faults)


def of(diary: Diary, event: str) -> Diary:
    return [entry for entry in diary if entry["event"] == event]


def judge(job: Job) -> tuple[Counter[str], list[str]]:
    """Compare what the workers wrote. Return what was counted, and complaints."""
    entries, weights = list(itertools.chain(*job.diaries().values())), defaultdict(list)
    for commit in of(entries, "commit"):
        weights[commit["generation"], commit["batch"]].append(commit["weights"])
    complaints = [
        f"weights differ between ranks at batch {batch}"
        for (_, batch), of_ranks in weights.items()
        if len(set(of_ranks)) > 1
    ]
    complaints += [
        f"batch {entry['batch']}, rank {entry['rank']} of {entry['size']}: {entry['complaint']}"
        for entry in of(entries, "violation")
    ]
    for path in job.folder.glob("checkpoint-*.pt"):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            complaints.append(f"{path.name} cannot be loaded: {error}")
    compared = sum(len(of_ranks) > 1 for of_ranks in weights.values())
    return job.survived + Counter({COMPARED: compared}), complaints


def watch(
    plan: Plan, ranks: int, dice: random.Random, faults: Callable[[Job], Iterable[str]]
) -> tuple[Counter[str], list[str], list[Diary]]:
    """Run one job, with these faults one after the other. Return what `judge` does, and diaries."""
    folder, failure = Path(tempfile.mkdtemp(prefix="soak.")), []
    job = Job(folder, plan, ranks, dice)
    try:
        job.wait_until(lambda: len(job.workers()) == ranks, "the job did not start")
        for fault in faults(job):
            job.make(fault)
        job.end()
    except (subprocess.TimeoutExpired, ChildProcessError) as error:
        job.signal(job.workers(), signal.SIGUSR1)
        time.sleep(3)  # until they have told where they are
        failure = [f"{error}\n{(folder / 'log').read_text(errors='replace')[-5000:]}"]
    finally:
        job.close()
    count, complaints = judge(job)
    diaries, complaints = list(job.diaries().values()), complaints + failure
    if complaints:
        complaints.append(f"the log and the diaries of {plan} are in {folder}")
    else:
        shutil.rmtree(folder)
    return count, complaints, diaries


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3, help="how long, in all (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong when (default: 0)")
    parser.add_argument("--only", default="", help='jobs that begin so, such as "torchrun"')
    arguments = parser.parse_args()
    plans = [plan for plan in PLANS if str(plan).startswith(arguments.only)]
    if not plans:
        parser.error("\n".join(["no job begins so; there are:", *map(str, PLANS)]))

    dice, total, all_complaints = random.Random(arguments.seed), Counter(), []
    for number, plan in enumerate(plans):
        plan.seed = arguments.seed + number
        end = time.time() + arguments.minutes * 60 / len(plans)
        count, complaints, _ = watch(plan, RANKS, dice, partial(at_random, plan, end))
        print(f"{plan}: {dict(count)}, {len(complaints)} complaints", flush=True)
        total, all_complaints = total + count, all_complaints + complaints
    compared = total.pop(COMPARED, 0)
    print(f"\n{'fault':53s}  survived")
    print(*(f"{fault:53s}  {total[fault]:8d}" for fault in sorted(total)), sep="\n")
    print(f"\n{total.total()} faults survived, weights compared at {compared} commits:")
    print(f"{len(all_complaints)} complaints", *all_complaints[:20], sep="\n")
    return 1 if all_complaints else 0


if __name__ == "__main__":
    sys.exit(main())
