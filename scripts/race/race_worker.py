"""One rank of one run of the race: trains in one way, and rank 0 writes the losses as JSON.

Started by race.py under torchrun. On a machine with GPUs it trains on them, in bfloat16, and it can
train a larger model. Ranks share a GPU if there are fewer GPUs than ranks:

    torchrun --nproc-per-node 2 scripts/race/race_worker.py --way ScaleCom --size large \\
        --steps 1000 --lr 6e-4 --pieces race --output race/scalecom.json
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import race_language
import race_tasks
import torch
import torch.distributed as dist
from race_ways import LOCAL_STEPS, WARMUP, WAYS, WITH_SETTINGS, wrapped

import scalecom_hvd.ddp as ddp
from scalecom_hvd.doctor.torch_rank import use_device


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    if args.options and args.way not in WITH_SETTINGS:
        parser.error(f"--options go with {' and '.join(WITH_SETTINGS)}, not with {args.way}")
    if args.task == "resnet" and args.size not in ("tiny", "full"):
        parser.error("--task resnet has the sizes tiny and full")
    if args.muon and (args.task == "resnet" or WAYS[args.way].local):
        parser.error("--muon goes with the language model, and with ways that use DDP")
    if args.muon and not hasattr(torch.optim, "Muon"):
        parser.error("--muon needs PyTorch 2.9 or newer")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    local_rank, here = (int(os.environ[f"LOCAL_{what}"]) for what in ("RANK", "WORLD_SIZE"))
    device = use_device(kind, local_rank, here)
    dist.init_process_group()
    torch.set_num_threads(1)
    task = race_tasks.task(args.task, args.size, args.pieces)
    if local_rank == 0:  # it cuts the text if nobody has; the other ranks read it
        task.load()
    dist.barrier()
    if local_rank:
        task.load()
    result = train(args, task, device)
    if dist.get_rank() == 0:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        partial = args.output.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.rename(args.output)
    dist.barrier()
    os._exit(0)  # Gloo's threads may still drop tensors, and then PyTorch 2.13 aborts


def train(args: argparse.Namespace, task: race_tasks.Task, device: torch.device) -> dict[str, Any]:
    """Losses on held-out data, by how many steps were taken."""
    way, on_gpu = WAYS[args.way], device.type == "cuda"
    steps = round(args.steps * way.steps)
    torch.manual_seed(args.seed)
    model = task.model().to(device)
    called = wrapped(way, model, steps, args.options, task.bucket_mb)
    optimizers: list[Any] = task.optimizers(model, args.lr, args.muon)
    if way.local is not None:
        (own,) = optimizers
        optimizers = [ddp.DistributedOptimizer(own, model.named_parameters(), **way.local())]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(own, lambda step: share(step, steps, args.warmup))
        for own in optimizers
    ]
    random = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    every = max(1, round(args.every * way.steps))
    losses, seconds, begun = {0: evaluate(task, model, device)}, {0: 0.0}, time.time()
    for step in range(1, steps + 1):
        for own in optimizers:
            own.zero_grad()
        for last in reversed(range(way.microbatches)):
            waits = contextlib.nullcontext() if not last or way.local else called.no_sync()
            with waits:
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                    loss = task.loss(called, random, device) / way.microbatches
                loss.backward()
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        for each in (*optimizers, *schedules):
            each.step()
        if step % every == 0 or step == steps:
            seconds[step] = time.time() - begun
            losses[step] = evaluate(task, model, device)
            begun = time.time() - seconds[step]
    return {
        "way": args.way,
        "seed": args.seed,
        "lr": args.lr,
        "ranks": dist.get_world_size(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "seconds": seconds,  # of training, until each evaluation
        "code": args.code,
    }


@torch.no_grad()
def evaluate(task: race_tasks.Task, model: torch.nn.Module, device: torch.device) -> float:
    """The task's loss on held-out data, with the model in eval mode."""
    was = model.training
    model.eval()
    loss = task.evaluate(model, device)
    model.train(was)
    return loss


def share(step: int, steps: int, warmup: int) -> float:
    """The share of the largest learning rate: it rises, then falls to a tenth along a cosine."""
    begins = max(1, min(warmup, steps // 4))
    if step < begins:
        return (step + 1) / begins
    return 0.55 + 0.45 * math.cos(math.pi * (step - begins) / max(1, steps - begins))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, sizes = parser.add_argument, list(race_language.SIZES)
    add("--way", choices=list(WAYS), required=True)
    add("--steps", type=int, required=True, help="of dense training")
    add("--every", type=int, default=LOCAL_STEPS, help="steps are evaluated")
    add("--seed", type=int, default=1)
    add("--lr", type=float, required=True)
    add("--pieces", type=Path, required=True, help="folder that keeps the text")
    add("--output", type=Path, required=True)
    add("--task", choices=race_tasks.TASKS, default=race_tasks.TASKS[0])
    add("--size", choices=sizes, default="full", help="of the model")
    add("--muon", action="store_true", help="Muon trains matrices between embedding and output")
    add("--warmup", type=int, default=WARMUP, help="steps in which the learning rate rises")
    add("--code", help="what made this; see code_version.py")
    add("--options", type=ast.literal_eval, default={}, help="ScaleCom's, as a dictionary")
    return parser


if __name__ == "__main__":
    main()
