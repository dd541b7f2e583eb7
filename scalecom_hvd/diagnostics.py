"""Diagnostics: how alike workers are, and how good the choice of sent elements is.

ScaleCom rests on two observations: workers' residues become alike, and so one worker's choice is
nearly as good as the true top-k of what all workers have together (Chen et al., NeurIPS 2020, arXiv
2104.11125, sections 2 and 3). This module turns both into numbers of a user's own training, for
ScaleCom and for other methods. The numbers are computed on a sample of the model, every so many
steps.

`Diagnostics` holds the settings, `draw` chooses the sample, `look` turns what was seen at the
sample into numbers, and `Writer` writes them down. Everything is NumPy and knows no framework: the
frameworks bring the arrays. Imports only lanes.
"""

from __future__ import annotations

import csv
import importlib.util
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scalecom_hvd.lanes import Lanes, Positions

log = logging.getLogger("scalecom_hvd")

FilePath = str | os.PathLike[str]
Look = dict[str, float | int | None]
Array = NDArray[np.floating]

# What `look` gives, in the order of a CSV file's columns; "step" comes first there.
NAMES = (
    "residue_distance",
    "accumulator_distance",
    "distance_to_top_k",
    "contraction",
    "contraction_top_k",
    "energy_sent",
    "residue_norm_mean",
    "residue_norm_min",
    "residue_norm_max",
    "residue_norm_ratio",
    "union_density",
    "sent_density",
    "quantile_correlation",
    "quantile_slope_max",
    "sample_size",
)
COLUMNS = ("step", *NAMES)
# How many pairs of workers have their sorted residues compared.
QUANTILE_PAIRS = 8


@dataclass(frozen=True)
class Diagnostics:
    """Says which steps are looked at, how much of the model is, and where the numbers go.

    The numbers go to stats()["diagnostics"], and to files if you name some. Only the rank at
    position 0 writes files. Give every optimizer files of its own. `every` and `sample` must be the
    same on all ranks.

    Args:
        every: look at steps 0, every, 2 every, ..., except those that are sent whole.
        csv: a file to which each look appends one row. The file's first line has the column names.
        tensorboard: a directory for TensorBoard. There the numbers are called scalecom/<name>.
        sample: about how many elements are looked at, spread over all compressed tensors. If there
            are no more than that, all are looked at. Every rank gathers two floats per element and
            rank.

    Raises:
        ImportError: TensorBoard is asked for, but not installed.
        TypeError: a setting has a type that cannot work.
        ValueError: a setting has a value that cannot work, such as a file with other columns.
    """

    every: int = 50
    csv: FilePath | None = None
    tensorboard: FilePath | None = None
    sample: int = 65536

    def __post_init__(self) -> None:
        self._check_number("every", "the number of steps from one measurement to the next")
        self._check_number("sample", "the number of elements to sample")
        for name in ("csv", "tensorboard"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise TypeError(f"diagnostics: {name} must be a path, not {value!r}")
        if self.csv is not None:
            _check_csv(Path(self.csv))
        if self.tensorboard is not None:
            check_tensorboard("diagnostics")

    def _check_number(self, name: str, what: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"diagnostics: {name} must be a whole number, not {value!r}. It is {what}"
            )
        if value < 1:
            raise ValueError(f"diagnostics: {name} must be at least 1, not {value}. It is {what}")

    @classmethod
    def of(cls, value: Diagnostics | int | None) -> Diagnostics | None:
        """The Diagnostics that a user asked for by `diagnostics=`.

        Args:
            value: None (no diagnostics), a number of steps (`every`), or Diagnostics.

        Raises:
            TypeError: it is none of these.
            ValueError: the number of steps cannot work.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(every=value)
        raise TypeError(
            "diagnostics must be a number of steps, such as 50, or hvd.Diagnostics(every=50, "
            f"csv=...), not {value!r}"
        )

    @property
    def settings(self) -> dict[str, int]:
        """What ranks must have in common."""
        return {"diagnostics.every": self.every, "diagnostics.sample": self.sample}


# The sample.


@dataclass(frozen=True)
class Piece:
    """The part of the sample that is of one tensor.

    It holds whole lanes, one after the other, or single elements if the geometry has no lanes.

    Args:
        positions: in the flat tensor (S,).
        lengths: of the lanes; None: there are none.
        k: how many elements of this piece a worker would send if it chose for itself.
    """

    positions: NDArray[np.int64]
    lengths: NDArray[np.int64] | None
    k: int

    def choose(self, accumulator: Array) -> NDArray[np.int64]:
        """A worker's own choice in this piece.

        Args:
            accumulator: (S,).

        Returns:
            Indices (k,) in the piece: each lane's largest magnitude, first of equals; or the k
            largest.
        """
        size = np.abs(accumulator)
        if self.lengths is None:
            return np.argpartition(size, size.size - self.k)[size.size - self.k :]
        # Put lanes into rows of one table, padded with a number that is smaller than any magnitude.
        starts = np.cumsum(self.lengths) - self.lengths
        column = np.arange(self.lengths.max())
        inside = column < self.lengths[:, None]
        table = np.full(inside.shape, -1, size.dtype)
        table[inside] = size
        return starts + table.argmax(axis=1)


def draw(geometries: Mapping[str, Lanes], sample: int) -> dict[str, Piece]:
    """The sample: whole lanes drawn at random from every tensor.

    Every tensor contributes in proportion to its size, but at least one lane. The sample depends
    only on the arguments, so it is the same on all ranks and in every run.

    Args:
        geometries: {name: geometry} of all compressed tensors.
        sample: about how many elements to draw. If there are no more than that, all are drawn.

    Returns:
        {name: piece}, in the order of names.
    """
    numel = sum(geometry.numel for geometry in geometries.values())
    share = min(sample / max(numel, 1), 1.0)
    return {
        name: _draw_from(geometries[name], share, zlib.crc32(name.encode()))
        for name in sorted(geometries)
    }


def _draw_from(geometry: Lanes, share: float, seed: int) -> Piece:
    random = np.random.default_rng(seed)

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
    """The share of its accumulator that a worker sent: ||sent_i||^2 / ||acc_i||^2.

    It is found from the new residue, new = (1 - beta) m + beta (acc - sent) (paper, equation 5), so
    methods need not report it.

    Args:
        residue: m (S,), before the step.
        accumulator: acc (S,).
        new_residue: new (S,).
        beta: that of the filter.

    Returns:
        The share; NaN if the accumulator was zero.
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
) -> Look:
    """All numbers of one look.

    How alike workers are (section 2 of the paper calls this similarity of local memories; there it
    goes to 0 during training):

    residue_distance: the mean over pairs of workers of 1 - cos(m_i, m_j). 0: the same direction. 1:
        nothing in common.
    accumulator_distance: the same for acc_i and acc_j.
    quantile_correlation: the correlation of two workers' sorted residues, which says how straight
        their Q-Q plot is. 1: one distribution is the other one, scaled and moved. It is the mean
        over neighbours (1, 2), (2, 3), ..., at most 8 pairs.
    quantile_slope_max: among these pairs, the largest |sd(m_i) / sd(m_j) - 1|: how far the Q-Q
        plot's slope is from 1.

    How good the choice is. Here top-k is taken in every tensor, and k is how many elements of it
    were sent (where s is not zero):

    distance_to_top_k: d/k, the share of what was sent that is not in the true top-k of |y|. 0: the
        perfect choice. 2d is the Hamming distance of the two choices. By it the paper's Lemma 1
        bounds the contraction: d/k + (1 - d/k) gamma_0.
    contraction: ||y - s||^2 / ||y||^2, the coefficient gamma of that lemma. 0: everything was sent.
        1: nothing.
    contraction_top_k: the same if the true top-k of y were sent, gamma_0. No choice of k elements
        gets lower.

    What was sent, and what is kept:

    energy_sent: the mean over workers of ||sent_i||^2 / ||acc_i||^2.
    residue_norm_mean, residue_norm_min, residue_norm_max: over workers, of ||m_i|| on the sample.
    residue_norm_ratio: the mean of ||m_i|| divided by ||mean of g_i||: how many steps of gradients
        the residues hold.
    sent_density: the share of elements where s is not zero.
    union_density: the share of elements that are in some worker's own choice (its lanes' winners,
        or its top-k). Local top-k would have to send these: it is the build-up that section 1 of
        the paper describes.
    sample_size: S.

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
    residues = np.asarray(residues, np.float64)
    accumulators = np.asarray(accumulators, np.float64)
    average = np.asarray(average, np.float64)
    y = accumulators.mean(axis=0)
    sent = average != 0
    chosen = np.zeros(y.size, bool)
    missed = 0
    top_energy = 0.0
    for start, piece in _with_starts(pieces):
        of_piece = slice(start, start + piece.positions.size)
        for accumulator in accumulators[:, of_piece]:
            chosen[start + piece.choose(accumulator)] = True
        missed_here, top_here = _against_top_k(np.abs(y[of_piece]), sent[of_piece])
        missed, top_energy = missed + missed_here, top_energy + top_here
    energy = float(y @ y)
    k = int(np.count_nonzero(sent))
    norms = np.linalg.norm(residues, axis=1)
    gradient = float(np.linalg.norm(y - residues.mean(axis=0)))
    correlation, slope = _quantile_plots(residues)
    return {
        "residue_distance": _mean_distance(residues),
        "accumulator_distance": _mean_distance(accumulators),
        "distance_to_top_k": missed / k if k else None,
        "contraction": float(np.sum((y - average) ** 2)) / energy if energy > 0 else None,
        "contraction_top_k": max(1 - top_energy / energy, 0.0) if energy > 0 else None,
        "energy_sent": _mean(shares_sent),
        "residue_norm_mean": float(norms.mean()),
        "residue_norm_min": float(norms.min()),
        "residue_norm_max": float(norms.max()),
        "residue_norm_ratio": float(norms.mean()) / gradient if gradient > 0 else None,
        "union_density": np.count_nonzero(chosen) / y.size,
        "sent_density": k / y.size,
        "quantile_correlation": correlation,
        "quantile_slope_max": slope,
        "sample_size": y.size,
    }


def _with_starts(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    start = 0
    for piece in pieces:
        yield start, piece
        start += piece.positions.size


def _against_top_k(size: Array, sent: NDArray[np.bool_]) -> tuple[int, float]:
    """How many of the k sent elements are not among the k largest; and those k's sum of squares.

    Among equal elements, as few as possible count as missed.
    """
    k = int(np.count_nonzero(sent))
    if k == 0:
        return 0, 0.0
    largest = np.partition(size, size.size - k)[size.size - k :]
    smallest = largest.min()
    above = np.count_nonzero(sent & (size > smallest))
    equal = np.count_nonzero(sent & (size == smallest))
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


def _quantile_plots(residues: Array) -> tuple[float | None, float | None]:
    """quantile_correlation and quantile_slope_max."""
    some = np.sort(residues[: QUANTILE_PAIRS + 1], axis=1)
    some = some - some.mean(axis=1, keepdims=True)
    deviations = np.linalg.norm(some, axis=1)  # each is sqrt(S) times too large
    neighbours = [(i, i + 1) for i in range(len(some) - 1)]
    pairs = [(i, j) for i, j in neighbours if deviations[i] > 0 and deviations[j] > 0]
    if not pairs:
        return None, None
    correlations = [float(some[i] @ some[j]) / (deviations[i] * deviations[j]) for i, j in pairs]
    slopes = [abs(deviations[i] / deviations[j] - 1) for i, j in pairs]
    return float(np.mean(correlations)), float(max(slopes))


def _mean(values: Array) -> float | None:
    values = np.asarray(values, np.float64)
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


# Writing them down.


class Summary(Protocol):
    """What this module needs of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """Write one number."""
        ...

    def flush(self) -> None:
        """Let others read what was written."""
        ...


class Board:
    """TensorBoard's files in one directory, opened when there is something to write.

    If writing fails, one warning is logged, and training goes on.

    Args:
        directory: the files' directory.
        open_tensorboard: makes a SummaryWriter from a directory and the first step written.
    """

    def __init__(
        self, directory: FilePath, open_tensorboard: Callable[[str, int], Summary]
    ) -> None:
        self._directory: str | None = os.fspath(directory)
        self._open = open_tensorboard
        self._summary: Summary | None = None

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write all numbers of a step.

        Args:
            numbers: {name: number}; TensorBoard calls them scalecom/<name>.
            step: its number.
        """
        if self._directory is None:
            return
        # Catch whatever goes wrong: the step counts, and the other ranks are about to go on.
        try:
            if self._summary is None:
                self._summary = self._open(self._directory, step)
            for name, number in numbers.items():
                self._summary.add_scalar(f"scalecom/{name}", number, step)
            self._summary.flush()
        except Exception as error:
            log.warning(
                "TensorBoard's %s cannot be written, so nothing more is written to it: %s",
                self._directory,
                error,
            )
            self._directory = None


def check_tensorboard(who: str) -> None:
    """Raise ImportError unless TensorBoard is installed.

    This looks for TensorBoard without importing it. If TensorFlow is installed too, an import takes
    seconds, and only one rank needs it.

    Args:
        who: what asks for it.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError(
            f"{who}: tensorboard=... needs TensorBoard, which is not installed. Run pip install "
            "tensorboard"
        )


class Writer:
    """Writes down every look of one rank.

    If writing fails, one warning is logged, and training goes on.

    Args:
        diagnostics: says where to.
        open_tensorboard: makes a SummaryWriter from a directory and the first step written.
    """

    def __init__(
        self, diagnostics: Diagnostics, open_tensorboard: Callable[[str, int], Summary]
    ) -> None:
        self._csv = None if diagnostics.csv is None else Path(diagnostics.csv)
        directory = diagnostics.tensorboard
        self._board = None if directory is None else Board(directory, open_tensorboard)

    def write(self, numbers: Look) -> None:
        """Write one look down.

        Args:
            numbers: as `look` gives them, and "step".
        """
        known = {name: value for name, value in numbers.items() if value is not None}
        listed = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        log.info("diagnostics of %s", listed)
        # Catch whatever goes wrong: the step counts, and the other ranks are about to go on.
        try:
            if self._csv is not None:
                append_to_csv(self._csv, numbers)
        except Exception as error:
            log.warning(
                "%s cannot be written, so no more diagnostics are written to it: %s",
                self._csv,
                error,
            )
            self._csv = None
        if self._board is not None:
            self._board.write({n: known[n] for n in NAMES if n in known}, int(known["step"]))


def append_to_csv(path: Path, numbers: Look) -> None:
    """Append one row. If the file is new, write the names above it.

    Args:
        path: the file.
        numbers: {column: number}; a number that is None is left empty.

    Raises:
        OSError: the file cannot be written.
        ValueError: it holds other columns.
    """
    _check_csv(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(numbers)


def _check_csv(path: Path) -> None:
    if path.is_dir():
        raise ValueError(
            f"diagnostics: {path} is a directory, but csv= must name a file to write rows to"
        )
    if path.exists() and path.stat().st_size > 0:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != list(COLUMNS):
            raise ValueError(
                f"diagnostics: the columns in {path} are not those of diagnostics. Give csv= "
                "another path"
            )
