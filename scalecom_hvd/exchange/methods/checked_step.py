"""Checks, in every step, that a method's step keeps its contract.

Without the checks, each of these mistakes would silently give wrong numbers, different ones on
every rank. Only shapes and counts are looked at, never numbers, so this costs nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from scalecom_hvd.exchange.methods.base import BucketCollectives, BucketStep, Method, State, Step


def checked_step(
    method: Method, bucket: BucketStep, collectives: BucketCollectives, state: State
) -> Step[State | None]:
    """The method's step, or its whole_step, for one bucket. The errors say what is wrong."""
    make = method.whole_step if bucket.whole else method.step
    name = f"{type(method).__name__}.{make.__name__}"
    steps: Any = make(bucket, collectives, state)
    if not isinstance(steps, Generator):
        raise TypeError(
            f"{name} must be a generator: write `average = yield from collectives.average(values)`"
        )
    versions = _versions(state)
    new = yield from steps
    if new is not None and not isinstance(new, State):
        raise TypeError(
            f"{name} must return the next State, made by dataclasses.replace(state, ...), or None, "
            f"not {type(new).__name__}"
        )
    arrives = new.arrives.work if new is not None and new.arrives is not None else None
    for wait in collectives.waits:
        if not wait.is_over and wait.work is not arrives:
            raise RuntimeError(
                f"{name} did not wait for {wait.what!r}: write `result = yield from "
                "collectives...`, and use what it gives"
            )
    if not bucket.whole and not bucket.has_received:
        raise RuntimeError(
            f"{name} ended without bucket.receive(), so this bucket's average would be zero. Call "
            "receive() with what was received, even if this is nothing. Perhaps a `yield from` is "
            "missing"
        )
    if _versions(state) != versions:
        raise RuntimeError(
            f"{name} changed its state in place, but the step may still be skipped. Make new "
            "tensors, and return them by dataclasses.replace(state, tensors=...)"
        )
    if new is not None:
        _check_state(name, bucket, state, new)
    return new


def _versions(state: State) -> list[int]:
    values = [value for own in state.tensors.values() for value in own.values()]
    tensors = [v for v in [*values, *state.method.values()] if isinstance(v, torch.Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _check_state(name: str, bucket: BucketStep, old: State, new: State) -> None:
    if new.method.keys() != old.method.keys():
        raise ValueError(
            f"{name} returned {sorted(new.method)} for the whole method, but init_method() gave "
            f"{sorted(old.method)}"
        )
    for tensor, own in new.tensors.items():
        before = old.tensors.get(tensor)
        if before is None or before.keys() - own.keys():
            raise ValueError(
                f"{name} returned {sorted(own)} as the state of {tensor!r}, but init() gave "
                f"{None if before is None else sorted(before)}"
            )
        for what, value in own.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{name}: {what!r} of {tensor} must be a tensor, not {value!r}")
            first = before.get(what, value)
            if (value.shape, value.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"{name}: {what!r} of {tensor} became {tuple(value.shape)}, {value.dtype}, but "
                    f"was {tuple(first.shape)}, {first.dtype} before"
                )
            if bucket.will_overwrite(value):
                raise ValueError(
                    f"{name}: {what!r} of {tensor} is a view of the bucket's accumulators or "
                    "gradients, which the next step overwrites: clone it"
                )
