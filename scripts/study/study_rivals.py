"""Rivals of the package's methods, for comparison only, written as users' methods.

DeMo: each worker sends the fast-moving part of its momentum. Decoupled Momentum Optimization (Peng
et al., 2024, arXiv 2411.19870), with the optimizer that belongs to it (`Sign`):

    m_i <- decay * m_i + g_i                     the worker's momentum, which is its residue
    q_i  = the largest coefficients of each chunk of DCT(m_i);  m_i <- m_i - DCT^-1(q_i)
    x   <- x - lr * sign(DCT^-1(mean_i q_i))

Chunks have at most 64 elements along each of a matrix's dimensions.

PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy and Jaggi, NeurIPS 2019,
arXiv 1905.13727), as torch.distributed's communication hook does it: error feedback, factors that
start from the last step's factors, and one power iteration a step:

    P = mean_i (M_i Q);  orthogonalise the columns of P
    Q = mean_i (M_i^T P);  the average is P Q^T, and M_i - P Q^T stays in the residue

M_i is a tensor's accumulator as a matrix (first dimension, all others). A tensor is sent whole if
it has one dimension, or if two factors would not make it smaller.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
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
        found = [spectrum.of(part) for spectrum, part in zip(spectra, bucket.parts, strict=True)]
        indices = [s.largest(whole) for s, whole in zip(spectra, found, strict=True)]
        values = [whole.gather(1, own) for whole, own in zip(found, indices, strict=True)]

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

    def largest(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The indices (chunks, k) of the largest coefficients of each chunk."""
        return coefficients.abs().topk(self._k, dim=1).indices

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


class SignOfValues(hvd.Quantiser):
    """The sign, in one bit, times the mean magnitude in the block of values.

    With a top-k choice, this is Qsparse's SignTop-k (Basu et al., 2019, arXiv 1906.02367).
    """

    bits = 1

    def quantise(self, blocks, counts):
        scales = blocks.abs().double().sum(1) / counts
        return scales.to(blocks.dtype)[:, None], -(blocks < 0).to(torch.int8)

    def restore(self, scales, levels):
        return torch.where(levels < 0, -scales, scales)


class Sign(torch.optim.Optimizer):
    """x <- x - lr * sign(gradient)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Lion(torch.optim.Optimizer):
    """Steps along the sign of a momentum (Chen et al., 2023, arXiv 2302.06675)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(momentum.lerp(grad, 1 - first).sign(), alpha=group["lr"])
                momentum.lerp_(grad, 1 - second)


class Muon:
    """PyTorch's Muon for matrices, and AdamW for all other tensors."""

    def __init__(self, parameters: Any) -> None:
        kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for parameter in parameters:
            kinds[parameter.dim() == 2].append(parameter)
        self._both = (
            torch.optim.Muon(kinds[True], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(kinds[False], weight_decay=0.0),
        )
        self.param_groups = [group for one in self._both for group in one.param_groups]

    def step(self) -> None:
        for one in self._both:
            one.step()


OPTIMIZERS = {"lion": Lion, "muon": Muon}


class PowerSGD(hvd.Method):
    """Sends factors of this rank, by two averages a step.

    Args:
        factors: the rank of the product.
        **fields: fields of ScaleComConfig; beta and nu are 1. `rate` means nothing, except that
            with 1 everything is sent whole.
    """

    equal_state = ("q",)

    def __init__(self, *, factors: int, **fields: Any) -> None:
        super().__init__(**{"beta": 1.0, "nu": 1.0} | fields)
        self.factors = factors

    def init(self, tensor):
        rows, columns = sides(tensor.shape)
        seed = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
        return {"q": torch.randn(columns, min(self.factors, rows, columns), generator=seed)}

    def step(self, bucket, collectives, state):
        names = [tensor.name for tensor in bucket.tensors]
        parts = zip(bucket.tensors, bucket.parts, strict=True)
        matrices = [part.view(sides(tensor.shape)) for tensor, part in parts]
        thin = [is_thin(tensor.shape, self.factors) for tensor in bucket.tensors]
        q = [state.tensors[name]["q"] for name in names]
        p = [m @ own if fits else m for m, own, fits in zip(matrices, q, thin, strict=True)]
        p = yield from self._averaged(p, collectives, "p")
        q_of = [i for i, fits in enumerate(thin) if fits]
        for i in q_of:
            p[i] = torch.linalg.qr(p[i]).Q
        new = yield from self._averaged([matrices[i].T @ p[i] for i in q_of], collectives, "q")
        new_q = dict(zip(q_of, new, strict=True))
        products = [p[i] @ new_q[i].T if i in new_q else p[i] for i in range(len(p))]
        average = torch.cat([product.reshape(-1) for product in products])
        # For what is sent whole, the product is the average, and nothing stays in the residue.
        sent = [product if i in new_q else matrices[i] for i, product in enumerate(products)]
        bucket.send(slice(None), torch.cat([part.reshape(-1) for part in sent]))
        bucket.receive(slice(None), average)
        tensors = {names[i]: {"q": own} for i, own in new_q.items()}
        return dataclasses.replace(state, tensors={**state.tensors, **tensors})

    @staticmethod
    def _averaged(matrices, collectives, name):
        flat = torch.cat([matrix.reshape(-1) for matrix in matrices])
        average = yield from collectives.average(flat, name)
        parts = average.split([matrix.numel() for matrix in matrices])
        return [part.view(m.shape) for part, m in zip(parts, matrices, strict=True)]


def sides(shape: torch.Size) -> tuple[int, int]:
    """The rows and columns of a tensor as a matrix."""
    return (shape[0], shape.numel() // shape[0]) if shape.numel() else (0, 0)


def is_thin(shape: torch.Size, factors: int) -> bool:
    """Whether two factors are smaller than half of the tensor, as torch's hook requires."""
    rows, columns = sides(shape)
    return len(shape) > 1 and 2 * factors * (rows + columns) < rows * columns
