"""TensorFlow's kernels, with the moves that test_kernels.py makes (kernels_torch.py says which)."""

import numpy as np
import tensorflow as tf
from kernel_cases import Taken

from scalecom_hvd.tensorflow.kernels import GraphKernel, NativeKernel


def there(array, dtype=None):
    return tf.constant(array.view(tf.bfloat16.as_numpy_dtype) if dtype == "bfloat16" else array)


def back(tensor):
    array = tensor.numpy()
    return array.view(np.uint16) if tensor.dtype == tf.bfloat16 else array


class Adapter:
    """A kernel with copies of a case's arrays. traced: whether the moves are made in graphs."""

    kernel: type
    has: frozenset
    refusal = tf.errors.InvalidArgumentError
    traced = False

    def __init__(self, case):
        self.case = case
        self.made = self.kernel(case.shapes, case.layout, case.levels, case.beta, case.extra)
        self.grads = [there(g, dtype) for g, dtype in zip(case.grads, case.dtypes, strict=True)]
        self.residues = [there(residue) for residue in case.residues]
        self.offsets = there(case.offsets)
        self.scale = None if case.scale == 1 else tf.constant(case.scale, tf.float64)

    def _make(self, move):
        made = tf.function(move, autograph=False) if self.traced else move
        return tf.nest.map_structure(back, made())

    def state(self):
        return [back(tensor) for tensor in (*self.grads, *self.residues)]

    def choose(self):
        inputs = self.grads, self.residues, self.scale
        nothing, chosen = self._make(
            lambda: [self.made.choose(*inputs, tf.constant(chooses)) for chooses in (False, True)]
        )
        assert not nothing.size
        return chosen

    def take_and_accumulate(self, chooses=False):
        assert not chooses
        inputs = self.grads, self.residues, self.scale

        def move():
            # TensorFlow optimizes most where a graph has everything: also the scales of integers.
            own = self.traced and self.case.levels
            offsets = self.made.choose(*inputs, tf.constant(True)) if own else self.offsets
            return self.made.take_and_accumulate(*inputs, offsets)

        residues, values, bad = self._make(move)
        return Taken(residues, values, np.zeros(0, np.uint8), int(bad))

    def scatter(self, values, in_place=False):
        values = there(values)
        return self._make(lambda: self.made.scatter(self.grads, self.scale, self.offsets, values))


class Native(Adapter):
    """The operations in C."""

    kernel = NativeKernel
    has = frozenset({"counted offsets", "checked offsets", "checked sizes", "large tensors"})


class Graph(Adapter):
    """Plain operations."""

    kernel = GraphKernel
    has = frozenset({"exact selection", "large tensors"})


class TracedNative(Native):
    """The operations in C, in a graph that TensorFlow optimizes."""

    traced = True


class TracedGraph(Graph):
    """Plain operations, in a graph that TensorFlow optimizes."""

    traced = True
