"""Trains with PyTorch under faults. soak.py runs this on every rank: see there.

At every commit, each tensor's account is made up: what came in since the last commit, less what
waits more than then, is what this rank sent. Averaged over ranks, it must be what arrived. What
came in are gradients, or the local steps' own changes; what waits is residue / beta, and of a round
of local steps what was not synchronised yet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import json
import math
import os
import pkgutil
import random
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch
import torch.distributed as dist
from soak import COMMIT_EVERY, Plan, Point
from torch.nn.parallel import DistributedDataParallel

import scalecom_hvd.torch as hvd
from scalecom_hvd import ddp
from scalecom_hvd.exchange.methods.base import BucketCollectives
from scalecom_hvd.exchange.optimizer_gradients import OptimizerGradients
from scalecom_hvd.exchange.waves import Waves

FEATURES, HIDDEN, OUTPUTS, BATCH, LR = 64, 128, 32, 32, 0.05
Tensors = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """Two layers, a third that only some batches use, and no normalisation, which hides errors."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, HIDDEN)
        self.sometimes = torch.nn.Linear(HIDDEN, HIDDEN)
        self.output = torch.nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor, detour: bool) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(inputs))
        if detour:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return self.output(hidden)


class Trainer:
    """One worker of a job on Horovod: its training loop, its checks, and its diary."""

    rank, size = staticmethod(hvd.rank), staticmethod(hvd.size)
    allreduce = staticmethod(hvd.allreduce)

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        # Every worker begins with other weights: only Horovod's states make them equal.
        torch.manual_seed(os.getpid())
        self.model = Net()
        self.forward: torch.nn.Module = self.model
        self.parameters = dict(self.model.named_parameters())
        named = [self.parameters.items()] if plan.optimizer == "Horovod's own" else []
        self.compression = pkgutil.resolve_name(plan.method)(*named, **plan.settings)
        self.optimizer = self.distributed(torch.optim.SGD(self.parameters.values(), LR, 0.9))
        self.came: Tensors = {}  # the gradients of the last backward, before anybody changed them
        self.committed: dict[str, Any] = {}  # digests of the last commit
        self.generation = ""  # the same on all ranks, until a rank comes or goes
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: self.see(name, grad))
        self.comes_by_before(OptimizerGradients, "_header", Point.SIGNAL)
        self.comes_by_before(Waves, "complete", Point.AVERAGES)
        self.comes_by_before(
            BucketCollectives, "average_taken", Point.EXCHANGE, lambda it: it.leads()
        )
        # Horovod's own optimizer averages a gradient after the leader has chosen.
        self.comes_by_before(
            sys.modules[horovod.DistributedOptimizer.__module__],
            "allreduce_async_",
            Point.EXCHANGE,
            lambda _: self.rank() == (self.compression.residues.step + 1) % self.size(),
        )

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer of this plan."""
        library = horovod if self.plan.optimizer == "Horovod's own" else hvd
        return library.DistributedOptimizer(
            optimizer, self.parameters.items(), compression=self.compression, **self.plan.rounds
        )

    def gather(self, value: Any, name: str) -> list[Any]:
        """What each rank gives."""
        return hvd.allgather_object(value, name=f"soak.{name}")

    def see(self, name: str, grad: torch.Tensor) -> None:
        self.came[name] = grad.double()
        if name == "hidden.weight":
            self.comes_by(Point.BACKWARD)

    def comes_by_before(
        self, owner: Any, name: str, point: Point, leads: Callable[[Any], bool] = lambda _: True
    ) -> None:
        """Let a worker come by a point before each call of a function, if it leads then."""
        own = getattr(owner, name)

        def called(it: Any, *arguments: Any, **more: Any) -> Any:
            if leads(it):
                self.comes_by(point)
            return own(it, *arguments, **more)

        setattr(owner, name, called)

    def comes_by(self, point: Point) -> None:
        """Do what this worker was told to do here, if anything."""
        order = self.folder / f"order-{os.getpid()}"
        told = order.read_text() if order.exists() else None
        if told == f"die {point}":
            os.kill(os.getpid(), signal.SIGKILL)
        if told == f"wait {point}":
            order.unlink()
            time.sleep(2)

    def dice(self, *of: Any) -> random.Random:
        """It depends only on the batch, so a batch that is made again fails again."""
        return random.Random(f"{self.plan.seed} {of}")

    def factors(self, batch: int) -> list[float]:
        """What ranks multiply their losses with. Now and then gradients overflow, or are huge."""
        dice, ones = self.dice(batch), [1.0] * self.size()
        if dice.random() > 0.2:
            return ones
        factor, on_all = dice.choice((math.inf, math.nan, 1e3, 1e6)), dice.random() < 0.3
        which = batch % self.size()
        return [factor if on_all or rank == which else 1.0 for rank in range(self.size())]

    def train(self, state: Any) -> None:
        """Train until the end. hvd.elastic.run calls this, or torchrun starts it again."""
        self.begin(state.batch)
        stops = False
        while not stops:
            loss = self.step(state.batch)
            self.allreduce(loss)  # without a name: newcomers must count such calls as others do
            state.batch += 1
            if state.batch % COMMIT_EVERY == 0:
                self.commit(state)
                self.save(state.batch)
                stops = self.gather((self.folder / "stop").exists(), "stop")[0]

    def begin(self, batch: int) -> None:
        """Begin training, or go on after workers came or went."""
        self.generation = self.gather(f"{os.getpid()}.{time.time()}", "generation")[0]
        self.note(
            "begin",
            host=os.environ.get("HOROVOD_HOSTNAME"),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
        then, now = self.committed, self.digests(batch)
        self.expect(batch % COMMIT_EVERY == 0, "training does not go on from a commit", batch)
        if not then:
            zero = not any(residue.any() for residue in self.residues().values())
            self.expect(zero, "a newcomer's residues are not zero", batch)
        else:
            same = now["kept"] == then["kept"]
            self.expect(same, "residues are not those of this rank's last commit", batch)
        # A rank may have committed a step that other ranks have not. It then goes on from the other
        # ranks' common parameters, as newcomers do. Averages that travel count at once if a
        # newcomer comes.
        if then and now["taken"] == then["taken"]:
            same = now["own"] == then["own"] or now["travels"] < then["travels"]
            self.expect(same, "parameters are not those of this rank's last commit", batch)
        elif now["taken"]:
            same = now["own"] == now["common"]
            self.expect(same, "a newcomer's parameters are not the common ones", batch)
        self.open_account()

    def commit(self, state: Any) -> None:
        """Commit. If hosts have changed, the commit ends with HostsUpdatedInterrupt."""
        self.committed = self.digests(state.batch)
        step = self.compression.stats()["step"]
        self.note("commit", batch=state.batch, weights=self.committed["common"], step=step)
        state.commit()
        self.make_up_account(state.batch)

    def save(self, batch: int) -> None:
        """Write a checkpoint, whole or not at all, whatever happens meanwhile."""
        written = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "scalecom": self.compression}
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save(saved | {"committed": self.committed}, written)
        whole, part = written.getvalue(), self.folder / f"part-{os.getpid()}"
        with part.open("wb") as file:
            file.write(whole[: len(whole) // 2])
            self.comes_by(Point.SAVING)
            file.write(whole[len(whole) // 2 :])
        part.replace(self.file(batch))
        # All ranks have one of two checkpoints: no rank is a whole round of commits ahead.
        self.file(batch - 2 * COMMIT_EVERY).unlink(missing_ok=True)

    def file(self, batch: int) -> Path:
        return self.folder / f"checkpoint-{self.rank()}-{batch}.pt"

    def step(self, batch: int) -> torch.Tensor:
        """Take a step under this batch's faults. Return the loss."""
        mine = torch.Generator().manual_seed(batch * 1000 + self.rank())
        inputs = torch.randn(BATCH, FEATURES, generator=mine)
        self.came.clear()
        self.optimizer.zero_grad()
        # Whether a batch uses the layer that only some use, every rank decides by itself.
        outputs = self.forward(inputs, self.dice(batch, self.rank()).random() < 0.7)
        loss = torch.nn.functional.mse_loss(outputs, inputs[:, :OUTPUTS])
        factors = self.factors(batch)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(loss * factors[self.rank()]).backward()
        if self.plan.rounds:
            self.take_local_step(batch, scaler, math.isfinite(factors[self.rank()]))
        else:
            self.take_common_step(batch, all(map(math.isfinite, factors)))
        return loss.detach()

    def take_common_step(self, batch: int, sound: bool) -> None:
        self.optimizer.synchronize()
        # DDP leaves no average to a parameter that no rank used.
        arrived = {n: p.grad.double() for n, p in self.parameters.items() if p.grad is not None}
        taken = all(bool(grad.isfinite().all()) for grad in arrived.values())
        self.expect(taken == sound, "a void step was taken, or a sound one not", batch)
        if taken:
            self.book(self.came, arrived)
            # Else a few huge gradients would make all that follow overflow.
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), 100)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()

    def take_local_step(self, batch: int, scaler: torch.amp.GradScaler, sound: bool) -> None:
        skipped = self.compression.stats()["local_steps_skipped"]
        if sound:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), 100)
        scaler.step(self.optimizer)
        right = self.compression.stats()["local_steps_skipped"] == skipped + (not sound)
        self.expect(right, "a step was skipped, or not, and the other was right", batch)
        if sound:
            states = {n: self.optimizer.state[self.parameters[n]] for n in self.came}
            self.book({n: LR * s["momentum_buffer"].double() for n, s in states.items()}, {})

    def residues(self) -> Tensors:
        # state_dict() would wait for look-ahead's offsets. But a commit must be made while they are
        # under way.
        return {name: t.residue for name, t in self.compression.residues.tensors.items()}

    def rounds(self) -> dict[str, Any]:
        """The state of local steps."""
        return self.compression.state_dict()["local_steps"] if self.plan.rounds else {}

    def digests(self, batch: int) -> dict[str, Any]:
        """What lasts from commit to restore, and the parameters that are the same on all ranks."""
        rounds = self.rounds()  # averages that travel have come now, which changes residues
        states = self.compression.run.tensor_states.items()
        # What look-ahead chose is dropped if it never arrives.
        kept = self.residues() | {
            f"{what} {name}": value
            for name, state in states
            for what, value in state.items()
            if what not in ("offsets", "scales")
        }
        common = digest(rounds.get("common", self.parameters))
        now = {"kept": digest(kept), "own": digest(self.parameters), "common": common}
        return now | {"taken": rounds.get("taken", batch), "travels": "since" in rounds}

    def note(self, event: str, **facts: Any) -> None:
        """Write a line into the diary."""
        facts |= {"event": event, "time": time.time(), "generation": self.generation}
        facts |= {"rank": self.rank(), "size": self.size()}
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(facts), file=file)

    def expect(self, truth: Any, complaint: str, batch: int) -> None:
        if not truth:
            self.note("violation", complaint=complaint, batch=batch)

    def open_account(self) -> None:
        zeros = {name: torch.zeros(p.shape).double() for name, p in self.parameters.items()}
        self.came_in, self.arrived = dict(zeros), dict(zeros)
        self.largest = dict.fromkeys(zeros, 0.0)
        self.waited, self.common = self.balance()
        self.outliers = self.compression.stats()["outliers"]

    def book(self, came: Tensors, arrived: Tensors) -> None:
        for booked, new in ((self.came_in, came), (self.arrived, arrived)):
            for name, tensor in new.items():
                booked[name] = booked[name] + tensor
                self.largest[name] += float(tensor.abs().max())

    def balance(self) -> tuple[Tensors, Tensors]:
        """What waits on this rank, and the common parameters, with averages that travel."""
        saved, rounds = self.compression.state_dict(), self.rounds()
        averages, waits, common = rounds.get("averages", {}), {}, {}
        for name, parameter in self.parameters.items():
            x = rounds.get("common", self.parameters)[name].detach().double()
            common[name] = x - averages.get(name, 0)
            begun = rounds["sent_from"][name].double() if name in averages else x
            residue = saved["residues"].get(name, torch.zeros(())).double()
            waits[name] = begun - parameter.detach() + residue / self.compression.config.beta
        return waits, common

    def make_up_account(self, batch: int) -> None:
        waits, common = self.balance()
        mine, arrived = {}, self.arrived
        if self.plan.rounds:
            arrived = {name: self.common[name] - common[name] for name in common}
        for name, waited in self.waited.items():
            sent = self.came_in[name] - (waits[name] - waited)
            # Integers may sum to zero even if much came.
            largest = self.largest[name] + float(waited.abs().max())
            largest += float(common[name].abs().max()) if self.plan.rounds else 0
            mine[name] = sent, 1e-5 * largest + 1e-12
        # After an outlier a rank scales its residue down, if its settings say so.
        scaled = self.compression.stats()["outliers"] != self.outliers
        told = self.gather((mine, scaled), "account")
        for name in () if any(scaled for _, scaled in told) else mine:
            sent, allowed = zip(*(of_rank[name] for of_rank, _ in told), strict=True)
            off = float((sum(sent) / len(sent) - arrived[name]).abs().max())
            complaint = f"{name}: what ranks sent and what arrived differ by {off:g}"
            self.expect(off <= sum(allowed) / len(allowed), complaint, batch)
        self.open_account()


class TorchrunTrainer(Trainer):
    """One worker of a job under torchrun, which starts all workers again if one dies.

    Each goes on from its own last checkpoint, but with rank 0's model, because ranks may have
    reached different ones. Local steps need states of one step, so there each goes on from the last
    checkpoint that all ranks have.
    """

    rank, size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)
    allreduce = staticmethod(dist.all_reduce)

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.plan.optimizer == "drop-in":
            named = self.parameters.items()
            return ddp.DistributedOptimizer(optimizer, named, self.compression, **self.plan.rounds)
        self.forward = DistributedDataParallel(self.model, find_unused_parameters=True)
        state = ddp.ScaleComState(self.forward, self.compression)
        self.forward.register_comm_hook(state, ddp.scalecom_hook)
        # Backward leaves averages already.
        optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext
        return optimizer

    def gather(self, value: Any, name: str) -> list[Any]:
        values = [None] * self.size()
        dist.all_gather_object(values, value)
        return values

    def resume(self) -> Any:
        """Go on from this rank's checkpoint, if it has one. Return what `train` is given."""
        files = self.folder.glob(f"checkpoint-{self.rank()}-*.pt")
        batches = {int(file.stem.rpartition("-")[2]) for file in files}
        if self.plan.rounds:
            batches = set.intersection(*self.gather(batches, "batches"))
        batch = max(batches, default=0)
        if batch:
            saved = torch.load(self.file(batch), weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.compression.load_state_dict(saved["scalecom"])
            self.committed = saved["committed"]
        ddp.broadcast_parameters(self.model)
        batch, state = self.gather((batch, self.optimizer.state_dict()), "start")[0]
        if not (self.plan.rounds and batch):  # there every rank has its own
            self.optimizer.load_state_dict(state)
        return types.SimpleNamespace(batch=batch, commit=lambda: None)


def digest(tensors: Tensors) -> str:
    whole = b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors.values())
    return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    faulthandler.register(signal.SIGUSR1)  # soak.py asks by this where a worker waits
    torch.set_num_threads(1)
    if plan.launcher == "horovodrun":
        hvd.init()
        trainer = Trainer(plan, folder)
        state = hvd.elastic.TorchState(trainer.model, trainer.optimizer, batch=0)
        hvd.elastic.run(trainer.train)(state)
    else:
        dist.init_process_group("gloo")
        trainer = TorchrunTrainer(plan, folder)
        trainer.train(trainer.resume())


if __name__ == "__main__":
    main()
