"""`make bench-nodes`: several ranks on each host; every rank is a worker, or every host is one.

    python scripts/bench/bench_nodes.py                      2 and 4 hosts of 2 ranks, 1 Gbit/s
    python scripts/bench/bench_nodes.py --hosts 2 --ranks-per-host 4 --mbit 100

The model is that of `make bench`: 24.8 million parameters, and a pause instead of compute. A host's
network interface counts the bytes that leave the host; inside a host the network is as fast as this
machine. Each table is one job. It measures each way twice: in order, and then in reverse order.
Needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_cases
import hosts
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import DistributedOptimizer, ScaleCom, ScaleComState, scalecom_hook
from scalecom_hvd.exchange.unused_averages import TRIAL

SETTLING_STEPS = TRIAL + 2  # see bench_worker.py
Step = Callable[[], None]
Setup = tuple[Step, Callable[[], int]]


def ddp_dense(mesh: DeviceMesh) -> Setup:
    model, optimizer, loss = _model()
    return _steps(DistributedDataParallel(model), optimizer, loss), lambda: 0


def ddp_scalecom(**settings: Any) -> Setup:
    model, optimizer, loss = _model()
    wrapped = DistributedDataParallel(model)
    state = ScaleComState(wrapped, **settings)
    wrapped.register_comm_hook(state, scalecom_hook)
    return _steps(wrapped, optimizer, loss), lambda: _residue_bytes(state.compression)


def fsdp_dense(mesh: DeviceMesh) -> Setup:
    model, _, loss = _model()
    optimizer = _sharded(model, mesh)
    return _steps(model, optimizer, loss), lambda: 0


def fsdp_nodes(mesh: DeviceMesh) -> Setup:
    model, _, loss = _model()
    optimizer: Any = DistributedOptimizer(
        _sharded(model, mesh["shard"]),
        model.named_parameters(),
        compression=ScaleCom(),
        mesh=mesh,
    )
    return _steps(model, optimizer, loss), lambda: _residue_bytes(optimizer.compression)


WAYS: dict[str, Callable[[DeviceMesh], Setup]] = {
    "DDP, dense": ddp_dense,
    "DDP, every rank a worker": lambda mesh: ddp_scalecom(),
    "DDP, every host a worker": lambda mesh: ddp_scalecom(mesh=mesh),
    "FSDP2, dense between hosts": fsdp_dense,
    "FSDP2, every host a worker": fsdp_nodes,
}


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer, bench_cases.Loss]:
    model, loss = bench_cases.CASES["transformer"](0)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), loss


def _sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def _steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: bench_cases.Loss
) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def _residue_bytes(method: Any) -> int:
    return sum(tensor.residue.nbytes for tensor in method.residues.tensors.values())


def work(args: argparse.Namespace) -> None:
    """One rank: every way, in order and in reverse; rank 0 writes what it measured."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size() // args.ranks_per_host, args.ranks_per_host),
        mesh_dim_names=("replicate", "shard"),
    )
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "bytes": [], "residues": [], "peak": []} for name in WAYS
    }
    order = [*WAYS]
    for name in [*order, *reversed(order)]:
        occupied = _forget_peak()
        step, residues = WAYS[name](mesh)
        for _ in range(SETTLING_STEPS):
            step()
        dist.barrier()
        before = hosts.bytes_sent_here()
        for _ in range(args.steps):
            begun = time.perf_counter()
            step()
            found[name]["seconds"].append(time.perf_counter() - begun)
        dist.barrier()
        found[name]["bytes"].append((hosts.bytes_sent_here() - before) / args.steps)
        found[name]["residues"].append(residues())
        found[name]["peak"].append(_memory("VmHWM") - occupied)
        del step, residues
    if dist.get_rank() == 0:
        args.output.write_text(json.dumps(found))
    dist.destroy_process_group()


def _forget_peak() -> int:
    """Let the peak of this process's memory begin anew. Returns what it occupies now, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back to the system
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)
    return _memory("VmRSS")


def _memory(what: str) -> int:
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(what))
    return int(line.split()[1]) * 1024


def measure(n: int, mbit: float | None, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(n, mbit) as cluster:
        output = Path(folder) / "found.json"
        program = [Path(__file__).resolve(), "--output", output, "--steps", args.steps]
        done = cluster.run(
            "torchrun",
            [*program, "--ranks-per-host", args.ranks_per_host],
            timeout=1800,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "e0"},
            stdout=subprocess.PIPE,
            ranks_per_host=args.ranks_per_host,
        )
        if not output.exists():
            raise RuntimeError(f"the workers failed:\n{done.stdout}")
        return json.loads(output.read_text())


def table(found: dict[str, Any], n: int, mbit: float | None, args: argparse.Namespace) -> str:
    speed = f"{mbit:g} Mbit/s" if mbit else "no limit"
    lines = [
        f"{n} hosts of {args.ranks_per_host} ranks, {speed} between hosts",
        "",
        "| | ms a step | MB that leave a host | residues of a rank, MB | peak of a rank, MB |",
        "|---|---|---|---|---|",
    ]
    for name, own in found.items():
        milliseconds = statistics.median(own["seconds"]) * 1e3
        sent, residues = statistics.median(own["bytes"]) / 1e6, own["residues"][0] / 1e6
        peak = statistics.median(own["peak"]) / 1e6
        lines.append(f"| {name} | {milliseconds:.0f} | {sent:.2f} | {residues:.1f} | {peak:.0f} |")
    return "\n".join(lines)


def main() -> None:
    args = argument_parser().parse_args()
    if "RANK" in os.environ:
        work(args)
        return
    hosts.install()
    for n in args.hosts:
        for mbit in args.mbit:
            found = measure(n, mbit or None, args)
            print(table(found, n, mbit or None, args), end="\n\n", flush=True)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, sends = parser.add_argument, "what a host may send; 0: no limit"
    add("--hosts", type=int, nargs="+", default=[2, 4])
    add("--ranks-per-host", type=int, default=2)
    add("--mbit", type=float, nargs="+", default=[1000], help=sends)
    add("--steps", type=int, default=10, help="measured of each way, twice")
    add("--output", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
