"""What a device mesh of nodes says: which ranks are this rank's peers, and which its node's.

The mesh is PyTorch's own for hybrid sharding: nodes times the ranks of each, with dimensions named
"replicate" and "shard". A sharded model may have other dimensions inside its nodes, for tensor
parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scalecom_hvd.ddp.process_group_collectives import ProcessGroupCollectives

BETWEEN, INSIDE = "replicate", "shard"
EXAMPLE = 'init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))'
FULLY_SHARD = 'fully_shard(module, mesh=mesh["replicate", "shard"])'


def check_mesh(mesh: object, sharded: bool = False) -> None:
    """Raise an error unless this is a mesh of nodes, of any dimensions if `sharded`."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, such as {EXAMPLE}, not {mesh!r}")
    names = mesh.mesh_dim_names or ()
    if names != (BETWEEN, INSIDE) and not (sharded and names[:1] == (BETWEEN,) and names[1:]):
        others = f" (with tensor parallelism, others after {BETWEEN!r})" if sharded else ""
        raise ValueError(
            f"mesh must have the dimensions {(BETWEEN, INSIDE)}{others}, not "
            f"{mesh.mesh_dim_names}. Along the first, gradients are averaged compressed, and along "
            f"the second uncompressed. Give {EXAMPLE}"
        )

    ranks = mesh.mesh
    if not all(torch.equal(ranks, ranks.sort(dim).values) for dim in range(ranks.ndim)):
        raise ValueError(
            f"mesh has ranks {ranks.tolist()}, but ranks must rise along all dimensions, because "
            f"process groups number their ranks in this order. Give {EXAMPLE}"
        )


def peers_of(mesh: DeviceMesh, devices: Iterable[torch.device]) -> ProcessGroupCollectives:
    """The ranks that hold the same shard as this rank, one per node. All ranks must call this."""
    return ProcessGroupCollectives(mesh.get_group(BETWEEN), devices=devices)


def ranks_of_node(mesh: DeviceMesh, devices: Iterable[torch.device]) -> ProcessGroupCollectives:
    """The ranks of this rank's node, which make sums. All ranks must call this."""
    names = mesh.mesh_dim_names[1:]
    # The name is of this mesh alone, because its root mesh may be cut into nodes in other ways too.
    inside = mesh[names] if len(names) == 1 else mesh[names]._flatten("_".join(names))
    return ProcessGroupCollectives(inside.get_group(), sums=True, devices=devices)


def check_same_ranks(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless the mesh has the ranks that DDP's wrapper averages over."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        raise ValueError(
            f"mesh has ranks {mesh.mesh.flatten().tolist()}, but DistributedDataParallel averages "
            f"over ranks {ranks}: give both the same ranks"
        )


def is_hybrid(parameter: torch.Tensor, mesh: DeviceMesh | None) -> bool:
    """Whether fully_shard was given both dimensions, so that it averages between nodes itself."""
    theirs = getattr(parameter, "device_mesh", None)
    if theirs is None or theirs.ndim == 1 or mesh is None or INSIDE not in mesh.mesh_dim_names:
        return False
    groups = theirs.get_group(0), mesh.get_group(BETWEEN)  # names may differ
    first, peers = map(dist.get_process_group_ranks, groups)
    return first == peers and parameter.placements[0].is_replicate()  # type: ignore[attr-defined]


def check_shards(parameters: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Raise an error unless each is sharded in the node only (or whole: tensor parallelism)."""
    own = set(mesh.mesh[mesh.get_local_rank(BETWEEN)].flatten().tolist())
    is_fsdp = INSIDE in mesh.mesh_dim_names
    if not is_fsdp and not any(hasattr(p, "device_mesh") for p in parameters.values()):
        raise TypeError(
            f"no parameter is a DTensor, but mesh= has the dimensions {mesh.mesh_dim_names}. Call "
            "parallelize_module on the model first"
        )
    for name, parameter in parameters.items():
        theirs = getattr(parameter, "device_mesh", None)
        if theirs is None and not is_fsdp:
            continue
        if theirs is None:
            raise TypeError(
                f"{name} is not sharded, but mesh= is for sharded models. Call {FULLY_SHARD} "
                "first. If fully_shard was told to ignore it, no rank averages it: train it with "
                "an optimizer of its own. If each rank has the whole model, wrap the model in "
                "DistributedDataParallel, and give the mesh to ScaleComState"
            )
        placements = parameter.placements  # type: ignore[attr-defined]
        along = dict(zip(theirs.mesh_dim_names or (), placements, strict=False))
        ranks, inside = theirs.mesh, along.get(INSIDE)
        if is_hybrid(parameter, mesh):
            ranks, inside = ranks[theirs.get_local_rank(0)], placements[1]
        is_sharded = not is_fsdp or (inside is not None and not inside.is_replicate())
        if not own.issuperset(ranks.flatten().tolist()) or not is_sharded:
            raise ValueError(
                f"{name} has the placements {placements} on ranks {theirs.mesh.tolist()}, but must "
                f"be sharded over ranks {sorted(own)}, which are a node of mesh=. Call "
                f"{FULLY_SHARD if is_fsdp else 'parallelize_module'} with the same mesh"
            )


def check_averages(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Raise RuntimeError, on all ranks, unless FSDP2's reduce-scatters over this group average.

    Over Gloo, older releases of PyTorch sum when FSDP2 asks for averages, without a warning
    (github.com/pytorch/pytorch/issues/162338).
    """
    size = dist.get_world_size(group)
    found = torch.empty(1, device=device)
    ones = torch.ones(size, device=device)
    # PyTorch 2.13 gave it a new name, and warns of the old one.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(found, ones, op=dist.ReduceOp.AVG, group=group)
    if found.item() != 1:
        raise RuntimeError(
            f"this PyTorch ({torch.__version__}) sums over {dist.get_backend(group)} when FSDP2 "
            f"asks for averages, so gradients would be {size} times too large: update PyTorch"
        )
