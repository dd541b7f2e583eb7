"""Run an optimizer on all ranks, and compare it step by step with n simulated workers."""

import faces
import numpy as np
import torch
from devices import DEVICE
from faces import hvd
from made_up import ODD_SHAPES, gradients
from models import feed, parameters, same_on_all_ranks
from parity_cases import assert_step_is_the_oracles

from scalecom_hvd.reference import ScaleComReference

# Other devices are slow, and what they may do wrong shows in any step.
STEPS = 12 if DEVICE == "cpu" else 8
TORCH_DTYPES = {np.float16: torch.float16, np.float32: torch.float32, np.float64: torch.float64}


def run_against_reference(
    dtype=np.float32,
    steps=STEPS,
    shapes=ODD_SHAPES,
    tolerance=1e-5,
    stock=False,
    make=None,
    outliers=(),
    **settings,
):
    """Feed the same made-up gradients to real ranks and to the oracle.

    Every average, selection and residue must agree.

    stock: use horovod.torch's own DistributedOptimizer. It is look-ahead, whatever the settings
        say.
    make: a function that returns the functions step and end. step takes gradients, and leaves
        averages in p.grad. Default: by_optimizer.
    outliers: pairs of a rank and a step whose gradients are 1000 times as long.
    """
    settings.setdefault("min_numel", 2)
    n, rank = hvd.size(), hvd.rank()
    model = parameters(shapes, TORCH_DTYPES[dtype])
    named = {"named_parameters": model.items()} if stock else {}
    compressor = hvd.ScaleCom(**named, **settings)
    step_with, end_step = (make or by_optimizer)(model, compressor, faces.stock if stock else hvd)
    reference = ScaleComReference(
        n, shapes, compressor.config.replace(lookahead=True) if stock else compressor.config
    )
    for step in range(steps):
        everyone = [gradients(shapes, r, step, dtype) for r in range(n)]
        for own in (everyone[r] for r, at in outliers if at == step):
            own |= {name: grad * dtype(1000) for name, grad in own.items()}
        step_with(everyone[rank])
        if step == 0 and not stock:
            reference.bucket_of = {
                name: b for b, names in enumerate(compressor.residues.buckets) for name in names
            }
        averages = reference.step(everyone)
        got = {name: parameter.grad.numpy() for name, parameter in model.items()}
        assert {own.dtype for own in got.values()} == {np.dtype(dtype)}
        tensors = compressor.residues.tensors.items()
        residues = {name: t.residue.view(t.shape).numpy() for name, t in tensors}
        assert_step_is_the_oracles(reference, rank, averages, got, residues, tolerance, step)
        end_step()
        if reference.rung is not None:
            assert len(set(hvd.allgather_object(compressor.residues.rung, name="rung"))) == 1
            reference.take_rung(compressor.residues.rung)
    assert same_on_all_ranks(model.values())
    return compressor


def by_optimizer(model, compressor, library):
    optimizer = library.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        named_parameters=model.items(),
        compression=compressor,
    )

    def step(grads):
        optimizer.zero_grad()
        feed(model, grads)
        optimizer.synchronize()

    def end():
        with optimizer.skip_synchronize():
            optimizer.step()

    return step, end
