"""What a framework says about itself: `python -m scalecom_hvd.doctor.probe torch`.

It runs in a process of its own, which facts.py starts. For each part it writes one line: MARK, and
{part: what it says} in JSON. It writes the line at once, so that a crash in the next part does not
lose it. For a part that cannot be imported it says {"error": why}.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from scalecom_hvd.doctor.children import MARK


def torch() -> dict[str, Any]:
    """PyTorch's version, GPUs and transports."""
    import torch
    import torch.distributed as dist

    # A build without CUDA is asked, too: it says 0.
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "gpus": gpus,
        "gloo": dist.is_available() and dist.is_gloo_available(),
    }


def horovod_torch() -> dict[str, Any]:
    """What Horovod was built with, according to its part for PyTorch."""
    return _horovod("horovod.torch")


def horovod_tensorflow() -> dict[str, Any]:
    """What Horovod was built with, according to its part for TensorFlow."""
    return _horovod("horovod.tensorflow")


def _horovod(name: str) -> dict[str, Any]:
    hvd = importlib.import_module(name)
    parts = ("mpi", "gloo", "nccl", "cuda", "rocm", "ccl", "ddl")
    return {part: bool(getattr(hvd, f"{part}_built")()) for part in parts}


def tensorflow() -> dict[str, Any]:
    """TensorFlow's and Keras' versions, and GPUs."""
    import tensorflow as tf

    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    # Keras 2 inside of TensorFlow has no __version__.
    return {"version": tf.__version__, "keras": importlib.metadata.version("keras"), "gpus": gpus}


def operations() -> dict[str, Any]:
    """Whether TensorFlow can load the kernel's operations."""
    from scalecom_hvd.tensorflow import kernels

    return {"loaded": kernels.operations() is not None}


def native() -> dict[str, Any]:
    """Whether the kernel in C can be loaded."""
    from scalecom_hvd import native

    return {"loaded": native.library() is not None}


def triton() -> dict[str, Any]:
    """Triton's version."""
    import triton

    return {"version": triton.__version__}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch,
    "horovod.torch": horovod_torch,
    "tensorflow": tensorflow,
    "tensorflow operations": operations,
    "horovod.tensorflow": horovod_tensorflow,
    "native": native,
    "triton": triton,
}


def main(parts: list[str]) -> None:
    """Write what each part says."""
    # A part may kill the process, and what was said before it must not be lost. Warnings are kept.
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scalecom_hvd").addHandler(handler)
    for part in parts:
        warnings.clear()
        try:
            said = PARTS[part]()
        except Exception as error:  # whatever a broken installation raises
            said = {"error": f"{type(error).__name__}: {error}".strip()}
        if warnings:
            said["warning"] = warnings[0]
        sys.stdout.write(f"\n{MARK}{json.dumps({part: said})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
