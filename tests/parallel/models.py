"""Small models of PyTorch for the parallel tests."""

import contextlib
import copy
import gc
import io
import time
from pathlib import Path

import numpy as np
import torch
from made_up import gradients

COLLECTIVES = (
    *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather"),
    *("broadcast", "alltoall", "reducescatter", "grouped_reducescatter"),
)
# For the two layers of `make_model`.
SETTINGS = {"rate": 5, "bits": 32, "min_numel": 20}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
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


def take(model, optimizer, step):
    """Take a step with each rank's own batch."""
    from faces import hvd

    optimizer.zero_grad()
    loss(model, hvd.rank(), step).backward()
    optimizer.step()


def assert_close(model, other, rtol=1e-9):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=rtol, atol=1e-12), name


def parameters(shapes: dict, dtype=torch.float32) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()
    }


def feed(model: dict[str, torch.nn.Parameter], grads: dict[str, np.ndarray], skip=()) -> None:
    """Run backward so that every parameter's gradient is the given one.

    Parameters in `skip` get no gradient on this rank.
    """
    loss = torch.zeros(())
    for name, parameter in model.items():
        if name not in skip:
            grad = torch.as_tensor(np.array(grads[name])).to(parameter.dtype)
            loss = loss + (parameter * grad).sum().float()
    if loss.requires_grad:
        loss.backward()


class Given(torch.nn.Module):
    """A model of these parameters. Their gradients are what forward is given."""

    def __init__(self, model: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in model.items():
            self.register_parameter(name, parameter)

    def forward(self, grads):
        as_tensors = {
            name: grad if isinstance(grad, torch.Tensor) else torch.as_tensor(np.array(grad))
            for name, grad in grads.items()
        }
        return sum((self.get_parameter(n) * grad).sum().float() for n, grad in as_tensors.items())


def wrap(library, model, lr=1.0, momentum=0.0, trained=None, options=None, method=None, **settings):
    """Return an SGD that a library's DistributedOptimizer serves, and its method.

    trained: the parameters that the optimizer trains, if they are not the whole model.
    options: the DistributedOptimizer's own. method: default ScaleCom. settings: the method's.
    """
    from faces import hvd, stock

    if library is stock:
        settings["named_parameters"] = model.items()
    trained, compressor = trained or model, (method or hvd.ScaleCom)(**settings)
    sgd = torch.optim.SGD(trained.values(), lr=lr, momentum=momentum)
    optimizer = library.DistributedOptimizer(
        sgd, trained.items(), compression=compressor, **(options or {})
    )
    return optimizer, compressor


def take_steps(optimizer, model, steps, skips=lambda rank, step: (), passes=1, grads=gradients):
    """Train with made-up gradients. skips: the parameters that have none on a rank."""
    from faces import hvd

    shapes, rank = {name: tuple(p.shape) for name, p in model.items()}, hvd.rank()
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            feed(model, grads(shapes, rank, step * passes + part), skips(rank, step))
        optimizer.step()


def through_a_file(state, weights_only=True):
    """What a script loads of a state that it has saved."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def numbers(compressor):
    """Copies of all numbers of a method's state."""
    state = copy.deepcopy(compressor.state_dict())
    return {name: state.get(name) for name in ("residues", "method_state", "step")}


def resume(make, where, stop, end):
    """Check that a run that goes on from a file at step `stop` equals one that never stopped.

    make() -> model, optimizer, compressor. where: "new_optimizer" or "mid_run".
    Returns the compressor.
    """
    model, optimizer, compressor = make()
    take_steps(optimizer, model, range(stop))
    values = {name: p.detach() for name, p in model.items()}
    states = through_a_file([compressor.state_dict(), optimizer.state_dict(), values])
    take_steps(optimizer, model, range(stop, end))
    straight, stats = (copy.deepcopy(model), numbers(compressor)), compressor.stats()
    if where == "new_optimizer":
        model, optimizer, compressor = make()
    compressor.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    with torch.no_grad():
        for name, parameter in model.items():
            parameter.copy_(states[2][name])
    take_steps(optimizer, model, range(stop, end))
    torch.testing.assert_close((model, numbers(compressor)), straight, rtol=0, atol=0)
    assert compressor.stats() == stats
    assert stats["step"] == end
    assert same_on_all_ranks(model.values())
    return compressor


def run_collective(library, kind, x, name, end=""):
    """Run one of Horovod's COLLECTIVES with the rows of x. end: of the function's name.

    Its backward passes a gradient through. Only that of a broadcast leaves it on rank 0.
    """
    run = getattr(library, kind + end)
    wait = library.synchronize if end else (lambda result: result)
    if kind == "grouped_reducescatter":
        return torch.cat(wait(run([x, x], name=name)))
    if kind.startswith("grouped"):
        return torch.cat(wait(run([x[:1], x[1:]], name=name)))
    if kind == "alltoall":
        n = library.size()
        splits = torch.tensor([len(x) - n + 1] + [1] * (n - 1), dtype=torch.int32)
        return wait(run(x, splits, name=name))[0]
    return wait(run(x, *([0] if kind == "broadcast" else []), name=name))


def halve_gradient(parameter) -> None:
    """A hook of a script's own, which is called when the gradient has been accumulated."""
    parameter.grad.mul_(0.5)


def assert_groups_go(trained) -> None:
    """Check that process groups end when what `trained` returns is dropped.

    The garbage collector is off, because it may come much later.
    """

    def threads_of_gloo():
        names = []
        for task in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # the thread has just ended
                names.append(task.read_text())
        return sum("gloo" in name for name in names)

    trained()  # the first time, PyTorch makes reference cycles of its own
    gc.collect()
    gc.disable()
    try:
        before = threads_of_gloo()
        kept = trained()
        during = threads_of_gloo()
        del kept
        # The last reference may be a thread's that has just done its work.
        deadline = time.monotonic() + 30
        while threads_of_gloo() > before and time.monotonic() < deadline:
            time.sleep(0.1)
        after = threads_of_gloo()
    finally:
        gc.enable()
    assert after <= before, f"{after} threads are left, and there were {before}"
    assert after < during


def assert_nothing_is_lost(model, compressor, came_in, divisor=1, process_set=None) -> None:
    """Check that what was sent, plus the ranks' residues, is what came in.

    The parameters must have started at zero, and trained by plain SGD with learning rate 1.

    came_in: {name: the sum of all ranks' gradients of all steps}.
    divisor: the gradients' sum is divided by it. For averages it is the number of ranks.
    """
    from faces import hvd

    among = {} if process_set is None else {"process_set": process_set}
    residues = {
        name: tensor.residue.view(tensor.shape) / tensor.beta
        for name, tensor in compressor.residues.tensors.items()
    }
    left = {name: torch.zeros_like(parameter) for name, parameter in model.items()} | residues
    flat = torch.cat([left[name].detach().double().reshape(-1) for name in model])
    flat = hvd.allreduce(flat, op=hvd.Sum, name="assert_nothing_is_lost", **among) / divisor
    assert flat.any() == bool(residues)
    for (name, parameter), rest in zip(
        model.items(), flat.split([p.numel() for p in model.values()]), strict=True
    ):
        sent = -parameter.detach().double().numpy()
        rest = rest.view(parameter.shape).numpy()
        np.testing.assert_allclose(
            sent + rest,
            np.asarray(came_in[name], np.float64) / divisor,
            rtol=1e-3,
            atol=1e-4,
            err_msg=name,
        )
        assert sent.any() == np.any(came_in[name]), name


def on_some_rank(fact) -> bool:
    """Whether `fact` is true on some rank. All ranks ask together."""
    from faces import hvd

    return bool(hvd.allreduce(torch.tensor(float(fact)), op=hvd.Sum, name="on_some_rank"))


def same_on_all_ranks(tensors, **among) -> bool:
    """Whether tensors are equal to the bit. among: a process_set, if not all ranks ask."""
    from faces import hvd

    flat = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    everyone = hvd.allgather(flat.unsqueeze(0), name="same_on_all_ranks", **among)
    return all(torch.equal(row, everyone[0]) for row in everyone)
