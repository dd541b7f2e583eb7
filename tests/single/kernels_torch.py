"""PyTorch's kernels, with the moves that test_kernels.py makes.

`Adapter` says what those moves are. kernels_tensorflow.py and kernels_c.py have the same ones.
"""

import numpy as np
import torch
from kernel_cases import Case, Taken

from scalecom_hvd.exchange.kernels.base import TensorSlot, Wire
from scalecom_hvd.exchange.kernels.native_kernel import NativeKernel
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel


def there(array, dtype=None, device="cpu"):
    """Return a copy of an array. dtype: what it is if it is bfloat16."""
    array = array.view(np.int16) if dtype == "bfloat16" else array
    tensor = torch.from_numpy(array.copy())
    return (tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor).to(device)


def back(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(np.uint16).copy()
    return tensor.cpu().numpy().copy()


class Adapter:
    """A kernel for each dtype, on copies of a case's arrays. It gives NumPy arrays.

    Attributes:
        kernel: what makes the moves.
        device: where.
        has: what else than the moves on lanes this kernel is made for.
        refusal: the error if it refuses its arguments.
    """

    kernel: type
    device = "cpu"
    has: frozenset = frozenset(
        {"mixed dtypes", "no elements", "denormal numbers", "roll-back", "look-ahead"}
    )
    refusal: type[Exception] = RuntimeError

    def __init__(self, case: Case):
        self.case, places = case, case.layout
        self.residues = [there(residue, device=self.device) for residue in case.residues]
        self.grads = []
        for grad, dtype in zip(case.grads, case.dtypes, strict=True):
            shifted = np.concatenate([np.zeros(case.shift, grad.dtype), grad])
            self.grads.append(there(shifted, dtype, self.device)[case.shift :])
        self.offsets = there(case.offsets, device=self.device)
        values = np.full(places.n_values, 9, case.wire_dtype)
        self.values = there(values, device=self.device)
        slots = [
            TensorSlot(
                *(residue, shape, places.offsets[name].start, places.values[name].start),
                *(case.levels, places.scales[name].start),
            )
            for residue, (name, shape) in zip(self.residues, case.shapes.items(), strict=True)
        ]
        members = {}
        for i, grad in enumerate(self.grads):
            members.setdefault(grad.dtype, []).append(i)
        self.made = []
        for dtype, own in members.items():
            self.made.append((self.kernel([slots[i] for i in own], dtype), own))
            grads, frozen = ([each[i] for i in own] for each in (self.grads, case.frozen))
            self.made[-1][0].begin(grads, frozen, case.scale)

    def state(self):
        """Return the gradients and residues as they are now."""
        return [back(tensor) for tensor in (*self.grads, *self.residues)]

    def choose(self):
        """Return the bytes of the choice."""
        chosen = torch.full_like(self.offsets, 9)
        for kernel, _ in self.made:
            kernel.choose(self.case.extra, chosen)
        return back(chosen)

    def take_and_accumulate(self, chooses):
        """Return a `Taken`; its `chosen` is empty if this rank does not choose."""
        chosen, beta = torch.full_like(self.offsets, 9) if chooses else None, self.case.beta
        wire = Wire(self.offsets, self.values)
        moves = beta, self.case.extra, wire, chosen
        bad = sum(kernel.take_and_accumulate(*moves) for kernel, _ in self.made)
        chosen = self.offsets[:0] if chosen is None else chosen
        residues = [back(residue) for residue in self.residues]
        return Taken(residues, back(self.values), back(chosen), int(bad))

    def scatter(self, values, in_place=False):
        """Return the outputs. in_place: whether they may take the gradients' memory."""
        outputs = self.grads if in_place else [torch.ones_like(grad) for grad in self.grads]
        averages = there(values, device=self.device)
        for kernel, own in self.made:
            kernel.scatter([outputs[i] for i in own], self.offsets, averages)
        return [back(output) for output in outputs]

    def roll_back(self, keeps_gradients=False, spared=None):
        """Return the residues after a roll-back of all that was done to them, but to those spared.

        spared: one bool for each tensor. None: nothing is spared.
        """
        for kernel, own in self.made:
            kernel.roll_back(keeps_gradients, [spared[i] for i in own] if spared else ())
        return [back(residue) for residue in self.residues]


class Native(Adapter):
    """The C kernel."""

    kernel = NativeKernel
    has = Adapter.has | {"checked offsets", "large tensors"}


class Plain(Adapter):
    """Plain torch."""

    kernel = TorchKernel
    has = Adapter.has | {"exact selection", "checked positions", "large tensors"}
