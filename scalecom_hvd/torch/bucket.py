"""A bucket: tensors that share one broadcast and one all-reduce, the buffers both use, and the moves of one step in them.

The reducer says when each move is made; nothing here communicates. Imports moves, residues and the rooms below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.profiler import record_function

from scalecom_hvd.torch.accumulators import Accumulators
from scalecom_hvd.torch.moves import Moves
from scalecom_hvd.torch.news import any_of
from scalecom_hvd.torch.residues import CompressedTensor, Residues, check_gradient
from scalecom_hvd.torch.transport import Wait

# Elements whose pass takes longer (about 0.1 ms) than to hand it to a thread.
WORTH_A_THREAD = 2**19


class Bucket:
    """Tensors that share one broadcast and one all-reduce, with the buffers both use, made once.

    compressed: {name: tensor}, whose offsets and values travel.  dense: {name: parameter}, sent whole.  make_moves: what their residues
    are moved by, Accumulators for methods other than ScaleCom.  share: what makes the average of a sum over ranks; values in float16 are
    summed, and multiplied by it when they are in a wider dtype again.
    Values buffer: [values of all compressed tensors | dense tensors | one element that counts workers with non-finite gradients].
    """

    def __init__(
        self,
        number: int,
        names: list[str],
        parameters: dict[str, torch.Tensor],
        residues: Residues,
        make_moves: Callable[[list[CompressedTensor]], Moves | Accumulators] = Moves,
        share: float = 1.0,
    ) -> None:
        self.number = number
        self.names = names
        self.parameters = {name: parameters[name] for name in names}
        self.compressed = {name: residues.tensors[name] for name in names if name in residues.tensors}
        self.dense = {name: parameters[name] for name in names if name not in residues.tensors}
        self.waiting: set[str] = set(names)
        self.grads: dict[str, torch.Tensor] = {}
        self.whole = self.scattered = False
        self.bad: Any = 0
        self.offsets_handle: int | None = None
        self.values_handles: list[int] = []
        self.job: Future | None = None
        self._exchange: Iterator[Wait] | None = None
        self._waits_for: Wait | None = None
        first = parameters[names[0]]
        self._device = first.device
        self._dense_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.moves = make_moves(list(self.compressed.values()))
        self.large = sum(tensor.residue.numel() for tensor in self.compressed.values()) >= WORTH_A_THREAD
        self.offsets = self.moves.new_offsets(self._device)
        # Look-ahead keeps this step's offsets until it is known that the step counts, while the next ones arrive here.
        self.next_offsets = torch.zeros_like(self.offsets)
        wire_dtype = next((tensor.wire_dtype for tensor in self.compressed.values()), self._dense_dtype)
        # What is sent whole needs its own dtype, in which it is averaged, so the reducer puts it elsewhere.
        assert not self.dense or wire_dtype == self._dense_dtype, "float16 values and tensors sent whole share no bucket"
        self._share = share if wire_dtype == torch.float16 else 1.0
        self._values = Values(self.moves.n_values, self.dense, wire_dtype, self._device)
        self._whole_values: Values | None = None
        self._reduced: Values | None = None  # what this step's all-reduce is made in; None: the gradients themselves
        self._averaged: dict[str, torch.Tensor] = {}

    @property
    def runs_beside_python(self) -> bool:
        """Whether moves are made on another thread while Python goes on: those of a kernel without Python that take long enough."""
        return self.large and self.moves.native

    def offsets_of(self, tensor: CompressedTensor, buffer: torch.Tensor) -> torch.Tensor:
        return self.moves.offsets_of(tensor, buffer)

    # How far this step has come: the reducer's generator, which makes the moves below.

    def start(self, exchange: Iterator[Wait]) -> None:
        """Begin this step, unless it has begun."""
        if self._exchange is None:
            self._exchange = exchange
            self._waits_for = next(exchange, None)

    def advance(self, patient: bool = False, needs_others: bool = False) -> None:
        """Go on as far as no waiting is needed; patient: wait, and for other ranks too only if they are `needs_others`."""
        while self._waits_for is not None:
            if not self._waits_for.done():
                if not patient or (self._waits_for.needs_others and not needs_others):
                    return
                with record_function(f"scalecom.wait for {self._waits_for.what}"):
                    self._waits_for.wait()
            self._waits_for = next(self._exchange, None)

    @property
    def waits_for_others(self) -> bool:
        return self._waits_for is not None and self._waits_for.needs_others

    def stop(self) -> None:
        """Give this step up; a move that is being made beside backward is waited for."""
        if self.job is not None:
            self.job.exception()

    # The moves of one step, in the order in which the reducer makes them.

    def begin(self, whole: bool, scale: float) -> None:
        """All gradients are at hand."""
        self.whole, self.bad = whole, 0
        self.grads = {name: flat_gradient(parameter) for name, parameter in self.parameters.items()}
        for name, sent in self._values.whole.items():
            check_gradient(name, self.grads[name], sent)
        frozen = [is_frozen(self.parameters[name]) for name in self.compressed]
        self._scale = scale
        self.moves.begin([self.grads[name] for name in self.compressed], scale, frozen)

    def filter(self, chosen: torch.Tensor | None = None) -> None:
        self.bad = self.bad + self.moves.filter(chosen)

    def choose_without_filter(self, chosen: torch.Tensor) -> None:
        self.moves.choose_without_filter(chosen)

    def gather(self, n_workers: int) -> None:
        """Put the accumulators at the offsets into the values buffer."""
        self.bad = self.bad + self.moves.gather(self.offsets, self._values.compressed, n_workers)

    def gather_and_filter(self, n_workers: int, chosen: torch.Tensor | None) -> None:
        """Both, in look-ahead's order."""
        self.bad = self.bad + self.moves.gather_and_filter(self.offsets, self._values.compressed, n_workers, chosen)

    def fill(self) -> dict[str, torch.Tensor]:
        """What is all-reduced, by what its name ends in: the values buffer, completed with dense tensors and the count; or, in a step that
        is sent whole, the gradients themselves, unless they must travel in a wider dtype."""
        self._reduced = None
        if self.whole and all(grad.dtype == self._dense_dtype for grad in self.grads.values()):
            # No count is needed: where a worker's gradient is not finite, the average is not either.
            self._averaged = {f".{name}": grad for name, grad in self.grads.items()}
            return self._averaged
        if self.whole and self._whole_values is None:
            self._whole_values = Values(0, self.parameters, self._dense_dtype, self._device)
        self._reduced = self._whole_values if self.whole else self._values
        bad = self._reduced.fill(self.grads)
        self._reduced.buffer[-1] = (self.bad + bad) != 0
        self._averaged = {"": self._reduced.buffer}
        return self._averaged

    def is_sound(self) -> torch.Tensor:
        """Whether no worker had a non-finite gradient, and all averages are finite in the gradients' dtype, as a 0-dimensional tensor."""
        # The smallest and the largest tell of all: one pass, and nothing as large as the gradients is made.
        averages = [*self._averaged.values(), *self.moves.averages_apart()]
        ends = [end for average in averages if average.numel() for end in torch.aminmax(average)]
        sound = torch.stack(ends).isfinite().all() if ends else torch.tensor(True)
        if self._reduced is None:
            return sound
        sound = sound & (self._reduced.buffer[-1] == 0)
        halves = [name for name, grad in self.grads.items() if grad.dtype == torch.float16]
        if halves:
            averages = self._reduced.whole if self.whole else self._reduced.whole | self.moves.values_of(self._values.compressed)
        for name in halves:
            average = averages[name].float()
            if name in self.compressed and not self.whole:
                average = average * self._share / self._scale
            sound = sound & average.half().isfinite().all()
        return sound

    def norms(self) -> tuple[float, float]:
        """The norms of residues and of this step's gradients, before `scatter`."""
        return self.moves.norms()

    def scatter(self) -> None:
        """Turn every gradient into the average over the ranks. From here on the step cannot be taken back."""
        self.scattered = True
        if not self.whole:
            self.moves.scatter([self.grads[name] for name in self.compressed], self.offsets, self._values.compressed, self._share)
        if self._reduced is not None:
            self._reduced.copy_to(self.grads)

    def spoil(self) -> None:
        """Make every gradient NaN, which is how a step that must not be taken shows on all ranks."""
        for grad in self.grads.values():
            grad.fill_(float("nan"))

    def undo(self) -> None:
        """Take the residues' moves of this step back, unless its averages are out already."""
        if not self.scattered:
            self.moves.undo()

    def end(self) -> dict[str, torch.Tensor]:
        """Close the step; gives what p.grad must become, by name."""
        outputs = {name: unflat_gradient(self.parameters[name], grad) for name, grad in self.grads.items()}
        self.forget()
        return outputs

    def forget(self) -> None:
        """Be ready for another step."""
        self.moves.finish()
        self.grads, self._averaged = {}, {}
        self.job = self._exchange = self._waits_for = None
        self.waiting = set(self.names)
        self.scattered = False
        self.values_handles = []

    def drop_whole_buffer(self) -> None:
        self._whole_values = None

    def values_bytes(self) -> int:
        """How many bytes of the values buffer are values; the rest is dense."""
        return self.moves.n_values * self._values.buffer.element_size()


class Values:
    """A buffer that is all-reduced: [`n_values` values | tensors sent whole | one count], with views of its parts."""

    def __init__(self, n_values: int, whole: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [parameter.numel() for parameter in whole.values()]
        self.buffer = torch.zeros(n_values + sum(sizes) + 1, dtype=dtype, device=device)
        self.compressed = self.buffer[:n_values]
        self._all_whole = self.buffer[n_values:-1]
        self.whole = dict(zip(whole, self._all_whole.split(sizes), strict=True))

    def fill(self, grads: dict[str, torch.Tensor]) -> Any:
        """Copy in what is sent whole; gives whether it is not finite."""
        if not self.whole:
            return 0
        torch._foreach_copy_(list(self.whole.values()), [grads[name] for name in self.whole])
        # Looked at in the wire dtype: what overflows there is not finite either.
        return ~self._all_whole.isfinite().all()

    def copy_to(self, grads: dict[str, torch.Tensor]) -> None:
        """The tensors sent whole <- their averages."""
        if self.whole:
            torch._foreach_copy_([grads[name] for name in self.whole], list(self.whole.values()))


def is_frozen(parameter: torch.Tensor) -> bool:
    """Whether a parameter is no longer trained, so that its residue stays; a gradient that its script gave it all the same counts."""
    return not parameter.requires_grad and not any_of(parameter.grad)


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
