"""PyTorch's Triton kernel for test_kernels.py.

It is compiled if there is a GPU, and runs in Triton's interpreter on the CPU otherwise.
"""

import kernels_torch
import torch

from scalecom_hvd.exchange.kernels.triton_kernel import TritonKernel


class Tiles(kernels_torch.Adapter):
    """The Triton kernel."""

    kernel = TritonKernel
    device = "cuda" if torch.cuda.is_available() else "cpu"
