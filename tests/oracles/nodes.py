"""The oracle of nodes in which each rank holds a shard of every tensor.

The nodes compute one after the other, with one model. A node is one worker of the algorithm: its
gradient is the average of its ranks' gradients. Every shard has a reference of its own, just as
every set of peers has an exchange of its own. The optimizer's step is PyTorch's.
"""

import numpy as np
import torch
from oracles.step_ahead import ahead, last_steps

from scalecom_hvd.reference import ScaleComReference, align


def rows(tensor, local):
    """Return views of a tensor's shards, one for each rank of a node, as fully_shard cuts them."""
    parts = list(tensor.chunk(local)) if tensor.dim() else [tensor]
    return parts + [tensor[:0]] * (local - len(parts))


def flat_parts(tensor, local):
    """Return views of the shards of a flattened tensor, as DDP's hook cuts it."""
    return rows(tensor.view(-1), local)


def train(model, optimizer, config, nodes, local, steps, loss, shards=rows):
    """Train the model in place; loss(model, rank, step) returns a rank's loss in a step.

    Returns the references, one for each local rank.
    """
    named = dict(model.named_parameters())
    references = []
    for j in range(local):
        shapes = {name: tuple(shards(p.data, local)[j].shape) for name, p in named.items()}
        reference = ScaleComReference(nodes, shapes, config)
        # The sizes of whole tensors decide which tensors are compressed. Shards may be empty.
        rates = reference.config.rates_for({name: tuple(p.shape) for name, p in named.items()})
        reference.rates = {n: r if np.prod(shapes[n]) else 1 for n, r in rates.items()}
        references.append(reference)
    alignments, before = [1.0] * nodes, {}
    for step in range(steps):
        grads = []
        common = {name: p.detach().clone() for name, p in named.items()}
        last = last_steps(optimizer, common, before)
        for node in range(nodes):
            if config.resolved(True).step_ahead and step:
                move(named, optimizer, references, node, local, shards, alignments[node], last)
            model.zero_grad()
            total = sum(loss(model, node * local + rank, step) for rank in range(local)) / local
            total.backward()
            grads.append({name: p.grad.clone() for name, p in named.items()})
            for name, p in named.items():
                p.data.copy_(common[name])
        for j, reference in enumerate(references):
            own = [{n: shards(g, local)[j].numpy() for n, g in node.items()} for node in grads]
            for name, average in reference.step(own).items():
                shards(named[name].grad, local)[j].copy_(torch.as_tensor(np.array(average)))
        alignments = align(alignments, sum(reference.products for reference in references))
        optimizer.step()
        before = common if step else {}
    return references


def move(named, optimizer, references, node, local, shards, alignment, last):
    """Move a node's parameters ahead: as whole tensors if shards are cut from flattened tensors."""
    (group,) = optimizer.param_groups
    for name, p in named.items():
        state = {w: v for w, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        residues = [reference.residues[node].get(name) for reference in references]
        if shards is flat_parts:
            waits = [residue for residue in residues if residue is not None]
            if waits:
                whole = np.concatenate(waits).reshape(p.shape)
                moved = ahead(whole, alignment, group["lr"], 1.0, group, state, last.get(name))
                p.data.add_(moved)
            continue
        for j, residue in enumerate(residues):
            if residue is not None:
                own = {
                    w: shards(v, local)[j] if v.shape == p.shape else v for w, v in state.items()
                }
                step = shards(last[name], local)[j] if name in last else None
                moved = ahead(residue, alignment, group["lr"], 1.0, group, own, step)
                shards(p.data, local)[j].add_(moved)
