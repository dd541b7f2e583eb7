"""Every kernel makes the moves of reference.py, to the bit, for any size, rate and dtype.

TESTS_KERNELS names the kernels: "torch.Plain" is Plain in kernels_torch.py. By default, they are
those that run in any process. test_triton.py runs this file with Triton's kernel, and
test_sanitizers.py with the C code under sanitizers.
"""

import importlib
import os
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, Case, at_the_limit, loaded, stored

from scalecom_hvd import ScaleComConfig
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.lanes import Lanes, Positions, geometry
from scalecom_hvd.reference import ScaleComReference

ALWAYS = "torch.Native torch.Plain tensorflow.Native tensorflow.Graph"
NAMES = os.environ.get("TESTS_KERNELS", ALWAYS).split()
# Triton's interpreter takes 10 ms per tile, or per 8 rows of a last group, so it gets fewer cases.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and NAMES == ["triton.Tiles"]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
SIZES = [0, 1, 2, 63, 64, 65, 129, 448, 699, 1000, 4099, 6399, 6400, 6401, 20_000]
RATES = [1, 1.5, 2, 2.5, 7, 63.7, 100, 256, 257, 300, 1000, 40_000, 70_000]
LEVELS = [1, 3, 127]  # of 2, 3 and 8 bits


def load(name):
    module, _, adapter = name.partition(".")
    return getattr(importlib.import_module(f"kernels_{module}"), adapter)


def kernels(*wanted):
    """Parametrize a test by the kernels that have what is wanted."""
    found = {name: load(name) for name in NAMES}
    found = {name: own for name, own in found.items() if own.has.issuperset(wanted)}
    return pytest.mark.parametrize("kernel", found.values(), ids=found)


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        if not np.array_equal(mine, other, equal_nan=True):  # this is quicker
            np.testing.assert_array_equal(mine, other)


def as_numbers(case, outputs):
    return [loaded(own, dtype) for own, dtype in zip(outputs, case.dtypes, strict=True)]


def turns(kernel):
    """Return for which `chooses` a kernel can take and accumulate."""
    return (False, True) if "look-ahead" in kernel.has else (False,)


def check(kernel, case):
    """Make all moves with a kernel, and compare them. Returns what NumPy's move took."""
    made, choice = kernel(case), case.choose()
    same([made.choose()], [choice])
    same(made.state(), [*case.grads, *case.residues])
    if case.levels:
        case.offsets = choice
    for chooses in turns(kernel):
        made, want = kernel(case), case.take_and_accumulate(chooses)
        took = made.take_and_accumulate(chooses)
        assert took.bad == want.bad
        same(took.residues, want.residues)
        same([took.values, took.chosen], [want.values, want.chosen])
        averages = as_numbers(case, case.scatter(want.values))
        if not case.levels:
            same(as_numbers(case, made.scatter(want.values)), averages)
        if "roll-back" in kernel.has:
            rolled_back = case.roll_back(want, keeps_gradients=chooses)
            same(made.roll_back(keeps_gradients=chooses), rolled_back)
            same(made.roll_back(), rolled_back)  # there is nothing more
        if not case.levels:
            same(as_numbers(case, made.scatter(want.values, in_place=True)), averages)
    return want


def test_the_cases_are_those_of_the_reference():
    kinds = [("lanes", 32), ("lanes", 3), ("exact", 32)]
    for (selection, bits), beta, flush in product(kinds, (1.0, 0.3), (False, True)):
        choice = {"selection": selection, "rate": 7, "min_numel": 0}
        config = ScaleComConfig(bits=bits, beta=beta, flush=flush, **choice).resolved()
        shape = geometry(1000, 7, selection)
        case = Case([shape], ["float32"], config.levels, beta, 1.0, config.extra)
        case.offsets = case.choose()
        reference = ScaleComReference(1, {"t0": (1000,)}, config)
        reference.residues[0]["t0"] = case.residues[0].copy()
        average = reference.step([{"t0": case.grads[0]}])["t0"]
        took = case.take_and_accumulate()
        same([reference.residues[0]["t0"]], took.residues)
        same(case.scatter(took.sent), [average])


def effort(numel, rate):
    """Return about how long the interpreter takes, in tiles."""
    shape = Lanes(numel, rate)
    last = -(-(shape.k - shape.full_lanes) // 64) * -(-shape.rows // 8)
    return shape.full_lanes // 64 * -(-shape.rows // 32) + last


@dtypes
@pytest.mark.parametrize("numel", SIZES)
@kernels()
def test_all_moves_are_numpys(kernel, numel, dtype):
    i = SIZES.index(numel) + DTYPES.index(dtype)
    rates = RATES[i % 6 :: 6]
    if INTERPRETED:  # one of the rates that take little
        by_effort = sorted(RATES, key=lambda rate: effort(numel, rate))
        quick = [rate for rate in by_effort if effort(numel, rate) < 8] or by_effort[:3]
        rates = [quick[5 * i % len(quick)]]
    others = DTYPES[1:2] if dtype == "float64" else ["float32", "float16", "bfloat16"]
    other = others[i % len(others)] if "mixed dtypes" in kernel.has else dtype
    for j, rate in enumerate(rates, start=i):
        first = Lanes(numel if "no elements" in kernel.has else max(numel, 1), rate)
        shapes = [first, Lanes(333, RATES[3 * j % len(RATES)])]
        how = {"beta": 1.0, "scale": 1.0, "extra": 0.0} if j % 3 == 0 else {}
        case = Case(shapes, [dtype, other], (0, LEVELS[j // 2 % 3])[j % 2], **how, seed=i)
        for own, grad, residue in zip(case.dtypes, case.grads, case.residues, strict=True):
            if grad.size > 60:
                most = largest_gradient(case.kind.name) / case.scale
                tiny = 1e-40 if "denormal numbers" in kernel.has else 0
                special = [np.nan, most, tiny, -2 * most, -np.inf, 4 * most, np.inf]
                grad[[1, 5, 17, 20, 30, 41, 59]] = stored(np.array(special), own)
                residue[40] = np.inf
        check(kernel, case)


@kernels()
@pytest.mark.parametrize("levels", [0, 3])
def test_tensors_of_different_kinds_share_buffers(kernel, levels):
    """Their offsets have 0, 1, 2 and 4 bytes, and some are frozen. Gradients may lie anywhere."""
    shapes = [(333, 7), (333, 40_000), (900, 300), (1000, 100), (129, 1), (500, 2.5), (4500, 64)]
    shapes = [Lanes(*shape) for shape in shapes]
    assert {shape.offset_width for shape in shapes} == {0, 1, 2, 4}
    dtypes = ["float32", "bfloat16", "float16"] * 3
    mixed = "mixed dtypes" in kernel.has
    case = Case(shapes, dtypes[: len(shapes)] if mixed else ["float32"] * len(shapes), levels)
    check(kernel, case)
    for shift in (1, 2, 8)[: 1 if INTERPRETED else 3] if mixed else ():
        case.shift, case.frozen = shift, [i % 3 == shift % 3 for i in range(len(shapes))]
        check(kernel, case)


@kernels("large tensors")
@dtypes
def test_pieces_of_large_tensors(kernel, dtype):
    """TensorFlow's operations work in pieces that fit into a cache."""
    for levels in (0, 3):
        took = check(
            kernel, Case([Lanes(70_001, rate) for rate in (1, 7, 300, 2.5)], [dtype] * 4, levels)
        )
        assert not levels or np.abs(took.values).max() == levels
    # The last has full groups and offsets of 4 bytes.
    for shape in (Lanes(400_000, 300), Lanes(64 * 40_000 + 37, 40_000)):
        if dtype == "float32":
            check(kernel, Case([shape], [dtype], 127))


@kernels("large tensors")
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_large_outputs_are_written_at_any_alignment(kernel, shift):
    """The aligned parts of large outputs are written past the caches, the rest normally."""
    for dtype in DTYPES:
        case = Case([Lanes(2**20 + 37, 100)], [dtype])
        case.shift = shift
        values = case.residues[0][: len(case.indices()[0])]
        averages = as_numbers(case, case.scatter(values))
        same(as_numbers(case, kernel(case).scatter(values, in_place=True)), averages)


@kernels("large tensors")
def test_lanes_of_more_rows_than_a_gradients_dtype_counts(kernel):
    case = Case([Lanes(64 * (2**16 + 9) + 1, 2**16 + 9)], ["float16"])
    case.offsets.view(np.int32)[:2] = 3, 2**16 + 3
    values = np.ones(65, np.float32)
    averages = as_numbers(case, case.scatter(values))
    for case.shift in (0, 8):  # one of them is aligned
        same(as_numbers(case, kernel(case).scatter(values, in_place=True)), averages)


@kernels("exact selection")
@dtypes
def test_exact_selection(kernel, dtype):
    for numel, rate in product([1, 2, 65, 6401, 20_000], (1, 2.5, 100)):
        check(kernel, Case([Positions(numel, rate), Positions(70, 7)], [dtype] * 2))


EDGES = [0, 63, 64, 6399, 6400, 6464, 6499]  # tiles and groups begin and end there
LANE, LAST_LANE = slice(8, 6400, 64), slice(6400, 6500)


def put(case, at, grad, residue):
    case.grads[0][at] = stored(np.broadcast_to(grad, case.grads[0][at].shape), case.dtypes[0])
    case.residues[0][at] = residue


def around_the_limit(case, sign, beyond):
    *around, case.scale = at_the_limit(case.dtypes[0])
    put(case, EDGES, sign * around[beyond], 0.5)


def denormal(case):
    parts = np.random.default_rng(0).integers(1, 120, 6500) / 128
    put(case, slice(None), parts * float(np.finfo(case.kind).smallest_normal), 0)
    case.scale = 1.0


def nearly_nothing(case):
    """The scales of integers are zero then, and their values wait."""
    put(case, slice(None), 1e-30, case.residues[0] * case.kind.type(1e-38))


def full_residue(case):
    """The largest gradient vanishes in the rounding of a much larger residue."""
    signs = np.array([1.0, -1.0, 1, -1, 1, -1, 1])
    largest, case.scale, case.extra = largest_gradient(case.kind.name), 1.0, 0.0
    put(case, EDGES, signs * largest, signs[::-1] * np.finfo(case.kind).max)


def overflowing_values(case):
    """What waits is sent several times over, which is not finite."""
    put(case, LANE, 1.0, np.finfo(case.kind).max)
    case.extra = 9.0


# What makes a case special, and how many bad elements it then has.
SPECIAL = {
    **{str(x): (lambda case, x=x: put(case, EDGES, x, 1), 7) for x in (np.nan, np.inf, -np.inf)},
    "largest": (lambda case: around_the_limit(case, 1, beyond=False), 0),
    "smallest": (lambda case: around_the_limit(case, -1, beyond=False), 0),
    "beyond": (lambda case: around_the_limit(case, 1, beyond=True), 7),
    "beyond, negative": (lambda case: around_the_limit(case, -1, beyond=True), 7),
    "zero": (lambda case: put(case, slice(None), 0, 0), 0),
    # No step makes a residue infinite, but a state loaded without checks may hold one.
    "infinite residue": (lambda case: put(case, LAST_LANE, 1, np.inf), 1),
    "denormal": (denormal, 0),
    "nearly nothing": (nearly_nothing, 0),
    "full residue": (full_residue, 0),
    "overflowing values": (overflowing_values, 1),
}


@pytest.mark.parametrize("special", SPECIAL)
@dtypes
@kernels()
def test_special_numbers(kernel, dtype, special):
    """What is not finite or too large is counted, and counts as zero; all else is a number.

    A residue of finite numbers may still overflow. Every later step would then be skipped.
    """
    if dtype == "float16" and special in ("denormal", "full residue"):
        pytest.skip("any float16 is a normal float32, and smaller than the largest gradient")
    if special in ("denormal", "nearly nothing") and "denormal numbers" not in kernel.has:
        pytest.skip("TensorFlow flushes denormal numbers to zero")
    change, bad = SPECIAL[special]
    all_of_them = product((100, 1), (0, 3))
    for rate, levels in [(100, 3 * (dtype == "bfloat16"))] if INTERPRETED else all_of_them:
        case = Case([Lanes(6500, rate)], [dtype], levels, beta=0.5)
        change(case)
        took = check(kernel, case)
        # Where one lane's value is not finite, none of its 100 elements is.
        assert took.bad == (100 if (rate, bad) == (1, 1) else bad)
        assert np.isfinite(took.residues[0]).all() or special == "infinite residue"
        assert np.isfinite(took.sent).all()


@dtypes
@kernels()
def test_averages_are_rounded_to_the_gradients_dtype(kernel, dtype):
    """Of float16, all numbers are tried, and those close to them."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float64)[:: 97 if INTERPRETED else 1]
    tiny = 1e-40 if "denormal numbers" in kernel.has else 0.0
    special = [-0.0, 65519, 65520, 3e38, -3.4028e38, np.inf, -np.inf, np.nan, tiny, 2**-25]
    near = [halves, halves * (1 + 2**-12), halves * (1 - 2**-12), special, [1.00390625]]
    case = Case([Lanes(2 * sum(map(len, near)), 2)], [dtype])
    values = np.concatenate(near).astype(case.kind)
    for case.scale in (1.0, 1 / 3, 3.0):
        averages = as_numbers(case, case.scatter(values))
        same(as_numbers(case, kernel(case).scatter(values)), averages)


@kernels()
@settings(max_examples=10 if INTERPRETED else 60, deadline=None)
@given(
    st.integers(1, 300 if INTERPRETED else 3000),
    st.floats(1, 400),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
    st.floats(0.01, 1),
    st.booleans(),
)
def test_sent_plus_residue_is_what_came_in(kernel, numel, rate, dtype, seed, beta, flush):
    extra = 1 / beta - 1 if flush else 0.0
    shape = Lanes(numel, round(rate) if seed % 2 else rate)
    case = Case([shape], [dtype], (0, *LEVELS)[seed % 4], beta, 1.0, extra, seed)
    took = check(kernel, case)
    before, g = case.residues[0].astype(float), case.usable()[0][0].astype(float)
    sent = np.zeros(numel)
    sent[case.indices()[0]] = took.sent
    # eq. 5: the residue is the filtered rest of the accumulator.
    expected = (1 - beta) * before + beta * (before + g - sent)
    np.testing.assert_allclose(took.residues[0], expected, rtol=1e-5, atol=1e-5)


REFUSED = "offsets that lie outside of their lanes.*go on without loading"
OUTSIDE = [
    (Lanes(6500, 100), 3, 100),  # beyond a full group
    (Lanes(100_000, 50), 1000, 50),
    (Lanes(6401, 100), 64, 1),  # beyond the last group, which has one element
    (Lanes(699, 7), 99, 6),  # the last row is partial, and ends before this lane
    (Lanes(6500, 300), 5, -1),
    (Lanes(1000, 2.5), 399, 2),
    *((Positions(1000, 10), lane, offset) for lane, offset in ((99, 1000), (0, -1))),
    (Positions(1000, 10), 99, 0),  # not in order
]


def refuses(made):
    """Assert that all moves are refused, and so not made."""
    before, values = made.state(), np.zeros(made.case.layout.n_values, made.case.wire_dtype)
    for chooses in turns(made):
        with pytest.raises(made.refusal, match=REFUSED):
            made.take_and_accumulate(chooses)
    if not made.case.levels:
        with pytest.raises(made.refusal, match=REFUSED):
            made.scatter(values, in_place=True)
    if "roll-back" in made.has:
        made.roll_back()
    same(made.state(), before)


@kernels()
@pytest.mark.parametrize(("shape", "lane", "offset"), OUTSIDE)
def test_offsets_outside_of_their_lanes_are_refused(kernel, shape, lane, offset):
    """Offsets come from other ranks and from files. Following wrong ones would overwrite memory."""
    if f"checked {'positions' if isinstance(shape, Positions) else 'offsets'}" not in kernel.has:
        pytest.skip("it does not check them")
    case = Case([shape], ["float32"])
    case.offsets.view(shape.offset_dtype)[lane] = offset
    refuses(kernel(case))


@kernels("checked offsets")
@pytest.mark.parametrize("levels", [0, 3])
def test_random_bytes_as_offsets_are_refused(kernel, levels):
    """They are accepted if all of them happen to lie inside their lanes."""
    random, refused = np.random.default_rng(0), 0
    for numel, rate in product(SIZES[1:11], RATES):
        case = Case([Lanes(numel, rate), Lanes(333, 7)], ["float32"] * 2, levels)
        just_beyond, places = case.shapes["t0"].rows % 256, case.layout.offsets
        broken = random.integers(case.layout.scales_bytes, len(case.offsets), 3)
        case.offsets[broken] = random.choice([just_beyond, random.integers(0, 256)], 3)
        fits = all(
            shape.fit(case.offsets[places[name]].view(shape.offset_dtype))
            for name, shape in case.shapes.items()
        )
        if fits:
            check(kernel, case)
        else:
            refuses(kernel(case))
            refused += 1
    assert refused > 50


@kernels("checked offsets", "roll-back")
def test_offsets_that_are_damaged_in_mid_step_are_not_rolled_back(kernel):
    made = kernel(Case([Lanes(6401, 100)], ["float32"]))
    made.take_and_accumulate(False)
    made.offsets[64], before = 1, made.state()
    with pytest.raises(made.refusal, match=REFUSED):
        made.roll_back()
    same(made.state(), before)


@kernels("roll-back")
def test_of_tensors_that_share_a_move_some_are_not_rolled_back(kernel):
    """No rank uses the others."""
    case = Case([Lanes(333, 7), Lanes(129, 1), Lanes(500, 40)], ["float32"] * 3)
    case.frozen = [False, True, False]
    for spared in ([True, False, False], [False, True, True]):
        made, taken = kernel(case), case.take_and_accumulate(False)
        made.take_and_accumulate(False)
        both = zip(spared, taken.residues, case.roll_back(taken), strict=True)
        left = [stays if own else rolled_back for own, stays, rolled_back in both]
        same(made.roll_back(spared=spared), left)


@kernels("counted offsets")
def test_offsets_of_no_or_two_leaders_are_refused(kernel):
    case = Case([Lanes(5000, 50)], ["float32"])
    for wrong in (case.offsets[1:], np.concatenate([case.offsets, case.offsets])):
        case.offsets = wrong
        with pytest.raises(kernel.refusal, match="exactly one leader's offsets"):
            kernel(case).take_and_accumulate(False)


@kernels("checked sizes")
@pytest.mark.parametrize("what", ["gradient", "residue"])
def test_tensors_of_other_sizes_are_refused(kernel, what):
    case = Case([Lanes(5000, 50)], ["float32"])
    tensors = case.grads if what == "gradient" else case.residues
    tensors[0] = tensors[0][1:]
    for move in (lambda: kernel(case).choose(), lambda: kernel(case).take_and_accumulate(False)):
        with pytest.raises(
            kernel.refusal, match=f"a {what} does not have the size of its variable"
        ):
            move()
