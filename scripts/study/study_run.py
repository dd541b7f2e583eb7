"""One run of the study: n simulated workers train a task.

They use the same exchange code that real ranks run.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where code_version.py is

import code_version
import study_rivals
import study_tasks
import torch
import training_torch
from torch import nn

import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.simulator import Simulation

QUANTISERS = {
    "sign": study_rivals.SignOfValues(),
    "means": hvd.BinMeans(),
}
# A run has diverged if its training loss exceeds the first one this many times.
DIVERGED = 20


# DiLoCo's outer optimizer (arXiv 2311.08105), and the same with half its learning rate.
OUTERS = {
    "nesterov 0.7": lambda common: torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True),
    "nesterov 0.35": lambda common: torch.optim.SGD(common, lr=0.35, momentum=0.9, nesterov=True),
}


@dataclass(frozen=True)
class Run:
    """One training run. A field that is None takes the task's value.

    method: "dense", "DeMo" (which has its own optimizer), "PowerSGD", or the name of a class in
        scalecom_hvd.torch, with `options` ((name, value), ...). One more, "output_rate", is the
        output layer's rate.
    warmup: the share of steps sent whole. None: the library's defaults say what is sent whole.
    optimizer: "sgd", "adamw", "lion" or "muon".
    momentum: SGD's momentum, or AdamW's b1.
    local_steps: H. After H steps workers average their parameters' changes.
    outer: the one of OUTERS that steps the common parameters with these averages.
    overlap: how many steps are taken while these averages travel.
    """

    task: str
    method: str = "dense"
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 1
    workers: int = 4
    warmup: float | None = 0.1
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    schedule: str = "cosine"
    lr_warmup: float = 0.0
    norm: str = "batch"
    unlike: bool = False
    local_steps: int | None = None
    optimizer: str = "sgd"
    outer: str | None = None
    overlap: int = 0
    momentum: float | None = None

    def resolved(self) -> Run:
        """The same run, with the task's values for None."""
        task = study_tasks.find(self.task)
        own = {
            "steps": task.steps,
            "batch_size": task.batch_size,
            "lr": task.lr if self.optimizer == "sgd" else task.adamw_lr,
        }
        return dataclasses.replace(
            self, **{name: value for name, value in own.items() if getattr(self, name) is None}
        )

    @property
    def name(self) -> str:
        """The name of its file: the same for the same run, and for no other."""
        # Fields at their defaults are left out. So a new field changes no name of a run that does
        # not use it.
        default = {field.name: field.default for field in dataclasses.fields(Run)}
        own = {
            name: value
            for name, value in dataclasses.asdict(self.resolved()).items()
            if value != default[name]
        }
        fields = json.dumps(own, sort_keys=True)
        if self.task.endswith(".py"):
            fields += Path(self.task).read_text()
        task = self.task.rpartition("/")[2].removesuffix(".py")
        return f"{task}-{self.method}-{hashlib.sha256(fields.encode()).hexdigest()[:16]}"

    @property
    def cost(self) -> float:
        """About how long it takes, relative to other runs."""
        run = self.resolved()
        weight = {
            "resnet": 0.25,
            "mobilenet": 0.5,
            "plain": 0.12,
            "lstm": 0.7,
            "transformer": 0.8,
            "wider": 4.0,
        }.get(self.task, 0.5)
        return run.steps * run.workers * (1 + weight * run.batch_size)


def train(run: Run) -> dict[str, Any]:
    """Train.

    Returns:
        {"score", "losses": [[step, mean loss of the last steps], ...], "bytes": [[step, a worker's
        traffic so far], ...], "diverged", ...}.
    """
    began = time.perf_counter()
    run = run.resolved()
    torch.manual_seed(run.seed)
    workers = Together(run) if run.local_steps is None else Apart(run)
    compressor = workers.simulation.compressors[0]
    traffic, diverged = 0, False
    result: dict[str, Any] = {"losses": [], "bytes": []}
    recent: list[float] = []
    for step in range(run.steps):
        exchanges = compressor.residues.step
        losses = workers.step(step, learning_rate(run, step))
        if compressor.residues.step > exchanges:
            traffic += workers.simulation.exchanges[0].stats()["bytes_traffic"]
        recent.append(sum(losses) / len(losses))
        if (step + 1) % max(run.steps // 50, 1) == 0:
            result["losses"].append([step + 1, sum(recent) / len(recent)])
            result["bytes"].append([step + 1, traffic])
            if not math.isfinite(recent[-1]) or recent[-1] > DIVERGED * result["losses"][0][1] + 1:
                diverged = True
                break
            recent = []
    stats = compressor.stats()
    score, whole = workers.score(), 2 * (run.workers - 1) / run.workers
    return result | {
        "run": dataclasses.asdict(run),
        "score": score if math.isfinite(score) else None,
        "diverged": diverged or not math.isfinite(score),
        "parameters": sum(p.numel() for p in workers.model.parameters()),
        "bytes_per_step": stats["bytes_traffic"] / (run.local_steps or 1),
        "bytes_whole_per_step": stats["bytes_dense"] * whole / (run.local_steps or 1),
        "rate": stats["rate"],
        "code": fingerprint(),
        "seconds": round(time.perf_counter() - began, 2),
    }


class Together:
    """Workers that have the same parameters at every step.

    One model computes all workers' gradients in turn.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._task = run, study_tasks.find(run.task)
        self.model = self._task.model(run.norm).train()
        self._normalisations = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        self._named = dict(self.model.named_parameters())
        self._parameters = list(self._named.values())
        self.simulation = simulate(
            run,
            lambda worker: {n: nn.Parameter(p.detach()) for n, p in self._named.items()},
            self._named,
        )
        self._optimizer = optimizer_of(run, self._task, self._parameters)

    def step(self, step: int, lr: float) -> list[float]:
        """Take one step of all workers. Return every worker's loss."""
        run = self._run
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        grads, losses = [], []
        for worker in range(run.workers):
            # Running statistics come from worker 0, as they come from rank 0 on real ranks.
            for module in self._normalisations:
                module.momentum = 0.1 if worker == 0 else 0.0
            loss = self._task.loss(self.model, batch_of(run, self._task, step, worker))
            gradient = torch.autograd.grad(loss, self._parameters)
            grads.append({n: g.contiguous() for n, g in zip(self._named, gradient, strict=True)})
            losses.append(float(loss.detach()))
        averages = self.simulation.step(grads)[0]
        for name, parameter in self._named.items():
            parameter.grad = averages[name]
        self._optimizer.step()
        return losses

    def score(self) -> float:
        return evaluate(self._task, self.model)


class Apart:
    """Workers that take local steps. Each has its own model and optimizer."""

    def __init__(self, run: Run) -> None:
        self._run, self._task = run, study_tasks.find(run.task)
        self.model = self._task.model(run.norm).train()
        self._models = [self.model] + [copy.deepcopy(self.model) for _ in range(1, run.workers)]
        self.simulation = simulate(
            run, lambda worker: dict(self._models[worker].named_parameters())
        )
        self._optimizers = [
            optimizer_of(run, self._task, list(model.parameters())) for model in self._models
        ]

    def step(self, step: int, lr: float) -> list[float]:
        """The same as in Together."""
        losses = []
        for worker, (model, optimizer) in enumerate(
            zip(self._models, self._optimizers, strict=True)
        ):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            loss = self._task.loss(model, batch_of(self._run, self._task, step, worker))
            loss.backward()
            losses.append(float(loss.detach()))
        self.simulation.take_steps([optimizer.step for optimizer in self._optimizers])
        return losses

    def score(self) -> float:
        """The score of the common parameters."""
        self.simulation.synchronise()
        return evaluate(self._task, self.model)


def optimizer_of(
    run: Run, task: study_tasks.Task, parameters: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """The run's optimizer. The learning rate is set at every step."""
    if run.method == "DeMo":
        return study_rivals.Sign(parameters)
    if run.optimizer in study_rivals.OPTIMIZERS:
        return study_rivals.OPTIMIZERS[run.optimizer](parameters)
    momentum = task.momentum if run.momentum is None else run.momentum
    options = SimpleNamespace(
        optimizer=run.optimizer, momentum=momentum, weight_decay=task.weight_decay
    )
    optimizer = training_torch.optimizer_from(options, parameters)
    if run.optimizer == "adamw" and run.momentum is not None:
        for group in optimizer.param_groups:
            group["betas"] = run.momentum, group["betas"][1]
    return optimizer


def batch_of(run: Run, task: study_tasks.Task, step: int, worker: int) -> Any:
    return task.batch(run.seed, step, worker, run.workers, run.batch_size, run.unlike)


@torch.no_grad()
def evaluate(task: study_tasks.Task, model: nn.Module) -> float:
    model.eval()
    return task.evaluate(model)


def simulate(
    run: Run,
    make_parameters: Callable[[int], dict[str, torch.Tensor]],
    stepped: dict[str, nn.Parameter] | None = None,
) -> Simulation:
    """Make n simulated workers. `stepped` is what one optimizer steps for all of them.

    What is sent whole needs no residue, so dense training uses the same exchange with everything
    sent whole.
    """
    options = dict(run.options)
    if "quantiser" in options:
        options["quantiser"] = QUANTISERS[options["quantiser"]]
    if run.method == "dense":
        method, options = hvd.ScaleCom, {"dense": ["*"], "warmup_steps": 0}
    else:
        # The output layer is that of the last of several weights.
        weights = [name for name, p in make_parameters(0).items() if p.dim() > 1]
        output = [weights[-1].removesuffix("weight") + "*"] if len(weights) > 1 else []
        if "output_rate" in options:
            options["rates"] = dict.fromkeys(output, options.pop("output_rate"))
        rivals = {"DeMo": study_rivals.DeMo, "PowerSGD": study_rivals.PowerSGD}
        method = rivals.get(run.method) or getattr(hvd, run.method)
        recommended: dict[str, Any] = {}
        if run.warmup is not None:
            recommended = {"dense": output, "warmup_steps": round(run.warmup * run.steps)}
            recommended |= {"bits": 32} if run.method == "ScaleCom" else {}
        options = recommended | options
    config = hvd.ScaleComConfig()  # not what the environment says
    return Simulation(
        run.workers,
        make_parameters,
        compression=method,
        config=config,
        local_steps=run.local_steps,
        outer=run.outer and OUTERS[run.outer],
        overlap=run.overlap,
        stepped=stepped,
        **options,
    )


def learning_rate(run: Run, step: int) -> float:
    warmup = round(run.lr_warmup * run.steps)
    if step < warmup:
        return run.lr * (step + 1) / warmup
    if run.schedule == "constant":
        return run.lr
    return run.lr * (1 + math.cos(math.pi * (step - warmup) / max(1, run.steps - warmup))) / 2


@functools.cache
def fingerprint() -> str:
    """A hash of the code that a result depends on."""
    own = [
        study_tasks.EXAMPLES.parent / f"{name}.py"
        for name in (
            *("study/study_run", "study/study_tasks", "study/study_rivals"),
            *("examples/train_image", "examples/train_char_lm", "examples/digits"),
            "examples/training_torch",
        )
    ]
    return code_version.of(own)


def start_process() -> None:
    """Processes run at the same time, one on each core."""
    torch.set_num_threads(1)
    # runs too short for their rate, and runs that diverge, are part of the study
    logging.getLogger("scalecom_hvd").setLevel(logging.ERROR)
