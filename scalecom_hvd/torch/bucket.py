"""A bucket: tensors that share one broadcast and one all-reduce, the buffers both use, and the moves of one step in them.

The reducer says when each move is made; nothing here communicates. Imports residues and the rooms below.
"""

from __future__ import annotations

from typing import Any

import torch

from scalecom_hvd.torch.residues import CompressedTensor, OffsetLayout, Residues


class Bucket:
    """Tensors that share one broadcast and one all-reduce, with the buffers both use, made once.

    compressed: {name: tensor}, whose offsets and values travel.  dense: {name: parameter}, sent whole.
    Values buffer: [values of all compressed tensors | dense tensors | one element that counts workers with non-finite gradients].
    """

    def __init__(self, number: int, names: list[str], parameters: dict[str, torch.Tensor], residues: Residues) -> None:
        self.number = number
        self.names = names
        self.parameters = {name: parameters[name] for name in names}
        self.compressed = {name: residues.tensors[name] for name in names if name in residues.tensors}
        self.dense = {name: parameters[name] for name in names if name not in residues.tensors}
        self.waiting: set[str] = set(names)
        self.grads: dict[str, torch.Tensor] = {}
        self.launched = self.whole = self.scattered = False
        self.bad: Any = 0
        self.offsets_handle: int | None = None
        self.values_handle: int | None = None
        first = parameters[names[0]]
        self._device = first.device
        some = next(iter(self.compressed.values()), None)
        self._dense_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._dtype = some.wire_dtype if some else self._dense_dtype
        self._whole_buffer: torch.Tensor | None = None
        self._layout()

    def _layout(self) -> None:
        self._offset_layout = OffsetLayout(self.compressed.values())
        self.offsets = self._offset_layout.new_buffer(self._device)
        # Look-ahead keeps this step's offsets until it is known that the step counts, while the next ones arrive here.
        self.next_offsets = torch.zeros_like(self.offsets)
        self._value_slices, at = {}, 0
        for name in self.names:
            length = self.compressed[name].geometry.k if name in self.compressed else self.dense[name].numel()
            self._value_slices[name] = slice(at, at := at + length)
        self.values = torch.zeros(at + 1, dtype=self._dtype, device=self._device)
        self._sent = torch.zeros_like(self.values)

    def offsets_of(self, tensor: CompressedTensor, buffer: torch.Tensor) -> torch.Tensor:
        return self._offset_layout.view(tensor, buffer)

    # The moves of one step, in the order in which the reducer makes them.

    def begin(self, whole: bool, scale: float) -> None:
        """All gradients are at hand."""
        self.launched, self.whole, self.bad = True, whole, 0
        for name, parameter in self.parameters.items():
            self.grads[name] = flat_gradient(parameter)
        for name, tensor in self.compressed.items():
            tensor.begin(self.grads[name], scale, frozen=not self.parameters[name].requires_grad)

    def filter(self, choose: int, into: torch.Tensor | None) -> None:
        for tensor in self.compressed.values():
            self.bad = self.bad + tensor.filter(choose, None if into is None else self.offsets_of(tensor, into))

    def choose_without_filter(self, into: torch.Tensor) -> None:
        for tensor in self.compressed.values():
            tensor.choose_without_filter(self.offsets_of(tensor, into))

    def gather(self, n_workers: int) -> None:
        """Put the accumulators at the offsets into the values buffer."""
        for name, tensor in self.compressed.items():
            where = self._value_slices[name]
            self.bad = self.bad + tensor.gather(self.offsets_of(tensor, self.offsets), self.values[where], self._sent[where], n_workers)

    def fill(self) -> torch.Tensor:
        """Complete the values buffer with dense tensors and the count, and give it: this is what is all-reduced."""
        if self.whole:
            buffer, slices, names = self._buffer_for_whole(), self._whole_slices, self.names
        else:
            buffer, slices, names = self.values, self._value_slices, list(self.dense)
        for name in names:
            buffer[slices[name]].copy_(self.grads[name])
            # Copied to the wire dtype first: what overflows there is not finite either.
            self.bad = self.bad + ~buffer[slices[name]].isfinite().all()
        buffer[-1] = self.bad != 0
        return buffer

    def _buffer_for_whole(self) -> torch.Tensor:
        if self._whole_buffer is None:
            self._whole_slices, at = {}, 0
            for name, parameter in self.parameters.items():
                self._whole_slices[name] = slice(at, at := at + parameter.numel())
            self._whole_buffer = torch.zeros(at + 1, dtype=self._dense_dtype, device=self._device)
        return self._whole_buffer

    @property
    def reduced(self) -> torch.Tensor:
        """The buffer that the last all-reduce of this bucket was made in."""
        return self._whole_buffer if self.whole else self.values

    @property
    def _reduced_slices(self) -> dict[str, slice]:
        return self._whole_slices if self.whole else self._value_slices

    def is_sound(self) -> torch.Tensor:
        """Whether no worker had a non-finite gradient, and all averages are finite in the gradients' dtype, as a 0-dimensional tensor."""
        sound = (self.reduced[-1] == 0) & self.reduced.isfinite().all()
        for name, grad in self.grads.items():
            if grad.dtype == torch.float16:
                average = self.reduced[self._reduced_slices[name]].float()
                if name in self.compressed and not self.whole:
                    average = average / self.compressed[name].scale
                sound = sound & average.to(grad.dtype).isfinite().all()
        return sound

    def scatter(self) -> None:
        """Turn every gradient into the average over the ranks. From here on the step cannot be taken back."""
        self.scattered = True
        for name, grad in self.grads.items():
            if name in self.compressed and not self.whole:
                tensor = self.compressed[name]
                tensor.scatter(grad, self.offsets_of(tensor, self.offsets), self.values[self._value_slices[name]])
            else:
                grad.copy_(self.reduced[self._reduced_slices[name]])

    def spoil(self) -> None:
        """Make every gradient NaN, which is how a step that must not be taken shows on all ranks."""
        for grad in self.grads.values():
            grad.fill_(float("nan"))

    def undo(self) -> None:
        """Take the residues' moves of this step back, unless its averages are out already."""
        if self.scattered:
            return
        for tensor in self.compressed.values():
            tensor.undo()

    def end(self) -> dict[str, torch.Tensor]:
        """Close the step; gives what p.grad must become, by name."""
        outputs = {name: unflat_gradient(self.parameters[name], grad) for name, grad in self.grads.items()}
        for tensor in self.compressed.values():
            tensor.finish()
        self.grads.clear()
        self.waiting = set(self.names)
        self.launched = self.scattered = False
        self.values_handle = None
        return outputs

    def drop_whole_buffer(self) -> None:
        self._whole_buffer = None

    def values_bytes(self) -> int:
        """How many bytes of the values buffer are values; the rest is dense."""
        return sum(t.geometry.k for t in self.compressed.values()) * self.values.element_size()


def flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient as a contiguous (N,) tensor: p.grad itself where its layout allows, else a copy."""
    grad = parameter.grad.detach()
    return (grad.to_dense() if grad.is_sparse else grad).contiguous().view(-1)


def unflat_gradient(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """What p.grad must become when `flat` holds the average: p.grad itself, filled, where that can be."""
    grad = parameter.grad.detach()
    expanded = not grad.is_sparse and any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True))
    if grad.is_sparse or expanded:
        return flat.view(parameter.shape)
    if flat.data_ptr() != grad.data_ptr() or not grad.is_contiguous():
        grad.copy_(flat.view(grad.shape))
    return grad


def empty_sparse_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of no rows, for a rank on which a sparse embedding was not used."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_zeros((0, *parameter.shape[1:])), parameter.shape, check_invariants=False)
