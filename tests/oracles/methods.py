"""The oracle of the methods other than ScaleCom, in plain NumPy. Read it along with their papers.

A method is a function. It is given the accumulators (n, N) of n workers, which hold a bucket's N
compressed elements one tensor after the other. It returns what every worker sends, with zeros
elsewhere. The methods have all the rest in common (Stich et al., 2018):

    acc_i = m_i + grad_i            g = (1/n) * sum_i sent_i
    m_i  <- (1 - beta) * m_i + beta * (acc_i - sent_i)

With decay (SparseLoCo), acc_i = decay * m_i + grad_i. If averages are over contributors, each
element of the sum is divided by the number of workers that sent a nonzero value, and not by n.

Indices are chosen by the accumulators. With flush, workers send more than the accumulator at these
indices: see reference.py.

Random numbers are arguments, because the framework draws them. Imports NumPy and framework-free
rooms only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from scalecom_hvd.lanes import Lanes, geometry
from scalecom_hvd.reference import ScaleComReference, integers, mean, scales, select

BLOCK = 512


class Bucket(NamedTuple):
    """What a method knows besides the accumulators.

    Attributes:
        number: the number of the bucket.
        step: the number of the step.
        tensors: every tensor's geometry, and its range of elements in the bucket.
        selection: "lanes" or "exact".
        sendable: (n, N), the value that each worker sends of an element if it is chosen.
    """

    number: int
    step: int
    tensors: list[tuple[Lanes, slice]]
    selection: str
    sendable: np.ndarray

    @property
    def counts(self) -> list[int]:
        """How many elements of each tensor are sent."""
        return [lanes.k for lanes, _ in self.tensors]


Send = Callable[[np.ndarray, Bucket], np.ndarray]
Places = Callable[[np.ndarray, Bucket], list[np.ndarray]]
# Returns what is sent for a worker's values, given the values and the number of values of each
# tensor.
Quantise = Callable[[np.ndarray, Sequence[int]], np.ndarray]


class MethodReference(ScaleComReference):
    """`n_workers` simulated workers that send by a method; see ScaleComReference for the rest.

    Args:
        n_workers, shapes, config: as ScaleComReference's.
        send: the method, one of the functions below.
        buckets: the names of the tensors of each bucket, in the order of the bucket.
        decay: the decay of residues.
        by_contributors: whether averages are over the workers that sent something.
    """

    def __init__(
        self, n_workers, shapes, config, send: Send, buckets=None, decay=1.0, by_contributors=False
    ) -> None:
        super().__init__(n_workers, shapes, config, buckets)
        self.send, self.decay, self.by_contributors = send, decay, by_contributors
        self.buckets = [list(names) for names in buckets or [self.shapes]]

    def step(self, grads):
        """See ScaleComReference.step. A step is also skipped if its averages overflow."""
        residues, number = [dict(mine) for mine in self.residues], self.step_number
        with np.errstate(over="ignore", invalid="ignore"):
            averages = super().step(grads)
        if all(np.isfinite(average).all() for average in averages.values()):
            return averages
        self.residues, self.step_number = residues, number
        return {name: np.full_like(average, np.nan) for name, average in averages.items()}

    def _average(self, grads):
        whole = {name for name in grads[0] if self._is_sent_whole(name)}
        averages = {
            name: self._average_tensor(name, [worker[name] for worker in grads]) for name in whole
        }
        for number, names in enumerate(self.buckets):
            compressed = [name for name in names if name in grads[0] and name not in whole]
            if compressed:
                averages |= self._average_bucket(number, compressed, grads)
        return averages

    def _average_bucket(self, number, names, grads):
        kind = np.dtype(self.config.residue_dtype_for(str(grads[0][names[0]].dtype)))
        tensors, start = [], 0
        for name in names:
            lanes = geometry(grads[0][name].size, self.rate_of(name), self.config.selection)
            tensors.append((lanes, slice(start, start + lanes.numel)))
            start += lanes.numel
        for mine in self.residues:
            for name in names:
                mine.setdefault(name, np.zeros(self.shapes[name], kind))

        def joined(arrays):
            return np.concatenate([arrays[name].reshape(-1).astype(kind) for name in names])

        m = np.stack([joined(mine) for mine in self.residues])
        g = np.stack([joined(worker) for worker in grads])
        beta, rest = kind.type(self.config.beta), kind.type(1 - self.config.beta)
        accumulators = sendable = kind.type(self.decay) * m + g
        if self.config.extra:
            sendable = sendable + self._more(m, accumulators - m)
        bucket = Bucket(number, self.step_number, tensors, self.config.selection, sendable)
        sent = self.send(accumulators, bucket)
        m = rest * m + beta * (accumulators - sent)
        average = mean(sent)
        if self.by_contributors:
            average = average * kind.type(self.n_workers) / np.maximum((sent != 0).sum(0), 1)

        averages = {}
        for name, (_, elements) in zip(names, tensors, strict=True):
            for i, mine in enumerate(self.residues):
                mine[name] = m[i, elements].reshape(self.shapes[name])
            average_of_it = average[elements].reshape(self.shapes[name])
            averages[name] = average_of_it.astype(grads[0][name].dtype)
        return averages


# Which indices workers send: functions from the accumulators to each worker's indices.


def own(accumulators: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """Every worker chooses its own largest accumulators (Aji and Heafield, 2017)."""
    return [choose(acc, bucket, bucket.selection) for acc in accumulators]


def leaders(accumulators: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """All workers use the indices of the leader's largest accumulators (Chen et al., 2020)."""
    leader = accumulators[bucket.step % len(accumulators)]
    return [choose(leader, bucket, bucket.selection)] * len(accumulators)


def drawn(draw: Callable[[Bucket], Sequence[np.ndarray]]) -> Places:
    """Indices are drawn at random, the same for all workers (Stich et al., 2018).

    Args:
        draw: returns the indices in each of a bucket's tensors.
    """

    def places(accumulators, bucket):
        starts = [elements.start for _, elements in bucket.tensors]
        mine = zip(starts, draw(bucket), strict=True)
        return [np.concatenate([start + chosen for start, chosen in mine])] * len(accumulators)

    return places


# What workers send at these indices.


def sending(places: Places, quantise: Quantise | None = None) -> Send:
    """Workers send their values at these indices, quantised tensor by tensor if asked for.

    Args:
        places: returns each worker's indices.
        quantise: the quantiser; None: values are sent unquantised.
    """

    def send(accumulators, bucket):
        everyone = []
        for worker, chosen in enumerate(places(accumulators, bucket)):
            sent = only(bucket.sendable[worker], chosen)
            if quantise is not None:
                sent[chosen] = quantise(sent[chosen], bucket.counts)
            everyone.append(sent)
        return np.stack(everyone)

    return send


def few_bits(levels: int) -> Send:
    """ScaleCom with few bits: integers from -levels to levels, times the leader's scales."""

    def send(accumulators, bucket):
        chosen, *_ = leaders(accumulators, bucket)
        values = bucket.sendable[bucket.step % len(accumulators), chosen]
        parts = np.split(values, np.cumsum(bucket.counts)[:-1])
        scale = np.concatenate([scales(part, levels) for part in parts])
        sent = np.zeros_like(accumulators)
        for mine, sendable in zip(sent, bucket.sendable, strict=True):
            mine[chosen] = integers(sendable[chosen], scale, levels) * scale
        return sent

    return send


# Quantisers.


def sign(block: int) -> Quantise:
    """Each value becomes its sign times the mean magnitude of its block (Basu et al., 2019)."""

    def quantise(values, counts):
        blocks, back = in_blocks(values, counts, block)
        means = np.abs(blocks).astype(np.float64).sum(1) / np.bincount(back // block)
        scale = means.astype(values.dtype)[:, None]
        return np.where(blocks < 0, -scale, scale).reshape(-1)[back]

    return quantise


def bin_means(block: int) -> Quantise:
    """Each value becomes the mean of its bin.

    Each block has four bins: values are divided by sign, and by whether the magnitude is above the
    block's mean magnitude.
    """

    def quantise(values, counts):
        blocks, back = in_blocks(values, counts, block)
        result = np.empty_like(blocks)
        for row, length, new in zip(blocks, np.bincount(back // block), result, strict=True):
            own = row[:length].astype(np.float64)
            bins = 2 * (np.abs(own) > np.abs(own).sum() / length) + (own < 0)
            sums, sizes = (np.bincount(bins, weights, 4) for weights in (own, None))
            new[:length] = (sums / np.maximum(sizes, 1))[bins]
        return result.reshape(-1)[back]

    return quantise


def in_blocks(
    values: np.ndarray, counts: Sequence[int], block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split every tensor's values into rows of one block each, the last row padded with zeros.

    Returns:
        The rows, and the index of each value in the flattened rows.
    """
    rows, back, row = [], [], 0
    for each in np.split(values, np.cumsum(counts)[:-1]):
        rows.append(np.pad(each, (0, -each.size % block)).reshape(-1, block))
        back.append(row * block + np.arange(each.size))
        row += len(rows[-1])
    return np.concatenate(rows), np.concatenate(back)


def choose(flat: np.ndarray, bucket: Bucket, selection: str) -> np.ndarray:
    """Return the indices, in the bucket, of every tensor's largest magnitudes."""
    return np.concatenate(
        [
            elements.start + select(flat[elements], lanes, selection)
            for lanes, elements in bucket.tensors
        ]
    )


def only(flat: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a copy of `flat` that is zero everywhere except at these indices."""
    sent = np.zeros_like(flat)
    sent[places] = flat[places]
    return sent
