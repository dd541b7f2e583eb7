"""The Triton kernel (scalecom_hvd/triton) as a `Kernel` of base.py.

It is for CUDA tensors, and under TRITON_INTERPRET=1 for CPU tensors. Nothing here waits for the
device: a step's addresses go there by one small asynchronous copy, and counts stay there.

All launches go to the stream that is current on the tensors' device. If a caller uses one stream,
as in autograd's hooks, it needs nothing more. If it uses several, it must let each move's stream
wait for that of the move before, and the next step's first for this step's last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from scalecom_hvd import triton as tiles
from scalecom_hvd.exchange.devices import uploaded
from scalecom_hvd.exchange.kernels.base import Taken, TensorSlot, Wire
from scalecom_hvd.integers import blocks_of
from scalecom_hvd.lanes import LANES

# The types in which gradients are stored. scalecom_hvd/triton reads int16 as bfloat16.
_STORED = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.int16,
}


def why_not(device_type: str) -> str | None:
    """Why the kernel cannot serve tensors of such devices; None if it can."""
    if device_type == "cpu":
        how = "for tensors on the CPU set TRITON_INTERPRET=1 (slow, for tests)"
        return None if tiles.INTERPRETED else f"it is for CUDA devices; {how}"
    if device_type != "cuda":
        return f"it is for CUDA devices, not for {device_type!r}"
    if tiles.INTERPRETED:
        return (
            "the interpreter, which TRITON_INTERPRET turns on, cannot follow addresses on a "
            "device; unset TRITON_INTERPRET"
        )
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # such as a missing C compiler, which Triton needs
        return f"Triton does not work on this machine ({error})"
    return None


class TritonKernel:
    """For tensors with lanes. It makes one launch per move."""

    def __init__(self, slots: Sequence[TensorSlot], grad_dtype: torch.dtype) -> None:
        self._slots = slots
        self._device = slots[0].residue.device
        self._grad_dtype = _STORED[grad_dtype]
        self._tiles = uploaded(_tiles(slots), self._device)
        # Scales are measured in a launch of their own: a block spans several tiles.
        self._blocks = uploaded(_blocks(slots), self._device)
        fields = np.array([_fields(slot) for slot in slots], np.int64)
        self._tensors = uploaded(fields, self._device)
        self._grads: Sequence[torch.Tensor] = ()
        self._frozen: Sequence[bool] = ()
        self._scale = 1.0
        self._step: torch.Tensor | None = None
        self._taken: Taken | None = None

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        self._grads, self._frozen, self._scale = grads, frozen, scale
        self._step, self._taken = self._step_table(grads), None

    def release(self) -> None:
        self._grads, self._step, self._taken = (), None, None

    def choose(self, extra: float, chosen: torch.Tensor) -> None:
        step = self._step
        self._launch(tiles.choose_tiles, self._tiles, step, chosen, self._scale)
        self._launch(tiles.measure_blocks, self._blocks, step, chosen, self._scale, extra)

    def take_and_accumulate(
        self, beta: float, extra: float, wire: Wire, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        count = torch.zeros((), dtype=torch.int64, device=self._device)
        arguments = self._step, *wire, chosen, count, beta, self._scale, extra
        self._launch(tiles.take_and_accumulate_tiles, self._tiles, *arguments)
        self._taken = beta, wire
        if chosen is not None:
            self._launch(tiles.measure_blocks, self._blocks, self._step, chosen, self._scale, extra)
        return count

    def scatter(
        self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, averages: torch.Tensor
    ) -> None:
        in_place = all(
            output.data_ptr() == grad.data_ptr()
            for output, grad in zip(outputs, self._grads, strict=True)
        )
        step = self._step if in_place else self._step_table(outputs)
        self._launch(tiles.scatter_tiles, self._tiles, step, offsets, averages, 1 / self._scale)

    def roll_back(self, keep_gradients: bool = False, spared: Sequence[bool] = ()) -> None:
        if self._taken is not None:
            if spared:
                self._frozen = [a or b for a, b in zip(self._frozen, spared, strict=True)]
                self._step = self._step_table(self._grads)
            beta, wire = self._taken
            arguments = self._step, *wire, beta, 0.0 if keep_gradients else beta, self._scale
            self._launch(tiles.roll_back_tiles, self._tiles, *arguments)
        self._taken = None

    def _launch(self, kernel: Any, table: torch.Tensor, *arguments: object) -> None:
        """Launch a program for each row of a table. arguments: the step's table first."""
        if not len(table):
            return
        is_cuda = self._device.type == "cuda"
        with torch.cuda.device(self._device) if is_cuda else contextlib.nullcontext():
            # No fused multiply-adds: they round differently from all other kernels.
            how = {"GRAD": self._grad_dtype, "num_warps": 4, "enable_fp_fusion": False}
            kernel[(len(table),)](table, self._tensors, *arguments, **how)

    def _step_table(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This step's fields, in scalecom_hvd/triton's order, with the addresses of `tensors`."""
        rows = []
        for slot, tensor, frozen in zip(self._slots, tensors, self._frozen, strict=True):
            address = tensor.data_ptr()
            rows.append((address, frozen, (address | slot.residue.data_ptr()) % 16 == 0))
        return uploaded(np.array(rows, np.int64), self._device)


def _tiles(slots: Sequence[TensorSlot]) -> np.ndarray:
    """(tiles, 2), int32: every tile's tensor, and its number in the tensor.

    Tiles of last groups come first: they take longest, so at the end all would wait for them.
    """
    counts = [-(-slot.geometry.k // LANES) for slot in slots]
    tensor = np.repeat(np.arange(len(slots)), counts)
    number = np.arange(len(tensor)) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    full_lanes = np.array([slot.geometry.full_lanes for slot in slots])
    order = np.argsort(number * LANES < full_lanes[tensor], kind="stable")
    return np.stack([tensor, number], axis=1).astype(np.int32)[order]


def _blocks(slots: Sequence[TensorSlot]) -> np.ndarray:
    """(blocks, 2), int32: every scale's tensor, and the scale's number in the tensor."""
    counts = [blocks_of(slot.geometry.k) if slot.levels else 0 for slot in slots]
    numbers = [np.arange(count) for count in [*counts, 0]]  # one at least, to be concatenated
    tensor = np.repeat(np.arange(len(slots)), counts)
    return np.stack([tensor, np.concatenate(numbers)], axis=1).astype(np.int32)


def _fields(slot: TensorSlot) -> tuple[int, ...]:
    """A tensor's fixed fields, in scalecom_hvd/triton's order."""
    lanes = slot.geometry
    left, last = lanes.numel - lanes.full_lanes * lanes.rows, max(lanes.k - lanes.full_lanes, 1)
    last_rows, width = -(-left // last), lanes.offset_width
    shape = lanes.numel, lanes.k, lanes.full_lanes, lanes.rows, last_rows
    places = slot.offsets_at, slot.values_at, slot.scales_at
    return slot.residue.data_ptr(), *shape, width, *places, slot.levels
