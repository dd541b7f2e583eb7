"""The native and the plain-torch kernel are bit-identical to each other and to NumPy.

This holds for any size, rate and dtype. Only the plain-torch kernel supports exact selection.
"""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import finished
from scalecom_hvd.exchange.kernels.base import TensorSlot, Wire
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.kernels.native_kernel import NativeKernel
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.integers import blocks_of, levels_of
from scalecom_hvd.lanes import geometry
from scalecom_hvd.reference import ScaleComReference, select

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 2, 63, 64, 65, 6399, 6400, 6401, 20_000]
KERNELS = [NativeKernel, TorchKernel]


def kernels_for(selection):
    return KERNELS if selection == "lanes" else [TorchKernel]


def residue_dtype(grad_dtype):
    return torch.float64 if grad_dtype == torch.float64 else torch.float32


def offsets_dtype(shape):
    return getattr(torch, str(shape.offset_dtype))


def at_the_limit(dtype):
    """Return the largest usable gradient element, the next larger one, and the scale.

    The scale takes the first to the largest gradient that its residue accepts.
    """
    scale = 2.0**90 if dtype == torch.float16 else 0.5
    taken = largest_gradient(str(residue_dtype(dtype)).removeprefix("torch.")) / scale
    return taken, taken * (1 + torch.finfo(dtype).eps), scale


def new_offsets(*shapes):
    """Return the bytes, all zero, for the offsets of tensors that share a buffer."""
    return torch.zeros(
        sum(shape.k * shape.offset_dtype.itemsize for shape in shapes), dtype=torch.uint8
    )


def kernel_on(kernel, grad, residue, shape, scale=1.0, frozen=False):
    """Return a kernel for one tensor that has begun with this gradient."""
    made = kernel([TensorSlot(residue, shape, 0, 0)], [grad.dtype])
    made.begin([grad], [frozen], scale)
    return made


def new_bucket(parameters, config, ranks=1):
    """Return a bucket of tensors p0, p1, ... and the tensors; all are compressed at config.rate."""
    named = {f"p{i}": torch.nn.Parameter(p) for i, p in enumerate(parameters)}
    residues = Residues(config)
    residues.attach(named)
    assert residues.tensors.keys() == named.keys()
    return Bucket(0, list(named), named, residues, ranks), list(residues.tensors.values())


def side_by_side(residues, shapes, levels=0):
    """Return slots of tensors that share their buffers, and the layout of the buffers."""
    layout = Layout({str(i): shape for i, shape in enumerate(shapes)}, has_scales=levels > 0)
    places = layout.offsets, layout.values, layout.scales
    slots = []
    for i, (residue, shape) in enumerate(zip(residues, shapes, strict=True)):
        offsets, values, scales = (place[str(i)].start for place in places)
        slots.append(TensorSlot(residue, shape, offsets, values, levels, scales))
    return slots, layout


def all_moves(kernel, grads, residues, shapes, beta, scale, chooses, extra=0.0, levels=0):
    """Make all moves of a step on tensors that share their buffers.

    Returns the number of bad elements and every intermediate tensor.
    """
    residues = [residue.clone() for residue in residues]
    slots, layout = side_by_side(residues, shapes, levels)
    made = kernel(slots, [grad.dtype for grad in grads])
    made.begin(grads, [False] * len(grads), scale)
    offsets, chosen = (torch.zeros(layout.offsets_bytes, dtype=torch.uint8) for _ in range(2))
    values = torch.zeros(layout.n_values, dtype=torch.int8 if levels else residues[0].dtype)
    made.choose(extra, offsets)
    states = [offsets, *(residue.clone() for residue in residues)]
    wire = Wire(offsets, values)
    bad = made.take_and_accumulate(beta, extra, wire, chosen if chooses else None)
    states += [chosen, values, *(residue.clone() for residue in residues)]
    if not levels:
        states += [grad.clone() for grad in grads]
        made.scatter(states[-len(grads) :], offsets, values)
    made.roll_back()
    return int(bad), [*states, *residues]


def moved(kernel, grad, residue, shape, beta=1.0, scale=1.0, row=0, chooses=False):
    """Make the move of a step on one tensor, with this row of every lane.

    Returns the kernel, the number of bad elements, and the values.
    """
    made = kernel_on(kernel, grad, residue, shape, scale)
    values, chosen = torch.full((shape.k,), 9, dtype=residue.dtype), new_offsets(shape)
    wire = Wire(new_offsets(shape) + row, values)
    bad = made.take_and_accumulate(beta, 0.0, wire, chosen if chooses else None)
    return made, int(bad), values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("chooses", [False, True])
def test_kernels_agree_to_the_bit(dtype, numel, chooses):
    torch.manual_seed(numel)
    kind = residue_dtype(dtype)
    for rate in (1, 2, 2.5, 7, 100, 300, 70_000):
        grad = torch.randn(numel, dtype=torch.float64).to(dtype)
        residue = torch.randn(numel, dtype=kind)
        if numel > 100:
            grad[5], grad[17], grad[30] = float("nan"), float("inf"), -float("inf")
        shapes = [geometry(numel, rate, "lanes"), geometry(333, rate, "lanes")]
        grads, residues = [grad, torch.randn(333).to(dtype)], [residue, torch.randn(333).to(kind)]
        results = [
            all_moves(k, grads, residues, shapes, 0.3, 0.5, chooses, extra=7 / 3) for k in KERNELS
        ]
        assert results[0][0] == results[1][0] == (3 if numel > 100 else 0)
        for ours, plain in zip(results[0][1], results[1][1], strict=True):
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [*SIZES, 70_000])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_kernels_agree_on_integers_to_the_bit(dtype, numel, bits):
    torch.manual_seed(numel)
    kind, levels = residue_dtype(dtype), levels_of(bits)
    for rate in (1, 2.5, 16, 300):
        shapes = [geometry(numel, rate, "lanes"), geometry(333, rate, "lanes")]
        grads = [torch.randn(shape.numel, dtype=torch.float64).to(dtype) for shape in shapes]
        residues = [torch.randn(shape.numel, dtype=kind) for shape in shapes]
        residues[0][:300] *= 1e-38  # denormal, so that scales are zero
        grads[0][:300] *= 1e-30
        results = [
            all_moves(kernel, grads, residues, shapes, 0.3, 0.5, True, 7 / 3, levels)
            for kernel in KERNELS
        ]
        assert results[0][0] == results[1][0] == 0
        for ours, plain in zip(results[0][1], results[1][1], strict=True):
            assert torch.equal(ours, plain)
        for residue, after in zip(residues, results[0][1][-2:], strict=True):
            torch.testing.assert_close(after, residue)
        values = results[0][1][4]
        # The largest elements of long lanes differ little.
        assert values.abs().max() == levels or numel < 6000 or bits == 8 or rate > 16


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_integers_of_what_is_not_finite(kernel, value):
    """Such elements are counted. They affect neither integers nor scales."""
    grad, residue, shape = torch.ones(6400), torch.zeros(6400), geometry(6400, 16, "lanes")
    grad[100] = value
    bad, states = all_moves(kernel, [grad], [residue], [shape], 1.0, 1.0, True, 0.0, 3)
    assert bad >= 1
    choice, _, ahead, values, after, rolled_back = states
    scales = choice[: 4 * blocks_of(shape.k)].view(torch.float32)
    assert scales.tolist() == [170 / 256] * len(scales)  # two thirds, in 8 bits
    assert values.tolist() == [2] * shape.k
    assert torch.equal(rolled_back, residue)
    residue[200] = 3e38  # m + g overflows
    grad.fill_(1e30)
    bad, states = all_moves(kernel, [grad], [residue], [shape], 1, 1, True, 9, 3)
    assert bad == 1
    assert (states[3] == 0).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("selection", ["lanes", "exact"])
def test_kernels_agree_with_numpy(dtype, numel, selection):
    """Every move is spelled out in NumPy."""
    torch.manual_seed(numel)
    for kernel in kernels_for(selection):
        for rate in (1, 2.5, 100):
            shape = geometry(numel, rate, selection)
            grad, residue = torch.randn(2, numel, dtype=dtype)
            before = residue.clone()
            g, m = grad.numpy().copy(), residue.numpy().copy()
            beta, extra = m.dtype.type(0.3), m.dtype.type(2.5)
            offsets, chosen = new_offsets(shape), new_offsets(shape)
            made = kernel_on(kernel, grad, residue, shape)

            def positions(buffer, shape=shape):
                return shape.indices(buffer.view(offsets_dtype(shape)).numpy())

            made.choose(2.5, offsets)
            at = positions(offsets)
            np.testing.assert_array_equal(at, select(m + g, shape, selection))
            np.testing.assert_array_equal(residue.numpy(), m)

            values = torch.zeros(shape.k, dtype=dtype)
            made.take_and_accumulate(0.3, 2.5, Wire(offsets, values), chosen)
            want = m[at] + g[at] + np.where(m[at] * g[at] >= 0, extra * m[at], m.dtype.type(0))
            m[at] -= beta * want
            m += beta * g
            np.testing.assert_array_equal(values.numpy(), want)
            np.testing.assert_array_equal(residue.numpy(), m)
            np.testing.assert_array_equal(positions(chosen), select(m + g, shape, selection))

            output = torch.ones(numel, dtype=dtype)
            made.scatter([output], offsets, values)
            want = np.zeros_like(m)
            want[at] = values.numpy()
            np.testing.assert_array_equal(output.numpy(), want)

            made.roll_back()
            torch.testing.assert_close(residue, before)


@given(
    st.integers(1, 3000),
    st.integers(1, 400),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
    st.floats(0.01, 1),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_sent_plus_residue_is_what_came_in(numel, rate, dtype, seed, beta, flush):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    before = torch.randn(numel, generator=generator, dtype=residue_dtype(dtype))
    shape = geometry(numel, rate, "lanes")
    for kernel in KERNELS:
        residue, offsets = before.clone(), new_offsets(shape)
        values = torch.empty(shape.k, dtype=residue.dtype)
        made = kernel_on(kernel, grad, residue, shape)
        extra = 1 / beta - 1 if flush else 0.0
        made.choose(extra, offsets)
        made.take_and_accumulate(beta, extra, Wire(offsets, values))
        sent = torch.zeros(numel, dtype=torch.float64)
        sent[torch.from_numpy(shape.indices(offsets.view(offsets_dtype(shape)).numpy()))] = (
            values.double()
        )
        # eq. 5: the residue is the filtered rest of the accumulator.
        expected = (1 - beta) * before.double() + beta * (before.double() + grad.double() - sent)
        torch.testing.assert_close(residue.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 63, 64, 6399, 6400, 6464, 6499])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_and_counts_as_zero(kernel, dtype, position, value):
    grad = torch.ones(6500).to(dtype)
    grad[position] = value
    shape = geometry(6500, 100, "lanes")
    for chooses in (False, True):
        residue = torch.zeros(6500, dtype=residue_dtype(dtype))
        _, bad, values = moved(kernel, grad, residue, shape, row=50, chooses=chooses)
        assert bad == 1
        assert residue[position] == 0
        assert values.tolist() == [1] * shape.k
        assert residue.sum() == 6499 - shape.k


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 63, 64, 6399, 6499])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_value_beyond_the_largest_is_found_and_counts_as_zero(kernel, dtype, position, sign):
    """A residue of finite numbers may still overflow. Every later step would then be skipped."""
    taken, beyond, scale = at_the_limit(dtype)
    shape, ones = geometry(6500, 100, "lanes"), torch.ones(6500).to(dtype)
    for value, bad in ((taken, 0), (beyond, 1)):
        grad, residue = ones.clone(), torch.zeros(6500, dtype=residue_dtype(dtype))
        grad[position] = sign * value
        made, found, _ = moved(kernel, grad, residue, shape, 0.5, scale, row=50)
        assert found == bad
        assert float(residue[position]) == (0 if bad else sign * 0.5 * taken * scale)
        made.roll_back()
        assert not residue.any()


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_beyond_the_largest_is_not_sent(kernel, dtype):
    taken, beyond, scale = at_the_limit(dtype)
    grad = torch.tensor([taken, beyond], dtype=torch.float64).to(dtype)
    residue = torch.ones(2, dtype=residue_dtype(dtype))
    _, bad, values = moved(kernel, grad, residue, geometry(2, 1, "lanes"), scale=scale)
    assert bad == 1
    assert values.tolist() == [taken * scale, 1]


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("huge", [3e38, 2.0**100, float("inf"), float("nan")])
def test_no_gradient_poisons_the_residue_for_ever(kernel, lookahead, huge, monkeypatch):
    """After steps with huge or non-finite gradients, later steps count again.

    The oracle agrees.
    """
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    config = ScaleComConfig(bits=32, rate=10, min_numel=0, lookahead=lookahead, beta=0.5)
    bucket, (tensor,) = new_bucket([torch.zeros(700)], config)
    reference = ScaleComReference(1, {"p0": (700,)}, config)
    random, counted, ahead = np.random.default_rng(0), 0, None
    for step in range(60):
        grad = random.standard_normal(700).astype(np.float32)
        if 5 <= step < 50:
            grad[::3] = huge
        average = reference.step([{"p0": grad}])["p0"]
        output = torch.from_numpy(grad.copy())
        own = BucketStep(bucket, 1.0, {"p0": output})
        if lookahead and step == 0:
            ahead = finished(own.select())
            own.commit()
            own.release()
            continue
        offsets = ahead if lookahead else finished(own.select())
        chosen = finished(own.take_and_accumulate(offsets, choose=lookahead))
        assert np.isnan(average).all() == bool(own.bad)
        assert bool(own.bad) == (5 <= step < 50 and huge != 2.0**100)
        if own.bad:
            own.roll_back()
        else:
            own.receive(offsets, own.taken)
            own.commit()
            ahead = chosen
            counted += 1
            np.testing.assert_allclose(output.numpy(), average, rtol=1e-5, atol=1e-5)
        own.release()
        assert tensor.residue.isfinite().all()
    assert counted == 60 - lookahead - 45 * (huge != 2.0**100)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_not_even_a_full_residue_overflows(kernel):
    """The largest gradient vanishes in the rounding of a much larger float32."""
    residue, shape = torch.tensor([0, 0, 0, 3.4e38, -3.4e38, 2.0**125]), geometry(6, 2, "lanes")
    grad = torch.tensor([0, 0, 0, 1.0, -1.0, 1.0]) * largest_gradient("float32")
    before = residue.clone()
    for chooses in (False, True):
        assert moved(kernel, grad, residue, shape, chooses=chooses)[1] == 0
    assert torch.equal(residue, before)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_a_residue_that_is_infinite_is_reported(kernel):
    """No step makes a residue infinite, but a state loaded without checks may hold one."""
    grad, residue = torch.tensor([3.0, 1.0]), torch.tensor([float("inf"), 0.0])
    _, bad, values = moved(kernel, grad, residue, geometry(2, 1, "lanes"))
    assert bad == 1
    assert values.isfinite().all()


def test_averages_are_rounded_to_half_precision_alike():
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    for source in (halves.float(), halves.float() * (1 + 2**-12), halves.float() * (1 - 2**-12)):
        source = source.clamp(-65504, 65504)
        shape = geometry(source.numel(), 1, "lanes")
        for dtype in (torch.float16, torch.bfloat16):
            outputs = [torch.empty(source.numel(), dtype=dtype) for _ in KERNELS]
            for kernel, output in zip(KERNELS, outputs, strict=True):
                kernel_on(kernel, output, source, shape, 3.0).scatter(
                    [output], new_offsets(shape), source
                )
            assert torch.equal(*outputs)


DENORMALS = """
import threading
import numpy as np
from scalecom_hvd import native

def multiply():
    assert np.float32(1e-40) * np.float32(1) > 0, "denormal numbers are flushed to zero"
    products.append((np.full(1000, 1e-30, np.float32) * np.float32(1e-10)).all())

products = []
assert native.library() is not None
multiply()
thread = threading.Thread(target=multiply)
thread.start()
thread.join()
assert products == [True, True], "denormal numbers are flushed to zero"
"""


def test_the_library_leaves_the_processors_modes_alone():
    """Linking with -ffast-math would flush denormal numbers to zero in the whole process."""
    subprocess.run([sys.executable, "-c", DENORMALS], check=True, timeout=60)


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1])
def test_empty_and_one_element_tensors(dtype, numel, chooses):
    kind = residue_dtype(dtype)
    for rate in (1, 1.5, 100, 300, 70_000):
        shapes = [geometry(n, rate, "lanes") for n in (numel, 70, numel)]
        grads = [torch.randn(shape.numel).to(dtype) for shape in shapes]
        residues = [torch.randn(shape.numel).to(kind) for shape in shapes]
        results = [
            all_moves(k, grads, residues, shapes, 0.3, 0.5, chooses, extra=7 / 3) for k in KERNELS
        ]
        assert results[0][0] == results[1][0] == 0
        for ours, plain in zip(results[0][1], results[1][1], strict=True):
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_denormal_gradients_are_numbers_like_others(kernel, dtype):
    smallest, kind = torch.finfo(dtype).smallest_normal, residue_dtype(dtype)
    grad = (torch.randint(1, 120, (6500,)).double() * smallest / 128).to(dtype)
    residue, shape = torch.zeros(6500, dtype=kind), geometry(6500, 100, "lanes")
    offsets, values = new_offsets(shape), torch.zeros(shape.k, dtype=kind)
    made = kernel_on(kernel, grad, residue, shape)
    made.choose(0.0, offsets)
    chosen, expected = shape.indices(offsets.numpy()), grad.to(kind).numpy()
    np.testing.assert_array_equal(chosen, select(expected, shape, "lanes"))
    assert int(made.take_and_accumulate(1.0, 0.0, Wire(offsets, values))) == 0
    np.testing.assert_array_equal(values.numpy(), expected[chosen])
    expected[chosen] = 0
    np.testing.assert_array_equal(residue.numpy(), expected)
    assert values.all()


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_zero_send_zeros_of_the_first_rows(kernel, dtype):
    residue, shape = torch.zeros(6500, dtype=residue_dtype(dtype)), geometry(6500, 100, "lanes")
    offsets, values = new_offsets(shape) + 7, torch.ones(shape.k, dtype=residue.dtype)
    made = kernel_on(kernel, torch.zeros(6500, dtype=dtype), residue, shape)
    made.choose(0.0, offsets)
    assert int(made.take_and_accumulate(1.0, 0.0, Wire(offsets, values))) == 0
    assert not any(tensor.any() for tensor in (offsets, values, residue))


@pytest.mark.parametrize(
    ("numel", "rate", "selection", "lane", "offset"),
    [
        (6500, 100, "lanes", 3, 100),  # beyond a full group
        (6401, 100, "lanes", 64, 1),  # beyond the last group, which has one element
        (699, 7, "lanes", 99, 6),  # the last row is partial, and ends before this lane
        (6500, 300, "lanes", 5, -1),
        (1000, 2.5, "lanes", 399, 2),
        (1000, 10, "exact", 99, 1000),
        (1000, 10, "exact", 0, -1),
        (1000, 10, "exact", 7, 8),  # a repeated index
    ],
)
def test_offsets_outside_of_their_lanes_are_refused(numel, rate, selection, lane, offset):
    """Offsets come from other ranks and from files. Following wrong ones would overwrite memory."""
    grad, residue = torch.randn(numel), torch.randn(numel)
    shape = geometry(numel, rate, selection)
    before, output = residue.clone(), torch.ones(numel)
    slot = TensorSlot(residue, shape, 0, 0)
    values = torch.zeros(shape.k)
    offsets, chosen = new_offsets(shape), new_offsets(shape)
    if selection == "exact":
        slot.offsets(offsets).copy_(torch.arange(shape.k))
    made = kernel_on(kernels_for(selection)[0], grad, residue, shape)
    made.take_and_accumulate(1.0, 0.0, Wire(offsets, values))
    made.roll_back()
    residue.copy_(before)
    slot.offsets(offsets)[lane] = offset
    for move in (
        lambda: made.take_and_accumulate(1.0, 0.0, Wire(offsets, values)),
        lambda: made.take_and_accumulate(1.0, 0.0, Wire(offsets, values), chosen),
        lambda: made.scatter([output], offsets, values),
    ):
        with pytest.raises(
            RuntimeError, match="offsets that lie outside of their lanes.*go on without loading"
        ):
            move()
    made.roll_back()  # a refused move was not made
    assert torch.equal(residue, before)
    assert torch.equal(output, torch.ones(numel))


@pytest.mark.parametrize("selection", ["lanes", "exact"])
@pytest.mark.parametrize("choose", [False, True])
def test_a_step_with_refused_offsets_is_rolled_back(choose, selection):
    config = ScaleComConfig(bits=32, beta=0.5, selection=selection)
    bucket, (tensor,) = new_bucket([torch.zeros(6401)], config, ranks=2)
    before = tensor.residue.normal_().clone()
    own = BucketStep(bucket, 1.0, {"p0": torch.randn(6401)})
    offsets = finished(own.select())
    bucket.choices.split(offsets)["p0"]["offsets"][64] = 1
    with pytest.raises(RuntimeError, match="outside of their lanes"):
        finished(own.take_and_accumulate(offsets, choose))
    own.roll_back()
    assert torch.equal(tensor.residue, before)


class Failing(TorchFunctionMode):
    """Makes the n-th call of torch from now on run out of memory."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("made up")
        return function(*args, **(kwargs or {}))


# Dtypes for one kernel and for two. Plain torch's kernel serves the tensors whose gradients are
# wider than their residues.
SEVERAL = {
    "one": (torch.float32, torch.float16, torch.float32),
    "two": (torch.float32, torch.float64, torch.bfloat16, torch.float64),
}
ORDERS = {
    "leader": lambda own, offsets: finished(own.take_and_accumulate(finished(own.select()))),
    "follower": lambda own, offsets: finished(own.take_and_accumulate(offsets)),
    "look-ahead": lambda own, offsets: finished(own.take_and_accumulate(offsets, choose=True)),
}


@pytest.mark.parametrize("selection", ["lanes", "exact"])
@pytest.mark.parametrize("asked", ["native", "torch"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernels", SEVERAL)
def test_a_step_that_fails_anywhere_is_rolled_back(kernels, order, asked, selection, monkeypatch):
    """Of several tensors in several kernels, some have moved by then and some have not."""
    monkeypatch.setenv("SCALECOM_KERNEL", asked)
    dtypes = SEVERAL[kernels]
    config = ScaleComConfig(
        bits=32, rate=10, beta=0.5, selection=selection, residue_dtype="float32", min_numel=2
    )
    parameters = [torch.zeros(700 + i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    bucket, tensors = new_bucket(parameters, config, ranks=2)
    random = torch.Generator().manual_seed(1)
    offsets = torch.zeros_like(bucket.choices.new())
    for choice in bucket.choices.split(offsets).values() if selection == "exact" else ():
        choice["offsets"].copy_(torch.arange(len(choice["offsets"])))
    parts, n, failed = set(), 0, True
    while failed:
        before = [tensor.residue.normal_(generator=random).clone() for tensor in tensors]
        grads = {
            tensor.name: torch.randn(tensor.residue.numel(), generator=random).to(dtype)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        }
        grads[bucket.names[-1]].zero_()
        own = BucketStep(bucket, 0.5, grads, idle=bucket.names[-1:])
        try:
            with Failing(n):
                ORDERS[order](own, offsets)
            failed = False
        except torch.OutOfMemoryError:
            untouched = [
                torch.equal(tensor.residue, old)
                for tensor, old in zip(tensors, before, strict=True)
            ]
            parts.add(tuple(untouched))
        own.roll_back()
        own.release()
        for tensor, old, same in zip(tensors, before, untouched, strict=True):
            if same and failed:
                assert torch.equal(tensor.residue, old), f"{tensor.name}, call {n}"
            torch.testing.assert_close(
                tensor.residue, old, msg=lambda text, n=n: f"call {n}: {text}"
            )
        n += 1
    assert n > 3
    if asked == "torch" or kernels == "two" or selection == "exact":
        assert len(parts) > 2  # some failures came after some of the tensors had moved


def test_offsets_that_the_second_kernel_refuses():
    """Only the moves of the first kernel are rolled back."""
    config = ScaleComConfig(rate=100, bits=32, beta=0.5, residue_dtype="float32")
    dtypes = [torch.float64, torch.float32]  # for plain torch's and the native kernel
    parameters = [torch.zeros(6401, dtype=dtype) for dtype in dtypes]
    bucket, tensors = new_bucket(parameters, config, ranks=2)
    before = [tensor.residue.normal_().clone() for tensor in tensors]
    grads = [torch.randn(6401, dtype=dtype) for dtype in dtypes]
    own = BucketStep(bucket, 1.0, dict(zip(bucket.names, grads, strict=True)))
    assert [kernel.__class__ for kernel, _ in bucket.kernels] == [TorchKernel, NativeKernel]
    offsets = finished(own.select())
    bucket.choices.split(offsets)["p1"]["offsets"][64] = 1
    with pytest.raises(RuntimeError, match="outside of their lanes"):
        finished(own.take_and_accumulate(offsets))
    assert not torch.equal(tensors[0].residue, before[0])
    own.roll_back()
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor.residue, old)
    assert torch.equal(tensors[1].residue, before[1])


def test_which_kernel(monkeypatch):
    cpu, lanes = torch.device("cpu"), geometry(900, 7, "lanes")
    monkeypatch.delenv("SCALECOM_KERNEL", raising=False)
    assert kernel_for(cpu, torch.bfloat16, torch.float32, lanes) is NativeKernel
    assert kernel_for(cpu, torch.float64, torch.float32, lanes) is TorchKernel
    for asked in ("", "native", "torch", "triton"):
        monkeypatch.setenv("SCALECOM_KERNEL", asked)
        exact = geometry(900, 7, "exact")
        assert kernel_for(cpu, torch.float32, torch.float32, exact) is TorchKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    assert kernel_for(cpu, torch.float32, torch.float32, lanes) is TorchKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "fast")
    with pytest.raises(ValueError, match="must be 'native', 'triton' or 'torch'"):
        kernel_for(cpu, torch.float32, torch.float32, lanes)


def test_without_a_library_there_is_one_warning(tmp_path):
    code = (
        "import logging, pathlib; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "import torch; from scalecom_hvd import native; from scalecom_hvd.lanes import Lanes\n"
        "from scalecom_hvd.exchange.kernels.choice import kernel_for\n"
        f"native.LIBRARY = pathlib.Path({str(tmp_path / '_lanes.so')!r})\n"
        "what = torch.device('cpu'), torch.float32, torch.float32, Lanes(900, 7)\n"
        "print({kernel_for(*what).__name__ for _ in range(5)})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "{'TorchKernel'}"
    assert done.stderr.count("the native kernel was not built") == 1


def test_float16_subnormals_survive_flush_to_zero():
    """float16's smallest numbers are normal numbers in float32.

    Decoding must not pass through float32 denormals, which this mode flushes to zero.
    """
    assert torch.set_flush_denormal(True)
    try:
        shape = geometry(2**10, 1, "lanes")
        halves = torch.arange(2**10, dtype=torch.int16).view(torch.float16)
        for kernel in KERNELS:
            _, _, values = moved(kernel, halves, torch.zeros(2**10), shape)
            assert torch.equal(values, torch.arange(2**10) * 2.0**-24)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_a_frozen_tensor_keeps_its_residue_and_sends_zeros(kernel):
    grad, residue, shape = torch.zeros(200), torch.randn(200), geometry(200, 10, "lanes")
    before = residue.clone()
    made = kernel_on(kernel, grad, residue, shape, frozen=True)
    offsets, chosen, values = new_offsets(shape), new_offsets(shape), torch.ones(20)
    made.take_and_accumulate(0.5, 0.0, Wire(offsets, values), chosen)
    assert torch.equal(residue, before)
    assert not values.any()
    np.testing.assert_array_equal(
        shape.indices(chosen.numpy()), select(before.numpy(), shape, "lanes")
    )
    made.roll_back()
    assert torch.equal(residue, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_scatter_streams_large_tensors_at_any_alignment(dtype, shift):
    """The aligned parts of large outputs are written past the caches, the rest normally.

    The result is the same.
    """
    numel = 2**20 + 37
    memory = torch.randn(numel + shift, dtype=torch.float64).to(dtype)
    output, shape = memory[shift:], geometry(numel, 100, "lanes")
    offsets = (torch.arange(shape.k) % (shape.rows // 2)).to(torch.uint8)
    values = torch.randn(shape.k, dtype=residue_dtype(dtype))
    kernel_on(NativeKernel, output, torch.zeros(numel, dtype=residue_dtype(dtype)), shape).scatter(
        [output], offsets, values
    )
    expected = torch.zeros(numel, dtype=dtype)
    expected[torch.from_numpy(shape.indices(offsets.numpy()))] = values.to(dtype)
    assert torch.equal(output, expected)
