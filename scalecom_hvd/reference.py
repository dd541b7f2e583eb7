"""The oracle: ScaleCom in plain NumPy for n simulated workers. Tests hold all else to it.

The algorithm (Chen et al., NeurIPS 2020, arXiv 2104.11125), at step t with leader j = t mod n:

    acc_i   = m_i + grad_i                                 the accumulator
    I       = top-k coordinates of |acc_j|                 the leader's only
    sent_i  = acc_i at I, zero elsewhere                   every worker, at the leader's coordinates
    g       = (1/n) * sum_i sent_i                         the all-reduce
    m_i    <- (1 - beta) * m_i + beta * (acc_i - sent_i)   low-pass filter (paper, eq. 5)

Multiplied out, a step is two moves. Each is rounded as written here, so a kernel that does the same
operations always makes the same selections:

    (1)  v  = m[I] + grad[I]               what is sent, which is acc at I
         m[I] <- m[I] - beta * v̂           v̂: what was really sent
    (2)  m  <- m + beta * grad

In these units, a residue holds beta times what waits. acc holds the whole gradient, and beta times
what waits. With `flush` (not in the paper), a worker sends everything that waits at the chosen
indices where its new gradient does not point the other way: there v is larger by
(1 / beta - 1) * m.

With `bits` below 32 (not in the paper either), v̂ is an integer times a scale. The leader gives one
scale to each block of its values. With look-ahead, the leader chooses at the end of a step for the
next one. After an outlier, a worker scales its residue down (recent_norms.py). The code is slow
and short on purpose. Imports NumPy, config, lanes, integers, recent_norms and stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from scalecom_hvd.config import ScaleComConfig, largest_gradient
from scalecom_hvd.integers import BLOCK, SMALLEST_SCALE, levels_of, scale_divisor
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.recent_norms import RecentNorms
from scalecom_hvd.stages import LADDER, START, WHOLE, Stage

Array = NDArray[np.floating]
Indices = NDArray[np.int64]


class ScaleComReference:
    """`n_workers` simulated workers, each with a residue per tensor.

    Args:
        n_workers: n.
        shapes: {name: shape}, in the order of the model's layers.
        config: the settings.
        buckets: lists of names, one per bucket. Staggered leaders are counted by them. None: one
            bucket with everything.

    Attributes:
        residues: m, one {name: array shaped like the tensor} per worker.
        step_number: t.
        selections: I, {name: flat indices (k,)} of the last step's compressed tensors.
        rates: {name: own rate}; see config.own_rates_for.
        rung: the rung of rate="auto" (stages.py), which `take_rung` changes.
    """

    def __init__(
        self,
        n_workers: int,
        shapes: Mapping[str, tuple[int, ...]],
        config: ScaleComConfig,
        buckets: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.n_workers = n_workers
        self.config = config.resolved()
        self.shapes = dict(shapes)
        self.rates = self.config.own_rates_for(self.shapes)
        self.rung = START if self.config.rate == "auto" else None
        self._rung_since = 0
        self.bucket_of = {
            name: b for b, names in enumerate(buckets or [list(self.shapes)]) for name in names
        }
        self.residues: list[dict[str, Array]] = [{} for _ in range(n_workers)]
        self.step_number = 0
        self.selections: dict[str, Indices] = {}
        self._chosen_ahead: dict[str, tuple[Indices, Array | None]] = {}
        self.norms: list[dict[str, RecentNorms]] = [{} for _ in range(n_workers)]

    def leader(self, name: str, step: int) -> int:
        """j, the worker that selects for this tensor: t mod n, or (t + b) mod n for bucket b."""
        bucket = self.bucket_of[name] if self.config.leader == "staggered" else 0
        return (step + bucket) % self.n_workers

    def step(self, grads: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """Take one step.

        Args:
            grads: every worker's {name: gradient}. Residues of what all leave out stay.

        Returns:
            g, {name: average}, with the gradients' shapes and dtypes. If any element of any worker
            is bad, the average is NaN everywhere, and the step never happened. Bad elements are not
            finite, or are larger than config.largest_gradient and for a residue.
        """
        names = [name for name in self.shapes if name in grads[0]]
        everyone = [{name: np.asarray(worker[name]) for name in names} for worker in grads]
        if not all(self._is_good(name, worker[name]) for worker in everyone for name in worker):
            first = everyone[0]
            return {name: np.full_like(grad, np.nan) for name, grad in first.items()}
        self.selections = {}
        averages = self._average(everyone)
        self.step_number += 1
        if self._stage_at(self.step_number) != self._stage_at(self.step_number - 1):
            self._chosen_ahead = {}  # it has the lanes of the stage before
        return averages

    def take_rung(self, rung: int) -> None:
        """Go on on this rung from the next step on."""
        if rung != self.rung:
            self.rung, self._rung_since = rung, self.step_number

    def _stage_at(self, step: int) -> Stage:
        if self.rung is not None:
            return LADDER[self.rung]
        return [stage for first, stage in self.config.stages if first <= step][-1]

    @property
    def _levels(self) -> int:
        return levels_of(self._stage_at(self.step_number).bits)

    def _average(self, grads: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        everyone = {name: [worker[name] for worker in grads] for name in grads[0]}
        return {name: self._average_tensor(name, own) for name, own in everyone.items()}

    def _is_good(self, name: str, grad: Array) -> bool:
        if self._is_sent_whole(name):
            return bool(np.isfinite(grad).all())
        return bool(is_good(self._in_residue_dtype(grad)).all())

    def _is_sent_whole(self, name: str) -> bool:
        starts = self.step_number < self.config.warmup_steps
        # On the rung "whole", the first step sends what waits.
        starts = starts or (self.rung == WHOLE and self.step_number > self._rung_since)
        nothing_chosen = self.config.lookahead and name not in self._chosen_ahead
        return self.rates[name] == 1 or starts or nothing_chosen

    def _in_residue_dtype(self, grad: Array) -> Array:
        with np.errstate(over="ignore"):
            return grad.astype(self.config.residue_dtype_for(str(grad.dtype)))

    def _average_tensor(self, name: str, grads: Sequence[Array]) -> Array:
        """Average one tensor's gradients over all workers, and update residues."""
        if self.rates[name] == 1:
            return _mean_whole(grads)
        grad = [self._in_residue_dtype(each).reshape(-1) for each in grads]
        for residues in self.residues:
            residues.setdefault(name, np.zeros(grads[0].shape, grad[0].dtype))
        m = [residues[name].reshape(-1) for residues in self.residues]
        if self._is_sent_whole(name):
            if self.config.lookahead:
                # For lack of the next gradient, the leader chooses by this one.
                guess = [np.where(is_good(each), each, each.dtype.type(0)) for each in grad]
                self._chosen_ahead[name] = self._choose(name, self.step_number + 1, m, guess)
            return _mean_whole(grads)
        ahead, step = self.config.lookahead, self.step_number
        I, scale = self._chosen_ahead[name] if ahead else self._choose(name, step, m, grad)
        sent = self._send(m, grad, I, scale)
        if ahead:
            # The next step's leader chooses from its residue as it is now, plus its gradient. This
            # gradient stands for the next one, which is not known. Without it, the choice would
            # follow stale mass.
            self._chosen_ahead[name] = self._choose(name, step + 1, m, grad)
        self.selections[name] = I
        for norms, own, residue in zip(self.norms, grad, m, strict=True):
            recent = norms.setdefault(name, RecentNorms())
            norm = float(np.linalg.norm(own.astype(np.float64)))
            residue *= residue.dtype.type(recent.share(norm, self.config.outliers))
        average = np.zeros_like(grad[0])
        average[I] = mean(sent)
        return average.reshape(grads[0].shape).astype(grads[0].dtype)

    def _send(
        self, m: list[Array], grad: list[Array], I: Indices, scale: Array | None
    ) -> list[Array]:
        """What every worker sends."""
        beta = m[0].dtype.type(self.config.beta)
        sent = []
        for own, g in zip(m, grad, strict=True):
            v = self._value(own[I], g[I])  # (1)
            if scale is not None:
                v = integers(v, scale, self._levels) * scale
            own[I] -= beta * v
            own += beta * g  # (2)
            sent.append(v)
        return sent

    def _value(self, m: Array, grad: Array) -> Array:
        """v before rounding, at the indices that m and grad are from."""
        return m + grad + self._more(m, grad)

    def _more(self, m: Array, grad: Array) -> Array:
        """What is sent of m besides acc."""
        extra = m.dtype.type(self.config.extra)
        with np.errstate(over="ignore"):
            agrees = m * grad >= 0
        return np.where(agrees, extra * m, m.dtype.type(0))

    def _choose(
        self, name: str, step: int, m: list[Array], grad: list[Array]
    ) -> tuple[Indices, Array | None]:
        """I, and the scales of v there, as the leader of a step chooses them."""
        j = self.leader(name, step)
        acc, levels = m[j] + grad[j], self._levels
        I = select(acc, Lanes(acc.size, self.rate_of(name)), self.config.selection)
        return I, scales(self._value(m[j][I], grad[j][I]), levels) if levels else None

    def rate_of(self, name: str) -> float:
        """The rate at which a compressed tensor is sent in this step."""
        is_whole = self.rung == WHOLE  # its first step sends all that waits
        return (not is_whole and self.rates[name]) or self._stage_at(self.step_number).rate


def select(accumulator: Array, lanes: Lanes, selection: str) -> Indices:
    """The flat indices (k,) of the chosen elements of a flat array (numel,), first of equals.

    selection: "lanes": the largest magnitude of each lane, lane by lane. "exact": the k largest of
    all, in ascending order.
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


def largest(flat: Array, k: int) -> Indices:
    """The indices (k,) of the k largest magnitudes, ascending; first of equals."""
    size = np.abs(flat)
    smallest = np.partition(size, size.size - k)[size.size - k]
    above = np.flatnonzero(size > smallest)
    equal = np.flatnonzero(size == smallest)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def scales(v: Array, levels: int) -> Array:
    """Each value's scale (k,), equal within a block: a part of the mean magnitude in the block.

    A scale is a float32 with 8 significant bits, so its product with any integer that occurs is not
    rounded. Zero stands for a scale that is too small to divide by. v are the leader's values (k,).
    """
    each = []
    for begin in range(0, v.size, BLOCK):
        block = np.abs(v[begin : begin + BLOCK])
        mean = block.sum(dtype=np.float64) / (block.size * scale_divisor(levels))
        short = np.array(min(mean, np.finfo(np.float32).max), np.float32)
        scale = (short.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        each += [scale if scale >= SMALLEST_SCALE else 0] * block.size
    return np.array(each, v.dtype)


def integers(v: Array, scale: Array, levels: int) -> Array:
    """q: the integers nearest to v / scale, of those from -levels to levels; ties go outwards."""
    per_scale = np.zeros_like(scale)
    np.divide(2, scale, out=per_scale, where=scale > 0)
    halves = np.minimum(np.abs(v) * per_scale, v.dtype.type(2 * levels)).astype(np.int32)
    return np.copysign((halves + 1) >> 1, v).astype(v.dtype)


def is_good(g: Array) -> NDArray[np.bool_]:
    """Which gradient elements, in the residue's dtype, a residue takes up."""
    return np.abs(g) <= largest_gradient(str(g.dtype))


def mean(arrays: Sequence[Array]) -> Array:
    """The all-reduce: (1/n) * sum_i arrays[i], added in this order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total / total.dtype.type(len(arrays))


def _mean_whole(grads: Sequence[Array]) -> Array:
    """The average of what is sent whole, in the gradients' dtype. Sums are at least float32."""
    wide = np.promote_types(grads[0].dtype, np.float32)
    return mean([grad.astype(wide) for grad in grads]).astype(grads[0].dtype)
