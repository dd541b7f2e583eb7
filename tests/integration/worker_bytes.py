"""Run on every rank by test_bytes.py: trains for some steps and prints what stats() says was sent.

Arguments: "torch" or "tensorflow", ScaleCom's settings as JSON, and the number of steps.
"""

import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

WIDTHS = [1000, 2000, 500, 10]


def in_torch(settings: dict[str, Any]) -> tuple[Callable, Callable, ModuleType]:
    """Return step(), report() and Horovod's module for a training in PyTorch."""
    import torch

    import scalecom_hvd.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*pair) for pair in zip(WIDTHS, WIDTHS[1:], strict=False)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), *layers[1:])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        compression=hvd.ScaleCom(**settings),
    )
    torch.manual_seed(hvd.rank())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, WIDTHS[0])).square().mean().backward()
        optimizer.step()

    def report() -> dict[str, Any]:
        tensors = optimizer.compression.residues.tensors
        return optimizer.compression.stats() | {
            "k": {name: [t.geometry.k, t.residue.numel()] for name, t in tensors.items()}
        }

    return step, report, hvd


def in_tensorflow(settings: dict[str, Any]) -> tuple[Callable, Callable, ModuleType]:
    """Return the same for a training in Keras."""
    import tensorflow as tf

    import scalecom_hvd.tensorflow.keras as hvd

    hvd.init()
    tf.keras.utils.set_random_seed(hvd.rank())
    hidden = [tf.keras.layers.Dense(width, activation="relu") for width in WIDTHS[1:-1]]
    model = tf.keras.Sequential(
        [tf.keras.Input([WIDTHS[0]]), *hidden, tf.keras.layers.Dense(WIDTHS[-1])]
    )
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.01),
        compression=hvd.ScaleCom(**settings),
    )
    model.compile(optimizer, "mse")

    def step() -> None:
        model.train_on_batch(tf.random.normal([4, WIDTHS[0]]), tf.zeros([4, WIDTHS[-1]]))

    def report() -> dict[str, Any]:
        (exchange,) = optimizer.compression.exchanges()
        k = {name: [t.lanes.k, t.lanes.numel] for name, t in exchange.tensors.items()}
        return optimizer.compression.stats() | {"k": k}

    return step, report, hvd


def main() -> None:
    framework, settings, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    step, report, hvd = (in_torch if framework == "torch" else in_tensorflow)(settings)
    for _ in range(steps):
        step()
    if hvd.rank() == 0:
        print("STATS " + json.dumps(report()), flush=True)
    if os.environ.get("HOROVOD_TIMELINE"):
        # When the process ends, Horovod 0.28.1 drops the events that it has not written yet. This
        # call waits for them.
        hvd.stop_timeline()


if __name__ == "__main__":
    main()
