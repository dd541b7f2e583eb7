"""Finds the local steps of this process by the memory addresses of their parameters.

broadcast_parameters and elastic states ask this of the tensors that they are given.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import weakref
from typing import TYPE_CHECKING

import torch

from scalecom_hvd.exchange.background_thread import alive, wait_for_kept
from scalecom_hvd.exchange.gradients import local_part

if TYPE_CHECKING:
    from scalecom_hvd.exchange.local.local_steps import LocalSteps

_alive: weakref.WeakValueDictionary[int, LocalSteps] = weakref.WeakValueDictionary()


def register(local: LocalSteps, travels: bool) -> None:
    """Remember local steps as long as they live. travels: whether averages do while steps go on."""
    _alive[id(local)] = local
    if travels:
        # A script may end while averages travel. The rank that ends first shuts Horovod down, and
        # the others would fail. This is registered after Horovod's function, so it is called first.
        atexit.unregister(collect_all)
        atexit.register(collect_all)


every_one = functools.partial(alive, _alive)  # all local steps of this process


def rounds_of(params: dict[str, object] | list[object]) -> list[LocalSteps]:
    """The local steps whose parameters are among these.

    params: what broadcast_parameters takes: a state_dict, or a list of (name, tensor) or of
    tensors. Anything else, which Horovod refuses, has none.
    """
    if isinstance(params, dict):
        tensors = list(params.values())
    elif isinstance(params, list):
        tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    else:
        return []
    # A state_dict may hold other objects too.
    addresses = {local_part(t).data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    if any(local.worker.has_any_at(addresses) for local in alive(_alive)):
        # A deleted optimizer lives on in a reference cycle with its own class. The parameters of
        # another may now lie at the addresses of its parameters.
        gc.collect()
    return [local for local in alive(_alive) if local.worker.has_any_at(addresses)]


def collect_all(addresses: set[int] | None = None) -> None:
    """Wait for averages that travel to the parameters at these addresses. None: for all."""
    for local in alive(_alive):
        # At a script's end, the ranks of a node may wait for one that ends with an error.
        if local.node is None if addresses is None else local.worker.has_any_at(addresses):
            with contextlib.suppress(Exception):  # what failed has been raised already
                local.collect()
    if addresses is None:
        wait_for_kept()
