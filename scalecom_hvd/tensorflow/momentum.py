"""Keras optimizers' momentum, made quasi-hyperbolic (as exchange/momentum.py does for PyTorch).

Before the update, the slot m of the last step becomes (1 - kappa) * m + kappa * a * g. Here a * g
is what m would be if every gradient had been g, so the optimizer's update keeps the mix. Afterwards
m is solved for, so checkpoints hold the momentum itself. g is the gradient that the update uses: it
is averaged and clipped. This is wrapped around the one method by which Keras updates variables. A
step that is skipped, or that only adds gradients up, does not call it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scalecom_hvd.quasi_hyperbolic import UNKNOWN, kappa_of
from scalecom_hvd.tensorflow.compressor import ScaleCom
from scalecom_hvd.tensorflow.exchange import Exchange

log = logging.getLogger("scalecom_hvd")

# Names under which Keras's optimizers keep momenta, and those of legacy optimizers.
_LISTS = ("momentums", "_momentums", "_m")
_SLOTS = ("momentum", "m")

Sizes = tuple[tf.Tensor, tf.Tensor]  # a before the update, and after it


def _of_sgd(optimizer: Any) -> Sizes:
    """SGD's velocity has the learning rate, and a sign: m <- mu * m - lr * g."""
    legacy = isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
    rate = optimizer._decayed_lr(tf.float32) if legacy else optimizer.learning_rate
    before, after = _of_average(optimizer, optimizer.momentum)
    size = tf.math.divide_no_nan(-_number(rate), 1 - _number(optimizer.momentum))
    return size * before, size * after


def _of_average(optimizer: Any, decay: Any) -> Sizes:
    """An average that begins at zero is, after t steps, 1 - decay ** t times the gradient."""
    decay, steps = _number(decay), _number(optimizer.iterations)
    return 1 - decay**steps, 1 - decay ** (steps + 1)


# {name of an optimizer's class: a function of the optimizer that gives `Sizes` before the update}.
# A subclass is taken for its base.
MOMENTA: dict[str, Callable[[Any], Sizes]] = {
    "SGD": _of_sgd,
    "Lion": lambda optimizer: _of_average(optimizer, optimizer.beta_2),
    **dict.fromkeys(
        ("Adam", "AdamW", "Nadam", "Adamax"),
        lambda optimizer: _of_average(optimizer, optimizer.beta_1),
    ),
}


def mix_momentum(made: Any, compressor: ScaleCom) -> None:
    """Make the momentum of a class that Horovod made for one optimizer quasi-hyperbolic."""
    legacy = issubclass(made, tf.keras.optimizers.legacy.Optimizer)
    method = "_distributed_apply" if legacy else "_internal_apply_gradients"
    update = getattr(made, method, None)
    if update is None:
        _warn_of_unknown(made.__name__)
        return

    # Python decides here while a function is traced.
    @tf.autograph.experimental.do_not_convert
    def mixed_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        *others, last = args
        grads_and_vars = list(last)
        mixes = _mixes_of(self, compressor, grads_and_vars)
        for slot, gradient, kappa, (before, _) in mixes:
            _mix(slot, gradient, kappa, before)
        result = update(self, *others, grads_and_vars, **kwargs)
        for slot, gradient, kappa, (_, after) in mixes:
            # (m - kappa * a * g) / (1 - kappa) is the same mix with this share.
            _mix(slot, gradient, -kappa / (1 - kappa), after)
        return result

    setattr(made, method, mixed_update)


def _mix(slot: tf.Variable, gradient: tf.Tensor, share: tf.Tensor, size: tf.Tensor) -> None:
    """Mix a share of the gradient into a momentum. Shares and sizes are float64."""
    own, others = tf.cast(1 - share, slot.dtype), tf.cast(share * size, slot.dtype)
    slot.assign(own * slot + others * tf.cast(gradient, slot.dtype))


def _mixes_of(
    optimizer: Any,
    compressor: ScaleCom,
    grads_and_vars: Sequence[tuple[tf.Tensor | tf.IndexedSlices, tf.Variable]],
) -> list[tuple[tf.Variable, tf.Tensor, tf.Tensor, Sizes]]:
    """The momenta that are mixed in the update that is about to begin: with what, and how."""
    late = []
    for gradient, variable in grads_and_vars:
        exchange, rate = compressor.last_exchange(variable)
        if exchange and rate > 1 and isinstance(gradient, tf.Tensor):  # dense and compressed
            late.append((gradient, variable, (exchange, rate)))
    if not late or _has_none(optimizer):
        return []
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    momentum = next((MOMENTA[name] for name in names if name in MOMENTA), None)
    slots = [_slot_of(optimizer, variable) for _, variable, _ in late]
    found = [slot for slot in slots if slot is not None]
    if momentum is None or len(found) < len(slots):
        if momentum is not None or found:
            _warn_of_unknown(names[0])
        return []
    sizes = momentum(optimizer)
    kappas = {key: _kappa(*key) for key in dict.fromkeys(key for *_, key in late)}
    return [
        (slot, gradient, kappas[key], sizes)
        for slot, (gradient, _, key) in zip(found, late, strict=True)
    ]


def _kappa(exchange: Exchange, rate: float) -> tf.Tensor:
    """kappa in the step whose averages are here."""
    config, kappa = exchange.config, kappa_of(rate, exchange.config.nu)
    # In the first step the momentum is still the gradient. Of whole gradients, nothing waits.
    mixes = exchange.progress.step.read_value() > max(1, config.warmup_steps)
    return tf.where(mixes, tf.constant(kappa, tf.float64), tf.constant(0, tf.float64))


@functools.cache
def _warn_of_unknown(name: str) -> None:
    log.warning(UNKNOWN, name)


def _has_none(optimizer: Any) -> bool:
    """Whether an optimizer that may have momentum has none, as SGD by default."""
    legacy = isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
    momentum = getattr(optimizer, "_momentum" if legacy else "momentum", None)
    return isinstance(momentum, (int, float)) and momentum == 0


def _slot_of(optimizer: Any, variable: tf.Variable) -> tf.Variable | None:
    """The variable's momentum. None if there is none where this version of Keras keeps it."""
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        names = [name for name in _SLOTS if name in optimizer.get_slot_names()]
        return optimizer.get_slot(variable, names[0]) if names else None
    slots = next((s for name in _LISTS if (s := getattr(optimizer, name, None))), None)
    index = getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(variable))
    return None if slots is None or index is None else slots[index]


def _number(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)
