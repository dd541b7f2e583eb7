"""Simulated ranks whose parameters are zeros, their made-up gradients, and how they are compared.

Where functions take no shapes, they are those of SHAPES in parallel/made_up.py.
"""

import numpy as np
import torch
from parallel.made_up import SHAPES, gradients

from scalecom_hvd.exchange.simulator import Simulation


def simulate(n, shapes=SHAPES, dtype=torch.float32, device="cpu", **settings):
    def parameters(_):
        return {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            for name, shape in shapes.items()
        }

    return Simulation(n, parameters, **settings)


def made_up(n, step, shapes=SHAPES):
    """Return all ranks' gradients of a step."""
    return [gradients(shapes, rank, step) for rank in range(n)]


def as_tensors(grads, scale=1, device="cpu"):
    """Return copies of arrays that are gradients of ranks."""
    return [
        {name: torch.tensor(array, device=device) * scale for name, array in own.items()}
        for own in grads
    ]


def residues_of(simulation):
    """Return copies of all ranks' residues."""
    return [
        {name: t.residue.clone() for name, t in compressor.residues.tensors.items()}
        for compressor in simulation.compressors
    ]


def assert_same(one, other):
    """Assert that all tensors in both are equal to the bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def step_as(reference, simulation, grads, tolerance=1e-6, of_residues=0.0, rolled_back=0.0):
    """Take a step in both, compare all ranks' averages and residues, and return the averages.

    tolerance, of_residues: how far averages, and residues, may be apart.
    rolled_back: how far residues may be apart after a step that does not count. Both then go on
        with the simulation's.
    """
    steps = reference.step_number
    (device,) = {p.device for p in simulation.parameters[0].values()}
    outputs = simulation.step(as_tensors(grads, device=device))
    buckets = simulation.compressors[0].residues.buckets
    reference.bucket_of = {name: b for b, names in enumerate(buckets) for name in names}
    averages = reference.step(grads)
    counts = reference.step_number > steps
    for name, want in averages.items():
        first, *others = (output[name].cpu().numpy() for output in outputs)
        np.testing.assert_allclose(
            first, want, tolerance, tolerance, err_msg=f"{name}, step {steps}"
        )
        for other in others:
            np.testing.assert_array_equal(other, first, f"{name}, step {steps}")
    allowed = of_residues if counts else rolled_back
    for compressor, residues in zip(simulation.compressors, reference.residues, strict=True):
        for name, tensor in compressor.residues.tensors.items():
            got = tensor.residue.view(tensor.shape).numpy(force=True).copy()
            want = residues.get(name, np.zeros_like(got))
            np.testing.assert_allclose(got, want, allowed, allowed, err_msg=f"{name}, step {steps}")
            residues[name] = want if counts else got
    assert reference.step_number == simulation.compressors[0].stats()["step"]
    return outputs
