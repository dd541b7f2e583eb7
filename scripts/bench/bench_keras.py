"""Step times of Keras training on the ranks of this machine, dense and with ScaleCom.

Horovod's dense all-reduce and ScaleCom are compared in one run. Every method trains a model of its
own. The methods take turns, some steps each, round by round, so that a noisy machine hurts all
alike. The ratio to dense is taken within each round, and its median over rounds counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

METHODS = {
    "no communication": None,
    "dense": {},
    "ScaleCom cyclic": {"leader": "cyclic"},
    "ScaleCom staggered": {"leader": "staggered"},
    "the same, plain operations": {"leader": "staggered"},
}
SETTLING_STEPS = 5


def main() -> int:
    args = argument_parser().parse_args()
    if not args.as_rank:
        program = [__file__, "--as-rank", *sys.argv[1:]]
        return subprocess.call(
            launch.command(args.launcher, args.ranks, program), env=launch.environment()
        )
    measure(args)
    return 0


def measure(args: argparse.Namespace) -> None:
    """What every rank does; rank 0 prints the table."""
    import scalecom_hvd.tensorflow.keras as hvd

    hvd.init()
    for case, make in CASES.items():
        steps = {}
        for method, settings in METHODS.items():
            steps[method] = training_step(make, settings)
            # read when the first step is traced
            os.environ["SCALECOM_KERNEL"] = "tensorflow" if "plain" in method else ""
            run(steps[method], SETTLING_STEPS)
        rounds = [
            {method: run(step, args.steps) for method, step in steps.items()}
            for _ in range(args.rounds)
        ]
        if hvd.rank() == 0:
            print(
                f"\n{case}, {hvd.size()} ranks: medians of {args.rounds} rounds of {args.steps} "
                f"steps\n{'':28s}ms/step  of dense"
            )
            for method in METHODS:
                ratio = statistics.median(r[method] / r["dense"] for r in rounds)
                print(
                    f"{method:28s}{1e3 * statistics.median(r[method] for r in rounds):7.1f}  "
                    f"{ratio:8.2f}",
                    flush=True,
                )


def run(step: Callable[[], object], count: int) -> float:
    """Seconds per step."""
    begun = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begun) / count


def training_step(make: Callable[[], tuple], settings: dict | None) -> Callable[[], object]:
    """One step of training a case's model with a method, as a traced function."""
    import tensorflow as tf

    import scalecom_hvd.tensorflow.keras as hvd

    tf.keras.utils.set_random_seed(1)
    model, inputs, labels = make()
    optimizer = tf.keras.optimizers.SGD(1e-4)
    if settings is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer, compression=hvd.ScaleCom(**settings) if settings else hvd.Compression.none
        )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        optimizer.minimize(loss, model.trainable_variables, tape)
        return loss

    return step


def convolutions() -> tuple:
    """A small image task: 8 x 8 pixels, 32 images per rank, about 220 000 parameters."""
    import tensorflow as tf

    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((8, 8, 1))])
    for width, stride in ((32, 1), (64, 1), (64, 2), (128, 1), (64, 2)):
        model.add(layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10))
    return model, tf.random.normal((32, 8, 8, 1)), tf.random.uniform((32,), 0, 10, tf.int32)


def matrices() -> tuple:
    """Four layers of 2500 x 2500, 25 million parameters, 32 rows per rank.

    This makes 100 MB of gradients for little arithmetic.
    """
    import tensorflow as tf

    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((2500,)),
            *(layers.Dense(2500, activation="relu") for _ in range(4)),
            layers.Dense(10),
        ]
    )
    return model, tf.random.normal((32, 2500)), tf.random.uniform((32,), 0, 10, tf.int32)


CASES = {"convolutions": convolutions, "matrices": matrices}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, launchers = parser.add_argument, ("mpirun", "horovodrun --gloo")
    add("--ranks", type=int, default=2, help="default: %(default)s")
    add("--launcher", choices=launchers, default=launchers[0], help="default: %(default)s")
    add("--rounds", type=int, default=9, help="default: %(default)s")
    add("--steps", type=int, default=10, help="of a method in a round; default: %(default)s")
    add("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
