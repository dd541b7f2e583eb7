"""The cases of real ranks, one after the other. same_numbers.py runs this on every rank.

    mpirun -np 2 python scripts/checks/same_numbers_ranks.py FOLDER PATTERN

runs Horovod's cases with names that contain PATTERN. torchrun runs those of torch.distributed. Each
rank appends a line for each case to its own file in FOLDER.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import same_numbers_methods as methods
import torch
from same_numbers_digests import Parts, Record

STEPS = 8
FEATURES, HIDDEN, OUTPUTS = 40, 60, 10
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ

# What the keys below mean, besides settings of the method and OPTIMIZERS:
#   passes      how many backward passes add up
#   clip        gradients are clipped between synchronize() and a step that skips it
#   scaled      the loss has a scale that changes
#   not_finite  one rank's loss is infinite once
#   unused      one rank leaves a layer out in every other step
#   resumed     all is saved and loaded in the middle
#   sums        sums instead of averages
#   recipe      the face's diloco or sparseloco
#   dtype       of parameters
#   optimizer   a class of torch.optim
COURSES = {
    "passes",
    "clip",
    "scaled",
    "not_finite",
    "unused",
    "resumed",
    "sums",
    "recipe",
    "dtype",
    "optimizer",
}
# Arguments of DistributedOptimizer.
OPTIMIZERS = {
    "groups",
    "gradient_predivide_factor",
    "local_steps",
    "outer",
    "overlap",
    "fragments",
    "clip_changes",
}

Case = tuple[str, str, dict[str, Any]]
"""Method, filter, and everything else."""

SMALL_BUCKETS = {"bucket_bytes": 6000}
# For the optimizers of both faces.
AVERAGING: list[Case] = [
    ("ScaleCom", "beta 0.2, flush", {}),
    ("ScaleCom", "beta 0.1", SMALL_BUCKETS | {"warmup_steps": 3}),
    ("ScaleCom, look-ahead", "beta 0.1", SMALL_BUCKETS | {"warmup_steps": 3, "resumed": True}),
    ("ScaleCom, staggered", "beta 1", {"clip": True}),
    ("ScaleCom, staggered, look-ahead", "beta 0.2, flush", {"unused": True}),
    ("ScaleCom, exact", "beta 0.1, flush", {"passes": 2}),
    ("ScaleCom, integers", "beta 0.1", {"scaled": True, "clip": True}),
    ("ScaleCom, 4 bits", "beta 0.2, flush", {"unused": True, "resumed": True}),
    ("ScaleCom", "beta 0.2, flush", {"not_finite": True, "scaled": True, "passes": 2}),
    ("ScaleCom", "beta 0.1", {"sums": True, "groups": 2, "dense": ["auto:output"]}),
    ("ScaleCom", "beta 0.1", {"dtype": "float64", "optimizer": "Adam", "unused": True}),
    ("RandomK", "beta 0.1", {"resumed": True}),
    ("RandomK, own, sign", "beta 0.2, flush", SMALL_BUCKETS),
    ("LocalTopK, as SparseLoCo", "beta 1", {"unused": True}),
    ("LocalTopK, 8 bits", "beta 0.1", {"clip": True, "passes": 2}),
    ("GTopK", "beta 1", {"resumed": True, "not_finite": True}),
    ("GlobalTopK", "beta 0.1", {"unused": True}),
    ("ECQSGD, 4 bits", "beta 1", SMALL_BUCKETS | {"resumed": True}),
    # Local steps.
    ("ScaleCom", "beta 0.1", {"local_steps": 3, "unused": True}),
    ("ScaleCom, look-ahead", "beta 0.2, flush", {"local_steps": {0: 1, 3: 2}, "resumed": True}),
    ("ScaleCom", "beta 1", {"local_steps": 2, "outer": "nesterov", "not_finite": True}),
    ("ScaleCom", "beta 0.1", {"local_steps": 4, "overlap": 1, "fragments": 2, "clip": True}),
    ("LocalTopK", "beta 0.1", {"local_steps": 2, "clip_changes": 0.7, "optimizer": "Adam"}),
    ("ScaleCom", "beta 0.1", {"recipe": "diloco"}),
    ("ScaleCom", "beta 0.1", {"recipe": "sparseloco", "resumed": True, "optimizer": "Adam"}),
]
CASES: dict[str, list[Case]] = {
    "drop-in": [
        *AVERAGING,
        ("ScaleCom", "beta 0.2, flush", {"gradient_predivide_factor": 3.0}),
    ],
    "Horovod's own": [
        ("ScaleCom", "beta 0.2, flush", {}),
        ("ScaleCom", "beta 0.1", {"warmup_steps": 3, "dense": ["auto:output"], "resumed": True}),
        ("ScaleCom", "beta 1", {"clip": True, "scaled": True}),
        ("ScaleCom", "beta 0.1, flush", {"unused": True}),
        ("ScaleCom", "beta 0.1", {"passes": 2, "not_finite": True}),
        ("ScaleCom, exact", "beta 0.2, flush", {"optimizer": "Adam", "dtype": "float64"}),
        ("ScaleCom", "beta 0.1", {"sums": True, "resumed": True, "clip": True}),
    ],
    "ddp optimizer": AVERAGING,
    # With the hook, DDP itself averages, and backward makes the step. It takes no arguments of an
    # optimizer.
    "ddp hook": [
        (method, filters, more)
        for method, filters, more in AVERAGING
        if not {"local_steps", "recipe", "sums", "groups"}.intersection(more)
    ],
}
FACES = ["ddp optimizer", "ddp hook"] if UNDER_TORCHRUN else ["drop-in", "Horovod's own"]

if UNDER_TORCHRUN:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scalecom_hvd import ddp as face
else:
    import horovod.torch as horovod

    import scalecom_hvd.torch as face


class Net(torch.nn.Module):
    """Two layers, with one between them that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, HIDDEN)
        self.sometimes = torch.nn.Linear(HIDDEN, HIDDEN)
        self.output = torch.nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor, whole: bool) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(inputs))
        if whole:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return self.output(hidden)


class Training:
    """One rank's part in a case."""

    def __init__(self, kind: str, one: Case, rank: int, ranks: int) -> None:
        method, filters, more = one
        self.kind, self.method, self.rank, self.ranks = kind, method, rank, ranks
        self.course = {key: value for key, value in more.items() if key in COURSES}
        self.arguments = {key: value for key, value in more.items() if key in OPTIMIZERS}
        own = {k: v for k, v in more.items() if k not in COURSES | OPTIMIZERS}
        self.settings = methods.settings_of(method, filters) | own
        self.local = bool({"local_steps", "recipe"}.intersection(more))
        self.scale = 1.0
        self.record = Record()
        self.begin()

    def begin(self) -> None:
        """Make everything anew, as a script does when it starts."""
        torch.manual_seed(5)
        self.net: Any = Net().to(getattr(torch, self.course.get("dtype", "float32")))
        self.model: Any = self.net
        kind = getattr(torch.optim, self.course.get("optimizer", "SGD"))
        plain = kind(self.net.parameters(), lr=0.01)
        make = {
            "drop-in": self.drop_in,
            "Horovod's own": self.horovods_own,
            "ddp optimizer": self.ddp_optimizer,
            "ddp hook": self.ddp_hook,
        }[self.kind]
        self.optimizer, self.compression = make(plain)

    def made(self, *positional: Any) -> Any:
        """A new method."""
        scale = {"loss_scale": lambda: self.scale} if "scaled" in self.course else {}
        own = methods.arguments_of(face, self.settings)
        return methods.class_of(face, self.method)(*positional, **scale, **own)

    def of_optimizer(self) -> dict[str, Any]:
        """Arguments that the optimizers of both faces take."""
        arguments = {"compression": None} | self.arguments
        if arguments.get("outer") == "nesterov":
            arguments["outer"] = lambda common: torch.optim.SGD(
                common, lr=0.7, momentum=0.9, nesterov=True
            )
        if "recipe" in self.course:
            arguments |= getattr(face, self.course["recipe"])(3)
        else:
            arguments["compression"] = self.made()
        return arguments | {
            "named_parameters": self.net.named_parameters(),
            "backward_passes_per_step": self.course.get("passes", 1),
        }

    def drop_in(self, plain: torch.optim.Optimizer) -> tuple[Any, Any]:
        op = face.Sum if "sums" in self.course else face.Average
        optimizer = face.DistributedOptimizer(plain, op=op, **self.of_optimizer())
        return optimizer, optimizer.compression

    def horovods_own(self, plain: torch.optim.Optimizer) -> tuple[Any, Any]:
        compression = self.made(self.net.named_parameters())
        optimizer = horovod.DistributedOptimizer(
            plain,
            named_parameters=self.net.named_parameters(),
            compression=compression,
            backward_passes_per_step=self.course.get("passes", 1),
            op=horovod.Sum if "sums" in self.course else horovod.Average,
        )
        return optimizer, compression

    def ddp_optimizer(self, plain: torch.optim.Optimizer) -> tuple[Any, Any]:
        op = dist.ReduceOp.SUM if "sums" in self.course else dist.ReduceOp.AVG
        optimizer = face.DistributedOptimizer(plain, op=op, **self.of_optimizer())
        return optimizer, optimizer.compression

    def ddp_hook(self, plain: torch.optim.Optimizer) -> tuple[Any, Any]:
        unused = "unused" in self.course
        self.model = DistributedDataParallel(
            self.net, bucket_cap_mb=0.01, find_unused_parameters=unused
        )
        state = face.ScaleComState(self.model, compression=self.made())
        self.model.register_comm_hook(state, face.scalecom_hook)
        return plain, state

    def run(self) -> Parts:
        """Take all steps."""
        for step in range(STEPS):
            if step == STEPS // 2 + 1 and "resumed" in self.course:
                self.resume()
            self.take(step)
            self.record.note(self.compression.stats())
        return self.record.end(dict(self.net.named_parameters()), self.compression.state_dict())

    def take(self, step: int) -> None:
        """Take one step."""
        self.scale = (1.0, 8.0, 8.0, 2.0)[step % 4] if "scaled" in self.course else 1.0
        self.optimizer.zero_grad()
        passes = self.course.get("passes", 1)
        for number in range(passes):
            last = number == passes - 1
            with self.model.no_sync() if self.waits(last) else contextlib.nullcontext():
                self.backward(step, number)
        if self.local or not {"clip", "scaled", "not_finite"}.intersection(self.course):
            self.clip()
            self.optimizer.step()
            return
        by_hand = self.kind != "ddp hook"
        if by_hand:
            self.optimizer.synchronize()
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        for grad in grads:
            grad.div_(self.scale)
        self.clip()
        # As a GradScaler does, leave out a step that is not finite.
        if all(bool(grad.isfinite().all()) for grad in grads):
            with self.optimizer.skip_synchronize() if by_hand else contextlib.nullcontext():
                self.optimizer.step()

    def waits(self, last: bool) -> bool:
        """Whether DDP only adds gradients up in this pass."""
        return self.kind == "ddp hook" and not last

    def backward(self, step: int, number: int) -> None:
        """Compute gradients of this rank's own batch."""
        chance = torch.Generator().manual_seed(1000 * step + 10 * number + self.rank)
        dtype = self.net.output.weight.dtype
        inputs, targets = (
            torch.randn(16, size, generator=chance).to(dtype) for size in (FEATURES, OUTPUTS)
        )
        is_last = self.rank == self.ranks - 1
        whole = not ("unused" in self.course and is_last and step % 2)
        loss = torch.nn.functional.mse_loss(self.model(inputs, whole), targets)
        if "not_finite" in self.course and is_last and step == 3:
            loss = loss * math.inf
        (loss * self.scale).backward()

    def clip(self) -> None:
        """Clip gradients, if the case asks for it."""
        if "clip" in self.course:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)

    def resume(self) -> None:
        """Save everything, and load it into new objects."""
        compression, net, optimizer = copy.deepcopy(
            [one.state_dict() for one in (self.compression, self.net, self.optimizer)]
        )
        self.optimizer = self.compression = self.model = self.net = None
        gc.collect()  # an optimizer and its hooks form a cycle
        self.begin()
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        self.compression.load_state_dict(compression)


def name_of(kind: str, one: Case, ranks: int) -> str:
    """The name of a case."""
    method, filters, more = one
    told = ", ".join(f"{key}={value}" for key, value in more.items())
    return f"ranks: {kind}; {method}; {filters}; {ranks} ranks" + (f"; {told}" if told else "")


def outcome(kind: str, one: Case, rank: int, ranks: int) -> Mapping[str, str]:
    """The result of a case on this rank, which may be an error."""
    try:
        return Training(kind, one, rank, ranks).run()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    methods.check_package()
    folder, pattern = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    if UNDER_TORCHRUN:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
    else:
        face.init()
        rank, ranks = face.rank(), face.size()
    with (folder / f"rank.{rank}").open("w") as lines:
        for kind in FACES:
            for one in CASES[kind]:
                name = name_of(kind, one, ranks)
                if pattern in name:
                    print(json.dumps([name, outcome(kind, one, rank, ranks)]), file=lines)
                    lines.flush()
                    gc.collect()
    if UNDER_TORCHRUN:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
