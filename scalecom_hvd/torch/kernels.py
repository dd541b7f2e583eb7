"""What is done to one tensor's residue in one step, and the kernels that do it.

Four operations, all in place on flat contiguous tensors; `kernel_for` picks who does them. Every kernel gives bit-identical results,
and those of reference.py. Called by residues.py; imports nothing of this package above lanes and native.
"""

from __future__ import annotations

import functools
import os
from typing import Protocol

import numpy as np
import torch

from scalecom_hvd import native
from scalecom_hvd.lanes import Lanes, Positions
from scalecom_hvd.native import CHOOSE_ACCUMULATOR, CHOOSE_NOTHING, CHOOSE_RESIDUE

__all__ = ["CHOOSE_ACCUMULATOR", "CHOOSE_NOTHING", "CHOOSE_RESIDUE", "Kernel", "NativeKernel", "TorchKernel", "kernel_for"]

Count = int | torch.Tensor  # a 0-dimensional tensor on devices where reading a number would wait


class Kernel(Protocol):
    """grad (N,), any floating dtype; residue (N,), float32 or float64; offsets (k,), geometry.offset_dtype; values (k,), the wire dtype.

    scale: 1 / loss scale, which takes gradients to the residue's units. Non-finite gradient elements count as zero.
    """

    def filter(
        self,
        grad: torch.Tensor,
        residue: torch.Tensor,
        geometry: Lanes,
        beta: float,
        scale: float,
        choose: int,
        offsets: torch.Tensor | None,
    ) -> Count:
        """m <- m + beta*g; unless CHOOSE_NOTHING, `offsets` <- the winners of |m_old + g| or of |m_new|.

        Gives how many elements of g are not finite."""

    def gather(
        self,
        grad: torch.Tensor,
        residue: torch.Tensor,
        geometry: Lanes,
        beta: float,
        scale: float,
        share: float,
        offsets: torch.Tensor,
        limit: float,
        values: torch.Tensor,
    ) -> Count:
        """values <- m[I] + share*g[I], in the wire dtype (float16 is clamped to +-limit); m[I] <- m[I] - beta*values.

        Gives how many values are not finite; those are sent as zero."""

    def scatter(self, grad: torch.Tensor, geometry: Lanes, scale: float, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """grad <- values / scale at I, zero elsewhere."""

    def undo(
        self,
        grad: torch.Tensor,
        residue: torch.Tensor,
        geometry: Lanes,
        beta: float,
        scale: float,
        filtered: bool,
        offsets: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> None:
        """m[I] <- m[I] + beta*values, if there are offsets; m <- m - beta*g, if filtered: a step taken back, to rounding."""


class TorchKernel:
    """Plain torch, for any device and dtype: the fall-back without a compiler, and for tensors the native kernel does not know."""

    def filter(self, grad, residue, geometry, beta, scale, choose, offsets):
        g, finite = _usable(grad, residue, scale)
        if choose == CHOOSE_ACCUMULATOR:
            self._choose(residue + g, geometry, offsets)
        residue.add_(g.mul_(beta))
        if choose == CHOOSE_RESIDUE:
            self._choose(residue, geometry, offsets)
        return finite.numel() - finite.count_nonzero()

    @staticmethod
    def _choose(accumulator, geometry, offsets):
        if isinstance(geometry, Positions):
            _choose_exact(accumulator, geometry, offsets)
            return
        size, lane = accumulator.abs(), 0
        for elements, groups, width in geometry.groups():
            block = size[elements]
            rows = -(-block.numel() // (groups * width))
            padding = groups * width * rows - block.numel()
            if padding:
                block = torch.cat([block, block.new_full((padding,), -1)])
            offsets[lane : lane + groups * width] = block.view(groups, rows, width).argmax(1).view(-1)
            lane += groups * width

    def gather(self, grad, residue, geometry, beta, scale, share, offsets, limit, values):
        positions = _positions(geometry, offsets)
        g, _ = _usable(grad[positions], residue, scale)
        value = residue[positions].add_(g.mul_(share))
        finite = value.isfinite()
        value.masked_fill_(~finite, 0)
        values.copy_(value.clamp_(-limit, limit) if values.dtype == torch.float16 else value)
        residue[positions] -= values.to(residue.dtype) * beta
        return finite.numel() - finite.count_nonzero()

    def scatter(self, grad, geometry, scale, offsets, values):
        kind = torch.float64 if grad.dtype == torch.float64 else torch.float32
        grad.zero_()
        grad[_positions(geometry, offsets)] = (values.to(kind) * (1 / scale)).to(grad.dtype)

    def undo(self, grad, residue, geometry, beta, scale, filtered, offsets, values):
        if offsets is not None:
            residue[_positions(geometry, offsets)] += values.to(residue.dtype) * beta
        if filtered:
            residue.sub_(_usable(grad, residue, scale)[0].mul_(beta))


class NativeKernel:
    """The C kernel, for CPU tensors."""

    def __init__(self, library) -> None:
        self._library = library

    def filter(self, grad, residue, geometry, beta, scale, choose, offsets):
        exact = isinstance(geometry, Positions) and choose != CHOOSE_NOTHING
        if exact and choose == CHOOSE_ACCUMULATOR:
            _choose_exact(residue + _usable(grad, residue, scale)[0], geometry, offsets)
        bad = self._library.scalecom_pass(
            *_gradient(grad),
            residue.data_ptr(),
            *_numbers(geometry),
            beta,
            scale,
            CHOOSE_NOTHING if exact else choose,
            *_array(offsets if choose != CHOOSE_NOTHING else None),
        )
        if exact and choose == CHOOSE_RESIDUE:
            _choose_exact(residue, geometry, offsets)
        return bad

    def gather(self, grad, residue, geometry, beta, scale, share, offsets, limit, values):
        return self._library.scalecom_gather(
            *_gradient(grad),
            residue.data_ptr(),
            *_numbers(geometry),
            beta,
            scale,
            share,
            *_array(offsets),
            values.dtype == torch.float16,
            limit,
            values.data_ptr(),
        )

    def scatter(self, grad, geometry, scale, offsets, values):
        grad.zero_()
        self._library.scalecom_scatter(
            *_gradient(grad), *_numbers(geometry), 1 / scale, *_array(offsets), values.dtype == torch.float16, values.data_ptr()
        )

    def undo(self, grad, residue, geometry, beta, scale, filtered, offsets, values):
        dtype, address = _gradient(grad)
        self._library.scalecom_undo(
            dtype,
            address if filtered else None,
            residue.data_ptr(),
            *_numbers(geometry),
            beta,
            scale,
            *_array(offsets),
            values is not None and values.dtype == torch.float16,
            None if values is None else values.data_ptr(),
        )


def kernel_for(device: torch.device, grad_dtype: torch.dtype, residue_dtype: torch.dtype) -> Kernel:
    """The fastest kernel for such tensors. SCALECOM_KERNEL=torch asks for plain torch; =native makes a missing library an error."""
    asked = os.environ.get("SCALECOM_KERNEL", "")
    if asked not in ("", "native", "torch"):
        raise ValueError(f"SCALECOM_KERNEL must be 'native' or 'torch', not {asked!r}")
    same_width = (residue_dtype == torch.float64) == (grad_dtype == torch.float64)
    if asked == "torch" or device.type != "cpu" or not same_width or _name(grad_dtype) not in native.DTYPES:
        return TorchKernel()
    library = native.library()
    if library is None and asked == "native":
        raise RuntimeError("SCALECOM_KERNEL=native, but the native kernel was not built: install a C compiler, then scalecom_hvd again")
    return NativeKernel(library) if library is not None else TorchKernel()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _usable(grad: torch.Tensor, residue: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """scale*g in the residue's dtype with zero for what is not finite (a new tensor), and where it is finite."""
    g = grad.to(residue.dtype, copy=True)
    if scale != 1:
        g.mul_(scale)
    finite = g.isfinite()
    return g.masked_fill_(~finite, 0), finite


def _choose_exact(accumulator: torch.Tensor, geometry: Lanes, offsets: torch.Tensor) -> None:
    """The k largest magnitudes, ascending by position; of equals the first, on every device alike (topk itself promises no order)."""
    size = accumulator.abs()
    smallest = size.topk(geometry.k, sorted=False).values.min()
    above = (size > smallest).nonzero().view(-1)
    equal = (size == smallest).nonzero().view(-1)[: geometry.k - above.numel()]
    offsets.copy_(torch.cat([above, equal]).sort().values)


@functools.lru_cache(maxsize=1024)
def _starts_and_strides(geometry: Lanes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    starts, strides = geometry.starts_and_strides()
    return torch.from_numpy(np.ascontiguousarray(starts)).to(device), torch.from_numpy(np.ascontiguousarray(strides)).to(device)


def _positions(geometry: Lanes, offsets: torch.Tensor) -> torch.Tensor:
    starts, strides = _starts_and_strides(geometry, offsets.device)
    return starts + offsets.long() * strides


def _gradient(grad: torch.Tensor) -> tuple[int, int]:
    return native.DTYPES[_name(grad.dtype)], grad.data_ptr()


def _numbers(geometry: Lanes) -> tuple[int, int, int, int]:
    return geometry.numel, geometry.k, geometry.width, geometry.rows


def _array(offsets: torch.Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if offsets is None else (offsets.data_ptr(), offsets.element_size())
