"""One run of the study: n simulated workers train a task, by the same exchange code that real ranks run.

All workers have the same parameters at every step, so one model computes every worker's gradients in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import study_tasks
import torch
from torch import nn

import scalecom_hvd.torch as hvd
from scalecom_hvd.torch.simulator import Simulation

# Elements that diagnostics look at.
SAMPLE = 8192
# A training loss beyond this many times the first one is a run that came apart.
DIVERGED = 20


@dataclass(frozen=True)
class Run:
    """One training run. Fields of None are the task's own.

    method: "dense", or the name of a class in scalecom_hvd.torch, with `options` ((name, value), ...); warmup: share of steps sent whole;
    None: what is sent whole is left to the library's defaults.
    control: "residues thrown away", "compressed tensors frozen" (after the dense warm-up), or a number b: every worker's gradients pass
    through the same low-pass filter, f <- (1 - b) f + b g from f = g on, before anything else.
    clip, clip_first: clipping norm after the exchange, or before it.  momentum_first: momentum, and with it weight decay, before the
    exchange; decay_first: weight decay alone.
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
    control: str | float | None = None
    clip: float | None = None
    clip_first: float | None = None
    momentum_first: bool = False
    decay_first: bool = False
    unlike: bool = False
    diagnostics: int = 0

    def resolved(self) -> Run:
        """With the task's own numbers in the place of None."""
        task = study_tasks.find(self.task)
        own = {name: getattr(task, name) for name in ("steps", "batch_size", "lr") if getattr(self, name) is None}
        return dataclasses.replace(self, **own)

    @property
    def name(self) -> str:
        """What its file is called: the same for the same run, and for no other."""
        fields = json.dumps(dataclasses.asdict(self.resolved()), sort_keys=True)
        if self.task.endswith(".py"):
            fields += Path(self.task).read_text()
        return f"{self.task.rpartition('/')[2].removesuffix('.py')}-{self.method}-{hashlib.sha256(fields.encode()).hexdigest()[:16]}"

    @property
    def cost(self) -> float:
        """About how long it takes, relative to others."""
        run = self.resolved()
        weight = {"resnet": 0.25, "mobilenet": 0.5, "plain": 0.12, "lstm": 0.7, "transformer": 0.8}.get(self.task, 0.5)
        return run.steps * run.workers * (1 + weight * run.batch_size)


def train(run: Run) -> dict[str, Any]:
    """Train, and give {"score", "losses": [[step, mean loss of the last steps], ...], "bytes": [[step, traffic of a worker so far], ...],
    "norms": [[step, largest residue and largest gradient of a worker since the last], ...], "looks": diagnostics, "diverged", ...}."""
    began = time.perf_counter()
    run = run.resolved()
    task = study_tasks.find(run.task)
    torch.manual_seed(run.seed)
    model = task.model(run.norm).train()
    normalisations = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    named = dict(model.named_parameters())
    parameters = list(named.values())
    options = dict(run.options)
    if options.get("rates") == "from_flops":
        options["rates"] = tuple(hvd.rates_from_flops(model, task.example(run.batch_size), run.batch_size).items())
    simulation = simulate(run, named, options)
    optimizer = torch.optim.SGD(
        parameters,
        lr=run.lr,
        momentum=0.0 if run.momentum_first else task.momentum,
        weight_decay=0.0 if run.decay_first or run.momentum_first else task.weight_decay,
    )
    before = Before(run, task, parameters)
    compressor = simulation.compressors[0]
    traffic, diverged = 0, False
    result: dict[str, Any] = {"losses": [], "bytes": [], "looks": [], "norms": []}
    recent: list[float] = []
    largest = {"residue": 0.0, "gradient": 0.0}
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, step)
        grads, losses = [], []
        for worker in range(run.workers):
            # Running statistics are worker 0's, as they are rank 0's on real ranks.
            for module in normalisations:
                module.momentum = 0.1 if worker == 0 else 0.0
            batch = task.batch(run.seed, step, worker, run.workers, run.batch_size, run.unlike)
            loss = task.loss(model, batch)
            gradient = torch.autograd.grad(loss, parameters)
            grads.append(dict(zip(named, before(worker, gradient), strict=True)))
            losses.append(float(loss.detach()))
        largest["gradient"] = max(largest["gradient"], *norms_of(grads, compressor.residues.tensors))
        averages = simulation.step(grads)[0]
        if run.control == "residues thrown away":
            for each in simulation.compressors:
                for tensor in each.residues.tensors.values():
                    tensor.residue.zero_()
        after_warmup = step >= compressor.config.warmup_steps
        frozen = compressor.residues.tensors if run.control == "compressed tensors frozen" and after_warmup else ()
        for name, parameter in named.items():
            parameter.grad = torch.zeros_like(parameter) if name in frozen else averages[name]
        if run.clip is not None:
            nn.utils.clip_grad_norm_(parameters, run.clip)
        optimizer.step()

        residues = [{name: tensor.residue for name, tensor in each.residues.tensors.items()} for each in simulation.compressors]
        largest["residue"] = max(largest["residue"], *norms_of(residues))
        traffic += simulation.reducers[0].stats()["bytes_traffic"]
        recent.append(sum(losses) / len(losses))
        if (step + 1) % max(run.steps // 50, 1) == 0:
            result["losses"].append([step + 1, sum(recent) / len(recent)])
            result["bytes"].append([step + 1, traffic])
            result["norms"].append([step + 1, largest["residue"], largest["gradient"]])
            largest = dict.fromkeys(largest, 0.0)
            if not math.isfinite(recent[-1]) or recent[-1] > DIVERGED * result["losses"][0][1] + 1:
                diverged = True
                break
            recent = []
        if run.diagnostics and step % run.diagnostics == 0:
            look = compressor.stats()["diagnostics"]
            if look is not None and look["step"] == step:
                result["looks"].append(look)
    stats = compressor.stats()
    with torch.no_grad():
        model.eval()
        score = task.evaluate(model)
    return result | {
        "run": dataclasses.asdict(run),
        "score": score if math.isfinite(score) else None,
        "diverged": diverged or not math.isfinite(score),
        "parameters": sum(p.numel() for p in parameters),
        "bytes_per_step": stats["bytes_traffic"],
        "rate": stats["rate"],
        "code": fingerprint(),
        "seconds": round(time.perf_counter() - began, 2),
    }


def simulate(run: Run, named: dict[str, torch.Tensor], options: dict[str, Any]) -> Simulation:
    """n workers; what is sent whole needs no residue, so dense training is the same exchange with everything sent whole."""
    if run.method == "dense":
        method, options = hvd.ScaleCom, {"dense": ["*"], "warmup_steps": 0}
    else:
        method = getattr(hvd, run.method)
        recommended = {} if run.warmup is None else {"dense": ["auto:output"], "warmup_steps": round(run.warmup * run.steps)}
        options = recommended | options
        if run.diagnostics:
            options["diagnostics"] = hvd.Diagnostics(every=run.diagnostics, sample=SAMPLE)
    config = hvd.ScaleComConfig()  # whatever the environment says

    def share(_worker: int) -> dict[str, torch.Tensor]:
        return {name: nn.Parameter(parameter.detach()) for name, parameter in named.items()}

    return Simulation(run.workers, share, compression=method, config=config, **options)


class Before:
    """What a worker does to its own gradient before the exchange: nothing, or what the run's options say."""

    def __init__(self, run: Run, task: study_tasks.Task, parameters: list[torch.Tensor]) -> None:
        self._run, self._parameters = run, parameters
        self._momentum, self._decay = task.momentum, task.weight_decay
        self._state: dict[int, list[torch.Tensor]] = {}

    def __call__(self, worker: int, gradient: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        run, grads = self._run, [g.contiguous() for g in gradient]
        if run.decay_first or run.momentum_first:
            torch._foreach_add_(grads, [p.detach() for p in self._parameters], alpha=self._decay)
        if run.clip_first is not None:
            norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
            # A worker's share: n independent gradients have an average that is shorter by the square root of n.
            limit = run.clip_first * math.sqrt(run.workers)
            if norm > limit:
                torch._foreach_mul_(grads, limit / norm)
        if run.momentum_first:
            grads = self._keep(worker, grads, self._momentum, 1.0)
        if isinstance(run.control, float):
            grads = self._keep(worker, grads, 1 - run.control, run.control)
        return grads

    def _keep(self, worker: int, grads: list[torch.Tensor], kept: float, added: float) -> list[torch.Tensor]:
        if worker not in self._state:
            self._state[worker] = [g.clone() for g in grads]
        else:
            torch._foreach_mul_(self._state[worker], kept)
            torch._foreach_add_(self._state[worker], grads, alpha=added)
        state = self._state[worker]
        return [s.clone() for s in state]


def learning_rate(run: Run, step: int) -> float:
    warmup = round(run.lr_warmup * run.steps)
    if step < warmup:
        return run.lr * (step + 1) / warmup
    if run.schedule == "constant":
        return run.lr
    return run.lr * (1 + math.cos(math.pi * (step - warmup) / max(1, run.steps - warmup))) / 2


def norms_of(workers: list[dict[str, torch.Tensor]], names: Iterable[str] | None = None) -> list[float]:
    """Every worker's norm of these tensors together (of all, without names); zero of none."""
    some = [[tensors[name] for name in (tensors if names is None else names)] for tensors in workers]
    return [math.hypot(*map(float, torch._foreach_norm(tensors))) if tensors else 0.0 for tensors in some]


@functools.cache
def fingerprint() -> str:
    """Of the code that a result depends on."""
    root = Path(hvd.__file__).resolve().parents[1]
    own = [Path(__file__).with_name(f"{name}.py") for name in ("study_run", "study_tasks", "train_image", "train_char_lm", "digits")]
    sources = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".c", ".h")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, *own])).hexdigest()[:16]


def start_process() -> None:
    """Processes run side by side, one on each core."""
    torch.set_num_threads(1)
    logging.getLogger("scalecom_hvd").setLevel(logging.ERROR)  # runs too short for their rate, and such that come apart, are part of it
