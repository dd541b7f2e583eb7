"""The fused lane kernel for CUDA, in Triton: what one step does to the residues of many tensors.

There is one launch per move. PyTorch's Triton kernel passes addresses, so this module imports no
other framework. The arithmetic is that of native/lanes.c, rounding by rounding, so results are
bit-identical to every other kernel's; launch with enable_fp_fusion=False. If TRITON_INTERPRET=1 is
in the environment when this module is imported, the kernels run on CPU tensors, slowly.

One program handles one tile: at most 64 lanes side by side (lanes.py), over all their rows. Tables
on the device say where things lie:

    tiles    int32 (tiles, 2)                a tile's tensor, and how many of the tensor's tiles
                                             come before it
    tensors  int64 (tensors, N_FIELDS)       what is fixed about a tensor: the fields RESIDUE to
                                             LEVELS
    step     int64 (tensors, N_STEP_FIELDS)  what changes in a step: the fields ADDRESS to ALIGNED

Floats arrive as float64 and are rounded to the residue's dtype once. GRAD is the dtype in which
gradients are stored. int16 stands for bfloat16, whose bits are converted here (the interpreter does
not round them). REAL, the residue's dtype, is float64 for float64 gradients and float32 for others.
"""

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from scalecom_hvd import integers, lanes
from scalecom_hvd.config import largest_gradient

# Globals that a kernel reads must be constexpr.
LANES = tl.constexpr(lanes.LANES)
VALUES_PER_SCALE = tl.constexpr(integers.BLOCK)
SMALLEST_SCALE = tl.constexpr(integers.SMALLEST_SCALE)
LARGEST_SCALE = tl.constexpr(float(np.finfo(np.float32).max))
LAST_ROW = tl.constexpr(2**31 - 1)
LARGEST_32 = tl.constexpr(int(np.float32(largest_gradient("float32")).view(np.int32)))
LARGEST_64 = tl.constexpr(int(np.float64(largest_gradient("float64")).view(np.int64)))
# How many rows the threads of a program hold side by side if each thread has 16 bytes. A kernel
# keeps one best element for each of these rows.
SLOTS = tl.constexpr(8)
# How much residue of a lane is read at a time in a wide tile: a thread then has 4 x 16 bytes.
WIDE_BITS = tl.constexpr(1024)

# RESIDUE: its address. NUMEL, K, FULL_LANES: as in lanes.py. ROWS, LAST_ROWS: of a full group, and
# of the last one. OFFSET_WIDTH: as in lanes.py. OFFSETS_AT, VALUES_AT: where its offsets and values
# begin in their buffers, in bytes and in elements. SCALES_AT: where the scales of integers begin in
# the buffer of offsets, in bytes. LEVELS: L of integers (integers.py); 0: values are numbers.
N_FIELDS = tl.constexpr(11)
RESIDUE, NUMEL, K, FULL_LANES, ROWS, LAST_ROWS, OFFSET_WIDTH, OFFSETS_AT, VALUES_AT = (
    tl.constexpr(i) for i in range(9)
)
SCALES_AT, LEVELS = (tl.constexpr(i) for i in range(9, 11))
# ADDRESS: of the gradient, or of the output that is written instead. FROZEN: whether the residue
# stays as it is. ALIGNED: whether this address and the residue's are multiples of 16.
N_STEP_FIELDS = tl.constexpr(3)
ADDRESS, FROZEN, ALIGNED = (tl.constexpr(i) for i in range(3))

# Whether the kernels below run in the interpreter.
INTERPRETED = triton.knobs.runtime.interpret


class Tile(NamedTuple):
    """At most 64 lanes of a tensor.

    Lane l's element in row r is at start + l + r * stride, for l < lanes, r < rows, below end.
    """

    residue: tl.tensor
    grad: tl.tensor
    start: tl.tensor
    end: tl.tensor
    stride: tl.tensor
    rows: tl.tensor
    lane: tl.tensor  # the first lane's number
    lanes: tl.tensor
    # 64 lanes and a stride of 64 in aligned memory: one stretch, moved 16 bytes at a time.
    wide: tl.tensor
    frozen: tl.tensor
    offsets_at: tl.tensor
    offset_width: tl.tensor
    values_at: tl.tensor
    scales_at: tl.tensor
    levels: tl.tensor


@triton.jit
def choose_tiles(tiles, tensors, step, chosen, scale: tl.float64, GRAD: tl.constexpr):
    """Chosen <- the row of each lane's largest |m + g|. Nothing else changes."""
    tile = _tile(tiles, tensors, step, GRAD)
    unused = tl.zeros((LANES,), tile.residue.dtype.element_ty)
    winner, _ = _pass(tile, 0.0, scale, unused, unused, False, True)
    _store_offsets(chosen, tile, winner)


@triton.jit
def take_and_accumulate_tiles(
    tiles,
    tensors,
    step,
    offsets,
    values,
    chosen,
    count,
    beta: tl.float64,
    scale: tl.float64,
    extra: tl.float64,
    GRAD: tl.constexpr,
):
    """values <- m[I] + g[I]; m[I] <- m[I] - beta * values; then m <- m + beta * g, in one pass.

    If they are int8, values travel as integers, in units of the scales in the buffer of offsets.

    If m and g do not have opposite signs, `extra` times m is sent in addition. `chosen`, unless it
    is None, then takes the row of each lane's largest |m + g|. Adds to `count` how many elements of
    g are bad (NaN, or larger than config.largest_gradient), and how many values are not finite.
    Both count as zero.
    """
    CHOOSES: tl.constexpr = chosen is not None
    tile = _tile(tiles, tensors, step, GRAD)
    row = _load_offsets(offsets, tile)
    unit = _scale_of(offsets, tile, values.dtype.element_ty)
    rest, not_sent = _send(tile, row, unit, values, beta, scale, extra)
    tl.debug_barrier()  # all threads have read m[I] before one writes there
    winner, bad = _pass(tile, beta, scale, row, rest, True, CHOOSES)
    if CHOOSES:
        _store_offsets(chosen, tile, winner)
    _add(count, bad + not_sent)


@triton.jit
def scatter_tiles(tiles, tensors, step, offsets, averages, scale: tl.float64, GRAD: tl.constexpr):
    """Outputs <- scale * averages at I, zero elsewhere: one write of everything."""
    tile = _tile(tiles, tensors, step, GRAD)
    row = _load_offsets(offsets, tile)
    REAL: tl.constexpr = tile.residue.dtype.element_ty
    value = _to_gradient(_real(scale, REAL) * _load_values(averages, tile), GRAD)
    if tile.wide:
        _write(tile, row, value, True)
    else:
        _write(tile, row, value, False)


@triton.jit
def measure_blocks(
    blocks,
    tensors,
    step,
    chosen,
    scale: tl.float64,
    extra: tl.float64,
    GRAD: tl.constexpr,
):
    """The scales of what the chosen elements would send, as integers.py defines them.

    One program handles one block of values, which belong to several tiles. blocks: int32 (blocks,
    2), a block's tensor, and the block's number in that tensor.
    """
    REAL: tl.constexpr = tl.float64 if tl.float64 == GRAD else tl.float32
    number = tl.program_id(0)
    tensor, block = tl.load(blocks + 2 * number), tl.load(blocks + 2 * number + 1)
    fixed, now = tensors + tensor * N_FIELDS, step + tensor * N_STEP_FIELDS
    k, rows, full = tl.load(fixed + K), tl.load(fixed + ROWS), tl.load(fixed + FULL_LANES)
    first = block.to(tl.int64) * VALUES_PER_SCALE
    lane = first + tl.arange(0, VALUES_PER_SCALE)
    is_lane, in_full_group, column = lane < k, lane < full, lane % LANES
    start = tl.where(in_full_group, (lane - column) * rows + column, full * rows + lane - full)
    offsets = chosen + tl.load(fixed + OFFSETS_AT)
    row = _rows(offsets, tl.load(fixed + OFFSET_WIDTH), lane, is_lane)
    index = start + row * tl.where(in_full_group, LANES, k - full)
    m = tl.load(tl.load(fixed + RESIDUE).to(tl.pointer_type(REAL)) + index, mask=is_lane, other=0)
    g = tl.load(tl.load(now + ADDRESS).to(tl.pointer_type(GRAD)) + index, mask=is_lane, other=0)
    g, _ = _usable(g, _real(scale, REAL))
    value = m + g + tl.where(m * g >= 0, _real(extra, REAL) * m, 0)
    total = tl.sum(tl.where(_is_finite(value), tl.abs(value).to(tl.float64), 0))
    # The divisor is integers.scale_divisor's.
    levels = tl.load(fixed + LEVELS).to(tl.float64)
    divisor = tl.maximum((levels + 1) / 8, tl.minimum((levels + 3) / 4, 2.0))
    mean = total / (tl.minimum(k - first, VALUES_PER_SCALE).to(tl.float64) * divisor)
    short = tl.minimum(mean, LARGEST_SCALE).to(tl.float32)
    short = (short.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    scales = (chosen + tl.load(fixed + SCALES_AT)).to(tl.pointer_type(tl.float32))
    tl.store(scales + block, tl.where(short >= SMALLEST_SCALE, short, 0))


@triton.jit
def roll_back_tiles(
    tiles,
    tensors,
    step,
    offsets,
    values,
    beta: tl.float64,
    accumulated: tl.float64,
    scale: tl.float64,
    GRAD: tl.constexpr,
):
    """m[I] <- m[I] + beta * values, then m <- m - accumulated * g."""
    tile = _tile(tiles, tensors, step, GRAD)
    row = _load_offsets(offsets, tile)
    m = tl.load(tile.residue + _indices(tile, row), mask=_is_lane(tile), other=0)
    unit = _scale_of(offsets, tile, values.dtype.element_ty)
    was_sent = _load_values(values, tile).to(m.dtype) * unit
    m += _unless_frozen(tile, beta) * was_sent
    tl.debug_barrier()  # all threads have read m[I] before one writes there
    # Adding the negative gives the same bits as subtracting.
    _pass(tile, -accumulated, scale, row, m, True, False)


@triton.jit
def _tile(tiles, tensors, step, GRAD: tl.constexpr):
    """The tile of this program."""
    REAL: tl.constexpr = tl.float64 if tl.float64 == GRAD else tl.float32
    number = tl.program_id(0)
    tensor, lane = tl.load(tiles + 2 * number), tl.load(tiles + 2 * number + 1).to(tl.int64) * LANES
    fixed, now = tensors + tensor * N_FIELDS, step + tensor * N_STEP_FIELDS
    k, rows, full = tl.load(fixed + K), tl.load(fixed + ROWS), tl.load(fixed + FULL_LANES)
    in_full_group = lane < full
    return Tile(
        residue=tl.load(fixed + RESIDUE).to(tl.pointer_type(REAL)),
        grad=tl.load(now + ADDRESS).to(tl.pointer_type(GRAD)),
        start=tl.where(in_full_group, lane * rows, full * rows + lane - full),
        end=tl.load(fixed + NUMEL),
        stride=tl.where(in_full_group, LANES, k - full),
        rows=tl.where(in_full_group, rows, tl.load(fixed + LAST_ROWS)).to(tl.int32),
        lane=lane,
        lanes=k - lane,
        wide=in_full_group & (tl.load(now + ALIGNED) != 0),
        frozen=tl.load(now + FROZEN) != 0,
        offset_width=tl.load(fixed + OFFSET_WIDTH),
        offsets_at=tl.load(fixed + OFFSETS_AT),
        values_at=tl.load(fixed + VALUES_AT),
        scales_at=tl.load(fixed + SCALES_AT),
        levels=tl.load(fixed + LEVELS),
    )


@triton.jit
def _pass(tile, beta, scale, changed, instead, MOVES: tl.constexpr, CHOOSES: tl.constexpr):
    """If MOVES, m <- m + beta * g, where `instead` replaces m in row `changed` of every lane.

    Returns every lane's winner of |m + g| afterwards, and the number of bad elements of g.
    """
    beta, scale = _unless_frozen(tile, beta), _real(scale, tile.residue.dtype.element_ty)
    if tile.wide:
        winner, bad = _pass_rows(tile, beta, scale, changed, instead, True, MOVES, CHOOSES)
    else:
        winner, bad = _pass_rows(tile, beta, scale, changed, instead, False, MOVES, CHOOSES)
    return winner, bad


@triton.jit
def _pass_rows(
    tile,
    beta,
    scale,
    changed,
    instead,
    WIDE: tl.constexpr,
    MOVES: tl.constexpr,
    CHOOSES: tl.constexpr,
):
    """`_pass` for one kind of tile."""
    BLOCK: tl.constexpr = (
        WIDE_BITS // tile.residue.dtype.element_ty.primitive_bitwidth if WIDE else SLOTS
    )
    # Rows that lie SLOTS apart are compared within a thread, which keeps one best element of them.
    # Threads compare with one another only at the end.
    best = tl.full((SLOTS, LANES), -1, _magnitude(beta).dtype)
    winner = tl.zeros((SLOTS, LANES), tl.int32)
    bad = tl.zeros((SLOTS, LANES), tl.int32)
    for first in range(0, tile.rows, BLOCK):
        row, begin, within, exists = _block(tile, first, WIDE, BLOCK)
        residue = _elements(tile.residue, begin, within, WIDE)
        m = tl.load(residue, mask=exists, other=0)
        g = tl.load(_elements(tile.grad, begin, within, WIDE), mask=exists, other=0)
        g, good = _usable(g, scale)
        bad += tl.sum(tl.reshape(tl.where(good, 0, 1), (BLOCK // SLOTS, SLOTS, LANES)), axis=0)
        if MOVES:
            m = tl.where(row[:, None] == changed[None, :], instead[None, :], m)
            m = m + beta * g
            tl.store(residue, m, mask=exists)
        if CHOOSES:
            size = tl.where(exists, _magnitude(m + g), -1)
            size = tl.reshape(size, (BLOCK // SLOTS, SLOTS, LANES))
            row = tl.reshape(row, (BLOCK // SLOTS, SLOTS))[:, :, None]
            largest = tl.max(size, axis=0)
            larger = tl.min(tl.where(size == largest[None, :, :], row, LAST_ROW), axis=0)
            winner = tl.where(largest > best, larger, winner)
            best = tl.maximum(largest, best)
    lane_winner = tl.zeros((LANES,), tl.int32)
    if CHOOSES:
        largest = tl.max(best, axis=0)
        # Of equal elements, take the first.
        lane_winner = tl.min(tl.where(best == largest[None, :], winner, LAST_ROW), axis=0)
    return lane_winner, tl.sum(bad)


@triton.jit
def _send(tile, row, unit, values, beta, scale, extra):
    """Write a tile's values; returns what stays of m there, and how many are not finite."""
    REAL: tl.constexpr = tile.residue.dtype.element_ty
    index, is_lane = _indices(tile, row), _is_lane(tile)
    m = tl.load(tile.residue + index, mask=is_lane, other=0)
    g, _ = _usable(tl.load(tile.grad + index, mask=is_lane, other=0), _real(scale, REAL))
    value = m + g + tl.where(m * g >= 0, _real(extra, REAL) * m, 0)
    value = tl.where(tile.frozen, 0, value)
    finite = _is_finite(value)
    value = tl.where(finite, value, 0)
    if values.dtype.element_ty == tl.int8:
        value = _integer(value, unit, tile.levels)
    at = tile.values_at + tile.lane + tl.arange(0, LANES)
    tl.store(values + at, value, mask=is_lane)
    return m - _real(beta, REAL) * (value.to(REAL) * unit), tl.sum(tl.where(finite, 0, 1))


@triton.jit
def _scale_of(offsets, tile, dtype: tl.constexpr):
    """The scale of a tile's integers; 1 if values are not integers."""
    REAL: tl.constexpr = tile.residue.dtype.element_ty
    unit = _real(1.0, REAL)
    if dtype == tl.int8:
        scales = (offsets + tile.scales_at).to(tl.pointer_type(tl.float32))
        unit = tl.load(scales + tile.lane // VALUES_PER_SCALE).to(REAL)
    return unit


@triton.jit
def _integer(value, unit, levels):
    """The integers from -levels to levels that are nearest to value / unit."""
    two, divisor = tl.full((), 2.0, value.dtype), tl.where(unit > 0, unit, 1)
    # For float32, "/" is approximate.
    per_unit = two / divisor if value.dtype == tl.float64 else tl.div_rn(two, divisor)
    per_unit = tl.where(unit > 0, per_unit, 0)
    most = (2 * levels).to(value.dtype)
    halves = tl.abs(value) * per_unit
    halves = tl.where(halves < most, halves, most).to(tl.int32)
    q = (halves + 1) >> 1
    return tl.where(value < 0, -q, q).to(tl.int8)


@triton.jit
def _write(tile, chosen, value, WIDE: tl.constexpr):
    """Write `value` in row `chosen` of every lane, and zeros elsewhere."""
    BLOCK: tl.constexpr = (
        WIDE_BITS // tile.residue.dtype.element_ty.primitive_bitwidth if WIDE else SLOTS
    )
    for first in range(0, tile.rows, BLOCK):
        row, begin, within, exists = _block(tile, first, WIDE, BLOCK)
        output = _elements(tile.grad, begin, within, WIDE)
        tl.store(output, tl.where(row[:, None] == chosen[None, :], value[None, :], 0), mask=exists)


@triton.jit
def _block(tile, first, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers of a tile's rows from `first` on, where they begin, and their elements."""
    slot, column = tl.arange(0, BLOCK), tl.arange(0, LANES)
    row = first + slot
    begin = tile.start + first * tile.stride
    exists = (row < tile.rows)[:, None]
    if WIDE:
        within = slot[:, None] * LANES + column[None, :]
    else:
        within = slot[:, None] * tile.stride + column[None, :]
        exists = exists & (begin + within < tile.end) & (column < tile.lanes)[None, :]
    return row, begin, within, exists


@triton.jit
def _elements(tensor, begin, within, WIDE: tl.constexpr):
    """Pointers to a block's elements."""
    block = tensor + begin
    if WIDE:
        # A thread takes at most four elements at a time, even if they have two bytes, so that the
        # same thread holds a gradient and its residue. The hint must be on this sum, because the
        # compiler forgets hints on a function's arguments.
        block = tl.multiple_of(block, 16 if tensor.dtype.element_ty.primitive_bitwidth >= 32 else 8)
    return block + within


@triton.jit
def _is_lane(tile):
    """Which of the 64 columns of a tile are lanes."""
    return tl.arange(0, LANES) < tile.lanes


@triton.jit
def _indices(tile, row):
    """The index of the element in the given row of each lane."""
    return tile.start + tl.arange(0, LANES) + row * tile.stride


@triton.jit
def _load_offsets(buffer, tile):
    at = tile.lane + tl.arange(0, LANES)
    return _rows(buffer + tile.offsets_at, tile.offset_width, at, _is_lane(tile))


@triton.jit
def _rows(here, offset_width, at, mask):
    """The offsets of lanes `at`, of a tensor whose offsets begin at `here`."""
    if offset_width == 1:
        row = tl.load(here + at, mask=mask, other=0).to(tl.int32)
    elif offset_width == 2:
        row = tl.load(here.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0)
        row = row.to(tl.int32)
    else:  # with a width of 0 there are none, and all rows are 0
        mask &= offset_width != 0
        row = tl.load(here.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    return row


@triton.jit
def _store_offsets(buffer, tile, row):
    here, at = buffer + tile.offsets_at, tile.lane + tl.arange(0, LANES)
    if tile.offset_width == 1:
        tl.store(here + at, row.to(tl.uint8), mask=_is_lane(tile))
    elif tile.offset_width == 2:
        tl.store(here.to(tl.pointer_type(tl.int16)) + at, row.to(tl.int16), mask=_is_lane(tile))
    elif tile.offset_width == 4:
        tl.store(here.to(tl.pointer_type(tl.int32)) + at, row, mask=_is_lane(tile))


@triton.jit
def _load_values(buffer, tile):
    at = buffer + tile.values_at + tile.lane + tl.arange(0, LANES)
    return tl.load(at, mask=_is_lane(tile), other=0)


@triton.jit
def _real(x, REAL: tl.constexpr):
    return tl.full((), x, REAL)


@triton.jit
def _unless_frozen(tile, beta):
    """beta in the residue's dtype; zero for a frozen tensor, whose residue stays."""
    return tl.where(tile.frozen, 0, _real(beta, tile.residue.dtype.element_ty))


@triton.jit
def _usable(g, scale):
    """scale * g in scale's dtype, with zero for bad elements; and which elements are good.

    The bits tell whether an element is good, as in lanes.c.
    """
    if g.dtype == tl.int16:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = scale * g.to(scale.dtype)
    largest: tl.constexpr = LARGEST_64 if g.dtype == tl.float64 else LARGEST_32
    good = _magnitude(g) <= largest
    return tl.where(good, g, 0), good


@triton.jit
def _is_finite(x):
    """Whether x is finite, by the exponent's bits, whatever a compiler assumes about NaN."""
    infinity: tl.constexpr = 0x7FF0000000000000 if x.dtype == tl.float64 else 0x7F800000
    return _magnitude(x) < infinity


@triton.jit
def _magnitude(x):
    """The bits without the sign, which are ordered as |x|."""
    double: tl.constexpr = x.dtype == tl.float64
    bits: tl.constexpr = tl.int64 if double else tl.int32
    return x.to(bits, bitcast=True) & (0x7FFFFFFFFFFFFFFF if double else 0x7FFFFFFF)


@triton.jit
def _to_gradient(value, dtype: tl.constexpr):
    """Values in the dtype that gradients are stored in, rounded to nearest even."""
    if dtype == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)
    else:
        value = value.to(dtype)
    return value


@triton.jit
def _add(count, n):
    """Add an integer to a count. Only integers are added so: their sum is the same in any order."""
    tl.atomic_add(count, n.to(tl.int64), mask=n > 0, sem="relaxed")
