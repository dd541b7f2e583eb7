"""The oracle of the methods other than ScaleCom, in plain NumPy, to be read beside their papers.

A method is a function. Of the accumulators (n, N) of n workers, which hold a bucket's N compressed
elements one tensor after the other, it says what every worker sends, zero elsewhere. All the rest
the methods have in common (Stich et al., 2018):

    acc_i = m_i + grad_i            g = (1/n) * sum_i sent_i
    m_i  <- (1 - beta) * m_i + beta * (acc_i - sent_i)

With decay (SparseLoCo) acc_i = decay * m_i + grad_i. Averaged over contributors, g is divided at
each place by how many sent what is not zero, and not by n.

Places are chosen by accumulators. With flush what is sent there is more: see reference.py.

Random numbers are arguments: they are the framework's. Imports NumPy and framework-free rooms only.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.lanes import Lanes, geometry
from scalecom_hvd.reference import ScaleComReference, largest, mean, select

BLOCK = 512


class Bucket(NamedTuple):
    """What a method knows besides the accumulators.

    Attributes:
        number: the bucket's.
        step: the step's.
        tensors: every tensor's geometry and elements.
        selection: "lanes" or "exact".
        senders: the workers that send, where not all do.
        sendable: (n, N), what each worker would send, were it chosen.
    """

    number: int
    step: int
    tensors: list[tuple[Lanes, slice]]
    selection: str
    senders: list[int] | None
    sendable: np.ndarray

    @property
    def k(self) -> int:
        return sum(lanes.k for lanes, _ in self.tensors)


Send = Callable[[np.ndarray, Bucket], np.ndarray]
Places = Callable[[np.ndarray, Bucket], list[np.ndarray]]
# Random numbers in [0, 1) for a bucket, a worker's number and a shape.
Uniform = Callable[[Bucket, int, tuple[int, ...]], np.ndarray]
# Of a worker's values, how many of them are each tensor's, and a function that gives random numbers
# of a shape: what is sent for these values.
Quantise = Callable[
    [np.ndarray, Sequence[int], Callable[[tuple[int, ...]], np.ndarray]], np.ndarray
]


class MethodReference(ScaleComReference):
    """`n_workers` simulated workers that send by a method; see ScaleComReference for the rest.

    Args:
        n_workers, shapes, config: as ScaleComReference's.
        send: the method, one of the functions below.
        buckets: names of tensors that share a bucket, in its order.
        decay: of residues.
        by_contributors: whether averages are over those who sent something.

    Attributes:
        senders: workers that have something to send, where that changes. The others send nothing,
            and keep their residues. None: all, always.
    """

    def __init__(
        self,
        n_workers: int,
        shapes: Mapping[str, tuple[int, ...]],
        config: ScaleComConfig,
        send: Send,
        buckets: Sequence[Sequence[str]] | None = None,
        decay: float = 1.0,
        by_contributors: bool = False,
    ) -> None:
        super().__init__(n_workers, shapes, config, buckets)
        self.send, self.decay, self.by_contributors = send, decay, by_contributors
        self.senders: list[int] | None = None
        self.buckets = [list(names) for names in buckets or [self.shapes]]

    def step(self, grads: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """As ScaleComReference's. A step whose averages overflow never happened either."""
        residues, number = [dict(mine) for mine in self.residues], self.step_number
        with np.errstate(over="ignore", invalid="ignore"):
            averages = super().step(grads)
        if all(np.isfinite(average).all() for average in averages.values()):
            return averages
        self.residues, self.step_number = residues, number
        return {name: np.full_like(average, np.nan) for name, average in averages.items()}

    def _average(self, grads: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        whole = {name for name in grads[0] if self._is_sent_whole(name)}
        averages = {
            name: self._average_tensor(name, [worker[name] for worker in grads]) for name in whole
        }
        for number, names in enumerate(self.buckets):
            compressed = [name for name in names if name in grads[0] and name not in whole]
            if compressed:
                averages |= self._average_bucket(number, compressed, grads)
        return averages

    def _average_bucket(
        self, number: int, names: list[str], grads: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        kind = np.dtype(self.config.residue_dtype_for(str(grads[0][names[0]].dtype)))
        tensors, start = [], 0
        for name in names:
            lanes = geometry(grads[0][name].size, self.rates[name], self.config.selection)
            tensors.append((lanes, slice(start, start + lanes.numel)))
            start += lanes.numel
        for mine in self.residues:
            for name in names:
                mine.setdefault(name, np.zeros(self.shapes[name], kind))

        def joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
            return np.concatenate([arrays[name].reshape(-1).astype(kind) for name in names])

        m = np.stack([joined(mine) for mine in self.residues])
        g = np.stack([joined(worker) for worker in grads])
        beta, rest = kind.type(self.config.beta), kind.type(1 - self.config.beta)
        accumulators = kind.type(self.decay) * m + g
        sendable = accumulators
        if self.config.extra:
            sendable = sendable + self._more(m, accumulators - m)
        selection = self.config.selection
        bucket = Bucket(number, self.step_number, tensors, selection, self.senders, sendable)
        sent = self.send(accumulators, bucket)
        everyone = range(self.n_workers)
        silent = [i for i in everyone if self.senders is not None and i not in self.senders]
        sent[silent] = 0
        kept = m[silent]
        m = rest * m + beta * (accumulators - sent)
        m[silent] = kept
        average = mean(sent)
        if self.by_contributors:
            average = average * kind.type(self.n_workers) / np.maximum((sent != 0).sum(0), 1)

        averages = {}
        for name, (_, elements) in zip(names, tensors, strict=True):
            for i, mine in enumerate(self.residues):
                mine[name] = m[i, elements].reshape(self.shapes[name])
            averages[name] = average[elements].reshape(self.shapes[name])
        return {name: each.astype(grads[0][name].dtype) for name, each in averages.items()}


# Where workers send: of the accumulators, each worker's places.


def own(accumulators: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """Every worker its own largest (Aji and Heafield, 2017)."""
    return [choose(acc, bucket, bucket.selection) for acc in accumulators]


def leaders(accumulators: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """Every worker where the leader's are largest (Chen et al., 2020)."""
    n, senders = len(accumulators), bucket.senders
    leader = bucket.step % n
    if senders is not None:
        leader = senders[random.Random(bucket.step).randrange(len(senders))]
    return [choose(accumulators[leader], bucket, bucket.selection)] * n


def drawn(draw: Callable[[Bucket, int], Sequence[np.ndarray]]) -> Places:
    """Places drawn at random (Stich et al., 2018).

    Args:
        draw: gives a worker's places in each of a bucket's tensors.
    """

    def places(accumulators: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
        everyone = [
            zip(draw(bucket, i), bucket.tensors, strict=True) for i in range(len(accumulators))
        ]
        return [
            np.concatenate([elements.start + chosen for chosen, (_, elements) in mine])
            for mine in everyone
        ]

    return places


# What they send there.


def local_topk(accumulators: np.ndarray, bucket: Bucket) -> np.ndarray:
    """The values as they are, where each worker's are largest."""
    return sending(own)(accumulators, bucket)


def random_k(draw: Callable[[Bucket], Sequence[np.ndarray]]) -> Send:
    """The values as they are, at the same places, drawn at random."""
    return sending(drawn(lambda bucket, worker: draw(bucket)))


def sending(
    places: Places, quantise: Quantise | None = None, uniform: Uniform | None = None
) -> Send:
    """What workers send at these places: their values, or what a quantiser makes of each tensor's.

    Args:
        places: where each worker sends.
        quantise: the quantiser; None: values as they are.
        uniform: its random numbers.
    """

    def send(accumulators: np.ndarray, bucket: Bucket) -> np.ndarray:
        counts = [lanes.k for lanes, _ in bucket.tensors]
        everyone = []
        for worker, chosen in enumerate(places(accumulators, bucket)):
            sent = only(bucket.sendable[worker], chosen)
            if quantise is not None:
                draw = functools.partial(uniform, bucket, worker)
                sent[chosen] = quantise(sent[chosen], counts, draw)
            everyone.append(sent)
        return np.stack(everyone)

    return send


def global_topk(accumulators: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Every worker where the average is largest."""
    chosen = choose(mean(accumulators), bucket, "exact")
    return np.stack([only(values, chosen) for values in bucket.sendable])


def gtopk(accumulators: np.ndarray, bucket: Bucket) -> np.ndarray:
    """gTop-k (Shi et al., 2019): groups of workers merge two at a time.

    They keep the k largest sums of what their members still send. What is dropped stays with the
    worker that had it; the k is the whole bucket's.
    """
    sent = [
        only(values, largest(acc, bucket.k))
        for values, acc in zip(bucket.sendable, accumulators, strict=True)
    ]
    groups = [[i] for i in range(len(sent))]
    while len(groups) > 1:
        groups = [sum(groups[first : first + 2], []) for first in range(0, len(groups), 2)]
        for group in groups:
            kept = largest(np.sum([sent[i] for i in group], 0), bucket.k)
            for i in group:
                sent[i] = only(sent[i], kept)
    return np.stack(sent)


def ecqsgd(bits: int, uniform: Uniform) -> Send:
    """ECQ-SGD (Wu et al., 2018): every element, in 2s + 1 levels of its block's largest magnitude.

    It is rounded up or down at random.
    """
    quantise = qsgd(2 ** (bits - 1) - 1, BLOCK)

    def send(accumulators: np.ndarray, bucket: Bucket) -> np.ndarray:
        return np.stack(
            [
                quantise(acc, [acc.size], functools.partial(uniform, bucket, worker))
                for worker, acc in enumerate(bucket.sendable)
            ]
        )

    return send


# Quantisers.


def qsgd(s: int, block: int, norm: str | int = "max", divide: float = 1.0) -> Quantise:
    """2s + 1 levels of each block's norm, rounded up or down at random (Alistarh et al., 2017).

    Args:
        s: the levels on either side of zero.
        block: how many values share a norm.
        norm: "max" or 2.
        divide: what values are divided by (Basu et al., 2019).
    """

    def quantise(
        values: np.ndarray,
        counts: Sequence[int],
        random: Callable[[tuple[int, ...]], np.ndarray],
    ) -> np.ndarray:
        kind = values.dtype.type
        blocks, back = in_blocks(values, counts, block)
        scale = np.abs(blocks).max(1)
        if norm == 2:
            scale = np.sqrt(np.square(blocks.astype(np.float64)).sum(1)).astype(kind)
        scale = scale[:, None]
        shares = blocks / np.maximum(scale, np.finfo(kind).tiny) * kind(s)
        levels = np.floor(shares + random(blocks.shape).astype(kind)).clip(-s, s)
        if divide != 1:
            scale = scale / kind(divide)
        return (levels / kind(s) * scale).reshape(-1)[back]

    return quantise


def sign(block: int) -> Quantise:
    """The sign times the mean magnitude in each block (Basu et al., 2019)."""

    def quantise(
        values: np.ndarray,
        counts: Sequence[int],
        random: Callable[[tuple[int, ...]], np.ndarray],
    ) -> np.ndarray:
        blocks, back = in_blocks(values, counts, block)
        lengths = np.bincount(back // block)
        means = np.abs(blocks).astype(np.float64).sum(1) / lengths
        scale = means.astype(values.dtype)[:, None]
        return np.where(blocks < 0, -scale, scale).reshape(-1)[back]

    return quantise


def bin_means(block: int) -> Quantise:
    """The means of four bins of each block: by the sign, and by the mean magnitude."""

    def quantise(
        values: np.ndarray,
        counts: Sequence[int],
        random: Callable[[tuple[int, ...]], np.ndarray],
    ) -> np.ndarray:
        blocks, back = in_blocks(values, counts, block)
        result = np.empty_like(blocks)
        for row, length, new in zip(blocks, np.bincount(back // block), result, strict=True):
            own = row[:length].astype(np.float64)
            large = np.abs(own) > np.abs(own).sum() / length
            bins = 2 * large + (own < 0)
            for members in (bins == which for which in range(4)):
                if members.any():
                    new[:length][members] = own[members].sum() / members.sum()
        return result.reshape(-1)[back]

    return quantise


def float16(limit: float) -> Quantise:
    """Half precision, cut off at a limit."""
    return lambda values, counts, random: (
        values.clip(-limit, limit).astype(np.float16).astype(values.dtype)
    )


def in_blocks(
    values: np.ndarray, counts: Sequence[int], block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Every tensor's values in rows of a block each, the last padded with zeros.

    Returns:
        The rows, and where each value lies in them all.
    """
    rows, back, row = [], [], 0
    for each in np.split(values, np.cumsum(counts)[:-1]):
        padded = np.pad(each, (0, -each.size % block))
        rows.append(padded.reshape(-1, block))
        back.append(row * block + np.arange(each.size))
        row += len(rows[-1])
    return np.concatenate(rows), np.concatenate(back)


def choose(flat: np.ndarray, bucket: Bucket, selection: str) -> np.ndarray:
    """The places in a bucket of every tensor's largest magnitudes."""
    return np.concatenate(
        [
            elements.start + select(flat[elements], lanes, selection)
            for lanes, elements in bucket.tensors
        ]
    )


def only(flat: np.ndarray, places: np.ndarray) -> np.ndarray:
    """What a worker sends that sends only these places."""
    sent = np.zeros_like(flat)
    sent[places] = flat[places]
    return sent
