"""Moves parameters a step ahead, in Triton. It computes what exchange/moves_ahead.py defines.

Each tensor is read once and written once. Results are those of plain PyTorch up to rounding, which
is enough because nothing that ranks share is computed from them.
"""

import triton
import triton.language as tl

# For each tensor: five addresses (0: there is none), and how many elements it has.
N_FIELDS = tl.constexpr(6)
OWN_AT, SPARE_AT, RESIDUE_AT, MOMENTUM_AT, SECOND_AT, NUMEL = (tl.constexpr(i) for i in range(6))


@triton.jit
def move_ahead_blocks(
    blocks,
    tensors,
    shares,
    factors,
    corrections,
    weight: tl.float64,
    rate: tl.float64,
    eps: tl.float64,
    largest: tl.float64,
    enters: tl.float64,
    OWN: tl.constexpr,
    REAL: tl.constexpr,
    MOMENTUM: tl.constexpr,
    SECOND: tl.constexpr,
    ROOT: tl.constexpr,
    FOLLOWS_STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """spare <- own; own <- own - rate * D(factor * (weight * residue + share * momentum)).

    OWN, MOMENTUM, SECOND: the dtypes in which these are stored; None: there is none. REAL: the
    residue's dtype. ROOT: whether to divide by the second moment's root. FOLLOWS_STEP: whether
    spare - own is the momentum. ALIGNED: whether addresses are multiples of 16.
    """
    number = tl.program_id(0)
    tensor, block = tl.load(blocks + 2 * number), tl.load(blocks + 2 * number + 1)
    fields = tensors + tensor * N_FIELDS
    begin = block.to(tl.int64) * BLOCK
    inside = begin + tl.arange(0, BLOCK) < tl.load(fields + NUMEL)
    own = _elements(fields + OWN_AT, begin, OWN, ALIGNED, BLOCK)
    before = tl.load(own, mask=inside, other=0)
    spare = _elements(fields + SPARE_AT, begin, OWN, ALIGNED, BLOCK)
    residue = _elements(fields + RESIDUE_AT, begin, REAL, ALIGNED, BLOCK)
    ahead = tl.load(residue, mask=inside, other=0) * tl.full((), weight, REAL)
    if MOMENTUM is not None:
        momentum = _elements(fields + MOMENTUM_AT, begin, MOMENTUM, ALIGNED, BLOCK)
        share = tl.load(shares + tensor)
        ahead += tl.load(momentum, mask=inside, other=0).to(REAL) * share
    if FOLLOWS_STEP:
        step = tl.load(spare, mask=inside, other=0).to(REAL) - before.to(REAL)
        ahead += step * tl.load(shares + tensor)
    tl.store(spare, before, mask=inside)
    ahead *= tl.load(factors + tensor)
    if SECOND is not None:
        second = _elements(fields + SECOND_AT, begin, SECOND, ALIGNED, BLOCK)
        scale = tl.load(second, mask=inside, other=1).to(REAL) / tl.load(corrections + tensor)
        scale += tl.full((), enters, REAL) * ahead * ahead
        if ROOT:
            scale = tl.sqrt(scale)
        ahead = ahead / (scale + tl.full((), eps, REAL))
        most = tl.full((), largest, REAL)
        ahead = tl.where(ahead == ahead, ahead, 0)  # NaN is no direction
        ahead = tl.where(ahead > most, most, tl.where(ahead < -most, -most, ahead))
    after = before.to(REAL) - tl.full((), rate, REAL) * ahead
    tl.store(own, after.to(OWN), mask=inside)


@triton.jit
def _elements(field, begin, dtype: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to a block's elements of the tensor whose address is stored at `field`."""
    start = tl.load(field).to(tl.pointer_type(dtype)) + begin
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + tl.arange(0, BLOCK)
