"""Trains with PyTorch under faults. soak.py runs this on every rank: see there.

The check is made per step and tensor: what left the residues, averaged over ranks, is what arrived
in the gradients. What a rank sent is `m + grad - (m' - (1 - beta) m) / beta`, by the algorithm's
own line for the new residue m'.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch
import torch.distributed as dist
from soak import Plan, Point
from torch.nn.parallel import DistributedDataParallel

import scalecom_hvd.torch as hvd
from scalecom_hvd import ddp
from scalecom_hvd.exchange.methods.base import BucketCollectives
from scalecom_hvd.exchange.optimizer_gradients import OptimizerGradients
from scalecom_hvd.exchange.waves import Waves

FEATURES, HIDDEN, OUTPUTS, BATCH = 64, 128, 32, 32
Arrays = dict[str, np.ndarray]


class Net(torch.nn.Module):
    """A model that hides no error.

    It has two layers, a third that only some batches use, and no normalisation.
    """

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
        named = [self.model.named_parameters()] if plan.optimizer == "stock" else []
        self.compression = pkgutil.resolve_name(plan.method)(*named, **plan.settings)
        self.optimizer = self.distributed(
            torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        )
        # the gradients of the last backward, before anybody changed them
        self.came: Arrays = {}
        self.committed: str | None = None
        self.committed_own: tuple[int, str, bool] | None = None  # see LocalTrainer
        self.made = 0  # steps since the last commit
        self.order: str | None = None
        self.watch()

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer of this plan."""
        named = self.model.named_parameters()
        library = horovod if self.plan.optimizer == "stock" else hvd
        return library.DistributedOptimizer(
            optimizer, named, compression=self.compression, **self.rounds()
        )

    def rounds(self) -> dict[str, int]:
        """What an optimizer is told of local steps."""
        plan = self.plan
        if plan.local_steps is None:
            return {}
        more = {"overlap": plan.overlap, "fragments": plan.fragments}
        return {"local_steps": plan.local_steps, **more}

    # ----------------------------------------------------------------------------------------------
    # faults

    def watch(self) -> None:
        """See gradients before anybody changes them, and die at the points where it is told to."""
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(lambda grad, name=name: self._see(name, grad))
        self._comes_by_before(OptimizerGradients, "_header", Point.SIGNAL)
        self._comes_by_before(Waves, "complete", Point.AVERAGES)
        if self.plan.optimizer == "stock":
            self._die_between_in_stock()
        else:
            leads = BucketCollectives.leads
            self._comes_by_before(BucketCollectives, "average_taken", Point.EXCHANGE, leads)

    def _see(self, name: str, grad: torch.Tensor) -> None:
        self.came[name] = grad.numpy().copy()
        if name == "hidden.weight":
            self.comes_by(Point.BACKWARD)

    def _comes_by_before(
        self, room: type, method: str, point: Point, when: Callable[[Any], bool] = lambda it: True
    ) -> None:
        """Let a worker come by a point before each call of a method of the library."""
        own = getattr(room, method)

        def called(it: Any, *arguments: Any, **more: Any) -> Any:
            if when(it):
                self.comes_by(point)
            return own(it, *arguments, **more)

        setattr(room, method, called)

    def _die_between_in_stock(self) -> None:
        """Let the leader die between its choice and the averages, in Horovod's own optimizer.

        There it has chosen when a gradient is compressed, and then Horovod averages the gradient.
        """
        compression = self.optimizer._compression
        compress = compression.compress

        def dying_compress(grad: torch.Tensor) -> Any:
            sent = compress(grad)
            # this rank chooses for the next step
            if hvd.rank() == (compression.residues.step + 1) % hvd.size():
                self.comes_by(Point.EXCHANGE)
            return sent

        compression.compress = dying_compress

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
        if not self.plan.random_faults:
            return True
        return self._dice(batch, self.ranks.rank()).random() < 0.7

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

    def note(self, event: str, **facts: Any) -> None:
        """Write a line into the diary."""
        facts |= {"event": event, "time": time.time()}
        facts |= {"rank": self.ranks.rank(), "size": self.ranks.size()}
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(facts), file=file)

    def begin(self, batch: int) -> None:
        """Begin training, or go on after workers came or went."""
        self.generation = self.ranks.broadcast_object(
            f"{os.getpid()}.{time.time()}", root_rank=0, name="generation"
        )
        residues = self.residues()
        norm = sum(float(np.linalg.norm(r)) for r in residues.values())
        self.made = 0
        self.note(
            "begin",
            host=os.environ.get("HOROVOD_HOSTNAME"),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            generation=self.generation,
            batch=batch,
            residues=digest(residues),
            norm=norm,
        )
        if self.committed is None:
            self.expect(norm == 0, "a newcomer's residues are not zero", batch)
        else:
            same = digest(self.kept()) == self.committed
            self.expect(same, "residues are not those of this rank's last commit", batch)

    def commit(self, state: Any) -> None:
        """Commit. If hosts have changed, the commit ends with HostsUpdatedInterrupt."""
        self.committed = digest(self.kept())
        self.note(
            "commit",
            batch=state.batch,
            generation=self.generation,
            weights=digest(self.common()),
            step=self.compression.stats()["step"],
            made=self.made,
        )
        self.made = 0
        state.commit()

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

    def backward(self, batch: int) -> tuple[torch.Tensor, float | None]:
        """Compute a step's gradients under this batch's faults. Return the loss, and `overflow`."""
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
        return loss.detach(), overflow

    def step(self, batch: int) -> torch.Tensor:
        """Take a step, and check it. Return the loss."""
        before = self.residues()
        loss, overflow = self.backward(batch)
        self.optimizer.synchronize()
        # DDP leaves no average to a parameter that no rank used.
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        arrived = arrays(grads)
        if finite:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        if overflow is not None:
            self.expect(not finite, "a step with an overflow was taken", batch)
            self.check_void(batch, before)
        else:
            self.expect(finite, "a sound step was not taken", batch)
            self.check_sent(batch, before, arrived)
        return loss

    # ----------------------------------------------------------------------------------------------
    # checks

    def residues(self) -> Arrays:
        # state_dict() would wait for look-ahead's offsets. But a step must begin, and a commit must
        # be made, while they are under way.
        tensors = self.compression.residues.tensors.items()
        return arrays({name: tensor.residue.view(tensor.shape) for name, tensor in tensors})

    def kept(self) -> Arrays:
        """Everything of this worker's own that lasts from commit to restore."""
        states = self.compression.run.tensor_states.items()
        # What look-ahead chose is dropped if it never arrives.
        more = {
            f"{what} {name}": value
            for name, state in states
            for what, value in state.items()
            if what not in ("offsets", "scales")
        }
        return self.residues() | arrays(more)

    def own(self) -> Arrays:
        """This rank's parameters."""
        return arrays(dict(self.model.named_parameters()))

    def common(self) -> Arrays:
        """The parameters that are the same on all ranks."""
        return self.own()

    def expect(self, truth: Any, complaint: str, batch: int) -> None:
        if not truth:
            self.note("violation", complaint=complaint, batch=batch)

    def check_void(self, batch: int, before: Arrays) -> None:
        for name, now in self.residues().items():
            then = before.get(name, np.zeros_like(now))
            came = np.nan_to_num(np.abs(self.came.get(name, np.zeros(1))), nan=0, posinf=0)
            size = float(came.max()) + float(np.abs(then).max())
            same = np.allclose(now, then, rtol=1e-5, atol=1e-6 * size)
            self.expect(same, f"a void step changed the residue of {name}", batch)

    def check_sent(self, batch: int, before: Arrays, arrived: Arrays) -> None:
        beta, sent, allowed, after = self.compression.config.beta, {}, {}, self.residues()
        for name in after.keys() - arrived.keys():
            same = np.array_equal(after[name], before[name])
            self.expect(same, f"the residue of {name} changed, which no rank used", batch)
        for name, average in arrived.items():
            came = sent[name] = self.came.get(name, np.zeros_like(average))
            then = before.get(name, np.zeros_like(average))
            if name in after:
                sent[name] = came + then - (after[name] - (1 - beta) * then) / beta
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
        together = torch.from_numpy(np.concatenate(parts))
        averages = self.ranks.allreduce(together, name="soak.sent").numpy()
        *averages, limits = np.split(averages, np.cumsum([part.size for part in parts])[:-1])
        for name, average, limit in zip(sent, averages, limits, strict=True):
            off = float(np.abs(average - arrived[name].ravel()).max())
            self.expect(off <= limit, f"{name}: {what} differ by {off:g}", batch)


class LocalTrainer(Trainer):
    """One worker that takes local steps.

    Every synchronisation compares changes of parameters.
    """

    def watch(self) -> None:
        super().watch()
        self.local = self.optimizer._local
        depart, arrive = self.local._depart, self.local._arrive
        # What this rank brought to the synchronisation that departed last: after how many steps,
        # its changes, its residues before, and of how many ranks.
        self.brought: tuple[int, Arrays, Arrays, int] = (-1, {}, {}, 0)
        self.arrived: int | None = None

        def see_what_departs(fragments: range) -> None:
            # Until the first one begins, x is not known.
            self.x = arrays(self.local.common)
            names = {name for number in fragments for name in self.local._fragments[number]}
            changes = {
                name: (self.x[name] - mine) * (name in names) for name, mine in self.own().items()
            }
            self.brought = self.local.taken, changes, self.residues(), self.ranks.size()
            depart(fragments)

        def see_what_arrives(everywhere: bool = True) -> bool:
            self.arrived = self.local._journey and self.local._journey.since
            return arrive(everywhere)

        self.local._depart, self.local._arrive = see_what_departs, see_what_arrives

    def common(self) -> Arrays:
        return arrays(self.local.common)

    def begin(self, batch: int) -> None:
        super().begin(batch)
        # A rank may have committed a step that other ranks have not. The other ranks go on from its
        # common parameters, as newcomers do.
        own = digest(self.own())
        if self.committed is not None and self.local.taken == self.committed_own[0]:
            # Averages that travel count at once if a newcomer comes.
            counted = self.committed_own[2] and self.local._journey is None
            same = counted or own == self.committed_own[1]
            self.expect(same, "parameters are not those of this rank's last commit", batch)
        elif self.local.taken:
            same = own == digest(self.common())
            self.expect(same, "a newcomer's parameters are not the common ones", batch)

    def commit(self, state: Any) -> None:
        self.local.collect()  # the commit does this too, and it changes residues
        travels = self.local._journey is not None
        self.committed_own = self.local.taken, digest(self.own()), travels
        super().commit(state)

    def step(self, batch: int) -> torch.Tensor:
        self.arrived = None
        skipped, exchanged = self.local.skipped, self.compression.stats()["step"]
        loss, overflow = self.backward(batch)
        hit = overflow not in (None, 1.0)
        values = digest(self.own()) if hit else None
        # A GradScaler leaves this to an optimizer that can unscale and skip.
        self.optimizer.grad_scale = torch.tensor(1.0)
        self.optimizer.found_inf = torch.tensor(float(hit))
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf
        right = self.local.skipped == skipped + hit
        self.expect(right, "a step was skipped, or not, and the other was right", batch)
        if self.arrived is not None:
            counts = self.compression.stats()["step"] > exchanged or self.plan.overlap
            self.expect(counts, "a synchronisation did not count", batch)
            # A rank that came after the departure knows nothing of it. A rank that left took part
            # in it.
            same = self.brought[0] == self.arrived and self.brought[3] == self.ranks.size()
            known = self.ranks.allreduce(torch.tensor(float(same)), name="soak.known")
            if known > 0.99:  # on all ranks
                self.check_changes(batch)
        elif hit:
            self.expect(digest(self.own()) == values, "a skipped step changed parameters", batch)
        return loss

    def check_changes(self, batch: int) -> None:
        """Check that what left the ranks' residues and changes, averaged, is what x moved by."""
        _, changes, before, _ = self.brought
        sent, moved, allowed, common = dict(changes), {}, {}, self.common()
        beta = self.compression.config.beta
        for name, now in self.residues().items():
            sent[name] = sent[name] + (before.get(name, np.zeros_like(now)) - now) / beta
        for name, x in self.x.items():
            moved[name] = x - common[name]
            size = float(np.abs(x).max()) + float(np.abs(before.get(name, np.zeros(1))).max())
            allowed[name] = 1e-5 * size / beta + 1e-12
        self.compare(batch, sent, moved, allowed, "what left the ranks and what x moved by")


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
            named = self.model.named_parameters()
            return ddp.DistributedOptimizer(optimizer, named, self.compression, **self.rounds())
        self.forward = DistributedDataParallel(self.model, find_unused_parameters=True)
        state = ddp.ScaleComState(self.forward, self.compression)
        self.forward.register_comm_hook(state, ddp.scalecom_hook)
        # Backward leaves averages already.
        optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext
        return optimizer

    def saved(self) -> dict[str, Any]:
        own = {"committed": self.committed, "committed_own": self.committed_own}
        return super().saved() | {"optimizer": self.optimizer.state_dict(), **own}

    def save(self) -> None:
        # All ranks have one of two checkpoints: no rank is a whole round of commits ahead.
        self.file = self.file_of(self.state.batch)
        super().save()
        self.file_of(self.state.batch - 2 * self.plan.commit_every).unlink(missing_ok=True)

    def file_of(self, batch: int) -> Path:
        return self.folder / f"checkpoint-{dist.get_rank()}-{batch}.pt"

    def resume(self) -> Any:
        """Go on from this rank's checkpoint, if it has one. Return what `train` is given."""
        rounds = self.plan.local_steps is not None
        files = self.folder.glob(f"checkpoint-{dist.get_rank()}-*.pt")
        batches = {int(file.stem.rpartition("-")[2]) for file in files}
        if rounds:
            everyone = [set()] * dist.get_world_size()
            dist.all_gather_object(everyone, batches)
            batches = set.intersection(*everyone)
        batch = max(batches, default=0)
        if batch:
            saved = torch.load(self.file_of(batch), weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.compression.load_state_dict(saved["scalecom"])
            self.committed, self.committed_own = saved["committed"], saved["committed_own"]
        ddp.broadcast_parameters(self.model)
        common = batch, self.optimizer.state_dict()
        batch, state = self.ranks.broadcast_object(common, root_rank=0, name="start")
        if not (rounds and batch):  # there every rank has its own
            self.optimizer.load_state_dict(state)
        self.state = types.SimpleNamespace(batch=batch, commit=lambda: None)
        return self.state


class TorchrunLocalTrainer(TorchrunTrainer, LocalTrainer):
    """A worker that takes local steps under torchrun."""


def arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Copies of the tensors."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def digest(arrays: Arrays) -> str:
    whole = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    # soak.py asks by this where a worker waits.
    where = (folder / f"where-{os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, where)
    torch.set_num_threads(1)
    local = plan.local_steps is not None
    if plan.elastic:
        hvd.init()
        trainer = (LocalTrainer if local else Trainer)(plan, folder, hvd)
        state = hvd.elastic.TorchState(trainer.model, trainer.optimizer, batch=0)
        hvd.elastic.run(trainer.train)(state)
    else:
        dist.init_process_group("gloo")
        trainer = (TorchrunLocalTrainer if local else TorchrunTrainer)(plan, folder, Ranks)
        trainer.train(trainer.resume())


if __name__ == "__main__":
    main()
