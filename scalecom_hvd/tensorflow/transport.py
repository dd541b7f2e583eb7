"""The calls to Horovod during training: the collectives of one exchange.

Horovod matches tensors by name, so all ranks must use the same names. Imports agreement only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

from scalecom_hvd.agreement import Names, is_elastic

TENSORFLOW_1 = (
    "ScaleCom does not work with TensorFlow 1's graphs, sessions and optimizers (tf.compat.v1). "
    "Train eagerly or in a tf.function, without tf.Graph and tf.compat.v1.disable_v2_behavior(), "
    "and with an optimizer of tf.keras.optimizers or hvd.DistributedGradientTape"
)


def refuse_graphs_of_tensorflow_1() -> None:
    """Raise RuntimeError in a graph of TensorFlow 1, where variables are not eager."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise RuntimeError(TENSORFLOW_1)


def _named_in_errors(operation: str) -> AbstractContextManager[str]:
    """A name scope that error messages contain and collectives' names ignore.

    By this word hvd.elastic.run knows that an error is Horovod's and a worker is lost. Without the
    word, it takes training for done.
    """
    return tf.name_scope(operation)


class Transport:
    """Horovod's collectives on a process set.

    Args:
        process_set: the ranks that take part.
        op, predivide, device: Horovod's op, gradient_predivide_factor and device_dense.
        names: makes the collectives' names.
    """

    def __init__(
        self, process_set: horovod.ProcessSet, op: int, predivide: float, device: str, names: Names
    ) -> None:
        self._process_set = process_set
        self._device = device
        self._names = names
        self._averages = op == horovod.Average
        self._summation = {
            "op": horovod.Sum,
            "process_set": process_set,
            "device_dense": device,
            "ignore_name_scope": True,
        }
        scaling = (
            {"prescale_factor": 1 / predivide, "postscale_factor": predivide}
            if self._averages
            else {}
        )
        self._reduction = self._summation | {"op": op} | scaling

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return self._process_set.size()

    @property
    def position(self) -> int:
        """This rank's position in the process set, 0 .. size-1."""
        return self._process_set.rank()

    def size_and_position(self) -> tuple[int | tf.Tensor, int | tf.Tensor]:
        """Both as they are when the graph runs; plain numbers if they cannot change."""
        if is_elastic() and self._process_set.process_set_id == 0:
            return horovod.size_op(), horovod.rank_op()
        return self.size, self.position

    def from_leader(self, offsets: tf.Tensor, name: str) -> tf.Tensor:
        """The leader's bytes. Every other rank passes an empty tensor.

        This is a gather and not a broadcast, because a broadcast's root is fixed when the graph is
        made (mpi_ops.cc:988), and the leader changes every step.
        """
        with tf.device(self._device), _named_in_errors("HorovodAllgather"):
            return self._gather(offsets, name)

    def sum(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The sum over ranks, in the buffer's dtype."""
        with _named_in_errors("HorovodAllreduce"):
            return horovod.allreduce(buffer, name=self._names(name), **self._summation)

    def average(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The average over ranks, or with op=Sum the sum."""
        with _named_in_errors("HorovodAllreduce"):
            return horovod.allreduce(buffer, name=self._names(name), **self._reduction)

    def share_of(self, total: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
        """The average that a sum over ranks stands for, or with op=Sum the sum itself."""
        return total / tf.cast(size, total.dtype) if self._averages else total

    def average_each(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Every tensor's average over ranks, or with op=Sum its sum, as one group."""
        with _named_in_errors("HorovodAllreduce"):
            return horovod.grouped_allreduce(
                list(tensors), name=self._names(name), **self._reduction
            )

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Every rank's JSON value, in order of position. Blocks until all ranks have called it.

        They are gathered at once, even while a function is traced.
        """
        payload = np.frombuffer(json.dumps(value).encode(), np.uint8)

        def gathered() -> list[tf.Tensor]:
            with _named_in_errors("HorovodAllgather"):
                return [
                    self._gather(tf.constant(np.array([payload.size])), f"{name}.sizes"),
                    self._gather(tf.constant(payload), name),
                ]

        with tf.init_scope():
            # Make a function, because operations that run one by one have no names. Make it
            # concrete, because TensorFlow warns if there are many functions.
            function = tf.function(gathered, autograph=False).get_concrete_function()
            sizes, joined = (tensor.numpy() for tensor in function())
        return [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(sizes)[:-1])]

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return horovod.allgather(
            tensor, name=self._names(name), ignore_name_scope=True, process_set=self._process_set
        )
