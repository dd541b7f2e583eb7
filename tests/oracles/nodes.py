"""The oracle of nodes in which each rank holds a shard of every tensor.

The nodes compute one after the other, with one model. A node is one worker of the algorithm: its
gradient is the average of its ranks' gradients. Every shard has a reference of its own, just as
every set of peers has an exchange of its own.
"""

import numpy as np
import torch
from oracles import momentum

from scalecom_hvd.reference import ScaleComReference


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
    rates = config.own_rates_for({name: tuple(p.shape) for name, p in named.items()})
    for j in range(local):
        shapes = {name: tuple(shards(p.data, local)[j].shape) for name, p in named.items()}
        reference = ScaleComReference(nodes, shapes, config)
        # The sizes of whole tensors decide which tensors are compressed. Shards may be empty.
        reference.rates = {n: r if np.prod(shapes[n]) else 1 for n, r in rates.items()}
        references.append(reference)
    kappas = {p: 1 - config.nu for name, p in named.items() if rates[name] != 1}
    steps_of = momentum.Steps(optimizer, kappas)
    for step in range(steps):
        grads = []
        for node in range(nodes):
            model.zero_grad()
            total = sum(loss(model, node * local + rank, step) for rank in range(local)) / local
            total.backward()
            grads.append({name: p.grad.clone() for name, p in named.items()})
        for j, reference in enumerate(references):
            own = [{n: shards(g, local)[j].numpy() for n, g in node.items()} for node in grads]
            for name, average in reference.step(own).items():
                shards(named[name].grad, local)[j].copy_(torch.as_tensor(np.array(average)))
        steps_of.step()
    return references
