"""The oracle of optimizers with a quasi-hyperbolic momentum, in NumPy.

It keeps each momentum as it is, and forms (1 - kappa) * momentum + kappa * a * gradient beside it.
"""

import numpy as np
import torch


class Steps:
    """Takes the steps of an optimizer, whose own step() is never called.

    Args:
        optimizer: an SGD, Adam or AdamW. It says what is stepped, and with which numbers.
        kappas: {parameter: kappa}. Other parameters have 0.
    """

    def __init__(self, optimizer, kappas):
        self.optimizer, self.kappas, self.kept, self.count = optimizer, kappas, {}, 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        update = _sgd if isinstance(self.optimizer, torch.optim.SGD) else _adam
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                # In its first step an optimizer has no momentum that could be mixed.
                kappa = self.kappas.get(p, 0) if p in self.kept else 0
                kept, sign = self.kept.setdefault(p, {}), -1 if group["maximize"] else 1
                value, g = (tensor.numpy(force=True) for tensor in (p, p.grad))
                decay = group["weight_decay"] * value
                along = update(group, kept, decay, sign * g, kappa, self.count)
                p.copy_(torch.as_tensor(value - group["lr"] * along))


def _sgd(group, kept, decay, g, kappa, count):
    """Return what is taken off the parameter. A decay among the gradients is in momentum alone."""
    mu, new = group["momentum"], 1 - group["dampening"]
    if kept:
        kept["b"] = mu * kept["b"] + new * (g + decay / (1 - kappa))
    else:
        kept["b"] = g + decay
    a = 1
    for _ in range(count - 1):
        a = mu * a + new
    mixed = (1 - kappa) * kept["b"] + kappa * a * g
    return g + decay + mu * mixed if group["nesterov"] else mixed


def _adam(group, kept, decay, g, kappa, _):
    b1, b2 = group["betas"]
    apart, inside = (decay, 0) if group["decoupled_weight_decay"] else (0, decay)
    kept["t"] = t = kept.get("t", 0) + 1
    kept["m"] = b1 * kept.get("m", 0) + (1 - b1) * (g + inside / (1 - kappa))
    kept["v"] = b2 * kept.get("v", 0) + (1 - b2) * (g + inside) ** 2
    kept["largest"] = np.maximum(kept.get("largest", 0), kept["v"])
    mixed = (1 - kappa) * kept["m"] + kappa * (1 - b1**t) * g
    v = kept["largest" if group["amsgrad"] else "v"]
    return mixed / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + group["eps"]) + apart
