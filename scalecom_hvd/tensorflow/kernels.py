"""The moves of one step on a bucket's tensors, and the kernels that make them.

A move is a function from tensors to tensors. It changes no residue but returns the updated one,
which is assigned once the step is known to count. Both kernels give bit-identical results, the same
as reference.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import tensorflow as tf

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.integers import BLOCK, SMALLEST_SCALE, blocks_of, scale_divisor
from scalecom_hvd.lanes import Lanes, Positions

Tensors = Sequence[tf.Tensor]
Scale: TypeAlias = tf.Tensor | None


@dataclass(eq=False)
class _Kernel:
    """What both kernels know of a bucket's compressed tensors."""

    geometries: Mapping[str, Lanes]
    layout: Layout  # of their offsets and values
    levels: int  # L of values that travel as integers; 0: as numbers
    beta: float  # of the low-pass filter
    extra: float  # this many times what waits is sent, too, unless g has the opposite sign


class GraphKernel(_Kernel):
    """The moves of one step on the compressed tensors of a bucket, in plain TensorFlow operations.

    For any device and both kinds of selection.

    m: a residue.  g: a gradient times `scale`, with zero for bad elements.  I: the indices.
    An element of g is bad unless |g| <= config.largest_gradient. A value is bad unless it is
    finite.

    Args and results that several moves share:
        grads, residues, updated: (N,) each, in the order of the geometries.
        scale: 1 / loss scale, a scalar; None for 1.
        choice: bytes, laid out by bucket_layout.Layout. They include the scales of integers.
        values: (k,), those of all tensors together, in the residues' dtype, or int8 for integers.
        bad: how many elements or values are bad; an int64 scalar.
    """

    def choose(
        self, grads: Tensors, residues: Tensors, scale: Scale, chooses: tf.Tensor
    ) -> tf.Tensor:
        """The scales of what the winners of |m + g| would send, and then their offsets.

        Args:
            chooses: whether this rank chooses, a bool scalar. If not, the choice is empty, (0,).
        """
        usable = [_usable(g, m.dtype, scale)[0] for g, m in zip(grads, residues, strict=True)]

        def choice() -> tf.Tensor:
            winners, scales = {}, []
            named = self.geometries.items()
            for g, m, (name, own) in zip(usable, residues, named, strict=True):
                winners[name] = _winners(tf.abs(m + g), own)
                if self.levels:
                    index = _indices(own, winners[name])
                    sendable = _sendable(tf.gather(m, index), tf.gather(g, index), self.extra)
                    scales.append(_as_bytes(_scales(sendable, own.k, self.levels)))
            # In the buffer, offsets lie in the layout's order, not in the tensors' order.
            return tf.concat([*scales, *(winners[name] for name in self.layout.offsets)], 0)

        return tf.cond(chooses, choice, lambda: tf.zeros([0], tf.uint8))

    def take_and_accumulate(
        self, grads: Tensors, residues: Tensors, scale: Scale, choice: tf.Tensor
    ) -> tuple[Tensors, tf.Tensor, tf.Tensor]:
        """(1) v = m[I] + g[I], and m[I] - beta*v; then (2) m + beta*g.

        Returns:
            updated, values, bad.
        """
        updated, values, bad = [], [], []
        places = zip(self._indices(choice), self.layout.scales.values(), strict=True)
        for grad, m, (index, at) in zip(grads, residues, places, strict=True):
            g, n_bad = _usable(grad, m.dtype, scale)
            value = _sendable(tf.gather(m, index), tf.gather(g, index), self.extra)
            finite = tf.math.is_finite(value)
            value = sent = tf.where(finite, value, tf.zeros_like(value))
            if self.levels:
                scales = scale_of_each(choice[at], value, m.dtype)
                value = _integers(value, scales, self.levels)
                sent = times_scales(value, scales)
            beta = _as_number(self.beta, m.dtype)
            m = tf.tensor_scatter_nd_sub(m, index[:, None], beta * sent)
            updated.append(m + beta * g)
            values.append(value)
            bad += [n_bad, tf.math.count_nonzero(~finite)]
        return updated, tf.concat(values, 0), tf.add_n(bad)

    def scatter(
        self, grads: Tensors, scale: Scale, choice: tf.Tensor, values: tf.Tensor
    ) -> Tensors:
        """For every gradient (its memory may be used), values / scale at I and zero elsewhere."""
        outputs = []
        lanes = self.geometries.values()
        parts = tf.split(values, [geometry.k for geometry in lanes])
        for grad, own, index, value in zip(grads, lanes, self._indices(choice), parts, strict=True):
            kind = tf.float64 if grad.dtype == tf.float64 else tf.float32
            value = tf.cast(value, kind)
            if scale is not None:
                value *= tf.cast(1 / scale, kind)
            value = tf.cast(value, grad.dtype)
            outputs.append(tf.scatter_nd(index[:, None], value, [own.numel]))
        return outputs

    def _indices(self, offsets: tf.Tensor) -> list[tf.Tensor]:
        at = self.layout.offsets
        return [_indices(own, offsets[at[name]]) for name, own in self.geometries.items()]


@dataclass(eq=False)
class NativeKernel(_Kernel):
    """The same moves by the C kernel (native/tensorflow_ops.c), for lanes in the CPU's memory.

    Every move is one operation. Only GraphKernel has exact selection.
    """

    def __post_init__(self) -> None:
        self._operations, at = operations(), self.layout
        self._lanes: list[int] = []
        for name, g in self.geometries.items():
            self._lanes += [g.numel, g.k, g.width, g.rows, g.offset_width]
            self._lanes += [at.offsets[name].start, at.values[name].start]
            self._lanes += [self.levels, at.scales[name].start]

    def _settings(self, scale: Scale) -> tf.Tensor:
        settings = self.beta, 1.0 if scale is None else scale, self.extra
        return tf.stack([_as_number(x, tf.float64) for x in settings])

    def choose(
        self, grads: Tensors, residues: Tensors, scale: Scale, chooses: tf.Tensor
    ) -> tf.Tensor:
        return self._operations.scalecom_choose(
            grads, residues, self._settings(scale), chooses, lanes=self._lanes
        )

    def take_and_accumulate(
        self, grads: Tensors, residues: Tensors, scale: Scale, choice: tf.Tensor
    ) -> tuple[Tensors, tf.Tensor, tf.Tensor]:
        dtype = tf.int8 if self.levels else residues[0].dtype
        return self._operations.scalecom_take_and_accumulate(
            grads, residues, self._settings(scale), choice, lanes=self._lanes, W=dtype
        )

    def scatter(
        self, grads: Tensors, scale: Scale, choice: tf.Tensor, values: tf.Tensor
    ) -> Tensors:
        return self._operations.scalecom_scatter(
            grads, self._settings(scale), choice, values, lanes=self._lanes
        )


def kernel_for(device: str, selection: str, same_width: bool) -> type[GraphKernel | NativeKernel]:
    """The fastest kernel for tensors on a device.

    SCALECOM_KERNEL=tensorflow asks for plain operations; =native makes a missing library an error.

    Args:
        device: the device's type ("CPU", "GPU", ...).
        selection: the setting of that name ("lanes" or "exact").
        same_width: whether either both residues and gradients are float64, or neither.

    Raises:
        ValueError: SCALECOM_KERNEL names no kernel for TensorFlow.
        RuntimeError: SCALECOM_KERNEL=native, and there is no library.
    """
    asked = os.environ.get("SCALECOM_KERNEL", "")
    if asked not in ("", "native", "tensorflow"):
        raise ValueError(f"SCALECOM_KERNEL must be 'native' or 'tensorflow' here, not {asked!r}")
    if asked == "tensorflow" or device != "CPU" or selection == "exact" or not same_width:
        return GraphKernel
    if operations() is not None:
        return NativeKernel
    if asked == "native":
        raise RuntimeError(
            "SCALECOM_KERNEL=native, but the native kernel was not built. " + native.how_to_have()
        )
    return GraphKernel


@functools.cache
def operations() -> ModuleType | None:
    """The C kernel's operations, or None, with one warning, if they were not built."""
    path = native.OPERATIONS
    try:
        # The library refers to symbols of these two but does not name their files, so that it works
        # with any installed TensorFlow.
        frameworks = Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*")
        for needed in (*frameworks, native.LIBRARY):
            ctypes.CDLL(str(needed), ctypes.RTLD_GLOBAL)
        return tf.load_op_library(str(path))
    except (OSError, tf.errors.OpError) as error:
        native.warn_missing(path, error, "plain TensorFlow operations are")
        return None


def _as_number(value: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A number or tensor as a scalar of this dtype. tf.cast would make a number a float32 first."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)


def _usable(grad: tf.Tensor, kind: tf.DType, scale: Scale) -> tuple[tf.Tensor, tf.Tensor]:
    """scale*g in the residue's dtype with zero for bad elements, and how many those are."""
    g = tf.cast(grad, kind)
    if scale is not None:
        g *= tf.cast(scale, kind)
    good = tf.abs(g) <= _as_number(largest_gradient(kind.name), kind)
    return tf.where(good, g, tf.zeros_like(g)), tf.math.count_nonzero(~good)


def _sendable(m: tf.Tensor, g: tf.Tensor, extra: float) -> tf.Tensor:
    """m + g, plus `extra` times m unless the two have opposite signs."""
    value = m + g
    more = _as_number(extra, m.dtype) * m
    # If this were one sum of three terms, they would be added in another order.
    return tf.where(m * g >= 0, value + more, value)


def _scales(values: tf.Tensor, k: int, levels: int) -> tf.Tensor:
    """The scales (blocks,) of the leader's values (k,), as in reference.scales."""
    size = tf.abs(tf.cast(values, tf.float64))
    size = tf.where(tf.math.is_finite(size), size, tf.zeros_like(size))
    blocks = tf.reshape(tf.pad(size, [[0, -k % BLOCK]]), [blocks_of(k), BLOCK])
    counts = [min(BLOCK, k - begin) * scale_divisor(levels) for begin in range(0, k, BLOCK)]
    mean = tf.reduce_sum(blocks, 1) / tf.constant(counts, tf.float64)
    short = tf.cast(tf.minimum(mean, _as_number(tf.float32.max, tf.float64)), tf.float32)
    bits = tf.bitwise.bitwise_and(tf.bitcast(short, tf.int32), tf.constant(-0x10000, tf.int32))
    short = tf.bitcast(bits, tf.float32)
    return tf.where(short >= SMALLEST_SCALE, short, tf.zeros_like(short))


def scale_of_each(part: tf.Tensor, values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The scale of each of a tensor's values (k,), in this dtype, from the scales' bytes."""
    scales = tf.bitcast(tf.reshape(part, [-1, 4]), tf.float32)
    return tf.cast(tf.repeat(scales, BLOCK)[: tf.size(values)], dtype)


def _integers(values: tf.Tensor, scales: tf.Tensor, levels: int) -> tf.Tensor:
    """The integers (k,), int8, nearest to values / scales, as in reference.integers."""
    zeros = tf.zeros_like(scales)
    per_scale = tf.where(scales > 0, 2 / scales, zeros)
    halves = tf.minimum(tf.abs(values) * per_scale, _as_number(2 * levels, values.dtype))
    size = tf.cast(halves, tf.int32) + 1
    size = tf.cast(tf.bitwise.right_shift(size, tf.ones_like(size)), tf.int8)
    return tf.where(values < 0, -size, size)


def times_scales(integers: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Integers (k,), or sums of them, times the scale of each (k,), in the scales' dtype."""
    product = tf.cast(integers, scales.dtype) * scales
    # Without the tf.where, TensorFlow may multiply scales by the next factor first, and that
    # product is rounded.
    return tf.where(tf.equal(integers, 0), tf.zeros_like(scales), product)


def _as_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor's elements, of more than one byte each, as uint8."""
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _winners(size: tf.Tensor, geometry: Lanes) -> tf.Tensor:
    """The bytes of the offsets of each lane's largest element.

    With exact selection, the bytes of the offsets of the k largest, in ascending order.
    """
    dtype = tf.as_dtype(geometry.offset_dtype)
    if not geometry.offset_width:
        return tf.zeros([0], tf.uint8)
    if isinstance(geometry, Positions):
        # Of equal elements, top_k takes the first.
        offsets = tf.sort(tf.math.top_k(size, geometry.k, sorted=False).indices)
    else:
        parts = []
        for elements, groups, width in geometry.groups():
            block = size[elements]
            numel = elements.stop - elements.start
            rows = -(-numel // (groups * width))
            block = tf.pad(block, [[0, groups * width * rows - numel]], constant_values=-1)
            parts.append(tf.reshape(tf.argmax(tf.reshape(block, [groups, rows, width]), 1), [-1]))
        offsets = tf.concat(parts, 0)
    offsets = tf.cast(offsets, dtype)
    return offsets if dtype == tf.uint8 else _as_bytes(offsets)


def _indices(geometry: Lanes, offsets: tf.Tensor) -> tf.Tensor:
    """Flat positions (k,) of the chosen elements, from the bytes of their offsets.

    This is lanes.Lanes.indices, computed in the graph rather than stored in it.
    """
    dtype = tf.as_dtype(geometry.offset_dtype)
    if not geometry.offset_width:
        return tf.range(geometry.k, dtype=tf.int64)
    if dtype != tf.uint8:
        offsets = tf.bitcast(tf.reshape(offsets, [-1, dtype.size]), dtype)
    row = tf.cast(offsets, tf.int64)
    if isinstance(geometry, Positions):
        return row
    width, rows, full = geometry.width, geometry.rows, geometry.full_lanes
    lane = tf.range(geometry.k, dtype=tf.int64)
    in_full = lane // width * (width * rows) + lane % width + row * width
    in_last = full * rows + lane - full + row * (geometry.k - full)
    return tf.where(lane < full, in_full, in_last)
