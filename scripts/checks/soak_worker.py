"""Trains elastically with PyTorch under faults. soak.py runs this on every rank.

After every step it checks that nothing was lost. soak_faults.py says what the worker is told, what
goes wrong, and what is checked.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import numpy as np
import soak_faults
import torch
from soak_faults import BATCH, FEATURES, HIDDEN, OUTPUTS, Arrays, Point, digest

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.bucket_step import BucketSteps
from scalecom_hvd.exchange.collectives import Wait
from scalecom_hvd.exchange.methods.base import BucketCollectives
from scalecom_hvd.exchange.new_gradients import NewGradients


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


class Trainer(soak_faults.Worker):
    """One worker's model, optimizer and checks."""

    checkpoint = ".pt"
    committed_own: tuple[int, str, bool] | None = None  # see LocalTrainer

    def make(self) -> hvd.Method:
        # every worker begins with other weights: only Horovod's states make them equal
        torch.manual_seed(os.getpid())
        plan, self.model = self.plan, Net()
        self.forward: torch.nn.Module = self.model
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        named = [self.model.named_parameters()] if plan.optimizer == "stock" else []
        compression = pkgutil.resolve_name(plan.method)(
            *named, loss_scale=lambda: self.scale, **plan.settings
        )
        self.optimizer = self.distributed(optimizer, compression)
        self.watch()
        return compression

    def distributed(self, optimizer: torch.optim.Optimizer, compression: hvd.Method) -> Any:
        """The optimizer of this plan."""
        stock = self.plan.optimizer == "stock"
        return (horovod if stock else hvd).DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=compression,
            **self.rounds(),
        )

    def rounds(self) -> dict[str, int]:
        """What an optimizer is told of local steps."""
        plan = self.plan
        more = {} if plan.local_steps is None else {"local_steps": plan.local_steps}
        more |= {"overlap": plan.overlap} if plan.overlap else {}
        return more | ({"fragments": plan.fragments} if plan.fragments > 1 else {})

    def watch(self) -> None:
        """See gradients before anybody changes them.

        Also die at the points where a worker may be told to.
        """
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(self._see(name))
        self._come_by_first(NewGradients, "signal", Point.SIGNAL)
        self._come_by_first(BucketSteps, "complete", Point.AVERAGES)
        if self.plan.optimizer == "stock":
            self._die_between_in_stock()
            return
        average = BucketCollectives.average_taken

        def dying_average(collectives: BucketCollectives) -> Wait:
            if collectives.leads():
                self.comes_by(Point.EXCHANGE)
            return average(collectives)

        BucketCollectives.average_taken = dying_average

    def _come_by_first(self, room: type, method: str, point: Point) -> None:
        """Let a worker come by a point before each call of a method of the library."""
        own = getattr(room, method)

        def called(*arguments: Any, **more: Any) -> Any:
            self.comes_by(point)
            return own(*arguments, **more)

        setattr(room, method, called)

    def _die_between_in_stock(self) -> None:
        """Let the leader die between its offsets and its values, in Horovod's own optimizer.

        There the leader has chosen when a gradient is compressed, and then Horovod averages it.
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

    def _see(self, name: str) -> Callable[[torch.Tensor], None]:
        def see(grad: torch.Tensor) -> None:
            self.came[name] = grad.numpy().copy()
            if name == "hidden.weight":
                self.comes_by(Point.BACKWARD)

        return see

    def residues(self) -> Arrays:
        # state_dict() would wait for look-ahead's offsets. But a step must begin, and a commit must
        # be made, while they are under way.
        return arrays(
            {
                name: tensor.residue.view(tensor.shape)
                for name, tensor in self.compression.residues.tensors.items()
            }
        )

    def kept(self) -> Arrays:
        states = self.compression.run.tensor_states.items()
        # What look-ahead chose is dropped if it never arrives.
        more = {
            f"{what} {name}": value
            for name, state in states
            for what, value in state.items()
            if what not in ("offsets", "scales")
        }
        return self.residues() | arrays(more)

    def common(self) -> Arrays:
        return self.own()

    def own(self) -> Arrays:
        """This rank's parameters."""
        return arrays(dict(self.model.named_parameters()))

    def average(self, values: np.ndarray) -> np.ndarray:
        return self._hvd.allreduce(torch.from_numpy(values), name="soak.sent").numpy()

    def write(self, file: Any) -> None:
        torch.save(
            {"model": self.model.state_dict(), "scalecom": self.compression.state_dict()}, file
        )

    def backward(self, batch: int) -> tuple[torch.Tensor, tuple[str, float] | None]:
        """Compute the gradients of a training step under this batch's faults.

        Return the loss, and the overflow if there is one.
        """
        truth = (
            torch.randn(FEATURES, OUTPUTS, generator=torch.Generator().manual_seed(0))
            / FEATURES**0.5
        )
        mine = torch.Generator().manual_seed(batch * 1000 + self._hvd.rank())
        inputs = torch.randn(BATCH, FEATURES, generator=mine)
        self.scale = self.faults.loss_scale(batch)
        self.model.output.requires_grad_(not self.faults.frozen(batch))
        overflow = self.overflow(batch)
        self.order = self.faults.order(batch)
        self.came.clear()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(
            self.forward(inputs, self.faults.detour(batch)), inputs @ truth
        )
        self.be_late(batch)
        (loss * self.scale * (overflow[1] if overflow else 1.0)).backward()
        return loss.detach(), overflow

    def step(self, batch: int) -> float:
        before = self.residues()
        loss, overflow = self.backward(batch)
        self.optimizer.synchronize()
        # DDP leaves no average to a parameter that no rank used.
        averaged = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        grads = {name: parameter.grad / self.scale for name, parameter in averaged.items()}
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        if finite:
            for name, parameter in averaged.items():
                parameter.grad.copy_(grads[name])
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        trained = [
            name for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        self.check_step(batch, before, arrays(grads), finite, overflow, trained)
        # without a name: newcomers must count such calls as the other ranks do
        return float(self._hvd.allreduce(loss))


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
            self.brought = self.local.taken, changes, self.residues(), self._hvd.size()
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
        travels = self.local._journey is not None
        if self.committed is not None and self.local.taken == self.committed_own[0]:
            # Averages that travel count at once if a newcomer comes.
            counted = self.committed_own[2] and not travels
            self.expect(
                counted or digest(self.own()) == self.committed_own[1],
                "parameters are not those of this rank's last commit",
                batch,
            )
        elif self.local.taken:
            self.expect(
                digest(self.own()) == digest(self.common()),
                "a newcomer's parameters are not the common ones",
                batch,
            )

    def commit(self, state: Any, loss: float) -> None:
        self.local.collect()  # the commit does this too, and it changes residues
        travels = self.local._journey is not None
        self.committed_own = self.local.taken, digest(self.own()), travels
        super().commit(state, loss)

    def step(self, batch: int) -> float:
        self.arrived = None
        skipped, exchanged = self.local.skipped, self.compression.stats()["step"]
        loss, overflow = self.backward(batch)
        hit = overflow is not None and overflow[1] != 1.0
        values = digest(self.own()) if hit else None
        # A GradScaler leaves this to an optimizer that can unscale and skip.
        self.optimizer.grad_scale, self.optimizer.found_inf = (
            torch.tensor(self.scale),
            torch.tensor(float(hit)),
        )
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf
        self.expect(
            self.local.skipped == skipped + hit,
            "a step was skipped, or not, and the other was right",
            batch,
        )
        if self.arrived is not None:
            self.expect(
                self.compression.stats()["step"] > exchanged or bool(self.plan.overlap),
                "a synchronisation did not count",
                batch,
            )
            # A rank that came after the departure knows nothing of it. A rank that left took part
            # in it.
            same = self.brought[0] == self.arrived and self.brought[3] == self._hvd.size()
            known = torch.tensor(float(same))
            if self._hvd.allreduce(known, name="soak.known") > 0.99:  # on all ranks
                self.check_changes(batch)
        elif hit:
            self.expect(digest(self.own()) == values, "a skipped step changed parameters", batch)
        return float(self._hvd.allreduce(loss))

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


def arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Copies of the tensors."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def main() -> None:
    plan, folder = soak_faults.begin()
    hvd.init()
    torch.set_num_threads(1)
    trainer = (Trainer if plan.local_steps is None else LocalTrainer)(plan, folder, hvd)
    hvd.elastic.run(trainer.train)(
        hvd.elastic.TorchState(trainer.model, trainer.optimizer, batch=0)
    )
    trainer.diary.note("end", skipped=trainer.compression.stats()["skipped_steps"])


if __name__ == "__main__":
    main()
