"""What one step does to the residues of a bucket's tensors: the contract of all kernels.

A kernel is made once for tensors that share their buffers of offsets and values, and whose
gradients have one dtype. It makes every move for all these tensors at once. All kernels give the
same results, to the bit, and the results of reference.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from scalecom_hvd.exchange.devices import stream_id
from scalecom_hvd.exchange.gradients import limit_of
from scalecom_hvd.integers import BLOCK, blocks_of
from scalecom_hvd.lanes import Lanes

Count = int | torch.Tensor
"""A number, or a 0-dimensional tensor on devices where reading a number would wait."""


@dataclass(frozen=True)
class TensorSlot:
    """A compressed tensor's residue, and the tensor's position in the buffers that it shares.

    The buffer of offsets holds bytes, and the scales of integers besides.
    """

    residue: torch.Tensor  # (N,) float32 or float64
    geometry: Lanes
    offsets_at: int  # where its k offsets begin, in bytes
    values_at: int  # where its k values begin, in elements
    levels: int = 0  # L, if values travel as integers (integers.py); 0: they travel as numbers
    scales_at: int = 0  # where its scales begin, in bytes

    def offsets(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor's offsets (k,), geometry.offset_dtype, in a buffer of bytes.

        Empty, (0,), if each lane has one element.
        """
        dtype = getattr(torch, str(self.geometry.offset_dtype))
        end = self.offsets_at + self.geometry.k * self.geometry.offset_width
        return buffer[self.offsets_at : end].view(dtype)

    def scales(self, buffer: torch.Tensor) -> torch.Tensor:
        """The scales (blocks,) of this tensor's values, float32, in a buffer of offsets."""
        count = blocks_of(self.geometry.k) if self.levels else 0
        return buffer[self.scales_at : self.scales_at + 4 * count].view(torch.float32)

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor's values (k,) in a buffer of values."""
        return buffer[self.values_at : self.values_at + self.geometry.k]


class Wire(NamedTuple):
    """Where values are taken, and what is sent. It must stay until the step counts."""

    offsets: torch.Tensor  # the bytes of the chosen offsets, and of the scales of integers
    values: torch.Tensor  # in the residues' dtype, or integers, int8


Taken = tuple[float, Wire]
"""(beta, wire): what a step's move was made with, for a roll-back."""


class Kernel(Protocol):
    """The moves of one step, numbered as in reference.py.

    m is the residue. g is the gradient times `scale`, which is 1 / loss scale, with zero for bad
    elements. An element is good if |g| <= config.largest_gradient. I stands for the indices.

    The buffers `offsets` and `chosen` hold bytes. The C and Triton kernels allocate nothing as
    large as these in a step. A frozen tensor is no longer trained: its residue stays as it is, and
    zeros are sent.
    """

    def __init__(self, slots: Sequence[TensorSlot], grad_dtype: torch.dtype) -> None: ...

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        """Begin a step with its gradients: each (N,), contiguous, of dtype `grad_dtype`.

        The gradients must stay alive until the step's last move.
        """

    def choose(self, extra: float, chosen: torch.Tensor) -> None:
        """Chosen <- the winners of |m + g|, and scales of what would be sent. Residues stay."""

    def take_and_accumulate(
        self, beta: float, extra: float, wire: Wire, chosen: torch.Tensor | None = None
    ) -> Count:
        """(1) values <- v = m[I] + g[I]; m[I] <- m[I] - beta*values. (2) m <- m + beta*g.

        With `levels`, v is rounded to integers times scales. Returns how many elements of g are
        bad, and how many values are not finite, which are sent as zero.

        Args:
            beta: of the low-pass filter.
            extra: v is larger by `extra` times m, if m and g do not have opposite signs.
            wire: where values are taken from, and where they go.
            chosen: then takes what `choose` gives, with m as it is afterwards. None: nothing.
        """

    def scatter(
        self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, averages: torch.Tensor
    ) -> None:
        """Every output <- averages / scale at I, zero elsewhere.

        Outputs are (N,), of the gradient's dtype. They may be the gradients. Averages have the
        residues' dtype.
        """

    def roll_back(self, keep_gradients: bool = False, spared: Sequence[bool] = ()) -> None:
        """Undo what was done to residues since `begin`, up to rounding.

        This is m[I] <- m[I] + beta*values, then m <- m - beta*g. The second is left out with
        `keep_gradients`, for gradients that are no longer what they were. Each kernel keeps track
        of its moves itself, because a move may fail halfway. Offsets and values must be what they
        were. spared: which tensors are left as they are. Empty: none.
        """

    def release(self) -> None:
        """Release the gradients. Nothing can be rolled back any more."""


def scale_blocks_(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply values (k,) by the scale of their block, in place."""
    cut = values.numel() // BLOCK * BLOCK
    values[:cut].view(-1, BLOCK).mul_(scales[: cut // BLOCK, None])
    if cut < values.numel():
        values[cut:].mul_(scales[-1])
    return values


def scale_numbers(counts: Sequence[int]) -> torch.Tensor:
    """(sum of counts,) int32, on the CPU: the index of each value's scale among all scales.

    counts: the k of each tensor. The tensors' scales lie one after the other.
    """
    lengths = [min(BLOCK, k - first) for k in counts for first in range(0, k, BLOCK)]
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
    return numbers.repeat_interleave(torch.tensor(lengths, device="cpu"))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name outside of torch: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def usable(grad: torch.Tensor, residue: torch.Tensor, scale: float) -> tuple[torch.Tensor, Count]:
    """scale*g in the residue's dtype, with zero for bad elements, and the number of bad elements.

    It is the gradient itself, if that needs no change.
    """
    g = grad.to(residue.dtype)
    if scale != 1:
        g = g * scale
    if g.device.type == "cpu" and g.numel():
        # The usual case is quick: if the smallest and the largest are good, all are.
        low, high = torch.aminmax(g)
        if float(low) >= -limit_of(g.dtype) and float(high) <= limit_of(g.dtype):
            return g, 0
    good = g.abs() <= limit_of(residue.dtype)
    return g.masked_fill(~good, 0), good.numel() - good.count_nonzero()


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the k largest magnitudes, in ascending order; the first of equals.

    They are the same on every device, although topk itself promises no order.
    """
    size = values.abs()
    smallest = size.topk(k, sorted=False).values.min()
    above, equal = size > smallest, size == smallest
    if size.device.type == "cpu":
        found = above.nonzero().view(-1)
        return torch.cat([found, equal.nonzero().view(-1)[: k - found.numel()]]).sort().values
    # nonzero() would wait for the device, and so perhaps for a rank that waits for this one.
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    places = torch.where(chosen, chosen.cumsum(0) - 1, k)  # what is not chosen goes to the end
    positions = torch.arange(size.numel(), device=size.device)
    return positions.new_empty(k + 1).scatter_(0, places, positions)[:k]


@functools.lru_cache(maxsize=1024)
def _starts_and_strides(
    geometry: Lanes, device: torch.device, stream: int
) -> tuple[torch.Tensor, ...]:
    own = (torch.from_numpy(numbers).to(device) for numbers in geometry.starts_and_strides())
    return tuple(own)


def positions_of(geometry: Lanes, offsets: torch.Tensor) -> torch.Tensor:
    """The flat positions (k,), int64, that offsets (k,) stand for."""
    device = offsets.device
    if not geometry.offset_width:
        return torch.arange(geometry.k, device=device)
    starts, strides = _starts_and_strides(geometry, device, stream_id(device))
    return starts + offsets.long() * strides
