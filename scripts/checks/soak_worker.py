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
import os
import pkgutil
import random
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch
import torch.distributed as dist
from soak import Plan, Point
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
    """One worker of a job on Horovod: its training loop, its checks, and its diary.

    ranks: Horovod, or its replacement.
    """

    def __init__(self, plan: Plan, folder: Path, ranks: Any) -> None:
        self.plan, self.folder, self.ranks = plan, folder, ranks
        self.file = folder / f"checkpoint-{os.getpid()}.pt"
        # every worker begins with other weights: only Horovod's states make them equal
        torch.manual_seed(os.getpid())
        self.model = Net()
        self.forward: torch.nn.Module = self.model
        self.parameters = dict(self.model.named_parameters())
        named = [self.parameters.items()] if plan.optimizer == "stock" else []
        method = pkgutil.resolve_name(plan.method)
        # Everything must be accounted for.
        self.compression = method(*named, outliers=None, **plan.settings)
        self.optimizer = self.distributed(torch.optim.SGD(self.parameters.values(), LR, 0.9))
        self.came: Tensors = {}  # the gradients of the last backward, before anybody changed them
        self.committed: dict[str, Any] = {}  # digests of the last commit
        self.order: str | None = None
        self.watch()

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer of this plan."""
        library = horovod if self.plan.optimizer == "stock" else hvd
        return library.DistributedOptimizer(
            optimizer, self.parameters.items(), compression=self.compression, **self.plan.rounds
        )

    # ----------------------------------------------------------------------------------------------
    # faults

    def watch(self) -> None:
        """See gradients before anybody changes them, and die at the points where it is told to."""
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: self._see(name, grad))
        self._comes_by_before(OptimizerGradients, "_header", Point.SIGNAL)
        self._comes_by_before(Waves, "complete", Point.AVERAGES)
        self._comes_by_before(BucketCollectives, "average_taken", Point.EXCHANGE)
        if self.plan.optimizer == "stock":
            # There the leader has chosen when a gradient is compressed. Then Horovod averages it.
            compress = self.compression.compress

            def dying_compress(grad: torch.Tensor) -> Any:
                sent = compress(grad)
                if hvd.rank() == (self.compression.residues.step + 1) % hvd.size():
                    self.comes_by(Point.EXCHANGE)
                return sent

            self.compression.compress = dying_compress

    def _see(self, name: str, grad: torch.Tensor) -> None:
        self.came[name] = grad.double()
        if name == "hidden.weight":
            self.comes_by(Point.BACKWARD)

    def _comes_by_before(self, room: type, method: str, point: Point) -> None:
        """Let a worker come by a point before each call of a method of the library."""
        own = getattr(room, method)

        def called(it: Any, *arguments: Any, **more: Any) -> Any:
            if point != Point.EXCHANGE or it.leads():
                self.comes_by(point)
            return own(it, *arguments, **more)

        setattr(room, method, called)

    def told(self, batch: int) -> str | None:
        """What this worker is told to do in this step, and where."""
        planned = self.plan.deaths.get(os.environ.get("HOROVOD_HOSTNAME", ""))
        if planned is not None and batch >= planned[0]:
            return f"die {planned[1]}"
        order = self.folder / f"order-{os.getpid()}"
        return order.read_text() if order.exists() else None

    def comes_by(self, point: Point) -> None:
        """Do what this worker was told to do here, if anything."""
        if self.order == f"die {point}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.order == f"wait {point}":
            self.order = None
            (self.folder / f"order-{os.getpid()}").unlink()
            time.sleep(2)

    def _dice(self, *of: Any) -> random.Random:
        """It depends only on the batch, so a batch that is made again fails again."""
        return random.Random(f"{self.plan.seed} {of}")

    def overflow(self, batch: int) -> float | None:
        """A factor of this rank's gradients, with which those of some rank overflow."""
        dice = self._dice(batch)
        if not self.plan.random_faults or dice.random() > 0.1:
            return None
        value, on_all = dice.choice((float("inf"), float("nan"))), dice.random() < 0.5
        return value if on_all or self.ranks.rank() == batch % self.ranks.size() else 1.0

    def detour(self, batch: int) -> bool:
        """Whether this rank uses the layer that only some use. Every rank decides by itself."""
        random_faults = self.plan.random_faults
        return not random_faults or self._dice(batch, self.ranks.rank()).random() < 0.7

    # ----------------------------------------------------------------------------------------------
    # the training loop

    def train(self, state: Any) -> None:
        """Train until the end. hvd.elastic.run calls this, or torchrun starts it again."""
        self.begin(state.batch)
        while state.batch != self.plan.last:
            if state.batch == self.plan.grow_at and self.ranks.size() == 2:
                self._wait_for_newcomers(state)
            loss = self.step(state.batch)
            # without a name: newcomers must count such calls as the other ranks do
            self.ranks.allreduce(loss)
            self.made += 1
            state.batch += 1
            if state.batch % self.plan.commit_every == 0:
                self.commit(state)
                self.order = self.told(state.batch)
                self.save()
                stop = (self.folder / "stop").exists()
                if self.ranks.broadcast_object(stop, root_rank=0, name="stop"):
                    break
        self.note("end")

    def _wait_for_newcomers(self, state: Any) -> None:
        hosts = self.folder / "hosts"
        if self.ranks.rank() == 0:
            hosts.write_text(hosts.read_text() + "localhost:1\n")
        limit = time.time() + 60
        while time.time() < limit:
            state.commit()
            time.sleep(0.1)
        raise TimeoutError("nobody came")

    def begin(self, batch: int) -> None:
        """Begin training, or go on after workers came or went."""
        generation = f"{os.getpid()}.{time.time()}"
        self.generation = self.ranks.broadcast_object(generation, root_rank=0, name="generation")
        residues = self.residues()
        norm = sum(float(residue.norm()) for residue in residues.values())
        self.note(
            "begin",
            host=os.environ.get("HOROVOD_HOSTNAME"),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            generation=self.generation,
            batch=batch,
            residues=digest(residues),
            norm=norm,
        )
        then, now = self.committed, self.digests(batch)
        if not then:
            self.expect(norm == 0, "a newcomer's residues are not zero", batch)
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
        self.note(
            "commit",
            batch=state.batch,
            generation=self.generation,
            weights=self.committed["common"],
            step=self.compression.stats()["step"],
            made=self.made,
        )
        state.commit()
        self.make_up_account(state.batch)

    def save(self) -> None:
        """Write a checkpoint, whole or not at all, whatever happens meanwhile."""
        written = io.BytesIO()
        torch.save(self.saved(), written)
        whole, part = written.getvalue(), self.file.with_suffix(".part")
        with part.open("wb") as file:
            file.write(whole[: len(whole) // 2])
            file.flush()
            self.comes_by(Point.SAVING)
            file.write(whole[len(whole) // 2 :])
        os.replace(part, self.file)

    def saved(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "scalecom": self.compression.state_dict()}

    def step(self, batch: int) -> torch.Tensor:
        """Take a step under this batch's faults. Return the loss."""
        truth = torch.Generator().manual_seed(0)
        truth = torch.randn(FEATURES, OUTPUTS, generator=truth) / FEATURES**0.5
        mine = torch.Generator().manual_seed(batch * 1000 + self.ranks.rank())
        inputs = torch.randn(BATCH, FEATURES, generator=mine)
        overflow = self.overflow(batch)
        self.order = self.told(batch)
        self.came.clear()
        self.optimizer.zero_grad()
        outputs = self.forward(inputs, self.detour(batch))
        loss = torch.nn.functional.mse_loss(outputs, inputs @ truth)
        (loss * (1.0 if overflow is None else overflow)).backward()
        finish = self.take_local_step if self.plan.rounds else self.take_common_step
        finish(batch, overflow)
        return loss.detach()

    def take_common_step(self, batch: int, overflow: float | None) -> None:
        self.optimizer.synchronize()
        # DDP leaves no average to a parameter that no rank used.
        arrived = {n: p.grad.double() for n, p in self.parameters.items() if p.grad is not None}
        finite = all(bool(grad.isfinite().all()) for grad in arrived.values())
        self.expect(
            finite == (overflow is None), "a void step was taken, or a sound one not", batch
        )
        if finite:
            self.book(self.came, arrived)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()

    def take_local_step(self, batch: int, overflow: float | None) -> None:
        hit = overflow not in (None, 1.0)
        skipped = self.compression.stats()["local_steps_skipped"]
        # A GradScaler leaves this to an optimizer that can unscale and skip.
        self.optimizer.grad_scale = torch.tensor(1.0)
        self.optimizer.found_inf = torch.tensor(float(hit))
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf
        right = self.compression.stats()["local_steps_skipped"] == skipped + hit
        self.expect(right, "a step was skipped, or not, and the other was right", batch)
        if not hit:
            states = {n: self.optimizer.state[self.parameters[n]] for n in self.came}
            self.book({n: LR * s["momentum_buffer"].double() for n, s in states.items()}, {})

    # ----------------------------------------------------------------------------------------------
    # checks

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
        return {
            "kept": digest(kept),
            "own": digest(self.parameters),
            "common": digest(rounds.get("common", self.parameters)),
            "taken": rounds.get("taken", batch),
            "travels": "since" in rounds,
        }

    def note(self, event: str, **facts: Any) -> None:
        """Write a line into the diary."""
        facts |= {"event": event, "time": time.time()}
        facts |= {"rank": self.ranks.rank(), "size": self.ranks.size()}
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(facts), file=file)

    def expect(self, truth: Any, complaint: str, batch: int) -> None:
        if not truth:
            self.note("violation", complaint=complaint, batch=batch)

    def open_account(self) -> None:
        self.made = 0  # steps since the last commit
        zeros = {name: torch.zeros(p.shape).double() for name, p in self.parameters.items()}
        self.came_in, self.arrived = dict(zeros), dict(zeros)
        self.largest = dict.fromkeys(zeros, 0.0)
        self.waited, self.common = self.balance()

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
        for name, waited in self.waited.items():
            sent = self.came_in[name] - (waits[name] - waited)
            arrived = self.arrived[name]
            if self.plan.rounds:
                arrived = self.common[name] - common[name]
                self.largest[name] += float(common[name].abs().max())
            # Integers may sum to zero even if much came.
            allowed = 1e-5 * (self.largest[name] + float(waited.abs().max())) + 1e-12
            mine = torch.cat([sent.flatten(), torch.tensor([allowed]).double()])
            averages = self.ranks.allreduce(mine, name=f"soak.{name}")
            off = float((averages[:-1] - arrived.flatten()).abs().max())
            complaint = f"{name}: what ranks sent and what arrived differ by {off:g}"
            self.expect(off <= averages[-1], complaint, batch)
        self.open_account()


class Ranks:
    """What the soak asks of Horovod, from torch.distributed, which knows no names."""

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)

    @staticmethod
    def broadcast_object(value: Any, root_rank: int, name: str) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=root_rank)
        return values[0]

    @staticmethod
    def allreduce(values: torch.Tensor, name: str | None = None) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


class TorchrunTrainer(Trainer):
    """One worker of a job under torchrun, which starts all workers again if one dies.

    Each goes on from its own last checkpoint, but with rank 0's model, because ranks may have
    reached different ones. Local steps need states of one step, so there each goes on from the last
    checkpoint that all ranks have.
    """

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.plan.optimizer == "torchrun":
            named = self.parameters.items()
            return ddp.DistributedOptimizer(optimizer, named, self.compression, **self.plan.rounds)
        self.forward = DistributedDataParallel(self.model, find_unused_parameters=True)
        state = ddp.ScaleComState(self.forward, self.compression)
        self.forward.register_comm_hook(state, ddp.scalecom_hook)
        # Backward leaves averages already.
        optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext
        return optimizer

    def saved(self) -> dict[str, Any]:
        own = {"optimizer": self.optimizer.state_dict(), "committed": self.committed}
        return super().saved() | own

    def save(self) -> None:
        # All ranks have one of two checkpoints: no rank is a whole round of commits ahead.
        self.file = self.file_of(self.state.batch)
        super().save()
        self.file_of(self.state.batch - 2 * self.plan.commit_every).unlink(missing_ok=True)

    def file_of(self, batch: int) -> Path:
        return self.folder / f"checkpoint-{dist.get_rank()}-{batch}.pt"

    def resume(self) -> Any:
        """Go on from this rank's checkpoint, if it has one. Return what `train` is given."""
        files = self.folder.glob(f"checkpoint-{dist.get_rank()}-*.pt")
        batches = {int(file.stem.rpartition("-")[2]) for file in files}
        if self.plan.rounds:
            everyone = [set()] * dist.get_world_size()
            dist.all_gather_object(everyone, batches)
            batches = set.intersection(*everyone)
        batch = max(batches, default=0)
        if batch:
            saved = torch.load(self.file_of(batch), weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.compression.load_state_dict(saved["scalecom"])
            self.committed = saved["committed"]
        ddp.broadcast_parameters(self.model)
        common = batch, self.optimizer.state_dict()
        batch, state = self.ranks.broadcast_object(common, root_rank=0, name="start")
        if not (self.plan.rounds and batch):  # there every rank has its own
            self.optimizer.load_state_dict(state)
        self.state = types.SimpleNamespace(batch=batch, commit=lambda: None)
        return self.state


def digest(tensors: Tensors) -> str:
    whole = b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors.values())
    return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    # soak.py asks by this where a worker waits.
    where = (folder / f"where-{os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, where)
    torch.set_num_threads(1)
    if plan.elastic:
        hvd.init()
        trainer = Trainer(plan, folder, hvd)
        state = hvd.elastic.TorchState(trainer.model, trainer.optimizer, batch=0)
        hvd.elastic.run(trainer.train)(state)
    else:
        dist.init_process_group("gloo")
        trainer = TorchrunTrainer(plan, folder, Ranks)
        trainer.train(trainer.resume())


if __name__ == "__main__":
    main()
