"""What the tests of step-ahead gradients share, on both faces and in DDP's hook."""

import torch
from faces import hvd

from scalecom_hvd.config import ScaleComConfig


class Signs(torch.optim.Optimizer):
    """An optimizer that this package does not know: steps along signs of gradients."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                assert not self.state[p]  # as many optimizers ask, which leaves an empty one
                p.add_(p.grad.sign(), alpha=-group["lr"])


SETTINGS = {"rate": 5, "bits": 32, "min_numel": 20, "step_ahead": 1}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "maximize": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, maximize=True),
    "signs": lambda parameters: Signs(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, momentum=0.5),
}


def make_model(seed=1):
    """Two layers in float64, so that rounding does not change which elements are chosen."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 6)
    return torch.nn.Sequential(*layers).double()


def loss(model, rank, step):
    """The loss of a rank's own batch."""
    torch.manual_seed(100 * step + rank)
    inputs = torch.randn(8, 12, dtype=torch.float64)
    wanted = torch.sin(inputs[:, :6]) + rank * 0.1
    return (model(inputs) - wanted).square().mean()


def unlike_loss(model, rank, step):
    """The loss of ranks that want the opposite of each other."""
    return loss(model, rank, step) if rank % 2 else -loss(model, rank, step)


def config(**settings):
    """The configuration that reference.py takes, with these settings."""
    return ScaleComConfig(**{**SETTINGS, **settings})


def copies(model):
    """Copies of the parameters as they are now."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def are_equal(model, others, prefix=""):
    """Whether the parameters equal `others` to the bit."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return all(torch.equal(p, others[name]) for name, p in named.items())


def assert_close(model, others):
    for (name, p), q in zip(model.named_parameters(), others.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12), (hvd.rank(), name)
