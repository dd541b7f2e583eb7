"""What torch.compile must run as it is: the library's hooks, and what an optimizer adds to a step.

The exchange waits for ranks and calls C, so nothing of it can be compiled, even if a script
compiles its whole training step. Imports nothing of this package.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

# What this thread compiles frames with; None: nothing. If PyTorch lacks it, calls take longer.
_eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_callback = getattr(_eval_frame, "get_eval_frame_callback", None)
P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """The same function. torch.compile leaves it, and all that it calls, as it is."""
    disabled: Callable[P, T] | None = None

    @functools.wraps(function)
    def as_it_is(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        # torch.compiler.disable imports all of Dynamo, and its functions take microseconds.
        if "torch._dynamo" not in sys.modules or (_callback is not None and _callback() is None):
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    # The mark that torch.compiler.disable sets.
    vars(as_it_is)["_torchdynamo_disable"] = True
    return as_it_is
