"""The native and the plain-torch kernel: bit-identical to each other and to NumPy, for any size, rate and dtype."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.lanes import geometry
from scalecom_hvd.reference import ScaleComReference, select
from scalecom_hvd.exchange.kernels import (
    CHOOSE_ACCUMULATOR,
    CHOOSE_NOTHING,
    CHOOSE_RESIDUE,
    NativeKernel,
    Place,
    TorchKernel,
    kernel_for,
)
from scalecom_hvd.exchange.bucket import Moves
from scalecom_hvd.exchange.residue import CompressedTensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 2, 63, 64, 65, 6399, 6400, 6401, 20_000]
KERNELS = [NativeKernel, TorchKernel]


def residue_dtype(grad_dtype):
    return torch.float64 if grad_dtype == torch.float64 else torch.float32


def offsets_dtype(shape):
    return getattr(torch, str(shape.offset_dtype))


def at_the_limit(dtype):
    """A gradient element just small enough, the next larger one, and the scale that takes the first to the largest of its residue."""
    scale = 2.0**90 if dtype == torch.float16 else 0.5
    taken = largest_gradient(str(residue_dtype(dtype)).removeprefix("torch.")) / scale
    return taken, taken * (1 + torch.finfo(dtype).eps), scale


def new_offsets(*shapes):
    """Bytes for the offsets of tensors side by side, all zero."""
    return torch.zeros(sum(shape.k * shape.offset_dtype.itemsize for shape in shapes), dtype=torch.uint8)


def kernel_on(kernel, grad, residue, shape, scale=1.0, frozen=False):
    """A kernel for one tensor, with its gradient taken up."""
    made = kernel([Place(residue, shape, 0, 0)], [grad.dtype])
    made.begin([grad], [frozen], scale)
    return made


def all_moves(kernel, grads, residues, shapes, beta, scale, choose, wire):
    """Everything a step does with tensors that share their buffers; gives every intermediate tensor."""
    residues, states = [residue.clone() for residue in residues], []
    places, offsets_at, values_at = [], 0, 0
    for residue, shape in zip(residues, shapes, strict=True):
        places.append(Place(residue, shape, offsets_at, values_at))
        offsets_at, values_at = offsets_at + shape.k * shape.offset_dtype.itemsize, values_at + shape.k
    made = kernel(places, [grad.dtype for grad in grads])
    made.begin(grads, [False] * len(grads), scale)

    def note(*tensors):
        states.extend(t.clone() for t in (*residues, *tensors))

    offsets, chosen = new_offsets(*shapes), new_offsets(*shapes)
    for place in places:
        if choose == CHOOSE_NOTHING and place.geometry.width == 0:
            place.offsets(offsets).copy_(torch.arange(place.geometry.k))
    values, sent = torch.zeros(2, values_at, dtype=wire)
    if choose == CHOOSE_RESIDUE:  # look-ahead, after a first selection
        made.filter(0.0, CHOOSE_ACCUMULATOR, offsets)
        bad = made.gather_and_filter(beta, offsets, values, sent, 65504 / 4, choose, chosen)
    else:
        bad = made.filter(beta, choose, offsets)
        note(offsets)
        made.gather(beta, 1 - beta, offsets, values, sent, 65504 / 4)
    note(offsets, chosen, values, sent)
    outputs = [grad.clone() for grad in grads]
    made.scatter(outputs, offsets, values)
    states.extend(outputs)
    made.undo()
    note()
    return int(bad), states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("choose", [CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE])
def test_kernels_agree_to_the_bit(dtype, numel, choose):
    torch.manual_seed(numel)
    kind = residue_dtype(dtype)
    for rate in (1, 2, 2.5, 7, 100, 300, 70_000):
        for selection in ("lanes", "exact"):
            for wire in (kind, torch.float16):
                grad, residue = torch.randn(numel, dtype=torch.float64).to(dtype), torch.randn(numel, dtype=kind)
                if numel > 100:
                    grad[5], grad[17], grad[30] = float("nan"), float("inf"), -float("inf")
                shape = geometry(numel, rate, selection)
                other = geometry(333, rate, selection)
                grads, residues = [grad, torch.randn(333).to(dtype)], [residue, torch.randn(333).to(kind)]
                results = [all_moves(k, grads, residues, [shape, other], 0.3, 0.5, choose, wire) for k in KERNELS]
                # Look-ahead's sent coordinates take part in its filter, so one that is not finite may count twice.
                assert results[0][0] == results[1][0] >= (3 if numel > 100 else 0)
                for ours, plain in zip(results[0][1], results[1][1], strict=True):
                    assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("selection", ["lanes", "exact"])
def test_kernels_agree_with_numpy(dtype, numel, selection):
    torch.manual_seed(numel)
    for kernel in KERNELS:
        for rate in (1, 2.5, 100):
            grad, residue, shape = torch.randn(numel, dtype=dtype), torch.randn(numel, dtype=dtype), geometry(numel, rate, selection)
            g, m = grad.numpy().copy(), residue.numpy().copy()
            beta = m.dtype.type(0.3)
            offsets = new_offsets(shape)
            made = kernel_on(kernel, grad, residue, shape)
            made.filter(0.3, CHOOSE_ACCUMULATOR, offsets)
            np.testing.assert_array_equal(shape.indices(offsets.view(offsets_dtype(shape)).numpy()), select(m + g, shape, selection))
            np.testing.assert_array_equal(residue.numpy(), m + beta * g)
            made.filter(0.3, CHOOSE_RESIDUE, offsets)
            chosen = shape.indices(offsets.view(offsets_dtype(shape)).numpy())
            np.testing.assert_array_equal(chosen, select(m + beta * g + beta * g, shape, selection))


@given(st.integers(1, 3000), st.integers(1, 400), st.sampled_from(DTYPES), st.integers(0, 2**31), st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_sent_plus_residue_is_what_came_in(numel, rate, dtype, seed, beta):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    before = torch.randn(numel, generator=generator, dtype=residue_dtype(dtype))
    shape = geometry(numel, rate, "lanes")
    for kernel in KERNELS:
        residue, offsets = before.clone(), new_offsets(shape)
        values, copy = torch.empty(2, shape.k, dtype=torch.float16)
        made = kernel_on(kernel, grad, residue, shape)
        made.filter(beta, CHOOSE_ACCUMULATOR, offsets)
        made.gather(beta, 1 - beta, offsets, values, copy, 65504)
        assert torch.equal(values, copy)
        sent = torch.zeros(numel, dtype=torch.float64)
        sent[torch.from_numpy(shape.indices(offsets.view(offsets_dtype(shape)).numpy()))] = values.double()
        # eq. 5: what stays is the filtered rest of the accumulator
        expected = (1 - beta) * before.double() + beta * (before.double() + grad.double() - sent)
        torch.testing.assert_close(residue.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 63, 64, 6399, 6400, 6464, 6499])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_and_counts_as_zero(kernel, dtype, position, value):
    grad = torch.ones(6500).to(dtype)
    grad[position] = value
    for choose in (CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE):
        residue, shape = torch.zeros(6500, dtype=residue_dtype(dtype)), geometry(6500, 100, "lanes")
        assert int(kernel_on(kernel, grad, residue, shape).filter(1.0, choose, new_offsets(shape))) == 1
        assert residue[position] == 0
        assert residue.sum() == 6499


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 63, 64, 6399, 6499])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_value_beyond_the_largest_is_found_and_counts_as_zero(kernel, dtype, position, sign):
    """A residue of finite numbers may still overflow, and would void every later step."""
    taken, beyond, scale = at_the_limit(dtype)
    shape, ones = geometry(6500, 100, "lanes"), torch.ones(6500).to(dtype)
    for choose in (CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE):
        for value, bad in ((taken, 0), (beyond, 1)):
            grad, residue = ones.clone(), torch.zeros(6500, dtype=residue_dtype(dtype))
            grad[position] = sign * value
            made = kernel_on(kernel, grad, residue, shape, scale)
            assert int(made.filter(0.5, choose, new_offsets(shape))) == bad
            assert float(residue[position]) == (0 if bad else sign * 0.5 * taken * scale)
            made.undo()
            assert not residue.any()


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_beyond_the_largest_is_not_sent(kernel, dtype):
    taken, beyond, scale = at_the_limit(dtype)
    shape = geometry(2, 1, "lanes")
    grad, residue = torch.tensor([taken, beyond], dtype=torch.float64).to(dtype), torch.ones(2, dtype=residue_dtype(dtype))
    values, sent = torch.empty(2, 2, dtype=residue.dtype)
    for lookahead in (False, True):
        made = kernel_on(kernel, grad, residue, shape, scale)
        if lookahead:
            assert int(made.gather_and_filter(1.0, new_offsets(shape), values, sent, 1.0, CHOOSE_NOTHING, None)) == 1
        else:
            assert int(made.gather(1.0, 1.0, new_offsets(shape), values, sent, 1.0)) == 0  # the filter counts
        assert values.tolist() == sent.tolist() == [taken * scale, 1]
        residue.fill_(1)


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("huge", [3e38, 2.0**100, float("inf"), float("nan")])
def test_no_gradient_poisons_the_residue_for_ever(kernel, lookahead, huge, monkeypatch):
    """What gradients in their millions of steps may be, the steps after them count again. The oracle says the same."""
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    config = ScaleComConfig(dense=(), warmup_steps=0, rate=10, min_numel=0, lookahead=lookahead, beta=0.5)
    parameter = torch.zeros(700)
    tensor = CompressedTensor("p", parameter, 10, config)
    moves, reference = Moves([tensor]), ScaleComReference(1, {"p": (700,)}, config)
    offsets, ahead = moves.new_offsets(parameter.device), moves.new_offsets(parameter.device)
    values = torch.zeros(moves.n_values)
    random, counted = np.random.default_rng(0), 0
    for step in range(60):
        grad = random.standard_normal(700).astype(np.float32)
        if 5 <= step < 50:
            grad[::3] = huge
        average = reference.step([{"p": grad}])["p"]
        moves.begin([torch.from_numpy(grad.copy())], 1.0, [False])
        if lookahead and step == 0:
            moves.choose_without_filter(ahead)
            moves.finish()
            continue
        if lookahead:
            offsets.copy_(ahead)
            bad = moves.gather_and_filter(offsets, values, 1, ahead)
        else:
            bad = moves.filter(offsets) + moves.gather(offsets, values, 1)
        assert np.isnan(average).all() == bool(bad) == (5 <= step < 50 and huge != 2.0**100)
        if bad:
            moves.undo()
            ahead.copy_(offsets)
        else:
            output = torch.zeros(700)
            moves.scatter([output], offsets, values)
            moves.finish()
            counted += 1
            np.testing.assert_allclose(output.numpy(), average, rtol=1e-5, atol=1e-5)
        assert tensor.residue.isfinite().all()
    assert counted == 60 - lookahead - 45 * (huge != 2.0**100)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_not_even_a_full_residue_overflows(kernel):
    """The largest gradient is lost in the rounding of a float32 that is much larger."""
    residue, shape = torch.tensor([3.4e38, -3.4e38, 2.0**125]), geometry(3, 1, "lanes")
    grad = torch.tensor([1.0, -1.0, 1.0]) * largest_gradient("float32")
    made, before = kernel_on(kernel, grad, residue, shape), residue.clone()
    for choose in (CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE):
        assert int(made.filter(1.0, choose, new_offsets(shape))) == 0
    assert torch.equal(residue, before)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_float16_wire_saturates_and_keeps_the_rest(kernel):
    grad, residue, shape = torch.tensor([1e6, -1e9, 3.0]), torch.zeros(3), geometry(3, 1, "lanes")
    values, sent = torch.empty(2, 3, dtype=torch.float16)
    made = kernel_on(kernel, grad, residue, shape)
    made.filter(1.0, CHOOSE_NOTHING, None)
    assert int(made.gather(1.0, 0.0, new_offsets(shape), values, sent, 65504 / 2)) == 0
    assert values.tolist() == [32752, -32752, 3]
    torch.testing.assert_close(residue + values.float(), grad)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_a_residue_that_is_infinite_is_reported(kernel):
    """No step makes it so; who loads state past all checks learns of it."""
    grad, residue, shape = torch.tensor([3.0, 1.0]), torch.tensor([float("inf"), 0.0]), geometry(2, 1, "lanes")
    made = kernel_on(kernel, grad, residue, shape)
    made.filter(1.0, CHOOSE_NOTHING, None)
    values, sent = torch.empty(2, 2)
    assert int(made.gather(1.0, 0.0, new_offsets(shape), values, sent, 1.0)) == 1
    assert values.isfinite().all()


def test_every_float16_survives_the_wire():
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    for source in (halves.float(), halves.float() * (1 + 2**-12), halves.float() * (1 - 2**-12)):
        source = source.clamp(-65504, 65504)
        values, sent = torch.empty(2, source.numel(), dtype=torch.float16)
        shape = geometry(source.numel(), 1, "lanes")
        kernel_on(KERNELS[0], torch.zeros_like(source), source.clone(), shape).gather(1.0, 1.0, new_offsets(shape), values, sent, 65504)
        assert torch.equal(values, source.half())
        for dtype in (torch.float16, torch.bfloat16):
            outputs = [torch.empty(source.numel(), dtype=dtype) for _ in KERNELS]
            for kernel, output in zip(KERNELS, outputs, strict=True):
                kernel_on(kernel, output, source, shape, 3.0).scatter([output], new_offsets(shape), source)
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


@pytest.mark.parametrize("choose", [CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1])
def test_empty_and_one_element_tensors(dtype, numel, choose):
    kind = residue_dtype(dtype)
    for rate in (1, 1.5, 100, 300, 70_000):
        for wire in (kind, torch.float16):
            shapes = [geometry(n, rate, "lanes") for n in (numel, 70, numel)]
            grads = [torch.randn(shape.numel).to(dtype) for shape in shapes]
            residues = [torch.randn(shape.numel).to(kind) for shape in shapes]
            results = [all_moves(k, grads, residues, shapes, 0.3, 0.5, choose, wire) for k in KERNELS]
            assert results[0][0] == results[1][0] == 0
            for ours, plain in zip(results[0][1], results[1][1], strict=True):
                assert torch.equal(ours, plain)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_denormal_gradients_are_numbers_like_others(kernel, dtype):
    smallest, kind = torch.finfo(dtype).smallest_normal, residue_dtype(dtype)
    grad = (torch.randint(1, 120, (6500,)).double() * smallest / 128).to(dtype)
    residue, shape = torch.zeros(6500, dtype=kind), geometry(6500, 100, "lanes")
    offsets, (values, sent) = new_offsets(shape), torch.zeros(2, shape.k, dtype=kind)
    made = kernel_on(kernel, grad, residue, shape)
    assert int(made.filter(1.0, CHOOSE_ACCUMULATOR, offsets)) == 0
    chosen = shape.indices(offsets.numpy())
    np.testing.assert_array_equal(chosen, select(grad.to(kind).numpy(), shape, "lanes"))
    np.testing.assert_array_equal(residue.numpy(), grad.to(kind).numpy())
    assert int(made.gather(1.0, 0.0, offsets, values, sent, 1.0)) == 0
    np.testing.assert_array_equal(values.numpy(), grad.to(kind).numpy()[chosen])
    assert values.all()


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_zero_send_zeros_of_the_first_rows(kernel, dtype):
    residue, shape = torch.zeros(6500, dtype=residue_dtype(dtype)), geometry(6500, 100, "lanes")
    offsets, (values, sent) = new_offsets(shape) + 7, torch.ones(2, shape.k, dtype=residue.dtype)
    made = kernel_on(kernel, torch.zeros(6500, dtype=dtype), residue, shape)
    assert int(made.filter(1.0, CHOOSE_ACCUMULATOR, offsets)) == 0
    assert int(made.gather(1.0, 0.0, offsets, values, sent, 1.0)) == 0
    assert not any(tensor.any() for tensor in (offsets, values, sent, residue))


@pytest.mark.parametrize(
    ("numel", "rate", "selection", "lane", "offset"),
    [
        (6500, 100, "lanes", 3, 100),  # beyond a full group
        (6401, 100, "lanes", 64, 1),  # beyond the last group, which is one element
        (699, 7, "lanes", 99, 6),  # the last row is partial, and ends before this lane
        (6500, 300, "lanes", 5, -1),
        (1000, 2.5, "lanes", 399, 2),
        (1000, 10, "exact", 99, 1000),
        (1000, 10, "exact", 0, -1),
    ],
)
@pytest.mark.parametrize("wire", [torch.float32, torch.float16], ids=str)
def test_offsets_outside_of_their_lanes_are_refused(numel, rate, selection, lane, offset, wire):
    """They come from other ranks and from files: following them would overwrite memory."""
    grad, residue, shape = torch.randn(numel), torch.randn(numel), geometry(numel, rate, selection)
    before, output = residue.clone(), torch.ones(numel)
    place, values, sent = Place(residue, shape, 0, 0), torch.zeros(shape.k, dtype=wire), torch.zeros(shape.k, dtype=wire)
    offsets, chosen = new_offsets(shape), new_offsets(shape)
    if selection == "exact":
        place.offsets(offsets).copy_(torch.arange(shape.k))
    made = kernel_on(NativeKernel, grad, residue, shape)
    made.gather(1.0, 0.0, offsets, values, sent, 1.0)
    residue.copy_(before)
    place.offsets(offsets)[lane] = offset
    for move in (
        lambda: made.gather(1.0, 0.0, offsets, values, sent, 1.0),
        lambda: made.gather_and_filter(1.0, offsets, values, sent, 1.0, CHOOSE_NOTHING, None),
        lambda: made.gather_and_filter(1.0, offsets, values, sent, 1.0, CHOOSE_RESIDUE, chosen),
        lambda: made.scatter([output], offsets, values),
    ):
        with pytest.raises(RuntimeError, match="offsets that lie outside of their lanes.*go on without loading"):
            move()
    made.undo()  # what was refused was not done
    assert torch.equal(residue, before)
    assert torch.equal(output, torch.ones(numel))


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_step_with_refused_offsets_is_taken_back(lookahead):
    tensor = CompressedTensor("p", torch.zeros(6401), 100, ScaleComConfig(beta=0.5))
    tensor.residue.copy_(torch.randn(6401))
    moves, before = Moves([tensor]), tensor.residue.clone()
    offsets, values = moves.new_offsets(torch.device("cpu")), torch.zeros(moves.n_values)
    moves.begin([torch.randn(6401)], 1.0, [False])
    if not lookahead:
        moves.filter(offsets)
    offsets[64] = 1
    with pytest.raises(RuntimeError, match="outside of their lanes"):
        (moves.gather_and_filter if lookahead else moves.gather)(offsets, values, 2, *[None] * lookahead)
    moves.undo()
    torch.testing.assert_close(tensor.residue, before)


class Failing(TorchFunctionMode):
    """The n-th call of torch from now on runs out of memory."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("made up")
        return function(*args, **(kwargs or {}))


# One kernel and two: those whose gradients are wider than residues are plain torch's.
SEVERAL = {"one": (torch.float32, torch.float16, torch.float32), "two": (torch.float32, torch.float64, torch.bfloat16, torch.float64)}
ORDERS = {"leader": ("filter", "gather"), "follower": ("filter without choice", "gather"), "look-ahead": ("gather_and_filter",)}


@pytest.mark.parametrize("selection", ["lanes", "exact"])
@pytest.mark.parametrize("asked", ["native", "torch"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernels", SEVERAL)
def test_a_step_that_fails_anywhere_is_taken_back(kernels, order, asked, selection, monkeypatch):
    """Of several tensors in several kernels some were moved and some were not."""
    monkeypatch.setenv("SCALECOM_KERNEL", asked)
    dtypes = SEVERAL[kernels]
    config = ScaleComConfig(beta=0.5, selection=selection, residue_dtype="float32")
    tensors = [CompressedTensor(f"p{i}", torch.zeros(700 + i, dtype=dtype), 10, config) for i, dtype in enumerate(dtypes)]
    random = torch.Generator().manual_seed(1)
    moves, frozen = Moves(tensors), [False] * (len(dtypes) - 1) + [True]
    offsets, chosen = (moves.new_offsets(torch.device("cpu")) for _ in range(2))
    values = torch.zeros(moves.n_values)
    for tensor in tensors if selection == "exact" else ():
        moves.offsets_of(tensor, offsets).copy_(torch.arange(tensor.geometry.k))
    make = {
        "filter": lambda: moves.filter(offsets),
        "filter without choice": lambda: moves.filter(),
        "gather": lambda: moves.gather(offsets, values, 2),
        "gather_and_filter": lambda: moves.gather_and_filter(offsets, values, 2, chosen),
    }
    parts, n, failed = set(), 0, True
    while failed:
        before = [tensor.residue.normal_(generator=random).clone() for tensor in tensors]
        moves.begin([torch.randn(t.residue.numel(), generator=random).to(d) for t, d in zip(tensors, dtypes, strict=True)], 0.5, frozen)
        try:
            with Failing(n):
                for move in ORDERS[order]:
                    make[move]()
            failed = False
        except torch.OutOfMemoryError:
            untouched = [torch.equal(tensor.residue, old) for tensor, old in zip(tensors, before, strict=True)]
            parts.add(tuple(untouched))
        moves.undo()
        for tensor, old, same in zip(tensors, before, untouched, strict=True):
            if same and failed:
                assert torch.equal(tensor.residue, old), f"{tensor.name}, call {n}"
            torch.testing.assert_close(tensor.residue, old, msg=lambda text, n=n: f"call {n}: {text}")
        n += 1
    assert n > 5
    if asked == "torch" or kernels == "two":
        assert len(parts) > 2  # some that failed had moved some tensors, and not others


@pytest.mark.parametrize("lookahead", [False, True])
def test_offsets_that_the_second_kernel_refuses(lookahead):
    """What the first has done is taken back, and nothing else."""
    config = ScaleComConfig(beta=0.5, residue_dtype="float32")
    dtypes = [torch.float64, torch.float32]  # plain torch's, then the native kernel's
    tensors = [CompressedTensor(f"p{i}", torch.zeros(6401, dtype=dtype), 100, config) for i, dtype in enumerate(dtypes)]
    before = [tensor.residue.normal_().clone() for tensor in tensors]
    moves = Moves(tensors)
    offsets, values = moves.new_offsets(torch.device("cpu")), torch.zeros(moves.n_values)
    moves.begin([torch.randn(6401, dtype=dtype) for dtype in dtypes], 1.0, [False, False])
    if not lookahead:
        moves.filter(offsets)
    moves.offsets_of(tensors[1], offsets)[64] = 1
    with pytest.raises(RuntimeError, match="outside of their lanes"):
        (moves.gather_and_filter if lookahead else moves.gather)(offsets, values, 2, *[None] * lookahead)
    moves.undo()
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor.residue, old)
    if lookahead:
        assert torch.equal(tensors[1].residue, before[1])


def test_which_kernel(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("SCALECOM_KERNEL", raising=False)
    assert kernel_for(cpu, torch.bfloat16, torch.float32) is NativeKernel
    assert kernel_for(cpu, torch.float64, torch.float32) is TorchKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    assert kernel_for(cpu, torch.float32, torch.float32) is TorchKernel
    monkeypatch.setenv("SCALECOM_KERNEL", "fast")
    with pytest.raises(ValueError, match="must be 'native', 'triton' or 'torch'"):
        kernel_for(cpu, torch.float32, torch.float32)


def test_without_a_library_there_is_one_warning(tmp_path):
    code = (
        "import logging, pathlib; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "import torch; from scalecom_hvd import native; from scalecom_hvd.exchange.kernels import kernel_for\n"
        f"native.LIBRARY = pathlib.Path({str(tmp_path / '_lanes.so')!r})\n"
        "kinds = {kernel_for(torch.device('cpu'), torch.float32, torch.float32).__name__ for _ in range(5)}; print(kinds)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "{'TorchKernel'}"
    assert done.stderr.count("the native kernel was not built") == 1


def test_float16_subnormals_survive_flush_to_zero():
    """float16's smallest numbers are float32 normals; decoding must not pass through float32 denormals, which this mode drops."""
    assert torch.set_flush_denormal(True)
    try:
        shape = geometry(2**10, 1, "lanes")
        halves = torch.arange(2**10, dtype=torch.int16).view(torch.float16)
        for kernel in KERNELS:
            residue = torch.zeros(2**10)
            kernel_on(kernel, halves, residue, shape).filter(1.0, CHOOSE_NOTHING, None)
            assert torch.equal(residue, torch.arange(2**10) * 2.0**-24)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "torch"])
def test_a_frozen_tensor_keeps_its_residue_and_sends_zeros(kernel):
    grad, residue, shape = torch.zeros(200), torch.randn(200), geometry(200, 10, "lanes")
    before = residue.clone()
    made = kernel_on(kernel, grad, residue, shape, frozen=True)
    offsets, chosen, values, sent = new_offsets(shape), new_offsets(shape), torch.ones(20), torch.ones(20)
    made.gather_and_filter(0.5, offsets, values, sent, 1.0, CHOOSE_RESIDUE, chosen)
    assert torch.equal(residue, before)
    assert not values.any()
    np.testing.assert_array_equal(shape.indices(chosen.numpy()), select(before.numpy(), shape, "lanes"))
    made.undo()
    assert torch.equal(residue, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_scatter_streams_large_tensors_at_any_alignment(dtype, shift):
    """Large outputs are written past the caches where they are aligned, and plainly elsewhere, with the same result."""
    numel = 2**20 + 37
    memory = torch.randn(numel + shift, dtype=torch.float64).to(dtype)
    output, shape = memory[shift:], geometry(numel, 100, "lanes")
    offsets = (torch.arange(shape.k) % (shape.rows // 2)).to(torch.uint8)
    values = torch.randn(shape.k, dtype=residue_dtype(dtype))
    kernel_on(NativeKernel, output, torch.zeros(numel, dtype=residue_dtype(dtype)), shape).scatter([output], offsets, values)
    expected = torch.zeros(numel, dtype=dtype)
    expected[torch.from_numpy(shape.indices(offsets.numpy()))] = values.to(dtype)
    assert torch.equal(output, expected)
