"""Train a small language model under FSDP2: sharded inside a node, compressed between nodes.

    torchrun --nproc-per-node 4 scripts/examples/train_fsdp.py --ranks-per-node 2    (here, to try)
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:29500 \\
        scripts/examples/train_fsdp.py                                               (two nodes)

An example to copy. The text is the source of Python's own standard library. With --resume, a
stopped run goes on, on the same number of nodes and of ranks per node. The metric is bits per
character on files that were held out.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_char_lm import WINDOW, Transformer, cross_entropy, load_text, windows_at

from scalecom_hvd.ddp import DistributedOptimizer, PerRank, ScaleCom


def main() -> None:
    args = argument_parser().parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("launch with torchrun --nproc-per-node 4 scripts/examples/train_fsdp.py")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # Gloo for CPUs, NCCL for GPUs
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train as the options say."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % args.ranks_per_node:
        raise SystemExit(f"--ranks-per-node {args.ranks_per_node} does not divide {size} ranks")
    nodes, names = size // args.ranks_per_node, ("replicate", "shard")
    mesh = init_device_mesh(device.type, (nodes, args.ranks_per_node), mesh_dim_names=names)
    torch.manual_seed(0)  # the same parameters on all nodes
    model = Transformer(width=128, inner=512, layers=4).to(device)
    for block in model.layers.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    if not args.dense:
        optimizer = DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=ScaleCom(total_steps=args.steps),
            mesh=mesh,
        )
    text = load_text(None)
    first = load(args.checkpoint, model, optimizer) if args.resume else 0
    for step in range(first, args.stop_at or args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 + math.cos(math.pi * step / args.steps)) / 2
        random = torch.Generator().manual_seed(step * size + rank)
        starts = torch.randint(len(text.train) - WINDOW, (args.batch_size,), generator=random)
        optimizer.zero_grad()
        loss = cross_entropy(model, windows_at(text.train, starts).to(device))
        loss.backward()  # when it returns, gradients are averaged in the node and between nodes
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0 and rank == 0:
            sent = "" if args.dense else f", {optimizer.compression.stats()['bytes_traffic']} bytes"
            print(f"step {step + 1}: loss {loss.item() / math.log(2):.3f} bits{sent}", flush=True)
    bits = evaluate(model, text.held_out, device)
    if rank == 0:
        print(f"held out: {bits:.4f} bits per character", flush=True)
    if args.checkpoint:
        state = state_of(model, optimizer, args.stop_at or args.steps)
        dcp.save(state, checkpoint_id=args.checkpoint)


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: torch.Tensor, device: torch.device) -> float:
    """Bits per character. All ranks read equally many windows: FSDP2 gathers in step."""
    model.eval()
    everywhere = torch.linspace(0, len(held_out) - WINDOW - 1, 512).long()
    own = everywhere[dist.get_rank() :: dist.get_world_size()][: 512 // dist.get_world_size()]
    total = cross_entropy(model, windows_at(held_out, own).to(device)).double()
    dist.all_reduce(total)
    model.train()
    return total.item() / dist.get_world_size() / math.log(2)


def state_of(model: torch.nn.Module, optimizer: Any, step: int) -> dict[str, Any]:
    """Shards of the model and the optimizer, and every rank's residues."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": step}
    if hasattr(optimizer, "compression"):
        state["scalecom"] = PerRank(optimizer.compression)
    return state


def load(folder: Path, model: torch.nn.Module, optimizer: Any) -> int:
    """Load what was saved; returns the step at which training goes on."""
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=folder)
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **loaded)
    return int(state["step"])


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    add("--ranks-per-node", type=int, default=here, help="default: all of this machine's")
    add("--dense", action="store_true", help="plain FSDP2, which averages whole between nodes")
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=8, help="of each rank")
    add("--lr", type=float, default=3e-3)
    add("--checkpoint", type=Path, help="a folder, written at the end")
    add("--stop-at", type=int, help="end after so many of the steps")
    add("--resume", action="store_true", help="go on from --checkpoint")
    return parser


if __name__ == "__main__":
    main()
