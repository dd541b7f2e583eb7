"""Which kernel serves which tensors. Imports triton only if tensors may need it."""

from __future__ import annotations

import functools
import logging
import os

import torch

from scalecom_hvd import native
from scalecom_hvd.exchange.kernels.base import Kernel, dtype_name
from scalecom_hvd.exchange.kernels.native_kernel import NativeKernel
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel
from scalecom_hvd.lanes import Lanes

log = logging.getLogger("scalecom_hvd")


def kernel_for(
    device: torch.device, grad_dtype: torch.dtype, residue_dtype: torch.dtype, geometry: Lanes
) -> type[Kernel]:
    """The fastest kernel for such tensors. Only plain torch can choose other than by lanes.

    SCALECOM_KERNEL asks for one of them, and it is an error if that cannot be used.
    """
    asked = _asked()
    same_width = (residue_dtype == torch.float64) == (grad_dtype == torch.float64)
    known = same_width and dtype_name(grad_dtype) in native.DTYPES and type(geometry) is Lanes
    if asked == "torch" or not known:
        return TorchKernel
    if asked == "triton" or (device.type == "cuda" and not asked):
        return _triton_kernel(device.type, required=bool(asked))
    if device.type != "cpu":
        return TorchKernel
    if native.library() is not None:
        return NativeKernel
    if asked == "native":
        raise RuntimeError(
            "SCALECOM_KERNEL=native, but the native kernel was not built. " + native.how_to_have()
        )
    return TorchKernel


def packs_in_c(device: torch.device) -> bool:
    """Whether C packs integers into words there, and unpacks them. If not, plain torch does."""
    return device.type == "cpu" and _asked() != "torch" and native.library() is not None


def _asked() -> str:
    asked = os.environ.get("SCALECOM_KERNEL", "")
    if asked not in ("", "native", "triton", "torch"):
        raise ValueError(f"SCALECOM_KERNEL must be 'native', 'triton' or 'torch', not {asked!r}")
    return asked


def _triton_kernel(device_type: str, required: bool) -> type[Kernel]:
    why_not = _why_not_triton(device_type)
    if why_not is None:
        from scalecom_hvd.exchange.kernels.triton_kernel import TritonKernel

        return TritonKernel
    if required:
        raise RuntimeError(
            f"SCALECOM_KERNEL=triton, but the Triton kernel does not work here: {why_not}"
        )
    _warn(
        f"the Triton kernel is not used: {why_not}. The plain-torch kernel is used instead, and is "
        "several times slower"
    )
    return TorchKernel


@functools.cache
def _why_not_triton(device_type: str) -> str | None:
    """Why the Triton kernel cannot serve tensors of such devices; None if it can."""
    try:
        from scalecom_hvd.exchange.kernels import triton_kernel
    except ImportError as error:
        return (
            f"triton cannot be imported ({error}): install the version that torch requires (pip "
            "show torch)"
        )
    return triton_kernel.why_not(device_type)


@functools.cache
def _warn(text: str) -> None:
    log.warning(text)
