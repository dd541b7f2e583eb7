"""What the workers of soak.py share in every framework.

That is the plan, the faults, the diary, and the checks after a step.

A worker is started with a folder, and the plan as JSON (`Plan`). The folder holds `hosts`, which
host discovery shows; `order-PID`, by which soak.py tells a worker where to die; `stop`, which ends
the job; checkpoints; and every worker's diary, with a JSON object per line.

The check is made per step and tensor: what left the residues, averaged over ranks, is what arrived
in the gradients. What a rank sent is `m + grad - (m' - (1 - beta) m) / beta`, by the algorithm's
own line for the new residue m'.

Imported by soak.py, soak_worker.py (PyTorch), soak_torchrun_worker.py and
soak_tensorflow_worker.py; imports no framework.
"""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import hashlib
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FEATURES, HIDDEN, OUTPUTS, BATCH = 64, 128, 32, 32

Arrays = dict[str, np.ndarray]


class Point(enum.StrEnum):
    """Where in a step a worker may be told to die, or to wait."""

    BACKWARD = "backward"  # before anything is sent
    EXCHANGE = "exchange"  # the leader, between its offsets and its values
    SIGNAL = "signal"  # before ranks tell each other how they stand
    AVERAGES = "averages"  # while averages are made
    SAVING = "saving"  # while a checkpoint is written


def points_of(plan: Plan) -> list[Point]:
    """The points that a worker of this plan reaches in every step."""
    missing = {
        "stock": {Point.AVERAGES},
        "local steps": {Point.SIGNAL},  # local steps do not signal
        "TensorFlow": {Point.SIGNAL, Point.AVERAGES},  # nor does a graph
        "DDP hook": {Point.SIGNAL},  # nor does a hook
    }
    kind = plan.optimizer if plan.local_steps is None else "local steps"
    return [point for point in Point if point not in missing.get(kind, set())]


@dataclasses.dataclass
class Plan:
    """What a job does.

    Attributes:
        deaths: {host: [batch, point]}, for a job whose course is known beforehand (`Faults.death`).
        method: PyTorch's method, as module:class.
    """

    # "drop-in"; "stock": Horovod's own; "local steps"; "TensorFlow": a tape; and under torchrun
    # "torchrun", the optimizer of scalecom_hvd.ddp, or "DDP hook"
    optimizer: str = "drop-in"
    method: str = "scalecom_hvd.torch:ScaleCom"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    commit_every: int = 5
    last: int | None = None
    seed: int = 0
    random_faults: bool = True
    deaths: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    grow_at: int | None = None
    local_steps: int | None = None
    overlap: int = 0
    fragments: int = 1


def begin() -> tuple[Plan, Path]:
    """What this worker was told."""
    faulthandler.register(signal.SIGUSR1)  # soak.py asks by this where a worker waits
    return Plan(**json.loads(sys.argv[2])), Path(sys.argv[1])


class Diary:
    """What this worker writes down. hvd: the framework's Horovod, or its replacement."""

    def __init__(self, folder: Path, hvd: Any) -> None:
        self._path, self._hvd = folder / f"{os.getpid()}.jsonl", hvd

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as file:
            facts = {
                "event": event,
                "time": time.time(),
                "rank": self._hvd.rank(),
                "size": self._hvd.size(),
                **facts,
            }
            print(json.dumps(facts), file=file)

    def fault(self, kind: str, batch: int) -> None:
        self.note("fault", kind=kind, batch=batch)


class Faults:
    """What goes wrong in which batch.

    It is the same on all ranks, and depends only on (seed, batch). So a batch that is made again
    fails again.
    """

    def __init__(self, plan: Plan, folder: Path, hvd: Any) -> None:
        self.plan, self._folder, self._hvd = plan, folder, hvd

    def _dice(self, batch: int, what: str) -> random.Random:
        return random.Random(f"{self.plan.seed}.{batch}.{what}")

    def overflow(self, batch: int, leader: Callable[[], int]) -> tuple[str, float] | None:
        """Which kind of overflow happens, and the factor of this rank's gradients (1: none)."""
        dice = self._dice(batch, "overflow")
        if not self.plan.random_faults or dice.random() > 0.1:
            return None
        kind = dice.choice(("one rank", "the leader", "all ranks"))
        rank, size = self._hvd.rank(), self._hvd.size()
        hit = (
            rank == leader()
            if kind == "the leader"
            else kind == "all ranks" or rank == batch % size
        )
        return f"gradients overflow on {kind}", dice.choice(
            (float("inf"), float("nan"))
        ) if hit else 1.0

    def detour(self, batch: int) -> bool:
        """Whether this rank uses the layer that only some use. Every rank decides by itself."""
        return (
            not self.plan.random_faults
            or self._dice(batch, f"detour {self._hvd.rank()}").random() < 0.7
        )

    def frozen(self, batch: int) -> bool:
        """Whether the output layer is frozen."""
        return self.plan.random_faults and batch // 20 % 4 == 3

    def loss_scale(self, batch: int) -> float:
        return (
            2.0 ** self._dice(batch // 10, "scale").randrange(-4, 16)
            if self.plan.random_faults
            else 1.0
        )

    def lateness(self, batch: int) -> float:
        """Seconds that this rank comes late."""
        dice = self._dice(batch, "late")
        late = (
            self.plan.random_faults
            and dice.random() < 0.01
            and dice.randrange(self._hvd.size()) == self._hvd.rank()
        )
        return dice.uniform(0.2, 3) if late else 0.0

    def order(self, batch: int) -> str | None:
        """What this worker is told to do in this step, and where: "die backward", "wait signal"."""
        planned = self.plan.deaths.get(os.environ.get("HOROVOD_HOSTNAME", ""))
        if planned is not None and batch >= planned[0]:
            return f"die {planned[1]}"
        order = self._folder / f"order-{os.getpid()}"
        return order.read_text() if order.exists() else None

    def obeyed(self) -> None:
        """Note that this worker did what it was told, and lives."""
        (self._folder / f"order-{os.getpid()}").unlink()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingFile(io.FileIO):
    """A file that the process dies in the middle of writing."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        die()
        return 0


class Worker:
    """One worker of a job: its training loop, its checks, and its diary.

    Subclasses say how its framework does these.
    """

    checkpoint: str  # the suffix of its files

    def __init__(self, plan: Plan, folder: Path, hvd: Any) -> None:
        self.plan, self.folder, self._hvd = plan, folder, hvd
        self.diary, self.faults = Diary(folder, hvd), Faults(plan, folder, hvd)
        self.file = folder / f"checkpoint-{os.getpid()}{self.checkpoint}"
        self.compression = self.make()
        self.scale = 1.0
        # the gradients of the last backward, before anybody changed them
        self.came: Arrays = {}
        self.committed: str | None = None
        self.made = 0  # steps since the last commit
        self.order: str | None = None

    def comes_by(self, point: Point) -> None:
        """Do what this worker was told to do here, if anything."""
        if self.order == f"die {point}":
            die()
        if self.order == f"wait {point}":
            self.order = None
            self.faults.obeyed()
            time.sleep(2)

    # What the framework does.

    def make(self) -> Any:
        """Build everything that is trained, and return the ScaleCom."""
        raise NotImplementedError

    def residues(self) -> Arrays:
        raise NotImplementedError

    def kept(self) -> Arrays:
        """Everything of this worker's own that lasts from commit to restore."""
        return self.residues()

    def common(self) -> Arrays:
        """The parameters that are the same on all ranks."""
        raise NotImplementedError

    def average(self, values: np.ndarray) -> np.ndarray:
        """Average over all ranks."""
        raise NotImplementedError

    def step(self, batch: int) -> float:
        """Take one training step under this batch's faults. Return the loss."""
        raise NotImplementedError

    def write(self, file: Any) -> None:
        """Write a checkpoint."""
        raise NotImplementedError

    # hvd.elastic.run runs this, or torchrun starts it again.

    def train(self, state: Any) -> None:
        self.begin(state.batch)
        while state.batch != self.plan.last:
            if state.batch == self.plan.grow_at and self._hvd.size() == 2:
                self._wait_for_newcomers(state)
            loss = self.step(state.batch)
            self.made += 1
            state.batch += 1
            if state.batch % self.plan.commit_every == 0:
                self.commit(state, loss)
                self.order = self.faults.order(state.batch)
                self.save()
                if self._hvd.broadcast_object(
                    (self.folder / "stop").exists(), root_rank=0, name="stop"
                ):
                    return

    def _wait_for_newcomers(self, state: Any) -> None:
        if self._hvd.rank() == 0:
            (self.folder / "hosts").write_text(
                (self.folder / "hosts").read_text() + "localhost:1\n"
            )
        limit = time.time() + 60
        while time.time() < limit:
            state.commit()
            time.sleep(0.1)
        raise TimeoutError("nobody came")

    def begin(self, batch: int) -> None:
        """Begin training, or go on after workers came or went."""
        self.generation = self._hvd.broadcast_object(
            f"{os.getpid()}.{time.time()}", root_rank=0, name="generation"
        )
        residues = self.residues()
        norm = sum(float(np.linalg.norm(r)) for r in residues.values())
        self.made = 0
        host, step = os.environ.get("HOROVOD_HOSTNAME"), self.compression.stats()["step"]
        self.diary.note(
            "begin",
            host=host,
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            generation=self.generation,
            batch=batch,
            step=step,
            residues=digest(residues),
            norm=norm,
        )
        if self.committed is None:
            self.expect(norm == 0, "a newcomer's residues are not zero", batch)
        else:
            self.expect(
                digest(self.kept()) == self.committed,
                "residues are not those of this rank's last commit",
                batch,
            )

    def commit(self, state: Any, loss: float) -> None:
        """Commit. If hosts have changed, the commit ends with HostsUpdatedInterrupt."""
        self.committed = digest(self.kept())
        self.diary.note(
            "commit",
            batch=state.batch,
            generation=self.generation,
            weights=digest(self.common()),
            loss=loss,
            residues=self.committed,
            step=self.compression.stats()["step"],
            memory=memory(),
            made=self.made,
        )
        self.made = 0
        state.commit()

    def save(self) -> None:
        """Write a checkpoint, whole or not at all, whatever happens meanwhile."""
        part = self.file.with_suffix(".part")
        dies = self.order == f"die {Point.SAVING}"
        if not dies:
            self.comes_by(Point.SAVING)
        with DyingFile(part, "w") if dies else part.open("wb") as file:
            self.write(file)
        os.replace(part, self.file)

    # What a step is about.

    def overflow(self, batch: int) -> tuple[str, float] | None:
        """What Faults.overflow returns. Rank 0 notes it."""

        def leader() -> int:
            # A newcomer does not know its step before its first one.
            step = self._hvd.broadcast_object(
                self.compression.stats()["step"], root_rank=0, name="leader"
            )
            return step % self._hvd.size()

        overflow = self.faults.overflow(batch, leader)
        if overflow and self._hvd.rank() == 0:
            self.diary.fault(overflow[0], batch)
        return overflow

    def be_late(self, batch: int) -> None:
        late = self.faults.lateness(batch)
        if late:
            self.diary.fault("a rank is late", batch)
            time.sleep(late)

    # What is checked.

    def expect(self, truth: Any, complaint: str, batch: int) -> None:
        if not truth:
            self.diary.note("violation", complaint=complaint, batch=batch)

    def check_step(
        self,
        batch: int,
        before: Arrays,
        arrived: Arrays,
        finite: bool,
        overflow: Any,
        trained: Iterable[str],
    ) -> None:
        """Check a step.

        arrived: the averages of all gradients, unscaled.
        trained: the names of those that are not frozen.
        """
        if overflow:
            self.expect(not finite, "a step with an overflow was taken", batch)
            self.check_void(batch, before)
        else:
            self.expect(finite, "a sound step was not taken", batch)
            self.check_sent(batch, before, arrived, set(trained))

    def check_void(self, batch: int, before: Arrays) -> None:
        for name, now in self.residues().items():
            then = before.get(name, np.zeros_like(now))
            came = np.nan_to_num(
                np.abs(self.came.get(name, np.zeros(1)) / self.scale), nan=0, posinf=0
            )
            scale = float(came.max()) + float(np.abs(then).max())
            self.expect(
                np.allclose(now, then, rtol=1e-5, atol=1e-6 * scale),
                f"a void step changed the residue of {name}",
                batch,
            )

    def check_sent(self, batch: int, before: Arrays, arrived: Arrays, trained: set[str]) -> None:
        beta, sent, allowed, after = self.compression.config.beta, {}, {}, self.residues()
        for name in after.keys() - arrived.keys():
            self.expect(
                np.array_equal(after[name], before[name]),
                f"the residue of {name} changed, which is frozen",
                batch,
            )
        for name, average in arrived.items():
            came = sent[name] = (
                self.came[name] / self.scale
                if name in trained and name in self.came
                else np.zeros_like(average)
            )
            then = before.get(name, np.zeros_like(average))
            if name in trained and name in after:
                sent[name] = sent[name] + then - (after[name] - (1 - beta) * then) / beta
            elif name in after:
                self.expect(
                    np.array_equal(after[name], then),
                    f"the residue of {name} changed, which is frozen",
                    batch,
                )
            # Integers may sum to zero even if much came.
            size = max(float(np.abs(one).max()) for one in (average, then, came))
            allowed[name] = 1e-5 * size / beta + 1e-12
        self.compare(batch, sent, arrived, allowed, "what left the residues and what arrived")

    def compare(
        self, batch: int, sent: Arrays, arrived: Arrays, allowed: dict[str, float], what: str
    ) -> None:
        """Check that what ranks sent, averaged, is what arrived, up to the average of `allowed`."""
        parts = [one.ravel() for one in sent.values()]
        parts.append(np.array([allowed[name] for name in sent]))
        *averages, limits = np.split(
            self.average(np.concatenate(parts)), np.cumsum([part.size for part in parts])[:-1]
        )
        for name, average, limit in zip(sent, averages, limits, strict=True):
            off = float(np.abs(average - arrived[name].ravel()).max())
            self.expect(off <= limit, f"{name}: {what} differ by {off:g}", batch)


def digest(arrays: Arrays) -> str:
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    ).hexdigest()[:16]


def memory() -> float:
    """Resident memory of this process now, in MB."""
    return psutil.Process().memory_info().rss / 1e6
