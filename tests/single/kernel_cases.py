"""Cases for kernels: tensors that share their buffers, and NumPy's moves on them.

The moves are put together from reference.py. test_kernels.py holds every kernel to them, to the
bit. Imports no framework. KERNEL_LIBRARY names the library of test_sanitizers.py.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.integers import BLOCK
from scalecom_hvd.lanes import Positions
from scalecom_hvd.reference import integers, is_good, scales, select

if "KERNEL_LIBRARY" in os.environ:
    native.LIBRARY = Path(os.environ["KERNEL_LIBRARY"])
DTYPES = ["float32", "float64", "float16", "bfloat16"]


def residue_dtype(dtype):
    return np.dtype("float64" if dtype == "float64" else "float32")


def stored(values, dtype):
    """Return values as a gradient of this dtype lies in memory: bfloat16 as uint16."""
    with np.errstate(over="ignore", invalid="ignore"):
        memory = values.astype("float32" if dtype == "bfloat16" else dtype)
    if dtype != "bfloat16":
        return memory
    bits = memory.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(bits << 1 > 0xFF000000, 0x7FC0, rounded).astype(np.uint16)


def loaded(memory, dtype):
    """Return the numbers in such memory, in the residue's dtype."""
    if dtype == "bfloat16":
        return (memory.astype(np.uint32) << 16).view(np.float32)
    return memory.astype(residue_dtype(dtype))


def at_the_limit(dtype):
    """Return the largest usable gradient element, the next larger one, and the scale.

    The scale takes the first to the largest gradient that a residue accepts.
    """
    scale = 2.0**90 if dtype == "float16" else 0.5
    taken = largest_gradient(residue_dtype(dtype).name) / scale
    eps = 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps)
    return taken, taken * (1 + eps), scale


def made_up(random, numel, dtype):
    """Return a gradient in memory and a residue. Half of the numbers have many equals."""
    both = random.standard_normal((2, numel))
    both[:, ::2] = np.round(both[:, ::2] * 4) / 4
    return stored(both[0], dtype), both[1].astype(residue_dtype(dtype))


class Taken(NamedTuple):
    """What a step did. sent: the numbers that the values stand for (the oracle only)."""

    residues: list
    values: np.ndarray
    chosen: np.ndarray
    bad: int
    sent: np.ndarray | None = None


class Case:
    """Tensors that share their buffers, and NumPy's moves on them.

    Attributes:
        shapes: {name: geometry}.
        grads, residues: of the tensors, which a test may change. Gradients are as in memory.
        offsets: the bytes of a random selection, with the scales of integers.
        frozen: of each tensor.
        shift: how many elements before a gradient its memory begins.
    """

    def __init__(self, geometries, dtypes, levels=0, beta=0.3, scale=0.5, extra=7 / 3, seed=0):
        self.shapes = {f"t{i}": shape for i, shape in enumerate(geometries)}
        self.dtypes, self.levels, self.scale = dtypes, levels, scale
        self.beta, self.extra = beta, extra
        self.layout = Layout(self.shapes, has_scales=levels > 0)
        self.kind = residue_dtype(dtypes[0])
        self.wire_dtype = np.dtype(np.int8) if levels else self.kind
        self.frozen, self.shift = [False] * len(dtypes), 0
        random = np.random.default_rng(seed)
        made = [made_up(random, s.numel, d) for s, d in zip(geometries, dtypes, strict=True)]
        self.grads, self.residues = [g for g, _ in made], [m for _, m in made]
        others = [random.standard_normal(shape.numel).astype(self.kind) for shape in geometries]
        self.offsets = self._chosen(others, [0 * other for other in others])

    def usable(self):
        """Return each g, with zero for bad elements, and how many are bad."""
        memory = zip(self.grads, self.dtypes, strict=True)
        with np.errstate(over="ignore"):
            g = [self.kind.type(self.scale) * loaded(grad, dtype) for grad, dtype in memory]
        usable = [np.where(is_good(own), own, self.kind.type(0)) for own in g]
        return usable, sum(int((~is_good(own)).sum()) for own in g)

    def indices(self):
        """Return the flat indices that each tensor's offsets stand for."""
        return [
            shape.indices(self.offsets[self.layout.offsets[name]].view(shape.offset_dtype))
            for name, shape in self.shapes.items()
        ]

    def _tensors(self):
        """Return (dtype, g, whether it is frozen, I, where its values are) of each tensor."""
        places = self.layout.values.values()
        return zip(self.dtypes, self.usable()[0], self.frozen, self.indices(), places, strict=True)

    def _sendable(self, m, g):
        """Return the values that m and g send where they are, and how many are not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            more = np.where(m * g >= 0, self.kind.type(self.extra) * m, self.kind.type(0))
            value = m + g + more
        finite = np.isfinite(value)
        return np.where(finite, value, self.kind.type(0)), int((~finite).sum())

    def _chosen(self, residues, gradients):
        """Return the bytes of the winners of |m + g|, with the scales of integers."""
        chosen = np.zeros(self.layout.offsets_bytes, np.uint8)
        for (name, shape), m, g in zip(self.shapes.items(), residues, gradients, strict=True):
            index = select(m + g, shape, "exact" if isinstance(shape, Positions) else "lanes")
            starts, strides = shape.starts_and_strides()
            rows = ((index - starts) // strides).astype(shape.offset_dtype)
            if shape.offset_width:
                chosen[self.layout.offsets[name]] = rows.view(np.uint8)
            if self.levels:
                own = scales(self._sendable(m[index], g[index])[0], self.levels)[::BLOCK]
                chosen[self.layout.scales[name]] = own.astype(np.float32).view(np.uint8)
        return chosen

    def choose(self):
        return self._chosen(self.residues, self.usable()[0])

    def take_and_accumulate(self, chooses=True):
        gradients, bad = self.usable()
        beta, updated = self.kind.type(self.beta), [residue.copy() for residue in self.residues]
        values = np.zeros(self.layout.n_values, self.wire_dtype)
        sent = np.zeros(self.layout.n_values, self.kind)
        of_blocks = self.layout.scales.values()
        for m, scale, (_, g, frozen, index, at) in zip(
            updated, of_blocks, self._tensors(), strict=True
        ):
            if frozen:
                continue
            value, not_finite = self._sendable(m[index], g[index])
            bad += not_finite
            if self.levels:
                each = np.repeat(self.offsets[scale].view(np.float32), BLOCK)[: len(value)]
                values[at] = integers(value, each.astype(self.kind), self.levels)
                sent[at] = values[at] * each.astype(self.kind)
            else:
                values[at] = sent[at] = value
            with np.errstate(invalid="ignore"):
                m[index] -= beta * sent[at]
                m += beta * g
        chosen = self._chosen(updated, gradients) if chooses else np.zeros(0, np.uint8)
        return Taken(updated, values, chosen, bad, sent)

    def scatter(self, values):
        """Return the outputs as they lie in memory."""
        outputs, factor = [], self.kind.type(1 / self.scale)
        for dtype, g, _, index, at in self._tensors():
            dense = np.zeros_like(g)
            with np.errstate(over="ignore"):
                dense[index] = factor * values[at].astype(self.kind)
            outputs.append(stored(dense, dtype))
        return outputs

    def roll_back(self, taken, keeps_gradients=False):
        """Return the residues after a roll-back of what `take_and_accumulate` returned."""
        beta, result = self.kind.type(self.beta), [residue.copy() for residue in taken.residues]
        for m, (_, g, frozen, index, at) in zip(result, self._tensors(), strict=True):
            with np.errstate(invalid="ignore"):
                m[index] += beta * taken.sent[at]
                m -= beta * g * (not (keeps_gradients or frozen))
        return result
