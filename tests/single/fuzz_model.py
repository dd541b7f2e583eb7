"""Random programs of training steps on simulated workers, and what should be true of each step.

`draw_setting` and `draw_step` make everything by choosing from sequences, so that hypothesis can
choose and shrink. `Truth` is reference.py, extended by the things that reference.py leaves out:
loss scales, frozen parameters, gradients that did not arrive, and half precision.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.exchange import bucket
from scalecom_hvd.reference import ScaleComReference, is_good, mean

Choose = Callable[[Sequence], Any]

NAMES = "weight", "bias", "layer.0.weight", "layer.0.bias", "head.weight", "a name/with söme marks"
SHAPES = (
    *((), (0,), (1,), (63,), (64,), (65,), (5000,)),
    *((50, 100), (37, 101), (7, 3), (3, 0, 5), (4, 5, 6), (16, 16, 16)),
)
KINDS = ("normal", "normal", "wide", "zeros", "ties", "denormal", "large")


def epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@dataclass(frozen=True)
class Setting:
    """A model on n ranks and how it is compressed."""

    n: int
    shapes: dict[str, tuple]
    dtypes: dict[str, torch.dtype]
    fields: dict[str, Any]
    groups: list[list[str]] | None = None
    kernel: str = ""
    beside: bool = False  # kernels run on a thread during backward, as for large buckets

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply this setting's kernel and threads while the objects made for it run."""
        before = bucket.WORTH_A_THREAD, os.environ.get("SCALECOM_KERNEL", "")
        if self.beside:
            bucket.WORTH_A_THREAD = 1
        os.environ["SCALECOM_KERNEL"] = self.kernel or before[1]
        try:
            yield
        finally:
            bucket.WORTH_A_THREAD, os.environ["SCALECOM_KERNEL"] = before

    @property
    def config(self) -> ScaleComConfig:
        return ScaleComConfig(**{"bits": 32} | self.fields)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=self.dtypes[name]))
            for name, shape in self.shapes.items()
        }


@dataclass(frozen=True)
class Step:
    """The events of a step.

    They are the gradients that are made, those that do not arrive, those that are not finite, and
    the order in which they arrive.
    """

    seed: int
    kinds: dict[str, str]
    missing: frozenset[tuple[int, str]] = frozenset()
    bad: dict[tuple[int, str], float] = field(default_factory=dict)
    orders: tuple[tuple[str, ...], ...] = ()

    def gradients(
        self, setting: Setting, rank: int, scale: float, frozen: Collection[str]
    ) -> dict[str, torch.Tensor | None]:
        """Return a rank's gradients, times the loss scale; None for one that did not arrive.

        Every call returns the same gradients.
        """
        made: dict[str, torch.Tensor | None] = {}
        for number, (name, shape) in enumerate(setting.shapes.items()):
            if name in frozen or (rank, name) in self.missing:
                made[name] = None
                continue
            random = np.random.default_rng([self.seed, rank, number])
            values = _numbers(self.kinds[name], random, math.prod(shape)) * scale
            if (rank, name) in self.bad and values.size:
                values[random.integers(values.size)] = self.bad[rank, name]
            made[name] = torch.from_numpy(values).to(setting.dtypes[name]).view(shape)
        return made


def _numbers(kind: str, random: np.random.Generator, numel: int) -> np.ndarray:
    values = random.standard_normal(numel)
    if kind == "zeros":
        return np.zeros(numel)
    if kind == "ties":
        return np.sign(values)
    if kind == "wide":
        return values * 10.0 ** random.uniform(-12, 3, numel)
    return values * {"normal": 1.0, "denormal": 1e-40, "large": 1e6}[kind]


def draw_setting(choose: Choose, ranks: Sequence[int]) -> Setting:
    names = NAMES[: choose(range(1, len(NAMES) + 1))]
    shapes = {
        name: choose(SHAPES) if choose((True, True, False)) else (choose(range(5001)),)
        for name in names
    }
    kinds = [torch.float32]
    if choose((False, True)):
        kinds += [torch.float64, torch.bfloat16, torch.float16]
    dtypes = {name: choose(kinds) for name in names}
    fields = {
        "rate": choose((100, 7, 2, 2.5, 64, 1.5, 300, 1000, 1, {0: 4, 2: 100}, {0: 2, 1: 7, 4: 1})),
        "beta": choose((1.0, 0.3, 0.1, 0.5)),
        "outliers": choose((4.0, None)),
        "flush": choose((True, False)),
        "min_numel": choose((2, 1, 50, 2, 2048)),
        "warmup_steps": choose((0, 0, 1, 3)),
        "selection": choose(("lanes", "lanes", "exact")),
        "leader": choose(("cyclic", "staggered")),
        "lookahead": choose((False, True)),
        **choose(({}, {}, {"bits": 32}, {"bits": 3}, {"bits": 2}, {"bits": 7})),
        "residue_dtype": choose((None, None, None, "float32", "float64")),
        "bucket_bytes": choose((25 * 2**20, 20_000, 5000, 1)),
        "dense": choose(((), (), (choose(names),), names[-1:], (names[0], names[-1]))),
        "rates": choose((None, None, {choose(names): choose((3, 50, 1)), "*": 20})),
    }
    if fields["rate"] == 1 or isinstance(fields["rate"], dict):
        fields["selection"] = "lanes"  # where every element is sent, there is nothing to choose
    groups = None
    if choose((False, False, True)):
        groups = [[], [], []]
        for name in names:
            groups[choose(range(3))].append(name)
        groups = [group for group in groups if group]
    how = choose(("", "", "torch")), choose((False, True))
    return Setting(choose(ranks), shapes, dtypes, fields, groups, *how)


def draw_step(
    choose: Choose, setting: Setting, missing: bool = False, overflow: bool = False
) -> Step:
    names, ranks = list(setting.shapes), range(setting.n)
    absent, bad = set(), {}
    for _ in range(choose(range(1, 4)) if missing else 0):
        absent.add((choose(ranks), choose(names)))
    for _ in range(choose(range(1, 4)) if overflow else 0):
        # The last two are finite, but too large for a residue (of float32 and of float64), unless
        # the loss scale is large.
        bad[choose(ranks), choose(names)] = choose((math.nan, math.inf, -math.inf, 1e31, 1e302))
    orders = []
    for _ in ranks:
        # Orders are rotated or reversed. They then differ between ranks, and are simple to choose.
        turned = choose(range(len(names)))
        order = names[turned:] + names[:turned]
        orders.append(tuple(order if choose((False, True)) else reversed(order)))
    kinds = {name: choose(KINDS) for name in names}
    return Step(choose(range(2**16)), kinds, frozenset(absent), bad, tuple(orders))


class Seen(NamedTuple):
    """The results of a step on one rank."""

    averages: dict[str, torch.Tensor]
    residues: dict[str, torch.Tensor]
    buckets: list[list[str]]
    step: int
    skipped: int
    leader: int

    @classmethod
    def of_all(cls, compressors: Sequence[Any], averages: Sequence[dict]) -> list[Seen]:
        seen = []
        for own, output in zip(compressors, averages, strict=True):
            stats, tensors = own.stats(), own.residues.tensors.values()
            counts = (stats[what] for what in ("step", "skipped_steps", "leader"))
            residues = {tensor.name: tensor.residue.view(tensor.shape) for tensor in tensors}
            seen.append(cls(output, residues, own.residues.buckets, *counts))
        return seen


class Truth:
    """The expected results of every step, computed from the gradients of a run."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.reference = ScaleComReference(setting.n, setting.shapes, setting.config)
        self.compressed = [name for name, rate in self.reference.rates.items() if rate != 1]
        self.skipped = 0
        kind_of = setting.config.residue_dtype_for
        self._kinds = {
            name: getattr(torch, kind_of(str(dtype).removeprefix("torch.")))
            for name, dtype in setting.dtypes.items()
        }
        for residues in self.reference.residues:
            residues.update({name: self._zeros(name) for name in self.compressed})
        self._came, self._sent, self._noise = (
            {name: np.zeros(setting.shapes[name]) for name in self.compressed} for _ in range(3)
        )

    def _zeros(self, name: str) -> np.ndarray:
        return np.zeros(self.setting.shapes[name], str(self._kinds[name]).removeprefix("torch."))

    # Saving, loading, and giving up a step.

    _STATE = ("residues", "step_number", "norms", "_chosen_ahead")

    def save(self) -> dict[str, Any]:
        state = {name: getattr(self.reference, name) for name in self._STATE}
        return copy.deepcopy(state | {"sums": (self._came, self._sent, self._noise)})

    def load(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        self._came, self._sent, self._noise = saved.pop("sums")
        for name, value in saved.items():
            setattr(self.reference, name, value)

    def given_up(
        self,
        grads: list[dict],
        scale: float,
        residues: list[dict[str, torch.Tensor]],
        skipped: Collection[int],
    ) -> None:
        """Check a step that failed in the middle on all ranks, which loses nothing.

        Look-ahead has no offsets after it.

        skipped: how many steps each rank has skipped. If a rank failed while a skipped step was
        rolled back, all ranks have counted that step.
        """
        (skipped,) = set(skipped)
        assert skipped - self.skipped in (0, 1)
        self.skipped = skipped
        self._check_unchanged(self._in_residue_units(grads, scale, whole=False), residues)
        self.reference._chosen_ahead.clear()

    # One step.

    def check(
        self,
        grads: list[dict[str, torch.Tensor | None]],
        scale: float,
        frozen: Collection[str],
        seen: list[Seen],
    ) -> None:
        """Compare the results of all ranks with the truth.

        grads: copies of each rank's gradients, times the loss scale.
        """
        for rank, other in enumerate(seen):
            assert other.averages.keys() == self.setting.shapes.keys()
            for name, average in other.averages.items():
                assert average.dtype == self.setting.dtypes[name], name
                assert tuple(average.shape) == self.setting.shapes[name], name
                assert _bits(average) == _bits(seen[0].averages[name]), (
                    f"{name}: the average differs between ranks 0 and {rank}"
                )
        counts = [(other.step, other.skipped, other.leader) for other in seen]
        assert len(set(counts)) == 1, counts
        self.reference.bucket_of = {
            name: b for b, names in enumerate(seen[0].buckets) for name in names
        }

        with np.errstate(all="ignore"):
            self._check(grads, scale, frozen, seen)
        reference = self.reference
        assert (seen[0].step, seen[0].skipped) == (reference.step_number, self.skipped)
        chosen_for = max(reference.step_number - 1, 0) + self.setting.config.lookahead
        assert seen[0].leader == chosen_for % self.setting.n

    def _check(self, grads, scale, frozen, seen) -> None:
        reference, config = self.reference, self.setting.config
        before = self.save()
        whole = bool(
            reference.step_number < config.warmup_steps
            or (config.lookahead and self.compressed and not reference._chosen_ahead)
        )
        arrays = self._in_residue_units(grads, scale, whole)
        magnitude = {name: self._magnitude(name, arrays) for name in self.setting.shapes}

        averages = reference.step(
            [{name: arrays[name][rank] for name in arrays} for rank in range(self.setting.n)]
        )
        finite = reference.step_number > before["step_number"]
        if finite:
            self._keep_frozen(frozen, before, whole)
        expected = {}
        for name in self.setting.shapes:
            if name in self.compressed and not whole:
                # A frozen tensor sends nothing.
                expected[name] = averages[name] * (0 if name in frozen else scale)
            else:
                expected[name] = mean(
                    [self._arrived(g, name).to(self._sum_dtype(name, whole)).numpy() for g in grads]
                )
            half = self.setting.dtypes[name] == torch.float16
            finite = finite and bool(
                np.isfinite(expected[name].astype(np.float16) if half else expected[name]).all()
            )
        if not finite:
            self.load(before)
            self.skipped += 1
            for name, average in seen[0].averages.items():
                assert average.isnan().all(), f"{name} in a step that was not taken"
            self._check_unchanged(arrays, [other.residues for other in seen])
            return

        for name, want in expected.items():
            got = seen[0].averages[name].double().numpy()
            chosen = self._selection(name, whole)
            if chosen is not None:
                assert not np.delete(got.reshape(-1), chosen).any(), (
                    f"{name}: something outside the selection was sent"
                )
            size = magnitude[name] * (scale if name in self.compressed else 1)
            wrong = np.abs(got - want) > self._allowed(name, want, size, whole, scale)
            assert not wrong.any(), f"{name}: {got[wrong][:3]} is not {want[wrong][:3]}"
        for rank, other in enumerate(seen):
            assert other.residues.keys() == set(self.compressed)
            for name, residue in other.residues.items():
                # Residues are equal to the bit: they depend only on the worker's own arithmetic.
                want = reference.residues[rank][name]
                np.testing.assert_array_equal(residue.numpy(), want, f"{name} on rank {rank}")
        if config.beta == 1 and config.outliers is None:
            self._check_conservation(arrays, scale, frozen, seen, magnitude, whole)

    def _arrived(self, grads: dict[str, torch.Tensor | None], name: str) -> torch.Tensor:
        if grads[name] is not None:
            return grads[name]
        return torch.zeros(self.setting.shapes[name], dtype=self.setting.dtypes[name])

    def _in_residue_units(
        self, grads: list[dict], scale: float, whole: bool
    ) -> dict[str, list[np.ndarray]]:
        """Return the gradients for the reference in the residue's dtype.

        Uncompressed ones keep the width of the gradient.
        """
        arrays = {}
        for name, dtype in self.setting.dtypes.items():
            takes_part = name in self.compressed and not whole
            kind = self._kinds[name] if takes_part else torch.promote_types(dtype, torch.float32)
            factor = 1 / scale if name in self.compressed else 1
            arrays[name] = [(self._arrived(g, name).to(kind) * factor).numpy() for g in grads]
        return arrays

    def _magnitude(self, name: str, arrays: dict[str, list[np.ndarray]]) -> np.ndarray:
        """Return, for every element of a tensor, how large the sum of its addends can be."""
        own = [np.nan_to_num(array.astype(float), posinf=0, neginf=0) for array in arrays[name]]
        if name in self.compressed:
            own += [residues[name].astype(float) for residues in self.reference.residues]
        return sum(map(np.abs, own))

    def _selection(self, name: str, whole: bool) -> np.ndarray | None:
        return None if whole or name not in self.compressed else self.reference.selections[name]

    def _allowed(
        self, name: str, want: np.ndarray, magnitude: np.ndarray, whole: bool, scale: float
    ) -> np.ndarray:
        """Return the allowed rounding of the sum over ranks and of the result in its dtype."""
        dtype, n = self.setting.dtypes[name], self.setting.n
        smallest = float(torch.finfo(dtype).smallest_normal)
        allowed = epsilon(dtype) * (np.abs(want.astype(float)) + smallest)
        if name in self.compressed:
            # The loss scale magnifies the rounding of float32's denormals.
            allowed = allowed + 4 * n * scale * 2.0**-149
        if name in self.compressed and not whole:
            # With flush, values of up to m / beta are sent and rounded.
            magnitude = (1 + self.setting.config.extra) * magnitude
        return allowed + epsilon(self._sum_dtype(name, whole)) * magnitude

    def _sum_dtype(self, name: str, whole: bool) -> torch.dtype:
        if name in self.compressed and not whole:
            return self._kinds[name]
        return torch.float64 if self.setting.dtypes[name] == torch.float64 else torch.float32

    def _keep_frozen(self, frozen: Collection[str], before: dict, whole: bool) -> None:
        """Keep a frozen parameter's residue as it is; look-ahead's leaders still choose."""
        reference = self.reference
        for name in set(frozen).intersection(self.compressed):
            for residues, old in zip(reference.residues, before["residues"], strict=True):
                residues[name] = old[name].copy()
            if name in reference._chosen_ahead and not whole:
                m = [residues[name].reshape(-1) for residues in reference.residues]
                none = [np.zeros_like(own) for own in m]
                reference._chosen_ahead[name] = reference._choose(
                    name, reference.step_number, m, none
                )

    def _check_unchanged(
        self, arrays: dict[str, list[np.ndarray]], residues: list[dict[str, torch.Tensor]]
    ) -> None:
        """Check that a step that did not count was rolled back, up to rounding.

        From here on, the truth continues from the residues that the ranks really have.
        """
        for rank, real in enumerate(residues):
            for name, residue in real.items():
                old, new = self.reference.residues[rank][name], residue.numpy().copy()
                grad = arrays[name][rank]
                size = np.abs(old.astype(float)) + np.where(is_good(grad), np.abs(grad), 0)
                allowed = 4 * epsilon(self._kinds[name]) * size
                allowed = allowed + 4 * np.finfo(old.dtype).smallest_subnormal
                wrong = ~(np.abs(new - old.astype(float)) <= allowed)
                assert not wrong.any(), (
                    f"{name} on rank {rank} was {old[wrong][:3]} and is {new[wrong][:3]} after a "
                    "step that never happened"
                )
                self._noise[name] = self._noise[name] + allowed
                self.reference.residues[rank][name] = new

    def _check_conservation(self, arrays, scale, frozen, seen, magnitude, whole) -> None:
        n = self.setting.n
        for name in self.compressed:
            sent, size = seen[0].averages[name].double().numpy(), magnitude[name]
            if name not in frozen:
                self._came[name] = self._came[name] + sum(own.astype(float) for own in arrays[name])
            self._sent[name] = self._sent[name] + n * sent / scale
            left = sum(other.residues[name].double().numpy() for other in seen)
            rounding = n * self._allowed(name, sent, size * scale, whole, scale) / scale
            rounding = rounding + 4 * epsilon(self._kinds[name]) * size
            self._noise[name] = self._noise[name] + rounding
            wrong = np.abs(self._sent[name] + left - self._came[name]) > self._noise[name]
            assert not wrong.any(), (
                f"{name}: sent and kept is not what came in, in {wrong.sum()} elements"
            )


def _bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )
