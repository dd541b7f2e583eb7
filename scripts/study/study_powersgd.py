"""PowerSGD, for comparison: gradients as products of two thin matrices.

PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019, arXiv 1905.13727), as torch.distributed's
communication hook does it: error feedback, factors that start from the last step's factors, and one
power iteration a step:

    P = mean_i (M_i Q);  orthogonalise the columns of P
    Q = mean_i (M_i^T P);  the average is P Q^T, and M_i - P Q^T stays in the residue

M_i is a tensor's accumulator as a matrix (first dimension, all others). A tensor is sent whole if
it has one dimension, or if two factors would not make it smaller.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import torch

import scalecom_hvd.torch as hvd


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
