"""The oracle: ScaleCom in plain NumPy for n simulated workers. Every framework, kernel and launcher is held to it.

The arithmetic is the algorithm's two moves (Chen et al., eq. 5, multiplied out), each rounded as written here, so that a kernel
that does the same operations makes the same selections for ever:

    (1)  m <- m + beta * g               (2)  v = m[I] + (1 - beta) * g[I],   m[I] <- m[I] - beta * v̂

Slow and short on purpose. Imports NumPy, config and lanes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scalecom_hvd.config import ScaleComConfig, float16_limit, largest_gradient
from scalecom_hvd.lanes import Lanes

Arrays = Mapping[str, np.ndarray]


class ScaleComReference:
    """`n_workers` simulated workers, each with a residue per tensor.

    shapes: {name: shape} in the order of the model's layers, or a sequence of shapes (named "0", "1", ...).
    buckets: lists of names, which staggered leaders are counted by; default: one bucket with everything.
    residues: one {name: array shaped like the tensor} per worker.      step_number: t, the number of steps taken.
    selections: {name: flat indices} of the last step, of compressed tensors alone.
    """

    def __init__(
        self,
        n_workers: int,
        shapes: Mapping[str, tuple] | Sequence[tuple],
        config: ScaleComConfig,
        buckets: Sequence[Sequence[str]] | None = None,
    ) -> None:
        if not isinstance(shapes, Mapping):
            shapes = {str(i): shape for i, shape in enumerate(shapes)}
        self.n_workers = n_workers
        self.config = config
        self.shapes = dict(shapes)
        self.rates = config.rates_for(self.shapes)
        self.bucket_of = {name: b for b, names in enumerate(buckets or [list(self.shapes)]) for name in names}
        self.residues: list[dict[str, np.ndarray]] = [{} for _ in range(n_workers)]
        self.step_number = 0
        self.selections: dict[str, np.ndarray] = {}
        self._chosen_ahead: dict[str, np.ndarray] = {}

    def leader(self, name: str, step: int) -> int:
        """Who selects for this tensor at this step: t mod n, or (t + b) mod n for bucket b."""
        bucket = self.bucket_of[name] if self.config.leader == "staggered" else 0
        return (step + bucket) % self.n_workers

    def step(self, grads: Sequence[Arrays | Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """One step: every worker's gradients in, the averaged gradients out (float dtype of the gradients, shaped like them).

        If any element of any worker is bad, the result is NaN everywhere, and the step never happened. What is sent whole is bad where it
        is not finite, what a residue is to take up also where it is larger than largest_gradient.
        """
        grads = [dict(zip(self.shapes, g, strict=True)) if not isinstance(g, Mapping) else g for g in grads]
        if not all(self._is_good(name, np.asarray(g[name])) for g in grads for name in self.shapes):
            return {name: np.full(shape, np.nan, grads[0][name].dtype) for name, shape in self.shapes.items()}

        self.selections = {}
        averages = self._average([{name: np.asarray(g[name]) for name in self.shapes} for g in grads])
        self.step_number += 1
        return averages

    def _average(self, grads: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: self._exchange(name, [g[name] for g in grads]) for name in self.shapes}

    def _is_good(self, name: str, grad: np.ndarray) -> bool:
        if self._is_sent_whole(name):
            return bool(np.isfinite(grad).all())
        kind = self._residue_dtype(grad)
        with np.errstate(over="ignore"):
            return bool(is_good(grad.astype(kind)).all())

    def _is_sent_whole(self, name: str) -> bool:
        too_early = self.step_number < self.config.warmup_steps or (self.config.lookahead and name not in self._chosen_ahead)
        return self.rates[name] == 1 or too_early

    def _residue_dtype(self, grad: np.ndarray) -> np.dtype:
        return np.dtype(self.config.residue_dtype_for(str(grad.dtype)))

    def _exchange(self, name: str, tensors: list[np.ndarray]) -> np.ndarray:
        shape, dtype = tensors[0].shape, tensors[0].dtype
        kind = self._residue_dtype(tensors[0])
        with np.errstate(over="ignore"):
            g = [tensor.reshape(-1).astype(kind) for tensor in tensors]
        if self._is_sent_whole(name):
            wide = np.promote_types(dtype, np.float32)
            whole = mean([tensor.astype(wide) for tensor in tensors]).astype(dtype)
        if self.rates[name] == 1:
            return whole
        for residues in self.residues:
            residues.setdefault(name, np.zeros(shape, kind))
        m = [residues[name].reshape(-1) for residues in self.residues]

        lanes = Lanes(g[0].size, self.rates[name])
        beta, rest = kind.type(self.config.beta), kind.type(1 - self.config.beta)
        j, following = self.leader(name, self.step_number), self.leader(name, self.step_number + 1)
        ahead = self.config.lookahead

        if self._is_sent_whole(name):
            # Residues stay as they are. A look-ahead leader chooses on the gradient just seen, the best guess there is.
            guess = np.where(is_good(g[following]), g[following], 0)
            self._chosen_ahead[name] = select(m[following] + guess, lanes, self.config.selection)
            return whole

        if ahead:
            I = self._chosen_ahead[name]  # noqa: E741
            sent = [self._send(m[i], m[i][I] + g[i][I], I, beta) for i in range(self.n_workers)]
            for i in range(self.n_workers):
                m[i] += beta * g[i]
            self._chosen_ahead[name] = select(m[following], lanes, self.config.selection)
        else:
            I = select(m[j] + g[j], lanes, self.config.selection)  # noqa: E741
            for i in range(self.n_workers):
                m[i] += beta * g[i]
            sent = [self._send(m[i], m[i][I] + rest * g[i][I], I, beta) for i in range(self.n_workers)]

        self.selections[name] = I
        average = np.zeros(g[0].size, kind)
        average[I] = mean(sent)
        return average.reshape(shape).astype(dtype)

    def _send(self, m: np.ndarray, v: np.ndarray, I: np.ndarray, beta: np.floating) -> np.ndarray:  # noqa: E741
        """What travels for the values `v`: rounded to the wire dtype. The rest stays in the residue `m`."""
        if self.config.wire_dtype == "float16":
            limit = float16_limit(self.n_workers)
            v = np.clip(v, -limit, limit).astype(np.float32).astype(np.float16).astype(m.dtype)
        m[I] -= beta * v
        return v


def select(accumulator: np.ndarray, lanes: Lanes, selection: str) -> np.ndarray:
    """The flat indices (k,) of the chosen elements of a flat array, first of equals.

    "lanes": the largest magnitude of each lane, lane by lane. "exact": the k largest of all, in ascending order.
    """
    if selection == "exact":
        return largest(accumulator, lanes.k)
    size, winners = np.abs(accumulator), []
    for elements, groups, width in lanes.groups():
        block = size[elements]
        padded = np.full(-(-block.size // (groups * width)) * groups * width, -1, block.dtype)
        padded[: block.size] = block
        winners.append(padded.reshape(groups, -1, width).argmax(axis=1).reshape(-1))
    return lanes.indices(np.concatenate(winners)) if winners else np.zeros(0, np.int64)


def largest(flat: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest magnitudes, ascending; first of equals."""
    size = np.abs(flat)
    smallest = np.partition(size, size.size - k)[size.size - k]
    above = np.flatnonzero(size > smallest)
    equal = np.flatnonzero(size == smallest)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def is_good(g: np.ndarray) -> np.ndarray:
    """Which gradient elements, in the residue's dtype, a residue takes up."""
    return np.abs(g) <= largest_gradient(str(g.dtype))


def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The all-reduce."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total / total.dtype.type(len(arrays))
