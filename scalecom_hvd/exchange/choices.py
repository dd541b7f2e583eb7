"""Choices: the offsets, and for integers the scales, that one rank sends to all for a bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scalecom_hvd.bucket_layout import Layout, pack_halves, unpack_halves
from scalecom_hvd.exchange.kernels.base import TensorSlot

Choice = Mapping[str, Mapping[str, torch.Tensor]]
"""{name of a tensor: {"offsets": (k,), and for integers "scales": (blocks,)}}."""


class Choices:
    """The buffers of a bucket's choices, made once.

    There are two: state may hold views of the next step's choice while this step's is in use.
    """

    def __init__(
        self, slots: Mapping[str, TensorSlot], layout: Layout, device: torch.device
    ) -> None:
        self._slots, self._layout = slots, layout
        self._buffers = [
            torch.zeros(layout.offsets_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        is_packed = layout.narrow_bytes > 0
        self._message = self._buffers[0].new_empty(layout.message_bytes if is_packed else 0)

    def new(self) -> torch.Tensor:
        """The bytes that this step's choice will fill."""
        return self._buffers[0]

    def keep(self) -> None:
        """Keep this step's choice, because the step counts. The next one fills other bytes."""
        self._buffers.reverse()

    def split(self, buffer: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """A choice as views of its bytes."""
        choice = {name: {"offsets": slot.offsets(buffer)} for name, slot in self._slots.items()}
        for name, slot in self._slots.items():
            if slot.levels:
                choice[name]["scales"] = slot.scales(buffer)
        return choice

    def join(self, choice: Choice) -> torch.Tensor:
        """The inverse of `split`. It copies nothing if all are views of one buffer."""
        parts = [choice[name]["offsets"] for name in self._slots]
        storage = parts[0].untyped_storage()  # views of another dtype do not know what they view
        starts = [(storage.data_ptr(), slot.offsets_at) for slot in self._slots.values()]
        whole = storage.nbytes() == self._layout.offsets_bytes
        if whole and starts == [_place(part) for part in parts]:
            return torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(storage)
        buffer = self._buffers[1]  # no state views this one, or it would have been found above
        for (name, slot), part in zip(self._slots.items(), parts, strict=True):
            slot.offsets(buffer).copy_(part.view(slot.offsets(buffer).dtype))
            if slot.levels:
                slot.scales(buffer).copy_(choice[name]["scales"])
        return buffer

    def pack(self, choice: torch.Tensor) -> torch.Tensor:
        """The bytes that travel for a choice. Narrow offsets travel two to a byte."""
        narrow = self._layout.narrow_bytes
        if not narrow:
            return choice
        cut = len(choice) - narrow
        self._message[:cut] = choice[:cut]
        pack_halves(choice[cut:], self._message[cut:])
        return self._message

    def unpack(self, message: torch.Tensor, choice: torch.Tensor) -> None:
        """The inverse of `pack`: choice <- what travelled."""
        narrow = self._layout.narrow_bytes
        if narrow:
            cut = len(choice) - narrow
            choice[:cut] = message[:cut]
            unpack_halves(message[cut:], choice[cut:])


def _place(view: torch.Tensor) -> tuple[int, int]:
    """Where a view lies, even an empty one: its storage's address, and the bytes before it."""
    return view.untyped_storage().data_ptr(), int(view.storage_offset()) * view.element_size()
