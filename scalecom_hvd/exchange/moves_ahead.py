"""Moves parameters to x - lr * a * D(u) for step-ahead gradients; see step_ahead.py.

u = w * m + (1 - w) * |m| / |b| * b, where m is what waits in the residue, b is the optimizer's
momentum (zero if it has none), and w says how far this worker wants what the others do. D is what
the optimizer makes of a gradient. Most optimizers of the Adam family divide by the root of averaged
squares, and u's own square is part of this average, as it will be when u is sent. The average fades
while an element waits, so without u's square the move would be too long. What any other optimizer
makes of a gradient is not known, so its last step tells how long D(u) is, and is the momentum.

The C kernel moves float32 parameters on the CPU. Triton moves all parameters of one kind on a GPU
in one launch. Plain PyTorch moves all others, piece by piece. Imports gradients, kernel_choice,
native, and triton_moves_ahead if a tensor needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.gradients import local_part
from scalecom_hvd.exchange.kernel_choice import is_for_c, is_for_triton

# D(u) is limited to this, because an element that the optimizer has hardly seen has a tiny second
# moment, which says nothing about the residue there.
LARGEST = 10.0
# a: over time, momentum makes more of a gradient than at once; first moments make less of it at
# once. The numbers were found by trying; `study.py --only ahead` varies them. With 0.5, a tuned
# Adam, which has twice the learning rate, breaks down.
SGD_SHARE = 1.5
ADAM_SHARE = 0.3
# How many of its last steps another optimizer's residue is worth.
STEP_SHARE = 3.0
# The optimizers, besides SGD, whose steps are known here. They divide by SECOND_MOMENTS.
ADAPTIVE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)
# Where optimizers keep the sizes of gradients, by which they divide: see move_of.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "exp_inf")
# All that known optimizers keep for each element. A subclass that keeps more makes other steps.
KEPT = (*SECOND_MOMENTS, "exp_avg", "max_exp_avg_sq", "momentum_buffer", "grad_avg")
# How many elements are processed at a time. Their results stay in a processor's cache.
BLOCK = 2**16
# The dtypes that Triton moves.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor that was moved, or a piece of it, and its values before the move."""


@dataclass(frozen=True)
class Move:
    """How one parameter is moved ahead.

    Attributes:
        own: the parameter, or this rank's part of it. It is moved in place.
        spare: like `own`. It receives the values from before the move. With `follows_step` it has
            those from before the optimizer's last step.
        residue: (N,) what waits.
        rate: lr * a; negative if the optimizer maximizes.
        sign: -1 if the optimizer maximizes, because its momentum is then of negative gradients;
            else 1.
        momentum: like `own`. None: the optimizer has none, or its last step stands for it.
        second: like `own`. A power of it divides a gradient. None: nothing does.
        power: the power that is taken of `second` after its bias correction.
        steps: how many steps `second` averages over, a number or a tensor. None: no correction.
        decay: the decay of that average.
        eps: what is added to the divisor.
        enters: the part of u's square that is added to `second` after its bias correction.
        follows_step: whether the momentum is the last step, backwards, and D(u) is as long as this
            step if u is as long as the residue.
    """

    own: torch.Tensor
    spare: torch.Tensor
    residue: torch.Tensor
    rate: float
    sign: int
    momentum: torch.Tensor | None = None
    second: torch.Tensor | None = None
    power: float = 0.5
    steps: Any = None
    decay: float = 0.0
    eps: float = 0.0
    enters: float = 0.0
    follows_step: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """own, spare, residue and the optimizer's tensors, if they are known, all of one shape."""
        residue = self.residue.view(self.own.shape)
        others = [t for t in (self.momentum, self.second) if t is not None]
        return [self.own, self.spare, residue, *others]


def is_known(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], own: torch.Tensor) -> bool:
    """Whether `move_of` knows what the optimizer makes of a parameter's gradient.

    Other optimizers may keep the same state, and make other steps: LAMB's depend on the parameter's
    length, RAdam's begin short, and SOAP's second moments are of rotated gradients.

    Args:
        optimizer: the one that steps the parameter.
        state: its state of the parameter.
        own: the parameter, or this rank's part of it.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return True
    if not isinstance(optimizer, ADAPTIVE):
        return False
    kept = [state[key] for key in SECOND_MOMENTS if key in state]
    if kept and "exp_avg" in state:
        kept.append(state["exp_avg"])
    per_element = (
        key for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    keeps_no_more = all(key in KEPT for key in per_element)
    return bool(kept) and keeps_no_more and all(local_part(m).shape == own.shape for m in kept)


def move_of(
    own: torch.Tensor,
    spare: torch.Tensor,
    residue: torch.Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    factor: float,
    ranks: float = 1.0,
) -> Move:
    """The move of a parameter that a known optimizer steps.

    Args:
        own, spare, residue: see Move.
        group: the optimizer's parameter group that holds the parameter.
        state: the optimizer's state of the parameter.
        factor: how much of the way to go.
        ranks: by how much the gradients that the optimizer gets are larger than averages over
            ranks: the number of ranks for sums.
    """
    sign = -1 if group.get("maximize") else 1
    rate = sign * float(group["lr"]) * factor * ranks
    momentum = _momentum(state)
    if not any(key in state for key in SECOND_MOMENTS):
        share = SGD_SHARE if group.get("momentum") else 1.0
        return Move(own, spare, residue, rate * share, sign, momentum)
    eps = float(group.get("eps", 0.0))
    move = Move(own, spare, residue, rate * ADAM_SHARE, sign, momentum, eps=eps)
    if "exp_avg_sq" in state:
        second = local_part(state.get("max_exp_avg_sq", state["exp_avg_sq"]))
        decay = float(group["betas"][1])
        changes = {"second": second, "steps": state.get("step", 0), "decay": decay}
        enters = 1 - decay
    elif "exp_inf" in state:
        changes = {"second": local_part(state["exp_inf"]), "power": 1.0}
        enters = 0.0  # it takes the larger of the two, and does not add them
    elif "square_avg" in state:
        changes = {"second": local_part(state["square_avg"])}
        enters = 1 - float(group.get("alpha", 1.0))
    else:
        changes = {"second": local_part(state["sum"])}
        enters = 1.0
    return Move(**{**vars(move), **changes, "enters": enters * ranks**2})


def move_by_step(
    own: torch.Tensor,
    spare: torch.Tensor,
    residue: torch.Tensor,
    group: Mapping[str, Any],
    factor: float,
) -> Move:
    """The move of a parameter that any optimizer steps; see move_of.

    spare: has the values from before the optimizer's last step. If they are those of `own`, the
        parameter stays where it is.
    """
    sign = -1 if group.get("maximize") else 1
    return Move(own, spare, residue, sign * factor * STEP_SHARE, sign, follows_step=True)


def move_by(
    optimizer: torch.optim.Optimizer,
    own: torch.Tensor,
    spare: torch.Tensor,
    residue: torch.Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    factor: float,
    ranks: float = 1.0,
) -> Move:
    """The move of a parameter that this optimizer steps; see move_of and move_by_step."""
    if is_known(optimizer, state, own):
        return move_of(own, spare, residue, group, state, factor, ranks)
    return move_by_step(own, spare, residue, group, factor)


def make(moves: Sequence[Move], weight: float, beta: float) -> None:
    """Move these parameters. Each move's `spare` keeps the values from before.

    Args:
        moves: the moves, each of another parameter.
        weight: w.
        beta: the low-pass filter's beta.

    Raises:
        Exception: PyTorch or Triton raised it. Nothing is moved then.
    """
    in_c: list[Move] = []
    on_triton: list[Move] = []
    made: list[Pair] = []
    try:
        for move in moves:
            if _is_for_c(move):
                in_c.append(move)
            elif _is_for_triton(move):
                on_triton.append(move)
            else:
                _make_in_torch(move, weight, beta, made)
        _make_in_c(in_c, weight, beta, made)
        if on_triton:
            from scalecom_hvd.exchange import triton_moves_ahead

            triton_moves_ahead.make(on_triton, weight, beta, made)
    except BaseException:
        for own, spare in made:
            own.copy_(spare)
        raise


def _is_for_c(move: Move) -> bool:
    return is_for_c(move.own.device) and _is_plain(move, (torch.float32,))


def _is_for_triton(move: Move) -> bool:
    return is_for_triton(move.own.device) and _is_plain(move, DTYPES)


def _is_plain(move: Move, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a kernel may access all of a move's tensors by their addresses.

    Some optimizers have one second moment for a whole layer, or states of few bits in a tensor
    class that claims to be float32.
    """
    own = move.own
    return all(
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and (t.shape, t.device) == (own.shape, own.device)
        and t.dtype in dtypes
        and t.is_contiguous()
        for t in move.tensors
    )


def correction(steps: Any, decay: float) -> Any:
    """1 - decay ** steps, or 1 if the average has not begun, as in a state that was just loaded.

    Args:
        steps: a number or a tensor. On a device, the tensor may have any shape, and the host does
            not wait for it.
        decay: the average's decay.
    """
    if isinstance(steps, torch.Tensor) and steps.device.type != "cpu":
        share = 1 - torch.pow(decay, steps.double())
        return torch.where(share == 0, 1.0, share)
    return 1 - decay ** float(steps) or 1.0


def _make_in_c(moves: Sequence[Move], weight: float, beta: float, made: list[Pair]) -> None:
    library = native.library()
    if library is None or not moves:
        return
    rows = []
    for move in moves:
        parts = move.own, move.spare, move.residue, move.momentum, move.second
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        divisor = 1.0 if move.steps is None else correction(move.steps, move.decay)
        numbers = move.rate, move.sign, 1 / divisor, move.eps, LARGEST, move.enters
        kind = move.power == 0.5, move.follows_step
        rows.append((*addresses, move.own.numel(), *numbers, *kind, False))
    table = np.array(rows, native.MOVE)
    try:
        library.scalecom_move_ahead(table.ctypes.data, len(moves), weight, beta)
    finally:  # a signal that came meanwhile is raised here
        made += [(moves[i].own, moves[i].spare) for i in np.flatnonzero(table["moved"])]


def _make_in_torch(move: Move, weight: float, beta: float, made: list[Pair]) -> None:
    tensors, share, per_length = move.tensors, torch.zeros(()), None
    momentum = move.spare - move.own if move.follows_step else move.momentum
    if momentum is not None:
        # In float16 the norm would overflow.
        dtype = torch.promote_types(momentum.dtype, move.residue.dtype)
        norms = [torch.linalg.vector_norm(t, dtype=dtype) for t in (move.residue, momentum)]
        length = norms[0] / norms[1]
        share = (move.sign * (1 - weight) * length).nan_to_num_(0.0, 0.0, 0.0)
        if move.follows_step:
            tensors.append(momentum)
            per_length = (norms[1] / norms[0]).nan_to_num_(0.0, 0.0, 0.0)
    divisor = 1.0 if move.steps is None else correction(move.steps, move.decay)
    for own, spare, waits, *others in _blocks(tensors):
        spare.copy_(own)
        made.append((own, spare))
        if per_length is not None:
            own.addcmul_(waits, per_length, value=-move.rate * weight)
            own.addcmul_(others[0], per_length * share, value=-move.rate)
            continue
        if move.second is None:
            factor = -move.rate / beta
            own.add_(waits, alpha=factor * weight)
            if others:
                own.addcmul_(others[0], share, value=factor)
            continue
        ahead = waits.mul(weight)
        if move.momentum is not None:
            ahead.addcmul_(others[0], share)
        ahead.mul_(1 / beta)
        scale = others[-1].div(divisor)
        if move.enters:
            scale.addcmul_(ahead, ahead, value=move.enters)
        ahead.div_(scale.pow_(move.power).add_(move.eps)).nan_to_num_(0.0, LARGEST, -LARGEST)
        own.add_(ahead.clamp_(-LARGEST, LARGEST), alpha=-move.rate)


def _blocks(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape. Contiguous ones on the CPU come in views that fit into its cache."""
    if all(t.is_contiguous() and t.device.type == "cpu" for t in tensors):
        yield from zip(*(t.view(-1).split(BLOCK) for t in tensors), strict=True)
    else:
        yield tuple(tensors)


def _momentum(state: Mapping[str, Any]) -> torch.Tensor | None:
    """The moving average, or sum, of gradients that an optimizer keeps."""
    momentum = state.get("exp_avg", state.get("momentum_buffer"))
    # RMSprop's momentum is of gradients that are divided already. A sparse momentum is of sparse
    # gradients, which have an empty residue.
    if momentum is None or momentum.is_sparse or "square_avg" in state:
        return None
    return local_part(momentum)
