"""What the tests of thrown-away averages share."""

import re

import numpy as np
import torch
from faces import hvd
from made_up import gradients

SHAPES = {"weight": (60, 100), "bias": (50,)}
WARNS = re.compile("zero_grad|zeroed|thrown away|no step", re.IGNORECASE)


def mine(number):
    """This rank's gradients of one backward pass."""
    own = gradients(SHAPES, hvd.rank(), number)
    return {name: torch.as_tensor(grad) for name, grad in own.items()}


def average(number):
    """The average of these gradients over ranks."""
    everyone = [gradients(SHAPES, rank, number) for rank in range(hvd.size())]
    return {name: sum(each[name] for each in everyone) / hvd.size() for name in SHAPES}


def add(total, grads):
    for name, grad in grads.items():
        total[name] = total.get(name, 0) + grad.astype(np.float64)


def warned(caplog):
    """Whether some rank's log warns of thrown-away averages."""
    messages = [record.getMessage() for record in caplog.records if record.name == "scalecom_hvd"]
    return any(hvd.allgather_object(any(map(WARNS.search, messages)), name="warned"))


def assert_nothing_is_lost_or_warned(model, compressor, real, thrown_away, caplog):
    """Check that what steps used, plus what waits, is what came in, or that a rank has warned.

    What was thrown away may count as come in, or not.
    """
    everywhere = warned(caplog)
    shares = []
    for name, parameter in model.items():
        tensor = compressor.residues.tensors.get(name)
        waits = torch.zeros(parameter.shape) if tensor is None else tensor.residue / tensor.beta
        waits = hvd.allreduce(waits.double().view(parameter.shape), name=f"waits.{name}").numpy()
        here = waits - parameter.detach().double().numpy()
        wanted = [real[name]]
        if tensor is not None:  # a tensor that is sent whole leaves nothing behind
            wanted.append(real[name] + thrown_away[name])
        shares.append(min(np.linalg.norm(here - w) / np.linalg.norm(w) for w in wanted))
    assert max(shares) < 1e-3 or everywhere, (
        f"a share of {max(shares):.3g} is missing, and no warning says so"
    )
