"""Run on every rank by soak.py: trains elastically under faults, checks after every step that nothing was lost, and keeps a diary.

Arguments: a folder, and the plan as JSON (see `Plan`). The folder holds `hosts`, which host discovery shows; `order-PID`, by which soak.py
tells a worker where to die; `stop`, which ends the job; checkpoints; and every worker's diary, a JSON object per line.

What is checked, per step and tensor: what left the residues, averaged over ranks, is what arrived in the gradients. What a rank sent is
`m + grad - (m' - (1 - beta) m) / beta`, by the algorithm's own line for the new residue m'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import psutil
import torch

import scalecom_hvd.torch as hvd

FEATURES, OUTPUTS, BATCH = 64, 32, 32


@dataclasses.dataclass
class Plan:
    """What a job does. deaths: {host: [batch, point]}, for a job whose course is known beforehand (see `Faults.death`)."""

    optimizer: str = "drop-in"  # or "stock": Horovod's own; "local steps"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    commit_every: int = 5
    last: int | None = None
    seed: int = 0
    random_faults: bool = True
    deaths: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    grow_at: int | None = None
    local_steps: int | None = None


class Net(torch.nn.Module):
    """Two layers, a third that only some batches use, and no normalisation: a model in which nothing hides an error."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, 128)
        self.sometimes = torch.nn.Linear(128, 128)
        self.output = torch.nn.Linear(128, OUTPUTS)

    def forward(self, inputs: torch.Tensor, detour: bool) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(inputs))
        if detour:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return self.output(hidden)


class Diary:
    """What this worker writes down."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.jsonl"

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as file:
            facts = {"event": event, "time": time.time(), "rank": hvd.rank(), "size": hvd.size(), **facts}
            print(json.dumps(facts), file=file)

    def fault(self, kind: str, batch: int) -> None:
        self.note("fault", kind=kind, batch=batch)


class Faults:
    """What goes wrong in which batch: the same on all ranks, from (seed, batch) alone, so that a batch that is made again fails again."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self._folder = plan, folder

    def _dice(self, batch: int, what: str) -> random.Random:
        return random.Random(f"{self.plan.seed}.{batch}.{what}")

    def overflow(self, batch: int, leader: int) -> tuple[str, float] | None:
        """Which kind of overflow happens, and what this rank's gradients become (1: nothing)."""
        dice = self._dice(batch, "overflow")
        if not self.plan.random_faults or dice.random() > 0.1:
            return None
        kind = dice.choice(("one rank", "the leader", "all ranks"))
        hit = {"one rank": hvd.rank() == batch % hvd.size(), "the leader": hvd.rank() == leader, "all ranks": True}[kind]
        return f"gradients overflow on {kind}", dice.choice((float("inf"), float("nan"))) if hit else 1.0

    def detour(self, batch: int) -> bool:
        """Whether this rank uses the layer that only some do: every rank decides on its own."""
        return not self.plan.random_faults or self._dice(batch, f"detour {hvd.rank()}").random() < 0.7

    def frozen(self, batch: int) -> bool:
        """Whether the output layer is frozen."""
        return self.plan.random_faults and batch // 20 % 4 == 3

    def loss_scale(self, batch: int) -> float:
        return 2.0 ** self._dice(batch // 10, "scale").randrange(-4, 16) if self.plan.random_faults else 1.0

    def lateness(self, batch: int) -> float:
        """Seconds that this rank comes late."""
        dice = self._dice(batch, "late")
        late = self.plan.random_faults and dice.random() < 0.01 and dice.randrange(hvd.size()) == hvd.rank()
        return dice.uniform(0.2, 3) if late else 0.0

    def death(self, batch: int) -> str | None:
        """Where in this step this worker dies: "backward"; "exchange", as the leader between its broadcast and its all-reduce; "saving",
        while a checkpoint is written."""
        planned = self.plan.deaths.get(os.environ.get("HOROVOD_HOSTNAME", ""))
        if planned is not None and batch >= planned[0]:
            return planned[1]
        order = self._folder / f"order-{os.getpid()}"
        return order.read_text() if order.exists() else None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingFile(io.FileIO):
    """A file in whose middle the process dies."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        die()
        return 0


class Trainer:
    """One worker's model, optimizer and checks."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.diary, self.faults = Diary(folder), Faults(plan, folder)
        torch.manual_seed(os.getpid())  # every worker begins elsewhere: only Horovod's states bring them together
        self.model = Net()
        self.scale = 1.0
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        compression = hvd.ScaleCom(
            self.model.named_parameters() if plan.optimizer == "stock" else None, loss_scale=lambda: self.scale, **plan.settings
        )
        make = horovod.DistributedOptimizer if plan.optimizer == "stock" else hvd.DistributedOptimizer
        more = {} if plan.local_steps is None else {"local_steps": plan.local_steps}
        self.optimizer = make(optimizer, named_parameters=self.model.named_parameters(), compression=compression, **more)
        self.compression = compression
        self.came: dict[str, torch.Tensor] = {}
        self.committed: str | None = None
        self.made = 0  # steps since the last commit
        self.death: str | None = None
        self.watch()

    def watch(self) -> None:
        """See gradients before anybody changes them, and die in the places where a worker may be told to."""
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(self._see(name))
        reducer = getattr(self.optimizer, "_reducer", None)
        if reducer is not None:
            transport, average = reducer._transport, reducer._transport.average

            def dying_average(buffer: torch.Tensor, name: str) -> int:
                if self.death == "exchange" and transport.position == reducer.leader(0, reducer.residues.step):
                    die()
                return average(buffer, name)

            transport.average = dying_average

    def _see(self, name: str) -> Callable[[torch.Tensor], None]:
        def see(grad: torch.Tensor) -> None:
            self.came[name] = grad.clone()
            if self.death == "backward" and name == "hidden.weight":
                die()

        return see

    def residues(self) -> dict[str, torch.Tensor]:
        # Not by state_dict(), which waits for look-ahead's offsets: a step is to begin, and a commit to be made, while they are in flight.
        return {name: tensor.residue.view(tensor.shape).clone() for name, tensor in self.compression.residues.tensors.items()}

    def common(self) -> dict[str, torch.Tensor]:
        """The parameters that are the same on all ranks."""
        return dict(self.model.named_parameters())

    def digest(self, tensors: dict[str, torch.Tensor]) -> str:
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors.values())).hexdigest()[:16]

    def begin(self, batch: int) -> None:
        """Training starts, or goes on after workers came or went."""
        generation = hvd.broadcast_object(f"{os.getpid()}.{time.time()}", root_rank=0, name="generation")
        residues = self.residues()
        norm = sum(float(r.norm()) for r in residues.values())
        self.generation = generation
        self.made = 0
        host = os.environ.get("HOROVOD_HOSTNAME")
        self.diary.note("begin", host=host, batch=batch, step=self.compression.stats()["step"], residues=self.digest(residues), norm=norm)
        if self.committed is None:
            self.expect(norm == 0, "a newcomer's residues are not zero", batch)
        else:
            self.expect(self.digest(residues) == self.committed, "residues are not those of this rank's last commit", batch)

    def expect(self, truth: Any, complaint: str, batch: int) -> None:
        if not truth:
            self.diary.note("violation", complaint=complaint, batch=batch)

    def backward(self, batch: int) -> tuple[torch.Tensor, tuple[str, float] | None]:
        """The gradients of a training step under this batch's faults; gives the loss, and the overflow, if there is one."""
        truth = torch.randn(FEATURES, OUTPUTS, generator=torch.Generator().manual_seed(0)) / FEATURES**0.5
        mine = torch.Generator().manual_seed(batch * 1000 + hvd.rank())
        inputs = torch.randn(BATCH, FEATURES, generator=mine)
        self.scale = self.faults.loss_scale(batch)
        self.model.output.requires_grad_(not self.faults.frozen(batch))
        step = self.compression.stats()["step"]
        overflow = self.faults.overflow(batch, step % hvd.size())
        self.death = self.faults.death(batch)
        self.came.clear()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(inputs, self.faults.detour(batch)), inputs @ truth)
        late = self.faults.lateness(batch)
        if late:
            self.diary.fault("a rank is late", batch)
            time.sleep(late)
        (loss * self.scale * (overflow[1] if overflow else 1.0)).backward()
        if overflow and hvd.rank() == 0:
            self.diary.fault(overflow[0], batch)
        return loss.detach(), overflow

    def step(self, batch: int) -> float:
        """One training step under this batch's faults; gives the loss."""
        before = self.residues()
        loss, overflow = self.backward(batch)
        self.optimizer.synchronize()
        grads = {name: p.grad / self.scale for name, p in self.model.named_parameters()}
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        if finite:
            for name, parameter in self.model.named_parameters():
                parameter.grad.copy_(grads[name])
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        if overflow:
            self.expect(not finite, "a step with an overflow was taken", batch)
            self.check_void(batch, before)
        else:
            self.expect(finite, "a sound step was not taken", batch)
            self.check_sent(batch, before, grads)
        self.made += 1
        return float(hvd.allreduce(loss))  # without a name: newcomers must count such calls as the others do

    def check_void(self, batch: int, before: dict[str, torch.Tensor]) -> None:
        for name, now in self.residues().items():
            then = before.get(name, torch.zeros_like(now))
            came = self.came.get(name, torch.zeros(()))
            scale = float((came / self.scale).abs().nan_to_num(0, 0, 0).max()) + float(then.abs().max())
            self.expect(torch.allclose(now, then, rtol=1e-5, atol=1e-6 * scale), f"a void step changed the residue of {name}", batch)

    def check_sent(self, batch: int, before: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> None:
        beta = self.compression.config.beta
        sent = {}
        for name, parameter in self.model.named_parameters():
            trained = parameter.requires_grad and name in self.came
            sent[name] = self.came[name] / self.scale if trained else torch.zeros_like(parameter)
        for name, now in self.residues().items():
            then = before.get(name, torch.zeros_like(now))
            if self.model.get_parameter(name).requires_grad:
                sent[name] = sent[name] + then - (now - (1 - beta) * then) / beta
        names = list(sent)
        averages = hvd.allreduce(torch.cat([sent[name].reshape(-1) for name in names]), name="soak.sent")
        for name, average in zip(names, averages.split([sent[name].numel() for name in names]), strict=True):
            arrived = grads[name].reshape(-1)
            size = max(float(arrived.abs().max()), float(before.get(name, arrived).abs().max()))
            off = float((average - arrived).abs().max())
            # The sum of float16 values is rounded, and its rounding error is nobody's.
            precision = 1e-5 if self.compression.config.wire_dtype is None else 2e-3
            self.expect(off <= precision * size / beta + 1e-12, f"{name}: what left the residues and what arrived differ by {off:g}", batch)

    def commit(self, state: Any, loss: float) -> None:
        """Commits; at the end, if hosts have changed, that raises HostsUpdatedInterrupt."""
        residues = self.residues()
        self.committed = self.digest(residues)
        self.diary.note(
            "commit", batch=state.batch, generation=self.generation, weights=self.digest(self.common()), loss=loss,
            residues=self.committed, step=self.compression.stats()["step"], memory=memory(), made=self.made,
        )  # fmt: skip
        self.made = 0
        state.commit()

    def save(self) -> None:
        """A checkpoint, whole or not at all, whatever happens meanwhile."""
        path = self.folder / f"checkpoint-{os.getpid()}.pt"
        part = path.with_suffix(".part")
        with DyingFile(part, "w") if self.death == "saving" else part.open("wb") as file:
            torch.save({"model": self.model.state_dict(), "scalecom": self.compression.state_dict()}, file)
        os.replace(part, path)


class LocalTrainer(Trainer):
    """One worker that takes local steps: what is compared at every synchronisation are changes of parameters."""

    def watch(self) -> None:
        super().watch()
        self.local = self.optimizer._local
        synchronise = self.local._synchronise

        def seen(due: Any) -> None:
            # As the first one begins, x is not known before.
            self.x = {name: x.detach().clone() for name, x in self.local.common.items()}
            self.changes = {name: self.x[name] - p.detach() for name, p in self.model.named_parameters()}
            synchronise(due)

        self.local._synchronise = seen

    def common(self) -> dict[str, torch.Tensor]:
        return {name: x.detach() for name, x in self.local.common.items()}

    def step(self, batch: int) -> float:
        self.changes: dict[str, torch.Tensor] = {}
        before, skipped, exchanged = self.residues(), self.local.skipped, self.compression.stats()["step"]
        loss, overflow = self.backward(batch)
        hit = overflow is not None and overflow[1] != 1.0
        values = self.digest(dict(self.model.named_parameters())) if hit else None
        # As a GradScaler leaves it to an optimizer that can unscale and skip.
        self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(self.scale), torch.tensor(float(hit))
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf
        self.expect(self.local.skipped == skipped + hit, "a step was skipped, or not, and the other was right", batch)
        if self.changes:
            self.expect(self.compression.stats()["step"] > exchanged, "a synchronisation did not count", batch)
            self.check_changes(batch, before)
        elif hit:
            self.expect(self.digest(dict(self.model.named_parameters())) == values, "a skipped step changed parameters", batch)
        self.made += 1
        return float(hvd.allreduce(loss))

    def check_changes(self, batch: int, before: dict[str, torch.Tensor]) -> None:
        """What left ranks' residues and changes, averaged, is what x moved by. (Residues with beta = 1.)"""
        sent = dict(self.changes)
        for name, now in self.residues().items():
            sent[name] = sent[name] + before.get(name, torch.zeros_like(now)) - now
        averages = hvd.allreduce(torch.cat([one.reshape(-1) for one in sent.values()]), name="soak.sent")
        for name, average in zip(sent, averages.split([one.numel() for one in sent.values()]), strict=True):
            moved = (self.x[name] - self.local.common[name].detach()).reshape(-1)
            size = float(self.x[name].abs().max()) + float(before.get(name, moved).abs().max())
            off = float((average - moved).abs().max())
            self.expect(off <= 1e-5 * size + 1e-12, f"{name}: what left the ranks and what x moved by differ by {off:g}", batch)


def memory() -> float:
    """Resident memory of this process now, in MB."""
    return psutil.Process().memory_info().rss / 1e6


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    hvd.init()
    torch.set_num_threads(1)
    trainer = (Trainer if plan.local_steps is None else LocalTrainer)(plan, folder)

    @hvd.elastic.run
    def train(state: Any) -> None:
        trainer.begin(state.batch)
        while state.batch != plan.last:
            if state.batch == plan.grow_at and hvd.size() == 2:
                wait_for_newcomers(state)
            loss = trainer.step(state.batch)
            state.batch += 1
            if state.batch % plan.commit_every == 0:
                trainer.commit(state, loss)
                trainer.death = trainer.faults.death(state.batch)
                trainer.save()
                if hvd.broadcast_object((folder / "stop").exists(), root_rank=0, name="stop"):
                    return

    def wait_for_newcomers(state: Any) -> None:
        if hvd.rank() == 0:
            (folder / "hosts").write_text((folder / "hosts").read_text() + "localhost:1\n")
        limit = time.time() + 60
        while time.time() < limit:
            state.commit()
            time.sleep(0.1)
        raise TimeoutError("nobody came")

    train(hvd.elastic.TorchState(trainer.model, trainer.optimizer, batch=0))
    trainer.diary.note("end", skipped=trainer.compression.stats()["skipped_steps"])


if __name__ == "__main__":
    main()
