"""The calls to Horovod during training: the collectives of one exchange.

Horovod matches tensors by name, so all ranks must use the same names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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


# Name scopes that error messages contain and collectives' names ignore. By these words
# hvd.elastic.run knows that an error is Horovod's and a worker is lost. Without them, it takes
# training for done.
_GATHER, _REDUCE = "HorovodAllgather", "HorovodAllreduce"


@dataclass(frozen=True)
class Arguments:
    """The arguments of Horovod's optimizers and tapes that concern the reduction.

    Names, meanings and defaults are Horovod's. `groups` has references to variables, so that equal
    arguments mean the same.
    """

    op: int = horovod.Average
    gradient_predivide_factor: float = 1.0
    groups: int | tuple[tuple[Any, ...], ...] | None = None
    sparse_as_dense: bool = False
    process_set: horovod.ProcessSet = horovod.global_process_set
    device_dense: str = ""
    device_sparse: str = ""


class Transport:
    """Horovod's collectives on the arguments' process set. names: makes the collectives' names."""

    def __init__(self, arguments: Arguments, names: Names) -> None:
        self._process_set, self._device = arguments.process_set, arguments.device_dense
        self._names = names
        self._averages = arguments.op == horovod.Average
        where = {"process_set": self._process_set, "device_dense": self._device}
        self._summation = where | {"op": horovod.Sum, "ignore_name_scope": True}
        self._reduction = self._summation | {"op": arguments.op}
        if self._averages:
            factor = arguments.gradient_predivide_factor
            self._reduction |= {"prescale_factor": 1 / factor, "postscale_factor": factor}

    def size_and_position(self) -> tuple[int | tf.Tensor, int | tf.Tensor]:
        """Of the process set, when the graph runs; plain numbers if they cannot change."""
        if is_elastic() and self._process_set.process_set_id == 0:
            return horovod.size_op(), horovod.rank_op()
        return self._process_set.size(), self._process_set.rank()

    def from_leader(self, offsets: tf.Tensor, name: str) -> tf.Tensor:
        """The leader's bytes. Every other rank passes an empty tensor."""
        # A broadcast's root is fixed when the graph is made (mpi_ops.cc:988).
        with tf.device(self._device), tf.name_scope(_GATHER):
            return self._gather(offsets, name)

    def sum(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The sum over ranks, in the buffer's dtype."""
        with tf.name_scope(_REDUCE):
            return horovod.allreduce(buffer, name=self._names(name), **self._summation)

    def average(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The average over ranks, or with op=Sum the sum."""
        with tf.name_scope(_REDUCE):
            return horovod.allreduce(buffer, name=self._names(name), **self._reduction)

    def share_of(self, total: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
        """The average that a sum over ranks stands for, or with op=Sum the sum itself."""
        return total / tf.cast(size, total.dtype) if self._averages else total

    def average_each(self, tensors: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Every tensor's average over ranks, or with op=Sum its sum, as one group."""
        with tf.name_scope(_REDUCE):
            return horovod.grouped_allreduce(tensors, name=self._names(name), **self._reduction)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Every rank's JSON value, in order of position. Blocks until all ranks have called it.

        They are gathered at once, even while a function is traced.
        """
        payload = np.frombuffer(json.dumps(value).encode(), np.uint8)

        def gathered() -> list[tf.Tensor]:
            with tf.name_scope(_GATHER):
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
