"""The exchange of one set of variables' gradients, as a part of the graph that computes them.

One step, per bucket:

    average  all gradients are here -> the leader chooses -> offsets and scales
             -> take and accumulate -> all-reduce -> scatter
    commit   all buckets are here -> if all ranks' gradients were finite, variables take the
             updated residues

TensorFlow runs these operations as soon as their inputs are there, so buckets overlap with backward
and with each other. Nothing is assigned before the whole step is known to count, so a step that is
skipped, or dies in the middle, changes nothing.

In elastic runs, new ranks must learn how far the others' exchanges have come. They cannot ask in a
training step: a function that was traced before they came is not traced again, so no rank would
answer. Therefore all ranks `meet` once whenever Horovod starts, before any step. A new rank keeps
here what the others told it until it makes the exchange.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from scalecom_hvd import agreement
from scalecom_hvd.bucket_layout import group_names, split, step_stats
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.schedule import leader
from scalecom_hvd.tensorflow.bucket import Bucket, Now
from scalecom_hvd.tensorflow.residues import (
    CompressedTensor,
    Progress,
    set_value,
    shares_of,
    value_of,
)
from scalecom_hvd.tensorflow.transport import Arguments, Transport
from scalecom_hvd.training_warnings import (
    GROWTH_WARNING,
    LOOK_EVERY,
    check_run,
    growth_limit,
    keep_growing,
    ratio_of,
)

log = logging.getLogger("scalecom_hvd")

_OTHER_RANKS = (
    "the state was saved by %d ranks, but there are %d now. A rank without saved residues starts "
    "with zero residues"
)
_OTHER_STEP = "training goes on at step %d, but this rank's residues are from step %d"

# {label: what other ranks agreed on}, for exchanges that this process has not made yet. None until
# the ranks have met.
_kept: dict[str, dict[str, Any]] | None = None


@dataclass(eq=False)
class Exchange:
    """The exchange of a fixed set of variables.

    Attributes:
        members: names of the variables that have a gradient on some rank. Only these take part; a
            rank without their gradients sends zeros.
        buckets: of the members.
        function: `average` as a function of TensorFlow, for eager steps.
    """

    variables: dict[str, tf.Variable]  # by name: all whose gradients were asked for
    tensors: dict[str, CompressedTensor]  # the compressed ones among them
    rates: Mapping[str, float]  # of the variables
    progress: Progress  # how far the exchange has come
    config: ScaleComConfig
    arguments: Arguments  # of its optimizer or tape
    sparse: Sequence[str]  # names of other variables, whose gradients are sparse

    def __post_init__(self) -> None:
        self.members: set[str] = set()
        self.buckets: list[Bucket] = []
        self.function = tf.function(self.average, autograph=False)
        self._names = agreement.Names()
        self._transport = Transport(self.arguments, self._names)
        # Make a function, because operations that run one by one have no names.
        self._count_ranks = tf.function(partial(self._transport.sum, name="more"), autograph=False)
        described = {
            name: (list(v.shape), v.dtype.name, f"rate {self.rates[name]:g}")
            for name, v in self.variables.items()
        }
        settings = {"sparse_as_dense": self.arguments.sparse_as_dense}
        # What must be the same on all ranks.
        self._description = agreement.describe(self.config.to_dict(), settings, described)
        names = {variable.ref(): name for name, variable in self.variables.items()}
        self._groups = group_names(self.arguments.groups, names)
        self._description |= {"groups": self._groups, "sparse gradients": self.sparse}

    def agree(self, present: Iterable[str], residues_of: tuple[int, int] | None) -> None:
        """Compare settings and tensors of all ranks; agree on members, names and the step.

        This blocks, so ranks do it once, where every rank surely comes: at the first call for these
        variables. If ranks differ, or two have the residues of one, all raise RuntimeError.

        Args:
            present: names of variables that have a gradient on this rank.
            residues_of: of how many ranks, and of which one, this rank has residues, if known.
        """
        mine = self._description | {
            "present": list(present),
            "name": self._names.numbers.claim(),
            "step": int(value_of(self.progress.step)),
            "residues_of": residues_of,
        }
        everyone = self._transport.gather_objects(mine, "agreement")
        agreement.check_residues_of(everyone)
        step = agreement.agree(everyone, list(self._description), self._names)
        shapes = {name: tuple(variable.shape) for name, variable in self.variables.items()}
        check_run(self.config, self.rates, shapes)
        self._make_buckets({name for theirs in everyone for name in theirs["present"]})
        set_value(self.progress.step, step)
        before, size = int(value_of(self.progress.ranks)), self.arguments.process_set.size()
        if before not in (0, size):
            log.warning(_OTHER_RANKS, before, size)
        set_value(self.progress.ranks, size)

    def lacks(self, given: set[str]) -> bool:
        """Whether a variable that is no member has a gradient, so that ranks must agree again.

        In eager steps this may be true on one rank only, so ranks ask each other in every step. In
        a traced function no rank asks, because ranks may trace it at different times (for a smaller
        batch). There each rank decides for itself, and all must come to the same result.
        """
        more = int(not given <= self.members)
        return bool(self._count_ranks(tf.constant(more)) if tf.executing_eagerly() else more)

    # In elastic runs, new ranks join later.

    def agreement(self) -> dict[str, Any]:
        """What ranks that join later must know."""
        return self._description | {
            "members": sorted(self.members),
            "name": self._names.number,
            "step": int(value_of(self.progress.step)),
        }

    def join(self, agreed: Mapping[str, Any], given: set[str]) -> None:
        """Take part in an exchange that other ranks agreed on (`agreement`).

        Raises:
            RuntimeError: this rank's settings or tensors differ from theirs. Or this rank has, in a
                traced function, gradients that the others' functions do not send; those functions
                are not traced again.
        """
        mine, position = self._description, self.arguments.process_set.rank()
        agreement.compare_ranks([*[agreed] * max(position, 1), mine], list(mine))
        self._names.use(agreed["name"])
        self._make_buckets(set(agreed["members"]))
        more = sorted(given - self.members)
        if more and not tf.executing_eagerly():
            raise RuntimeError(
                f"ranks that trained before send no gradient of {', '.join(more)}, and their "
                "functions are not traced again. Give the same gradients on every rank (zeros for "
                "a missing gradient)"
            )
        self.go_on(agreed["step"])

    def go_on(self, step: int) -> None:
        """Go on at this step, as all ranks do."""
        mine = int(value_of(self.progress.step))
        if mine != step:
            log.warning(_OTHER_STEP, step, mine)
        set_value(self.progress.step, step)
        set_value(self.progress.ranks, self.arguments.process_set.size())

    def _make_buckets(self, members: set[str]) -> None:
        self.members = members
        groups, limit = self._groups, None
        if groups is None:
            # Backward gives the last layers' gradients first.
            groups, limit = [list(reversed(self.variables))], self.config.bucket_bytes
        bytes_of = {name: math.prod(v.shape) * v.dtype.size for name, v in self.variables.items()}
        rest = self.variables, self.tensors, self._transport, self.config
        self.buckets = []
        for group in groups:
            own = [name for name in group if name in members]
            for names in split(own, self._kind_of, bytes_of.__getitem__, limit):
                self.buckets.append(Bucket(len(self.buckets), names, *rest))

    def _kind_of(self, name: str) -> tuple[str, tf.DType, tf.DType]:
        """A variable's device, its dtype, and its dtype on the wire."""
        variable, tensor = self.variables[name], self.tensors.get(name)
        dense_dtype = tf.float64 if variable.dtype == tf.float64 else tf.float32
        wire_dtype = tensor.wire_dtype if tensor else dense_dtype
        return variable.device, variable.dtype, wire_dtype

    # One step.

    def complete(self, grads: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Gradients of all members, with zeros for those that this rank lacks.

        So `function` is not traced again when this rank lacks other gradients than before.
        """
        return {
            name: grads[name] if name in grads else tf.zeros(variable.shape, variable.dtype)
            for name, variable in self.variables.items()
            if name in self.members
        }

    def average(
        self, grads: Mapping[str, tf.Tensor], scale: tf.Tensor | None, others_are_finite: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """{name: average} of the gradients of all members; NaN in a step that does not count.

        Args:
            grads: the gradients of all members, from `complete`.
            scale: the loss scale, or None for 1.
            others_are_finite: whether sparse gradients, which do not pass through here, are finite
                on all ranks.
        """
        step = self.progress.step.read_value()
        flat = {
            name: tf.reshape(tf.cast(grad, self.variables[name].dtype), [-1])
            for name, grad in grads.items()
        }
        size, position = self._transport.size_and_position()
        unscaling = None if scale is None else 1 / tf.cast(scale, tf.float64)
        whole = step < self.config.warmup_steps if self.config.warmup_steps else False
        now = Now(step, size, position, unscaling, whole)
        results = [bucket.average(flat, now) for bucket in self.buckets]
        sound = tf.reduce_all([others_are_finite, *(result.sound for result in results)])

        averages = {
            name: tf.reshape(average, self.variables[name].shape)
            for bucket, result in zip(self.buckets, results, strict=True)
            for name, average in zip(bucket.names, result.averages, strict=True)
        }

        def commit() -> dict[str, tf.Tensor]:
            for bucket, result in zip(self.buckets, results, strict=True):
                bucket.commit(result)
            self.progress.step.assign(step + 1)
            tensors = [tensor for bucket in self.buckets for tensor in bucket.compressed]
            if tensors:
                own = [flat[tensor.name] for tensor in tensors]
                compresses = ~tf.convert_to_tensor(now.whole)
                if (times := self.config.outliers) is not None:
                    scale = partial(self._scale_after_outliers, tensors, own, now, times)
                    tf.cond(compresses, scale, tf.no_op)
                updated = [residue for result in results for residue in result.updated]
                due = tf.equal(step % LOOK_EVERY, 0) & compresses
                tf.cond(due, partial(self._look, tensors, own, updated, now), tf.no_op)
            return averages

        def skip() -> dict[str, tf.Tensor]:
            """For ScaleCom the step never happened; gradients are NaN, as loss scaling expects."""
            self.progress.skipped.assign_add(1)
            return {
                name: tf.fill(average.shape, tf.constant(math.nan, average.dtype))
                for name, average in averages.items()
            }

        return tf.cond(sound, commit, skip)

    def _scale_after_outliers(
        self,
        tensors: Sequence[CompressedTensor],
        grads: Sequence[tf.Tensor],
        now: Now,
        times: float,
    ) -> tf.Operation:
        """Scale residues down whose gradients are outliers."""
        norms = _norms(grads) * (1.0 if now.scale is None else now.scale)
        recent = tf.stack([tensor.recent.read_value() for tensor in tensors])
        shares, recent = shares_of(norms, recent, times)
        for tensor, own, share in zip(tensors, tf.unstack(recent), tf.unstack(shares), strict=True):
            tensor.recent.assign(own)
            tf.cond(share < 1, partial(_scale, tensor.residue, share), tf.no_op)
        return tf.no_op()

    def _look(
        self,
        tensors: Sequence[CompressedTensor],
        grads: Sequence[tf.Tensor],
        residues: Sequence[tf.Tensor],
        now: Now,
    ) -> tf.Operation:
        """Warn the user once if residues keep growing: training_warnings, in the graph."""
        gradients = tf.norm(_norms(grads)) * (1.0 if now.scale is None else now.scale)
        waits = tf.norm(_norms(residues)) / self.config.beta
        newest = tf.stack([[waits], [gradients]])
        norms = tf.concat([self.progress.norms.read_value()[:, 1:], newest], 1)
        limit = growth_limit((self.rates[tensor.name] for tensor in tensors), self.config)
        growing = keep_growing(tf.unstack(norms[0]), tf.unstack(norms[1]), limit)
        message = "scalecom_hvd: " + GROWTH_WARNING.replace("%d", "{}").replace("%.0f", "{}")
        ratio = tf.cast(tf.round(norms[0, -1] / tf.reduce_max(norms[1])), tf.int64)

        def warn() -> tf.Operation:
            # Not through TensorFlow's log, which many users switch off with its banners.
            return tf.print(tf.strings.format(message, (now.step, ratio)), output_stream=sys.stderr)

        warned = self.progress.warned.read_value()
        tf.cond(growing & ~warned, warn, tf.no_op)
        self.progress.norms.assign(norms)
        return self.progress.warned.assign(warned | growing, read_value=False)

    def stats(self) -> dict[str, int | float | None]:
        """Numbers of the last step taken; see ScaleCom.stats."""
        step = int(value_of(self.progress.step))
        whole = 0 < step <= self.config.warmup_steps
        with_offsets = [] if whole else [bucket for bucket in self.buckets if bucket.compressed]
        size, staggered = self.arguments.process_set.size(), self.config.leader == "staggered"
        sent = [bucket.bytes_sent(size, whole) for bucket in self.buckets]
        last = step_stats(
            size,
            leader(max(step - 1, 0), 0, size, staggered),
            {name: math.prod(self.variables[name].shape) for name in self.members},
            {} if whole else {name: tensor.lanes.k for name, tensor in self.tensors.items()},
            len(with_offsets) + (len(self.members) if whole else len(self.buckets)),
            offsets=sum(bucket.layout.message_bytes for bucket in with_offsets),
            values=sum(values for values, _ in sent),
            dense=sum(dense for _, dense in sent),
        )
        skipped = int(value_of(self.progress.skipped))
        ratio = ratio_of(value_of(self.progress.norms))
        return {"step": step, "skipped_steps": skipped, **last, "residue_ratio": ratio}


def _norms(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    return tf.stack([_norm(tensor) for tensor in tensors])


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor's norm, in float64. Squares of large elements may overflow in float32."""
    wide = tf.cast(tensor, tf.float64 if tensor.dtype == tf.float64 else tf.float32)
    norm = tf.cast(tf.norm(wide), tf.float64)
    return tf.cond(tf.math.is_inf(norm), lambda: tf.norm(tf.cast(tensor, tf.float64)), lambda: norm)


def _scale(residue: tf.Variable, share: tf.Tensor) -> tf.Operation:
    return residue.assign(residue * tf.cast(share, residue.dtype), read_value=False)


def have_met() -> bool:
    """Whether ranks have met since Horovod started."""
    return _kept is not None


def meet(exchanges: Iterable[Exchange]) -> None:
    """Meet all ranks, and go on at the agreed step. Blocks until all ranks have called it.

    Raises UnknownError if a rank is lost. exchanges: all that this process takes part in.
    """
    global _kept
    _kept = None
    mine: dict[str, Exchange] = {}
    for exchange in exchanges:
        label = exchange.progress.label
        same = sum(1 for other in mine if other.partition(".")[0] == label)
        mine[f"{label}.{same}" if same else label] = exchange
    transport = Transport(Arguments(), agreement.Names())
    agreements = {label: exchange.agreement() for label, exchange in mine.items()}
    everyone = transport.gather_objects(agreements, "agreements")
    agreed: dict[str, dict[str, Any]] = {}
    for theirs in reversed(everyone):  # the first rank's agreement counts, as its weights do
        agreed |= theirs
    for label, exchange in mine.items():
        exchange.go_on(agreed.pop(label)["step"])
    _kept = agreed


def take_agreement(label: str) -> dict[str, Any] | None:
    """What others agreed on about an exchange that is about to be made; None: it is new to all."""
    found = next((known for known in _kept or {} if known.partition(".")[0] == label), None)
    return None if found is None else _kept.pop(found)
