"""DeMo, for comparison: each worker sends the fast-moving part of its momentum.

Decoupled Momentum Optimization (Peng et al., 2024, arXiv 2411.19870), written as a user's method,
and the optimizer that belongs to it:

    m_i <- decay * m_i + g_i                     the worker's momentum, which is its residue
    q_i  = the largest coefficients of each chunk of DCT(m_i);  m_i <- m_i - DCT^-1(q_i)
    x   <- x - lr * sign(DCT^-1(mean_i q_i))

Chunks have at most 64 elements along each of a matrix's dimensions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

import scalecom_hvd.torch as hvd

CHUNK = 64


class DeMo(hvd.Method):
    """The momentum's largest coefficients, one in `rate`, gathered from all workers.

    Args:
        decay: the momentum's decay.
        **fields: fields of ScaleComConfig; beta is 1.
    """

    def __init__(self, *, decay: float = 0.999, **fields: Any) -> None:
        super().__init__(**{"beta": 1.0} | fields)
        self.decay = decay

    def step(self, bucket, collectives, state):
        spectra = []
        for tensor, part in zip(bucket.tensors, bucket.parts, strict=True):
            part.sub_(tensor.residue, alpha=1 - self.decay)
            spectra.append(Spectrum(tensor.shape, self.residues.rates[tensor.name]))
        indices = [
            spectrum.choose(part) for spectrum, part in zip(spectra, bucket.parts, strict=True)
        ]
        values = [
            spectrum.of(part).gather(1, own)
            for spectrum, part, own in zip(spectra, bucket.parts, indices, strict=True)
        ]

        def restored(chosen, at):
            parts = zip(spectra, chosen, at, strict=True)
            return torch.cat([spectrum.restore(v, i) for spectrum, v, i in parts])

        bucket.send(slice(None), restored(values, indices))
        sizes, shapes = [v.numel() for v in values], [v.shape for v in values]

        def flat(parts):
            return torch.cat([part.reshape(-1) for part in parts])

        def split(joined):
            parts = zip(joined.split(sizes), shapes, strict=True)
            return [part.view(shape) for part, shape in parts]

        their_values = yield from collectives.gather(flat(values), "values")
        their_indices = yield from collectives.gather(flat(indices).short(), "indices")
        for theirs, at in zip(their_values, their_indices, strict=True):
            average = restored(split(theirs * collectives.share), split(at.long()))
            bucket.receive(slice(None), average)


class Spectrum:
    """A tensor's chunks, and their cosine transform.

    Args:
        shape: the tensor's shape. All dimensions but the first are taken as one.
        rate: the number of coefficients of which one is sent.
    """

    def __init__(self, shape: tuple[int, ...], rate: float) -> None:
        rows = shape[0] if len(shape) > 1 else 1
        self._counts, self._sizes = [], []
        for length in (rows, math.prod(shape) // rows):
            size = next(size for size in range(min(CHUNK, length), 0, -1) if length % size == 0)
            self._counts.append(length // size)
            self._sizes.append(size)
        self._waves = [cosines(size) for size in self._sizes]
        self._k = max(1, round(math.prod(self._sizes) / rate))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Transform (N,) to coefficients (chunks, elements of a chunk)."""
        (a, b), (m, n) = self._counts, self._sizes
        chunks = values.reshape(a, m, b, n).transpose(1, 2)
        left, right = self._waves
        return (left @ chunks @ right.T).reshape(a * b, m * n)

    def choose(self, values: torch.Tensor) -> torch.Tensor:
        """The indices (chunks, k) of the largest coefficients of each chunk."""
        return self.of(values).abs().topk(self._k, dim=1).indices

    def restore(self, chosen: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(N,), from coefficients (chunks, k) at these indices. All other coefficients are zero."""
        (a, b), (m, n) = self._counts, self._sizes
        whole = chosen.new_zeros(a * b, m * n).scatter_(1, indices, chosen)
        left, right = self._waves
        return (left.T @ whole.view(a, b, m, n) @ right).transpose(1, 2).reshape(-1)


@functools.cache
def cosines(size: int) -> torch.Tensor:
    """The orthonormal DCT-II as a matrix."""
    waves = torch.arange(size)[:, None] * (torch.arange(size) + 0.5) * math.pi / size
    matrix = torch.cos(waves) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


class Sign(torch.optim.Optimizer):
    """x <- x - lr * sign(gradient)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
