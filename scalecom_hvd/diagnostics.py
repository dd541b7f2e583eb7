"""Diagnostics: how alike workers are, and how good the choice of sent elements is.

ScaleCom rests on two observations: workers' residues become alike, and so one worker's choice is
nearly as good as the true top-k of what all workers have together (Chen et al., NeurIPS 2020, arXiv
2104.11125, sections 2 and 3). This module turns both into numbers of a user's own training.

Frameworks bring arrays of NumPy.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalecom_hvd.lanes import Lanes, Positions

Numbers = Mapping[str, float | int | None]
Array = NDArray[np.floating]

# The sample.

# About how many elements are looked at, spread over all compressed tensors. If there are no more
# than that, all are. Every rank gathers two floats per element and rank.
SAMPLE = 65536


@dataclass(frozen=True)
class Piece:
    """The part of the sample that is of one tensor: whole lanes, one after the other."""

    positions: NDArray[np.int64]  # in the flat tensor (S,)
    lengths: NDArray[np.int64] | None  # of the lanes; None: there are none, but single elements
    k: int  # how many elements of this piece a worker would send if it chose for itself

    def choose(self, accumulator: Array) -> NDArray[np.int64]:
        """A worker's own choice: indices (k,) in the piece, from its accumulator (S,)."""
        size = np.abs(accumulator)
        if self.lengths is None:
            return np.argpartition(size, size.size - self.k)[size.size - self.k :]
        # Sorted by lanes and magnitudes, each lane begins with its largest, the first of equals.
        order = np.lexsort((-size, np.repeat(np.arange(self.k), self.lengths)))
        return order[np.cumsum(self.lengths) - self.lengths]


def draw(geometries: Mapping[str, Lanes]) -> dict[str, Piece]:
    """The sample: {name: piece} of whole lanes, drawn at random from every tensor.

    Every tensor contributes in proportion to its size, but at least one lane. The sample depends
    only on the geometries, {name: geometry} of all compressed tensors, so it is the same on all
    ranks and in every run.
    """
    share = SAMPLE / max(sum(geometry.numel for geometry in geometries.values()), 1)
    return {name: _draw_from(own, share, name) for name, own in sorted(geometries.items())}


def _draw_from(geometry: Lanes, share: float, name: str) -> Piece:
    random = np.random.default_rng(zlib.crc32(name.encode()))

    def some(of: int) -> NDArray[np.int64]:
        if share >= 1:
            return np.arange(of)
        return np.sort(random.choice(of, max(round(of * share), 1), replace=False))

    if isinstance(geometry, Positions):
        positions = some(geometry.numel)
        k = max(round(positions.size * geometry.k / geometry.numel), 1)
        return Piece(positions, None, k)
    lanes = some(geometry.k)
    starts, strides = (each[lanes] for each in geometry.starts_and_strides())
    lengths = geometry.lengths()[lanes]
    row = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.repeat(starts, lengths) + row * np.repeat(strides, lengths)
    return Piece(positions, lengths, len(lengths))


# The numbers. Workers i = 1 .. n have residues m_i before the step and accumulators
# acc_i = m_i + g_i; y is the mean of acc_i over workers, and s the average that was sent.


def share_sent(residue: Array, accumulator: Array, new_residue: Array, beta: float) -> float:
    """The share of its accumulator that a worker sent: ||sent_i||^2 / ||acc_i||^2, or NaN.

    It is found from the new residue, new = (1 - beta) m + beta (acc - sent) (paper, equation 5), so
    methods need not report it. All arrays are of the sample (S,).
    """
    m, acc, new = (np.asarray(array, np.float64) for array in (residue, accumulator, new_residue))
    sent = acc - (new - (1 - beta) * m) / beta
    whole = float(acc @ acc)
    return float(sent @ sent) / whole if whole > 0 else math.nan


def look(
    residues: Array,
    accumulators: Array,
    average: Array,
    shares_sent: Array,
    pieces: Sequence[Piece],
) -> dict[str, float | int | None]:
    """All numbers of one look. docs/guide.md says what each of them means.

    Top-k is taken in every tensor, and k is how many elements of it were sent (where s is not
    zero). By distance_to_top_k, d/k, the paper's Lemma 1 bounds the contraction: d/k + (1 - d/k)
    contraction_top_k. The union of workers' own choices is what local top-k would have to send.

    Args:
        residues: m_i (n, S) before the step.
        accumulators: acc_i (n, S).
        average: s (S,).
        shares_sent: every worker's `share_sent` (n,).
        pieces: those of the sample, in the order of the S elements.

    Returns:
        {name: number}. A number is None if it means nothing, as for pairs of workers if there is
        only one, or for directions of zeros.
    """
    residues, accumulators, average = (
        np.asarray(array, np.float64) for array in (residues, accumulators, average)
    )
    y = accumulators.mean(axis=0)
    sent, chosen = average != 0, np.zeros(y.size, bool)
    missed, top_energy, start = 0, 0.0, 0
    for piece in pieces:
        of_piece = slice(start, start + piece.positions.size)
        for accumulator in accumulators[:, of_piece]:
            chosen[start + piece.choose(accumulator)] = True
        missed_here, top_here = _against_top_k(np.abs(y[of_piece]), sent[of_piece])
        missed, top_energy, start = missed + missed_here, top_energy + top_here, of_piece.stop
    energy, k = float(y @ y), int(np.count_nonzero(sent))
    norms = np.linalg.norm(residues, axis=1)
    known = shares_sent[~np.isnan(shares_sent)]
    return {
        "residue_distance": _mean_distance(residues),
        "distance_to_top_k": _ratio(missed, k),
        "contraction": _ratio(np.sum((y - average) ** 2), energy),
        "contraction_top_k": _ratio(max(energy - top_energy, 0.0), energy),
        "energy_sent": _ratio(known.sum(), known.size),
        "residue_norm_mean": float(norms.mean()),
        "residue_norm_ratio": _ratio(norms.mean(), np.linalg.norm(y - residues.mean(axis=0))),
        "union_density": np.count_nonzero(chosen) / y.size,
        "sent_density": k / y.size,
    }


def _ratio(part: float | np.floating, whole: float | np.floating) -> float | None:
    return float(part / whole) if whole > 0 else None


def _against_top_k(size: Array, sent: NDArray[np.bool_]) -> tuple[int, float]:
    """How many of the k sent elements are not among the k largest; and those k's sum of squares.

    Among equal elements, as few as possible count as missed.
    """
    k = int(np.count_nonzero(sent))
    if k == 0:
        return 0, 0.0
    largest = np.partition(size, size.size - k)[size.size - k :]
    smallest = largest.min()
    above, equal = np.count_nonzero(size[sent] > smallest), np.count_nonzero(size[sent] == smallest)
    places_for_equals = np.count_nonzero(largest == smallest)
    return int(k - above - min(equal, places_for_equals)), float(largest @ largest)


def _mean_distance(vectors: Array) -> float | None:
    """The mean of 1 - cos over pairs of rows that are not zero."""
    norms = np.linalg.norm(vectors, axis=1)
    vectors = vectors[norms > 0] / norms[norms > 0, None]
    if len(vectors) < 2:
        return None
    cosines = vectors @ vectors.T
    return float(1 - cosines[np.triu_indices(len(vectors), 1)].mean())
