"""Whole training steps of a GPT-2 on this machine's GPUs: dense, half precision, and ScaleCom.

Starts two ranks with torchrun for each way, one after the other. If there is only one GPU, the
ranks share it. Then each rank tells NCCL that it is on a machine of its own, so values travel
through sockets, and the ranks' kernels take turns on the GPU. Such times compare ways; they are not
the times of other machines.

Prints a table: milliseconds of a step (median), the most memory and, from a profile of two steps,
how long the exchange's own kernels ran, and for how much of that time the model's ran, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "DDP, dense": None,
    "DDP's fp16 hook": None,
    "ScaleCom": {},
    "ScaleCom, nu=1": {"nu": 1},
    "ScaleCom, 32 bits": {"bits": 32},
}
RESULT = "result: "


def make_model(tiny: bool) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2} if tiny else {}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def train(way: str, steps: int) -> None:
    """One rank."""
    from scalecom_hvd.doctor.torch_rank import use_device

    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = use_device("cuda" if on_gpu else "cpu", rank)
    dist.init_process_group()
    model = make_model(tiny=not on_gpu).to(device)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settings = WAYS[way]
    if settings is not None:
        from scalecom_hvd.ddp import ScaleComState, scalecom_hook

        wrapped.register_comm_hook(ScaleComState(wrapped, **settings), scalecom_hook)
    elif "fp16" in way:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    size = (8, 512) if on_gpu else (2, 32)
    tokens = torch.randint(0, 50257, size, generator=torch.Generator().manual_seed(rank))
    tokens = tokens.to(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = wrapped(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(6):  # Triton compiles, and DDP rebuilds its buckets
        step()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun) * 1e3)
    told: dict[str, Any] = {"ms": statistics.median(times)}
    if on_gpu:
        told["MiB"] = torch.cuda.max_memory_allocated() / 2**20
        told |= profiled(step)
    if rank == 0:
        print(RESULT + json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)


def profiled(step: Any) -> dict[str, float]:
    """Of a step: how many kernels of the exchange ran, for how long, and beside the model's."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        step()
    told = overlap_of(profiler.events() or ())
    if told is None:
        return {}
    kernels, milliseconds, beside = told
    return {"kernels": kernels / 2, "kernels_ms": milliseconds / 2, "beside": beside}


def overlap_of(events: Iterable[Any]) -> tuple[int, float, float] | None:
    """How the exchange's kernels overlap with the model's, in torch.profiler's events.

    Returns:
        How many kernels and copies ran on the exchange's stream, for how many milliseconds, and in
        which share of that time the model's kernels ran, too. None: events lack one of the two.
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    own = None
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        stream, span = event.device_resource_id, event.time_range
        if event.is_user_annotation:  # a range of ours, from its first kernel to its last
            own = stream if event.name.startswith("scalecom.take") else own
        else:
            spans.setdefault(stream, []).append((span.start, span.end))
    if own not in spans or len(spans) < 2:
        return None
    model = max(spans.keys() - {own}, key=lambda stream: len(spans[stream]))
    # Kernels of one stream do not overlap.
    both = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in spans[own]
        for other_start, other_end in spans[model]
    )
    busy = sum(end - start for start, end in spans[own])
    return len(spans[own]), busy / 1e3, both / busy


def measured(way: str, steps: int) -> Mapping[str, float]:
    """What two ranks measured for a way."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", __file__, "--way", way, "--steps", str(steps)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix(RESULT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        train(arguments.way, arguments.steps)
    if not torch.cuda.is_available():
        print("no GPU is here: a tiny model on the processor shows that all ways run\n")
    print(f"{'':26s}{'ms':>8s}{'MiB':>8s}{'kernels':>9s}{'ms':>7s}{'beside the model':>18s}")
    for way in WAYS:
        told = measured(way, arguments.steps)
        memory = f"{told['MiB']:8.0f}" if "MiB" in told else ""
        more = ""
        if "kernels" in told:
            more = f"{told['kernels']:9.0f}{told['kernels_ms']:7.1f}{told['beside']:18.0%}"
        print(f"{way:26s}{told['ms']:8.1f}{memory}{more}", flush=True)


if __name__ == "__main__":
    main()
