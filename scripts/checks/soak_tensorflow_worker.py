"""Trains elastically with TensorFlow under faults. soak.py runs this on every rank.

After every step it checks that nothing was lost. It has its own loop, with a tape in a traced step.
soak_faults.py says what the worker is told, what goes wrong, and what is checked.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import soak_faults
import tensorflow as tf
from soak_faults import BATCH, FEATURES, HIDDEN, OUTPUTS, Arrays, Point

import scalecom_hvd.tensorflow as hvd
from scalecom_hvd.tensorflow.transport import Transport


class Net(tf.keras.Model):
    """A model that hides no error.

    It has two layers, a third that only some batches use, and no normalisation.

    watch: what gradients pass through on their way to the first layer.
    """

    def __init__(self, watch: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self.hidden = tf.keras.layers.Dense(HIDDEN, activation="tanh", name="hidden")
        self.sometimes = tf.keras.layers.Dense(HIDDEN, activation="tanh", name="sometimes")
        self.last = tf.keras.layers.Dense(OUTPUTS, name="last")
        self.watch = watch

    def call(self, inputs: tf.Tensor, detour: tf.Tensor) -> tf.Tensor:
        hidden = self.watch(self.hidden(inputs))
        # Without the detour that layer's gradients are zeros.
        hidden += tf.cond(detour, lambda: self.sometimes(hidden), lambda: tf.zeros_like(hidden))
        return self.last(hidden)


class Trainer(soak_faults.Worker):
    """One worker's model, optimizer and checks."""

    checkpoint = ".pickle"

    def make(self) -> hvd.ScaleCom:
        # every worker begins with other weights: only Horovod's states make them equal
        tf.keras.utils.set_random_seed(os.getpid())
        self.model, self.optimizer = Net(self._watched), tf.keras.optimizers.SGD(0.05, momentum=0.9)
        self.model(tf.zeros([1, FEATURES]), tf.constant(True))
        self.optimizer.build(self.model.trainable_variables)
        self.loss_scale = tf.Variable(1.0, trainable=False)
        self._die_between()
        self._averaged = tf.function(lambda values: averaged(values, "soak.sent"), autograph=False)
        # If the last layer is frozen, it is another exchange.
        everything = self.model.trainable_variables
        self._trained = {False: everything, True: [v for v in everything if "last" not in v.name]}
        self._steps = {
            frozen: self._traced(variables) for frozen, variables in self._trained.items()
        }
        return hvd.ScaleCom(loss_scale=lambda: self.loss_scale, **self.plan.settings)

    def _traced(self, variables: list[tf.Variable]) -> Callable:
        """A training step of these variables.

        It returns the loss, this rank's gradients, their averages, and whether they are finite.
        """

        @tf.function
        def step(inputs: tf.Tensor, labels: tf.Tensor, detour: tf.Tensor, factor: tf.Tensor) -> Any:
            with tf.GradientTape() as plain, tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(inputs, detour) - labels))
                scaled = loss * self.loss_scale * factor
            own = plain.gradient(scaled, variables)
            averages = hvd.DistributedGradientTape(tape, compression=self.compression).gradient(
                scaled, variables
            )
            averages = [average / self.loss_scale for average in averages]
            finite = tf.reduce_all(
                [tf.reduce_all(tf.math.is_finite(average)) for average in averages]
            )
            if finite:
                self.optimizer.apply_gradients(zip(averages, variables, strict=True))
            return averaged(loss, "soak.loss"), own, averages, finite

        return step

    def _watched(self, hidden: tf.Tensor) -> tf.Tensor:
        """The same values, but a worker may die while their gradient is on its way back."""

        def back(grad: np.ndarray) -> np.ndarray:
            self.comes_by(Point.BACKWARD)
            return grad

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> Any:
            return tf.identity(tensor), lambda grad: tf.ensure_shape(
                tf.numpy_function(back, [grad], grad.dtype), grad.shape
            )

        return identity(hidden)

    def _die_between(self) -> None:
        """Let the leader die between its offsets and the averages."""
        from_leader = Transport.from_leader

        def here(sent: np.ndarray, mine: np.ndarray) -> np.ndarray:
            if mine.size:
                self.comes_by(Point.EXCHANGE)
            return sent

        def watched(transport: Transport, offsets: tf.Tensor, name: str) -> tf.Tensor:
            sent = from_leader(transport, offsets, name)
            return tf.ensure_shape(tf.numpy_function(here, [sent, offsets], sent.dtype), sent.shape)

        Transport.from_leader = watched

    def residues(self) -> Arrays:
        return self.compression.state_dict()["residues"]

    def common(self) -> Arrays:
        return {name_of(variable): variable.numpy() for variable in self.model.variables}

    def average(self, values: np.ndarray) -> np.ndarray:
        return self._averaged(tf.constant(values)).numpy()

    def write(self, file: Any) -> None:
        pickle.dump({"model": self.common(), "scalecom": self.compression.state_dict()}, file)

    def step(self, batch: int) -> float:
        truth = np.random.default_rng(0).standard_normal([FEATURES, OUTPUTS]) / FEATURES**0.5
        inputs = np.random.default_rng([hvd.rank(), batch]).standard_normal([BATCH, FEATURES])
        self.scale = self.faults.loss_scale(batch)
        self.loss_scale.assign(self.scale)
        overflow, frozen = self.overflow(batch), self.faults.frozen(batch)
        self.order = self.faults.order(batch)
        before = self.residues()
        self.be_late(batch)
        loss, own, averages, finite = self._steps[frozen](
            tf.constant(inputs, tf.float32),
            tf.constant(inputs @ truth, tf.float32),
            tf.constant(self.faults.detour(batch)),
            tf.constant(overflow[1] if overflow else 1.0),
        )
        names = [name_of(variable) for variable in self._trained[frozen]]
        self.came = {name: grad.numpy() for name, grad in zip(names, own, strict=True)}
        arrived = {name: average.numpy() for name, average in zip(names, averages, strict=True)}
        self.check_step(batch, before, arrived, bool(finite), overflow, names)
        return float(loss)


def averaged(values: tf.Tensor, name: str) -> tf.Tensor:
    # By this word hvd.elastic.run knows that an error is Horovod's. Without the word, it takes
    # training for finished.
    with tf.name_scope("HorovodAllreduce"):
        return hvd.allreduce(values, name=name)


def name_of(variable: tf.Variable) -> str:
    return variable.name.partition(":")[0]


def main() -> None:
    plan, folder = soak_faults.begin()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    trainer = Trainer(plan, folder, hvd)
    hvd.elastic.run(trainer.train)(
        hvd.elastic.TensorFlowKerasState(trainer.model, trainer.optimizer, batch=0)
    )
    trainer.diary.note("end", skipped=trainer.compression.stats()["skipped_steps"])


if __name__ == "__main__":
    main()
