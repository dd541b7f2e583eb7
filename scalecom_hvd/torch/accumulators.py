"""What methods other than ScaleCom are given of a bucket: accumulators, a way to say what was sent, and collectives.

`Accumulators` stands where `Moves` stands for ScaleCom, and keeps residues in the same way, m <- (1 - beta) m + beta (acc - sent), written
when the step is known to count, so that one that does not count changes nothing. Simple rather than fast: it holds two tensors as large
as the bucket. Used by reducer.py and the methods; imports moves and the rooms below.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from scalecom_hvd.torch.kernels import CHOOSE_RESIDUE, Kernel, Place, add_usable, kernel_for, positions_of
from scalecom_hvd.torch.moves import OffsetLayout, norm
from scalecom_hvd.torch.residues import CompressedTensor, check_gradient
from scalecom_hvd.torch.transport import Transport, Wait, wait_for


class Accumulators:
    """The accumulators m + g of a bucket's compressed tensors, one after the other, in `flat` (N,), float32 or float64.

    parts: the tensors' views of it.  counts: how many elements each tensor sends, k = ceil(N / rate).  geometries: their lanes.
    step: the number of this step.  bad: how many elements of its gradients are not finite, or too large. They count as zero here, and
    make the step void for all ranks.
    """

    native = False
    n_values = 0

    def __init__(self, tensors: Sequence[CompressedTensor]) -> None:
        self.tensors = list(tensors)
        self.sizes = [tensor.residue.numel() for tensor in self.tensors]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.geometries = [tensor.geometry for tensor in self.tensors]
        self.counts = [geometry.k for geometry in self.geometries]
        self.step = 0
        self._offsets = OffsetLayout(self.tensors)
        # Residues of a bucket are of one dtype: it is what would travel.
        self._dtype = self.tensors[0].residue.dtype if self.tensors else torch.float32
        self._flat: torch.Tensor | None = None
        self._chooser: Kernel | None = None
        self.finish()

    # What a method uses.

    @property
    def flat(self) -> torch.Tensor:
        assert self._flat is not None
        return self._flat

    @property
    def parts(self) -> list[torch.Tensor]:
        return list(self.flat.split(self.sizes))

    def choose(self) -> torch.Tensor:
        """The places where this worker's accumulators are largest, tensor by tensor, as offsets in one buffer of bytes."""
        buffer = self.new_choice()
        if self._chooser is None:
            starts = [self._offsets.layout.offsets[tensor.name].start for tensor in self.tensors]
            places = [Place(part, *where, 0) for part, *where in zip(self.parts, self.geometries, starts, strict=True)]
            self._chooser = kernel_for(self.flat.device, self._dtype, self._dtype)(places, [self._dtype] * len(places))
        # The kernel of ScaleCom's leader, with the accumulators in the place of residues, to which nothing is added.
        self._chooser.begin(self.parts, [False] * len(self.tensors), 1.0)
        self._chooser.filter(0.0, CHOOSE_RESIDUE, buffer)
        self._chooser.finish()
        return buffer

    def new_choice(self) -> torch.Tensor:
        """A buffer for what another rank chose."""
        return self._offsets.new_buffer(self.flat.device)

    def places_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """The places in `flat`, (sum of counts,) int64, that a buffer of `choose` stands for."""
        return self.places([positions_of(tensor.geometry, self._offsets.view(tensor, offsets)) for tensor in self.tensors])

    def places(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """The places in `flat` of positions in every tensor."""
        return torch.cat([own + start for own, start in zip(positions, self.starts, strict=True)])

    def send(self, places: Any, values: torch.Tensor) -> None:
        """This worker sent `values` at these places (an index tensor without repeats, or slice(None)): the rest stays in its residue."""
        self.flat[places] -= values

    def receive(self, places: Any, values: torch.Tensor) -> None:
        """The average over ranks holds `values` at these places; those of a place named several times add up, other places are zero."""
        if isinstance(places, slice):
            self._average[places] += values
        else:
            self._average.index_add_(0, places, values.to(self._dtype))

    # What a bucket does with it, as with Moves.

    def new_offsets(self, device: torch.device) -> torch.Tensor:
        """Nobody chooses for others: no offsets are broadcast."""
        return torch.zeros(0, dtype=torch.uint8, device=device)

    def begin(self, grads: Sequence[torch.Tensor], scale: float, frozen: Sequence[bool]) -> None:
        """Take this step's gradients, as Moves.begin does. A frozen tensor's accumulator is zero, and its residue stays as it is."""
        self._grads, self._scale, self._frozen = list(grads), scale, list(frozen)
        if not grads:
            return
        for tensor, grad in zip(self.tensors, grads, strict=True):
            check_gradient(tensor.name, grad, tensor.residue)
        if self._flat is None:
            self._flat = torch.empty(sum(self.sizes), dtype=self._dtype, device=grads[0].device)
            self._average = torch.empty_like(self._flat)
        self._average.zero_()
        self.bad = torch.zeros((), dtype=torch.int64, device=self.flat.device)
        for part, tensor, grad, is_frozen in zip(self.parts, self.tensors, grads, frozen, strict=True):
            if is_frozen:
                part.zero_()
                continue
            self.bad += add_usable(grad, tensor.residue, scale, part)

    def values_of(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """{name: averages (N,)}; ScaleCom's are k values in the buffer."""
        averages = self._average.split(self.sizes) if self.tensors else ()
        return {tensor.name: part for tensor, part in zip(self.tensors, averages, strict=True)}

    def averages_apart(self) -> list[torch.Tensor]:
        """The averages: they are not in a bucket's buffer."""
        return [self._average] if self.tensors else []

    def norms(self) -> tuple[float, float]:
        """The Euclidean norms of all residues, and of this step's gradients in the residues' units."""
        return norm([tensor.residue for tensor in self.tensors]), norm(self._grads) * self._scale

    def scatter(self, outputs: Sequence[torch.Tensor], offsets: torch.Tensor, values: torch.Tensor, share: float = 1.0) -> None:
        """The step counts: residues take what was not sent, and every output becomes the average, in the gradient's units."""
        if not self.tensors:
            return
        averages = self._average.split(self.sizes)
        for tensor, kept, average, output, frozen in zip(self.tensors, self.parts, averages, outputs, self._frozen, strict=True):
            if not frozen:
                if tensor.beta == 1:
                    tensor.residue.copy_(kept)
                else:
                    # Each operation rounded for itself: add_ with alpha fuses them on some processors, and residues would differ in bits.
                    tensor.residue.mul_(1 - tensor.beta).add_(kept.mul_(tensor.beta))
            output.copy_(average if self._scale == 1 else average / self._scale)

    def undo(self) -> None:
        """Nothing was changed yet."""
        self.finish()

    def finish(self) -> None:
        """Close the step, and let go of the gradients."""
        self._grads: list[torch.Tensor] = []


class Channel:
    """The collectives of one bucket's step, for a method; `averaged = yield from channel.average(values, "values")`.

    Every rank must ask for the same ones in the same order.
    size, position: the number of ranks, and this one's place.  leader: the place of the rank whose turn it is to choose for others.
    share: what a sum over ranks is multiplied by, 1 / size for hvd.Average.
    """

    def __init__(self, transport: Transport, bucket: int, leader: int, submitted: dict[str, int]) -> None:
        self._transport, self._submitted = transport, submitted
        self.bucket, self.leader = bucket, leader
        self.size, self.position, self.share = transport.size, transport.position, transport.share

    def average(self, values: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> Generator[Wait, None, torch.Tensor]:
        """The average over ranks (hvd.Sum: the sum), in place; float16 values are summed as such, and the average is of this dtype."""
        self._submitted["values"] += values.numel() * values.element_size()
        yield from self._wait(self._transport.average(values, f"{name}.{self.bucket}"), name)
        return values.to(dtype) * self.share if values.dtype == torch.float16 else values

    def broadcast(self, offsets: torch.Tensor) -> Generator[Wait, None, torch.Tensor]:
        """The leader's offsets, in place: others bring a buffer as large."""
        self._submitted["offsets"] += offsets.numel()
        yield from self._wait(self._transport.broadcast(offsets, self.leader, f"offsets.{self.bucket}"), "offsets")
        return offsets

    def gather(self, tensor: torch.Tensor, name: str) -> Generator[Wait, None, list[torch.Tensor]]:
        """Every rank's tensor, all of one shape, in order of position."""
        self._submitted["gathered"] += tensor.numel() * tensor.element_size()
        joined = yield from self._wait(self._transport.gather(tensor, f"{name}.{self.bucket}"), name)
        # Copies: bytes are viewed as other dtypes where they begin on a word alone, and simulated ranks share what is joined.
        return [part.clone() for part in joined.split(len(tensor))]

    def _wait(self, handle: int, name: str) -> Generator[Wait, None, torch.Tensor]:
        self._submitted["collectives"] += 1
        yield wait_for(self._transport, name, handle, needs_others=True)
        return self._transport.wait(handle)


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on these numbers alone, such as (seed, step, bucket): the same on every rank that gives the same."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)
