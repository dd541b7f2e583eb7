"""Gradients as an exchange takes and gives them: flat and contiguous; and the loss scale on them.

A GradScaler keeps its scale on a device. Hooks of backward must not wait for it, so the host reads
a copy, which begins when backward brings the first gradient.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from scalecom_hvd.config import largest_gradient
from scalecom_hvd.exchange.collectives import Wait
from scalecom_hvd.exchange.devices import HostCopy, uploaded

_PLAIN = torch.Tensor, torch.nn.Parameter  # asking these for to_local takes a microsecond


class NotFinite(Exception):  # noqa: N818 (not an error: the step is left out)
    """A step found a gradient that cannot be used, and changed nothing. Has its `result`."""

    def __init__(self, result: object = None) -> None:
        super().__init__("a gradient is not finite, or larger than 2**100")
        self.result = result


def current_backward() -> int:
    """The number of the backward pass that calls this; -1: none does. Later ones have larger ones.

    Raises:
        RuntimeError: PyTorch no longer tells it. There is no public way to ask.
    """
    ask = getattr(torch._C, "_current_graph_task_id", None)
    if ask is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} does not say which backward pass runs: take 2.13, "
            "with which this library is tested"
        )
    return ask()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor (DTensor), or the tensor itself, in the same memory.

    Autograd does not notice changes to it, so a graph of the earlier numbers stays valid.
    """
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.data


def flat_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as a contiguous (N,) tensor: in its own memory if it allows that."""
    own = tensor.detach()
    return (own.to_dense() if own.is_sparse else own).contiguous().view(-1)


def unflat_gradient(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """What p.grad must become when `flat` holds the average: p.grad itself, if possible."""
    grad = parameter.grad.detach()
    expanded = not grad.is_sparse and any(
        stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)
    )
    if grad.is_sparse or expanded:
        return flat.view(parameter.shape)
    if flat.data_ptr() != grad.data_ptr() or not grad.is_contiguous():
        grad.copy_(flat.view(grad.shape))
    return grad


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float64 for float64 tensors, and float32 for all others: no narrower dtype is summed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def limit_of(dtype: torch.dtype) -> float:
    """The largest magnitude of a gradient's element for a residue of float32, or of float64."""
    return largest_gradient(str(dtype).removeprefix("torch."))


def check_sizes(grads: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless gradients have the sizes and devices that they had at the start.

    Kernels read memory from its address on, and do not look at strides.
    """
    for name, own in like.items():
        grad = grads[name]
        if grad.numel() != own.numel() or grad.device != own.device:
            raise RuntimeError(
                f"the gradient of {name} has {grad.numel()} elements on {grad.device}, but its "
                f"parameter had {own.numel()} on {own.device} when the optimizer was made. Make "
                "the DistributedOptimizer after the model has its final shapes and is on its device"
            )
        if not grad.is_contiguous():
            raise RuntimeError(f"the gradient of {name} is not contiguous: give .contiguous()")


def have_finite_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether all gradients are finite, and small enough for a residue.

    It waits for a device once, not for every tensor. Parameters without a gradient are ignored.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [values_of(local_part(grad)) for grad in grads]
    for dtype in (torch.float32, torch.float64):
        own = [value for value in values if value.numel() and wide_dtype(value) == dtype]
        # No element is larger than the norm, and few kernels compute the norm of many tensors. Its
        # squares overflow far below the limit. If they do, the largest elements decide.
        if (
            own
            and not _are_within(limit_of(dtype), torch._foreach_norm(own, 2, dtype=dtype))
            and not _are_within(limit_of(dtype), [e for v in own for e in torch.aminmax(v)])
        ):
            return False
    return True


def _are_within(limit: float, numbers: Sequence[torch.Tensor]) -> bool:
    first = numbers[0].device
    wide = [number.to(first, torch.float64) for number in numbers]
    return bool((torch.stack(wide).abs() <= limit).all())


def empty_sparse_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient without rows, for a rank on which a sparse embedding was not used."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's numbers as bytes, for comparing bits: NaN then equals NaN."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    # With zero or one element any stride counts as contiguous, but `view` needs a stride of 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def four_elements(tensor: torch.Tensor) -> bytes:
    """Four elements of a dense tensor, which show most changes, if the host has their memory."""
    numel = tensor.numel()
    is_ours = tensor.is_cpu and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not (numel and is_ours):
        return b""
    b, c, d = numel // 4, numel // 2, numel * 3 // 4
    if not tensor.is_contiguous():
        found = torch.take(tensor.detach(), torch.tensor([0, b, c, d], dtype=torch.int64))
        return as_bytes(found).numpy().tobytes()
    # Read from memory, because this runs twice per parameter and step, and tensors take longer.
    begin, width, read = tensor.data_ptr(), tensor.element_size(), ctypes.string_at
    rest = read(begin + width * c, width) + read(begin + width * d, width)
    return read(begin, width) + read(begin + width * b, width) + rest


def values_of(grad: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, which may be sparse."""
    return grad._values() if grad.is_sparse else grad


def any_of(grad: torch.Tensor) -> bool:
    """Whether some element is not zero. Waits for the gradient's device."""
    return bool(values_of(grad).any())


class Gradient(NamedTuple):
    """A gradient that was reported. Zeros of an untrained parameter let its residue wait."""

    flat: torch.Tensor | None  # (N,); None: this rank has none, or it travels in another way
    trained: bool  # whether its parameter is trained


_NONE = Gradient(None, True)


class Reported(dict[str, Gradient]):
    """{name: gradient}, in the order in which they were reported, and what all are `like`."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._like = like

    def flats(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """{name: (N,)}, with zeros for what did not arrive on this rank."""
        flats = {}
        for name in names:
            flat, like = self.get(name, _NONE).flat, self._like[name]
            flats[name] = like.detach().new_zeros(like.numel()) if flat is None else flat
        return flats

    def idle(self, flats: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of untrained tensors. If a script gave one a gradient, the gradient counts."""
        return [n for n, flat in flats.items() if not (self.get(n, _NONE).trained or any_of(flat))]

    def used(self, flats: Mapping[str, torch.Tensor], zeros_count: bool) -> torch.Tensor:
        """(number of tensors,): which this rank has; zeros only if they `count`. No host waits."""
        if not zeros_count:
            return torch.stack([flat.any() for flat in flats.values()])
        has = [self.get(name, _NONE).flat is not None for name in flats]
        return uploaded(np.array(has), next(iter(flats.values())).device)


class LossScale:
    """What a script gave as `loss_scale=`.

    Args:
        given: a torch.amp.GradScaler, a function that returns the current scale, or None.

    Raises:
        TypeError: it is something else.
    """

    def __init__(self, given: object) -> None:
        if given is not None and not callable(getattr(given, "get_scale", given)):
            raise TypeError(
                "loss_scale must be a GradScaler or a callable that gives the current scale, not "
                f"{given!r}"
            )
        self._given: Any = given

    def read(self) -> float | torch.Tensor:
        """The current scale: a number, or a tensor that may be on a device."""
        if self._given is None:
            return 1.0
        # A GradScaler's own tensor, because get_scale() would wait for it. None: there is none yet.
        is_scaler = isinstance(self._given, torch.amp.GradScaler)
        scale = getattr(self._given, "_scale", None) if is_scaler else None
        return getattr(self._given, "get_scale", self._given)() if scale is None else scale

    def inverse(self) -> Wait[float]:
        """1 / loss scale, once the host has it. It brings gradients into the residues' units.

        Raises:
            ValueError: the scale is not a finite number above 0. If the host does not have it yet,
                the Wait raises this.
        """
        scale = self.read()
        if not isinstance(scale, torch.Tensor):
            scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
        copy = HostCopy(scale)
        comes: Wait[float] = Wait("loss scale", copy, round=0, then=_inverse)
        if copy.done():  # so that a wrong scale is refused at once
            comes.now()
        return comes


def _inverse(scale: torch.Tensor) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(
            "loss_scale= must give a finite number above 0, such as a GradScaler's scale, not "
            f"{float(scale):g}"
        )
    return 1 / float(scale)
