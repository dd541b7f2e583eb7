"""One rank of the self-test in TensorFlow, on Horovod: eager, with a tape.

`python -m scalecom_hvd.doctor.tensorflow_rank`, started by self_test.py under a launcher. Imports
rank_check and tensorflow/.
"""

from __future__ import annotations

import tensorflow as tf

import scalecom_hvd.tensorflow as hvd
from scalecom_hvd.doctor.rank_check import (
    CONFIG,
    LEARNING_RATE,
    RANKS,
    STEPS,
    RankCheck,
    check_size,
    inputs,
)
from scalecom_hvd.reference import Array
from scalecom_hvd.tensorflow.kernels import kernel_for

KERNELS = {"NativeKernel": "kernel in C", "GraphKernel": "plain TensorFlow's kernel"}
SHAPES = {"first": (30, 40), "second": (40, 20)}


def loss_of(variables: list[tf.Variable], step: int, rank: int) -> tf.Tensor:
    """A rank's loss in a step."""
    first, second = variables
    hidden = tf.tanh(tf.constant(inputs(step, rank, 8, 30)) @ first)
    return tf.reduce_mean(tf.square(hidden @ second))


def gradients(variables: list[tf.Variable], step: int, rank: int) -> dict[str, Array]:
    """The gradients of a rank's tape in a step."""
    with tf.GradientTape() as tape:
        loss = loss_of(variables, step, rank)
    found = tape.gradient(loss, variables)
    return {name: grad.numpy() for name, grad in zip(SHAPES, found, strict=True)}


def main() -> None:
    """Run the rank."""
    hvd.init()
    check_size(hvd.size())
    tf.random.set_seed(0)
    variables = [
        tf.Variable(0.1 * tf.random.normal(shape), name=name) for name, shape in SHAPES.items()
    ]
    hvd.broadcast_variables(variables, root_rank=0)
    compression = hvd.ScaleCom(config=CONFIG)
    check = RankCheck(SHAPES)
    for step in range(STEPS):
        everyones = [gradients(variables, step, rank) for rank in range(RANKS)]
        with tf.GradientTape() as tape:
            loss = loss_of(variables, step, hvd.rank())
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        averages = tape.gradient(loss, variables)
        for variable, average in zip(variables, averages, strict=True):
            variable.assign_sub(LEARNING_RATE * average)
        received = {name: g.numpy() for name, g in zip(SHAPES, averages, strict=True)}
        check.step(everyones, received)
    waiting = compression.state_dict()["residues"]
    residues = {
        name: hvd.allreduce(tf.constant(waiting[name]), name=f"doctor.{name}").numpy()
        for name in SHAPES
    }
    flat = tf.concat([tf.reshape(variable, [-1]) for variable in variables], 0)
    parameters = hvd.allgather(flat[None], name="doctor.parameters").numpy()
    check.end(residues, list(parameters))
    kernel = kernel_for("CPU", CONFIG.selection, same_width=True).__name__
    check.passed(KERNELS.get(kernel, kernel))
    hvd.shutdown()


if __name__ == "__main__":
    main()
