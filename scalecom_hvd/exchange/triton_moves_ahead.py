"""The moves of moves_ahead.py on a GPU: one launch for all parameters of a kind.

Nothing here waits for the device. moves_ahead.py imports this module only if a tensor needs it,
because this module imports triton.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl

from scalecom_hvd.exchange.devices import stream_id, uploaded
from scalecom_hvd.exchange.moves_ahead import LARGEST, correction
from scalecom_hvd.triton.moves_ahead import move_ahead_blocks

if TYPE_CHECKING:
    from scalecom_hvd.exchange.moves_ahead import Move, Pair

# Elements that one program moves.
BLOCK = 2048
_TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def make(moves: Sequence[Move], weight: float, beta: float, made: list[Pair]) -> None:
    """See moves_ahead.make. Tensors are contiguous and of known dtypes; a move's are on one device.

    made: a list that receives what was moved.
    """
    kinds: dict[Any, list[Move]] = {}
    for move in moves:
        kinds.setdefault(_kind(move), []).append(move)
    for alike in kinds.values():
        _make_alike(alike, weight, beta)
        made += [(move.own, move.spare) for move in alike]


def _kind(move: Move) -> tuple[Any, ...]:
    """What moves of one launch have in common."""
    tensors = (move.own, move.residue, move.momentum, move.second)
    dtypes = tuple(t.dtype if t is not None else None for t in tensors)
    numbers = move.rate, move.sign, move.power, move.decay, move.eps, move.enters
    return move.own.device, dtypes, numbers, move.steps is None, move.follows_step


def _make_alike(moves: Sequence[Move], weight: float, beta: float) -> None:
    first, device = moves[0], moves[0].own.device
    blocks, n_blocks = _blocks(tuple(move.own.numel() for move in moves), device, stream_id(device))
    if not n_blocks:
        return
    rows = [
        [0 if t is None else t.data_ptr() for t in _columns(move)] + [move.own.numel()]
        for move in moves
    ]
    is_aligned = not any(address % 16 for row in rows for address in row[:-1])
    wide = torch.float64 if first.residue.dtype == torch.float64 else torch.float32
    table = uploaded(np.array(rows, np.int64), device)
    arguments = blocks, table, *_scalars(moves, weight, beta, wide)
    constants = {
        "OWN": _TYPES[first.own.dtype],
        "REAL": _TYPES[wide],
        "MOMENTUM": None if first.momentum is None else _TYPES[first.momentum.dtype],
        "SECOND": None if first.second is None else _TYPES[first.second.dtype],
        "ROOT": first.power == 0.5,
        "FOLLOWS_STEP": first.follows_step,
        "ALIGNED": is_aligned,
        "BLOCK": BLOCK,
    }
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        numbers = weight, first.rate, first.eps, LARGEST, first.enters
        move_ahead_blocks[(n_blocks,)](*arguments, *numbers, **constants, num_warps=4)


def _columns(move: Move) -> tuple[torch.Tensor | None, ...]:
    return move.own, move.spare, move.residue, move.momentum, move.second


def _scalars(
    moves: Sequence[Move], weight: float, beta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The factors of momenta, those of u, and the divisors of second moments, each (tensors,)."""
    first, device = moves[0], moves[0].own.device
    ones = torch.ones(len(moves), dtype=dtype, device=device)
    shares, factors, corrections = ones, ones / beta, ones
    momenta = [m.momentum for m in moves if m.momentum is not None]
    if first.follows_step:
        momenta = [*torch._foreach_sub([m.spare for m in moves], [m.own for m in moves])]
    if momenta:
        residues, wide = [m.residue for m in moves], torch.promote_types(momenta[0].dtype, dtype)
        norms = [torch.stack(torch._foreach_norm(t, 2, dtype=wide)) for t in (residues, momenta)]
        ratios = norms[0] / norms[1]
        shares = (first.sign * (1 - weight) * ratios).nan_to_num_(0.0, 0.0, 0.0).to(dtype)
        if first.follows_step:
            factors = (norms[1] / norms[0]).nan_to_num_(0.0, 0.0, 0.0).to(dtype)
    if first.steps is not None:
        steps = [m.steps for m in moves]
        if all(isinstance(own, torch.Tensor) and own.device.type != "cpu" for own in steps):
            corrections = correction(torch.stack(steps), first.decay)
        else:
            own = [float(correction(own, first.decay)) for own in steps]
            corrections = uploaded(np.array(own, np.float64), device)
    return shares, factors, corrections.to(dtype)


@functools.lru_cache(maxsize=16)
def _blocks(numels: tuple[int, ...], device: torch.device, stream: int) -> tuple[torch.Tensor, int]:
    """(blocks, 2), int32: each block's tensor, and its number there. Also how many there are.

    stream: the stream on which this is made, and may be used without waiting.
    """
    counts = [-(-numel // BLOCK) for numel in numels]
    tensor = np.repeat(np.arange(len(numels)), counts)
    number = np.arange(len(tensor)) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    return uploaded(np.stack([tensor, number], 1).astype(np.int32), device), len(tensor)
