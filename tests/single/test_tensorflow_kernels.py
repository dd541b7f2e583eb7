"""TensorFlow's kernels are bit-identical to each other and to NumPy.

One kernel is in C and has operations of its own, the other is made of plain operations.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from sanitizer_cases import valid_offsets

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.integers import BLOCK, levels_of
from scalecom_hvd.lanes import geometry
from scalecom_hvd.reference import integers, scales, select
from scalecom_hvd.tensorflow.kernels import GraphKernel, NativeKernel, Units, kernel_for, operations

DTYPES = [tf.float32, tf.float64, tf.float16, tf.bfloat16]
SIZES = [1, 2, 63, 64, 65, 6399, 6400, 6401, 20_000, 100_000]
KERNELS = [NativeKernel, GraphKernel]
YES, NO = tf.constant(True), tf.constant(False)


def made_up(sizes, dtype, seed=0):
    """Return gradients and residues of tensors that share their buffers."""
    random = np.random.default_rng(seed)
    kind = tf.float64 if dtype == tf.float64 else tf.float32
    grads = [tf.cast(random.standard_normal(n), dtype) for n in sizes]
    return grads, [tf.cast(random.standard_normal(n), kind) for n in sizes]


def geometries_of(sizes, rate, selection="lanes"):
    return {f"t{i}": geometry(n, rate, selection) for i, n in enumerate(sizes)}


def usable(grad, kind, scale):
    g = grad.numpy().astype(kind) * kind(scale)
    return np.where(np.abs(g) <= largest_gradient(np.dtype(kind).name), g, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(("rate", "beta"), [(100, 1.0), (7, 0.3), (2.5, 0.1), (1000, 0.5)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cyclic_step_is_numpy_s(kernel, rate, beta, dtype):
    geometries = geometries_of(SIZES, rate)
    made, scale = kernel(geometries), 0.5
    grads, residues = made_up(SIZES, dtype)
    kind = residues[0].dtype.as_numpy_dtype
    units = Units(beta, tf.constant(scale, tf.float64))
    offsets = made.choose(grads, residues, units, YES)
    updated, values, _, bad = made.take_and_accumulate(grads, residues, units, NO, offsets)
    outputs, at = made.scatter(grads, units, offsets, values), 0
    assert int(bad) == at == 0
    for grad, residue, shape, new, output in zip(
        grads, residues, geometries.values(), updated, outputs, strict=True
    ):
        g, m = usable(grad, kind, scale), residue.numpy()
        chosen = select(m + g, shape, "lanes")
        value = m[chosen] + g[chosen]
        m[chosen] -= kind(beta) * value
        m = m + kind(beta) * g
        expected = np.zeros(shape.numel, kind)
        expected[chosen] = kind(1 / scale) * value
        np.testing.assert_array_equal(values.numpy()[at : at + shape.k], value)
        np.testing.assert_array_equal(new.numpy(), m)
        np.testing.assert_array_equal(output.numpy(), tf.cast(expected, dtype).numpy())
        at += shape.k


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("rate", [100, 2.5, 300])
def test_both_look_ahead_alike(rate, dtype):
    geometries = geometries_of(SIZES, rate)
    grads, residues = made_up(SIZES, dtype)
    random = np.random.default_rng(1)
    chosen = np.concatenate([valid_offsets(random, g) for g in geometries.values()])
    for chooses in (YES, NO):
        results = [
            kernel(geometries).take_and_accumulate(
                grads, residues, Units(0.3), chooses, tf.constant(chosen)
            )
            for kernel in KERNELS
        ]
        for ours, theirs in zip(*map(tf.nest.flatten, results), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        assert results[0][2].shape == ((len(chosen),) if chooses is YES else (0,))


@pytest.mark.parametrize(
    ("dtype", "rate", "bits", "traced"),
    [
        *((dtype, 16, 3, dtype == tf.float32) for dtype in DTYPES),
        *((tf.float32, rate, bits, False) for rate, bits in ((1, 3), (2.5, 2), (300, 8))),
    ],
    ids=str,
)
def test_integers_are_numpy_s(dtype, rate, bits, traced):
    """This also holds in a graph that TensorFlow optimizes, and in pieces that fit into a cache."""
    levels, beta, extra, scale = levels_of(bits), 0.3, 7 / 3, 0.5
    sizes = [*SIZES, 2_000_000] if rate == 300 and dtype == tf.float32 else SIZES
    geometries = geometries_of(sizes, rate)
    layout = Layout(geometries, has_scales=True)
    grads, residues = made_up(sizes, dtype)
    residues[-1] *= tf.concat([tf.fill([3000], 1e-36), tf.ones([sizes[-1] - 3000])], 0).numpy()
    residues[-2] *= 0
    grads[-2] *= 0
    kind = residues[0].dtype.as_numpy_dtype
    units = Units(beta, tf.constant(scale, tf.float64), extra)

    def moves(kernel):
        made = kernel(geometries, levels)
        choice = made.choose(grads, residues, units, YES)
        return (
            made.choose(grads, residues, units, NO),
            choice,
            *made.take_and_accumulate(grads, residues, units, YES, choice),
        )

    ours, theirs = (
        (tf.function(moves, autograph=False) if traced else moves)(kernel) for kernel in KERNELS
    )
    for mine, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())
    nothing, choice, updated, values, ahead, bad = ours
    assert (nothing.shape, int(bad)) == ((0,), 0)
    for name, grad, residue, new in zip(geometries, grads, residues, updated, strict=True):
        shape, g, m = geometries[name], usable(grad, kind, scale), residue.numpy()

        def chosen(m, g=g, shape=shape):
            index = select(m + g, shape, "lanes")
            waited = np.where(m * g >= 0, kind(extra) * m, kind(0))
            value = (m + g + waited)[index]
            return index, value, scales(value, levels)

        index, value, scale_of = chosen(m)
        q = integers(value, scale_of, levels)
        own = choice.numpy()[layout.offsets[name]].view(shape.offset_dtype)
        np.testing.assert_array_equal(shape.indices(own), index)
        found = choice.numpy()[layout.scales[name]].view(np.float32)
        np.testing.assert_array_equal(found, scale_of[::BLOCK])
        np.testing.assert_array_equal(values.numpy()[layout.values[name]], q)
        m[index] -= kind(beta) * (q * scale_of)
        m = m + kind(beta) * g
        np.testing.assert_array_equal(new.numpy(), m)
        found = ahead.numpy()[layout.scales[name]].view(np.float32)
        np.testing.assert_array_equal(found, chosen(m)[2][::BLOCK])
    assert np.abs(values).max() == levels or bits == 8


@pytest.mark.parametrize("kernel", KERNELS)
def test_integers_of_what_is_not_finite(kernel):
    """Such elements are counted. They affect neither integers nor scales."""
    shape, grad, residue = geometry(6400, 16, "lanes"), np.ones(6400), np.zeros(6400)
    grad[100], residue[200] = np.nan, 3e38
    grad[200] = 1e30
    made, units = kernel({"t": shape}, 3), Units(1.0, extra=9.0)
    inputs = [tf.constant(grad, tf.float32)], [tf.constant(residue, tf.float32)], units
    choice = made.choose(*inputs, YES)
    _, values, _, bad = made.take_and_accumulate(*inputs, NO, choice)
    assert int(bad) == 2
    assert (values.numpy() == 0).sum() == 1
    assert np.isfinite(choice.numpy()[:4].view(np.float32)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_is_counted_and_not_kept(kernel):
    grads, residues = made_up([5000, 70], tf.float32)
    poisoned = grads[0].numpy()
    poisoned[[70, 4000]] = np.nan, -np.inf
    made = kernel(geometries_of([5000, 70], 50))
    inputs, choice = [tf.constant(poisoned), grads[1]], tf.zeros([102], tf.uint8)
    updated, _, _, bad = made.take_and_accumulate(inputs, residues, Units(1.0), YES, choice)
    assert int(bad) == 2
    assert all(np.isfinite(tensor.numpy()).all() for tensor in updated)
    np.testing.assert_array_equal(updated[0].numpy()[[70, 4000]], residues[0].numpy()[[70, 4000]])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_beyond_the_largest_counts_as_not_finite(kernel, dtype):
    """A residue of finite numbers may still overflow. Every later step would then be skipped."""
    scale = 2.0**90 if dtype == tf.float16 else 0.5
    kind = tf.float64 if dtype == tf.float64 else tf.float32
    taken = largest_gradient(kind.name) / scale
    eps = float(np.finfo(dtype.as_numpy_dtype).eps) if dtype != tf.bfloat16 else 2.0**-7
    made, units = kernel(geometries_of([5000], 50)), Units(0.5, tf.constant(scale, tf.float64))
    for value, bad in ((taken, 0), (-taken, 0), (taken * (1 + eps), 2), (-taken * (1 + eps), 2)):
        elements = np.ones(5000)
        elements[[7, 4999]] = value
        grad, expected = tf.cast(elements, dtype), 0 if bad else 0.5 * value * scale
        inputs = [grad], [tf.zeros([5000], kind)], units
        choice = tf.fill([100], tf.constant(30, tf.uint8))
        updated, _, _, found = made.take_and_accumulate(*inputs, YES, choice)
        assert int(found) == bad
        assert updated[0].numpy()[[7, 4999]].tolist() == [expected] * 2
        _, values, _, _ = made.take_and_accumulate(*inputs, NO, made.choose(*inputs, YES))
        assert float(tf.reduce_max(tf.abs(values))) == (scale if bad else 2 * abs(expected))


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_steps_of_huge_gradients_leave_the_residue_finite(kernel):
    made, residue = kernel(geometries_of([500], 50)), tf.zeros([500], tf.float32)
    for huge in (3e38, largest_gradient("float32")):
        for _ in range(30):
            inputs = [tf.fill([500], tf.constant(huge, tf.float32))], [residue], Units(1.0)
            choice = tf.zeros([10], tf.uint8)
            (residue,), _, _, bad = made.take_and_accumulate(*inputs, NO, choice)
            assert int(bad) == (500 if huge == 3e38 else 0)
    kept = [0] * 10 + [30 * largest_gradient("float32")] * 490
    assert residue.numpy().tolist() == kept


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_that_others_still_read_stay_as_they_are(kernel):
    """The C kernel reuses the memory of its inputs only if nobody else needs it."""
    made = kernel(geometries_of([5000], 50))
    grads, residues = made_up([5000], tf.float32)
    before = [tensor.numpy().copy() for tensor in (*grads, *residues)]
    inputs = grads, residues, Units(0.5)
    offsets = made.choose(*inputs, YES)
    _, values, _, _ = made.take_and_accumulate(*inputs, YES, offsets)
    made.scatter(grads, Units(0.5), offsets, values)
    for tensor, old in zip((*grads, *residues), before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), old)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("surplus", [-1, 1])
def test_offsets_of_no_or_two_leaders_are_refused(kernel, surplus):
    geometries = geometries_of([5000], 50)
    grads, residues = made_up([5000], tf.float32)
    offsets = tf.zeros([100 + surplus], tf.uint8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="exactly one leader's offsets"):
        kernel(geometries).take_and_accumulate(grads, residues, Units(1.0), NO, offsets)


@pytest.mark.parametrize(
    ("numel", "rate", "lane"),
    [(5000, 50, 3), (100_000, 50, 1000), (6401, 100, 64), (700, 2.5, 279)],
)
@pytest.mark.parametrize("move", ["take_and_accumulate", "scatter"])
def test_offsets_outside_of_their_lanes_are_refused(numel, rate, lane, move):
    """Offsets come from other ranks and from files. Following wrong ones would overwrite memory."""
    shape = geometry(numel, rate, "lanes")
    made = NativeKernel({"t": shape})
    grads, residues = made_up([numel], tf.float32)
    wrong = np.zeros(shape.k, np.uint8)
    wrong[lane] = shape.rows if lane < shape.full_lanes else shape.rows - 1
    offsets = tf.constant(wrong)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="offsets that lie outside of their lanes"
    ):
        if move == "scatter":
            made.scatter(grads, Units(1.0), offsets, tf.zeros([shape.k]))
        else:
            made.take_and_accumulate(grads, residues, Units(1.0), YES, offsets)


def test_the_libraries_leave_the_processors_modes_alone():
    """Linking with -ffast-math would flush denormal numbers to zero in the whole process."""
    assert operations() is not None

    def product():
        return np.float32(1e-40) * np.float32(1)

    with ThreadPoolExecutor(1) as elsewhere:
        assert product() > 0
        assert elsewhere.submit(product).result() > 0


def test_the_operations_refuse_tensors_of_other_sizes():
    grads, residues = made_up([5000], tf.float32)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="a gradient does not have the size of its variable"
    ):
        NativeKernel(geometries_of([5001], 50)).choose(grads, residues, Units(1.0), YES)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="a residue does not have the size of its variable"
    ):
        NativeKernel(geometries_of([5000], 50)).choose(grads, [residues[0][1:]], Units(1.0), YES)


def test_exact_selection_takes_the_largest_of_all():
    geometries = geometries_of([5000], 50, "exact")
    grads, residues = made_up([5000], tf.float32)
    made = kernel_for("CPU", "exact", same_width=True)(geometries)
    offsets = made.choose(grads, residues, Units(1.0), YES)
    expected = select(residues[0].numpy() + grads[0].numpy(), geometries["t0"], "exact")
    np.testing.assert_array_equal(offsets.numpy().view(np.int32), expected)


def test_the_c_kernel_refuses_positions():
    with pytest.raises(TypeError, match='supports only selection="lanes"'):
        NativeKernel(geometries_of([5000], 50, "exact"))


def test_which_kernel_serves_whom(monkeypatch):
    assert kernel_for("CPU", "lanes", same_width=True) is NativeKernel
    assert kernel_for("GPU", "lanes", same_width=True) is GraphKernel
    assert kernel_for("CPU", "lanes", same_width=False) is GraphKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "tensorflow")
    assert kernel_for("CPU", "lanes", same_width=True) is GraphKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    with pytest.raises(ValueError, match="must be 'native' or 'tensorflow' here"):
        kernel_for("CPU", "lanes", same_width=True)


def test_without_the_library(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "OPERATIONS", tmp_path / "missing.so")
    operations.cache_clear()
    try:
        assert kernel_for("CPU", "lanes", same_width=True) is GraphKernel
        assert kernel_for("CPU", "lanes", same_width=True) is GraphKernel
        assert caplog.text.count("the native kernel was not built") == 1
        monkeypatch.setenv("SCALECOM_KERNEL", "native")
        with pytest.raises(RuntimeError, match="install a C compiler and run pip"):
            kernel_for("CPU", "lanes", same_width=True)
    finally:
        operations.cache_clear()


def test_importing_it_loads_no_torch():
    program = "import sys, scalecom_hvd.tensorflow.keras; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=60,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
