"""Models that take local steps on real ranks, and what their scripts do."""

import contextlib

import numpy as np
import rules
import torch
from faces import hvd
from made_up import gradients

SHAPES = {"first": (60, 50), "bias": (60,), "second": (3, 1000), "third": (5000,), "double": (700,)}
SETTINGS = {"rate": 20, "min_numel": 100, "dense": [], "warmup_steps": 0, "bucket_bytes": 30_000}
# Powers of two make products exact, so it does not matter whether they are fused with a sum.
LR, MOMENTUM = 0.5, 0.5

COMPRESSIONS = {
    "ScaleCom": (hvd.ScaleCom, {}),
    "ScaleCom, 32 bits": (hvd.ScaleCom, {"bits": 32}),
    "ScaleCom, exact, beta": (hvd.ScaleCom, {"selection": "exact", "beta": 0.5}),
    "LocalTopK": (hvd.LocalTopK, {}),
    "LocalTopK, sign": (hvd.LocalTopK, {"quantiser": rules.Sign()}),
    "LocalTopK, means": (hvd.LocalTopK, {"quantiser": hvd.BinMeans()}),
    "RandomK": (hvd.RandomK, {}),
}
SOME = ["ScaleCom", "ScaleCom, 32 bits", "LocalTopK, means"]


def method(name, **more):
    kind, fields = COMPRESSIONS[name]
    return kind(**(SETTINGS | fields | more))


def begin(scale=1, **dtypes):
    """A model that begins with the same random numbers, times scale, on all ranks."""
    dtypes = {"double": torch.float64} | dtypes
    return {
        name: torch.nn.Parameter(torch.as_tensor(value * scale, dtype=dtypes.get(name)))
        for name, value in gradients(SHAPES, 99, 0).items()
    }


def make(model, compression="ScaleCom", local_steps=4, momentum=0.0, sgd=None, **more):
    """The optimizer of a model, and its method."""
    compression = method(compression) if isinstance(compression, str) else compression
    sgd = sgd or torch.optim.SGD(model.values(), lr=LR, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(
        sgd, model.items(), compression=compression, local_steps=local_steps, **more
    )
    return optimizer, optimizer.compression


def from_zero(compression, local_steps):
    """A model, its optimizer and its method, as assert_nothing_is_lost wants them."""
    model = begin(scale=0)
    sgd = torch.optim.SGD(model.values(), lr=1.0)
    return model, *make(model, method(compression, beta=1.0), local_steps, sgd=sgd)


def learn(optimizer, model, steps, bad=(), forwards=None):
    """Take steps with gradients that depend on the parameters.

    bad: steps with gradients that are not finite on odd ranks.
    forwards: gets the parameters at each forward.
    """
    for step in steps:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for name, grad in gradients(SHAPES, hvd.rank(), step).items():
            p = model[name]
            product = (p * torch.as_tensor(grad).to(p.dtype)).sum().float()
            loss = loss + product / 4 + p.square().sum().float()
        if forwards is not None:
            forwards.append(values_of(model))
        (loss * (np.nan if step in bad and hvd.rank() % 2 else 0.25)).backward()
        optimizer.step()


def values_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.items()}


def copy_into(model, values):
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(values[name])


def equal(model, values):
    """Whether tensors have the same names, and are equal to the bit."""
    same = model.keys() == values.keys()
    return same and all(torch.equal(values[name], tensor) for name, tensor in model.items())


def usable(parameters):
    """Whether a local step can be taken with these parameters' gradients."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return all(bool((grad.abs() < 2.0**100).all()) for grad in grads)


class BadGradient(Exception):  # noqa: N818
    """Holds the loss."""


class Plain:
    """An ordinary optimizer that a script treats like one of local steps.

    A step with a bad gradient is as if nobody had asked for it.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.synchronize, self.skip_synchronize = lambda: None, contextlib.nullcontext

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self, closure=None):
        def checked():
            loss = closure and closure()
            if not usable(p for group in self.optimizer.param_groups for p in group["params"]):
                raise BadGradient(loss)
            return loss

        try:
            if closure is not None:
                return self.optimizer.step(checked)
            checked()
            return self.optimizer.step()
        except BadGradient as bad:
            return bad.args[0]


class Twice(torch.optim.Optimizer):
    """Evaluates the closure again at the point that its momentum leads to."""

    def __init__(self, params, lr=0.125):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        lr = self.param_groups[0]["lr"]
        trained = [p for group in self.param_groups for p in group["params"]]
        loss = torch.enable_grad()(closure)()
        for p in trained:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.5)
            if p.grad is not None:
                momentum.add_(p.grad)
            p.sub_(momentum, alpha=lr)
        torch.enable_grad()(closure)()
        for p in (p for p in trained if p.grad is not None):
            p.sub_(p.grad, alpha=lr)
        return loss


def lbfgs(lr=0.5, **more):
    return lambda params: torch.optim.LBFGS(params, lr=lr, history_size=3, **more)


# Optimizers that evaluate their closure several times a step.
EVALUATES = {
    "twice": Twice,
    "LBFGS": lbfgs(max_iter=4),
    "LBFGS, searching": lbfgs(max_iter=4, line_search_fn="strong_wolfe"),
}
