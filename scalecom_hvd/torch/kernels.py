"""What one step does to the residues of a bucket's tensors, and the kernels that do it.

A kernel is made once for tensors that share their buffers of offsets and values (a `Place` each) and makes every move for all of them
at once; `kernel_for` picks who does so. Every kernel gives bit-identical results, and those of reference.py. Called by moves.py;
imports nothing of this package above config, lanes and native.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from scalecom_hvd import native
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.lanes import Lanes, Positions
from scalecom_hvd.native import CHOOSE_ACCUMULATOR, CHOOSE_NOTHING, CHOOSE_RESIDUE

__all__ = [
    "CHOOSE_ACCUMULATOR",
    "CHOOSE_NOTHING",
    "CHOOSE_RESIDUE",
    "Kernel",
    "NativeKernel",
    "Place",
    "TorchKernel",
    "add_usable",
    "choose_by_torch",
    "kernel_for",
    "largest",
    "limit_of",
    "positions_of",
    "usable",
]

log = logging.getLogger("scalecom_hvd")

Count = int | torch.Tensor  # a 0-dimensional tensor on devices where reading a number would wait


@dataclass(frozen=True)
class Place:
    """A compressed tensor's residue (N,), float32 or float64, its lanes, and where its k offsets (in bytes) and k values (in elements)
    begin in the buffers it shares."""

    residue: torch.Tensor
    geometry: Lanes
    offsets_at: int
    values_at: int

    def offsets(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor's offsets (k,), geometry.offset_dtype, in a buffer of bytes."""
        dtype = getattr(torch, str(self.geometry.offset_dtype))
        return buffer[self.offsets_at : self.offsets_at + self.geometry.k * dtype.itemsize].view(dtype)

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor's values (k,) in a buffer of the wire dtype."""
        return buffer[self.values_at : self.values_at + self.geometry.k]


class Kernel(Protocol):
    """The moves of one step. m: residue, g: gradient times `scale` (1 / loss scale), with zero for bad elements, I: the indices.

    An element is bad unless |g| <= config.largest_gradient.

    Buffers: offsets, chosen (bytes); values, sent (the wire dtype). Nothing is allocated by a step that is as large as they are.
    A frozen tensor is no longer trained: its residue stays as it is, and zeros are sent.
    """

    def __init__(self, places: Sequence[Place], grad_dtypes: Sequence[torch.dtype]) -> None: ...

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        """Take up a step's gradients: (N,) contiguous each, of the dtypes announced. They must stay alive until the step's last move."""

    def filter(self, beta: float, choose: int, chosen: torch.Tensor | None) -> Count:
        """m <- m + beta*g; unless CHOOSE_NOTHING, `chosen` <- the winners of |m_old + g| or of |m_new|.

        Gives how many elements of g are bad."""

    def gather(self, beta: float, share: float, offsets: torch.Tensor, values: torch.Tensor, sent: torch.Tensor, limit: float) -> Count:
        """values, sent <- m[I] + share*g[I], in the wire dtype (float16 is clamped to +-limit); m[I] <- m[I] - beta*sent.

        Gives how many values are not finite; those are sent as zero."""

    def gather_and_filter(
        self,
        beta: float,
        offsets: torch.Tensor,
        values: torch.Tensor,
        sent: torch.Tensor,
        limit: float,
        choose: int,
        chosen: torch.Tensor | None,
    ) -> Count:
        """`gather` with share 1, then `filter`, as look-ahead does it; choose: CHOOSE_RESIDUE or CHOOSE_NOTHING. Gives the sum of both."""

    def scatter(self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, values: torch.Tensor, share: float = 1.0) -> None:
        """Every output (N,), of the gradient's dtype, <- values * share / scale at I, zero elsewhere. Outputs may be the gradients."""

    def undo(self) -> None:
        """Take back what was done to residues since `begin`, to rounding: m[I] <- m[I] + beta*sent of tensors that were gathered, m <- m -
        beta*g of those that were filtered. Each kernel keeps that account itself, as a move may fail when it is half done. Offsets and sent
        values must be what they were."""

    def finish(self) -> None:
        """Let go of the gradients: nothing can be undone any more."""


@dataclass
class _Step:
    """One tensor's step, and what was done to its residue in it: the beta that it was filtered with (0: it was not), and what was gathered,
    as (beta, offsets, sent)."""

    place: Place
    grad: torch.Tensor
    frozen: bool
    filtered: float = 0.0
    gathered: tuple[float, torch.Tensor, torch.Tensor] | None = None


class TorchKernel:
    """Plain torch, for any device and dtype: the fall-back without a compiler, and for tensors the other kernels do not know."""

    def __init__(self, places, grad_dtypes):
        self._places = places
        self.finish()

    def begin(self, grads, frozen, scale):
        self._steps = [_Step(*own) for own in zip(self._places, grads, frozen, strict=True)]
        self._scale = scale

    def filter(self, beta, choose, chosen):
        bad = 0
        for step in self._steps:
            place, residue = step.place, step.place.residue
            g, good = usable(step.grad, residue, self._scale)
            if choose == CHOOSE_ACCUMULATOR:
                choose_by_torch(residue + g, place.geometry, place.offsets(chosen))
            if not step.frozen:
                residue.add_(g.mul_(beta))
                step.filtered = beta
            if choose == CHOOSE_RESIDUE:
                choose_by_torch(residue, place.geometry, place.offsets(chosen))
            bad = bad + (good.numel() - good.count_nonzero())
        return bad

    def gather(self, beta, share, offsets, values, sent, limit):
        bad = 0
        for step in self._steps:
            place, residue = step.place, step.place.residue
            part, copy = place.values(values), place.values(sent)
            if step.frozen:
                part.zero_()
                copy.zero_()
                continue
            positions = positions_of(place.geometry, place.offsets(offsets))
            value = residue[positions]
            if share != 0:
                value.add_(usable(step.grad[positions], residue, self._scale)[0].mul_(share))
            finite = value.isfinite()
            value.masked_fill_(~finite, 0)
            part.copy_(value.clamp_(-limit, limit) if part.dtype == torch.float16 else value)
            copy.copy_(part)
            residue[positions] -= part.to(residue.dtype) * beta
            step.gathered = beta, offsets, sent
            bad = bad + (finite.numel() - finite.count_nonzero())
        return bad

    def gather_and_filter(self, beta, offsets, values, sent, limit, choose, chosen):
        bad = self.gather(beta, 1.0, offsets, values, sent, limit)
        return bad + self.filter(beta, choose, chosen)

    def scatter(self, outputs, offsets, values, share=1.0):
        for place, output in zip(self._places, outputs, strict=True):
            kind = torch.float64 if output.dtype == torch.float64 else torch.float32
            output.zero_()
            scaled = place.values(values).to(kind) * (share / self._scale)
            output[positions_of(place.geometry, place.offsets(offsets))] = scaled.to(output.dtype)

    def undo(self):
        for step in self._steps:
            place, residue = step.place, step.place.residue
            if step.gathered is not None:
                beta, offsets, sent = step.gathered
                residue[positions_of(place.geometry, place.offsets(offsets))] += place.values(sent).to(residue.dtype) * beta
                step.gathered = None
            if step.filtered:
                residue.sub_(usable(step.grad, residue, self._scale)[0].mul_(step.filtered))
                step.filtered = 0.0

    def finish(self):
        self._steps: list[_Step] = []


def choose_by_torch(accumulator: torch.Tensor, geometry: Lanes, offsets: torch.Tensor) -> None:
    """offsets (k,) <- the winners of |accumulator| (N,): each lane's largest, first of equals; or the positions of the k largest of all."""
    if isinstance(geometry, Positions):
        offsets.copy_(largest(accumulator, geometry.k))
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


class NativeKernel:
    """The C kernel (native/lanes.c), for CPU tensors: one call per move, which is made for all tensors or refused for all."""

    def __init__(self, places, grad_dtypes):
        self._library = native.library()
        self._places = places
        self._exact = any(isinstance(place.geometry, Positions) for place in places)  # a run has one kind of selection
        self._table = np.zeros(len(places), native.TENSOR)
        for row, place, dtype in zip(self._table, places, grad_dtypes, strict=True):
            geometry = place.geometry
            row["residue"], row["dtype"] = place.residue.data_ptr(), native.DTYPES[_name(dtype)]
            row["numel"], row["k"], row["width"], row["rows"] = geometry.numel, geometry.k, geometry.width, geometry.rows
            row["offset_width"] = geometry.offset_dtype.itemsize
            row["offsets_at"], row["values_at"] = place.offsets_at, place.values_at
        self._tensors = self._table.ctypes.data, len(places)
        self.finish()

    def begin(self, grads, frozen, scale):
        self._table["grad"] = [grad.data_ptr() for grad in grads]
        self._table["frozen"] = frozen
        self._grads, self._scale = grads, scale

    def finish(self):
        self._grads = None
        self._filtered = 0.0  # the beta of this step's filter, and what its gather was called with
        self._gathered: tuple[float, torch.Tensor, torch.Tensor] | None = None

    def filter(self, beta, choose, chosen):
        if self._exact and choose != CHOOSE_NOTHING:
            return self._filter_exactly(beta, choose, chosen)
        bad = self._library.scalecom_filter(*self._tensors, beta, self._scale, choose, _address(chosen))
        self._filtered = beta
        return bad

    def _filter_exactly(self, beta, choose, chosen):
        if choose == CHOOSE_ACCUMULATOR:
            for place, grad in zip(self._places, self._grads, strict=True):
                accumulator = place.residue + usable(grad, place.residue, self._scale)[0]
                place.offsets(chosen).copy_(largest(accumulator, place.geometry.k))
        bad = self.filter(beta, CHOOSE_NOTHING, None)
        if choose == CHOOSE_RESIDUE:
            for place in self._places:
                place.offsets(chosen).copy_(largest(place.residue, place.geometry.k))
        return bad

    def gather(self, beta, share, offsets, values, sent, limit):
        buffers = _address(offsets), _address(values), _address(sent)
        bad = native.checked(self._library.scalecom_gather(*self._tensors, beta, self._scale, share, *buffers, _is_half(values), limit))
        self._gathered = beta, offsets, sent
        return bad

    def gather_and_filter(self, beta, offsets, values, sent, limit, choose, chosen):
        if self._exact:
            bad = self.gather(beta, 1.0, offsets, values, sent, limit)
            return bad + self.filter(beta, choose, chosen)
        arguments = (
            beta,
            self._scale,
            _address(offsets),
            _address(values),
            _address(sent),
            _is_half(values),
            limit,
            choose,
            _address(chosen),
        )
        bad = native.checked(self._library.scalecom_gather_and_filter(*self._tensors, *arguments))
        self._gathered, self._filtered = (beta, offsets, sent), beta
        return bad

    def scatter(self, outputs, offsets, values, share=1.0):
        grads = self._table["grad"].copy()
        self._table["grad"] = [output.data_ptr() for output in outputs]
        arguments = share / self._scale, _address(offsets), _address(values), _is_half(values)
        try:
            native.checked(self._library.scalecom_scatter(*self._tensors, *arguments))
        finally:
            self._table["grad"] = grads

    def undo(self):
        if self._gathered is not None:
            beta, offsets, sent = self._gathered
            self._library.scalecom_undo(*self._tensors, beta, self._scale, False, _address(offsets), _address(sent), _is_half(sent))
            self._gathered = None
        if self._filtered:
            self._library.scalecom_undo(*self._tensors, self._filtered, self._scale, True, None, None, False)
            self._filtered = 0.0


def kernel_for(device: torch.device, grad_dtype: torch.dtype, residue_dtype: torch.dtype) -> type[Kernel]:
    """The fastest kernel for such tensors. SCALECOM_KERNEL=torch asks for plain torch; =native makes a missing library an error, and
    =triton a Triton that cannot be used."""
    asked = os.environ.get("SCALECOM_KERNEL", "")
    if asked not in ("", "native", "triton", "torch"):
        raise ValueError(f"SCALECOM_KERNEL must be 'native', 'triton' or 'torch', not {asked!r}")
    same_width = (residue_dtype == torch.float64) == (grad_dtype == torch.float64)
    if asked == "torch" or not same_width or _name(grad_dtype) not in native.DTYPES:
        return TorchKernel
    if asked == "triton" or (device.type == "cuda" and not asked):
        return _triton_kernel(device.type, required=bool(asked))
    if device.type != "cpu":
        return TorchKernel
    library = native.library()
    if library is None and asked == "native":
        raise RuntimeError("SCALECOM_KERNEL=native, but the native kernel was not built: install a C compiler, then scalecom_hvd again")
    return NativeKernel if library is not None else TorchKernel


def _triton_kernel(device_type: str, required: bool) -> type[Kernel]:
    why_not = _why_not_triton(device_type)
    if why_not is None:
        from scalecom_hvd.torch.triton_kernel import TritonKernel

        return TritonKernel
    if required:
        raise RuntimeError(f"SCALECOM_KERNEL=triton, but {why_not}")
    _warn(f"the Triton kernel is not used: {why_not}; the plain-torch kernel is used instead, which is several times slower")
    return TorchKernel


@functools.cache
def _why_not_triton(device_type: str) -> str | None:
    """Why the Triton kernel cannot serve tensors of such devices; None if it can. Triton is imported only where someone may use it."""
    try:
        from scalecom_hvd.torch import triton_kernel
    except ImportError as error:
        return f"triton cannot be imported ({error}): install the version that torch asks for (pip show torch)"
    return triton_kernel.why_not(device_type)


@functools.cache
def _warn(text: str) -> None:
    log.warning(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def limit_of(dtype: torch.dtype) -> float:
    """The largest magnitude of a gradient element that a residue of this dtype, float32 or float64, takes up."""
    return largest_gradient(_name(dtype))


def usable(grad: torch.Tensor, residue: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """scale*g in the residue's dtype with zero for bad elements (a new tensor), and where it is good."""
    g = grad.to(residue.dtype, copy=True)
    if scale != 1:
        g.mul_(scale)
    good = g.abs() <= limit_of(residue.dtype)
    return g.masked_fill_(~good, 0), good


def add_usable(grad: torch.Tensor, residue: torch.Tensor, scale: float, out: torch.Tensor) -> Count:
    """out <- residue + scale*g, with zero for bad elements; gives how many those are."""
    if grad.device.type == "cpu" and grad.dtype == residue.dtype and scale == 1 and grad.numel():
        # The usual case needs no copies: where the ends are good, all is.
        low, high = torch.aminmax(grad)
        limit = limit_of(residue.dtype)
        if float(low) >= -limit and float(high) <= limit:
            torch.add(grad, residue, out=out)
            return 0
    g, good = usable(grad, residue, scale)
    torch.add(g, residue, out=out)
    return good.numel() - good.count_nonzero()


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest magnitudes' positions, ascending; of equals the first, on every device alike (topk itself promises no order)."""
    size = values.abs()
    smallest = size.topk(k, sorted=False).values.min()
    above = (size > smallest).nonzero().view(-1)
    equal = (size == smallest).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, equal]).sort().values


@functools.lru_cache(maxsize=1024)
def _starts_and_strides(geometry: Lanes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    starts, strides = geometry.starts_and_strides()
    return torch.from_numpy(np.ascontiguousarray(starts)).to(device), torch.from_numpy(np.ascontiguousarray(strides)).to(device)


def positions_of(geometry: Lanes, offsets: torch.Tensor) -> torch.Tensor:
    starts, strides = _starts_and_strides(geometry, offsets.device)
    return starts + offsets.long() * strides


def _address(buffer: torch.Tensor | None) -> int | None:
    return None if buffer is None else buffer.data_ptr()


def _is_half(values: torch.Tensor) -> bool:
    return values.dtype == torch.float16
