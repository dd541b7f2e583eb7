"""The oracle of n workers that compute gradients a step ahead.

They compute one after the other, with one model. reference.py makes the averages, and PyTorch's own
optimizer takes the step.
"""

import torch

from scalecom_hvd.reference import ScaleComReference

# Of any other optimizer, the last step tells how long D(u) is.
KNOWN = torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop


def ahead(residue, alignment, lr, factor, group, state, last=None):
    """Return the move of a parameter: -lr * a * D(u), with beta = 1.

    last: the last step of an optimizer that is not known.
    """
    m, w = torch.as_tensor(residue), max(alignment, 0)
    if last is not None:
        sign = 1 if group.get("maximize") else -1
        along = sign * w * m * (last.norm() / m.norm()) + (1 - w) * last
        return factor * 3.0 * along if m.any() else torch.zeros_like(last)
    b = state.get("exp_avg", state.get("momentum_buffer", torch.zeros_like(m)))
    if "square_avg" in state:
        b = torch.zeros_like(m)
    length = m.norm() / b.norm() if b.any() else 0
    sign = -1 if group.get("maximize") else 1
    u = sign * w * m + (1 - w) * length * b
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


def last_steps(optimizer, common, before):
    """{name: the last step}, from `before` to `common`, of an optimizer that is not known."""
    if isinstance(optimizer, KNOWN):
        return {}
    return {name: own - before.get(name, own) for name, own in common.items()}


def train(model, optimizer, config, workers, steps, loss, factor=1.0):
    """Train the model in place; loss(model, worker, step) returns a worker's loss in a step."""
    named = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    reference = ScaleComReference(workers, shapes, config)
    before = {}
    for step in range(steps):
        grads = []
        common = {name: p.detach().clone() for name, p in named.items()}
        last = last_steps(optimizer, common, before)
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
                            last.get(name),
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
        before = common if step else {}  # nothing is moved, and no step noted, in the first step
    return reference
