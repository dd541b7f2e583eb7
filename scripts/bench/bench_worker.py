"""One rank of `make bench`: trains a case with every method at every speed.

Rank 0 writes what it measured, line by line, as JSON. bench.py starts the ranks on hosts that
hosts.py made. All ranks go through the same list in the same order.

Horovod is not started under torchrun: in every millisecond its thread asks all ranks for news, and
so takes processor time from the methods that do not need it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_cases
import hosts
import torch
import torch.distributed as dist
from local_topk import LocalTopK
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import scalecom_hvd.ddp as ddp
import scalecom_hvd.torch as hvd
from scalecom_hvd.exchange.unused_averages import TRIAL
from scalecom_hvd.stages import LADDER, START, WHOLE

IN_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
SETTLING_STEPS = TRIAL + 2  # in the first exchanges residues are copied
# AdamW takes the square root of an element's second moment, which is slow while the moment is zero:
# until the element has been sent for the first time. Of a whole run, that is the beginning.
SETTLING_STEPS_OF_ADAMW = 100
# rate="auto" looks for its rung at the speed that is measured, twice.
STEPS_OF_SEARCH = 400
LOCAL_TOP_K_RATE = 100
# The paper's form: values are sent as they are.
PAPER = {"bits": 32, "rate": 100}
# {name: settings of ScaleCom, over its defaults}
SCALECOM = {
    "ScaleCom cyclic": {},
    "ScaleCom staggered": {"leader": "staggered"},
    "ScaleCom look-ahead": {"lookahead": True, "leader": "staggered"},
    "ScaleCom cyclic, 32 bits": PAPER,
    "ScaleCom look-ahead, 32 bits": PAPER | {"lookahead": True, "leader": "staggered"},
}
IN_TURN = {"overlap": 1, "fragments": 8}
# {name: (local steps, their arguments, compression)}: the change over this many steps is averaged.
LOCAL = {
    f"{name}, H = {h}": (h, more, make)
    for name, more, make, rounds in (
        ("local SGD", {}, lambda **settings: hvd.Compression.none, (4, 16)),
        ("local SGD overlap", {"overlap": 2}, lambda **settings: hvd.Compression.none, (4, 16)),
        ("local SGD fragments", IN_TURN, lambda **settings: hvd.Compression.none, (16,)),
        ("ScaleCom", {}, hvd.ScaleCom, (1, 4, 16)),
        ("ScaleCom overlap", {"overlap": 2}, hvd.ScaleCom, (4, 16)),
    )
    for h in rounds
}
# What papers and the race train with. See scalecom_hvd's recipes.
RECIPES = {"DiLoCo, H = 20": ddp.diloco(20), "SparseLoCo, H = 20": ddp.sparseloco(20)}
# A microbatch without a step after it.
NO_STEP = "forward and backward"
ALONE = "no communication"
METHODS = [ALONE, "dense", "fp16", "local top-k", *SCALECOM]


def _power_sgd(rank: int) -> Callable[..., Any]:
    def hook(model: DistributedDataParallel, **settings: Any) -> tuple[Any, Any]:
        state = PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=SETTLING_STEPS - 1
        )
        return state, powerSGD_hook

    return hook


def _scalecom(**more: Any) -> Callable[..., Any]:
    def hook(model: DistributedDataParallel, **settings: Any) -> tuple[Any, Any]:
        return ddp.ScaleComState(model, **settings | more), ddp.scalecom_hook

    return hook


def _nothing_sent(state, bucket):  # DDP does not accept annotations that are strings
    """What DistributedDataParallel itself costs: it copies gradients into buckets."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# {name: makes a state and a hook for DistributedDataParallel; None: no hook}
DDP: dict[str, Callable[..., Any] | None] = {
    "DDP nothing sent": lambda model, **settings: (None, _nothing_sent),
    "DDP dense": None,
    "DDP dense, one bucket": None,
    "DDP fp16 hook": lambda model, **settings: (None, fp16_compress_hook),
    "DDP PowerSGD, rank 1": _power_sgd(1),
    "DDP PowerSGD, rank 2": _power_sgd(2),
    "DDP PowerSGD, rank 4": _power_sgd(4),
    "DDP ScaleCom cyclic": _scalecom(),
    "DDP ScaleCom look-ahead": _scalecom(**SCALECOM["ScaleCom look-ahead"]),
}
# Every rung of rate="auto" by itself, and the one on which it settles.
AUTO = "DDP ScaleCom, auto"
RUNGS = {"DDP ScaleCom, whole": _scalecom(warmup_steps=10**9)}
RUNGS |= {f"DDP ScaleCom, {s}": _scalecom(rate=s.rate, bits=s.bits) for s in LADDER[WHOLE + 1 :]}
RUNGS[AUTO] = _scalecom(rate="auto")
HOOKS = DDP | RUNGS
UNDER_TORCHRUN = [ALONE, NO_STEP, *HOOKS, *RECIPES]
UNDER_HOROVODRUN = [*METHODS, NO_STEP, *LOCAL]


class Training:
    """A model, its optimizer and one step of them."""

    def __init__(self, case: str, method: str, options: dict[str, Any]) -> None:
        face = ddp if IN_TORCHRUN else hvd
        self.model, self.loss = bench_cases.CASES[case](rank())
        face.broadcast_parameters(self.model.state_dict(), root_rank=0)
        parameters = list(self.model.named_parameters())
        make = bench_cases.OPTIMIZERS.get(case, torch.optim.SGD)
        self.has_adamw = make is torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=1e-4)
        self._steps = method != NO_STEP
        self.reduce: Callable[[], None] = lambda: None
        self.local: LocalTopK | None = None
        # How many steps are a round, in which one step is unlike the others.
        self.round = 1
        self.state: Any = None  # of ScaleCom's hook
        if method in HOOKS:
            # PowerSGD's hook submits collectives when others have ended. Over Gloo, that order may
            # differ between ranks, so the hook dies if there is more than one bucket.
            whole = "PowerSGD" in method or method.endswith("one bucket")
            one_bucket = {"bucket_cap_mb": 1000} if whole else {}
            self.model = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, **one_bucket
            )
            make_hook = HOOKS[method]
            if make_hook is not None:
                self.state, hook = make_hook(self.model, **options)
                self.model.register_comm_hook(self.state, hook)
        elif method in LOCAL:
            self.round, more, compression = LOCAL[method]
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                parameters,
                compression=compression(**options),
                local_steps=self.round,
                **more,
            )
        elif method in RECIPES:
            self.round = RECIPES[method]["local_steps"]
            self.optimizer = ddp.DistributedOptimizer(self.optimizer, parameters, **RECIPES[method])
        elif method == "local top-k":
            self.local = LocalTopK([p for _, p in parameters], LOCAL_TOP_K_RATE)
            self.reduce = self.local.reduce
        elif method not in (ALONE, NO_STEP):
            kind = {"dense": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(method)
            settings = SCALECOM.get(method, {}) | options
            compression = kind or hvd.ScaleCom(**settings)
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, parameters, compression=compression
            )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.reduce()
        if self._steps:
            self.optimizer.step()

    def close(self) -> None:
        if self.local is not None:
            self.local.close()


def rank() -> int:
    return dist.get_rank() if IN_TORCHRUN else hvd.rank()


def size() -> int:
    return dist.get_world_size() if IN_TORCHRUN else hvd.size()


def gather(row: torch.Tensor) -> torch.Tensor:
    """(ranks, N): the rows (N,) of all ranks. Every rank waits for all others."""
    if not IN_TORCHRUN:
        return hvd.allgather(row[None], name="bench.rows")
    rows = [torch.empty_like(row) for _ in range(size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def measure(training: Training, seconds: float, fewest: int, most: int) -> dict[str, Any]:
    """Measure steps for about `seconds`.

    Returns the times of single steps in ms, their median (with local steps, the median of rounds'
    means), the median of rounds' longest steps, and per step what this host sent and how long its
    processor was busy.
    """
    begun = time.perf_counter()
    training.step()
    steps = torch.tensor(seconds / (time.perf_counter() - begun))
    count = int(gather(steps[None])[0].clamp(fewest, most))
    count = max(-(-count // training.round), 3 if training.round > 1 else 1) * training.round
    sent, busy, times = hosts.bytes_sent_here(), time.process_time(), []
    for _ in range(count):
        begun = time.perf_counter()
        training.step()
        times.append((time.perf_counter() - begun) * 1e3)
    # Any H steps in a row include one synchronisation.
    rounds = [
        statistics.mean(times[i : i + training.round]) for i in range(0, count, training.round)
    ]
    mine = torch.tensor(
        [
            statistics.median(rounds),
            (hosts.bytes_sent_here() - sent) / count,
            (time.process_time() - busy) / count * 1e3,
            statistics.median(
                max(times[i : i + training.round]) for i in range(0, count, training.round)
            ),
        ]
    )
    everyone = gather(mine)
    return {
        "steps": count,
        "step_ms": float(everyone[:, 0].max()),
        "bytes": float(everyone[:, 1].mean()),
        "cpu_ms": float(everyone[:, 2].mean()),
        "longest_ms": float(everyone[:, 3].max()),
        "times_ms": times,
    }


def search(training: Training) -> dict[str, Any]:
    """Let rate="auto" find its rung. Returns the rungs by their first steps, and steps' times."""
    rungs, times = {0: START}, []
    for step in range(1, STEPS_OF_SEARCH + 1):
        begun = time.perf_counter()
        training.step()
        times.append((time.perf_counter() - begun) * 1e3)
        told = training.state.stats()
        if told["rung"] != list(rungs.values())[-1]:
            rungs[step] = told["rung"]
    return {"stage": told["stage"], "rungs": rungs, "search_ms": times}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=bench_cases.CASES, default="transformer")
    known = UNDER_TORCHRUN if IN_TORCHRUN else UNDER_HOROVODRUN
    parser.add_argument("--methods", nargs="+", choices=known, required=True)
    parser.add_argument("--mbit", nargs="+", type=float, default=[1000.0], help="0: unshaped")
    parser.add_argument("--seconds", type=float, default=3.0, help="per method and speed")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="more settings of ScaleCom, as JSON"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo") if IN_TORCHRUN else hvd.init()
    torch.set_num_threads(1)
    for method in arguments.methods:
        # What rate="auto" finds is of one speed, so it begins anew at each.
        training = None if method == AUTO else settled(arguments, method)
        for mbit in arguments.mbit:
            gather(torch.zeros(1))
            shape(mbit or None)
            found = {}
            if method == AUTO:
                training = Training(arguments.case, method, arguments.options)
                found = search(training)
            result = measure(training, arguments.seconds, 2, 40) | found
            result |= {
                "case": arguments.case,
                "method": method,
                "hosts": size(),
                "mbit": mbit,
            }
            if rank() == 0:
                with arguments.output.open("a") as output:
                    output.write(json.dumps(result) + "\n")
        training.close()
        del training
        gc.collect()


def settled(arguments: argparse.Namespace, method: str) -> Training:
    """A training whose first steps are over."""
    # The first step of look-ahead is sent whole, which would take long on a slow network.
    shape(None)
    training = Training(arguments.case, method, arguments.options)
    # The first synchronisation of local steps allocates memory that later ones reuse.
    settling = SETTLING_STEPS_OF_ADAMW if training.has_adamw else SETTLING_STEPS
    for _ in range(max(settling, 2 * training.round)):
        training.step()
    return training


def shape(mbit: float | None) -> None:
    """Set how fast this host sends. Call it on every host."""
    for change in hosts.shaping(mbit):
        subprocess.run(change, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
