"""What the tests of thrown-away averages share."""

import re

import numpy as np
import torch
from faces import hvd
from made_up import gradients

SHAPES = {"weight": (60, 100), "bias": (50,)}
WARNS = re.compile("no optimizer step (has )?used")


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


def warnings(caplog):
    """Whether ranks' logs warn of thrown-away averages, one bool for each rank."""
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name == "scalecom_hvd" and record.levelname == "WARNING"
    ]
    return hvd.allgather_object(any(map(WARNS.search, messages)), name="warned")


def share_missing(model, tensors, wanted):
    """How much of the wanted sum of gradients neither steps used, nor waits in residues.

    model: {name: parameter}. tensors: {name: compressed tensor}. wanted: several sums; the one that
    fits a tensor best is its own.
    """
    shares = []
    for name, parameter in model.items():
        tensor = tensors.get(name)
        waits = torch.zeros(parameter.shape) if tensor is None else tensor.residue / tensor.beta
        waits = hvd.allreduce(waits.double().view(parameter.shape), name=f"waits.{name}").numpy()
        here = waits - parameter.detach().double().numpy()
        sums = [each[name] for each in wanted]
        shares.append(min(np.linalg.norm(here - w) / np.linalg.norm(w) for w in sums))
    return max(shares)


def assert_nothing_is_lost(model, tensors, real, caplog):
    """Check that what steps used, plus what waits, is what came in for steps, without a warning."""
    missing = share_missing(model, tensors, [real])
    assert missing < 1e-3, f"a share of {missing:.3g} is missing"
    assert not any(warnings(caplog))


def assert_warned_if_something_is_lost(model, tensors, real, thrown_away, caplog):
    """Check that a rank has warned, unless all is there. What was thrown away may have come in."""
    both = {
        # A tensor that is sent whole leaves nothing behind.
        name: real[name] + (thrown_away[name] if name in tensors else 0)
        for name in real
    }
    missing = share_missing(model, tensors, [real, both])
    assert missing < 1e-3 or any(warnings(caplog)), f"a share of {missing:.3g} is missing"
