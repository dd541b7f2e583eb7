"""The moves of one step for compressed tensors that share their buffers, with what it takes to undo them.

`Moves` knows where each tensor's offsets and values lie, which kernel serves it, and how far the step in progress has come; it is
what a bucket of the drop-in optimizer, and a single tensor in Horovod's own, do to their residues. Used by bucket.py and stock.py;
imports residues and kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.profiler import record_function

from scalecom_hvd.buckets import Layout
from scalecom_hvd.config import float16_limit
from scalecom_hvd.torch.kernels import CHOOSE_ACCUMULATOR, CHOOSE_NOTHING, CHOOSE_RESIDUE, Count, Kernel, NativeKernel, Place, kernel_for
from scalecom_hvd.torch.residues import CompressedTensor, check_gradient


class OffsetLayout:
    """The buffers of bytes in which the offsets of several tensors travel."""

    def __init__(self, tensors: Iterable[CompressedTensor]) -> None:
        self.tensors = list(tensors)
        self.layout = Layout({tensor.name: tensor.geometry for tensor in self.tensors})

    def new_buffer(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.layout.offsets_bytes, dtype=torch.uint8, device=device)

    def view(self, tensor: CompressedTensor, buffer: torch.Tensor) -> torch.Tensor:
        """A tensor's offsets (k,) in a buffer of this layout."""
        return buffer[self.layout.offsets[tensor.name]].view(tensor.offset_dtype)


def norm(tensors: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all of them together; reads them all."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return math.hypot(*map(float, torch._foreach_norm(list(tensors), 2, dtype=wide)))


class Moves:
    """One step's moves (the algorithm's (1) and (2), see reference.py) on some compressed tensors of one device and wire dtype.

    Offsets lie in buffers of bytes made by `new_offsets`; values in buffers (n_values,) of the wire dtype, tensor after tensor.
    """

    def __init__(self, tensors: Sequence[CompressedTensor]) -> None:
        self.tensors = list(tensors)
        self._offsets_layout = OffsetLayout(self.tensors)
        layout = self._offsets_layout.layout
        self.n_values = layout.n_values
        self._places = [
            Place(tensor.residue, tensor.geometry, layout.offsets[tensor.name].start, layout.values[tensor.name].start)
            for tensor in self.tensors
        ]
        self._beta = self.tensors[0].beta if self.tensors else 1.0
        self._sent: torch.Tensor | None = None
        self._grad_dtypes: list[torch.dtype] | None = None
        self._kernels: list[tuple[Kernel, list[int]]] = []
        self.finish()

    def new_offsets(self, device: torch.device) -> torch.Tensor:
        return self._offsets_layout.new_buffer(device)

    def offsets_of(self, tensor: CompressedTensor, buffer: torch.Tensor) -> torch.Tensor:
        """A tensor's offsets (k,) in a buffer of `new_offsets`."""
        return self._offsets_layout.view(tensor, buffer)

    def values_of(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """{name: values (k,)} in a buffer of values."""
        return {tensor.name: place.values(buffer) for tensor, place in zip(self.tensors, self._places, strict=True)}

    def averages_apart(self) -> list[torch.Tensor]:
        """Averages over ranks that are not in the buffer of values: none."""
        return []

    def begin(self, grads: Sequence[torch.Tensor], scale: float, frozen: Sequence[bool]) -> None:
        """Take this step's gradients, (N,) contiguous each; `scale` is 1 / loss scale. They are kept until `finish`, since a step may have
        to be taken back.

        frozen: the parameter is no longer trained, so the residue stays as it is and zeros are sent, as Horovod does.
        Raises RuntimeError for gradients that are not of the sizes and devices of the residues.
        """
        for tensor, grad in zip(self.tensors, grads, strict=True):
            check_gradient(tensor.name, grad, tensor.residue)
        # Kernels walk over memory, not over strides.
        assert all(grad.is_contiguous() for grad in grads), "gradients must be flat and contiguous here"
        self._grads, self._scale = list(grads), scale
        dtypes = [grad.dtype for grad in grads]
        if dtypes != self._grad_dtypes:  # torch lets a parameter have gradients of another dtype than its own
            self._choose_kernels(dtypes, grads)
        for kernel, members in self._kernels:
            kernel.begin([grads[i] for i in members], [frozen[i] for i in members], scale)

    def _choose_kernels(self, dtypes: list[torch.dtype], grads: Sequence[torch.Tensor]) -> None:
        members: dict[type[Kernel], list[int]] = {}
        for i, (tensor, grad) in enumerate(zip(self.tensors, grads, strict=True)):
            members.setdefault(kernel_for(grad.device, grad.dtype, tensor.residue.dtype), []).append(i)
        self._kernels = [
            (kernel([self._places[i] for i in chosen], [dtypes[i] for i in chosen]), chosen) for kernel, chosen in members.items()
        ]
        self._grad_dtypes = dtypes

    @property
    def grads(self) -> list[torch.Tensor]:
        """This step's gradients, as `begin` was given them."""
        return self._grads

    @property
    def native(self) -> bool:
        """Whether the gradients of this step are served by the native kernel alone, which needs no Python."""
        return all(isinstance(kernel, NativeKernel) for kernel, _ in self._kernels)

    # Each call has a range of its own in profiles: one object for all, as a decorator is, is not for moves on two threads at a time.

    def filter(self, chosen: torch.Tensor | None = None) -> Count:
        """Move (1), and where `chosen` is given, its lanes' winners by |m + g|; gives the number of bad gradient elements."""
        choose = CHOOSE_NOTHING if chosen is None else CHOOSE_ACCUMULATOR
        with record_function("scalecom.filter"):
            return self._sum(kernel.filter(self._beta, choose, chosen) for kernel, _ in self._kernels)

    def choose_without_filter(self, chosen: torch.Tensor) -> None:
        """Select on |m + g| and leave the residue alone: a look-ahead leader's choice in a step that is sent whole."""
        for kernel, _ in self._kernels:
            kernel.filter(0.0, CHOOSE_ACCUMULATOR, chosen)

    def gather(self, offsets: torch.Tensor, values: torch.Tensor, n_workers: int) -> Count:
        """Move (2), after `filter`: `values` become the accumulators at I. Gives the number not finite, which are sent as zero."""
        sent, limit, share = self._sent_like(values), float16_limit(n_workers), 1 - self._beta
        with record_function("scalecom.gather"):
            return self._sum(kernel.gather(self._beta, share, offsets, values, sent, limit) for kernel, _ in self._kernels)

    def gather_and_filter(
        self, offsets: torch.Tensor, values: torch.Tensor, n_workers: int, chosen: torch.Tensor | None, factor: int = 1
    ) -> Count:
        """Moves (2) and (1) in look-ahead's order, and where `chosen` is given, the winners by |m| afterwards. Gives the number of bad
        elements. factor: by what float16 values will be multiplied before they are summed."""
        sent, limit = self._sent_like(values), float16_limit(n_workers, factor)
        choose = CHOOSE_NOTHING if chosen is None else CHOOSE_RESIDUE
        with record_function("scalecom.gather_and_filter"):
            return self._sum(
                kernel.gather_and_filter(self._beta, offsets, values, sent, limit, choose, chosen) for kernel, _ in self._kernels
            )

    def scatter(self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, values: torch.Tensor, share: float = 1.0) -> None:
        """Every output (N,) <- the averages at I in the gradient's units, zero elsewhere. It may be the gradient itself; then the
        step cannot be undone. share: by what the values are still to be multiplied."""
        with record_function("scalecom.scatter"):
            for kernel, members in self._kernels:
                kernel.scatter([outputs[i] for i in members], offsets, values, share)

    def norms(self) -> tuple[float, float]:
        """The Euclidean norms of all residues, and of this step's gradients in the residues' units. Reads them all."""

        return norm([tensor.residue for tensor in self.tensors]), norm(self._grads) * self._scale

    def undo(self) -> None:
        """Take this step's moves back, as far as they were made; the offsets and the gradients must still be at hand."""
        for kernel, _ in self._kernels:
            kernel.undo()
        self.finish()

    def finish(self) -> None:
        """Close the step, and let go of the gradients."""
        for kernel, _ in self._kernels:
            kernel.finish()
        self._grads: list[torch.Tensor] = []

    def _sent_like(self, values: torch.Tensor) -> torch.Tensor:
        """Where what was sent is kept for `undo`: the buffer of values is averaged in place."""
        if self._sent is None:
            self._sent = torch.zeros_like(values)
        return self._sent

    @staticmethod
    def _sum(counts) -> Count:
        total = 0
        for count in counts:
            total = total + count
        return total
