"""The oracle of n workers that compute gradients a step ahead.

They compute one after the other, with one model. reference.py makes the averages, and PyTorch's own
optimizer takes the step.
"""

import torch

from scalecom_hvd.reference import ScaleComReference


def ahead(residue, alignment, lr, factor, group, state):
    """Return the move of a parameter: -lr * a * D(u), with beta = 1."""
    m, w = torch.as_tensor(residue), max(alignment, 0)
    b = state.get("exp_avg", state.get("momentum_buffer", torch.zeros_like(m)))
    if "square_avg" in state:
        b = torch.zeros_like(m)
    length = m.norm() / b.norm() if b.any() else 0
    sign = -1 if group.get("maximize") else 1
    u = sign * w * m + (1 - w) * length * b
    if "ns_coefficients" in group:  # Muon: a step's elements have this root mean square
        rows, columns = m.shape
        size = (max(1, rows / columns) / max(rows, columns)) ** 0.5
        return -lr * factor * size * m.numel() ** 0.5 * u / m.norm()
    if "square_avg" in state:
        v, decay = state["square_avg"], group["alpha"]
    elif "exp_avg_sq" in state:
        decay = group["betas"][1]
        v = state["exp_avg_sq"] / (1 - decay ** float(state["step"]))
    else:
        return -lr * factor * (1.5 if group.get("momentum") else 1.0) * u
    v = v + (1 - decay) * u**2
    direction = (u / (v.sqrt() + group["eps"])).clamp(-10, 10)
    return -lr * factor * 0.3 * torch.where(u == 0, 0, direction)


def train(model, optimizer, config, workers, steps, loss, factor=1.0):
    """Train the model in place; loss(model, worker, step) returns a worker's loss in a step."""
    named = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    reference = ScaleComReference(workers, shapes, config)
    for step in range(steps):
        grads = []
        common = {name: p.detach().clone() for name, p in named.items()}
        for worker in range(workers):
            for group in optimizer.param_groups:
                for name, p in named.items():
                    own = [q for q in group["params"] if q is p]
                    if own and step and name in reference.residues[worker]:
                        moved = ahead(
                            reference.residues[worker][name],
                            reference.alignments[worker],
                            group["lr"],
                            factor,
                            group,
                            optimizer.state[p],
                        )
                        p.data.add_(moved)
            model.zero_grad()
            loss(model, worker, step).backward()
            grads.append({name: p.grad.numpy().copy() for name, p in named.items()})
            for name, p in named.items():
                p.data.copy_(common[name])
        for name, average in reference.step(grads).items():
            named[name].grad = torch.as_tensor(average)
        optimizer.step()
    return reference
