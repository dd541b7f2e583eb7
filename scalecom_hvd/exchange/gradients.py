"""p.grad as an exchange takes and gives it: flat and contiguous, whatever the script put there.

Imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient as a contiguous (N,) tensor: p.grad itself where its layout allows."""
    grad = parameter.grad.detach()
    return (grad.to_dense() if grad.is_sparse else grad).contiguous().view(-1)


def unflat_gradient(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """What p.grad must become when `flat` holds the average: p.grad itself, where that can be."""
    grad = parameter.grad.detach()
    expanded = not grad.is_sparse and any(
        stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)
    )
    if grad.is_sparse or expanded:
        return flat.view(parameter.shape)
    if flat.data_ptr() != grad.data_ptr() or not grad.is_contiguous():
        grad.copy_(flat.view(grad.shape))
    return grad


def check_gradients(grads: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless gradients have the sizes and devices that they had at the start.

    Kernels follow addresses, over memory, not over strides.
    """
    for name, own in like.items():
        grad = grads[name]
        if grad.numel() != own.numel() or grad.device != own.device:
            raise RuntimeError(
                f"the gradient of {name} has {grad.numel()} elements on {grad.device}, and its "
                f"parameter had {own.numel()} on {own.device} when the optimizer was made: make "
                "the DistributedOptimizer when the model has its final shapes and is on its device"
            )
        assert grad.is_contiguous(), "gradients must be flat and contiguous here"


def empty_sparse_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of no rows, for a rank on which a sparse embedding was not used."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's numbers as bytes, to be compared to the bit: NaN equals NaN."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    # None or one element count as contiguous with any stride, and another dtype wants 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def any_of(grad: torch.Tensor) -> bool:
    """Whether some element is not zero."""
    return bool((grad._values() if grad.is_sparse else grad).any())
