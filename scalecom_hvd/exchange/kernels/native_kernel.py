"""The C kernel (native/lanes.c) as a `Kernel` of base.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.kernels.base import Taken, TensorSlot, Wire, dtype_name


class NativeKernel:
    """For CPU tensors of lanes. Each move is one call, for all tensors or refused for all."""

    def __init__(self, slots: Sequence[TensorSlot], grad_dtype: torch.dtype) -> None:
        self._library = native.library()
        self._slots = slots
        self._table = np.zeros(len(slots), native.TENSOR)
        self._table["dtype"] = native.DTYPES[dtype_name(grad_dtype)]
        self._table["residue"] = [slot.residue.data_ptr() for slot in slots]
        for field in ("numel", "k", "width", "rows", "offset_width"):
            self._table[field] = [getattr(slot.geometry, field) for slot in slots]
        for field in ("offsets_at", "values_at", "levels", "scales_at"):
            self._table[field] = [getattr(slot, field) for slot in slots]
        self._tensors = self._table.ctypes.data, len(slots)
        self._grads: Sequence[torch.Tensor] = ()
        self._scale = 1.0
        self._taken: Taken | None = None

    def begin(self, grads: Sequence[torch.Tensor], frozen: Sequence[bool], scale: float) -> None:
        self._table["grad"] = [grad.data_ptr() for grad in grads]
        self._table["frozen"] = frozen
        self._grads, self._scale = grads, scale
        self._taken = None

    def release(self) -> None:
        self._grads, self._taken = (), None

    def choose(self, extra: float, chosen: torch.Tensor) -> None:
        self._library.scalecom_choose(*self._tensors, self._scale, extra, chosen.data_ptr())

    def take_and_accumulate(
        self, beta: float, extra: float, wire: Wire, chosen: torch.Tensor | None = None
    ) -> int:
        arguments = beta, self._scale, extra, *(own.data_ptr() for own in wire)
        to = None if chosen is None else chosen.data_ptr()
        move = self._library.scalecom_take_and_accumulate
        bad = native.checked(move(*self._tensors, *arguments, to))
        self._taken = beta, wire
        return bad

    def norms(self) -> torch.Tensor:
        """(number of tensors,) float64: of g, as `take_and_accumulate` saw it pass."""
        return torch.from_numpy(np.sqrt(self._table["squares"]))

    def scatter(
        self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, averages: torch.Tensor
    ) -> None:
        table = self._table.copy()
        table["grad"] = [output.data_ptr() for output in outputs]
        arguments = 1 / self._scale, offsets.data_ptr(), averages.data_ptr()
        scatter = self._library.scalecom_scatter
        native.checked(scatter(table.ctypes.data, len(table), *arguments))

    def roll_back(self, keep_gradients: bool = False, spared: Sequence[bool] = ()) -> None:
        if self._taken is not None:
            if spared:
                self._table["frozen"] |= np.array(spared)
            beta, wire = self._taken
            arguments = beta, self._scale, *(own.data_ptr() for own in wire), keep_gradients
            native.checked(self._library.scalecom_roll_back(*self._tensors, *arguments))
            self._taken = None
