"""What a framework says about itself: `python -m scalecom_hvd.doctor.probe torch`.

It runs in a process of its own, which facts.py starts. For each part it writes one line: MARK, and
{part: what it says} in JSON, {"error": why} if the part cannot be imported. It writes the line at
once, because the next part may end or hang the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import sys
from typing import Any

from scalecom_hvd import native

MARK = "scalecom_hvd.doctor.probe: "


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    # A build without CUDA is asked, too: it says 0.
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gloo = dist.is_available() and dist.is_gloo_available()
    cuda = torch.version.cuda or ""
    return {"version": torch.__version__, "cuda": cuda, "gpus": gpus, "gloo": gloo}


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    # Keras 2 inside of TensorFlow has no __version__.
    return {"version": tf.__version__, "keras": importlib.metadata.version("keras"), "gpus": gpus}


def _horovod(name: str) -> dict[str, Any]:
    hvd = importlib.import_module(name)
    parts = ("mpi", "gloo", "nccl", "cuda", "rocm", "ccl", "ddl")
    return {part: bool(getattr(hvd, f"{part}_built")()) for part in parts}


def _operations() -> dict[str, Any]:
    from scalecom_hvd.tensorflow import kernels

    return {"there": native.OPERATIONS.exists(), "loaded": kernels.operations() is not None}


PARTS = {
    "torch": _torch,
    "horovod.torch": lambda: _horovod("horovod.torch"),
    "tensorflow": _tensorflow,
    "horovod.tensorflow": lambda: _horovod("horovod.tensorflow"),
    "horovod.tensorflow.operations": _operations,
    "native": lambda: {
        "there": native.LIBRARY.exists(),
        "loaded": native.library() is not None,
    },
    "triton": lambda: {"version": importlib.import_module("triton").__version__},
}


def main(parts: list[str]) -> None:
    """Write what each part says, with the first warning that this package logged."""
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
