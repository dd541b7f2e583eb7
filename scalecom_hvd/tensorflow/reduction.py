"""The function that replaces Horovod's `_allreduce_grads` in its optimizers and tapes.

They reduce through this one attribute. The replacement sends gradients of variables through
ScaleCom's exchange, and leaves all others to Horovod: sparse gradients, and gradients with respect
to tensors, which have no name and no next step.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

import horovod.tensorflow as horovod
import tensorflow as tf

from scalecom_hvd.agreement import is_elastic
from scalecom_hvd.tensorflow.bucket import all_finite
from scalecom_hvd.tensorflow.compressor import MAKE_IT_ONCE, ScaleCom
from scalecom_hvd.tensorflow.transport import Arguments, refuse_graphs_of_tensorflow_1

log = logging.getLogger("scalecom_hvd")

# What Horovod's objects pass for a variable, and Horovod's `_allreduce_grads` or its replacement:
# from gradients, variables and use_generic_names to averages over ranks. None stays None.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
Reduction: TypeAlias = Callable[..., list[Gradient]]

_NO_DERIVATIVE = (
    "ScaleCom sends only some elements of gradients, so averaged gradients have no derivative. "
    "Take the inner gradient with a plain tf.GradientTape, and only the outer gradient with a "
    "DistributedGradientTape"
)
_KEEPER_CHANGED = "a new ScaleCom serves this tape's variables, so their residues start at zero"


def reduction(
    compressor: ScaleCom,
    arguments: Arguments,
    name: str,
    calls_of: dict[Hashable, int] | None = None,
) -> Reduction:
    """The replacement of Horovod's `_allreduce_grads`.

    Args:
        compressor: keeps the residues.
        arguments: the arguments of the optimizer or tape.
        name: Horovod's name for what it still reduces itself.
        calls_of: {variable.ref(): how often its gradient was asked for}, for one tape.
    """
    devices, process_set = (arguments.device_dense, arguments.device_sparse), arguments.process_set
    averages = arguments.op, arguments.gradient_predivide_factor
    plain = horovod.Compression.none, False  # sparse_as_dense is done here
    itself = horovod._make_allreduce_grads_fn(name, *devices, *plain, *averages, None, process_set)

    # Python decides here while a function is traced. AutoGraph would move decisions into the graph.
    @tf.autograph.experimental.do_not_convert
    def allreduce_grads(
        grads: Sequence[Gradient],
        variables: Sequence[tf.Variable | tf.Tensor],
        use_generic_names: bool = False,
    ) -> list[Gradient]:
        refuse_graphs_of_tensorflow_1()
        grads = list(grads)
        if arguments.sparse_as_dense:
            grads = [
                tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad
                for grad in grads
            ]
        if not process_set.included() or (process_set.size() == 1 and not is_elastic()):
            return grads
        is_sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
        ours: list[int] = []
        others: list[int] = []
        for i, variable in enumerate(variables):
            is_ours = isinstance(variable, tf.Variable) and not is_sparse[i]
            is_counter = grads[i] is None and not variable.dtype.is_floating
            (ours if is_ours and not is_counter else others).append(i)
        finite = tf.constant(True)
        if others:
            its = [grads[i] for i in others], [variables[i] for i in others]
            reduced = itself(*its, use_generic_names)
            for i, grad in zip(others, reduced, strict=True):
                grads[i] = grad
            finite = all_finite([grads[i].values for i in others if is_sparse[i]])
        if not ours:
            return grads

        present = [variables[i] for i in ours if grads[i] is not None]
        sparse = [variables[i] for i in others if is_sparse[i]]
        trained = [variables[i] for i in ours]
        stream = 0 if calls_of is None else _stream_of(compressor, trained, calls_of)
        exchange, names = compressor.exchange_for(stream, trained, present, sparse, arguments)
        own = {name: grads[i] for i, name in zip(ours, names, strict=True) if grads[i] is not None}
        # A tape may still be recording, and it cannot differentiate the exchange.
        constants = {name: tf.stop_gradient(grad) for name, grad in own.items()}
        run = exchange.function if tf.executing_eagerly() else exchange.average
        found = run(exchange.complete(constants), compressor.current_loss_scale(), finite)
        found |= {name: tf.cast(found[name], grad.dtype) for name, grad in own.items()}
        if own:
            found = _without_derivative(found, own)
        for i, name in zip(ours, names, strict=True):
            grads[i] = found.get(name)
        return grads

    return allreduce_grads


def _without_derivative(
    averages: dict[str, tf.Tensor], own: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """The averages. Their derivatives by this rank's gradients raise a LookupError.

    Without this, TensorFlow would leave out these derivatives. A custom_gradient would not do:
    saving the function traces it, too.
    """
    prevent = functools.partial(tf.raw_ops.PreventGradient, message=_NO_DERIVATIVE)
    dead_ends = [prevent(input=grad) for grad in own.values()]
    return dict(zip(averages, tf.identity_n([*averages.values(), *dead_ends]), strict=False))


def _stream_of(
    compressor: ScaleCom, variables: Sequence[tf.Variable], calls_of: dict[Hashable, int]
) -> int:
    """Which series of gradients these are: the first, second, ... that one tape was asked for."""
    if not calls_of:
        _notice_changed_keeper(compressor, variables)
    refs = [variable.ref() for variable in variables]
    stream = max((calls_of.get(ref, 0) for ref in refs), default=0)
    calls_of.update(dict.fromkeys(refs, stream + 1))
    return stream


def _notice_changed_keeper(compressor: ScaleCom, variables: Iterable[tf.Variable]) -> None:
    """Raise ValueError if an eager step makes a new ScaleCom every time; warn if it may be so.

    What the old one had not sent would be lost. So each variable has a note: which ScaleCom keeps
    its residue for tapes, for how many calls, and whether it began in an eager step.
    """
    eager, warned = tf.executing_eagerly(), False
    for variable in variables:
        keeper, calls, was_eager = getattr(variable, "_scalecom_keeper", (None, 0, eager))
        if keeper is not None and keeper() is compressor:
            variable._scalecom_keeper = keeper, calls + 1, was_eager
            continue
        variable._scalecom_keeper = weakref.ref(compressor), 1, eager
        if keeper is None:
            continue
        if keeper() is None and calls == 1 and was_eager and eager:
            raise ValueError(f"{_KEEPER_CHANGED}. {MAKE_IT_ONCE}")
        if not warned:
            log.warning("%s. If this is the same training: %s", _KEEPER_CHANGED, MAKE_IT_ONCE)
            warned = True
