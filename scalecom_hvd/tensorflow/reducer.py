"""The exchange of one set of variables' gradients, as a part of the graph that computes them.

Horovod's optimizers and tapes reduce through one attribute, `_allreduce_grads(grads, variables, use_generic_names)`; `reduction` makes
what stands there instead. One step, per bucket:

    cyclic      all gradients are here -> filter, in which the leader chooses -> offsets -> gather -> all-reduce -> scatter
    look-ahead  all gradients are here -> gather at the offsets that came during the last step, filter, in which the next leader chooses
                                          -> all-reduce -> scatter, and at the same time the next offsets
    finish      all buckets are here   -> if no rank's gradient was not finite, variables take the updated residues

TensorFlow runs these as soon as their inputs are there, so buckets overlap with backward and with each other. Nothing is assigned before
the whole step is known to count: a step that is void, or dies in the middle, has changed nothing.

Imports bucket and the rooms below.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from scalecom_hvd.agreement import Names, agree, check_operation, compare_ranks, describe, digest_of, warn_of_half_sums
from scalecom_hvd.bucket_layout import group_names, split, step_stats
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.schedule import leader
from scalecom_hvd.tensorflow.bucket import Bucket, Now
from scalecom_hvd.tensorflow.residues import CompressedTensor, Progress, dtype_of, read, runs_eagerly, set_value, shape_of, value_of
from scalecom_hvd.tensorflow.transport import Transport, is_elastic
from scalecom_hvd.training_warnings import GROWTH_WARNING, LOOK_EVERY, check_length, check_share_whole, growth_limit, keep_growing

log = logging.getLogger("scalecom_hvd")


@dataclass(frozen=True)
class Arguments:
    """What Horovod's DistributedOptimizer and DistributedGradientTape are told about the reduction, with their meanings and defaults."""

    op: Any = horovod.Average
    gradient_predivide_factor: float = 1.0
    groups: int | list[list[tf.Variable]] | None = None
    sparse_as_dense: bool = False
    process_set: Any = horovod.global_process_set
    device_dense: str = ""
    device_sparse: str = ""

    def check(self) -> None:
        """Raise ValueError for what ScaleCom cannot do."""
        check_operation(self.op, self.gradient_predivide_factor, horovod)
        if self.groups is not None and not (isinstance(self.groups, list) or self.groups > 0):
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def comparable(self) -> tuple:
        """Equal for arguments that mean the same."""
        groups = self.groups
        if isinstance(groups, list):
            groups = tuple(tuple(variable.ref() for variable in group) for group in groups)
        devices = self.device_dense, self.device_sparse
        return self.op, self.gradient_predivide_factor, groups, self.sparse_as_dense, self.process_set.process_set_id, devices


class Reducer:
    """The exchange of a fixed set of variables. All ranks' reducers make the same collectives by the same names.

    variables: {name: variable} of all whose gradients were asked for.  tensors: the compressed ones among them.
    members: names of those that have a gradient on some rank; only these take part, with zeros where there is none.
    """

    def __init__(
        self,
        variables: Mapping[str, tf.Variable],
        tensors: Mapping[str, CompressedTensor],
        rates: Mapping[str, float],
        progress: Progress,
        config: ScaleComConfig,
        arguments: Arguments,
    ) -> None:
        self.variables, self.tensors = dict(variables), dict(tensors)
        self.progress, self.config = progress, config
        self.members: set[str] = set()
        self.buckets: list[Bucket] = []
        self.function = tf.function(self.reduce, autograph=False)
        # A function, since operations that run one by one have no names.
        self._count_ranks = tf.function(lambda fact: self._transport.sum(fact, "more"), autograph=False)
        self._rates = rates
        self.arguments = arguments
        self._names = Names()
        self._transport = Transport(
            arguments.process_set, arguments.op, arguments.gradient_predivide_factor, arguments.device_dense, self._names
        )

    # The agreement, once: it blocks, so it happens only where every rank surely is, at the first call for these variables.

    def agree(self, present: Sequence[str], sparse: Sequence[str]) -> None:
        """Compare settings and tensors of all ranks, and settle on members, names and the step; raises RuntimeError on all alike."""
        mine = self._describe(sparse) | {
            "present": list(present),
            "name": self._names.claim(),
            "step": int(value_of(self.progress.step)) if runs_eagerly() else 0,
            "ahead": bool(value_of(self.progress.ahead)) if runs_eagerly() else False,
        }
        everyone = self._transport.exchange_objects(mine, "agreement")
        step = agree(everyone, tuple(self._description), self._names)
        check_length(self.config.planned_steps, self.config.warmup_steps, self._rates.values())
        check_share_whole(self._rates, {name: math.prod(shape_of(self.variables[name])) for name in self._rates if name in self.variables})
        warn_of_half_sums(self.config.wire_dtype == "float16", horovod)
        self._make_buckets({name for other in everyone for name in other["present"]})
        if runs_eagerly():
            set_value(self.progress.step, step)
            if not all(other["ahead"] for other in everyone):
                set_value(self.progress.ahead, False)
            before = int(value_of(self.progress.ranks))
            if before not in (0, self._transport.size):
                log.warning(
                    "the state was saved by %d ranks, and there are %d now: a rank without residues starts at zero",
                    before,
                    self._transport.size,
                )
            set_value(self.progress.ranks, self._transport.size)

    def _describe(self, sparse: Sequence[str]) -> dict[str, Any]:
        """What must be the same on all ranks."""
        tensors = {
            name: (list(shape_of(variable)), dtype_of(variable).name, f"rate {self._rates[name]:g}")
            for name, variable in self.variables.items()
        }
        settings = {"sparse_as_dense": self.arguments.sparse_as_dense}
        self._description = describe(self.config.to_dict(), settings, tensors) | {"groups": self._groups, "sparse gradients": list(sparse)}
        return dict(self._description)

    def lacks(self, given: set[str]) -> bool:
        """Whether there is a gradient of a variable that is no member, so that ranks must agree anew.

        Eager steps may have one on one rank alone, so there ranks ask each other, in every step. What a function's gradients are is known
        when it is traced, which ranks may do at any time (for a smaller batch): there each rank sees for itself, and all must see the same.
        """
        more = not given <= self.members
        return int(self._count_ranks(tf.constant(int(more)))) > 0 if tf.executing_eagerly() else more

    # In elastic runs others come later.

    def agreement(self) -> dict[str, Any]:
        """What ranks that come later must know. ahead: a digest of look-ahead's offsets, if there are any."""
        progress = self.progress.as_dict()
        ahead = digest_of(progress["offsets"])
        return self._description | {"members": sorted(self.members), "name": self._names.number, "step": progress["step"], "ahead": ahead}

    def join(self, agreed: Mapping[str, Any], sparse: Sequence[str], given: set[str]) -> None:
        """Take part in what other ranks agreed on (`agreement`). Raises RuntimeError where this rank's settings or tensors are others, or
        in a traced function has gradients that the others' functions, which are not traced again, do not send."""
        compare_ranks([*[agreed] * self._transport.position, self._describe(sparse)], tuple(self._description))
        self._names.use(agreed["name"])
        self._make_buckets(set(agreed["members"]))
        more = sorted(given - self.members)
        if more and not tf.executing_eagerly():
            raise RuntimeError(
                f"the ranks that were here before send no gradient of {', '.join(more)}, and their functions are not traced again: give "
                "the same gradients on every rank (zeros where there is none)"
            )
        self.go_on(agreed["step"], False)

    def go_on(self, step: int, ahead: bool) -> None:
        """Go on where all ranks do. ahead: whether look-ahead's offsets are the same on all; else the next step is sent whole."""
        mine = int(value_of(self.progress.step))
        if mine != step:
            log.warning("training goes on at step %d, and this rank's residues are those of its step %d", step, mine)
        set_value(self.progress.step, step)
        set_value(self.progress.ranks, self._transport.size)
        if not ahead:
            set_value(self.progress.ahead, False)

    def _make_buckets(self, members: set[str]) -> None:
        """Take up which variables have a gradient on some rank."""
        self.members = members
        # Backward gives the last layers' gradients first.
        groups, limit = self._groups, None
        if groups is None:
            groups, limit = [list(reversed(self.variables))], self.config.bucket_bytes
        plan = [part for group in groups for part in split((n for n in group if n in members), self._kind_of, self._bytes_of, limit)]
        self.buckets = [
            Bucket(b, names, self.variables, self.tensors, self.progress, self._transport, self.config) for b, names in enumerate(plan)
        ]

    @property
    def _groups(self) -> list[list[str]] | None:
        """Horovod's `groups` as lists of names."""
        groups = self.arguments.groups
        keys = groups if groups is None or isinstance(groups, int) else [[id(variable) for variable in group] for group in groups]
        return group_names(keys, {id(variable): name for name, variable in self.variables.items()})

    def _kind_of(self, name: str) -> tuple[str, tf.DType, tf.DType]:
        """Its device, dtype, and dtype on the wire."""
        variable, tensor = self.variables[name], self.tensors.get(name)
        dense_dtype = tf.float64 if dtype_of(variable) == tf.float64 else tf.float32
        return variable.device, dtype_of(variable), tensor.wire_dtype if tensor else dense_dtype

    def _bytes_of(self, name: str) -> int:
        return self.variables[name].shape.num_elements() * self.variables[name].dtype.size

    # One step.

    def complete(self, grads: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Gradients of all members, zeros where this rank has none: so `function` is not traced again when it lacks others."""
        return {
            name: grads[name] if name in grads else tf.zeros(variable.shape, dtype_of(variable))
            for name, variable in self.variables.items()
            if name in self.members
        }

    def reduce(self, grads: Mapping[str, tf.Tensor], scale: Any, others_are_finite: Any) -> dict[str, tf.Tensor]:
        """The averages of the gradients of all members, shaped like their variables.

        grads: those of all members (`complete`).  scale: the loss scale, or None for 1.  others_are_finite: whether sparse gradients,
        which do not pass here, are finite on all ranks.
        """
        step = read(self.progress.step)
        flat = {name: tf.reshape(tf.cast(grad, dtype_of(self.variables[name])), [-1]) for name, grad in grads.items()}
        size, position = self._transport.size_and_position()
        unscaling = None if scale is None else 1 / tf.cast(scale, tf.float64)
        now = Now(step, size, position, unscaling, self._must_send_whole(step), tf.minimum(step, 0))
        results = [bucket.exchange(flat, now) for bucket in self.buckets]
        sound = tf.reduce_all([others_are_finite, *(result.sound for result in results)])

        names = [name for bucket in self.buckets for name in bucket.names]
        averages = [
            tf.reshape(average, self.variables[name].shape)
            for name, average in zip(names, (average for result in results for average in result.averages), strict=True)
        ]

        def count_step() -> list[tf.Tensor]:
            assigned = [done for bucket, result in zip(self.buckets, results, strict=True) for done in bucket.assign(result)]
            assigned.append(self.progress.step.assign(step + 1, read_value=False))
            if self.config.lookahead:
                assigned.append(self.progress.ahead.assign(True, read_value=False))
            if now.whole is not False:
                assigned.append(self.progress.whole.assign(now.whole, read_value=False))
            if self.tensors:
                assigned.append(self._look(flat, [updated for result in results for updated in result.updated], now))
            # In a session only what fetches need is run: so averages need the assignments.
            with tf.control_dependencies(assigned):
                return [tf.identity(average) for average in averages]

        def skip_step() -> list[tf.Tensor]:
            """For ScaleCom this step never happened, and gradients are NaN on every rank, as loss scaling expects."""
            with tf.control_dependencies([self.progress.skipped.assign(read(self.progress.skipped) + 1, read_value=False)]):
                return [tf.fill(average.shape, tf.constant(float("nan"), average.dtype)) for average in averages]

        return dict(zip(names, tf.cond(sound, count_step, skip_step), strict=True))

    def _look(self, grads: Mapping[str, tf.Tensor], residues: Sequence[tf.Tensor], now: Now) -> tf.Tensor:
        """Every so many steps, see whether residues keep growing, and tell the user once: what health.Health does, in the graph."""

        def norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            return tf.norm(tf.stack([tf.cast(tf.norm(tensor), tf.float64) for tensor in tensors]))

        def look() -> tf.Tensor:
            own = [tf.cast(grads[name], tf.float64 if grads[name].dtype == tf.float64 else tf.float32) for name in self._compressed]
            gradients = norm(own) * (1.0 if now.scale is None else now.scale)
            norms = tf.concat([read(self.progress.norms)[:, 1:], tf.stack([[norm(residues)], [gradients]])], 1)
            limit = growth_limit(self._rates[name] for name in self._compressed)
            growing = keep_growing(tf.unstack(norms[0]), tf.unstack(norms[1]), limit) & ~read(self.progress.warned)
            message = "scalecom_hvd: " + GROWTH_WARNING.replace("%d", "{}").replace("%.0f", "{}")
            ratio = tf.cast(tf.round(norms[0, -1] / tf.reduce_max(norms[1])), tf.int64)

            def warn() -> tf.Tensor:
                # Not by TensorFlow's log, which many switch off with its banners.
                with tf.control_dependencies([tf.print(tf.strings.format(message, (now.step, ratio)), output_stream=sys.stderr)]):
                    return tf.constant(True)

            warned = tf.cond(growing, warn, lambda: read(self.progress.warned))
            done = [self.progress.norms.assign(norms, read_value=False), self.progress.warned.assign(warned, read_value=False)]
            with tf.control_dependencies(done):
                return tf.constant(True)

        due = tf.equal(now.step % LOOK_EVERY, 0) & ~tf.convert_to_tensor(now.whole)
        return tf.cond(due, look, lambda: tf.constant(False))

    @property
    def _compressed(self) -> list[str]:
        return [tensor.name for bucket in self.buckets for tensor in bucket.compressed]

    def _must_send_whole(self, step: tf.Tensor) -> Any:
        """Whether this step is sent whole: False, or a tensor."""
        whole = step < self.config.warmup_steps if self.config.warmup_steps else False
        if self.config.lookahead and self.tensors:
            whole = ~read(self.progress.ahead) | whole
        return whole

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step taken; see ScaleCom.stats."""
        whole, step = bool(value_of(self.progress.whole)), int(value_of(self.progress.step))
        compressing = [bucket for bucket in self.buckets if bucket.compressed]
        with_offsets = compressing if self.config.lookahead or not whole else []
        size = self._transport.size
        return {
            "step": step,
            "skipped_steps": int(value_of(self.progress.skipped)),
            **step_stats(
                size,
                leader(max(step - 1, 0), 0, size, self.config.leader == "staggered"),
                elements={name: self.variables[name].shape.num_elements() for name in self.members},
                chosen={} if whole else {name: tensor.geometry.k for name, tensor in self.tensors.items()},
                collectives=len(with_offsets) + (len(self.members) if whole else len(self.buckets)),
                offsets=sum(bucket.layout.offsets_bytes for bucket in with_offsets),
                values=0 if whole else sum(bucket.values_bytes for bucket in self.buckets),
                dense=sum(bucket.whole_bytes if whole else bucket.dense_bytes for bucket in self.buckets),
            ),
            "residue_ratio": self._ratio(),
        }

    def _ratio(self) -> float | None:
        residues, gradients = value_of(self.progress.norms)
        return float(residues[-1] / max(gradients)) if max(gradients) > 0 else None


def reduction(arguments: Arguments, reducer_for: Callable[..., Reducer], loss_scale: Callable[[], Any], name: str) -> Callable:
    """What takes the place of Horovod's `_allreduce_grads`: gradients and their variables in, averaged gradients out, None for None.

    reducer_for(variables, present, sparse, arguments) gives the Reducer of these variables, by their refs.  name: Horovod's, for what
    it still reduces itself: sparse gradients, and gradients with respect to tensors, which have no name and no next step.
    """
    itself = horovod._make_allreduce_grads_fn(
        name,
        arguments.device_dense,
        arguments.device_sparse,
        horovod.Compression.none,
        False,
        arguments.op,
        arguments.gradient_predivide_factor,
        None,
        arguments.process_set,
    )

    # Python decides here while a function is traced; AutoGraph would make it the graph's business.
    @tf.autograph.experimental.do_not_convert
    def allreduce_grads(grads: Sequence[Any], variables: Sequence[Any], use_generic_names: bool = False) -> list[Any]:
        if not arguments.process_set.included() or (arguments.process_set.size() == 1 and not is_elastic()):
            return list(grads)
        grads = list(grads)
        if arguments.sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        ours, present, sparse, others = [], [], [], []
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if isinstance(grad, tf.IndexedSlices):
                sparse.append(variable)
                others.append(i)
            elif not isinstance(variable, tf.Variable):
                others.append(i)
            else:
                ours.append(i)
                if grad is not None:
                    present.append(variable)

        finite = tf.constant(True)
        if others:
            reduced = itself([grads[i] for i in others], [variables[i] for i in others], use_generic_names)
            for i, grad in zip(others, reduced, strict=True):
                grads[i] = grad
            slices = [g.values for g in reduced if isinstance(g, tf.IndexedSlices)]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(values)) for values in slices] or [True])
        if not present and not ours:
            return grads

        reducer, names = reducer_for([variables[i] for i in ours], present, sparse, arguments)
        given = reducer.complete({name: grads[i] for i, name in zip(ours, names, strict=True) if grads[i] is not None})
        scale = loss_scale()
        averages = (reducer.function if tf.executing_eagerly() else reducer.reduce)(given, scale, finite)
        for i, name in zip(ours, names, strict=True):
            if name in averages:
                average = averages[name]
                grads[i] = average if grads[i] is None else tf.cast(average, grads[i].dtype)
        return grads

    return allreduce_grads
