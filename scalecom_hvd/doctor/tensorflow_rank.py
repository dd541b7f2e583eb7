"""One rank of the self-test in TensorFlow, on Horovod: eager, with a tape.

`python -m scalecom_hvd.doctor.tensorflow_rank`, started by self_test.py under a launcher.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import scalecom_hvd.tensorflow as hvd
from scalecom_hvd.doctor import rank_check
from scalecom_hvd.doctor.rank_check import Arrays
from scalecom_hvd.tensorflow.kernels import kernel_for

SHAPES = {"first": (30, 40), "second": (40, 20)}


def gradients(variables: list[tf.Variable], step: int, rank: int, **tape_of: Any) -> Arrays:
    """The gradients of a rank's tape in a step. tape_of: arguments of a distributed tape."""
    first, second = variables
    with tf.GradientTape() as tape:
        hidden = tf.tanh(tf.constant(rank_check.inputs(step, rank, 8, 30)) @ first)
        loss = tf.reduce_mean(tf.square(hidden @ second))
    tape = hvd.DistributedGradientTape(tape, **tape_of) if tape_of else tape
    found = tape.gradient(loss, variables)
    return {name: grad.numpy() for name, grad in zip(SHAPES, found, strict=True)}


def main() -> None:
    """Run the rank."""
    hvd.init()
    rank_check.check_size(hvd.size())
    tf.random.set_seed(0)
    variables = [
        tf.Variable(0.1 * tf.random.normal(shape), name=name) for name, shape in SHAPES.items()
    ]
    hvd.broadcast_variables(variables, root_rank=0)
    compression = hvd.ScaleCom(config=rank_check.CONFIG)

    def take_step(step: int) -> Arrays:
        averages = gradients(variables, step, hvd.rank(), compression=compression)
        for variable, average in zip(variables, averages.values(), strict=True):
            variable.assign_sub(rank_check.LEARNING_RATE * average)
        return averages

    rank_check.check(SHAPES, lambda step, rank: gradients(variables, step, rank), take_step)
    rank_check.passed(kernel_for("CPU", rank_check.CONFIG.selection, same_width=True))
    hvd.shutdown()


if __name__ == "__main__":
    main()
